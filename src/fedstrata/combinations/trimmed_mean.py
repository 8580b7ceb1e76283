"""The coordinate-wise trimmed mean (Yin et al., ICML 2018): each number's lowest and highest values do not count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedstrata.combinations._sorted import inner_mean
from fedstrata.core.axes import Combination
from fedstrata.core.errors import require

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.cohort import Cohort


@dataclass(frozen=True)
class TrimmedMean(Combination):
    """The plain mean of each number's values, without a share `trim` of them at either end, rounded down."""

    trim: float = 0.2

    def __post_init__(self) -> None:
        require(0 <= self.trim < 0.5, "trim", self.trim, "must be ≥ 0 and below 0.5")

    def combine(self, model: Tensor, cohort: Cohort, weights: Tensor) -> Tensor:
        """Of m values, trim · m are left out at either end."""
        return inner_mean(model, cohort, weights, lambda m: (self.trim * m.double()).long())
