"""Samples from a folder of somebody's own files: idx, parquet, folders of images, or CSV.

Nobody published these files, so nothing about them is known but what the recipe says: the shape of an input, and the
classes. Whatever does not fit is a `DataError` that names the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedstrata.core.errors import DataError, RecipeError
from fedstrata.tasks import parquet
from fedstrata.tasks.files import (
    LIMIT,
    Shape,
    class_number,
    class_numbers,
    decode,
    in_folders,
    in_table,
    read_idx,
    regular,
)
from fedstrata.tasks.tables import Table, of_parquet, read_csv

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
        parts = list(_parts(kind, paths, shape, class_numbers(class_names)))
    except OSError as error:
        raise DataError(f"{error.filename or folder}: {error.strerror or error}") from error
    if len({inputs.dtype for inputs, _ in parts}) > 1:
        raise DataError(f"{folder}: has parquet files of images and of numbers")
    inputs, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(class_names):
        expected = f"expected 0 to {len(class_names) - 1}"
        raise DataError(f"{folder}: labels from {labels.min()} to {labels.max()}, {expected}")
    if inputs.dtype == np.uint8:
        return torch.from_numpy(inputs).float().div_(255), torch.from_numpy(labels)
    return torch.from_numpy(_intensities(folder, inputs, shape)).view(-1, *shape), torch.from_numpy(labels)


def _files(folder: Path) -> tuple[str, list[Path]]:
    """The kind of a folder's files, and these files. Hidden ones, which some systems leave behind, do not count."""

    def is_visible(path: Path) -> bool:
        return not any(part.startswith(".") for part in path.relative_to(folder).parts)

    found = {kind: regular(filter(is_visible, folder.glob(pattern))) for kind, pattern in LAYOUTS.items()}
    kinds = [kind for kind, paths in found.items() if paths]
    if len(kinds) != 1:
        several, none = ", ".join(kinds), "*images-idx3-ubyte, *.parquet, <class>/*.png or .jpg, *.csv"
        problem = f"has files of several kinds: {several}" if kinds else f"has no files of any kind: {none}"
        raise RecipeError("data", str(folder), problem)
    return kinds[0], found[kinds[0]]


def _parts(
    kind: str, paths: list[Path], shape: Sequence[int], number: Mapping[str, int]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Inputs and classes: of images bytes [N, C, H, W], of tables float32 [N, inputs]."""
    if kind == "image":
        image = _image_shape(paths[0], shape)
        yield decode(in_folders(paths, image, number), image)[0]
    elif kind == "idx":
        for images in _one_of_each(paths):
            yield read_idx(images, _labels_of(images), _image_shape(images, shape, (1,)))[0]
    elif kind == "csv":
        for path in paths:
            yield _in_two(read_csv(path), math.prod(shape), number)
    else:
        for path in paths:
            table = parquet.read(path, LIMIT)
            if parquet.IMAGE in table.column_names:
                image = _image_shape(path, shape)
                yield decode(in_table(path, table, number, LIMIT // math.prod(image)), image)[0]
            else:
                yield _in_two(of_parquet(path, table), math.prod(shape), number)


# --- images ----------------------------------------------------------------------------------------------------------


def _image_shape(path: Path, shape: Sequence[int], channels: Sequence[int] = (1, 3)) -> Shape:
    if len(shape) != 3 or shape[0] not in channels:
        raise RecipeError("task.nodes.shape", list(shape), f"{path} has images: [channels, height, width]")
    return shape[0], shape[1], shape[2]


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


def _intensities(folder: Path, inputs: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The numbers of an image are from 0 to 1 or, as bytes, to 255. All other numbers are what they are."""
    if len(shape) != 3 or not len(inputs):
        return inputs
    low, high = inputs.min(), inputs.max()
    if not 0 <= low <= high <= 255:
        expected = f"those of images, as shape {list(shape)} says, are from 0 to 1 or from 0 to 255"
        raise DataError(f"{folder}: inputs from {low:g} to {high:g}; {expected}")
    return inputs / np.float32(255) if high > 1 else inputs


def _in_two(table: Table, inputs: int, number: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """A table's inputs and classes."""
    if len(table.columns) != inputs:
        raise DataError(f"{table.path}: {len(table.columns)} columns of inputs, expected {inputs}")
    numbers = [class_number(table.path, row, text, number) for row, text in enumerate(table.labels, 1)]
    return table.inputs, np.array(numbers, np.int64)
