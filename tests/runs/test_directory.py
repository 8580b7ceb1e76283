"""What a run directory holds, and who may be in it."""

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

import fedstrata
from fedstrata.core.errors import RunDirectoryError
from fedstrata.recipes.experiment import build_experiment
from fedstrata.recipes.schema import load
from fedstrata.runs import runner
from fedstrata.runs.files import locked
from fedstrata.runs.reader import Run
from fedstrata.runs.runner import start_run
from tests.support.runs import ALGORITHMS, TINY, checkpoint_content, forge_recipe


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Run:
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
    problem = r"recipe\.toml is damaged: algorithm.objective = 'plain': must be a table with a name"
    with pytest.raises(RunDirectoryError, match=problem):
        Run(tmp_path / "run")
    assert cli("show", tmp_path / "run").code == 2


def test_runs_that_begin_at_once_do_not_mix(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes, in the same second and so with the same name in mind, each with its own learning rate."""
    monkeypatch.chdir(tmp_path)
    rates = [0.1, 0.2, 0.3, 0.4]
    experiments = [build_experiment(load(tiny({"training.lr": rate}))) for rate in rates]
    monkeypatch.setattr(runner, "datetime", SimpleNamespace(now=lambda: datetime(2026, 1, 1)))

    def begin(one: Any) -> None:
        for _ in range(5):
            start_run(one)

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
        "clients",
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
        assert line["train_loss"] is not None
        assert np.isfinite(line["train_loss"])
    assert example.curve() == [(line["round"], line["metrics"]["test"]["accuracy"]) for line in history]


def test_the_ledger_adds_up(example: Run) -> None:
    layers = example.about.layers
    weights = np.array([layer.bytes for layer in layers])
    total = 0
    for line in example.history():
        moved = line["bytes"]
        mask = example.layers(line["round"])["mask"]
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


def test_records_of_layers_have_shapes_and_meaning(example: Run) -> None:
    seen: set[int] = set()
    for number in (1, 2, 3):
        layers = example.layers(number)
        assert set(layers) == {
            *("angle", "smoothed_angle", "divergence", "weight", "mask", "mu", "norm", "model_angle"),
            *("clients", "sizes", "work", "loss"),
        }
        for name in ("angle", "smoothed_angle", "divergence", "weight", "mask", "mu", "norm"):
            assert layers[name].shape == (3, 2), name
            assert layers[name].dtype == np.float64
        for name in ("model_angle", "clients", "sizes", "work", "loss"):
            assert layers[name].shape == (3,), name
        sent = layers["mask"] > 0
        assert set(np.unique(layers["mask"])) <= {0.0, 1.0}
        np.testing.assert_allclose(np.nansum(layers["weight"], axis=0), 1.0)
        assert np.all(np.nan_to_num(layers["weight"])[~sent] == 0)
        assert np.all(layers["weight"][sent] > 0)
        assert np.array_equal(np.isfinite(layers["angle"]), sent)
        assert np.all((layers["angle"][sent] >= 0) & (layers["angle"][sent] <= np.pi))
        assert np.isfinite(layers["divergence"]).all()  # fedldf: everyone reports it
        assert np.all(layers["divergence"] > 0)
        # the two that were chosen are the two that moved furthest
        for layer in range(2):
            chosen = layers["divergence"][sent[:, layer], layer]
            others = layers["divergence"][~sent[:, layer], layer]
            assert chosen.min() >= others.max()
        assert np.isfinite(layers["mu"]).all()
        if number == 1:
            assert np.allclose(layers["mu"], 0.5)
            assert np.array_equal(layers["smoothed_angle"][sent], layers["angle"][sent])
        assert np.isfinite(layers["norm"][sent]).all()
        assert (layers["sizes"] == 10).all()  # 12, of which 20 % are held out
        assert (layers["work"] == 2).all()
        assert np.array_equal(layers["clients"], np.unique(layers["clients"]))
        seen |= set(layers["clients"].tolist())
    assert seen <= {0, 1, 2, 3}


def test_mu_of_a_later_round_is_the_checkpoints(example: Run) -> None:
    """What clients used in round 3 is what the server stored after round 2."""
    _, tensors = checkpoint_content(example.path / "checkpoints" / "000002.safetensors")
    assert not torch.allclose(tensors["objective/mu"], torch.full((2,), 0.5, dtype=torch.float64))
    np.testing.assert_allclose(
        example.layers(3)["mu"], np.broadcast_to(tensors["objective/mu"].numpy(), (3, 2)), rtol=1e-6
    )


def test_a_record_of_layers_agrees_with_updates_worked_out_by_hand(tiny: Any, tmp_path: Path) -> None:
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
    layers = run.layers(1)
    shares = layers["sizes"] / layers["sizes"].sum()
    np.testing.assert_allclose(layers["weight"], np.repeat(shares[:, None], 2, axis=1))
    before = checkpoint_content(run.path / "checkpoints" / "000000.safetensors")[1]["model"].double()
    after = checkpoint_content(run.path / "checkpoints" / "000001.safetensors")[1]["model"].double()
    moved = np.array([np.linalg.norm((after - before)[:3140]), np.linalg.norm((after - before)[3140:])])
    # ⟨Δ_k, G⟩ = ‖Δ_k‖ ‖G‖ cos θ_k, and Σ p_k ⟨Δ_k, G⟩ = ‖G‖²
    projections = (layers["weight"] * layers["divergence"] * np.cos(layers["angle"])).sum(0)
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
