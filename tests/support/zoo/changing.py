"""State that changes while training."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.support.zoo.animals import CLASSES, FEATURES, Animal, register, words
from tests.support.zoo.ordinary import Net

CHANGING: dict[str, Animal] = {}
add = partial(register, CHANGING)


class AssignsBuffer(Net):
    ema: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.ema = 0.9 * self.ema + 0.1 * x.detach().mean(0)
        return self.fc(x - self.ema)


class ChangesBuffer(AssignsBuffer):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.ema.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.fc(x - self.ema)


class NotPersistent(Net):
    ema: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(FEATURES), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.ema = 0.9 * self.ema + 0.1 * x.detach().mean(0)
        return self.fc(x - self.ema)


class RegistersLate(Net):
    """A buffer that is there only after the first forward."""

    first: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "first"):
            self.register_buffer("first", x.detach().mean(0))
        return self.fc(x - self.first)


class PlainTensor(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.fc(x) * (1 + 0.01 * float(self.seen))


class AddsModule(Net):
    """A layer that is there only after the first forward: it is used, but never trained."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Linear(FEATURES, CLASSES).to(x.dtype)
        return self.fc(x) + self.late(x)


class AssignsData(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.fc.weight.data = self.fc.weight.data.clamp(-0.2, 0.2)
        return self.fc(x)


class AssignsParameter(Net):
    """What the optimiser holds is no longer what the module has."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.fc.bias = nn.Parameter(self.fc.bias.detach() + 0.1)
        return self.fc(x)


class Teacher(Net):
    """A frozen copy of the student follows it, and has a say."""

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.teacher, self.by_data = nn.Linear(FEATURES, CLASSES).requires_grad_(False), by_data

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for ours, theirs in zip(self.teacher.parameters(), self.fc.parameters(), strict=True):
                if self.by_data:
                    ours.data = 0.5 * ours.data + 0.5 * theirs.data
                else:
                    ours.mul_(0.5).add_(theirs.detach(), alpha=0.5)
        return self.fc(x) + self.teacher(x)


class Counts(Net):
    """How often it was called decides what it says."""

    def __init__(self, start: Any) -> None:
        super().__init__()
        self.calls = start

    def count(self) -> int:
        if isinstance(self.calls, int):
            self.calls += 1
            return self.calls
        if isinstance(self.calls, list):
            self.calls.append(None)
        else:
            self.calls[len(self.calls)] = None
        return len(self.calls)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * (1 + 0.1 * self.count())


class CountsInBuffer(Net):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x) * (1 + 0.1 * self.calls)


class CountsInSlot(Net):
    __slots__ = ("calls",)

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x) * (1 + 0.1 * self.calls)


LATE = 6
"""Calls that leave no trace in what some modules say."""


class CountsInSlotLate(CountsInSlot):
    """The first calls make no difference: a glance at two batches does not show it."""

    __slots__ = ()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x) * (1 + 0.1 * max(0, self.calls - LATE))


class CountsInClosure(Net):
    """A counter that only a function knows of."""

    def __init__(self, late: int) -> None:
        super().__init__()
        calls = itertools.count(1)
        self.louder = lambda: 1 + 0.1 * max(0, next(calls) - late)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.louder()


class CountsByMethod(Net):
    """A list, and one of its methods."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[None] = []
        self.count = self.calls.append

    def forward(self, x: Tensor) -> Tensor:
        self.count(None)
        return self.fc(x) * (1 + 0.1 * len(self.calls))


class Iterates(Net):
    """A generator of numbers, in Python's sense."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = (1 + 0.1 * number for number in itertools.count())

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * next(self.factors)


class ExtraState(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x) * (1 + 0.1 * self.calls)


class NoisyByTorch(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x + 0.3 * torch.randn(x.shape, generator=self.generator, dtype=x.dtype))


class NoisyByNumpy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.RandomState(7)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x + 0.3 * torch.from_numpy(self.generator.normal(size=tuple(x.shape))).to(x.dtype))


class Remembers(Net):
    """Its last output, with the graph that led to it, which no copy can have."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before = 0.0 if self.last is None else self.last.detach().mean(0)
        self.last = self.fc(x + before.mean() if isinstance(before, Tensor) else x)
        return self.last


class Toggles(nn.Module):
    """Freezes its first layer in every second call, and thaws one that was built frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)
        self.extra = nn.Linear(FEATURES, CLASSES).requires_grad_(False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.first.requires_grad_(self.calls % 2 == 0)
        self.extra.requires_grad_(True)
        return self.head(torch.tanh(self.first(x))) + self.extra(x)


class KeepsEval(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)

    def train(self, mode: bool = True) -> KeepsEval:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(x))


class LargeBase(nn.Module):
    """A frozen table of a few megabytes, of which little is looked at."""

    def __init__(self, changes: str = "") -> None:
        super().__init__()
        self.base = nn.Embedding(20_000, 50, _freeze=True)
        self.fc, self.changes = nn.Linear(50, CLASSES), changes

    def forward(self, x: Tensor) -> Tensor:
        if self.changes and self.training:
            table = self.base.weight.data if self.changes == "data" else self.base.weight
            table[x.flatten()] += 0.1
        return self.fc(self.base(x).mean(1))


add("a buffer that forward assigns", AssignsBuffer)
add("a buffer that forward changes", ChangesBuffer)
add("a buffer that is not persistent", NotPersistent)
add("a buffer that forward registers", RegistersLate)
add("a layer that forward adds", AddsModule)
add("p.data assigned in forward", AssignsData)
add("a new Parameter in forward", AssignsParameter, refused=r"fc\.bias", or_right=True)
add("an EMA teacher, by .data", lambda: Teacher(by_data=True))
add("an EMA teacher, in place", lambda: Teacher(by_data=False))
add("a counter: an int", lambda: Counts(0))
add("a counter: a list", lambda: Counts([]))
add("a counter: a dict", lambda: Counts({}))
add("a counter: an integer buffer", CountsInBuffer)
add("a counter: a plain tensor", PlainTensor)
add("a counter: a list and its method", CountsByMethod, refused="count", or_right=True)
add("a counter: a generator", Iterates)
add("a counter in __slots__", CountsInSlot, refused="calls|fc", or_right=True)
add("a counter in __slots__, later", CountsInSlotLate, training={"epochs": 3}, refused="calls|fc", or_right=True)
add("a counter in a closure", lambda: CountsInClosure(0), refused="louder|fc", or_right=True)
add(
    "a counter in a closure, later",
    lambda: CountsInClosure(LATE),
    training={"epochs": 3},
    refused="louder|fc",
    or_right=True,
)
add("get_extra_state", ExtraState)
add("a torch.Generator of its own", NoisyByTorch)
add("a RandomState of its own", NoisyByNumpy)
add("the last output is kept", Remembers)
add("requires_grad toggled in forward", Toggles)
add("train() keeps BatchNorm in eval", KeepsEval)
add("a large frozen base", LargeBase, words, dtype="float32")
for way in ("in place", "data"):
    add(
        f"a large frozen base that changes, {way}",
        lambda way=way: LargeBase(way),  # type: ignore[misc]
        words,
        dtype="float32",
        refused=r"base\.weight",
        or_right=True,
    )
