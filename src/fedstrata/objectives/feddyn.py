"""FedDyn (Acar et al., ICLR 2021), the clients' half: a proximal term, and a gradient that is remembered.

Client k minimises F_k(w) − ⟨h_k, w⟩ + (α/2) ‖w − w_global‖² (eq 1), where h_k is its gradient at the end of its last
round, which follows from where it then came: h_k ← h_k − α (w_k − w_global). It starts at zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedstrata.core.axes import Remembers, State, Tensors, Work
from fedstrata.core.errors import require
from fedstrata.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.layers import Layers


@dataclass(frozen=True)
class FedDyn(Remembers):
    """A proximal term α/2 ‖w − w_global‖², and the constant force −h_k."""

    alpha: float = 0.01

    def __post_init__(self) -> None:
        require(self.alpha > 0, "alpha", self.alpha, "must be > 0")

    def stiffness(self, local: Tensors, anchor: Tensors, state: State, layers: Layers) -> Tensors:
        """c = α everywhere."""
        return {name: torch.full((), self.alpha, dtype=w.dtype, device=w.device) for name, w in local.items()}

    def memory(self, layers: Layers, initial: Tensor) -> State:
        """h_k = 0."""
        return {"h": torch.zeros(layers.numel, dtype=layers.dtype)}

    def force(self, memory: State, state: State, layers: Layers) -> Tensor:
        """b = −h_k."""
        return -memory["h"]

    def remember(self, memory: State, work: Work) -> State:
        """h_k ← h_k − α Δ_k."""
        return {"h": memory["h"] - self.alpha * work.moved}
