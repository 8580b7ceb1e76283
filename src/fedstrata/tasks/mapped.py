"""Data sets of other libraries: a Hugging Face `Dataset`, or whatever has a length and gives samples by number.

Nothing is imported for it. What has `column_names` and `with_format`, as Hugging Face's have, is read by columns. Of
everything else, samples are read one by one, and a column is a key of a sample: a name of a dict, a place in a tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstrata.core import rng
from fedstrata.core.errors import BadValue, DataError, printable
from fedstrata.tasks.nests import leaves
from fedstrata.tasks.task import Data, NestedSamples, Samples
from fedstrata.tasks.whole import Whole

Key = str | int
"""A column's name, or a place in a tuple."""

KEPT = 2 << 30
"""Bytes of inputs up to which they are read once and kept; others are read whenever they are trained on."""

AT_ONCE = 1000
"""Samples to read at a time."""

TRIED = 16
"""Samples to read twice, to see whether they are the same."""

CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class Columns:
    """A data set's columns: which are inputs, and which is the target."""

    dataset: Any
    inputs: Key | tuple[Key, ...]
    targets: Key
    transform: Callable[[Any], Any] | None
    what: str

    def __post_init__(self) -> None:
        if isinstance(self.dataset, Mapping):
            raise BadValue(self.what, list(self.dataset), "is several data sets; give one of them")
        if not hasattr(self.dataset, "__len__") or not hasattr(self.dataset, "__getitem__"):
            problem = "must have a length and give samples by number"
            raise BadValue(self.what, type(self.dataset).__name__, problem)
        if self._is_table and not self._is_transformed:
            names = self.dataset.column_names
            for field, key in [("inputs", one) for one in self._inputs] + [("targets", self.targets)]:
                if key not in names:
                    raise BadValue(field, key, f"is no column of {self.what}; there are: {', '.join(map(str, names))}")

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def _inputs(self) -> tuple[Key, ...]:
        return self.inputs if isinstance(self.inputs, tuple) else (self.inputs,)

    @property
    def _is_table(self) -> bool:
        return hasattr(self.dataset, "column_names") and hasattr(self.dataset, "with_format")

    @property
    def _is_transformed(self) -> bool:
        """Whether its owner has said in which form it is to give its columns."""
        chosen = getattr(self.dataset, "format", None)
        return isinstance(chosen, Mapping) and chosen.get("type") is not None

    def read_inputs(self, rows: np.ndarray) -> Any:
        """The inputs of some samples: a tensor, or a dict of them where there are several columns."""
        columns = self.read(self._inputs, rows)
        found = {key: _images(values) if _is_image(values) else _tensor(values) for key, values in columns.items()}
        inputs = found if isinstance(self.inputs, tuple) else found[self.inputs]
        return inputs if self.transform is None else self.transform(inputs)

    def read(self, keys: Sequence[Key], rows: np.ndarray) -> dict[Key, Any]:
        """Columns of some samples, each an array or a tensor with a row for each of them."""
        if self._is_table:
            table = self.dataset if self._is_transformed else self.dataset.with_format("numpy", columns=list(keys))
            found = table[rows.tolist()]
            return {key: self._stacked(key, self._column(found, key, rows), rows) for key in keys}
        samples = [self.dataset[row] for row in rows.tolist()]
        pairs = list(zip(rows.tolist(), samples, strict=True))
        return {key: self._stacked(key, [self._part(sample, key, at) for at, sample in pairs], rows) for key in keys}

    def _column(self, found: Any, key: Key, rows: np.ndarray) -> Any:
        return self._part(found, key, int(rows[0]) if len(rows) else 0)

    def _part(self, sample: Any, key: Key, row: int) -> Any:
        try:
            return sample[key]
        except (KeyError, IndexError, TypeError):
            there = ", ".join(map(str, sample)) if isinstance(sample, Mapping) else f"a {type(sample).__name__}"
            raise DataError(f"{self.what}: sample {row} has no {key!r}; it has: {there}") from None

    def _stacked(self, key: Key, values: Any, rows: np.ndarray) -> Any:
        if isinstance(values, Tensor) or (isinstance(values, np.ndarray) and values.dtype != object):
            return values
        parts = list(values)
        for row, part in zip(rows.tolist(), parts, strict=True):
            if part is None:
                raise DataError(f"{self.what}: {key!r} of sample {row} is missing (None)")
        if parts and all(isinstance(part, Tensor) for part in parts):
            shapes = [tuple(part.shape) for part in parts]
        else:
            parts = [np.asarray(part) for part in parts]
            shapes = [part.shape for part in parts]
        for row, shape in zip(rows.tolist(), shapes, strict=True):
            if shape != shapes[0]:
                problem = f"has shape {list(shape)}, and of sample {rows[0]} it has {list(shapes[0])}"
                raise DataError(f"{self.what}: {key!r} of sample {row} {problem}; bring them to one shape before")
        return torch.stack(parts) if parts and isinstance(parts[0], Tensor) else np.stack(parts)

    def whole_column(self, key: Key) -> Any:
        """A column of all samples."""
        blocks = [self.read([key], rows)[key] for rows in _in_blocks(len(self))]
        return torch.cat(blocks) if isinstance(blocks[0], Tensor) else np.concatenate(blocks)

    def names(self, key: Key) -> list[str] | None:
        """What a column's numbers stand for, if the data set knows."""
        features = getattr(self.dataset, "features", None)
        names = getattr(features.get(key), "names", None) if isinstance(features, Mapping) else None
        return None if names is None else [str(name) for name in names]


def _in_blocks(count: int) -> list[np.ndarray]:
    return [np.arange(start, min(start + AT_ONCE, count)) for start in range(0, count, AT_ONCE)]


def _tensor(values: Any) -> Tensor:
    if isinstance(values, np.ndarray) and values.dtype.kind not in "biuf":
        text = str(values.ravel()[0])[:50]
        raise DataError(printable(f"inputs must be numbers or images, and {text!r} is none; convert it before"))
    return torch.as_tensor(values)


def _is_image(values: Any) -> bool:
    """Bytes with height and width, and perhaps channels."""
    return values.dtype in (np.uint8, torch.uint8) and values.ndim in (3, 4)


def _images(values: Any) -> Tensor:
    """Bytes [N, H, W], [N, H, W, C] or [N, C, H, W] as floats from 0 to 1, channels first."""
    images = torch.as_tensor(values)
    if images.ndim == 3:
        images = images.unsqueeze(1)
    elif (
        isinstance(values, np.ndarray) and images.shape[3] in CHANNELS
    ):  # as pictures are in NumPy; torch has them first
        images = images.permute(0, 3, 1, 2)
    return images.float().div_(255).contiguous()


@dataclass(frozen=True)
class ReadWhenAsked:
    """Samples whose inputs are read for every batch; the targets are kept."""

    columns: Columns
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Read and put together."""
        return self.columns.read_inputs(indices), self.targets[torch.from_numpy(indices)]


@dataclass(frozen=True)
class Mapped:
    """What `from_dataset` was given: called, it reads."""

    train: Columns
    test: Columns | None
    partition_by: Key | Sequence[Any] | np.ndarray | None

    def __call__(self) -> Whole:
        """Targets and owners, and inputs too if they are not too large to be kept."""
        if len(self.train) == 0:
            raise DataError(f"{self.train.what}: has no samples")
        sets = [self.train] if self.test is None else [self.train, self.test]
        class_names, targets = _targets(sets)
        data = [_data(columns, own) for columns, own in zip(sets, targets, strict=True)]
        first = self.train.read_inputs(np.arange(1))
        owners, client_names = self._owners()
        return Whole(
            train=data[0],
            labels=targets[0].numpy(),
            shape=tuple(first.shape[1:]) if isinstance(first, Tensor) else (),
            class_names=class_names,
            source=f"{len(self.train)} samples of a {type(self.train.dataset).__name__}",
            test=data[1] if len(data) > 1 else None,
            owners=owners,
            client_names=client_names,
        )

    def _owners(self) -> tuple[np.ndarray | None, list[str]]:
        by, names = self.partition_by, None
        if by is None:
            return None, []
        if isinstance(by, str | int):
            values, names = np.asarray(self.train.whole_column(by)), self.train.names(by)
        else:
            values = np.asarray(by)
        if values.shape != (len(self.train),):
            problem = f"has shape {list(values.shape)}, expected one value for each of the {len(self.train)} samples"
            raise BadValue("partition_by", by if isinstance(by, str | int) else type(by).__name__, problem)
        found, owners = np.unique(values, return_inverse=True)
        return owners, [str(value) if names is None else names[int(value)] for value in found.tolist()]


def _data(columns: Columns, targets: Tensor) -> Data:
    """In memory, unless that would take too much of it, or samples are changed at random when they are read."""
    some = np.arange(min(TRIED, len(columns)))
    with rng.global_scope(0, "read"):
        first = columns.read_inputs(some)
    with rng.global_scope(0, "read again"):
        pairs = zip(leaves(first, "inputs"), leaves(columns.read_inputs(some), "inputs"), strict=True)
        stays = all(torch.equal(one, again) for (_, one), (_, again) in pairs)
    size = sum(leaf.numel() * leaf.itemsize for _, leaf in leaves(first, "inputs"))
    if not stays or size * len(columns) > KEPT * len(some):
        return ReadWhenAsked(columns, targets)
    blocks = [columns.read_inputs(rows) for rows in _in_blocks(len(columns))]
    if isinstance(first, Tensor):
        return Samples(torch.cat(blocks), targets)
    return NestedSamples({key: torch.cat([block[key] for block in blocks]) for key in first}, targets)


def _targets(sets: Sequence[Columns]) -> tuple[list[str], list[Tensor]]:
    """The classes' names, and each set's targets: class numbers as int64, texts by their place among all of them."""
    columns = [np.asarray(own.whole_column(own.targets)) for own in sets]
    names = sets[0].names(sets[0].targets)
    if columns[0].dtype.kind in "US":
        texts = sorted(set(columns[0].tolist()))
        for own, column in zip(sets, columns, strict=True):
            for row, text in enumerate(column.tolist()):
                if text not in texts:
                    problem = f"is no class; there are: {', '.join(texts)}"
                    raise DataError(printable(f"{own.what}: {own.targets!r} = {text!r} of sample {row} {problem}"))
        return texts, [torch.from_numpy(np.searchsorted(texts, column).astype(np.int64)) for column in columns]
    if columns[0].dtype.kind == "f":
        return ["value"], [torch.from_numpy(column).float() for column in columns]
    low, high = min(int(column.min()) for column in columns), max(int(column.max()) for column in columns)
    count = high + 1 if names is None else len(names)
    if low < 0 or high >= count:
        raise DataError(f"{sets[0].what}: {sets[0].targets!r} goes from {low} to {high}, expected 0 to {count - 1}")
    numbers = [torch.from_numpy(column.astype(np.int64)) for column in columns]
    return names or [str(number) for number in range(count)], numbers
