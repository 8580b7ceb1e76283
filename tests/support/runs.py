"""A small recipe, what is in a run directory, and a recipe that is forged."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import tomli_w
import torch
from safetensors import safe_open

TINY: dict[str, Any] = {
    "name": "tiny",
    "task": {
        "dataset": "mnist-mini",
        "partition": {"name": "iid", "clients": 4, "samples": 12},
        "model": {"name": "mlp", "hidden": 4},
    },
    "training": {"rounds": 3, "batch_size": 6, "lr": 0.1},
    "engine": {"workers": 1},
}

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


def checkpoint_content(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Metadata and tensors of a checkpoint."""
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def arrays_of(folder: Path) -> dict[str, dict[str, bytes]]:
    """What is in the safetensors files of a folder."""
    files = {file.name: checkpoint_content(file)[1] for file in sorted(folder.iterdir())}
    return {file: {name: t.numpy().tobytes() for name, t in found.items()} for file, found in files.items()}


def run_content(path: str | Path, *, checkpoints: bool = True, recipe: bool = True) -> dict[str, Any]:
    """Everything in a run directory that is the same in two runs of one experiment, in a form that compares."""
    from fedstrata.runs.reader import Run

    run, folder = Run(path), Path(path)
    history = [{key: value for key, value in line.items() if key != "seconds"} for line in run.history()]
    figures = {
        file.name: {
            name: (v.dtype.str, v.shape, v.tobytes()) for name, v in run.layers(int(file.name.split(".")[0])).items()
        }
        for file in sorted((folder / "layers").iterdir())
    }
    content = {"history": history, "figures": figures, "weights": run.summary()["weights_sha256"]}
    if checkpoints:
        content["checkpoints"] = {}
        for file in sorted((folder / "checkpoints").iterdir()):
            metadata, tensors = checkpoint_content(file)
            del metadata["run"], metadata["sha256"]  # the run's own name, and a digest that has it in it
            content["checkpoints"][file.name] = (
                metadata,
                {n: (str(t.dtype), tuple(t.shape), t.numpy().tobytes()) for n, t in tensors.items()},
            )
    if (folder / "clients").is_dir():
        content["each client"] = arrays_of(folder / "clients")
    if recipe:
        content["recipe"] = (folder / "recipe.toml").read_text(encoding="utf-8")
    apart = {"memory", "nodes"} | (set() if checkpoints else {"checkpoints"})  # where memory is depends on the engine
    content["files"] = sorted(entry.name for entry in folder.iterdir() if entry.name not in apart)
    return content


def forge_recipe(path: Path, recipe: dict[str, Any]) -> None:
    """Put another recipe into a run directory, as somebody does who knows about its digest."""
    content = tomli_w.dumps(recipe).encode()
    (path / "recipe.toml").write_bytes(content)
    about = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(about | {"recipe_sha256": hashlib.sha256(content).hexdigest()}))
