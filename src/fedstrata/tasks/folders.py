"""Samples from a folder of somebody's own files: idx, parquet, folders of images, or CSV.

Nobody published these files, so nothing about them is known but what the recipe says: the shape of an input, and the
classes. Whatever does not fit is a `DataError` that names the file.
"""

from __future__ import annotations

import csv
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstrata.errors import DataError, RecipeError
from fedstrata.tasks import datasets, parquet

LABEL = "label"
"""The column of a table that has the classes; the others are inputs, in their order."""

LAYOUTS = {
    "idx": "*images[-.]idx3-ubyte*",
    "parquet": "*.parquet",
    "image": "*/*.[jJpP][pPnN]*[gG]",  # <class>/*.jpg, .jpeg, .png
    "csv": "*.csv",
}
"""What a folder may hold, and the files that say so; all of its files of that kind are read."""


def read_folder(folder: Path, shape: Sequence[int], class_names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Inputs as float32 [N, *shape], those of images from 0 to 1, and their classes as int64 [N]."""
    kind, paths = _files(folder)
    try:
        if kind == "csv" or (kind == "parquet" and not datasets.has_images(paths[0], math.prod(shape))):
            inputs, labels = _read_tables(folder, kind, paths, shape, class_names)
        else:
            inputs, labels = _read_images(kind, paths, shape, class_names)
    except OSError as error:
        raise DataError(f"{error.filename or folder}: {error.strerror or error}") from error
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(class_names):
        expected = f"expected 0 to {len(class_names) - 1}"
        raise DataError(f"{folder}: labels from {labels.min()} to {labels.max()}, {expected}")
    return inputs, torch.from_numpy(labels)


def _files(folder: Path) -> tuple[str, list[Path]]:
    """The kind of a folder's files, and these files. Hidden ones, which some systems leave behind, do not count."""

    def is_visible(path: Path) -> bool:
        return not any(part.startswith(".") for part in path.relative_to(folder).parts)

    found = {
        kind: sorted(datasets.regular(filter(is_visible, folder.glob(pattern)))) for kind, pattern in LAYOUTS.items()
    }
    kinds = [kind for kind, paths in found.items() if paths]
    if len(kinds) != 1:
        several, none = ", ".join(kinds), "*images-idx3-ubyte, *.parquet, <class>/*.png or .jpg, *.csv"
        problem = f"has files of several kinds: {several}" if kinds else f"has no files of any kind: {none}"
        raise RecipeError("data", str(folder), problem)
    return kinds[0], found[kinds[0]]


# --- images ----------------------------------------------------------------------------------------------------------


def _read_images(
    kind: str, paths: list[Path], shape: Sequence[int], class_names: Sequence[str]
) -> tuple[Tensor, np.ndarray]:
    if len(shape) != 3 or shape[0] not in ((1,) if kind == "idx" else (1, 3)):
        raise RecipeError("task.nodes.shape", list(shape), f"{paths[0]} has images: [channels, height, width]")
    if kind == "idx":
        paths = _one_of_each(paths)
        paths = [*paths, *(_labels_of(path) for path in paths)]
    channels, height, width = shape
    pixels, numbers = datasets.read_images(kind, paths, (channels, height, width), tuple(class_names))
    return torch.from_numpy(pixels).float().div_(255), numbers


def _one_of_each(paths: list[Path]) -> list[Path]:
    """A plain idx file and its gzipped twin are one file."""
    return list({path.name.removesuffix(".gz"): path for path in reversed(paths)}.values())[::-1]


def _labels_of(images: Path) -> Path:
    before, _, after = images.name.removesuffix(".gz").rpartition("images")
    labels = images.with_name(f"{before}labels{after.replace('idx3', 'idx1', 1)}")
    zipped = labels.with_name(f"{labels.name}.gz")
    if not labels.exists() and not zipped.exists():
        raise DataError(f"{labels}: is missing")
    return labels if labels.exists() else zipped


# --- tables ----------------------------------------------------------------------------------------------------------


def _read_tables(
    folder: Path, kind: str, paths: list[Path], shape: Sequence[int], class_names: Sequence[str]
) -> tuple[Tensor, np.ndarray]:
    read = _csv_table if kind == "csv" else _parquet_table
    number = datasets.class_numbers(class_names)
    tables = [read(path, math.prod(shape), number) for path in paths]
    inputs = _intensities(folder, np.concatenate([values for values, _ in tables]), shape)
    return torch.from_numpy(inputs).view(-1, *shape), np.concatenate([labels for _, labels in tables])


def _intensities(folder: Path, inputs: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The numbers of an image are from 0 to 1 or, as bytes, to 255. All other numbers are what they are."""
    if len(shape) != 3 or not len(inputs):
        return inputs
    low, high = inputs.min(), inputs.max()
    if not 0 <= low <= high <= 255:
        expected = f"those of images, as shape {list(shape)} says, are from 0 to 1 or from 0 to 255"
        raise DataError(f"{folder}: inputs from {low:g} to {high:g}; {expected}")
    return inputs / np.float32(255) if high > 1 else inputs


def _csv_table(path: Path, inputs: int, number: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            columns = [name.strip() for name in next(csv.reader(file), [])]
            label = _label(path, columns, inputs)
            labels: list[str] = []

            def set_aside(text: str) -> float:
                labels.append(text.strip())
                return 0.0

            with warnings.catch_warnings(), np.errstate(over="ignore"):
                warnings.simplefilter("ignore", UserWarning)  # a file without rows
                table = np.loadtxt(
                    file,
                    np.float32,
                    delimiter=",",
                    quotechar='"',
                    comments=None,
                    ndmin=2,
                    encoding=None,  # before NumPy 2, the converter would be given bytes
                    converters={label: set_aside},
                )
        except (ValueError, csv.Error) as error:  # UnicodeDecodeError is a ValueError
            raise DataError(f"{path}: {' '.join(str(error).split())}") from None
    if table.size == 0:
        table = np.empty((0, len(columns)), np.float32)
    if table.shape[1] != len(columns):
        raise DataError(f"{path}: rows of {table.shape[1]} columns under a header of {len(columns)}")
    numbers = [_class_number(path, row, text, number) for row, text in enumerate(labels, 1)]
    return _checked(path, columns, table, label, np.array(numbers, np.int64))


def _parquet_table(path: Path, inputs: int, number: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
    limits = parquet.Limits(datasets.LIMIT // (8 * (inputs + 1)), datasets.LIMIT)
    what = "a column image (bytes) or columns of numbers, and a column label"
    rows = parquet.Rows(path, what, inputs + 1, limits)
    columns = rows.schema.names
    label = _label(path, columns, inputs)
    for index, column in enumerate(columns):
        if index != label and not _has_numbers(rows.schema.field(index).type):
            raise DataError(f"{path}: not parquet with {what} ({column} has {rows.schema.field(index).type})")
    table = np.zeros((rows.count, len(columns)), np.float32)
    labels = np.empty(rows.count, np.int64)
    read = 0
    for batch in rows.batches(columns):
        part = slice(read, read + len(batch))
        texts = map(str, batch.column(label).to_pylist())
        labels[part] = [_class_number(path, row, text, number) for row, text in enumerate(texts, read + 1)]
        with np.errstate(over="ignore"):
            for index in range(len(columns)):
                if index != label:
                    table[part, index] = batch.column(index).to_numpy(zero_copy_only=False)
        read += len(batch)
    return _checked(path, columns, table[:read], label, labels[:read])


def _has_numbers(kind: Any) -> bool:
    """Whether all values of a column are numbers, and so of a few bytes. A column of nothing has no type."""
    types = parquet.modules()[0].types
    fitting = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal, types.is_null)
    return any(fits(kind) for fits in fitting)


def _label(path: Path, columns: Sequence[str], inputs: int) -> int:
    """Which column has the classes."""
    if columns.count(LABEL) != 1:
        there = ", ".join(columns)[:100]
        raise DataError(f"{path}: {columns.count(LABEL)} columns are called {LABEL}, expected 1; there are: {there}")
    if len(columns) - 1 != inputs:
        raise DataError(f"{path}: {len(columns) - 1} columns of inputs, expected {inputs}")
    return columns.index(LABEL)


def _class_number(path: Path, row: int, text: str, number: Mapping[str, int]) -> int:
    if text not in number:
        raise DataError(f"{path}: label = {text[:50]!r} in row {row} is no class; there are: {', '.join(number)}")
    return number[text]


def _checked(
    path: Path, columns: Sequence[str], table: np.ndarray, label: int, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A table's inputs and classes."""
    if not np.isfinite(table).all():
        row, column = np.argwhere(~np.isfinite(table))[0]
        raise DataError(f"{path}: {columns[column]} = {table[row, column]} in row {row + 1} is not finite")
    return np.delete(table, label, axis=1), labels
