"""Norm bounding (Sun et al., 2019): updates that are too long are shortened before their mean is taken.

Δ_k ← Δ_k min(1, S / ‖Δ_k‖), over all trainable numbers that client k sent. Where no bound S is given, it is the median
of the round's norms. This is a combination and no weighting, since weights are normalised: a client that counts
less would leave more to the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedstrata.core.axes import Combination, Mean
from fedstrata.core.errors import require

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.cohort import Cohort


@dataclass(frozen=True)
class NormBounding(Combination):
    """The mean of updates of which none is longer than `bound`; by default, than the median of the senders' norms."""

    bound: float | None = None

    def __post_init__(self) -> None:
        require(self.bound is None or 0 < self.bound < math.inf, "bound", self.bound, "must be > 0 and finite")

    def combine(self, model: Tensor, cohort: Cohort, weights: Tensor) -> Tensor:
        """The equation, with shortened updates."""
        norms = cohort.update_squared.sum(1).sqrt()
        senders = norms[cohort.sent.any(1)]
        median = float(senders.quantile(0.5)) if len(senders) else 0.0
        bound = median if self.bound is None else self.bound
        updates = [
            update if norm <= bound else _shortened(update, bound / norm, cohort)
            for update, norm in zip(cohort.updates, norms.tolist(), strict=True)
        ]
        return Mean().combine(model, replace(cohort, updates=tuple(updates)), weights)


def _shortened(update: Tensor, factor: float, cohort: Cohort) -> Tensor:
    """The same update, of which buffers are as they were."""
    shorter = update.clone()
    for layer in cohort.layers.layers:
        shorter[layer.start : layer.trainable_stop] *= factor
    return shorter
