"""FedRep (Collins et al., ICML 2021): first the private head is trained, then, with the head held, what is shared.

`head_epochs` local epochs move the private layers only, the rest the others only (algorithm 1). A client that is too
slow to reach an epoch for the shared layers sends none.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedstrata.core.axes import MovesSome, Moving
from fedstrata.core.errors import require


@dataclass(frozen=True)
class FedRep(MovesSome):
    """Local epochs for the head, then for the body."""

    head_epochs: int = 1

    def __post_init__(self) -> None:
        require(self.head_epochs >= 0, "head_epochs", self.head_epochs, "must be ≥ 0")

    def moves(self, epoch: int) -> Moving:
        """The head first."""
        return "private" if epoch < self.head_epochs else "shared"
