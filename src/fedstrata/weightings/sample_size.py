"""FedAvg's weighting: each upload counts by its client's number of samples."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedstrata.algorithm import State
from fedstrata.layers import Layers
from fedstrata.messages import Cohort


@dataclass(frozen=True)
class SampleSize:
    """w_kl = n_k."""

    def init(self, clients: int, layers: Layers) -> State:
        """Nothing to remember."""
        return {}

    def weigh(self, cohort: Cohort, state: State) -> tuple[Tensor, State]:
        """The same for every layer."""
        return cohort.sizes[:, None].expand(-1, len(cohort.layers)), state
