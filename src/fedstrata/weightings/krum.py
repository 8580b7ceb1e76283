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
        here = cohort.sent.any(1)
        gram = cohort.gram.sum(0)
        gram = (gram + gram.T) / 2  # to the last bit, so that two clients are equally far from each other
        squared = gram.diagonal()
        distances = (squared[:, None] + squared[None, :] - 2 * gram).clamp_min(0)
        distances.fill_diagonal_(torch.inf).masked_fill_(~here, torch.inf)
        return distances.sort(1).values[:, : self.neighbours(cohort)].sum(1).masked_fill(~here, torch.inf)

    def neighbours(self, cohort: Cohort) -> int:
        """K − f − 2, for the K clients that sent something; at least 1, if there are others."""
        clients = int(cohort.sent.any(1).sum())
        f = self.most(clients) if self.byzantine is None else self.byzantine
        return max(0, min(max(1, clients - f - 2), clients - 1))

    def ranking(self, cohort: Cohort) -> Tensor:
        """The clients, lowest score first; of equals the one with the lower number."""
        by_number = cohort.clients.argsort()
        return by_number[self.scores(cohort)[by_number].sort(stable=True).indices]

    def weigh(self, cohort: Cohort, state: State) -> tuple[Tensor, State]:
        """1 for the lowest score, and 0 for all others."""
        weights = torch.zeros(cohort.sent.shape, dtype=torch.float64)
        weights[self.ranking(cohort)[0]] = 1
        return weights, state
