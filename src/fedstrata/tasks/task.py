"""What is learned: a model, every client's data, a loss and a metric.

A user's own task is a `Task` built in Python, or by a function that a recipe names as `module:function`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from fedstrata.errors import DataError

MOST_COUNTED = 1000
"""Clients, and classes, up to which a run directory keeps how many samples of which class a client has."""


class Data(Protocol):
    """Samples that are gathered by index, so that they can stay where they are."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Inputs and targets of the samples at these positions."""
        ...


@dataclass(frozen=True)
class Samples:
    """Rows of two tensors that many clients may share; `rows` are this client's (all, if None)."""

    inputs: Tensor
    targets: Tensor
    rows: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.inputs) if self.rows is None else len(self.rows)

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Gather by index."""
        at = torch.from_numpy(indices if self.rows is None else self.rows[indices])
        return self.inputs[at], self.targets[at]


@dataclass(frozen=True)
class DatasetSamples:
    """A `torch.utils.data.Dataset` of (input, target) pairs."""

    dataset: Dataset[Any]

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def batch(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Fetch one by one and collate."""
        inputs, targets = default_collate([self.dataset[int(i)] for i in indices])
        return inputs, targets


@dataclass(frozen=True)
class Metric:
    """What is better, and how it is measured.

    `function(outputs, targets)` gives the mean over a batch of samples; with `whole=True` it needs all samples of a
    data set at once (an AUC, an F1 score).
    """

    name: str
    function: Callable[[Any, Any], Tensor | float]
    direction: Literal["max", "min"] = "max"
    whole: bool = False

    @property
    def worst(self) -> float:
        """What a value that is no number counts as."""
        return -math.inf if self.direction == "max" else math.inf

    def reached(self, value: float, target: float) -> bool:
        """Whether a value is at least as good as the target."""
        return value >= target if self.direction == "max" else value <= target


def _accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).double().mean()


ACCURACY = Metric("accuracy", _accuracy)


def as_data(data: object, what: str) -> Data:
    """Accept a pair of tensors (or arrays), a `torch.utils.data.Dataset`, or anything with `__len__` and `batch`."""
    if isinstance(data, tuple | list) and len(data) == 2:
        inputs, targets = (torch.as_tensor(part) for part in data)
        if len(inputs) != len(targets):
            raise DataError(f"{what}: {len(inputs)} inputs but {len(targets)} targets")
        return Samples(inputs, targets)
    if hasattr(data, "batch") and hasattr(data, "__len__"):
        return data
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return DatasetSamples(data)  # type: ignore[arg-type]
    raise DataError(f"{what}: expected (inputs, targets) tensors or a Dataset, got {type(data).__name__}")


@dataclass(frozen=True)
class Task:
    """A learning task.

    `model()` builds a fresh model; it is called in a seeded scope. `clients` has each client's training data,
    `held_out` each client's own evaluation data, `evaluation` the server's data sets by name ("test", "validation", …).
    Data is a pair of tensors, a `torch.utils.data.Dataset`, or anything with `__len__` and `batch(indices)`.
    """

    model: Callable[[], nn.Module]
    clients: Sequence[Any]
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    held_out: Sequence[Any] | None = None
    loss: Callable[[Any, Any], Tensor] = nn.functional.cross_entropy
    metric: Metric = ACCURACY
    name: str = "custom"
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What a run directory should remember of the data: its source, the clients × classes table."""

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module):
            raise DataError(f"task {self.name!r}: model must be a function that builds a model, not a model")
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
            if not isinstance(shard, Samples) or shard.targets.ndim != 1 or shard.targets.is_floating_point():
                return None
            targets = shard.targets if shard.rows is None else shard.targets[torch.from_numpy(shard.rows)]
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
