"""The one equation that every algorithm aggregates by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

from fedstrata.core.cohort import Cohort, cut
from fedstrata.core.determinism import in_threads
from fedstrata.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def aggregate(model: Tensor, cohort: Cohort, weights: Tensor) -> Tensor:
    """The one equation: θ_u ← θ_u + Σ_k m_ku w_kl Δ_ku / Σ_j m_ju w_jl; what nobody sent stays as it is.

    Every update is read once, and the new model is all the memory it takes. The sum over clients is taken in the
    model's own precision, to which the result is rounded anyway.
    """
    new = torch.empty_like(model)

    def combine(pieces: Sequence[_Piece]) -> None:
        for first, last, shares in pieces:
            step = torch.zeros(last - first, dtype=model.dtype)
            for share, update in zip(shares, cohort.updates, strict=True):
                if isinstance(share, torch.Tensor):
                    step.view(len(share), -1).addcmul_(share, update[first:last].view(len(share), -1))
                elif share > 0:
                    step.add_(update[first:last], alpha=share)
            torch.add(model[first:last], step, out=new[first:last])

    in_threads(combine, list(_pieces(cohort, weights)), cohort.numbers)
    return new


_Piece: TypeAlias = "tuple[int, int, Sequence[float | Tensor]]"
"""first:last of the flat vector, and each client's m w / Σ m w there: a number, or one for each unit [rows, 1]."""

_PIECE = 1 << 16
"""How many numbers are combined at a time: few enough for a core's cache, enough to make each call worth it."""


def _pieces(cohort: Cohort, weights: Tensor) -> Iterator[_Piece]:
    """The whole model in pieces, and who has which share in them."""
    tiny = torch.finfo(torch.float64).tiny
    layers, masses = cohort.layers.layers, [weights[:, at] * cohort.sent[:, at] for at in range(len(cohort.layers))]
    if cohort.units is None:
        shares = [(mass / mass.sum().clamp_min(tiny)).tolist() for mass in masses]
        for alike, neighbours in groupby(zip(layers, shares, strict=True), key=itemgetter(1)):
            run = [layer for layer, _ in neighbours]
            yield from ((first, last, alike) for first, last in cut(run[0].start, run[-1].stop, _PIECE))
        return
    for layer, mass in zip(layers, masses, strict=True):
        for entry in layer.entries:
            by_unit = mass[:, None] * cohort.units[:, entry.first_unit : entry.first_unit + entry.units]
            by_unit = (by_unit / by_unit.sum(0).clamp_min(tiny)).to(cohort.layers.dtype)
            length = (entry.stop - entry.start) // entry.units
            for top, bottom in cut(0, entry.units, max(1, _PIECE // length)):
                first, last = entry.start + top * length, entry.start + bottom * length
                yield first, last, list(by_unit[:, top:bottom, None])
