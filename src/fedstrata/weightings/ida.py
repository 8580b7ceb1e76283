"""IDA, inverse distance aggregation (Yeganeh et al., DCL 2020): a client counts less, the further it is from the mean.

w_k = 1 / d_k, where d_k is the distance between Δ_k and the mean G = Σ_k p_k Δ_k, so between client k's model and
FedAvg's. With partial uploads d_k² is the mean square over the numbers that k sent, so that whoever sends little is
not near for that alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from fedstrata.core.axes import State, Weighting
from fedstrata.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.cohort import Cohort

_NEAREST = 1e-6
"""A distance counts as no less than this share of the longest update, so that 1 / d is never infinite."""


@dataclass(frozen=True)
class IDA(Weighting):
    """A client counts by the inverse of its distance to the mean update."""

    compares: ClassVar[Literal["layers"]] = "layers"

    def weigh(self, cohort: Cohort, state: State) -> tuple[Tensor, State]:
        """The nearest client's distance over each client's, the same for every layer."""
        squared = torch.zeros(cohort.sent.shape, dtype=torch.float64)
        for at, _, _, block in cohort.blocks(cohort.pieces()):
            squared[:, at] += (block - cohort.shares[:, at] @ block).square().sum(1)
        numbers = torch.tensor([float(layer.trainable_stop - layer.start) for layer in cohort.layers.layers])
        distance, length = (
            ((part * cohort.sent).sum(1) / (cohort.sent * numbers).sum(1).clamp_min(1)).sqrt()
            for part in (squared, cohort.update_squared)
        )
        distance = distance.clamp_min(_NEAREST * float(length.max()))
        weights = torch.where(distance > 0, distance.min() / distance, 1.0)
        return weights[:, None].expand(-1, len(cohort.layers)), state
