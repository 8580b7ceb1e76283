"""Krum (Blanchard et al., NeurIPS 2017): the update that has the nearest neighbours is the next global model's.

Of K updates f may be anything. Each one's score is the sum of the squared distances to its K − f − 2 nearest others,
and the lowest score wins. It compares whole models: distances over different layers are no distances between clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from fedstrata.core.axes import State, Weighting
from fedstrata.core.errors import require
from fedstrata.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.cohort import Cohort


@dataclass(frozen=True)
class Krum(Weighting):
    """Only the client counts whose update is nearest to its neighbours'."""

    byzantine: int | None = None
    compares: ClassVar[Literal["models"]] = "models"

    def __post_init__(self) -> None:
        require(self.byzantine is None or self.byzantine >= 0, "byzantine", self.byzantine, "must be at least 0")

    def check_cohort(self, clients: int) -> None:
        """Refuse more than Krum withstands: the paper needs 2f + 2 < K."""
        most = self.most(clients)
        problem = f"of {clients} clients a round it withstands {most}: 2 f + 2 must be less than their number"
        require(self.byzantine is None or self.byzantine <= most, "byzantine", self.byzantine, problem)

    def most(self, clients: int) -> int:
        """The largest f for K clients."""
        return max(0, (clients - 3) // 2)

    def scores(self, cohort: Cohort) -> Tensor:
        """Each client's sum of squared distances to its K − f − 2 nearest others, or to 1 at least, float64 [K]."""
        f = self.most(len(cohort)) if self.byzantine is None else self.byzantine
        gram = cohort.gram.sum(0)
        squared = gram.diagonal()
        distances = (squared[:, None] + squared[None, :] - 2 * gram).clamp_min(0)
        others = distances.sort(1).values[:, 1:]  # the nearest of all is the client itself
        return others[:, : max(1, len(cohort) - f - 2)].sum(1)

    def weigh(self, cohort: Cohort, state: State) -> tuple[Tensor, State]:
        """1 for the lowest score, the first one of several, and 0 for all others."""
        weights = torch.zeros(cohort.sent.shape, dtype=torch.float64)
        weights[int(self.scores(cohort).argmin())] = 1
        return weights, state
