"""What a recipe cannot hold is refused in one line that names the field, wherever it comes from."""

from __future__ import annotations

import datetime
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedstrata.algorithms import AXES, NAMED
from fedstrata.core.errors import FedstrataError, RecipeError
from fedstrata.recipes.catalog import RECIPES
from fedstrata.recipes.schema import Recipe, load
from fedstrata.recipes.tables import DEEPEST, check_values
from fedstrata.registry import parameters
from fedstrata.tasks.models import MODELS
from fedstrata.tasks.partitions import PARTITIONS

HUGE = 10**4000
"""About as long as Python writes numbers in decimal."""


def nested(depth: int) -> Any:
    """A number in so many lists."""
    return 1 if depth == 0 else [nested(depth - 1)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2**63, "paper.x = 9223372036854775808: input should be a whole number of 64 bits"),
        (-(2**63) - 1, "paper.x = -9223372036854775809: "),
        (HUGE, "paper.x = about 10**4000: "),
        (-(HUGE**3), "paper.x = about -10**12000: "),
        ([1, [2, {"y": 10**400}]], "paper.x.y = about 10**400: "),
        (math.inf, "paper.x = inf: input should be a finite number"),
        (-math.inf, "paper.x = -inf: "),
        (math.nan, "paper.x = nan: "),
        ("\ud800", r"paper.x = '\ud800': input should be text that UTF-8 can say"),
        ({1: 2}, "paper.x.1 = 1: keys should be strings"),
        (datetime.date(2024, 1, 1), "paper.x = datetime.date(2024, 1, 1): a recipe holds no date"),
        (b"x", "paper.x = b'x': a recipe holds no bytes"),
        ({1, 2}, "paper.x = {1, 2}: a recipe holds no set"),
        (nested(DEEPEST - 1), "paper.x: is nested more than 32 deep"),
        (nested(300), "paper.x: is nested more than 32 deep"),
    ],
    ids=lambda value: str(value)[:30] if not isinstance(value, int) else f"{value.bit_length()} bits",
)
def test_what_no_recipe_holds(value: Any, message: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load({"paper": {"x": value}})
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), 1e308, 5e-324, True, "ü\n", [], {}, nested(DEEPEST - 2)])
def test_what_a_recipe_holds_comes_back(value: Any) -> None:
    recipe = load({"paper": {"x": value}})
    assert recipe.paper == {"x": value}
    assert load(tomllib.loads(recipe.to_toml())) == recipe


def test_a_table_that_holds_itself() -> None:
    table: dict[str, Any] = {}
    table["x"] = table
    with pytest.raises(RecipeError, match=r"^(x\.)+x: is nested"):
        check_values(table)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = " + "[" * 5000 + "]" * 5000, "is nested too deeply"),
        ("x = " + "{a = " * 2000 + "1" + "}" * 2000, "is nested too deeply"),
        ("seed = 1" + "0" * 5000, "has a number of more than 4300 digits"),
        ("seed = 1" + "0" * 400, "seed = about 10**400: input should be a whole number of 64 bits"),
        ("seed = 0x" + "f" * 4000, "seed = about 10**4816: "),
        ("training.lr = 1e400", "training.lr = inf: input should be a finite number"),
        (f"[{'.'.join('a' * 3000)}]\nx = 1", f"{'.'.join('a' * (DEEPEST + 1))}: is nested more than 32 deep"),
    ],
    ids=lambda text: text[:12],
)
def test_files_that_no_parser_likes(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(RecipeError) as refused:
        load(tmp_path / "bad.toml")
    assert message in str(refused.value)
    key, _, value = text.partition(" = ")
    if "." not in key and message.startswith(("is nested", "has a number")):
        with pytest.raises(RecipeError) as refused:
            load({}, settings=[f"{key}={value}"])
        assert message in str(refused.value)
        assert len(str(refused.value)) < 1200


# --- whatever comes --------------------------------------------------------------------------------------------------

TABLES = {
    table: list(entry.annotation.model_fields)
    for table, entry in Recipe.model_fields.items()
    if hasattr(entry.annotation, "model_fields")
}
OPTIONS = sorted(
    {option for rules in AXES.values() for rule in rules.values() for option in parameters(rule)}
    | {option for scheme in PARTITIONS.values() for option in parameters(scheme)}
)
WORDS = [*NAMED, *(name for rules in AXES.values() for name in rules), *PARTITIONS, *MODELS, "nodes", "uniform", "adam"]

numbers = (
    st.integers(-2, 9)
    | st.integers()
    | st.floats()
    | st.sampled_from([10**400, -HUGE, 2**63 - 1, 2**63, -(2**63), 1e308, -0.0, math.inf, math.nan])
)
scalars = (
    numbers | st.booleans() | st.none() | st.dates() | st.sampled_from(WORDS) | st.text("aé\n\ud800 .", max_size=3)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", *OPTIONS]), inner, max_size=3),
    max_leaves=6,
)
rules = st.fixed_dictionaries(
    {"name": st.sampled_from(WORDS)}, optional=dict.fromkeys(OPTIONS, values)
) | st.dictionaries(st.sampled_from(["name", *AXES, *OPTIONS]), values, max_size=3)


def sections(algorithm: Any, partition: Any, others: Any) -> Any:
    """Tables with the recipe's own sections, and few keys in each."""
    few = {name: st.dictionaries(st.sampled_from(keys), others, max_size=2) for name, keys in TABLES.items()}
    task = {key: {"partition": partition, "model": rules}.get(key, others) for key in TABLES["task"]}
    few |= {"task": st.fixed_dictionaries({}, optional=task), "algorithm": algorithm, "paper": rules}
    return st.fixed_dictionaries({}, optional=few)


def with_own_options(known: Mapping[str, Any]) -> Any:
    """One of these by its name, with some of the options that it has."""

    def table(name: str) -> Any:
        options = dict.fromkeys(parameters(known[name]), numbers | st.sampled_from(["step", "factor", "classes", True]))
        return st.fixed_dictionaries({"name": st.just(name)}, optional=options)

    return st.sampled_from(list(known)).flatmap(table)


composed = st.fixed_dictionaries({}, optional={axis: with_own_options(known) for axis, known in AXES.items()})
fitting = st.fixed_dictionaries(
    {},
    optional={
        "algorithm": composed,
        "task": st.fixed_dictionaries({"partition": with_own_options(PARTITIONS)}),
        "training": st.dictionaries(st.sampled_from(TABLES["training"]), numbers, max_size=2),
    },
)
wild = st.dictionaries(st.sampled_from(list(Recipe.model_fields)), values, max_size=3)
tables = sections(rules, rules, values) | wild | fitting


def is_refused_or_comes_back(read: Any) -> None:
    """Either one line, or a recipe whose own TOML gives it again."""
    refused = []
    try:
        recipe = read()
    except FedstrataError as error:
        refused = str(error).splitlines()
    if refused:
        assert len(refused) == 1
        return
    assert load(tomllib.loads(recipe.to_toml())) == recipe
    assert isinstance(recipe.essence(), dict)
    assert recipe.label


@given(table=tables)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_table_is_refused_in_a_line_or_comes_back(table: dict[str, Any]) -> None:
    is_refused_or_comes_back(lambda: load(table))


@given(
    name=st.sampled_from(sorted(RECIPES.names())),
    at=st.integers(0, 2000),
    lost=st.integers(0, 20),
    put=st.sampled_from(
        ["", "[", "]]", "{", "=", "\n", '"', "'''", ".", "e400", "0" * 400, "nan", "\x00", "é", "x", "#"]
    ),
)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_refused_in_a_line_or_is_another_recipe(
    name: str, at: int, lost: int, put: str, tmp_path: Path
) -> None:
    text = RECIPES.names()[name].read_text(encoding="utf-8")
    damaged = text[: at % len(text)] + put + text[at % len(text) + lost :]
    (tmp_path / "damaged.toml").write_text(damaged, encoding="utf-8")
    is_refused_or_comes_back(lambda: load(tmp_path / "damaged.toml"))
