"""FedDyn (Acar et al., ICLR 2021), the server's half.

    h ← h − α (1/N) Σ_{k in S} (w_k − w),      w ← mean of w_k − h/α        (algorithm 1)

h is the mean of what the clients remember. So the first round is not FedProx's: it goes 1 + |S|/N times as far. What
nobody sent stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedstrata.core.axes import ServerStep, State
from fedstrata.core.errors import require
from fedstrata.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.cohort import Cohort
    from fedstrata.core.layers import Layers


@dataclass(frozen=True)
class FedDynStep(ServerStep):
    """The mean, corrected by the clients' mean gradient h over α."""

    alpha: float = 0.01

    def __post_init__(self) -> None:
        require(self.alpha > 0, "alpha", self.alpha, "must be > 0")

    def init(self, layers: Layers) -> State:
        """h = 0."""
        return {"h": torch.zeros(layers.numel, dtype=layers.dtype)}

    def step(self, old: Tensor, aggregate: Tensor, state: State, cohort: Cohort) -> tuple[Tensor, State]:
        """The mean − h/α, where anybody sent anything."""
        ones = torch.ones(len(cohort), len(cohort.layers), dtype=torch.float64)
        h = state["h"] - cohort.sum(ones) * (self.alpha / cohort.population)
        return torch.where(cohort.mass(ones) > 0, aggregate - h / self.alpha, aggregate), {"h": h}
