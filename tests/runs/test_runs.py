"""Runs: nothing but the seed decides what they come to, and what becomes of them where clients get lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata
from fedstrata.core.errors import RecipeError, RunDirectoryError
from fedstrata.core.record import RoundFailed
from fedstrata.recipes.experiment import build_experiment
from fedstrata.recipes.schema import Recipe, load
from fedstrata.runs.reader import Run
from fedstrata.runs.writer import last_state
from tests.support.runs import ALGORITHMS, run_content


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_workers_change_nothing(tiny: Any, tmp_path: Path, same_run: Any, algorithm: str) -> None:
    settings: dict[str, Any] = {"algorithm": ALGORITHMS[algorithm], "evaluation.on": ["test", "clients"]}
    if algorithm == "fedldf":
        settings |= {"training.dropouts": 0.2, "training.stragglers": 0.5, "training.epochs": 2}
    for workers in (1, 2):
        fedstrata.run(tiny(settings | {"engine.workers": workers}), out=tmp_path / str(workers))
    fedstrata.run(tiny(settings), out=tmp_path / "again")
    same_run(tmp_path / "1", tmp_path / "again")
    same_run(tmp_path / "1", tmp_path / "2", recipe=False)


def test_another_seed_is_another_run(tiny: Any, tmp_path: Path) -> None:
    runs = [fedstrata.run(tiny({"seed": seed}), out=tmp_path / str(seed)) for seed in (0, 1)]
    assert runs[0].summary()["weights_sha256"] != runs[1].summary()["weights_sha256"]


def test_recording_layers_changes_no_bit(tiny: Any, tmp_path: Path) -> None:
    settings = {"algorithm": ALGORITHMS["combination"]}
    recorded = fedstrata.run(tiny(settings), out=tmp_path / "with")
    without = fedstrata.run(tiny(settings | {"record.layers": False}), out=tmp_path / "without")
    assert recorded.summary()["weights_sha256"] == without.summary()["weights_sha256"]
    assert run_content(recorded.path)["history"] == run_content(without.path)["history"]
    assert list((without.path / "layers").iterdir()) == []
    with pytest.raises(RunDirectoryError, match="no record of the layers in round 1"):
        without.layers(1)


def test_float64(tiny: Any, tmp_path: Path) -> None:
    run = fedstrata.run(tiny({"engine.dtype": "float64"}), out=tmp_path / "run")
    assert last_state(run.directory).model.dtype == torch.float64
    first = run.about.layers[0]
    assert json.loads((run.path / "run.json").read_text())["resolved"]["dtype"] == "float64"
    assert first.bytes == 8 * first.numbers
    assert run.history()[0]["bytes"]["up"][0] == 4 * first.bytes
    single = fedstrata.run(tiny(), out=tmp_path / "single")
    assert torch.allclose(last_state(run.directory).model.float(), last_state(single.directory).model, atol=1e-4)


def test_too_few_replies_stop_the_run_with_a_reason_and_resume_would_go_on(tiny: Any, tmp_path: Path) -> None:
    table = tiny({"training.dropouts": 0.9, "training.min_replies": 1.0, "training.attempts": 2})
    with pytest.raises(RoundFailed, match=r"round 1: \d of 4 replies usable after 2 attempts; client \d: dropped out"):
        fedstrata.run(table, out=tmp_path / "run")
    run = Run(tmp_path / "run")
    assert run.history() == []
    assert not run.finished()
    assert last_state(run.directory).round == 0
    with pytest.raises(RoundFailed) as again:
        fedstrata.resume(tmp_path / "run")
    failures, record = run.failures(), again.value.record
    assert [(line["round"], line["attempt"], line["replies"]) for line in failures] == [(1, 1, record.replies)] * 2
    assert {who["client"] for who in failures[0]["lost"]} == {client for client, _ in record.lost}
    assert {who["why"] for who in failures[0]["lost"]} == {"dropped out"}
    whole = sum(layer.bytes for layer in run.about.layers)
    assert sum(failures[0]["bytes"]["down"]) == 2 * 4 * whole, "both attempts are paid for"


def test_a_round_that_is_tried_again_says_so_and_pays_for_both(tiny: Any, tmp_path: Path) -> None:
    table = tiny({"training.dropouts": 0.3, "training.min_replies": 1.0, "training.attempts": 50, "seed": 2})
    run = fedstrata.run(table, out=tmp_path / "run")
    lines = run.history()
    assert max(line["attempt"] for line in lines) > 0
    whole = sum(layer.bytes for layer in run.about.layers)
    for line in lines:
        assert line["replies"] == 4
        assert sum(line["bytes"]["down"]) == 4 * whole * (line["attempt"] + 1)


def test_a_recipe_is_frozen(tiny: Any) -> None:
    recipe = Recipe.parse(tiny())
    with pytest.raises(ValueError, match="frozen"):
        recipe.seed = 3


@pytest.mark.parametrize(
    ("devices", "device", "problem"),
    [
        (0, "cuda", "none that torch can use"),
        (1, "cuda:1", "there are 1, counted from 0"),
        (2, "cuda:7", "there are 2, counted from 0"),
    ],
)
def test_a_cuda_device_that_is_not_there(
    devices: int, device: str, problem: str, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    with pytest.raises(RecipeError, match=f"engine.device = '{device}': no such CUDA device: .*{problem}"):
        build_experiment(load(tiny({"engine.device": device})))
