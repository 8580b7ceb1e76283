"""How a round goes: who takes part, what a client does locally, and who is lost on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fedstrata.core import rng
from fedstrata.core.checks import require


class Training(BaseModel):
    """The `[training]` table of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    rounds: int = Field(50, ge=1, description="communication rounds")
    clients_per_round: int | None = Field(None, ge=1, description="K; all clients if not given")
    sampling: Literal["uniform", "size"] = Field("uniform", description="size: probability proportional to shard size")
    epochs: int = Field(1, ge=1, description="local epochs E")
    steps: int | None = Field(None, ge=1, description="local steps, instead of epochs")
    batch_size: int = Field(32, ge=1, description="B; the last short batch of an epoch is kept")
    optimizer: Literal["sgd", "adam"] = Field("sgd", description="starts fresh every round")
    lr: float = Field(0.01, gt=0, description="learning rate of the first round")
    lr_decay: float = Field(1.0, gt=0, le=1, description="factor per round")
    momentum: float = Field(0.0, ge=0, lt=1, description="of SGD")
    weight_decay: float = Field(0.0, ge=0, description="of SGD and Adam, as an L2 penalty")
    stragglers: float = Field(0.0, ge=0, le=1, description="share of a round's clients that do only part of the work")
    keep_stragglers: bool = Field(True, description="whether the server uses what stragglers send")
    dropouts: float = Field(0.0, ge=0, lt=1, description="probability that a client vanishes from a round")
    min_replies: float = Field(0.0, ge=0, le=1, description="share of replies below which a round is tried again")
    attempts: int = Field(3, ge=1, description="how often a round is tried before the run stops")
    initial_weights: Path | None = Field(None, strict=False, description="a safetensors file to start from")

    @field_validator("initial_weights")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return None if path is None else path.absolute()  # a run may be resumed from elsewhere

    @model_validator(mode="after")
    def _check(self) -> Training:
        require(self.momentum == 0 or self.optimizer == "sgd", "momentum", self.momentum, "is SGD's; optimizer is adam")
        lost = self.stragglers == 1 and not self.keep_stragglers
        require(not lost, "stragglers", self.stragglers, "with keep_stragglers = false nobody would be left")
        return self

    @property
    def full_work(self) -> int:
        """A client's epochs, or steps where the plan counts those."""
        return self.steps if self.steps is not None else self.epochs

    def cohort_size(self, clients: int) -> int:
        """K, given how many clients have data."""
        return clients if self.clients_per_round is None else min(self.clients_per_round, clients)

    def learning_rate(self, round: int) -> float:
        """η · decay^(t − 1)."""
        return self.lr * self.lr_decay ** (round - 1)

    def sample(self, sizes: np.ndarray, seed: int, round: int, attempt: int) -> np.ndarray:
        """The round's clients, sorted; a client without data is never drawn."""
        eligible = np.flatnonzero(sizes)
        count = self.cohort_size(len(eligible))
        if count == len(eligible):
            return eligible
        chances = sizes[eligible] / sizes[eligible].sum() if self.sampling == "size" else None
        generator = rng.generator(seed, "sample", round=round, attempt=attempt)
        return np.sort(generator.choice(eligible, size=count, replace=False, p=chances))

    def draw_stragglers(self, clients: int, seed: int, round: int, attempt: int) -> dict[int, int]:
        """Positions of the round's stragglers, and the work in [1, full] that each gets done."""
        generator = rng.generator(seed, "stragglers", round=round, attempt=attempt)
        slow = generator.permutation(clients)[: int(self.stragglers * clients + 0.5)]
        return {int(k): int(generator.integers(1, self.full_work + 1)) for k in sorted(slow)}

    def drops_out(self, seed: int, round: int, attempt: int, client: int) -> bool:
        """Whether a client vanishes from the round."""
        if self.dropouts == 0:
            return False
        chance = rng.generator(seed, "dropout", round=round, attempt=attempt, client=client).random()
        return bool(chance < self.dropouts)
