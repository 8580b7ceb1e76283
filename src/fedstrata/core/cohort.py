"""The round's accepted updates, and what the weightings ask of them: above all, angles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from fedstrata.core.determinism import in_threads
from fedstrata.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.layers import Layers

_CACHED = 1 << 18
"""How many numbers of the updates are worked on at a time: in float64 they fill 2 MB, about a core's own cache."""


def cut(start: int, stop: int, width: int) -> list[tuple[int, int]]:
    """start:stop in pieces of at most this width."""
    return [(first, min(first + width, stop)) for first in range(start, stop, width)]


def angle(inner: Tensor, norm_update: Tensor, norm_mean: Tensor) -> Tensor:
    """θ = arccos(⟨G, Δ_k⟩ / ‖G‖‖Δ_k‖) (eq 7); a zero vector has no angle: π/2."""
    lengths = norm_update * norm_mean
    return torch.where(lengths > 0, inner / lengths.where(lengths > 0, 1.0), 0.0).clamp(-1, 1).arccos()


@dataclass(frozen=True)
class Cohort:
    """The round's accepted updates, in client order, and what the weightings ask of them.

    Everything about angles comes from three sums per client and layer, taken in float64 in one pass over the updates:
    with p the senders' shares of the data and G_l = Σ p_k Δ_{k,l}, these are ⟨Δ_k, G⟩, ‖Δ_k‖² and ⟨Δ_k, w⟩. The first
    is (M p)_k, M = ΔΔᵀ being the layer's Gram matrix; M itself is computed for rules that ask for it.
    """

    round: int
    clients: Tensor  # int64 [K]
    sizes: Tensor  # float64 [K]
    layers: Layers
    updates: tuple[Tensor, ...]  # K vectors of P numbers, zero where nothing was sent
    sent: Tensor  # bool [K, L]
    model: Tensor  # the global model that the updates start from
    units: Tensor | None = None  # bool [K, U], where clients picked units
    steps: Tensor | None = None  # τ_k: int64 [K], how many local steps each client took; None, if nobody knows
    reach: Tensor | None = None  # a_k: float64 [K], a constant gradient g moves a client by −η a_k g; None, if unknown
    lr: float = float("nan")  # η, the local learning rate of this round
    population: int = 0  # N: the clients with data, in this round or not

    def __post_init__(self) -> None:
        object.__setattr__(self, "population", max(self.population, len(self.updates)))

    def __len__(self) -> int:
        return len(self.updates)

    @property
    def numbers(self) -> int:
        """How many numbers the updates have in all."""
        return len(self) * self.layers.numel

    @property
    def is_trainable(self) -> Tensor:
        """Which numbers of the flat vector are no buffers, bool [P]."""
        return self.layers.is_trainable

    def sum(self, factors: Tensor) -> Tensor:
        """Σ_k m_ku f_kl Δ_ku, [P], for factors [K, L]; zero on buffers."""
        total = torch.zeros_like(self.model)
        for layer, column in zip(self.layers.layers, factors.T.tolist(), strict=True):
            part = slice(layer.start, layer.trainable_stop)
            for factor, update in zip(column, self.updates, strict=True):
                if factor != 0:
                    total[part].add_(update[part], alpha=factor)  # zero where nothing was sent
        return total

    def mass(self, factors: Tensor) -> Tensor:
        """Σ_k m_ku f_kl, [P], for factors [K, L]; zero on buffers."""
        total = torch.zeros_like(self.model)
        for at, layer in enumerate(self.layers.layers):
            column = factors[:, at] * self.sent[:, at]
            if self.units is None:
                total[layer.start : layer.trainable_stop] = float(column.sum())
                continue
            for entry in (entry for entry in layer.entries if entry.trainable):
                rows = column @ self.units[:, entry.first_unit : entry.first_unit + entry.units].double()
                numbers = (entry.stop - entry.start) // entry.units
                total[entry.start : entry.stop] = rows.to(total.dtype).repeat_interleave(numbers)
        return total

    def pieces(self) -> list[tuple[int, int, int]]:
        """(layer, first, last): the trainable columns, in pieces of which all updates' fit into a cache."""
        width = max(1024, _CACHED // len(self))
        return [
            (at, first, last)
            for at, layer in enumerate(self.layers.layers)
            for first, last in cut(layer.start, layer.trainable_stop, width)
        ]

    def blocks(self, pieces: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int, int, Tensor]]:
        """Each piece with its columns of all updates, float64 [K, c], which are good until the next piece.

        They are copied to the same place, as a sum may be rounded differently where an update lies differently.
        """
        room = torch.empty(len(self), max((last - first for _, first, last in pieces), default=0), dtype=torch.float64)
        for at, first, last in pieces:
            block = room[:, : last - first]
            for row, update in zip(block, self.updates, strict=True):
                row.copy_(update[first:last])
            yield at, first, last, block

    @cached_property
    def gram(self) -> Tensor:
        """M_l = Δ_l Δ_lᵀ over the trainable part of each layer, float64 [L, K, K]."""
        gram = torch.zeros(len(self.layers), len(self), len(self), dtype=torch.float64)
        for at, _, _, block in self.blocks(self.pieces()):
            gram[at] += block @ block.T
        return gram

    @cached_property
    def _sums(self) -> Tensor:
        """⟨Δ_k, G⟩, ‖Δ_k‖² and ⟨Δ_k, w⟩ over the trainable part of each layer, float64 [3, K, L]."""
        shares, pieces = self.shares, self.pieces()
        parts = torch.empty(len(pieces), 3, len(self), dtype=torch.float64)

        def sum_up(run: Sequence[int]) -> None:
            for number, (at, first, last, block) in zip(run, self.blocks([pieces[n] for n in run]), strict=True):
                mean = shares[:, at] @ block
                parts[number, 0] = block @ mean
                parts[number, 1] = torch.linalg.vector_norm(block, dim=1).square()
                parts[number, 2] = block @ self.model[first:last].double()

        in_threads(sum_up, range(len(pieces)), self.numbers)
        total = torch.zeros(3, len(self), len(self.layers), dtype=torch.float64)
        for (at, _, _), part in zip(pieces, parts, strict=True):
            total[:, :, at] += part
        return total

    @cached_property
    def shares(self) -> Tensor:
        """p_kl: each sender's share of the data among layer l's senders, float64 [K, L]."""
        mass = self.sizes[:, None] * self.sent
        return mass / mass.sum(0).clamp_min(torch.finfo(torch.float64).tiny)

    @property
    def inner_with_mean(self) -> Tensor:
        """⟨Δ_{k,l}, G_l⟩, float64 [K, L]."""
        return self._sums[0]

    @property
    def update_squared(self) -> Tensor:
        """‖Δ_{k,l}‖², float64 [K, L]."""
        return self._sums[1]

    @cached_property
    def mean_squared(self) -> Tensor:
        """‖G_l‖² = Σ p_k ⟨Δ_{k,l}, G_l⟩, float64 [L]."""
        return (self.inner_with_mean * self.shares).sum(0).clamp_min(0)

    @cached_property
    def local_norms(self) -> Tensor:
        """‖w_l + Δ_{k,l}‖, the norm of each client's layer as the server knows it, float64 [K, L]."""
        squared = self.layers.norms(self.model).square() + 2 * self._sums[2] + self.update_squared
        return squared.clamp_min(0).sqrt()

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
