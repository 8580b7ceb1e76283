"""What `import fedstrata` gives: every name, named algorithms as typed functions, one base for all errors."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedstrata
from fedstrata import algorithms
from fedstrata.algorithms import AXES, NAMED, from_table, to_table
from fedstrata.core import errors, record
from fedstrata.core.axes import Algorithm
from fedstrata.registry import parameters

PUBLIC: list[str] = fedstrata.__all__  # type: ignore[attr-defined]


def test_every_public_name_is_there() -> None:
    for name in PUBLIC:
        assert getattr(fedstrata, name) is not None
    assert set(dir(fedstrata)) >= set(PUBLIC)
    with pytest.raises(AttributeError, match="no_such_name"):
        fedstrata.no_such_name  # type: ignore[attr-defined]  # noqa: B018


def test_what_a_rules_author_needs_is_public() -> None:
    assert set(NAMED) <= set(PUBLIC)
    tree = {name for module in (errors, record) for name, found in vars(module).items() if is_error(found)}
    assert tree <= set(PUBLIC)
    rules = {rule.__name__ for known in AXES.values() for rule in known.values()}
    assert rules <= set(PUBLIC)
    assert {"Objective", "Weighting", "ServerStep", "Combination", "Cohort", "Layers", "State", "require"} <= set(
        PUBLIC
    )


def is_error(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, fedstrata.FedstrataError)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: fedstrata.FedProx(mu=-1),
        lambda: fedstrata.fedprox(mu=-1),
        lambda: fedstrata.fedldf(n=0),
        lambda: fedstrata.Algorithm(weighting=fedstrata.FedAdp),  # type: ignore[arg-type]
        lambda: fedstrata.Algorithm(objective=3),  # type: ignore[arg-type]
        lambda: fedstrata.Algorithm(private="head"),  # type: ignore[arg-type]
        lambda: fedstrata.LocalTraining(lr=0),
        lambda: fedstrata.fedprox(mu=0.3, objective=fedstrata.FedLap()),
        lambda: fedstrata.fedprox(mu="high"),  # type: ignore[arg-type]
        lambda: fedstrata.fedprox("high"),  # type: ignore[arg-type]
        lambda: fedstrata.fedldf(nn=4),  # type: ignore[call-arg]
        lambda: fedstrata.fedldf(wieghting=fedstrata.FedAdp()),  # type: ignore[call-arg]
    ],
)
def test_a_wrong_argument_is_one_kind_of_error(wrong: Callable[[], object]) -> None:
    with pytest.raises(fedstrata.BadValue) as caught:
        wrong()
    assert isinstance(caught.value, fedstrata.FedstrataError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", NAMED)
def test_a_signature_has_the_options_of_its_rules(name: str) -> None:
    """With the same types and defaults, so that what a function takes, a recipe takes, too."""
    function, algorithm = NAMED[name], NAMED[name]()
    own = {n: p for n, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD}
    rules = [getattr(algorithm, axis) for axis in AXES]
    theirs = {field.name: field for rule in rules for field in dataclasses.fields(rule)}
    assert set(own) == set(theirs)
    hints = {key: kind for rule in rules for key, kind in parameters(type(rule)).items()}
    for key, parameter in own.items():
        assert parameter.default == theirs[key].default, key
        assert inspect.get_annotations(function, eval_str=True)[key] == hints[key], key


@pytest.mark.parametrize("name", NAMED)
def test_an_algorithm_is_documented_and_is_its_table(name: str) -> None:
    text = inspect.getdoc(NAMED[name]) or ""
    assert f">>> {name}(" in text
    assert all(f"`{option}`" in text for option in inspect.signature(NAMED[name]).parameters if option != "axes")
    algorithm = NAMED[name]()
    assert from_table({"name": name}) == algorithm
    again = from_table(to_table(algorithm))
    assert dataclasses.replace(again, grouping=algorithm.grouping) == algorithm


@pytest.mark.parametrize(
    ("base", "method"), [("Weighting", "weigh"), ("ServerStep", "step"), ("Combination", "combine")]
)
def test_a_rule_without_its_method_cannot_be_made(base: str, method: str) -> None:
    """What has no default is told by its name when the rule is made, and not in a round."""
    forgetful = type("Forgetful", (getattr(fedstrata, base),), {})
    with pytest.raises(TypeError, match=rf"abstract.*{method}"):
        forgetful()


def test_the_examples_in_docstrings_are_right() -> None:
    done = doctest.testmod(algorithms)
    assert done.attempted >= len(NAMED)
    assert done.failed == 0


def test_the_defaults_are_fedavg() -> None:
    assert Algorithm() == fedstrata.fedavg()
    assert Algorithm(weighting=fedstrata.FedLayerWise()) == fedstrata.fedlayerwise()
    assert fedstrata.fedprox(0.1, weighting=fedstrata.FedAdp()) == from_table(
        {"name": "fedprox", "mu": 0.1, "weighting": {"name": "fedadp"}}
    )
    assert from_table({"name": "fedlap", "private": "head.*"}).private == ("head.*",)


def test_the_types_refuse_what_is_wrong(tmp_path: Path) -> None:
    """mypy --strict, as an editor would."""
    right = [
        "from functools import partial",
        "from fedstrata import Algorithm, FedLayerWise, fedldf, fedprox, models, partitions, tasks",
        "fedldf(n=4)",
        "fedprox(0.1, weighting=FedLayerWise(), private=['head.*'])",
        "Algorithm(weighting=FedLayerWise())",
        "task = tasks.mnist(partition=partitions.dirichlet(clients=100, alpha=0.1), model='cnn')",
        "tasks.cifar10(model=partial(models.resnet20, norm='group'), augment=['crop', 'flip'], validation=100)",
        "task.build(seed=1).sizes()",
    ]
    wrong = [
        "fedldf(nn=4)",
        "fedprox(mu='high')",
        "fedprox(weighting=FedLayerWise)",
        "tasks.mnist(validation='many')",
        "tasks.mnist(partitoin=partitions.iid(3))",
        "tasks.mnist(partition=3)",
        "partitions.dirichlet(clients=3)",
        "partitions.iid(clients='three')",
        "models.resnet20((3, 32, 32), 10, norm='layer')",
    ]
    source = tmp_path / "mine.py"
    source.write_text("\n".join([*right, *wrong]))
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    refused = [int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line]
    assert refused == [len(right) + number for number in range(1, len(wrong) + 1)], done.stdout
