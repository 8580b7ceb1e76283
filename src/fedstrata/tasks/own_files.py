"""A file, or a folder, for each client, all on this machine: `task.dataset = "files"`.

They are read as a node reads its own (docs/deployment.md), and clients are called as their files are.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fedstrata.core.errors import DataError, RecipeError, printable
from fedstrata.tasks.config import FilesConfig
from fedstrata.tasks.files import class_number, class_numbers
from fedstrata.tasks.folders import read_folder
from fedstrata.tasks.tables import Table, read_table
from fedstrata.tasks.task import Samples
from fedstrata.tasks.whole import Whole

Part = tuple[np.ndarray, np.ndarray]
"""Inputs and classes."""


def read_files(config: FilesConfig, scale: bool) -> Whole:
    """Everybody's samples; if `scale`, as (x − mean)/std of each column, or channel, over all clients."""
    paths = [Path(found) for found in sorted(glob.glob(config.clients, recursive=True))]
    if not paths:
        raise RecipeError("task.files.clients", config.clients, "matches no file")
    tests = [] if config.test is None else [Path(config.test)]
    folders = [path.is_dir() for path in (*paths, *tests)]
    if any(folders) and not all(folders):
        raise DataError(f"{(*paths, *tests)[folders.index(True)]}: is a folder, and others are files")
    class_names, parts = (_of_folders if any(folders) else _of_tables)([*paths, *tests], config)
    whole = [np.concatenate(arrays) for arrays in zip(*parts[: len(paths)], strict=True)]
    if not len(whole[1]):
        raise DataError(f"{config.clients}: no file has any row")
    sets = [whole, *parts[len(paths) :]]
    if scale:
        axes = (0, *range(2, whole[0].ndim))
        mean, std = (of(whole[0], axis=axes, dtype=np.float64, keepdims=True) for of in (np.mean, np.std))
        sets = [[((x - mean) / np.where(std > 0, std, 1)).astype(np.float32), y] for x, y in sets]
    train, *others = [Samples(torch.from_numpy(x), torch.from_numpy(y)) for x, y in sets]
    return Whole(
        train=train,
        labels=whole[1],
        shape=tuple(train.inputs.shape[1:]),
        class_names=class_names,
        source=config.clients,
        test=others[0] if others else None,
        owners=np.repeat(np.arange(len(paths)), [len(y) for _, y in parts[: len(paths)]]),
        client_names=_names(paths),
    )


def _names(paths: Sequence[Path]) -> list[str]:
    """What the files are called, with their folders where that is not enough."""
    stems = [path.stem for path in paths]
    if len(set(stems)) < len(stems):
        above = os.path.commonpath([path.parent for path in paths])
        stems = [path.relative_to(above).as_posix() for path in paths]
    return stems


def _of_tables(paths: Sequence[Path], config: FilesConfig) -> tuple[list[str], list[Part]]:
    tables = [read_table(path, config.target) for path in paths]
    for table in tables[1:]:
        _check_columns(table, tables[0])
    names = config.classes or _classes(tables)
    number = class_numbers(names)
    parts = []
    for table in tables:
        rows = enumerate(table.labels, 1)
        classes = [class_number(table.path, row, text, number, config.target) for row, text in rows]
        parts.append((table.inputs, np.array(classes, np.int64)))
    return names, parts


def _check_columns(table: Table, first: Table) -> None:
    for place, (ours, theirs) in enumerate(zip(table.columns, first.columns, strict=False), 1):
        if ours != theirs:
            problem = f"column {place} of the inputs is {ours!r}, and in {first.path.name} it is {theirs!r}"
            raise DataError(f"{table.path}: {printable(problem)}")
    if len(table.columns) != len(first.columns):
        longer = max(table.columns, first.columns, key=len)
        extra = longer[min(len(table.columns), len(first.columns))]
        where = "is not" if longer is first.columns else "is only"
        problem = f"{len(table.columns)} columns of inputs, and {first.path.name} has {len(first.columns)}"
        raise DataError(f"{table.path}: {printable(f'{problem}: {extra!r} {where} here')}")


def _classes(tables: Sequence[Table]) -> list[str]:
    """What is in the files, in the order of numbers where all are numbers."""
    found = {text for table in tables for text in table.labels}
    return sorted(found, key=lambda text: (int(text), text)) if all(map(str.isdecimal, found)) else sorted(found)


def _of_folders(paths: Sequence[Path], config: FilesConfig) -> tuple[list[str], list[Part]]:
    for field in ("classes", "shape"):
        if getattr(config, field) is None:
            raise RecipeError(f"task.files.{field}", None, f"must be given, as {paths[0].name} is a folder")
    assert config.classes is not None
    assert config.shape is not None
    pairs = [read_folder(path, config.shape, config.classes) for path in paths]
    return config.classes, [(inputs.numpy(), targets.numpy()) for inputs, targets in pairs]
