"""Algorithm 2 of Reddi et al. (Adaptive Federated Optimization, ICLR 2021), which three server steps share.

With Δ how far the aggregate is from the global model, number by number, and v = τ² before the first round:

    m ← β₁ m + (1 − β₁) Δ
    v ← what FedAdagrad, FedAdam or FedYogi makes of v and Δ²
    θ ← θ + η m / (√v + τ)

Neither m nor v is corrected for how they begin.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
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
class Adaptive(ServerStep, ABC):
    """A step of its own length for every number."""

    lr: float = 0.01
    beta1: float = 0.9
    tau: float = 1e-3

    def __post_init__(self) -> None:
        check_lr(self.lr)
        require(0 <= self.beta1 < 1, "beta1", self.beta1, "must be ≥ 0 and below 1")
        require(0 < self.tau < math.inf, "tau", self.tau, "must be > 0 and finite")

    @abstractmethod
    def second(self, v: Tensor, squared: Tensor) -> Tensor:
        """The next v, from Δ²."""

    def init(self, layers: Layers) -> State:
        """m = 0, v = τ²."""
        return {
            "m": torch.zeros(layers.numel, dtype=layers.dtype),
            "v": torch.full((layers.numel,), self.tau**2, dtype=layers.dtype),
        }

    def step(self, old: Tensor, aggregate: Tensor, state: State, cohort: Cohort) -> tuple[Tensor, State]:
        """One step of algorithm 2."""
        delta, is_moved = aggregate - old, moved(cohort)
        m = torch.where(is_moved, self.beta1 * state["m"] + (1 - self.beta1) * delta, state["m"])
        v = torch.where(is_moved, self.second(state["v"], delta.square()), state["v"])
        return torch.where(is_moved, old + self.lr * m / (v.sqrt() + self.tau), aggregate), {"m": m, "v": v}


@dataclass(frozen=True)
class Forgetting(Adaptive):
    """One whose v forgets: FedAdam and FedYogi."""

    beta2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.beta2 < 1, "beta2", self.beta2, "must be ≥ 0 and below 1")
