"""FedProx (Li et al., MLSys 2020): one constant spring, F_k(w) + (μ/2) ‖w − w_global‖²."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedstrata.core.axes import Objective, State, Tensors
from fedstrata.core.errors import require
from fedstrata.core.lazy import torch

if TYPE_CHECKING:
    from fedstrata.core.layers import Layers


@dataclass(frozen=True)
class FedProx(Objective):
    """The same μ holds every parameter back; μ = 0 *is* plain."""

    mu: float = 0.01

    def __post_init__(self) -> None:
        require(self.mu >= 0, "mu", self.mu, "must be ≥ 0")

    def stiffness(self, local: Tensors, anchor: Tensors, state: State, layers: Layers) -> Tensors:
        """c = μ."""
        return {name: torch.tensor(self.mu, dtype=w.dtype, device=w.device) for name, w in local.items() if self.mu > 0}
