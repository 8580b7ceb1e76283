"""What clients remember from round to round: immutable versions, each named by the round and attempt that made it.

Training never changes a version, it makes a new one. Which version is a client's, says a table in the server's state,
renewed when a round is whole for every client that did its part. An order names the version to start from. So a retry,
a lost reply or a crash needs no undo: the table still names the old version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from fedstrata.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.axes import Algorithm, State
    from fedstrata.core.layers import Layers

Tag = tuple[int, int]
"""A version's name: the round and the attempt that made it."""

Version: TypeAlias = "Mapping[str, Tensor]"
"""What a client remembers, by name. It never leaves the client."""

PRIVATE = "private"
"""The entry that is reserved for the private layers: the tail of the vector that a client trains."""

OWN = "own"
"""The entry for a model of a client's own."""


def remembers(algorithm: Algorithm, layers: Layers) -> bool:
    """Whether clients remember anything."""
    return bool(layers.private) or hasattr(algorithm.objective, "remember")


def empty_table() -> State:
    """Nobody has taken part."""
    return {"client": torch.empty(0, dtype=torch.int64), "tag": torch.empty(0, 2, dtype=torch.int64)}


def tags(table: State) -> dict[int, Tag]:
    """Each client's version, by its row."""
    if not table:
        return {}
    return dict(zip(table["client"].tolist(), map(tuple, table["tag"].tolist()), strict=True))


def renewed(table: State, rows: Iterable[int], tag: Tag) -> State:
    """The table after these clients made a version of this name."""
    known = dict(sorted((tags(table) | dict.fromkeys(rows, tag)).items()))
    return {
        "client": torch.tensor(list(known), dtype=torch.int64),
        "tag": torch.tensor(list(known.values()), dtype=torch.int64).view(-1, 2),
    }


def merged(before: Version, after: Version, layers: Layers, sent: Tensor, units: Tensor | None = None) -> Version:
    """`after` where a layer or unit was sent, `before` elsewhere, in what has a number for each of the model's."""
    if units is None and bool(sent.all()):
        return after
    was_sent = torch.zeros(layers.numel, dtype=torch.bool)
    for layer, is_sent in zip(layers.layers, sent.tolist(), strict=True):
        was_sent[layer.start : layer.stop] = is_sent
        for entry in layer.entries if units is not None else ():
            rows = units[entry.first_unit : entry.first_unit + entry.units]  # type: ignore[index]
            was_sent[entry.start : entry.stop] = rows.repeat_interleave((entry.stop - entry.start) // entry.units)
    whole = {name for name, value in after.items() if tuple(value.shape) == (layers.numel,) and name != PRIVATE}
    return {n: torch.where(was_sent, v, before[n]) if n in whole else v for n, v in after.items()}
