"""Ditto (Li et al., ICML 2021): every client trains a model of its own beside its part in the global one.

The global model is FedAvg's, to the bit. Its own, v_k, minimises F_k(v) + (λ/2) ‖v − w_global‖² (eq 2), by the same
batches and from where it was after the client's last round. It is the model that the client is evaluated on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedstrata.core.axes import Objective, State, TrainsTwice, Work
from fedstrata.core.errors import require
from fedstrata.objectives.fedprox import FedProx

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.layers import Layers


@dataclass(frozen=True)
class Ditto(TrainsTwice):
    """Nothing holds the global model back; λ ties each client's own to it."""

    lam: float = 1.0

    def __post_init__(self) -> None:
        require(self.lam >= 0, "lam", self.lam, "must be ≥ 0")

    @property
    def keeps_unsent(self) -> bool:
        """The client's own model has nothing to do with what it sends."""
        return True

    def second(self) -> Objective:
        """(λ/2) ‖v − w_global‖²."""
        return FedProx(self.lam)

    def memory(self, layers: Layers, initial: Tensor) -> State:
        """v_k starts as everybody does."""
        return {"own": initial}

    def remember(self, memory: State, work: Work) -> State:
        """Where the second training came."""
        assert work.second is not None
        return {"own": work.second}
