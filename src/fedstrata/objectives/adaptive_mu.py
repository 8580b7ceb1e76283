"""Per-layer adaptive μ FedProx: a layer that moved further is held back more.

Client k minimises F_k(w) + Σ_l (μ_l/2) ‖w_l − w_l^t‖². After each aggregation the server sets

    μ_l ← (1 − a) μ_l + a (d_l / max_j d_j) μ₀,      d_l = ‖w_l^{t+1} − w_l^t‖ of the global layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedstrata.core.axes import Objective, State, Tensors
from fedstrata.core.errors import require
from fedstrata.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.layers import Layers


@dataclass(frozen=True)
class AdaptiveMu(Objective):
    """A μ per layer that follows the layer's drift; a = 0, or a single layer, is FedProx(μ₀)."""

    mu0: float = 0.01
    a: float = 0.5

    def __post_init__(self) -> None:
        require(self.mu0 >= 0, "mu0", self.mu0, "must be ≥ 0")
        require(0 <= self.a <= 1, "a", self.a, "must lie in [0, 1]")

    def init(self, layers: Layers) -> State:
        """Every layer starts with μ₀."""
        return {"mu": torch.full((len(layers),), self.mu0, dtype=torch.float64)}

    def stiffness(self, local: Tensors, anchor: Tensors, state: State, layers: Layers) -> Tensors:
        """c = μ_l for every tensor of layer l."""
        return {
            entry.name: mu.to(local[entry.name])
            for layer, mu in zip(layers.layers, state["mu"], strict=True)
            for entry in layer.entries
            if entry.trainable and mu > 0
        }

    def after_round(self, new: Tensor, old: Tensor, state: State, layers: Layers) -> State:
        """Move each μ_l towards its layer's share of the largest drift; if nothing moved, μ stays."""
        drift = layers.norms(new - old)
        if not drift.max() > 0:
            return state
        # Written so that a full share with μ_l = μ₀ gives back μ₀ to the last bit.
        return {"mu": state["mu"] + self.a * (drift / drift.max() * self.mu0 - state["mu"])}
