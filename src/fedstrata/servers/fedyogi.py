"""FedYogi (Reddi et al., ICLR 2021): v ← v − (1 − β₂) Δ² sign(v − Δ²).

What it shares with the others is in _adaptive.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedstrata.servers._adaptive import Forgetting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FedYogi(Forgetting):
    """As FedAdam, but v changes by (1 − β₂) Δ², however large it was."""

    def second(self, v: Tensor, squared: Tensor) -> Tensor:
        """v − (1 − β₂) Δ² sign(v − Δ²)."""
        return v - (1 - self.beta2) * squared * (v - squared).sign()
