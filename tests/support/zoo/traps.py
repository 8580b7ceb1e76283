"""Traps for a module that is put back."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.support.zoo.animals import CLASSES, FEATURES, Animal, images, register
from tests.support.zoo.ordinary import Net, mlp

TRAPS: dict[str, Animal] = {}
add = partial(register, TRAPS)


LATE = 6
"""Calls after which some of them begin to matter: more than are rehearsed."""


class CachedByMethod(Net):
    @functools.cache  # noqa: B019
    def scale(self) -> float:
        return float(self.fc.weight.detach().abs().sum())

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale() * 0.1


class CountsOnParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.fc.weight.calls = 0  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.fc.weight
        weight.calls += 1
        return self.fc(x) * (1 + 0.1 * max(0, weight.calls - LATE))


class Lookahead(Net):
    """Slow weights that forward puts on the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.fc.weight
        if self.training:
            self.calls += 1
            if not hasattr(weight, "slow"):
                weight.slow = weight.detach().clone()
            if self.calls % 3 == 0:
                with torch.no_grad():
                    weight.copy_(weight.slow.lerp_(weight, 0.5))
        return self.fc(x)


class HooksLate(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == LATE:
            self.fc.weight.register_hook(lambda gradient: gradient * 0.5)
        return self.fc(x)


class Remembers(Net):
    """A memory that is changed in place, with its graph."""

    memory: Tensor

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(CLASSES), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.memory.detach_()
        out = self.fc(x)
        self.memory.mul_(0.5).add_(out.mean(0))
        return out + self.memory


class SeesThroughNumPy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen = self.fc.weight.detach().numpy()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * float(np.abs(self.seen).sum()) * 0.1


class Bank(Net):
    """A frozen memory of more than a megabyte, of which the order changes."""

    bank: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.randn(3000, 100), persistent=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.training and self.calls > 2:
            self.bank.data.copy_(self.bank.roll(1, 0))
        return self.fc(x + self.bank[: len(x), :FEATURES].to(x.dtype))


class BestSoFar(Net):
    best: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("best", torch.tensor(1e9))

    def forward(self, x: Tensor) -> Tensor:
        out = self.fc(x)
        if self.training:
            self.best = torch.minimum(self.best, out.detach().square().mean())
        return out * (1 + self.best)


class Graph(Net):
    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(FEATURES).to_sparse(), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.sparse.mm(self.adjacency.to(x.dtype), x.t()).t())


class Unseeded(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1 + int.from_bytes(os.urandom(2), "little") / 2**16

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale


class Spatial(nn.Module):
    """Maps of any size, by a view that channels-last memory has only where they are small."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv(x)
        batch, channels, height, width = hidden.shape
        return self.head(hidden.view(batch * channels, height * width).logsumexp(1).view(batch, channels))


class ViewsInEval(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.conv(x))
        return self.head(hidden.flatten(1) if self.training else hidden.view(len(hidden), -1))


def small_and_large_images() -> Sequence[Any]:
    first, second, third = images()
    small = [(x[:, :, :3, :3].contiguous(), y) for x, y in (first, second)]
    return [small[0], third, small[1]]


def tied_by_storage(transposed: bool) -> nn.Module:
    first, second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
    second.weight = nn.Parameter(first.weight.t() if transposed else first.weight)
    return nn.Sequential(first, nn.ReLU(), second)


add("a method that is cached", CachedByMethod)
add("an attribute of a parameter, late", CountsOnParameter, training={"epochs": 3})
add("slow weights on the parameter", Lookahead, training={"epochs": 2})
add("a gradient hook registered late", HooksLate, training={"epochs": 3})
add("a memory with its graph", lambda: Remembers(persistent=False))
add("a memory with its graph, persistent", lambda: Remembers(persistent=True))
add("a weight seen through NumPy", SeesThroughNumPy, dtype="float32")
add("a large memory whose order changes", Bank, training={"epochs": 2}, dtype="float32")
add("a buffer that falls from 1e9", BestSoFar, dtype="float32", refused="best goes from 1e\\+09")
add("a sparse buffer", lambda: Graph(persistent=True), refused="adjacency.*is sparse")
add("a number that nobody seeds", Unseeded, refused="scale.*another one each time")
add("half precision", lambda: mlp().to(torch.float16), refused=r"0\.weight.*float16")
add("images of two sizes", Spatial, small_and_large_images)
add("a view in evaluation only", ViewsInEval, images)
add("perceptron, tied by storage", lambda: tied_by_storage(transposed=False), dtype="float32")
add("perceptron, tied by storage and transposed", lambda: tied_by_storage(transposed=True), dtype="float32")
