"""FedAdagrad (Reddi et al., ICLR 2021): v ← v + Δ². What it shares with the others is in _adaptive.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedstrata.servers._adaptive import Adaptive

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FedAdagrad(Adaptive):
    """Numbers that have moved much take small steps, for ever."""

    beta1: float = 0.0

    def second(self, v: Tensor, squared: Tensor) -> Tensor:
        """v + Δ²."""
        return v + squared
