"""Tables of numbers with a column of classes: CSV files, and parquet files without images.

Nobody vouches for these files. Whatever does not fit is a `DataError` that names file, column and row.
"""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.core.errors import DataError, printable
from fedstrata.tasks import parquet
from fedstrata.tasks.files import LIMIT, file_size
from fedstrata.tasks.parquet import LABEL


@dataclass(frozen=True)
class Table:
    """What a file says: numbers in columns with names, and the class of each row as it is written."""

    path: Path
    columns: list[str]
    """Of the inputs."""
    inputs: np.ndarray
    """float32 [rows, columns]."""
    labels: list[str]


def read_table(path: Path, target: str = LABEL) -> Table:
    """A CSV or parquet file, by its ending; `target` is the column with the classes."""
    file_size(path)
    try:
        if path.suffix == ".parquet":
            return of_parquet(path, parquet.read(path, LIMIT, target), target)
        return read_csv(path, target)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def read_csv(path: Path, target: str = LABEL) -> Table:
    """A CSV file with a header."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        columns: list[str] = []
        try:
            columns = [name.strip() for name in next(csv.reader(file), [])]
            at = _place(path, columns, target)
            texts: list[str] = []

            def set_aside(text: str) -> float:
                texts.append(text.strip())
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
                    converters={at: set_aside},
                )
        except (ValueError, csv.Error) as error:  # UnicodeDecodeError is a ValueError
            raise DataError(f"{path}: {_in_words(str(error), columns)}") from None
    if table.size and table.shape[1] != len(columns):
        raise DataError(f"{path}: rows of {table.shape[1]} columns under a header of {len(columns)}")
    return _checked(path, columns, table.reshape(-1, len(columns)), texts, at)


def _in_words(problem: str, columns: Sequence[str]) -> str:
    """NumPy's message, with the column's name where it has the number."""
    found = re.fullmatch(r"could not convert string (.*) to float32 at row (\d+), column (\d+)\.", problem, re.DOTALL)
    if found is None or int(found[3]) > len(columns):
        return printable(problem)
    return printable(f"{columns[int(found[3]) - 1]} = {found[1]} in row {int(found[2]) + 1} is no number")


def of_parquet(path: Path, table: Any, target: str = LABEL) -> Table:
    """A table that was read from parquet."""
    at = _place(path, table.column_names, target)
    values = np.zeros((len(table), len(table.column_names)), np.float32)
    for index, column in enumerate(table.columns):
        if index != at:
            values[:, index] = column
    return _checked(path, table.column_names, values, list(map(str, table[at])), at)


def _place(path: Path, columns: Sequence[str], target: str) -> int:
    """Which column has the classes."""
    if columns.count(target) != 1:
        there = ", ".join(columns)[:100]
        problem = f"{columns.count(target)} columns are called {target}, expected 1; there are: {there}"
        raise DataError(f"{path}: {printable(problem)}")
    return columns.index(target)


def _checked(path: Path, columns: Sequence[str], values: np.ndarray, labels: list[str], at: int) -> Table:
    if not np.isfinite(values).all():
        row, column = np.argwhere(~np.isfinite(values))[0]
        raise DataError(f"{path}: {columns[column]} = {values[row, column]} in row {row + 1} is not finite")
    return Table(
        path, [name for place, name in enumerate(columns) if place != at], np.delete(values, at, axis=1), labels
    )
