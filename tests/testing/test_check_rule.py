"""`check_rule`: every rule that we have passes, and every mistake that is planted is named."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata
from fedstrata import CheckFailed, SampleSize, Weighting, check_rule
from fedstrata.algorithms import AXES, NAMED
from fedstrata.core.axes import Remembers
from fedstrata.core.errors import BadValue
from fedstrata.testing.rule import CHECKS
from fedstrata.testing.subject import axis_of
from tests.support import ROOT
from tests.support.planted import PLANTED, Tables

OURS = [(axis, name) for axis, rules in AXES.items() for name in rules]


@pytest.mark.parametrize(("axis", "name"), OURS, ids=str)
def test_every_rule_of_ours_passes(axis: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rule = AXES[axis][name]()
    report = check_rule(rule)
    wanted = {check.name for check in CHECKS if not check.axes or axis in check.axes}
    assert {*report.passed, *report.skipped} == wanted
    assert not report.skipped or isinstance(rule, Remembers)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "rule",
    [
        fedstrata.FedLap(q=0.4, form="exponent", units="output", through=True),
        fedstrata.FedLap(q=0.0),
        fedstrata.FedLDF(n=6),
        fedstrata.RandomLayers(n=1),
        fedstrata.NeuronPruning(share=1.0),
        fedstrata.FedAdp(alpha=50.0, smoothing="round"),
        fedstrata.AdaptiveMu(a=0.0),
        Tables(),
    ],
    ids=repr,
)
def test_so_they_do_with_other_options(rule: Any) -> None:
    assert len(check_rule(rule).passed) >= 15


@pytest.mark.parametrize(("rule", "name"), PLANTED, ids=lambda one: one if isinstance(one, str) else type(one).__name__)
def test_a_mistake_is_named(rule: Any, name: str) -> None:
    with pytest.raises(CheckFailed) as caught:
        check_rule(rule, checks=[name])
    assert [failure.check for failure in caught.value.failures] == [name]
    assert f"  {name}\n    expected: " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("TablesInPlace", ["arguments_stay"]),
        ("NearTheMeanOfAll", ["who_sent_nothing_does_not_count"]),
        ("NoEpsilon", ["weights"]),
        ("ByDriftWithoutDrift", ["state_has_one_form"]),
        ("InTurns", ["order_of_scores"]),
        ("MomentumOfEverything", ["buffers_are_adopted"]),
        ("MeanOfModels", ["what_nobody_sent_stays"]),
        ("HalfAnObjective", ["protocol"]),
    ],
)
def test_of_all_checks_those_fail_that_say_why(name: str, found: list[str]) -> None:
    """The others pass, or say that they could not be tried."""
    rule = next(rule for rule, _ in PLANTED if type(rule).__name__ == name)
    with pytest.raises(CheckFailed) as caught:
        check_rule(rule)
    report = caught.value.report
    assert [failure.check for failure in report.failures] == found
    assert len(report.passed) + len(report.untried) + 1 == sum(
        not check.axes or axis_of(rule) in check.axes for check in CHECKS
    )


def test_every_check_can_fail() -> None:
    assert {name for _, name in PLANTED} == {check.name for check in CHECKS}


def test_every_check_says_what_it_expects() -> None:
    assert all(40 < len(check.expected) < 150 for check in CHECKS)


@pytest.mark.parametrize("name", NAMED)
def test_a_whole_algorithm(name: str) -> None:
    """Its rules that are not FedAvg's, each on its axis, and all of them together."""
    algorithm = NAMED[name]()
    report = check_rule(algorithm, checks=["named_in_a_recipe", "clients_train", "resuming"])
    changed = {axis for axis in AXES if getattr(algorithm, axis) != getattr(fedstrata.Algorithm(), axis)}
    assert {check.partition(".")[0] for check in report.passed} == {*changed, "algorithm"}
    assert "algorithm.resuming" in report.passed


def test_a_mistake_within_an_algorithm() -> None:
    rule = next(rule for rule, name in PLANTED if name == "who_sent_nothing_does_not_count")
    with pytest.raises(CheckFailed, match=r"weighting\.who_sent_nothing_does_not_count"):
        check_rule(fedstrata.fedldf(weighting=rule), checks=["weights", "who_sent_nothing_does_not_count"])


def test_what_a_report_says() -> None:
    report = check_rule(SampleSize(), checks=["weights", "frozen"])
    assert repr(report) == "SampleSize() is a weighting: 2 checks passed"
    rule = next(rule for rule, name in PLANTED if name == "order_of_clients")
    with pytest.raises(fedstrata.RuleError) as caught:
        check_rule(rule, checks=["weights", "order_of_clients"])
    first, check, expected, found = str(caught.value).splitlines()
    assert first == "ByPosition() is a weighting: 1 of 2 checks failed"
    assert check == "  order_of_clients"
    assert expected.startswith("    expected: Nothing depends on the order")
    assert found.startswith("    found:    another model after round 1, by ")


def test_what_raises_is_told_with_its_line() -> None:
    @dataclass(frozen=True)
    class Broken(Weighting):
        def weigh(self, cohort: Any, state: Any) -> Any:
            return torch.zeros(2, 3) @ torch.zeros(2), state

    with pytest.raises(CheckFailed) as caught:
        check_rule(Broken(), checks=["weights"])
    assert "found:    RuntimeError: " in str(caught.value)
    assert f"({Path(__file__).name}, line " in str(caught.value)


def test_without_flower_or_forks_something_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedstrata.testing import federations

    monkeypatch.setattr(federations, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "platform", "darwin")
    report = check_rule(SampleSize(), skip=["recipe"])
    assert "resuming" in report.passed
    assert set(report.skipped) == {"flower", "workers"}
    assert "flower was skipped: flwr is not installed" in str(report)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: check_rule(SampleSize), r"rule is a class: write check_rule\(SampleSize\(…\)\)"),  # type: ignore[arg-type]
        (lambda: check_rule(3), "rule is on no axis .*a weighting has weigh"),  # type: ignore[arg-type]
        (lambda: check_rule(SampleSize(), checks=["wieghts"]), r"checks is no check \(did you mean weights\?\)"),
        (lambda: check_rule(SampleSize(), skip=["all"]), "skip is no check"),
    ],
)
def test_what_cannot_be_checked(call: Any, problem: str) -> None:
    with pytest.raises(BadValue, match=problem):
        call()


# --- the documentation -----------------------------------------------------------------------------------------------

DOCUMENT = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the page says to save as rules.py."""
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    ours = [block for block in blocks if "import rules" not in block and "from rules" not in block]
    (tmp_path / "rules.py").write_text("\n".join(block for block in ours if "import fedstrata\n" not in block))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "rules", raising=False)
    yield importlib.import_module("rules")
    del sys.modules["rules"]


def test_the_rules_in_the_documentation_pass(rules: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("HeadSpring", "CoinFlips", "AboveMedian", "Momentum", "fedavgm"):
        check_rule(getattr(rules, name)())
    (example,) = re.findall(r"```python\n(from fedstrata import check_rule\n.*?)```", DOCUMENT, re.DOTALL)
    exec(example, {})
    assert f"```\n{capsys.readouterr().out}```" in DOCUMENT


def test_the_mistake_in_the_documentation_is_named(rules: Any, tmp_path: Path) -> None:
    source = (tmp_path / "rules.py").read_text()
    right = "        weights = cohort.sizes[:, None] * mixed.clamp_min(1e-6)\n"
    wrong = '        state["cosine"][cohort.clients] = mixed\n'
    assert wrong.strip() in DOCUMENT
    (tmp_path / "rules_with_a_mistake.py").write_text(source.replace(right, wrong + right))
    with pytest.raises(CheckFailed) as caught:
        check_rule(importlib.import_module("rules_with_a_mistake").Agreement(memory=0.8))
    assert f"```\n{caught.value}\n```" in DOCUMENT
