"""What the server steps have in common."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fedstrata.core.errors import require
from fedstrata.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.cohort import Cohort


def check_lr(lr: float) -> None:
    """Refuse what is no learning rate."""
    require(0 < lr < math.inf, "lr", lr, "must be > 0 and finite")


def moved(cohort: Cohort) -> Tensor:
    """Which numbers a step moves, bool [P]: no buffers, and none that nobody sent, whose state stays, too."""
    return cohort.mass(torch.ones(cohort.sent.shape, dtype=torch.float64)) > 0
