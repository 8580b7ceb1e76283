"""A user's own rules and algorithms: named in a recipe, or found in an installed package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedstrata
from fedstrata.algorithms import named
from fedstrata.core.errors import RecipeError
from fedstrata.recipes.experiment import build_experiment
from fedstrata.recipes.schema import load
from fedstrata.runs.writer import last_state

RULES = '''
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedstrata import Algorithm
from fedstrata.objectives import Plain
from fedstrata.selections import Everything
from fedstrata.weightings import SampleSize


@dataclass(frozen=True)
class Anchor:
    """A constant spring on biases only."""
    mu: float = 0.1
    refresh: ClassVar[str] = "round"
    differentiable: ClassVar[bool] = False

    def init(self, layers):
        return {"rounds": torch.zeros(1)}

    def stiffness(self, local, anchor, state, layers):
        return {name: torch.tensor(self.mu) for name in local if name.endswith("bias")}

    def after_round(self, new, old, state, layers):
        return {"rounds": state["rounds"] + 1}


@dataclass(frozen=True)
class FirstLayer:
    """Client 0 of the round sends everything, the others their first layer."""
    decides: ClassVar[str] = "before"

    def draw(self, clients, layers, generator):
        mask = torch.zeros(clients, len(layers), dtype=torch.bool)
        mask[0] = True
        mask[:, 0] = True
        return mask


class Least:
    """After scores: the client that moved least; no dataclass, no options."""
    decides = "after_scores"

    def score(self, update, layers):
        return -layers.norms(update)

    def choose(self, scores):
        return scores == scores.max(0, keepdim=True).values


@dataclass(frozen=True)
class EveryOther:
    """On the client: units 0, 2, 4, ..."""
    decides: ClassVar[str] = "on_client"

    def pick(self, update, layers):
        return torch.arange(layers.units) % 2 == 0


@dataclass(frozen=True)
class ByIndex:
    """Client k counts k + base."""
    base: float = 1.0

    def init(self, clients, layers):
        return {}

    def weigh(self, cohort, state):
        return (cohort.clients.double() + self.base)[:, None].expand(-1, len(cohort.layers)), state


def make(mu: float = 0.3):
    return Algorithm(Anchor(mu), FirstLayer(), ByIndex(), grouping="tensor")


def wants_positive(mu):
    if mu <= 0:
        raise ValueError("mu must be positive")
    return make(mu)


class NoMethods:
    pass


class HalfAnObjective:
    refresh = "round"
    differentiable = False

    def init(self, layers):
        return {}


class NoDecision:
    def draw(self, clients, layers, generator):
        return torch.ones(clients, len(layers), dtype=torch.bool)


class Misaligned:
    decides = "before"

    def score(self, update, layers):
        return layers.norms(update)
'''


@pytest.fixture
def rules(user_module: Any) -> str:
    return str(user_module("user_rules", RULES))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("selection", ["FirstLayer", "Least", "EveryOther"])
def test_rules_named_in_a_recipe(rules: str, tiny: Any, tmp_path: Path, selection: str, workers: int) -> None:
    algorithm = {
        "objective": {"name": f"{rules}:Anchor", "mu": 0.7},
        "selection": {"name": f"{rules}:{selection}"},
        "weighting": {"name": f"{rules}:ByIndex", "base": 2.0},
    }
    run = fedstrata.run(tiny({"algorithm": algorithm, "engine.workers": workers}), out=tmp_path / "run")
    figures = run.layers(3)
    if selection == "FirstLayer":
        assert figures["mask"].tolist() == [[1, 1], [1, 0], [1, 0], [1, 0]]
        np.testing.assert_allclose(figures["weight"][:, 0], np.array([2, 3, 4, 5]) / 14)
    elif selection == "Least":
        assert (figures["mask"].sum(0) == 1).all()
        assert run.history()[0]["bytes"]["feedback_numbers"] == 4 * 2
    else:
        np.testing.assert_allclose(figures["mask"], 0.5)
    assert (last_state(run.directory).objective["rounds"] == 3).all()
    # 0.7 on 4 biases of 3140 numbers
    np.testing.assert_allclose(figures["mu"][:, 0], 0.7 * 4 / 3140, rtol=1e-6)
    assert fedstrata.resume(run.path, settings={"training.rounds": 4}).finished()


def test_rules_in_python(rules: str) -> None:
    module = importlib.import_module(rules)
    algorithm = named("fedavg", weighting={"name": f"{rules}:ByIndex", "base": 3.0})
    assert algorithm.weighting == module.ByIndex(3.0)


def test_an_algorithm_of_ones_own(rules: str, tiny: Any, tmp_path: Path, cli: Any, recipe: Any) -> None:
    run = fedstrata.run(tiny(), algorithm=f"{rules}:make:mu=0.9", out=tmp_path / "run")
    assert run.layer_names == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert run.layers(1)["mu"][0].tolist() == pytest.approx([0.0, 0.9, 0.0, 0.9])
    assert cli("run", recipe(), "-a", f"{rules}:make", "--out", tmp_path / "cli").code == 0
    assert cli("show", tmp_path / "cli").code == 0
    answer = cli("compare", recipe(), "-a", f"fedavg,{rules}:make", "--out", tmp_path / "both")
    assert answer.code == 0, answer.err
    assert (tmp_path / "both" / f"{rules}-make" / "seed-0" / "run.json").exists()


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"objective": {"name": "user_rules:NoMethods"}}, r"algorithm\.objective\.name = .*lacks init, stiffness"),
        ({"objective": {"name": "user_rules:HalfAnObjective"}}, "lacks stiffness, after_round$"),
        ({"weighting": {"name": "user_rules:NoMethods"}}, r"algorithm\.weighting\.name = .*lacks init, weigh$"),
        ({"selection": {"name": "user_rules:NoMethods"}}, r"algorithm\.selection\.name = "),
        ({"selection": {"name": "user_rules:NoDecision"}}, "decides"),
        ({"selection": {"name": "user_rules:Misaligned"}}, r"algorithm\.selection\.name = "),
        ({"objective": {"name": "user_rules:Anchor", "nu": 1}}, r"algorithm\.objective\.nu = 1: Anchor has no such"),
        ({"objective": {"name": "user_rules:Anchor", "mu": "x"}}, r"algorithm\.objective\.mu = 'x'"),
        ({"selection": {"name": "user_rules:Least", "n": 1}}, r"algorithm\.selection = \{'n': 1\}"),
        ({"name": "user_rules:make", "nu": 1}, r"algorithm\.name = 'user_rules:make': .*nu"),
        ({"name": "user_rules:wants_positive", "mu": -1}, "mu must be positive"),
        ({"name": "user_rules:wants_positive"}, r"algorithm\.name = 'user_rules:wants_positive': .*mu"),
        ({"name": "user_rules:NoMethods"}, "gave a NoMethods, not an Algorithm"),
        ({"name": "user_rules:nothing"}, "cannot be imported: .*no attribute 'nothing'"),
        ({"name": "user_rules:make", "weighting": {"name": "uniform"}}, "gives all axes"),
    ],
    ids=str,
)
def test_what_is_no_rule_is_refused_before_anything_runs(
    rules: str, tiny: Any, tmp_path: Path, algorithm: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        fedstrata.run(tiny({"algorithm": algorithm}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_module_that_breaks_when_it_is_imported(user_module: Any, tiny: Any, cli: Any, recipe: Any) -> None:
    user_module("broken_rules", "import nothing_of_this_name")
    with pytest.raises(RecipeError, match="cannot be imported: No module named 'nothing_of_this_name'"):
        load(tiny({"algorithm": {"name": "broken_rules:make"}}))
    user_module("syntax_rules", "def f(:")
    answer = cli("run", recipe(), "-a", "syntax_rules:make")
    assert answer.code == 2, answer.err
    assert answer.err.count("\n") == 1
    assert "algorithm.name = 'syntax_rules:make': cannot be imported" in answer.err


def test_entry_points(rules: str, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Any) -> None:
    """An installed package offers rules, an algorithm, a model and a partition under names of its own."""
    site = tmp_path / "site"
    information = site / "strata_extras-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: strata-extras\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        """
[fedstrata.objectives]
bias_anchor = strata_extras:Anchor
[fedstrata.selections]
every_other = strata_extras:EveryOther
least = strata_extras:Least
first_layer = strata_extras:FirstLayer
[fedstrata.weightings]
by_index = strata_extras:ByIndex
[fedstrata.algorithms]
mine = strata_extras:make
[fedstrata.models]
one_layer = strata_extras:one_layer
"""
    )
    (site / "strata_extras.py").write_text(
        RULES
        + """
def one_layer(input_shape, classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(input_shape[1] * input_shape[2], classes))
"""
    )
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    importlib.invalidate_caches()
    for selection in ("every_other", "least", "first_layer"):
        algorithm = {
            "objective": {"name": "bias_anchor"},
            "selection": {"name": selection},
            "weighting": {"name": "by_index"},
        }
        run = fedstrata.run(tiny({"algorithm": algorithm}), out=tmp_path / selection)
        assert run.recipe.label == f"bias_anchor+{selection}+by_index"
    # the option goes to the rule that has it, as with ours
    given: Any = named("fedavg", weighting={"name": "by_index"}, base=4.0)
    assert given.weighting.base == 4.0
    group: Any = {"mine": named("mine", mu=0.4)}
    assert group["mine"].objective.mu == 0.4
    run = fedstrata.run(tiny(), algorithm="mine:mu=0.2", out=tmp_path / "mine")
    assert run.recipe.label == "mine"
    with pytest.raises(RecipeError, match=r"algorithm\.name = 'yours': unknown"):
        named("yours")
    table = tiny({"task.model": {"name": "one_layer"}})
    assert len(fedstrata.run(table, out=tmp_path / "model").layer_names) == 1


def test_our_own_names_come_first(rules: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package cannot change what `fedavg` means."""
    information = tmp_path / "site" / "evil-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[fedstrata.weightings]\nuniform = user_rules:ByIndex\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    importlib.invalidate_caches()
    algorithm = named("fedavg", weighting={"name": "uniform"})
    assert type(algorithm.weighting).__module__ == "fedstrata.weightings.uniform"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"name": "mine_partition:Halves"}, None),
        ({"name": "mine_partition:Halves", "parts": 3}, "parts"),
        ({"name": "mine_partition:Nothing"}, "task.partition.name = 'Nothing': is no partition: it lacks split"),
    ],
    ids=str,
)
def test_a_partition_may_be_an_ordinary_class(
    options: dict[str, Any], problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Any
) -> None:
    (tmp_path / "mine_partition.py").write_text(
        "import numpy as np\n"
        "class Halves:\n"
        "    def split(self, labels, generator):\n"
        "        return np.array_split(np.arange(20), 2)\n"
        "class Nothing:\n"
        "    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    table = tiny()
    table["task"]["partition"] = options
    if problem is None:
        assert build_experiment(load(table)).task.sizes().tolist() == [10, 10]
    else:
        with pytest.raises(RecipeError, match=problem):
            load(table)
