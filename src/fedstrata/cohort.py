"""The round's accepted updates, and what the weightings ask of them: above all, angles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedstrata.layers import Layers


def angle(inner: Tensor, norm_update: Tensor, norm_mean: Tensor) -> Tensor:
    """θ = arccos(⟨G, Δ_k⟩ / ‖G‖‖Δ_k‖) (eq 7); a zero vector has no angle: π/2."""
    lengths = norm_update * norm_mean
    return torch.where(lengths > 0, inner / lengths.where(lengths > 0, 1.0), 0.0).clamp(-1, 1).arccos()


@dataclass(frozen=True)
class Cohort:
    """The round's accepted updates, in client order, and what the weightings ask of them.

    Everything about angles comes from one Gram matrix M_l of the updates per layer, in float64: with p the senders'
    shares of the data and G_l = Σ p_k Δ_{k,l}, ⟨Δ_k, G⟩ = (M p)_k and ‖G‖² = pᵀ M p.
    """

    round: int
    clients: Tensor  # int64 [K]
    sizes: Tensor  # float64 [K]
    layers: Layers
    updates: tuple[Tensor, ...]  # K vectors of P numbers, zero where nothing was sent
    sent: Tensor  # bool [K, L]
    model: Tensor  # the global model that the updates start from
    units: Tensor | None = None  # bool [K, U], where clients picked units

    def __len__(self) -> int:
        return len(self.updates)

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
        """The columns start:stop of all updates, float64 [K, c], in blocks that fit into a cache."""
        width = max(256, (1 << 17) // max(1, len(self)))
        for first in range(start, stop, width):
            last = min(first + width, stop)
            yield first, last, torch.stack([update[first:last] for update in self.updates]).double()

    @cached_property
    def gram(self) -> Tensor:
        """M_l = Δ_l Δ_lᵀ over the trainable part of each layer, float64 [L, K, K]."""
        gram = torch.zeros(len(self.layers), len(self), len(self), dtype=torch.float64)
        for matrix, layer in zip(gram, self.layers.layers, strict=True):
            for _, _, block in self.blocks(layer.start, layer.measured):
                matrix += block @ block.T
        return gram

    @cached_property
    def shares(self) -> Tensor:
        """p_kl: each sender's share of the data among layer l's senders, float64 [K, L]."""
        mass = self.sizes[:, None] * self.sent
        return mass / mass.sum(0).clamp_min(torch.finfo(torch.float64).tiny)

    @cached_property
    def inner_with_mean(self) -> Tensor:
        """⟨Δ_{k,l}, G_l⟩, float64 [K, L]."""
        return torch.einsum("lkj,jl->kl", self.gram, self.shares)

    @cached_property
    def mean_squared(self) -> Tensor:
        """‖G_l‖², float64 [L]."""
        return (self.inner_with_mean * self.shares).sum(0).clamp_min(0)

    @cached_property
    def update_squared(self) -> Tensor:
        """‖Δ_{k,l}‖², float64 [K, L]."""
        return self.gram.diagonal(dim1=1, dim2=2).T

    @cached_property
    def local_norms(self) -> Tensor:
        """‖w_l + Δ_{k,l}‖, the norm of each client's layer as the server knows it, float64 [K, L]."""
        squared = torch.zeros(len(self), len(self.layers), dtype=torch.float64)
        for column, layer in zip(squared.T, self.layers.layers, strict=True):
            for first, last, block in self.blocks(layer.start, layer.measured):
                column += (block + self.model[first:last]).square().sum(1)
        return squared.sqrt()

    @cached_property
    def layer_angles(self) -> Tensor:
        """θ_{k,l}: the angle between a client's layer and the mean of that layer's senders, float64 [K, L]."""
        return angle(self.inner_with_mean, self.update_squared.sqrt(), self.mean_squared.sqrt())

    @cached_property
    def model_angles(self) -> Tensor:
        """θ_k: the angle between a client's update and the mean, over the layers it sent, float64 [K]."""
        inner = (self.inner_with_mean * self.sent).sum(1)
        update = (self.update_squared * self.sent).sum(1).sqrt()
        mean = (self.mean_squared * self.sent).sum(1).sqrt()
        return angle(inner, update, mean)
