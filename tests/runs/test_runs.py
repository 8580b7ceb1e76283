"""Runs: what a run directory holds, that nothing but the seed decides, and that a run can be stopped and go on."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing as mp
import os
import shutil
import signal
import time
import tomllib
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import fedstrata
from fedstrata import runs
from fedstrata.clients import evaluation
from fedstrata.core.errors import RecipeError, RoundFailed, RunDirectoryError
from fedstrata.recipes.experiment import build_experiment
from fedstrata.recipes.schema import Recipe, load
from fedstrata.runs.files import locked
from fedstrata.runs.runner import Run, reopen
from fedstrata.tasks.task import Task
from tests.support.runs import checkpoint_content, forge_recipe, run_content

ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "fedldf": {"name": "fedldf", "n": 2},
    "neuron_pruning": {"name": "neuron_pruning", "share": 0.5},
    "hdfl": {"name": "hdfl", "n": 2},
    "combination": {
        "objective": {"name": "adaptive_mu", "mu0": 0.5},
        "selection": {"name": "fedldf", "n": 2},
        "weighting": {"name": "fedlayerwise"},
    },
    "fedlap+fedadp": {"name": "fedlap", "q": 1.0, "weighting": {"name": "fedadp"}},
}


# --- what a run directory holds --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Run:
    from tests.support.runs import TINY

    table = TINY | {
        "seed": 3,
        "algorithm": ALGORITHMS["combination"],
        "training": TINY["training"] | {"clients_per_round": 3, "epochs": 2},
        "evaluation": {"on": ["test", "clients"], "target": 0.9},
    }
    return fedstrata.run(table, out=tmp_path_factory.mktemp("example") / "run")


@pytest.mark.parametrize("table", ["algorithm.objective", "task.partition"])
def test_looking_at_a_run_of_someone_else_runs_none_of_its_code(
    example: Run, tmp_path: Path, cli: Any, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, trace = tmp_path / "run", tmp_path / "trace"
    module = f"their_{table.split('.')[-1]}"
    Path(f"{module}.py").write_text(f"open({str(trace)!r}, 'w').close()\n")
    shutil.copytree(example.path, path)
    recipe = tomllib.loads((path / "recipe.toml").read_text())
    recipe["algorithm"] = {"name": "fedavg"}
    inner = recipe
    for part in table.split("."):
        inner = inner.setdefault(part, {})
    inner.clear()
    inner["name"] = f"{module}:Rule"
    forge_recipe(path, recipe)
    assert Run(path).summary()["rounds"] == 3
    for command in (("show", path), ("report", path, "--out", tmp_path / "report.html")):
        assert cli(*command).code == 0
    assert not trace.exists()
    assert cli("run", "--resume", path, "--set", "training.rounds=4").code != 0  # there is no Rule in it
    assert trace.exists()


def test_a_recipe_that_someone_damaged_is_said_to_be(example: Run, tmp_path: Path, cli: Any) -> None:
    shutil.copytree(example.path, tmp_path / "run")
    recipe = tomllib.loads((tmp_path / "run" / "recipe.toml").read_text())
    recipe["algorithm"] = {"objective": "plain"}
    forge_recipe(tmp_path / "run", recipe)
    with pytest.raises(RecipeError, match=r"algorithm.objective = 'plain': must be a table with a name"):
        Run(tmp_path / "run")
    assert cli("show", tmp_path / "run").code not in (0, -1)


def test_runs_that_begin_at_once_do_not_mix(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes, in the same second and so with the same name in mind, each with its own learning rate."""
    monkeypatch.chdir(tmp_path)
    rates = [0.1, 0.2, 0.3, 0.4]
    experiments = [build_experiment(load(tiny({"training.lr": rate}))) for rate in rates]
    monkeypatch.setattr(runs, "datetime", SimpleNamespace(now=lambda: datetime(2026, 1, 1)))

    def begin(one: Any) -> None:
        for _ in range(5):
            Run.start(one)

    jobs = [mp.get_context("fork").Process(target=begin, args=(one,)) for one in experiments]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0] * len(rates)
    found = sorted((tmp_path / "runs").iterdir())
    assert len(found) == 5 * len(rates)  # and nothing beside them
    assert sorted(Run(path).recipe.training.lr for path in found) == sorted(rates * 5)


def test_a_run_directory_holds_exactly_the_documented_files(example: Run) -> None:
    assert sorted(p.name for p in example.path.iterdir()) == [
        "checkpoints",
        "history.jsonl",
        "layers",
        "recipe.toml",
        "run.json",
    ]
    assert [p.name for p in sorted((example.path / "layers").iterdir())] == [
        f"{r:06d}.safetensors" for r in range(1, 4)
    ]
    kept = [p.name for p in sorted((example.path / "checkpoints").iterdir())]
    assert kept == ["000002.safetensors", "000003.safetensors"]


def test_the_stored_recipe_gives_the_same_experiment_again(example: Run, tmp_path: Path, same_run: Any) -> None:
    again = load(example.path / "recipe.toml")
    assert again == example.recipe
    assert again.to_toml() == (example.path / "recipe.toml").read_text()
    fedstrata.run(again, out=tmp_path / "again")
    same_run(example.path, tmp_path / "again")


def test_run_json_says_versions_layers_and_data(example: Run) -> None:
    info = json.loads((example.path / "run.json").read_text())
    assert info["format"] == 2
    assert info["versions"]["fedstrata"] == fedstrata.__version__
    assert info["versions"]["torch"] == torch.__version__
    assert info["versions"]["numpy"] == np.__version__
    assert {"python", "platform", "cpu"} <= info["versions"].keys()
    assert info["metric"] == {"name": "accuracy", "direction": "max"}
    assert info["clients"] == 4
    assert info["data"]["dataset"] == "mnist-mini"
    assert np.array(info["data"]["table"]).sum(1).tolist() == [12] * 4
    first, second = info["layers"]
    assert (first["name"], second["name"]) == ("fc1", "fc2")
    assert first["tensors"] == ["fc1.weight", "fc1.bias"]
    assert first["numbers"] == first["trainable"] == 784 * 4 + 4
    assert first["bytes"] == 4 * first["numbers"]
    assert (first["units"], second["units"]) == (4, 10)


def test_a_history_line_per_round(example: Run) -> None:
    history = example.history()
    assert [line["round"] for line in history] == [1, 2, 3]
    assert all(line["clients"] == line["replies"] == 3 and line["lost"] == [] for line in history)
    assert all(line["attempt"] == 0 and line["seconds"] >= 0 for line in history)
    for line in history:
        assert set(line["metrics"]) == {"test", "clients"}
        assert line["metrics"]["test"]["samples"] == 2000
        assert 0 <= line["metrics"]["test"]["accuracy"] <= 1
        assert np.isfinite(line["train_loss"])
    assert example.curve() == [(line["round"], line["metrics"]["test"]["accuracy"]) for line in history]


def test_the_ledger_adds_up(example: Run) -> None:
    layers = example.directory.info["layers"]
    weights = np.array([layer["bytes"] for layer in layers])
    total = 0
    for line in example.history():
        moved = line["bytes"]
        mask = example.figures(line["round"])["mask"]
        assert moved["up"] == (mask.sum(0) * weights).tolist()
        assert mask.sum(0).tolist() == [2, 2]
        assert moved["down"] == (3 * weights).tolist()
        assert moved["feedback_numbers"] == 3 * len(layers)
        assert moved["feedback"] == 4 * moved["feedback_numbers"]
        assert line["upload"] == sum(moved["up"]) + moved["feedback"]
        assert line["download"] == sum(moved["down"]) + moved["control"]
        # two μ in float64 for each of the three clients, and a byte of mask for everyone who sends
        assert moved["control"] == 3 * 2 * 8 + int(mask.any(1).sum())
        assert moved["evaluation"] == 4 * weights.sum()
        total += line["upload"]
        assert line["upload_total"] == total
    assert example.summary()["upload"] == total


def test_figures_have_shapes_and_meaning(example: Run) -> None:
    seen: set[int] = set()
    for number in (1, 2, 3):
        figures = example.figures(number)
        assert set(figures) == {
            *("angle", "smoothed_angle", "divergence", "weight", "mask", "mu", "norm", "model_angle"),
            *("clients", "sizes", "work", "loss"),
        }
        for name in ("angle", "smoothed_angle", "divergence", "weight", "mask", "mu", "norm"):
            assert figures[name].shape == (3, 2), name
            assert figures[name].dtype == np.float64
        for name in ("model_angle", "clients", "sizes", "work", "loss"):
            assert figures[name].shape == (3,), name
        sent = figures["mask"] > 0
        assert set(np.unique(figures["mask"])) <= {0.0, 1.0}
        np.testing.assert_allclose(np.nansum(figures["weight"], axis=0), 1.0)
        assert np.all(np.nan_to_num(figures["weight"])[~sent] == 0)
        assert np.all(figures["weight"][sent] > 0)
        assert np.array_equal(np.isfinite(figures["angle"]), sent)
        assert np.all((figures["angle"][sent] >= 0) & (figures["angle"][sent] <= np.pi))
        assert np.isfinite(figures["divergence"]).all()  # fedldf: everyone reports it
        assert np.all(figures["divergence"] > 0)
        # the two that were chosen are the two that moved furthest
        for layer in range(2):
            chosen = figures["divergence"][sent[:, layer], layer]
            others = figures["divergence"][~sent[:, layer], layer]
            assert chosen.min() >= others.max()
        assert np.isfinite(figures["mu"]).all()
        if number == 1:
            assert np.allclose(figures["mu"], 0.5)
            assert np.array_equal(figures["smoothed_angle"][sent], figures["angle"][sent])
        assert np.isfinite(figures["norm"][sent]).all()
        assert (figures["sizes"] == 10).all()  # 12, of which 20 % are held out
        assert (figures["work"] == 2).all()
        assert np.array_equal(figures["clients"], np.unique(figures["clients"]))
        seen |= set(figures["clients"].tolist())
    assert seen <= {0, 1, 2, 3}


def test_mu_of_a_later_round_is_the_checkpoints(example: Run) -> None:
    """What clients used in round 3 is what the server stored after round 2."""
    _, tensors = checkpoint_content(example.path / "checkpoints" / "000002.safetensors")
    assert not torch.allclose(tensors["objective/mu"], torch.full((2,), 0.5, dtype=torch.float64))
    np.testing.assert_allclose(
        example.figures(3)["mu"], np.broadcast_to(tensors["objective/mu"].numpy(), (3, 2)), rtol=1e-6
    )


def test_figures_agree_with_updates_worked_out_by_hand(tiny: Any, tmp_path: Path) -> None:
    """FedAvg, one round: weights are shares of samples, and the model moved by their mean of the updates."""
    table = tiny(
        {
            "task.partition": {"name": "dirichlet", "clients": 3, "alpha": 100.0},
            "training.rounds": 1,
            "training.steps": 1,
            "training.batch_size": 20,
        }
    )
    run = fedstrata.run(table, out=tmp_path / "run")
    figures = run.figures(1)
    shares = figures["sizes"] / figures["sizes"].sum()
    np.testing.assert_allclose(figures["weight"], np.repeat(shares[:, None], 2, axis=1))
    before = checkpoint_content(run.path / "checkpoints" / "000000.safetensors")[1]["model"].double()
    after = checkpoint_content(run.path / "checkpoints" / "000001.safetensors")[1]["model"].double()
    moved = np.array([np.linalg.norm((after - before)[:3140]), np.linalg.norm((after - before)[3140:])])
    # ⟨Δ_k, G⟩ = ‖Δ_k‖ ‖G‖ cos θ_k, and Σ p_k ⟨Δ_k, G⟩ = ‖G‖²
    projections = (figures["weight"] * figures["divergence"] * np.cos(figures["angle"])).sum(0)
    np.testing.assert_allclose(projections, moved, rtol=1e-5)


def test_checkpoints_are_safetensors_with_a_digest(example: Run) -> None:
    for number in (2, 3):
        path = example.path / "checkpoints" / f"{number:06d}.safetensors"
        metadata, tensors = checkpoint_content(path)
        assert metadata["format"] == "2"
        assert metadata["round"] == str(number)
        assert len(metadata["sha256"]) == 64
        assert {"model", "objective/mu", "weighting/smoothed_angle", "weighting/count"} == set(tensors)
        assert tensors["model"].shape == (784 * 4 + 4 + 4 * 10 + 10,)
    digest = hashlib.sha256(tensors["model"].numpy().tobytes()).hexdigest()
    assert example.summary()["weights_sha256"] == digest


# --- only the seed decides -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_workers_change_nothing(tiny: Any, tmp_path: Path, same_run: Any, algorithm: str) -> None:
    settings = {"algorithm": ALGORITHMS[algorithm], "evaluation.on": ["test", "clients"]}
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
    with_figures = fedstrata.run(tiny(settings), out=tmp_path / "with")
    without = fedstrata.run(tiny(settings | {"record.layers": False}), out=tmp_path / "without")
    assert with_figures.summary()["weights_sha256"] == without.summary()["weights_sha256"]
    assert run_content(with_figures.path)["history"] == run_content(without.path)["history"]
    assert list((without.path / "layers").iterdir()) == []
    with pytest.raises(RunDirectoryError, match="no per-layer figures of round 1"):
        without.figures(1)


def test_float64(tiny: Any, tmp_path: Path) -> None:
    run = fedstrata.run(tiny({"engine.dtype": "float64"}), out=tmp_path / "run")
    assert run.directory.latest().model.dtype == torch.float64
    info = run.directory.info
    assert info["resolved"]["dtype"] == "float64"
    assert info["layers"][0]["bytes"] == 8 * info["layers"][0]["numbers"]
    assert run.history()[0]["bytes"]["up"][0] == 4 * info["layers"][0]["bytes"]
    single = fedstrata.run(tiny(), out=tmp_path / "single")
    assert torch.allclose(run.directory.latest().model.float(), single.directory.latest().model, atol=1e-4)


# --- stop and go on --------------------------------------------------------------------------------------------------


def stop_after(table: dict[str, Any], out: Path, rounds: int) -> Run:
    """Run some rounds and let go of the run, as Ctrl-C does."""
    run, experiment = Run.create(load(table), out)
    lines = run.rounds(experiment)
    for _ in range(rounds):
        next(lines)
    lines.close()
    return run


@pytest.mark.parametrize("algorithm", ["fedavg", "combination", "fedlap+fedadp"])
@pytest.mark.parametrize("done", [1, 2])
def test_resume_a_stopped_run(tiny: Any, tmp_path: Path, same_run: Any, algorithm: str, done: int) -> None:
    table = tiny({"algorithm": ALGORITHMS[algorithm]})
    stopped = stop_after(table, tmp_path / "stopped", done)
    assert len(stopped.history()) == done
    assert not stopped.finished()
    lines: list[Any] = []
    resumed = fedstrata.resume(tmp_path / "stopped", on_round=lines.append)
    assert [line["round"] for line in lines] == list(range(done + 1, 4))
    assert resumed.finished()
    fedstrata.run(table, out=tmp_path / "whole")
    same_run(tmp_path / "stopped", tmp_path / "whole")


def test_resume_a_finished_run_runs_nothing(tiny: Any, tmp_path: Path) -> None:
    fedstrata.run(tiny(), out=tmp_path / "run")
    before = run_content(tmp_path / "run")
    lines: list[Any] = []
    fedstrata.resume(tmp_path / "run", on_round=lines.append)
    assert lines == []
    assert run_content(tmp_path / "run") == before


@pytest.mark.parametrize("checkpoint_every", [1, 2, 5])
def test_extending_equals_a_longer_run(tiny: Any, tmp_path: Path, same_run: Any, checkpoint_every: int) -> None:
    settings = {"algorithm": ALGORITHMS["combination"], "record.checkpoint_every": checkpoint_every}
    fedstrata.run(tiny(settings | {"training.rounds": 3}), out=tmp_path / "run")
    fedstrata.resume(tmp_path / "run", settings={"training.rounds": 5})
    fedstrata.run(tiny(settings | {"training.rounds": 5}), out=tmp_path / "whole")
    same_run(tmp_path / "run", tmp_path / "whole", checkpoints=checkpoint_every == 1)


def test_extending_leaves_no_trace_of_the_former_end(tiny: Any, tmp_path: Path, same_run: Any) -> None:
    """Round 3 was evaluated only because it was the last; in the longer run it is not."""
    settings = {"evaluation.every": 2}
    fedstrata.run(tiny(settings | {"training.rounds": 3}), out=tmp_path / "run")
    assert [round for round, _ in fedstrata.Run(tmp_path / "run").curve()] == [2, 3]
    fedstrata.resume(tmp_path / "run", settings={"training.rounds": 5})
    assert [round for round, _ in fedstrata.Run(tmp_path / "run").curve()] == [2, 4, 5]
    fedstrata.run(tiny(settings | {"training.rounds": 5}), out=tmp_path / "whole")
    same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("done", [1, 2, 3, 4])
def test_checkpoints_every_other_round(tiny: Any, tmp_path: Path, same_run: Any, done: int) -> None:
    """Stopped politely, nothing is lost; killed, everything after the last checkpoint is run again, the same."""
    table = tiny({"record.checkpoint_every": 2, "training.rounds": 5, "algorithm": ALGORITHMS["fedlap+fedadp"]})
    stopped = stop_after(table, tmp_path / "stopped", done)
    assert stopped.directory.latest().round == done
    shutil.copytree(tmp_path / "stopped", tmp_path / "killed")
    if done % 2:  # a kill would not have left this one
        (tmp_path / "killed" / "checkpoints" / f"{done:06d}.safetensors").unlink()
    fedstrata.run(table, out=tmp_path / "whole")
    for name in ("stopped", "killed"):
        lines: list[Any] = []
        fedstrata.resume(tmp_path / name, on_round=lines.append)
        assert lines[0]["round"] == (done if name == "killed" and done % 2 else done + 1)
        same_run(tmp_path / name, tmp_path / "whole", checkpoints=False)
        last = sorted((tmp_path / name / "checkpoints").iterdir())[-1]
        assert last.name == "000005.safetensors"


def test_an_error_between_checkpoints_loses_nothing(tiny: Any, tmp_path: Path) -> None:
    run, experiment = Run.create(load(tiny({"record.checkpoint_every": 10, "training.rounds": 9})), tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        for line in run.rounds(experiment):
            if line["round"] == 4:
                raise KeyboardInterrupt
    # the generator may only now be let go of
    run = Run(tmp_path / "run")
    assert [line["round"] for line in run.history()] == [1, 2, 3, 4]


def test_only_a_few_settings_may_change_on_resume(tiny: Any, tmp_path: Path) -> None:
    stop_after(tiny(), tmp_path / "run", 2)
    before = run_content(tmp_path / "run")
    for key, value in (
        ("training.lr", 0.5),
        ("seed", 1),
        ("algorithm.name", "fedldf"),
        ("task.model.hidden", 5),
        ("evaluation.on", ["train"]),
        ("evaluation.every", 2),
        ("record.layers", False),
        ("engine.dtype", "float64"),
        ("training", {"rounds": 5}),
        ("nonsense", 1),
    ):
        with pytest.raises(RecipeError, match="cannot change when a run is resumed") as caught:
            fedstrata.resume(tmp_path / "run", settings={key: value})
        assert caught.value.field == key
    with pytest.raises(RecipeError, match=r"training.rounds = 1: 2 rounds are already done"):
        fedstrata.resume(tmp_path / "run", settings={"training.rounds": 1})
    with pytest.raises(RecipeError, match=r"engine.workers = 0"):
        fedstrata.resume(tmp_path / "run", settings={"engine.workers": 0})
    with pytest.raises(RecipeError, match=r"evaluation.target = 95"):
        fedstrata.resume(tmp_path / "run", settings={"evaluation.target": 95.0})
    assert run_content(tmp_path / "run") == before


def test_workers_may_change_on_resume(tiny: Any, tmp_path: Path, same_run: Any) -> None:
    stop_after(tiny(), tmp_path / "run", 1)
    assert fedstrata.resume(tmp_path / "run", settings=["engine.workers=2"]).recipe.engine.workers == 2
    fedstrata.run(tiny(), out=tmp_path / "whole")
    same_run(tmp_path / "run", tmp_path / "whole", recipe=False)


def test_shortening_to_what_is_done_finishes_a_run(tiny: Any, tmp_path: Path, same_run: Any) -> None:
    stop_after(tiny(), tmp_path / "run", 2)
    assert fedstrata.resume(tmp_path / "run", settings={"training.rounds": 2}).finished()
    fedstrata.run(tiny({"training.rounds": 2}), out=tmp_path / "whole")
    same_run(tmp_path / "run", tmp_path / "whole")


def test_figures_of_a_round_that_never_was_are_dropped(tiny: Any, tmp_path: Path, same_run: Any) -> None:
    """Killed after the figures of round 3 and before its line, then shortened to two rounds."""
    stop_after(tiny(), tmp_path / "run", 2)
    shutil.copy(tmp_path / "run/layers/000002.safetensors", tmp_path / "run/layers/000003.safetensors")
    fedstrata.resume(tmp_path / "run", settings={"training.rounds": 2})
    fedstrata.run(tiny({"training.rounds": 2}), out=tmp_path / "whole")
    same_run(tmp_path / "run", tmp_path / "whole")


def test_stop_at_target(tiny: Any, tmp_path: Path, same_run: Any) -> None:
    settings = {"training.rounds": 8, "training.epochs": 4}
    curve = fedstrata.run(tiny(settings), out=tmp_path / "free").curve()
    best_round, target = next((r, v) for r, v in curve if r >= 3 and v == max(w for q, w in curve if q <= r))
    assert best_round < 8, "the tiny run no longer improves after its first rounds; choose another one"
    reaching = next(r for r, v in curve if v >= target)
    goal = {"evaluation.target": target, "evaluation.stop_at_target": True}
    run = fedstrata.run(tiny(settings | goal), out=tmp_path / "run")
    assert len(run.history()) == reaching
    assert run.finished()
    assert run.summary()["rounds_to_target"] == reaching
    assert run.summary()["upload_to_target"] == run.history()[-1]["upload_total"]
    assert run.directory.latest().round == reaching
    assert fedstrata.resume(run.path).history() == run.history()
    # letting go of the target goes on to the end
    fedstrata.resume(run.path, settings={"evaluation.stop_at_target": False})
    same_run(run.path, tmp_path / "free", recipe=False)


def test_evaluating_every_other_round(tiny: Any, tmp_path: Path) -> None:
    settings = {"training.rounds": 5}
    often = fedstrata.run(tiny(settings), out=tmp_path / "often")
    seldom = fedstrata.run(tiny(settings | {"evaluation.every": 2}), out=tmp_path / "seldom")
    assert [round for round, _ in seldom.curve()] == [2, 4, 5]
    assert dict(seldom.curve()).items() <= dict(often.curve()).items()
    assert [line["metrics"] == {} for line in seldom.history()] == [True, False, True, False, False]
    assert often.summary()["weights_sha256"] == seldom.summary()["weights_sha256"]


def test_a_missed_target(tiny: Any, tmp_path: Path) -> None:
    run = fedstrata.run(tiny({"evaluation.target": 1.0}), out=tmp_path / "run")
    summary = run.summary()
    assert summary["rounds_to_target"] is None
    assert summary["upload_to_target"] is None
    assert summary["best"] == max(value for _, value in run.curve())
    assert summary["accuracy"] == run.curve()[-1][1]


def test_nothing_is_overwritten(tiny: Any, tmp_path: Path) -> None:
    fedstrata.run(tiny(), out=tmp_path / "run")
    before = run_content(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="exists and is not empty"):
        fedstrata.run(tiny({"seed": 9}), out=tmp_path / "run")
    assert run_content(tmp_path / "run") == before
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    (tmp_path / "empty").mkdir()
    assert fedstrata.run(tiny({"training.rounds": 1}), out=tmp_path / "empty").finished()


def test_a_run_without_out_gets_a_directory_of_its_own(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {fedstrata.run(tiny({"training.rounds": 1}), algorithm="fedldf").path for _ in range(3)}
    assert len(paths) == 3
    assert all(path.parent == Path("runs") and path.name.startswith("tiny-fedldf-s0-") for path in paths)


# --- models in and out -----------------------------------------------------------------------------------------------


class Norms(nn.Module):
    """BatchNorm, a frozen layer, a tied weight and a buffer that is not stored."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(2, 6)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.first = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.out = nn.Linear(6, 2)
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.tied(self.first(self.norm(self.frozen(x) * self.scale)).relu()))


def norms_task(blobs: Any) -> Task:
    return Task(model=Norms, clients=[blobs(20, k) for k in range(3)], evaluation={"test": blobs(40, 9)})


def test_export_is_a_whole_state_dict(blobs: Any, tmp_path: Path) -> None:
    task = norms_task(blobs)
    table = {"training": {"rounds": 3, "batch_size": 5, "lr": 0.1}, "engine": {"workers": 1}}
    run = fedstrata.run(table, task=task, out=tmp_path / "run")
    run.export(tmp_path / "deep" / "model.safetensors", task=task)
    state = load_file(tmp_path / "deep" / "model.safetensors")
    fresh = Norms()
    fresh.load_state_dict(state, strict=True)
    trained = run.model(task=task)
    inputs = blobs(40, 9)[0]
    assert torch.equal(fresh.eval()(inputs), trained(inputs))
    accuracy = (trained(inputs).argmax(1) == blobs(40, 9)[1]).double().mean()
    assert run.curve()[-1][1] == pytest.approx(float(accuracy))
    # trained, ridden along, left alone, and tied
    assert not torch.equal(state["norm.running_mean"], torch.zeros(6))
    torch.manual_seed(0)
    assert torch.equal(state["first.weight"], state["tied.weight"])
    assert "scale" not in state
    with safe_open(tmp_path / "deep" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"experiment": "experiment", "algorithm": "fedavg"}
    with pytest.raises(RunDirectoryError, match="it is not overwritten"):
        run.export(tmp_path / "deep" / "model.safetensors", task=task)


def test_frozen_parameters_stay_what_they_were(blobs: Any, tmp_path: Path) -> None:
    task = norms_task(blobs)
    table = {"training": {"rounds": 2, "batch_size": 5, "lr": 0.1}, "engine": {"workers": 1}}
    short = fedstrata.run(table | {"training": table["training"] | {"rounds": 1}}, task=task, out=tmp_path / "short")
    long = fedstrata.run(table, task=task, out=tmp_path / "long")
    first, second = short.model(task=task).state_dict(), long.model(task=task).state_dict()
    assert torch.equal(first["frozen.weight"], second["frozen.weight"])
    assert not torch.equal(first["first.weight"], second["first.weight"])
    assert "frozen" not in long.layer_names


def test_initial_weights_from_an_export(tiny: Any, tmp_path: Path) -> None:
    start = fedstrata.run(tiny({"training.rounds": 2}), out=tmp_path / "start")
    start.export(tmp_path / "start.safetensors")
    settings = {"training.initial_weights": str(tmp_path / "start.safetensors"), "training.rounds": 1, "seed": 5}
    run = fedstrata.run(tiny(settings), out=tmp_path / "run")
    first = checkpoint_content(run.path / "checkpoints" / "000000.safetensors")[1]["model"]
    assert torch.equal(first, start.directory.latest().model)
    assert not torch.equal(run.directory.latest().model, first)


def test_a_run_goes_on_from_its_checkpoint_not_from_its_initial_weights(
    tiny: Any, tmp_path: Path, same_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fedstrata.run(tiny({"training.rounds": 1}), out="start").export("w.safetensors")
    table = tiny({"training.initial_weights": "w.safetensors"})  # relative: a run may be resumed from elsewhere
    fedstrata.run(table, out="whole")
    stop_after(table, tmp_path / "stopped", 1)
    monkeypatch.chdir("/")
    fedstrata.resume(tmp_path / "stopped")
    same_run(tmp_path / "stopped", tmp_path / "whole")


def test_initial_weights_of_another_model_are_refused(tiny: Any, tmp_path: Path) -> None:
    fedstrata.run(tiny({"training.rounds": 1}), out=tmp_path / "start").export(tmp_path / "w.safetensors")
    settings = {"training.initial_weights": str(tmp_path / "w.safetensors"), "task.model.hidden": 5}
    with pytest.raises(RecipeError, match=r"training.initial_weights = .*does not fit the model") as caught:
        fedstrata.run(tiny(settings), out=tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


# --- clients that get lost -------------------------------------------------------------------------------------------


def test_too_few_replies_stop_the_run_with_a_reason_and_resume_would_go_on(tiny: Any, tmp_path: Path) -> None:
    table = tiny({"training.dropouts": 0.9, "training.min_replies": 1.0, "training.attempts": 2})
    with pytest.raises(RoundFailed, match=r"round 1: \d of 4 replies usable after 2 attempts; client \d: dropped out"):
        fedstrata.run(table, out=tmp_path / "run")
    run = Run(tmp_path / "run")
    assert run.history() == []
    assert not run.finished()
    assert run.directory.latest().round == 0


def test_a_round_that_is_tried_again_says_so_and_pays_for_both(tiny: Any, tmp_path: Path) -> None:
    table = tiny({"training.dropouts": 0.3, "training.min_replies": 1.0, "training.attempts": 50, "seed": 2})
    run = fedstrata.run(table, out=tmp_path / "run")
    lines = run.history()
    assert max(line["attempt"] for line in lines) > 0
    whole = sum(layer["bytes"] for layer in run.directory.info["layers"])
    for line in lines:
        assert line["replies"] == 4
        assert sum(line["bytes"]["down"]) == 4 * whole * (line["attempt"] + 1)


def test_opening_does_not_change_a_run(tiny: Any, tmp_path: Path) -> None:
    run = stop_after(tiny(), tmp_path / "run", 2)
    stamps = {p: p.stat().st_mtime_ns for p in run.path.rglob("*") if p.is_file()}
    again = reopen(run.path)
    again.summary()
    again.finished()
    assert {p: p.stat().st_mtime_ns for p in run.path.rglob("*") if p.is_file()} == stamps


def test_a_recipe_is_frozen(tiny: Any) -> None:
    recipe = Recipe.parse(tiny())
    with pytest.raises(ValueError, match="frozen"):
        recipe.seed = 3  # type: ignore[misc]


def test_a_convolutional_model_is_exported_in_torchs_own_layout(tiny: Any, tmp_path: Path) -> None:
    """The flat vector has convolutions channels last; what leaves it is an ordinary state dict."""
    run = fedstrata.run(tiny({"task.model": {"name": "cnn"}, "training.rounds": 1}), out=tmp_path / "run")
    run.export(tmp_path / "model.safetensors")
    exported, model = load_file(tmp_path / "model.safetensors"), run.model()
    for name, tensor in model.state_dict().items():
        assert exported[name].is_contiguous()
        assert torch.equal(exported[name], tensor), name


def test_interrupted_while_evaluating_keeps_all_whole_rounds(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds 1 to 3 are whole when round 4 is interrupted between training and evaluation."""
    measure = evaluation.evaluate

    def interrupted(*arguments: Any) -> Any:
        if arguments[4] == 4:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(evaluation, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fedstrata.run(tiny({"training.rounds": 6, "record.checkpoint_every": 5}), out=tmp_path / "run")
    run = fedstrata.Run(tmp_path / "run")
    assert len(run.history()) == 3
    assert run.directory.latest().round == 3


@pytest.mark.parametrize("call", ["fsync", "close"])
def test_interrupted_once_a_line_is_written_keeps_its_round(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The signal comes when round 4's line is in the file and before anything else could be noted of it."""
    history, real = tmp_path / "run" / "history.jsonl", getattr(os, call)
    sent = []

    def interrupted(handle: int) -> None:
        real(handle)
        if not sent and history.exists() and history.read_bytes().count(b"\n") == 4:
            sent.append(call)
            raise KeyboardInterrupt

    monkeypatch.setattr(os, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        fedstrata.run(tiny({"training.rounds": 6, "record.checkpoint_every": 5}), out=tmp_path / "run")
    run = fedstrata.Run(tmp_path / "run")
    assert len(run.history()) == run.directory.latest().round == 4


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


def test_a_lock_that_is_not_let_go_is_waited_for_and_then_said(tmp_path: Path) -> None:
    with locked(tmp_path):
        problem = rf"is in use by process {os.getpid()}; waited 0\.1 s"
        with pytest.raises(RunDirectoryError, match=problem), locked(tmp_path, patience=0.1):
            pass
        child = os.fork()
        if child == 0:  # it outlives us by a while, and must not keep the lock
            time.sleep(5)
            os._exit(0)
    with locked(tmp_path, patience=0.5):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_directory_that_cannot_be_locked_is_no_directory_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with pytest.raises(RunDirectoryError, match="cannot be locked: No such file"), locked(tmp_path / "nowhere"):
        pass
    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(RunDirectoryError, match="cannot be locked: No locks available"), locked(tmp_path):
        pass


def test_a_metric_that_was_not_measured_at_the_end_says_when_it_was(tiny: Any, tmp_path: Path, cli: Any) -> None:
    run = fedstrata.run(tiny({"training.rounds": 3}), out=tmp_path / "run")
    assert run.summary()["measured_in_round"] == 3
    history = run.path / "history.jsonl"
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    lines[-1]["metrics"] = {}  # as if nobody had answered
    history.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert Run(run.path).summary()["measured_in_round"] == 2
    assert "in round 2 (best" in cli("show", run.path).out
