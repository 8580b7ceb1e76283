"""What is trained: recipes name these functions as digested.tasks:…, and clients' data may be of no use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedstrata


def images() -> Any:
    """Train and test: 8×8 images of five patterns under noise."""
    draw = np.random.default_rng(11)
    labels = draw.integers(0, 5, 320)
    pixels = draw.normal(size=(5, 1, 8, 8))[labels] + draw.normal(size=(320, 1, 8, 8))
    x, y = torch.from_numpy(pixels).float(), torch.from_numpy(labels)
    return (x[:240], y[:240]), (x[240:], y[240:])


def small_cnn(input_shape: tuple[int, ...], classes: int, norm: str = "batch") -> nn.Module:
    """Two convolutions, a normalisation behind the first."""
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 4, 3),
        nn.BatchNorm2d(4) if norm == "batch" else nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, classes),
    )


class Odd(nn.Module):
    """Tied weights, a frozen part in bfloat16, buffers of integers, floats and not persistent ones, Dropout."""

    calls: Tensor
    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.base = nn.Linear(4, 4).bfloat16().requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.body = nn.Linear(4, 4)
        self.body.bias.requires_grad_(False)
        self.out = nn.Linear(4, 9, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("largest", torch.zeros(1))
        self.register_buffer("share", torch.full((1,), 0.5), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words).mean(1)
        x = x + self.base(x.bfloat16()).to(x.dtype) * self.share
        if self.training:
            self.calls += 1
            self.largest = torch.maximum(self.largest, x.detach().abs().max())
        x = torch.tanh(self.body(self.norm(x)))
        return self.out(F.dropout(x, 0.2, self.training))


def odd_task(whole: bool = False) -> Any:
    """Which word comes next, with a loss and a metric of its own; no last batch of four has one sample only."""
    draw = torch.Generator().manual_seed(4)
    clients = []
    for at, size in enumerate((12, 7, 10, 8, 6, 14)):
        words = torch.randint(9, (size, 4), generator=draw)
        clients.append((words[:, :3], (words.sum(1) + at) % 9))
    return fedstrata.Task(
        model=Odd,
        clients=clients,
        held_out=[(x[::2], y[::2]) for x, y in clients],
        evaluation={"test": clients[0], "more": clients[5]},
        loss=lambda outputs, targets: F.cross_entropy(outputs, targets, label_smoothing=0.1),
        metric=fedstrata.Metric("entropy", F.cross_entropy, "min", whole),
    )


@dataclass
class Shard:
    """One client's data, and what is wrong with it."""

    client: int
    size: int
    trouble: str = ""

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        if self.trouble == "raises":
            raise OSError("no disk")
        if self.trouble == "raises, not finite":
            raise ValueError("a pixel is not finite")
        draw = np.random.default_rng([self.client, 5])
        labels = draw.integers(0, 3, self.size)
        x = draw.normal(size=(self.size, 4)) + labels[:, None]
        with np.errstate(over="ignore"):
            x *= {"nan": np.nan, "huge": 1e308}.get(self.trouble, 1.0)
        return torch.from_numpy(x[indices]), torch.from_numpy(labels[indices])


def troubled_task(train: list[str], held_out: list[str]) -> Any:
    """Clients with data of which some cannot be used; the first one has none."""
    sizes = [0, 9, 7, 12, 8, 10, 11]
    clients = [Shard(at, sizes[at], trouble) for at, trouble in enumerate(train)]
    kept = [Shard(at, sizes[at] // 2, trouble) for at, trouble in enumerate(held_out)]
    return fedstrata.Task(
        model=lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
        clients=clients,
        held_out=kept,
        evaluation={"test": Shard(99, 20)},
    )


@dataclass(frozen=True)
class Cautious:
    """A user's own weighting, with memory: w_kl = n_k / ‖Δ_kl‖^power, and less in every round."""

    power: float = 0.5

    def init(self, clients: int, layers: Any) -> Mapping[str, Tensor]:
        return {"rounds": torch.zeros(clients, dtype=torch.int64)}

    def weigh(self, cohort: Any, state: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        seen = state["rounds"][cohort.clients] + 1
        moved = cohort.update_squared.sqrt().clamp_min(1e-12)
        weights = cohort.sizes[:, None] / moved**self.power / seen[:, None]
        return weights, {"rounds": state["rounds"].index_put((cohort.clients,), seen)}
