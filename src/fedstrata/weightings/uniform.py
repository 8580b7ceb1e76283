"""The plain mean over a layer's senders (FedLap's algorithm 1, line 10)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedstrata.core.axes import State, Weighting
from fedstrata.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.cohort import Cohort


@dataclass(frozen=True)
class Uniform(Weighting):
    """Each upload counts the same: w_kl = 1."""

    def weigh(self, cohort: Cohort, state: State) -> tuple[Tensor, State]:
        """The same for every client and layer."""
        return torch.ones(len(cohort), len(cohort.layers), dtype=torch.float64), state
