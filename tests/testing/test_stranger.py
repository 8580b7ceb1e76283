"""A rule in a package of its own, outside of ours: `examples/ida_rule`, right and with mistakes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from fedstrata import CheckFailed, check_rule, named
from tests.support import ROOT

PACKAGE = ROOT / "examples" / "ida_rule"


def test_its_own_tests_pass() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(PACKAGE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PACKAGE)
    assert "2 passed" in done.stdout, done.stdout


def test_it_is_found_by_its_plain_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `pip install` leaves it: the module, and what it offers."""
    information = tmp_path / "ida_rule-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: ida-rule\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[fedstrata.weightings]\ninverse_distance = ida_rule:IDA\n")
    assert 'fedstrata.weightings"]\ninverse_distance = "ida_rule:IDA"' in (PACKAGE / "pyproject.toml").read_text()
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(PACKAGE), *sys.path])
    importlib.invalidate_caches()
    weighting = named("fedavg", weighting={"name": "inverse_distance", "epsilon": 0.5}).weighting
    assert repr(weighting) == "IDA(epsilon=0.5)"
    assert type(weighting).__module__ == "ida_rule"


@pytest.mark.parametrize(
    ("right", "wrong", "check", "found"),
    [
        (" + self.epsilon", "", "weights", "inf for one client"),
        (
            "cohort.sent / cohort.sent.sum(0).clamp_min(1)",
            "torch.ones_like(cohort.sent) / len(cohort)",
            "who_sent_nothing_does_not_count",
            "look at `cohort.sent`",
        ),
        (
            "(1 / (distance + self.epsilon))[:, None]",
            "cohort.sizes.div_(distance + self.epsilon)[:, None]",
            "arguments_stay",
            "sizes changed in place",
        ),
    ],
    ids=["no epsilon", "a mean of all", "sizes in place"],
)
def test_mistakes_in_it_are_named(
    right: str, wrong: str, check: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (PACKAGE / "ida_rule.py").read_text()
    assert source.count(right) == 1
    module = f"ida_with_a_mistake_in_{check}"
    (tmp_path / f"{module}.py").write_text(source.replace(right, wrong))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CheckFailed) as caught:
        check_rule(importlib.import_module(module).IDA())
    assert [failure.check for failure in caught.value.failures] == [check], str(caught.value)
    assert found in caught.value.failures[0].found
