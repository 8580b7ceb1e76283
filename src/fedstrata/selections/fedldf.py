"""FedLDF: for each layer, only the n clients whose layer diverged most upload it.

Every client sends one number per layer, ‖w_{k,l} − w_l‖₂ (eq 3); the server takes the n largest of each layer (eq 4)
and asks for those in a second exchange. Upload is n/K of FedAvg's plus K·L numbers; n = K is FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from fedstrata.core.lazy import torch
from fedstrata.selections._share import SomeClients

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.layers import Layers


@dataclass(frozen=True)
class FedLDF(SomeClients):
    """Each layer comes from the `n` clients where it diverged most; by default a fifth of the round's."""

    decides: ClassVar[Literal["after_scores"]] = "after_scores"

    def score(self, update: Tensor, layers: Layers) -> Tensor:
        """The divergence of each layer (eq 3)."""
        return layers.norms(update)

    def choose(self, scores: Tensor) -> Tensor:
        """The n largest of each column (eq 4); the lower index wins a tie."""
        order = torch.sort(scores, dim=0, descending=True, stable=True).indices
        return torch.zeros(scores.shape, dtype=torch.bool).scatter_(0, order[: self.count(len(scores))], True)
