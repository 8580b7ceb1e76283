"""FedBABU (Oh, Kim and Yun, ICLR 2022): the head is never trained in the rounds, and fine-tuned to evaluate.

So every client has the first head of all, and only the body is learned. `[evaluation] fine_tune` has the epochs that a
client then trains a copy of the whole model on its own data.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedstrata.core.axes import MovesSome, Moving


@dataclass(frozen=True)
class FedBabu(MovesSome):
    """Only shared layers move."""

    def moves(self, epoch: int) -> Moving:
        """Never the head."""
        return "shared"
