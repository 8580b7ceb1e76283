"""Recipes: reading, changing and freezing them."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedstrata.core.errors import BadValue, RecipeError
from fedstrata.core.training import LocalTraining, Participation
from fedstrata.recipes.catalog import RECIPES
from fedstrata.recipes.schema import (
    Recipe,
    Training,
    load,
)
from fedstrata.recipes.tables import parse_algorithm, parse_setting, set_key
from fedstrata.runs.reader import Run
from fedstrata.runs.runner import create_run, run_rounds


@pytest.mark.parametrize("name", RECIPES.names())
def test_our_recipes_are_sound_and_survive_their_own_toml(name: str) -> None:
    recipe = load(name)
    assert recipe.name == name
    assert recipe.description
    assert load(tomllib.loads(recipe.to_toml())) == recipe


def test_a_recipe_is_named_after_its_file(tmp_path: Path) -> None:
    (tmp_path / "my-own.toml").write_text("seed = 4")
    recipe = load(tmp_path / "my-own.toml")
    assert (recipe.name, recipe.seed) == ("my-own", 4)
    (tmp_path / "my-own.toml").write_text("name = 'another'")
    assert load(str(tmp_path / "my-own.toml")).name == "another"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training.rounds=50", ("training.rounds", 50)),
        ("training.lr = 1e-3", ("training.lr", 0.001)),
        ("a=true", ("a", True)),
        ("a=fedldf", ("a", "fedldf")),
        ('a="50"', ("a", "50")),
        ("a=[1, 2]", ("a", [1, 2])),
        ("a={b=1}", ("a", {"b": 1})),
        ("a=b=c", ("a", "b=c")),
        ("a=", ("a", "")),
        ("a=my.module:Thing", ("a", "my.module:Thing")),
        ("a=/some/path", ("a", "/some/path")),
    ],
)
def test_settings(text: str, expected: Any) -> None:
    assert parse_setting(text) == expected


@pytest.mark.parametrize("text", ["", "a", "=", "=3", " =3"])
def test_bad_settings(text: str) -> None:
    with pytest.raises(RecipeError, match="must look like"):
        parse_setting(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fedavg", {"name": "fedavg"}),
        ("fedldf:n=4", {"name": "fedldf", "n": 4}),
        ("fedlap:q=0.7:form=exponent", {"name": "fedlap", "q": 0.7, "form": "exponent"}),
        ("my.module:make", {"name": "my.module:make"}),
        ("my.module:make:n=4", {"name": "my.module:make", "n": 4}),
        ("fedavg:weighting.name=fedadp", {"name": "fedavg", "weighting": {"name": "fedadp"}}),
    ],
)
def test_algorithms_in_a_word(text: str, expected: Any) -> None:
    assert parse_algorithm(text) == expected


def test_changes_leave_the_original_alone(tiny: Any) -> None:
    table = tiny()
    before = repr(table)
    recipe = load(table, algorithm="fedldf:n=2", settings={"training.rounds": 9, "task.model.hidden": 3}, seed=8)
    assert repr(table) == before
    assert recipe.training.rounds == 9
    assert recipe.task.model == {"name": "mlp", "hidden": 3}
    assert recipe.algorithm == {"name": "fedldf", "n": 2}
    assert recipe.seed == 8


def test_settings_come_after_the_algorithm(tiny: Any) -> None:
    recipe = load(tiny(), algorithm="fedldf:n=2", settings=["algorithm.n=3"])
    assert recipe.built_algorithm.selection.n == 3


def test_a_dotted_key_makes_tables() -> None:
    table: dict[str, Any] = {}
    set_key(table, "a.b.c", 1)
    set_key(table, "a.b.d", 2)
    assert table == {"a": {"b": {"c": 1, "d": 2}}}
    with pytest.raises(RecipeError, match="c is a value, not a table"):
        set_key(table, "a.b.c.e", 3)


@pytest.mark.parametrize(
    ("algorithm", "label"),
    [
        ({"name": "fedldf", "n": 2}, "fedldf"),
        ({}, "fedavg"),
        ({"objective": {"name": "fedlap"}, "weighting": {"name": "fedadp"}}, "fedlap+fedadp"),
        ({"name": "fedldf", "weighting": {"name": "fedadp"}}, "fedldf+fedadp"),
        ({"name": "fedprox", "objective": {"mu": 0.5}}, "fedprox"),
        ({"name": "fedldf", "selection": {"n": 2}}, "fedldf"),
        ({"objective": {}}, "fedavg"),
    ],
    ids=str,
)
def test_labels(tiny: Any, algorithm: dict[str, Any], label: str) -> None:
    """An axis table may have options only; the rule is then the algorithm's own."""
    recipe = load(tiny({"algorithm": algorithm}))
    assert recipe.label == label
    assert "/" not in recipe.label


def test_the_label_of_a_users_rule_is_a_file_name(user_module: Any, tiny: Any) -> None:
    user_module("label_rules", "from fedstrata.weightings import Uniform as Mine\n")
    assert load(tiny({"algorithm": {"weighting": {"name": "label_rules:Mine"}}})).label == "label_rules.Mine"


def test_toml_keeps_everything(tiny: Any) -> None:
    table = tiny(
        {
            "layers.grouping": {"a": ["fc1"], "b": ["fc2.*"]},
            "evaluation.target": 0.9,
            "training.clients_per_round": 2,
            "paper": {"source": "somewhere", "rounds": {"fedavg": 3}},
            "description": 'quotes " and ümlauts',
        }
    )
    recipe = Recipe.parse(table)
    assert Recipe.parse(tomllib.loads(recipe.to_toml())) == recipe
    assert recipe.grouping() == {"a": ["fc1"], "b": ["fc2.*"]}


def test_the_grouping_is_the_algorithms_unless_given(tiny: Any) -> None:
    assert load(tiny({"algorithm": {"name": "fedldf"}})).grouping() == "block"
    assert load(tiny({"algorithm": {"name": "fedldf"}, "layers.grouping": "tensor"})).grouping() == "tensor"


def test_an_empty_table_of_patterns_is_no_grouping(tiny: Any) -> None:
    with pytest.raises(RecipeError, match=r"layers\.grouping"):
        load(tiny({"layers.grouping": {}}))


def test_unknown_recipe_by_name() -> None:
    with pytest.raises(RecipeError, match="did you mean demo"):
        RECIPES.read("demoo")


def test_a_training_table_is_taken_apart() -> None:
    """What the server decides and what a client does share no key; two keys are neither's."""
    part, local = ({field.name for field in dataclasses.fields(cls)} for cls in (Participation, LocalTraining))
    assert not part & local
    assert set(Training.model_fields) - part - local == {"rounds", "initial_weights"}
    assert (Training().participation, Training().local) == (Participation(), LocalTraining())
    given = {"clients_per_round": 3, "attempts": 5, "dropouts": 0.25, "steps": 7, "lr": 0.5, "momentum": 0.75}
    table = Training(**given)
    assert dataclasses.asdict(table.participation) | dataclasses.asdict(table.local) == (
        dataclasses.asdict(Participation()) | dataclasses.asdict(LocalTraining()) | given
    )


@pytest.mark.parametrize(
    ("cls", "given"),
    [
        *((Participation, {"clients_per_round": value}) for value in (0, -1)),
        (Participation, {"sampling": "all"}),
        *((Participation, {key: value}) for key in ("stragglers", "min_replies") for value in (-0.1, 1.1, math.nan)),
        *((Participation, {"dropouts": value}) for value in (-0.1, 1.0, math.nan)),
        (Participation, {"attempts": 0}),
        *((LocalTraining, {key: 0}) for key in ("epochs", "steps", "batch_size", "lr", "lr_decay")),
        (LocalTraining, {"optimizer": "lion"}),
        *((LocalTraining, {"lr": value}) for value in (math.inf, math.nan)),
        (LocalTraining, {"lr_decay": 1.5}),
        *((LocalTraining, {key: value}) for key in ("clip_norm", "clip_value") for value in (0, -1.0, math.inf)),
        *((LocalTraining, {"momentum": value}) for value in (-0.5, 1.0, math.nan)),
        *((LocalTraining, {"weight_decay": value}) for value in (-0.5, math.inf, math.nan)),
    ],
    ids=str,
)
def test_what_training_cannot_be_is_refused_in_python_as_in_a_recipe(cls: Any, given: dict[str, Any]) -> None:
    ((field, value),) = given.items()
    with pytest.raises(BadValue, match=f"^{field} ") as refused:
        cls(**given)
    assert refused.value.value is value
    with pytest.raises(RecipeError, match=re.escape(f"training.{field} = {value!r}: ")):
        Recipe.parse({"training": given})


COUNTED = """
from collections import Counter
from dataclasses import dataclass

import numpy as np
from torch import nn

from fedstrata import fedavg

CALLS = Counter()


def algorithm():
    CALLS["algorithm"] += 1
    return fedavg()


@dataclass(frozen=True)
class Thirds:
    def __post_init__(self):
        CALLS["partition"] += 1

    def split(self, labels, generator):
        CALLS["split"] += 1
        return np.array_split(np.arange(len(labels)), 3)


def model(input_shape, classes):
    CALLS["model"] += 1
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), classes))
"""


def test_a_run_builds_everything_once(user_module: Any, tmp_path: Path) -> None:
    """The model is built a second time on purpose, to compare, and by each client, who has one of its own."""
    user_module("counted", COUNTED)
    table = {
        "algorithm": {"name": "counted:algorithm"},
        "task": {"partition": {"name": "counted:Thirds"}, "model": {"name": "counted:model"}},
        "training": {"rounds": 2, "steps": 1},
        "engine": {"workers": 1},
    }
    Recipe.read(table)
    assert "counted" not in sys.modules, "a recipe that is only looked at imports nothing"
    recipe = load(table)
    calls = sys.modules["counted"].CALLS
    assert calls == {"algorithm": 1, "partition": 1}
    run, experiment = create_run(recipe, tmp_path / "run")
    assert calls == {"algorithm": 1, "partition": 1, "split": 1, "model": 2}
    assert len(list(run_rounds(run, experiment))) == 2
    del calls["model"]
    assert calls == {"algorithm": 1, "partition": 1, "split": 1}
    Run(tmp_path / "run").summary()
    assert calls == {"algorithm": 1, "partition": 1, "split": 1}, "nor does a run"


def test_what_says_nothing_new_is_agreed_on_and_compared_as_before() -> None:
    """Digests of runs and nodes of before are those of now: keys that came later are there only where they are set."""
    keys = ["epochs", "steps", "batch_size", "optimizer", "lr", "lr_decay", "momentum", "weight_decay"]
    values = [1, None, 32, "sgd", 0.01, 1.0, 0.0, 0.0]
    assert LocalTraining().agreed() == dict(zip(keys, values, strict=True))
    new = {"optimizer_options", "schedule", "clip_norm", "clip_value"}
    recipe = Recipe()
    assert not new & (recipe.essence()["training"].keys() | recipe.to_table()["training"].keys())
    given = {"optimizer_options": {"nesterov": True}, "momentum": 0.9, "clip_norm": 2.0, "clip_value": 1.0}
    table = {"training": {**given, "schedule": {"name": "cosine", "rounds": 9}}}
    changed = load(table)
    assert new < changed.essence()["training"].keys()
    assert new < changed.training.local.agreed().keys()
    assert load(tomllib.loads(changed.to_toml())) == changed
    same_numbers = {"training": {**given, "schedule": {"name": "warmup", "rounds": 9, "start": 0.5}}}
    assert load(same_numbers).training.local.agreed() != changed.training.local.agreed()


def test_the_case_of_an_optimizer_does_not_matter() -> None:
    assert load({"training": {"optimizer": "AdamW"}}) == load({"training": {"optimizer": "adamw"}})
    assert LocalTraining(optimizer="SGD") == LocalTraining()


def test_another_schedule_does_not_inherit_options() -> None:
    table = {"training": {"schedule": {"name": "cosine", "rounds": 9, "final": 0.5}}}
    changed = load(table, settings={"training.schedule.rounds": 3, "training.schedule.name": "warmup"})
    assert changed.training.schedule == {"name": "warmup", "rounds": 3}
