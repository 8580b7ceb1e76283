"""FedLayerWise: FedAdp's rule on each layer alone.

θ_{k,l} is the angle between Δ_{k,l} and G_l = Σ_k p_k Δ_{k,l}, θ̃_{k,l} its running mean, counted per client and
layer, and ψ_{k,l} ∝ n_k exp f(θ̃_{k,l}). Eq 5 prints exp(+α(θ̃ − 1)), which would favour large angles against the
paper's own text: the sign is FedAdp's. With one layer it is FedAdp.
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
class FedLayerWise(Weighting):
    """A client's layer counts more, the smaller its angle to the layer's mean update."""

    alpha: float = 5.0
    smoothing: Smoothing = "participation"

    def __post_init__(self) -> None:
        check_alpha(self.alpha)

    def init(self, clients: int, layers: Layers) -> State:
        """No angle seen yet."""
        return {
            "smoothed_angle": torch.zeros(clients, len(layers), dtype=torch.float64),
            "count": torch.zeros(clients, len(layers), dtype=torch.int64),
        }

    def weigh(self, cohort: Cohort, state: State) -> tuple[Tensor, State]:
        """ψ_{k,l}; who did not send layer l keeps its angle there."""
        sent, who = cohort.sent, cohort.clients
        before, count = state["smoothed_angle"][who], state["count"][who]
        now = smooth(before, count, cohort.layer_angles, cohort.round, self.smoothing)
        smoothed = torch.where(sent, now, before)
        return psi(cohort.sizes, importance(smoothed, self.alpha), sent), {
            "smoothed_angle": state["smoothed_angle"].index_put((who,), smoothed),
            "count": state["count"].index_put((who,), count + sent),
        }
