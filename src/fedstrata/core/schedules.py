"""Schedules of the learning rate: a factor for every round.

They depend on the round's number alone, so that a run that is resumed, or goes on for longer, needs nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from fedstrata.core.errors import require


class Schedule(Protocol):
    """What the learning rate is multiplied by."""

    @property
    def name(self) -> str:
        """What a recipe calls it."""
        ...

    def factor(self, round: int) -> float:
        """In this round; the first one is 1."""
        ...


@dataclass(frozen=True)
class Cosine:
    """From 1 in the first round down to `final`, `rounds` later, along half a cosine; it stays there."""

    rounds: int
    final: float = 0.0
    name: str = field(default="cosine", init=False)

    def __post_init__(self) -> None:
        _check_rounds(self.rounds)
        require(0 <= self.final <= 1, "final", self.final, "must be a share, from 0 to 1")

    def factor(self, round: int) -> float:
        """final + (1 − final) (1 + cos(π t/T))/2."""
        done = min(round - 1, self.rounds) / self.rounds
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class Step:
    """Times `by` after `every` so many rounds."""

    every: int
    by: float = 0.1
    name: str = field(default="step", init=False)

    def __post_init__(self) -> None:
        require(self.every >= 1, "every", self.every, "must be at least 1")
        require(0 < self.by <= 1, "by", self.by, "must be > 0 and at most 1")

    def factor(self, round: int) -> float:
        """by^(t div every): once for every so many rounds."""
        return float(self.by ** ((round - 1) // self.every))


@dataclass(frozen=True)
class Warmup:
    """From `start` in the first round up to 1, `rounds` later, in a straight line."""

    rounds: int
    start: float = 0.1
    name: str = field(default="warmup", init=False)

    def __post_init__(self) -> None:
        _check_rounds(self.rounds)
        require(0 < self.start <= 1, "start", self.start, "must be > 0 and at most 1")

    def factor(self, round: int) -> float:
        """start + (1 − start) t/T."""
        return self.start + (1 - self.start) * min(round - 1, self.rounds) / self.rounds


def _check_rounds(rounds: int) -> None:
    require(rounds >= 1, "rounds", rounds, "must be at least 1")


SCHEDULES: dict[str, type[Cosine | Step | Warmup]] = {"cosine": Cosine, "step": Step, "warmup": Warmup}
