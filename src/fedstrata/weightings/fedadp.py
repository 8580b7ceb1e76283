"""FedAdp (Wu and Wang): a client counts more the smaller the angle between its update and the average update.

G = Σ_k p_k Δ_k with p_k = n_k / Σn; θ_k is the angle between G and Δ_k over the whole model, θ̃_k its running mean,
and ψ_k ∝ n_k exp f(θ̃_k) (eq 10). With partial uploads G_l averages layer l's senders, θ_k compares over the layers
that k sent, and who sent nothing keeps angle and count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedstrata.core.axes import State, Weighting
from fedstrata.core.lazy import torch
from fedstrata.weightings.angles import Smoothing, check_alpha, importance, psi, smooth

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.cohort import Cohort
    from fedstrata.core.layers import Layers


@dataclass(frozen=True)
class FedAdp(Weighting):
    """A client counts more, the smaller its angle to the mean update."""

    alpha: float = 5.0
    smoothing: Smoothing = "participation"

    def __post_init__(self) -> None:
        check_alpha(self.alpha)

    def init(self, clients: int, layers: Layers) -> State:
        """No angle seen yet."""
        return {
            "smoothed_angle": torch.zeros(clients, dtype=torch.float64),
            "count": torch.zeros(clients, dtype=torch.int64),
        }

    def weigh(self, cohort: Cohort, state: State) -> tuple[Tensor, State]:
        """ψ_k, in every layer the same, or in the same ratio."""
        sent, who = cohort.sent, cohort.clients
        took_part = sent.any(1)
        before, count = state["smoothed_angle"][who], state["count"][who]
        now = smooth(before, count, cohort.model_angles, cohort.round, self.smoothing)
        smoothed = torch.where(took_part, now, before)
        return psi(cohort.sizes, importance(smoothed, self.alpha)[:, None], sent), {
            "smoothed_angle": state["smoothed_angle"].index_put((who,), smoothed),
            "count": state["count"].index_put((who,), count + took_part),
        }
