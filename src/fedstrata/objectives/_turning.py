"""How far a neuron's weights have turned."""

from __future__ import annotations

import torch
from torch import Tensor


def one_minus_cosine(w: Tensor, a: Tensor, unit: int) -> Tensor:
    """λ per unit, shaped to broadcast; 0 where nothing changed or both are zero, 1 where one is."""
    dims = [d for d in range(w.ndim) if d != unit]
    moved = (w != a).any(dim=dims, keepdim=True)
    cosine = (_unit_vectors(w, dims) * _unit_vectors(a, dims)).sum(dims, keepdim=True)
    return torch.where(moved, (1 - cosine).clamp(0, 2), 0.0)


def _unit_vectors(w: Tensor, dims: list[int]) -> Tensor:
    """Each vector divided by its length, in two steps, so that the squares of small numbers do not vanish."""
    largest = w.detach().abs().amax(dims, keepdim=True)
    scaled = torch.where(largest > 0, w / largest.where(largest > 0, 1.0), 0.0)
    length = scaled.square().sum(dims, keepdim=True)
    return scaled / length.where(length > 0, 1.0).sqrt()
