"""The plain mean over a layer's senders (FedLap's algorithm 1, line 10)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedstrata.algorithm import State
from fedstrata.cohort import Cohort
from fedstrata.layers import Layers


@dataclass(frozen=True)
class Uniform:
    """Each upload counts the same: w_kl = 1."""

    def init(self, clients: int, layers: Layers) -> State:
        """Nothing to remember."""
        return {}

    def weigh(self, cohort: Cohort, state: State) -> tuple[Tensor, State]:
        """The same for every client and layer."""
        return torch.ones(len(cohort), len(cohort.layers), dtype=torch.float64), state
