"""A task whose clients have no data of their own to be evaluated on, with a part of their training data held out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np

from fedstrata.core import rng
from fedstrata.tasks.task import Batches, Data, NestedSamples, Task


def with_held_out(task: Task, share: float, seed: int) -> Task:
    """Every client's samples in two: a `share` of them, drawn by the seed, becomes its held-out data."""
    sizes = task.sizes()
    held = np.where(sizes > 1, np.maximum(1, np.round(sizes * share)), 0).astype(np.int64)
    held = np.minimum(held, np.maximum(sizes - 1, 0))

    def half(client: int, is_held_out: bool) -> Data:
        order = rng.generator(seed, "held out", client=client).permutation(int(sizes[client]))
        rows = np.sort(order[: held[client]] if is_held_out else order[held[client] :])
        return _chosen(task.client(client), rows)

    return replace(
        task,
        clients=_Halves(lambda client: half(client, False), sizes - held),
        held_out=_Halves(lambda client: half(client, True), held),
    )


def _chosen(data: Data, rows: np.ndarray) -> Data:
    if isinstance(data, NestedSamples):
        return replace(data, rows=rows if data.rows is None else data.rows[rows])
    return Batches(_Rows(data, rows), getattr(data, "what", "data"))


@dataclass(frozen=True)
class _Rows:
    """Some of the samples of data that makes its batches itself."""

    data: Data
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Those at these positions among them."""
        return self.data.batch(self.rows[indices])


class _Halves(Sequence[Data]):
    """One half of every client's data."""

    def __init__(self, half: Callable[[int], Data], sizes: np.ndarray) -> None:
        self._half, self.sizes = half, sizes

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, index: int) -> Data: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Data]: ...
    def __getitem__(self, index: int | slice) -> Data | Sequence[Data]:
        if isinstance(index, slice):
            return [self._half(at) for at in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._half(index)
