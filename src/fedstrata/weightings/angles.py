"""What FedAdp and FedLayerWise share: the running mean of an angle, and how much an angle counts."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Smoothing = Literal["participation", "round"]
"""What t is in the running mean (eq 8) of a client that does not take part every round: the number of rounds it has
taken part in, or, literally, the round's number."""


def smooth(before: Tensor, count: Tensor, now: Tensor, round: int, smoothing: Smoothing) -> Tensor:
    """θ̃(t) = ((t − 1) θ̃(t − 1) + θ) / t (eq 8), and θ̃ = θ for a client's first angle."""
    t = count + 1 if smoothing == "participation" else torch.full_like(count, round)
    return torch.where(count == 0, now, ((t - 1) * before + now) / t)


def importance(smoothed: Tensor, alpha: float) -> Tensor:
    """f(θ̃) = α (1 − exp(−exp(−α (θ̃ − 1)))) (eq 9)."""
    return alpha * (1 - torch.exp(-torch.exp(-alpha * (smoothed - 1))))
