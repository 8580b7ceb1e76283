"""Multi-Krum (Blanchard et al., NeurIPS 2017): the mean of the updates with the lowest scores of Krum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedstrata.core.axes import State
from fedstrata.core.errors import require
from fedstrata.core.lazy import torch
from fedstrata.weightings.krum import Krum

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.cohort import Cohort


@dataclass(frozen=True)
class MultiKrum(Krum):
    """Only the `keep` clients with Krum's lowest scores count, by their samples; by default K − f − 2 of them."""

    keep: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.keep is None or self.keep >= 1, "keep", self.keep, "must be at least 1")

    def check_cohort(self, clients: int) -> None:
        """Refuse to keep more clients than there are."""
        super().check_cohort(clients)
        problem = f"must be at most the clients of a round, {clients}"
        require(self.keep is None or self.keep <= clients, "keep", self.keep, problem)

    def weigh(self, cohort: Cohort, state: State) -> tuple[Tensor, State]:
        """n_k for who is kept, and 0 for all others."""
        keep = max(1, self.neighbours(cohort)) if self.keep is None else self.keep
        weights = torch.zeros(cohort.sent.shape, dtype=torch.float64)
        best = self.ranking(cohort)[:keep]
        weights[best] = cohort.sizes[best, None]
        return weights, state
