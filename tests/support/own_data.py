"""Nodes with data of their own, and what the local engine makes of the same samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import fedstrata
from fedstrata.core import rng
from fedstrata.runs.reader import Run
from fedstrata.tasks.models import mlp
from tests.support import node_data

HELD_OUT = 0.25

RECIPE: dict[str, Any] = {
    "name": "hospitals",
    "seed": 5,
    "task": {
        "dataset": "nodes",
        "inputs": "unit",
        "nodes": {"clients": 4, "shape": [1, 28, 28], "classes": 10},
        "model": {"name": "mlp", "hidden": 4},
    },
    "training": {"rounds": 3, "batch_size": 6, "lr": 0.1},
    "evaluation": {"on": ["clients"], "held_out": HELD_OUT},
}


def write_all(folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """A folder of each kind, with 20 to 35 samples; the samples in the order in which they are read."""
    everything = []
    for client, kind in enumerate(node_data.WRITERS):
        images, labels = node_data.digits(20 + 5 * client, seed=client)
        if kind == "image":
            images, labels = node_data.sorted_by_class(images, labels)
        node_data.WRITERS[kind](folder / kind, images, labels)
        everything.append((images, labels))
    return everything


def parts(client: int, samples: tuple[np.ndarray, np.ndarray]) -> tuple[Any, Any]:
    """A client's training and held-out tensors, worked out here once more."""
    inputs, targets = torch.from_numpy(samples[0]).float() / 255, torch.from_numpy(samples[1])
    order = rng.generator(RECIPE["seed"], "held-out", client=client).permutation(len(targets))
    count = round(HELD_OUT * len(targets))
    return (inputs[order[count:]], targets[order[count:]]), (inputs[order[:count]], targets[order[:count]])


def run_locally(samples: list[tuple[np.ndarray, np.ndarray]], out: Path, **changes: Any) -> Run:
    """All the nodes' samples in one place, as a Task in Python."""
    pairs = [parts(client, own) for client, own in enumerate(samples)]
    task = fedstrata.Task(
        model=lambda: mlp((1, 28, 28), 10, hidden=4),
        clients=[train for train, _ in pairs],
        held_out=[held_out for _, held_out in pairs],
        loss=cross_entropy,
    )
    table = {key: value for key, value in RECIPE.items() if key != "task"} | changes
    return fedstrata.run(table, task=task, out=out)
