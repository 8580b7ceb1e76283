"""Runs whose bits a later arithmetic has changed are no seeds of a study any more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedstrata.core.determinism import ARITHMETIC
from fedstrata.recipes.schema import load
from reproductions import outdated
from reproductions.results import Results, store
from reproductions.study import Study, load_study, plan
from tests.support.small_study import SMALL, run_study, small


@pytest.mark.parametrize("counted", [1, 2])
def test_stored_runs_of_an_older_arithmetic_are_no_seeds(
    counted: int, reproduce: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From when it counts, and of the arms whose bits it changed; in the study, and where another one reads it."""
    monkeypatch.setattr(outdated, "COUNTED", counted)
    monkeypatch.setattr(outdated, "CHANGED", {2: lambda e: e.label == "fedldf", 3: lambda e: True})
    file, other = tmp_path / "small.toml", small(name="other", cells=SMALL["cells"][:1])
    file.write_text(tomli_w.dumps(small(cells=SMALL["cells"][:1])), encoding="utf-8")
    study, borrower = load_study(file), Study.parse(other)
    command = ["run", file, "--seeds", "0,1", "--runs", tmp_path / "out", "--results", tmp_path / "results"]
    assert reproduce(*command).code == 0
    path = tmp_path / "results" / "small" / "a.json"
    assert {one["arithmetic"] for arm in stored_arms(path).values() for one in arm["runs"].values()} == {ARITHMETIC}
    forge_runs(path, ["0"], weights_sha256="0" * 64)
    assert "ended with other weights" in reproduce(*command).err  # seed 0 is one of ours, and must be the same
    forge_runs(path, ["0"], arithmetic=1)

    fedldf = [0, 1] if counted == 1 else [1]
    found, lent = Results.stored(study, tmp_path / "results"), Results.stored(borrower, tmp_path / "results")
    for results in (found, lent):
        assert results.seeds("a", "fedavg") == [0, 1]
        assert results.seeds("a", "fedldf") == fedldf
    assert found.notes == ([] if counted == 1 else ["a, fedldf: 1 stored with an older arithmetic, left out"])
    assert reproduce(*command).code == 0  # what is out of date is displaced
    assert {one["arithmetic"] for arm in stored_arms(path).values() for one in arm["runs"].values()} == {ARITHMETIC}
    assert Results.stored(study, tmp_path / "results").seeds("a", "fedavg", "fedldf") == [0, 1]

    about = tmp_path / "out" / "a" / "fedldf" / "seed-0" / "run.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"arithmetic": 1}))
    refused = reproduce(*command)
    assert refused.code == (0 if counted == 1 else 2)
    assert ("seed-0 was run with an older arithmetic" in refused.err) == (counted == 2)


def stored_arms(path: Path) -> dict[str, Any]:
    arms: dict[str, Any] = json.loads(path.read_text())["arms"]
    return arms


def forge_runs(path: Path, seeds: list[str], **changes: Any) -> None:
    content = json.loads(path.read_text())
    for arm in content["arms"].values():
        for seed in seeds:
            arm["runs"][seed] |= changes
    path.write_text(json.dumps(content))


def test_storing_drops_what_is_out_of_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 0 is of an older arithmetic and seed 1 is stored anew: beside it only what still counts is kept."""
    study = Study.parse(small(cells=SMALL["cells"][:1]))
    run_study(study, tmp_path / "out", [0, 1])
    path = store(study, "a", plan(study, [0, 1], tmp_path / "out"), tmp_path / "results", {})
    forge_runs(path, ["0"], arithmetic=1)
    monkeypatch.setattr(outdated, "CHANGED", {2: lambda e: e.label == "fedldf"})
    for counted, kept in ((1, ["0", "1"]), (2, ["1"])):
        monkeypatch.setattr(outdated, "COUNTED", counted)
        store(study, "a", plan(study, [1], tmp_path / "out"), tmp_path / "results", {})
        assert list(stored_arms(path)["fedldf"]["runs"]) == kept
        assert list(stored_arms(path)["fedavg"]["runs"]) == ["0", "1"]


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({"task.model.name": "cnn"}, False),
        ({"task.model.name": "cnn_padded"}, False),
        ({"task.model.name": "tf_cnn"}, False),
        ({"task.model.name": "vgg9", "algorithm.name": "fedldf"}, False),
        ({"task.model.name": "cnn", "algorithm.objective.name": "fedprox"}, False),
        ({"task.model.name": "cnn", "algorithm.name": "fedlap"}, True),
        ({"task.model.name": "cnn", "algorithm.objective.name": "fedlap"}, True),
        ({"task.model.name": "mlp"}, True),
        ({"task.model.name": "logreg", "algorithm.name": "fedadp"}, True),
        ({"task.model.name": "mine:model"}, True),
        ({"task.function": "mine:task"}, True),
    ],
    ids=str,
)
def test_whose_bits_the_second_arithmetic_changed(
    settings: dict[str, Any], changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outdated, "COUNTED", 2)
    recipe = load({"name": "one"}, settings=settings)
    assert outdated.is_outdated(recipe, 1) == changed
    assert not outdated.is_outdated(recipe, 2)


def test_every_arithmetic_says_whose_bits_it_changed() -> None:
    assert list(outdated.CHANGED) == list(range(2, ARITHMETIC + 1))
    assert 1 <= outdated.COUNTED <= ARITHMETIC
