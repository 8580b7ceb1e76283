"""What rules are tried on: layers of small models, cohorts in every situation, and a federation of few samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from fedstrata.core import rng
from fedstrata.core.cohort import Cohort
from fedstrata.core.layers import Layers
from fedstrata.core.messages import keep_layers, keep_units, layers_with_units
from fedstrata.tasks.task import Task

CLIENTS = 9
"""So many clients exist; a cohort has some of them."""


class Net(nn.Module):
    """A convolution, BatchNorm with its buffers, a linear layer, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(12, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        """Three logits for each image of 1 × 4 × 4."""
        logits: Tensor = self.head(torch.relu(self.norm(self.conv(images))).flatten(1)) * self.scale
        return logits


@cache
def all_layers() -> dict[str, Layers]:
    """Layers of every kind, by what is said of them when a check fails."""
    with rng.global_scope(0, "check"):
        one, many = nn.Linear(4, 2), Net()
    return {
        "one layer": Layers.of(one),
        "layers with buffers": Layers.of(many),
        "one layer in float64": Layers.of(one.double()),
        "layers with buffers in float64": Layers.of(many.double()),
        "a layer for each tensor": Layers.of(many, "tensor"),
    }


def cohort(
    layers: Layers,
    count: int,
    *,
    clients: Sequence[int] | None = None,
    round: int = 1,
    scale: float = 1.0,
    partial: bool = False,
    units: bool = False,
) -> Cohort:
    """Random updates of clients of unequal sizes, of all layers or of some: the first client then sends nothing."""
    draw = rng.generator(round, "check", client=count)
    updates = torch.from_numpy(draw.normal(size=(count, layers.numel)) * 0.1 * scale).to(layers.dtype)
    sent = torch.ones(count, len(layers), dtype=torch.bool)
    picked = None
    if partial:
        sent = torch.from_numpy(draw.random((count, len(layers))) < 0.6)
        sent[1] = True
        if len(layers) > 1:
            sent[:, -1] = False  # nobody sends the last layer
        sent[0] = False
    if units:
        picked = torch.from_numpy(draw.random((count, layers.units)) < 0.5)
        picked[:, 0], picked[0] = False, False
        sent = torch.stack([layers_with_units(row, layers) for row in picked])
    for at, update in enumerate(updates):
        keep_layers(update, sent[at], layers)
        if picked is not None:
            keep_units(update, picked[at], layers)
    return Cohort(
        round=round,
        clients=torch.tensor(sorted(draw.permutation(CLIENTS)[:count]) if clients is None else clients),
        sizes=torch.from_numpy(draw.integers(1, 100, count)).double(),
        layers=layers,
        updates=tuple(updates),
        sent=sent,
        model=torch.from_numpy(draw.normal(size=layers.numel)).to(layers.dtype),
        units=picked,
        steps=(steps := torch.from_numpy(draw.integers(1, 10, count))),
        reach=steps.double(),
        lr=0.1,
        population=CLIENTS,
    )


def alike(one: Cohort, scale: float = 1.0) -> Cohort:
    """The same cohort with the first update from everyone."""
    return replace(one, updates=tuple(one.updates[0] * scale for _ in one.updates))


def chosen(one: Cohort, rows: Sequence[int]) -> Cohort:
    """Some of a cohort's clients, or all in another order."""
    at = list(rows)
    return replace(
        one,
        clients=one.clients[at],
        sizes=one.sizes[at],
        updates=tuple(one.updates[row] for row in at),
        sent=one.sent[at],
        units=None if one.units is None else one.units[at],
        steps=None if one.steps is None else one.steps[at],
        reach=None if one.reach is None else one.reach[at],
    )


def situations(layers: Layers) -> dict[str, Cohort]:
    """Cohorts that a rule must have an answer for, by what is said of them."""
    five = cohort(layers, 5)
    return {
        "five clients": five,
        "one client": cohort(layers, 1),
        "two clients whose updates cancel out": replace(
            chosen(five, [0, 1]), updates=(five.updates[0], -five.updates[0]), sizes=torch.ones(2, dtype=torch.float64)
        ),
        "equal updates": alike(five),
        "updates of zeros": alike(five, 0.0),
        "updates of about 1e-12": cohort(layers, 4, scale=1e-11),
        "updates of about 1e12": cohort(layers, 4, scale=1e13),
        "partial uploads": cohort(layers, 5, partial=True),
        "uploads of some units": cohort(layers, 5, units=True),
    }


UPLOADS = ("models", "layers", "units")
"""What clients send, from the coarsest to the finest."""


def sends(one: Cohort) -> str:
    """What the clients of a cohort sent."""
    return "units" if one.units is not None else "models" if one.sent.all() else "layers"


def history(layers: Layers, partial: bool = True) -> list[Cohort]:
    """Four rounds: of five clients, of others with `partial` uploads, of two that did not move, and of one."""
    still = cohort(layers, 2, clients=[2, 7], round=3, scale=0.0)
    return [
        cohort(layers, 5, clients=[1, 2, 4, 7, 8]),
        cohort(layers, 5, clients=[0, 2, 3, 4, 7], round=2, partial=partial),
        still,
        cohort(layers, 1, clients=[4], round=4),
    ]


def federation(clients: int = 5) -> Task:
    """Random images of three classes, a few for each client; every client has a bias of its own."""
    draw = np.random.default_rng(7)

    def images(count: int, bias: int) -> tuple[Tensor, Tensor]:
        labels = (draw.integers(0, 2, count) + bias) % 3
        pixels = draw.normal(size=(count, 1, 4, 4)) + 0.7 * labels[:, None, None, None] - 0.1 * bias
        return torch.from_numpy(pixels).float(), torch.from_numpy(labels)

    shards = [images(4 + 3 * (at % 4), at) for at in range(clients)]
    held_out = [images(2, at) for at in range(clients)]
    return Task(Net, shards, evaluation={"test": images(10, 0)}, held_out=held_out, name="check_rule")
