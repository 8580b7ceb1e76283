"""What FedAdp and FedLayerWise share: the running mean of an angle, and how much an angle counts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from fedstrata.core.errors import require
from fedstrata.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Smoothing = Literal["participation", "round"]
"""What t is in the running mean (eq 8) of a client that does not take part every round: the number of rounds it has
taken part in, or, literally, the round's number."""


def smooth(before: Tensor, count: Tensor, now: Tensor, round: int, smoothing: Smoothing) -> Tensor:
    """θ̃(t) = ((t − 1) θ̃(t − 1) + θ) / t (eq 8), and θ̃ = θ for a client's first angle."""
    t = count + 1 if smoothing == "participation" else torch.full_like(count, round)
    return torch.where(count == 0, now, ((t - 1) * before + now) / t)


def check_alpha(alpha: float) -> None:
    """Refuse what is no α."""
    require(0 < alpha < math.inf, "alpha", alpha, "must be > 0 and finite")


def importance(smoothed: Tensor, alpha: float) -> Tensor:
    """f(θ̃) = α (1 − exp(−exp(−α (θ̃ − 1)))) (eq 9)."""
    return alpha * (1 - torch.exp(-torch.exp(-alpha * (smoothed - 1))))


_LARGEST = 600.0
"""exp of it, times any number of samples, and summed, is still far from float64's end at exp(709)."""


def psi(sizes: Tensor, importance: Tensor, sent: Tensor) -> Tensor:
    """n_k exp f (eq 10), float64 [K, L], from f as [K, L] or [K, 1].

    Only ratios count. So from a large f, which a large α gives, a layer's senders all have the same subtracted.
    """
    excess = importance.where(sent, -math.inf).amax(0) - _LARGEST
    return sizes[:, None] * torch.exp((importance - excess.clamp(min=0)).clamp(max=_LARGEST))
