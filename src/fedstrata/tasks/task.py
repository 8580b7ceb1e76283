"""What is learned: a model, every client's data, a loss and a metric.

A user's own task is a `Task` built in Python, or by a function that a recipe names as `module:function`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from numbers import Number
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from fedstrata.core.errors import DataError
from fedstrata.tasks.metric import ACCURACY, Metric
from fedstrata.tasks.nests import leaves, map_nest

MOST_COUNTED = 1000
"""Clients, and classes, up to which a run directory keeps how many samples of which class a client has."""


class Data(Protocol):
    """Samples that are gathered by index, so that they can stay where they are."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Inputs and targets of the samples at these positions."""
        ...


@dataclass(frozen=True)
class NestedSamples:
    """Rows of tensors that many clients may share; `rows` are this client's (all, if None).

    Inputs and targets are nests of tensors that have a row for each sample.
    """

    inputs: Any
    targets: Any
    rows: np.ndarray | None = None

    def __len__(self) -> int:
        return len(next(leaf for _, leaf in leaves(self.inputs, ""))) if self.rows is None else len(self.rows)

    def batch(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Gather by index."""
        at = torch.from_numpy(indices if self.rows is None else self.rows[indices])
        return map_nest(lambda leaf: leaf[at], self.inputs), map_nest(lambda leaf: leaf[at], self.targets)

    def check(self, what: str) -> None:
        """Refuse tensors of unequal lengths, and rows that are not there."""
        found = [*leaves(self.inputs, "inputs"), *leaves(self.targets, "targets")]
        for side in ("inputs", "targets"):
            if not any(place.startswith(side) for place, _ in found):
                raise DataError(f"{what}: there is no tensor in its {side}")
        for place, leaf in found:
            if leaf.ndim == 0:
                problem = f"is the number {leaf.item()}, without a row for each sample"
                raise DataError(f"{what}: {place} {problem}; if these are samples, put them into a list")
        first, there = found[0][0], len(found[0][1])
        for place, leaf in found:
            if len(leaf) != there:
                raise DataError(f"{what}: {first} has {there} samples, but {place} has {len(leaf)}")
        if self.rows is not None and len(self.rows):
            low, high = int(self.rows.min()), int(self.rows.max())
            if low < 0 or high >= there:
                raise DataError(f"{what}: its rows go from {low} to {high}, but there are {there}, from 0")


@dataclass(frozen=True)
class Samples(NestedSamples):
    """The same of two plain tensors."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class DatasetSamples:
    """A `torch.utils.data.Dataset` of (input, target) pairs, or whatever else is like one."""

    dataset: Dataset[Any]
    what: str

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def batch(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Fetch one by one and collate."""
        samples = [self._sample(int(index)) for index in indices]
        try:
            inputs, targets = default_collate(samples)
        except Exception as error:
            problem = f"samples cannot be put into one batch: {type(error).__name__}: {error}"
            raise DataError(f"{self.what}: {problem}; an object with batch(indices) can do so in its way") from error
        return inputs, targets

    def _sample(self, index: int) -> Any:
        try:
            sample = self.dataset[index]
        except IndexError as error:
            problem = DataError(f"{self.what}: sample {index} of {len(self)}: IndexError: {error}")
            raise problem.with_traceback(error.__traceback__) from error
        if not _is_pair(sample):
            raise DataError(f"{self.what}: sample {index} must be a pair (input, target), not {_kind(sample)}")
        return sample


@dataclass(frozen=True)
class Batches:
    """Data that makes its batches itself."""

    data: Data
    what: str

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Whatever it gives, if that is a pair."""
        batch = self.data.batch(indices)
        if not _is_pair(batch):
            raise DataError(f"{self.what}: batch(indices) must give a pair (inputs, targets), not {_kind(batch)}")
        return batch[0], batch[1]


@dataclass(frozen=True)
class Rows:
    """Some samples of a data set that makes its batches itself."""

    whole: Data
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Gather by index."""
        return self.whole.batch(self.rows[indices])


def rows_of(whole: Data, rows: np.ndarray) -> Data:
    """Some samples of a data set."""
    if not isinstance(whole, NestedSamples):
        return Rows(whole, rows)
    return replace(whole, rows=rows if whole.rows is None else whole.rows[rows])


def _is_pair(found: object) -> bool:
    return isinstance(found, tuple | list) and len(found) == 2


def _kind(found: object) -> str:
    """What something is, in a few words."""
    size = f" of {len(found)}" if isinstance(found, tuple | list | Mapping) else ""
    return f"{type(found).__name__}{size}"


def as_data(data: object, what: str) -> Data:
    """Data in any form that `Task` names; `what` says whose it is."""
    if isinstance(data, DatasetSamples | Batches):
        return data
    if isinstance(data, tuple) and len(data) == 2:
        inputs, targets = (_tensors(part, what) for part in data)
        plain = isinstance(inputs, Tensor) and isinstance(targets, Tensor)
        data = (Samples if plain else NestedSamples)(inputs, targets)
    if isinstance(data, NestedSamples):
        data.check(what)
        return data
    if isinstance(data, list) and len(data) == 2 and not all(map(_is_pair, data)):
        kinds = " and ".join(map(_kind, data))
        raise DataError(f"{what}: a list is one of samples, and this one has {kinds}; use a tuple, (inputs, targets)")
    if isinstance(data, Sized) and callable(getattr(data, "batch", None)):
        return Batches(data, what)  # type: ignore[arg-type]
    if isinstance(data, Sized) and hasattr(type(data), "__getitem__") and not isinstance(data, Mapping):
        return DatasetSamples(data, what)  # type: ignore[arg-type]
    expected = "a tuple (inputs, targets), a Dataset with a length, or an object with __len__ and batch(indices)"
    raise DataError(f"{what}: expected {expected}, got {_kind(data)}")


def _tensors(nest: Any, what: str) -> Any:
    """Arrays, and lists of numbers, become tensors."""

    def convert(leaf: Any) -> Tensor:
        try:
            return torch.as_tensor(leaf)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"{what}: expected a tensor or array, got {_kind(leaf)}: {error}") from None

    return convert(nest) if _is_numbers(nest) else map_nest(convert, nest)


def _is_numbers(nest: Any) -> bool:
    while isinstance(nest, list | tuple) and nest:
        nest = nest[0]
    return isinstance(nest, Number | list | tuple)


@dataclass(frozen=True)
class Task:
    """A learning task.

    `model()` builds a fresh model; it is called in a seeded scope. `clients` has each client's training data,
    `held_out` each client's own evaluation data, `evaluation` the server's data sets by name ("test", "validation", …).
    `train(model, data, local)`, if given, is how a client trains: `data` is its entry of `clients`, `local` a
    `fedstrata.Local`.

    Data has one of three forms. A *tuple* of two is (inputs, targets): each a tensor or array, or a nest (dict, tuple,
    namedtuple, list) of those, all with a row for each sample. What has `__len__` and `batch(indices)` makes batches by
    itself: pairs (inputs, targets) of any nests, `PackedSequence` included. Anything else with `__len__` and
    `__getitem__`, such as a `torch.utils.data.Dataset` or a list, holds samples: pairs (input, target), which torch's
    `default_collate` puts into batches. The model is called with one argument, the batch's inputs.
    """

    model: Callable[[], nn.Module]
    clients: Sequence[Any]
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    held_out: Sequence[Any] | None = None
    loss: Callable[[Any, Any], Tensor] = nn.functional.cross_entropy
    metric: Metric = ACCURACY
    train: Callable[[Any, Any, Any], object] | None = None
    name: str = "custom"
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What a run directory should remember of the data: its source, the clients × classes table."""

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module):
            raise DataError(f"task {self.name!r}: model must be a function that builds a model, not a model")
        if self.train is not None and not callable(self.train):
            raise DataError(f"task {self.name!r}: train must be a function train(model, data, local), or None")
        if len(self.clients) == 0:
            raise DataError(f"task {self.name!r}: clients is empty")
        if self.held_out is not None and len(self.held_out) != len(self.clients):
            raise DataError(f"task {self.name!r}: {len(self.held_out)} held_out sets for {len(self.clients)} clients")

    def client(self, index: int) -> Data:
        """A client's training data."""
        return as_data(self.clients[index], f"clients[{index}]")

    def client_held_out(self, index: int) -> Data:
        """A client's own evaluation data."""
        if self.held_out is None:
            raise DataError(f"task {self.name!r} has no held_out data to evaluate clients on")
        return as_data(self.held_out[index], f"held_out[{index}]")

    def server_data(self, name: str) -> Data:
        """One of the server's evaluation sets."""
        if name not in self.evaluation:
            known = ", ".join(self.evaluation) or "none"
            raise DataError(f"task {self.name!r} has no evaluation set {name!r} (it has: {known})")
        return as_data(self.evaluation[name], name)

    def sizes(self) -> np.ndarray:
        """Every client's number of training samples, int64 [N]."""
        return _sizes(self.clients, self.client)

    def described(self, here: bool = True) -> dict[str, Any]:
        """`notes`, completed: what has a source has a name, and what is counted by class has names for the classes.

        If the clients' data is `here`, the clients × classes table is counted where there is none and targets are
        class numbers.
        """
        notes = dict(self.notes)
        countable = here and "table" not in notes and len(self.clients) <= MOST_COUNTED
        if countable and (counted := self._count_classes()) is not None:
            notes["table"] = counted.tolist()
        if "source" in notes:
            notes.setdefault("dataset", self.name)
        if "table" in notes:
            table = notes["table"]
            if not isinstance(table, list) or not all(isinstance(row, list) for row in table):
                raise DataError(f"task {self.name!r}: notes.table = {table!r}: must have a list of counts per client")
            classes = max(map(len, table), default=0)
            notes.setdefault("class_names", [str(number) for number in range(classes)])
        try:
            json.dumps(notes, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(f"task {self.name!r}: its notes cannot be kept as JSON: {error}") from None
        return notes

    def _count_classes(self) -> np.ndarray | None:
        """Samples by client and class; None unless all targets are in memory, whole and like the numbers of classes."""
        rows = []
        for shard in map(self.client, range(len(self.clients))):
            if not isinstance(shard, NestedSamples) or not isinstance(shard.targets, Tensor):
                return None
            targets = shard.targets if shard.rows is None else shard.targets[torch.from_numpy(shard.rows)]
            if targets.ndim != 1 or targets.is_floating_point():
                return None
            if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < MOST_COUNTED:
                return None
            rows.append(torch.bincount(targets.long()).numpy())
        classes = max(map(len, rows))
        return np.stack([np.pad(row, (0, classes - len(row))) for row in rows]) if classes else None

    def held_out_sizes(self) -> np.ndarray:
        """Every client's number of held-out samples, int64 [N]."""
        return _sizes(self.held_out or (), self.client_held_out)


def _sizes(shards: Sequence[Any], shard: Callable[[int], Data]) -> np.ndarray:
    """The shards' own count, where they keep one, or else one by one."""
    known = getattr(shards, "sizes", None)
    return np.array([len(shard(k)) for k in range(len(shards))] if known is None else known, dtype=np.int64)
