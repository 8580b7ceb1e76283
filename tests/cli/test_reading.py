"""Whoever reads runs, recipes and what there is does not wait for torch, nor for anything else that only computes."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata
from fedstrata.core import lazy
from fedstrata.runs.compare import begin_comparison, run_job
from fedstrata.runs.runner import create_run, run_rounds
from fedstrata.runs.writer import last_state
from tests.support.processes import process_environment
from tests.support.runs import TINY, checkpoint_content

HEAVY = ("torch", "matplotlib", "pyarrow", "PIL", "pandas", "huggingface_hub", "flwr", "ray")

LISTED = ("recipes", "algorithms", "rules", "models", "partitions", "settings", "runs")

SAY_WHAT_WAS_LOADED = f"""
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted(set({HEAVY}) & set(sys.modules))), file=sys.stderr))
"""

COMMAND_LINE = "from fedstrata.cli import main; main()"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose `runs/` has a run, one that is not finished, and a comparison."""
    place = tmp_path_factory.mktemp("place")
    runs = place / "runs"
    fedstrata.run(TINY, algorithm="fedlap", settings={"training.epochs": 2}, out=runs / "whole")
    unfinished, experiment = create_run(fedstrata.load(TINY, algorithm="fedlayerwise"), runs / "unfinished")
    next(run_rounds(unfinished, experiment))
    for job in begin_comparison(TINY, ["fedavg", "fedldf:n=2"], [0, 1], out=runs / "compared").jobs:
        list(run_job(job))
    return place


def in_a_fresh_process(code: str, place: Path, *argv: str) -> tuple[str, list[str]]:
    """What it prints, and which of the heavy modules are loaded when it has ended."""
    command = [sys.executable, "-c", SAY_WHAT_WAS_LOADED + code, *argv]
    done = subprocess.run(command, cwd=place, env=process_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(done.stderr)


@pytest.mark.parametrize(
    "command",
    [
        ("show", "runs/whole"),
        ("show", "runs/unfinished"),
        ("show", "runs/compared"),
        ("list",),
        *(("list", word) for word in LISTED),
    ],
    ids=" ".join,
)
def test_a_command_that_reads_says_the_same_without_torch(
    command: tuple[str, ...], place: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which has torch and much else, it says the same."""
    monkeypatch.chdir(place)
    out, loaded = in_a_fresh_process(COMMAND_LINE, place, *command)
    assert loaded == []
    assert out == cli(*command).out != ""


@pytest.mark.parametrize("directory", ["runs/whole", "runs/unfinished", "runs/compared", "runs"])
def test_a_report_is_the_same_without_torch(
    directory: str, place: Path, tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    here, there = tmp_path / "here.html", tmp_path / "there.html"
    _, loaded = in_a_fresh_process(COMMAND_LINE, place, "report", directory, "--out", str(there))
    assert loaded == []
    assert cli("report", directory, "--out", here).code == 0
    assert there.read_bytes() == here.read_bytes()


def test_from_python_a_run_is_read_without_torch(place: Path) -> None:
    code = """
import json, fedstrata
run = fedstrata.Run("runs/whole")
angles = run.layers(3)["angle"].tolist()
print(json.dumps([run.summary(), run.history(), angles, run.curve(), run.finished(), run.metric.name, run.layer_names]))
"""
    out, loaded = in_a_fresh_process(code, place)
    assert loaded == []
    run = fedstrata.Run(place / "runs" / "whole")
    angles = run.layers(3)["angle"].tolist()
    here = [run.summary(), run.history(), angles, run.curve(), run.finished(), run.metric.name, run.layer_names]
    assert json.loads(out) == json.loads(json.dumps(here))


def test_a_recipe_whose_optimizer_torch_knows_is_read_without_it(place: Path) -> None:
    code = """
from fedstrata.recipes.schema import Recipe
table = {"training": {"optimizer": "AdamW", "optimizer_options": {"amsgrad": True}, "clip_norm": 1.0}}
recipe = Recipe.read(table)
print(recipe.training.optimizer, recipe.label, len(recipe.to_toml()) > 0)
"""
    assert in_a_fresh_process(code, place) == ("adamw fedavg True\n", [])


def test_recipes_and_algorithms_are_made_without_torch(place: Path) -> None:
    code = """
import fedstrata
settings = {"layers.grouping": "tensor", "training.schedule": {"name": "cosine", "rounds": 9}}
recipe = fedstrata.load("quickstart", algorithm="fedldf:n=4", settings=settings)
print(recipe.built_algorithm == fedstrata.fedldf(n=4), recipe.grouping())
"""
    assert in_a_fresh_process(code, place) == ("True tensor\n", [])


def test_what_is_read_without_torch_is_what_torch_reads(place: Path) -> None:
    """The checkpoint of round 1 has the model, a table of angles [4, 2] and one of counts, as safetensors has them."""
    run = fedstrata.Run(place / "runs" / "unfinished")
    state = last_state(run.directory)
    _, tensors = checkpoint_content(run.path / "checkpoints" / "000001.safetensors")
    model, angles, counts = (tensors[name] for name in ("model", "weighting/smoothed_angle", "weighting/count"))
    assert (state.round, angles.shape, counts.dtype) == (1, (4, 2), torch.int64)
    found = (state.model, state.weighting["smoothed_angle"], state.weighting["count"])
    for ours, theirs in zip(found, (model, angles, counts), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert run.summary()["weights_sha256"] == hashlib.sha256(model.numpy().tobytes()).hexdigest()


def test_torch_is_imported_with_the_first_look_into_it(place: Path) -> None:
    assert lazy.torch.float32 is torch.float32
    assert lazy.nn.Linear is torch.nn.Linear
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = lazy.torch.nothing  # type: ignore[attr-defined]
    assert in_a_fresh_process("from fedstrata.core.lazy import torch", place)[1] == []
    assert in_a_fresh_process("from fedstrata.core.lazy import torch; torch.float32", place)[1] == ["torch"]


def test_garbage_is_collected_while_a_run_goes_on() -> None:
    """The command line leaves it alone while it imports; training may leave large cycles, on every engine."""
    code = """
import gc
import fedstrata
from fedstrata.processes import hold_collection
from fedstrata.recipes.experiment import build_experiment
from fedstrata.runs.engine import open_engine

hold_collection()
assert not gc.isenabled()
experiment = build_experiment(fedstrata.load("quickstart"))
for _ in open_engine(experiment), open_engine(experiment):
    assert gc.isenabled()
gc.disable()
open_engine(experiment)
assert not gc.isenabled(), "somebody else's choice stays"
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=process_environment())
