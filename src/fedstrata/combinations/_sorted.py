"""What the coordinate-wise combinations share: every number's values, sorted, without the outermost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from fedstrata.core.cohort import Cohort, cut
from fedstrata.core.determinism import in_threads
from fedstrata.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_PIECE = 1 << 18
"""How many numbers of all updates are sorted at a time."""


def inner_mean(model: Tensor, cohort: Cohort, weights: Tensor, outer: Callable[[Tensor], Tensor]) -> Tensor:
    """Each number moves by the mean of its sorted updates, without the `outer(m)` lowest and highest of m.

    Whoever sent the number and has a weight above 0 is one of the m, and all of them count the same. Where there is
    nobody, the number stays. Computed in float64; the rest is the model's precision.
    """
    new, counts = torch.empty_like(model), (weights > 0) & cohort.sent

    def combine(pieces: Sequence[tuple[int, int, Tensor]]) -> None:
        for first, last, who in pieces:
            block = torch.stack([update[first:last] for update in cohort.updates]).double()
            block = block.masked_fill_(~who, torch.inf).sort(0).values
            m = who.sum(0)
            low = outer(m)
            rank = torch.arange(len(cohort))[:, None]
            inner = torch.where((rank >= low) & (rank < m - low), block, 0.0).sum(0) / (m - 2 * low).clamp_min(1)
            new[first:last] = model[first:last].double() + inner

    in_threads(combine, list(_pieces(cohort, counts)), cohort.numbers)
    return new


def _pieces(cohort: Cohort, counts: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """The whole model, buffers as well, in pieces, with who counts there: bool [K, 1] or [K, numbers]."""
    width = max(1, _PIECE // len(cohort))
    for at, layer in enumerate(cohort.layers.layers):
        who = counts[:, at, None]
        if cohort.units is None:
            yield from ((first, last, who) for first, last in cut(layer.start, layer.stop, width))
            continue
        for entry in layer.entries:
            length = (entry.stop - entry.start) // entry.units
            for top, bottom in cut(0, entry.units, max(1, width // length)):
                units = cohort.units[:, entry.first_unit + top : entry.first_unit + bottom] & who
                first, last = entry.start + top * length, entry.start + bottom * length
                yield first, last, units.repeat_interleave(length, dim=1)
