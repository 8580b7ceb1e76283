"""How a round goes: who takes part, who is lost on the way, and what each client does locally."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedstrata.core import rng
from fedstrata.core.errors import RecipeError, require
from fedstrata.core.optimizers import check_optimizer
from fedstrata.core.schedules import Schedule

if TYPE_CHECKING:
    from fedstrata.core.axes import Algorithm


@dataclass(frozen=True)
class Participation:
    """Who takes part in a round, and who is lost on the way."""

    clients_per_round: int | None = None
    sampling: Literal["uniform", "size"] = "uniform"
    stragglers: float = 0.0
    keep_stragglers: bool = True
    dropouts: float = 0.0
    min_replies: float = 0.0
    attempts: int = 3

    def __post_init__(self) -> None:
        chosen = self.clients_per_round
        require(chosen is None or chosen >= 1, "clients_per_round", chosen, "must be at least 1")
        require(self.sampling in ("uniform", "size"), "sampling", self.sampling, "must be uniform or size")
        for name in ("stragglers", "min_replies"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "must be a share, from 0 to 1")
        require(0 <= self.dropouts < 1, "dropouts", self.dropouts, "must be a share below 1")
        require(self.attempts >= 1, "attempts", self.attempts, "must be at least 1")
        lost = self.stragglers == 1 and not self.keep_stragglers
        require(not lost, "stragglers", self.stragglers, "with keep_stragglers = false nobody would be left")

    def cohort_size(self, clients: int) -> int:
        """K, given how many clients have data."""
        return clients if self.clients_per_round is None else min(self.clients_per_round, clients)

    def sample(self, sizes: np.ndarray, seed: int, round: int, attempt: int) -> np.ndarray:
        """The round's clients, sorted; a client without data is never drawn."""
        eligible = np.flatnonzero(sizes)
        count = self.cohort_size(len(eligible))
        if count == len(eligible):
            return eligible
        chances = sizes[eligible] / sizes[eligible].sum() if self.sampling == "size" else None
        generator = rng.generator(seed, "sample", round=round, attempt=attempt)
        return np.sort(generator.choice(eligible, size=count, replace=False, p=chances))

    def draw_stragglers(self, clients: int, seed: int, round: int, attempt: int, full_work: int) -> dict[int, int]:
        """Positions of the round's stragglers, and the work in [1, full] that each gets done."""
        generator = rng.generator(seed, "stragglers", round=round, attempt=attempt)
        slow = generator.permutation(clients)[: int(self.stragglers * clients + 0.5)]
        return {int(k): int(generator.integers(1, full_work + 1)) for k in sorted(slow)}

    def drops_out(self, seed: int, round: int, attempt: int, client: int) -> bool:
        """Whether a client vanishes from the round."""
        if self.dropouts == 0:
            return False
        chance = rng.generator(seed, "dropout", round=round, attempt=attempt, client=client).random()
        return bool(chance < self.dropouts)


@dataclass(frozen=True)
class LocalTraining:
    """What a client does with the model that it is sent.

    `optimizer` is any class of `torch.optim`, by its name in any case; `optimizer_options` are its arguments besides
    `lr`, `momentum` and `weight_decay`. Gradients are clipped to `clip_norm`, the norm of all of them together, or
    number by number to `clip_value`. `schedule` has one schedule of the learning rate, or several that are multiplied.
    """

    epochs: int = 1
    steps: int | None = None
    batch_size: int = 32
    optimizer: str = "sgd"
    lr: float = 0.01
    lr_decay: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    clip_norm: float | None = None
    clip_value: float | None = None
    schedule: Schedule | Iterable[Schedule] = ()

    def __post_init__(self) -> None:
        if not self.optimizer.islower():
            object.__setattr__(self, "optimizer", self.optimizer.lower())
        object.__setattr__(self, "schedule", self.schedules)
        require(self.epochs >= 1, "epochs", self.epochs, "must be at least 1")
        require(self.steps is None or self.steps >= 1, "steps", self.steps, "must be at least 1")
        require(self.batch_size >= 1, "batch_size", self.batch_size, "must be at least 1")
        require(0 < self.lr < math.inf, "lr", self.lr, "must be > 0 and finite")
        require(0 < self.lr_decay <= 1, "lr_decay", self.lr_decay, "must be > 0 and at most 1")
        require(0 <= self.momentum < 1, "momentum", self.momentum, "must be ≥ 0 and below 1")
        require(0 <= self.weight_decay < math.inf, "weight_decay", self.weight_decay, "must be ≥ 0 and finite")
        for name in ("clip_norm", "clip_value"):
            most = getattr(self, name)
            require(most is None or 0 < most < math.inf, name, most, "must be > 0 and finite")
        if self.names_an_optimizer:
            check_optimizer(self.optimizer, self.optimizer_arguments(round=1), self.optimizer_options)
        require(
            self.momentum == 0 or self.optimizer != "adam", "momentum", self.momentum, "is SGD's; optimizer is adam"
        )

    @property
    def names_an_optimizer(self) -> bool:
        """Whether the optimizer is looked up in `torch.optim`: anything but SGD and Adam without options."""
        return self.optimizer not in ("sgd", "adam") or bool(self.optimizer_options)

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped."""
        return self.clip_norm is not None or self.clip_value is not None

    @property
    def full_work(self) -> int:
        """A client's epochs, or steps where the plan counts those."""
        return self.steps if self.steps is not None else self.epochs

    def learning_rate(self, round: int) -> float:
        """η · decay^(t − 1), times the factors of the schedules."""
        rate = self.lr * self.lr_decay ** (round - 1)
        return math.prod((schedule.factor(round) for schedule in self.schedules), start=rate)

    def optimizer_arguments(self, round: int) -> dict[str, float]:
        """What an optimizer is given besides its options, if it takes it."""
        return {"lr": self.learning_rate(round), "momentum": self.momentum, "weight_decay": self.weight_decay}

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """All schedules of the learning rate."""
        return tuple(self.schedule) if isinstance(self.schedule, Iterable) else (self.schedule,)

    def agreed(self) -> dict[str, Any]:
        """What server and clients must agree on. What came after version 0.1 is left out where it says nothing."""
        later = ("optimizer_options", "clip_norm", "clip_value", "schedule")
        return {name: value for name, value in asdict(self).items() if name not in later or value}

    def local_steps(self, samples: float, work: int) -> int:
        """τ: how many steps so much work is, in epochs, or in steps where the plan counts those."""
        return work if self.steps is not None else work * math.ceil(samples / self.batch_size)

    def reach(self, steps: int) -> float | None:
        """a: by how much a constant gradient g moves the weights in so many steps, −η a g; only plain SGD has it.

        With momentum β it is the sum of v₁ = 1, v_{s+1} = β v_s + 1, which 1/(τη) takes for τ, and is wrong.
        """
        if self.optimizer != "sgd" or self.optimizer_options or self.clips:
            return None
        beta = self.momentum
        return (steps - beta * (1 - beta**steps) / (1 - beta)) / (1 - beta)


def check_training(algorithm: Algorithm, training: LocalTraining | None) -> None:
    """Refuse a rule that has to know how far local steps reach, where nobody does."""
    for axis in ("objective", "weighting"):
        rule = getattr(algorithm, axis)
        if not getattr(rule, "needs_reach", False) or (training is not None and training.reach(1) is not None):
            continue
        name = type(rule).__name__
        if training is None:
            problem = "needs to know each client's local steps, and here nobody can tell it"
            raise RecipeError(f"algorithm.{axis}", name, problem)
        problem = f"{name} must know how far local steps reach: it takes SGD, without options and unclipped"
        raise RecipeError("training.optimizer", training.optimizer, problem)
