"""FedAdam (Reddi et al., ICLR 2021): v ← β₂ v + (1 − β₂) Δ². What it shares with the others is in _adaptive.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedstrata.servers._adaptive import Forgetting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FedAdam(Forgetting):
    """Numbers that move much at present take small steps."""

    def second(self, v: Tensor, squared: Tensor) -> Tensor:
        """β₂ v + (1 − β₂) Δ²."""
        return self.beta2 * v + (1 - self.beta2) * squared
