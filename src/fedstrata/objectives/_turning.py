"""How far a neuron's weights have turned."""

from __future__ import annotations

import torch
from torch import Tensor


def one_minus_cosine(w: Tensor, a: Tensor, unit: int) -> Tensor:
    """λ per unit, shaped to broadcast; 0 where nothing changed or both are zero, 1 where one is.

    It is computed before every epoch or step, and from sums of squares: norms along strides are several times slower.
    """
    dims = [d for d in range(w.ndim) if d != unit]
    moved = (w.detach() - a).abs_().sum(dims, keepdim=True) > 0
    square_w, square_a = w.square().sum(dims, keepdim=True), a.square().sum(dims, keepdim=True)
    has_angle = (square_w > 0) & (square_a > 0)
    lengths = square_w.where(has_angle, 1.0).sqrt() * square_a.where(has_angle, 1.0).sqrt()
    cosine = torch.where(has_angle, (w * a).sum(dims, keepdim=True) / lengths, 0.0)
    return torch.where(moved, (1 - cosine).clamp(0, 2), 0.0)
