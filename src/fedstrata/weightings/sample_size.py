"""FedAvg's weighting: each upload counts by its client's number of samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedstrata.core.axes import State

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.cohort import Cohort
    from fedstrata.core.layers import Layers


@dataclass(frozen=True)
class SampleSize:
    """Each upload counts by its client's samples: w_kl = n_k."""

    def init(self, clients: int, layers: Layers) -> State:
        """Nothing to remember."""
        return {}

    def weigh(self, cohort: Cohort, state: State) -> tuple[Tensor, State]:
        """The same for every layer."""
        return cohort.sizes[:, None].expand(-1, len(cohort.layers)), state
