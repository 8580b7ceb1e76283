"""FedAvgM (Hsu, Qi and Brown, 2019): server momentum.

With Δ how far the aggregate is from the global model: v ← β v + Δ, θ ← θ + η v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedstrata.core.axes import ServerStep, State
from fedstrata.core.errors import require
from fedstrata.core.lazy import torch
from fedstrata.servers._moved import check_lr, moved

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.cohort import Cohort
    from fedstrata.core.layers import Layers


@dataclass(frozen=True)
class FedAvgM(ServerStep):
    """A moving sum of the rounds' steps; with `beta` = 0 and `lr` = 1 the aggregate is adopted."""

    lr: float = 1.0
    beta: float = 0.9

    def __post_init__(self) -> None:
        check_lr(self.lr)
        require(0 <= self.beta < 1, "beta", self.beta, "must be ≥ 0 and below 1")

    def init(self, layers: Layers) -> State:
        """At rest."""
        return {"velocity": torch.zeros(layers.numel, dtype=layers.dtype)}

    def step(self, old: Tensor, aggregate: Tensor, state: State, cohort: Cohort) -> tuple[Tensor, State]:
        """θ + η v, written as the aggregate and what goes beyond it, which is exactly 0 if β = 0 and η = 1."""
        delta, before = aggregate - old, state["velocity"]
        velocity = self.beta * before + delta
        is_moved = moved(cohort)
        return torch.where(is_moved, aggregate + (self.lr * velocity - delta), aggregate), {
            "velocity": torch.where(is_moved, velocity, before)
        }
