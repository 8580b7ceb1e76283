"""FedExP (Jhunjhunwala, Wang and Joshi, ICLR 2023): the more clients disagree, the further goes their mean.

    θ ← θ + g Σ_k p_k Δ_k,    g = max(1, Σ_k p_k ‖Δ_k‖² / 2 (‖Σ_k p_k Δ_k‖² + ε))

over the whole model. The paper has p_k = 1/K; here it is a client's share of the data, as in FedAvg.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from fedstrata.core.axes import SampleSize
from fedstrata.core.errors import require

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.cohort import Cohort


@dataclass(frozen=True)
class FedExP(SampleSize):
    """The mean by samples, extrapolated by how much the updates differ."""

    epsilon: float = 1e-3
    compares: ClassVar[Literal["layers"]] = "layers"

    def __post_init__(self) -> None:
        require(0 <= self.epsilon < math.inf, "epsilon", self.epsilon, "must be ≥ 0 and finite")

    def gain(self, cohort: Cohort) -> Tensor:
        """g, the same for every layer; where only layers are sent, both sums go over each layer's senders."""
        squares = float((cohort.shares * cohort.update_squared).sum())
        square = float(cohort.mean_squared.sum()) + self.epsilon
        further = max(1.0, squares / (2 * square)) if square > 0 else 1.0
        return cohort.sizes.new_full((len(cohort.layers),), further)
