"""The coordinate-wise median (Yin et al., ICML 2018): each number moves to the middle of what its senders have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedstrata.combinations._sorted import inner_mean
from fedstrata.core.axes import Combination

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.cohort import Cohort


@dataclass(frozen=True)
class Median(Combination):
    """The middle value of each number, or the mean of the two in the middle."""

    def combine(self, model: Tensor, cohort: Cohort, weights: Tensor) -> Tensor:
        """All values but one or two are left out."""
        return inner_mean(model, cohort, weights, lambda m: (m - 1).clamp_min(0) // 2)
