"""Parquet files, unpacked a few rows at a time and within limits that are checked before anything is unpacked.

A small file can come to any size: its pages are compressed, and one value of a dictionary can be that of every row.
What the footer says of sizes need not be true, so the header of each page is asked: pyarrow makes room by it, and
unpacks no more.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fedstrata.errors import DataError, MissingExtra

FOOTER = 1 << 20
"""The bytes a footer may have, besides those for its columns; in memory, one takes 250 times as much."""
FOOTER_PER_COLUMN = 1 << 10
PAGE = 1 << 27
"""The bytes that a page may come to, and that a batch may."""
LEAST_PER_PAGE = 1 << 12
"""What a page counts for at least, so that a file cannot have any number of empty ones."""
MOST_ROWS_AT_ONCE = 1 << 12


@dataclass(frozen=True)
class Limits:
    """What the columns that are read may come to: in rows, in bytes, and in bytes for each page."""

    rows: int
    size: int
    page: int = PAGE


def modules() -> tuple[Any, Any]:
    """pyarrow and its parquet, if the extra is installed."""
    try:
        import PIL  # noqa: F401 - what is in parquet is images, mostly
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtra("pyarrow and pillow", "data", "reading parquet") from error
    return pyarrow, parquet


def open_file(path: Path, columns: int) -> Any:
    """pyarrow's ParquetFile, of which the footer has been read, for a file that should have about so many columns."""
    _, parquet = modules()
    most = FOOTER + FOOTER_PER_COLUMN * columns
    whole = path.stat().st_size
    with path.open("rb") as file:
        file.seek(-min(8, whole), os.SEEK_END)
        size = int.from_bytes(file.read(4), "little")
    if most < size < whole:  # one that cannot be is left to pyarrow
        problem = f"a footer of {size:,} bytes, expected at most {most:,}: write it with fewer row groups"
        raise DataError(f"{path}: {problem}")
    return parquet.ParquetFile(path)


class Rows:
    """The rows of a file, which are unpacked a few at a time. `what` says in errors what should be in it."""

    def __init__(self, path: Path, what: str, columns: int, limits: Limits) -> None:
        """Read the footer of a file that should have about so many columns."""
        self.path, self.what, self.limits = path, what, limits
        with self._errors():
            self.file = open_file(path, columns)
            self.schema = self.file.schema_arrow
            self.count: int = self.file.metadata.num_rows
            schema = self.file.metadata.schema
            self.paths: list[str] = [schema.column(leaf).path for leaf in range(len(schema))]
        if not 0 <= self.count <= limits.rows:
            raise DataError(f"{path}: {self.count:,} rows, expected at most {limits.rows:,}")

    def has(self, column: str) -> bool:
        """Whether there is a column with this path."""
        return column in self.paths

    def batches(self, columns: Sequence[str]) -> Iterator[Any]:
        """Record batches of these columns, each a path to one value in each row."""
        seen = 0
        with self._errors():
            rows = self._rows_at_once(self._leaves(columns))
            for batch in self.file.iter_batches(rows, columns=list(columns), use_threads=False):
                seen += len(batch)
                if seen > self.count:
                    raise DataError(f"{self.path}: more rows than the {self.count:,} that its footer says")
                yield batch

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        pyarrow, _ = modules()
        try:
            yield
        except (pyarrow.ArrowException, KeyError, OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno:  # not pyarrow's, which has it for damaged files
                raise
            raise DataError(f"{self.path}: not parquet with {self.what} ({type(error).__name__})") from error

    def _leaves(self, columns: Sequence[str]) -> list[int]:
        """The numbers of columns. A list could have any length in one row, and what is below one would come along."""
        below: dict[str, list[int]] = {}
        for leaf, path in enumerate(self.paths):
            names = path.split(".")
            for length in range(1, len(names) + 1):
                below.setdefault(".".join(names[:length]), []).append(leaf)
        for column in columns:
            leaves = below.get(column, [])
            if len(leaves) != 1 or self.file.metadata.schema.column(leaves[0]).max_repetition_level:
                raise ValueError(f"{column} is not one column with one value in each row")
        return [below[column][0] for column in columns]

    def _rows_at_once(self, leaves: Sequence[int]) -> int:
        """How many rows a batch may have: no value is larger than the largest page of its column."""
        total, widths = 0, dict.fromkeys(leaves, 8)
        metadata = self.file.metadata
        with self.path.open("rb") as file:
            for group in map(metadata.row_group, range(metadata.num_row_groups)):
                for leaf in leaves:
                    chunk = group.column(leaf)
                    for size in _page_sizes(file, chunk):
                        total += max(size, LEAST_PER_PAGE)
                        if size > self.limits.page or total > self.limits.size:
                            most = f"{self.limits.size:,} bytes in all or {self.limits.page:,} in a page"
                            raise DataError(f"{self.path}: unpacked, it comes to more than {most}")
                        if "BYTE_ARRAY" in chunk.physical_type:
                            widths[leaf] = max(widths[leaf], size)
        return max(1, min(MOST_ROWS_AT_ONCE, PAGE // sum(widths.values())))


def _page_sizes(file: IO[bytes], chunk: Any) -> Iterator[int]:
    """What each page of a column chunk comes to, as its header says."""
    position = chunk.data_page_offset
    if 0 < (chunk.dictionary_page_offset or 0) < position:
        position = chunk.dictionary_page_offset
    end = position + chunk.total_compressed_size
    while position < end:
        file.seek(position)
        header = _integers(file)
        unpacked, packed = header.get(2, -1), header.get(3, -1)
        if unpacked < 0 or packed < 0:
            raise ValueError("a page has no size, or a negative one")
        yield unpacked
        position = file.tell() + packed


def _integers(file: IO[bytes], depth: int = 0) -> dict[int, int]:
    """The 32-bit fields of a structure in Thrift's compact protocol, by their number, read up to its end."""

    def byte() -> int:
        content = file.read(1)
        if not content:
            raise ValueError("the file ends within a page's header")
        return content[0]

    def number() -> int:
        value = 0
        for shift in range(0, 64, 7):
            part = byte()
            value |= (part & 0x7F) << shift
            if part < 0x80:
                return value
        raise ValueError("a number of more than 64 bits in a page's header")

    fields: dict[int, int] = {}
    field = 0
    while head := byte():
        step, kind = head >> 4, head & 0x0F
        field = field + step if step else _signed(number())
        if kind == 5:
            fields[field] = _signed(number())
        elif kind in (4, 6):  # integers of 16 and 64 bits
            number()
        elif kind == 8:  # bytes
            file.seek(min(number(), 1 << 32), os.SEEK_CUR)
        elif kind == 12 and depth < 3:
            _integers(file, depth + 1)
        elif kind not in (1, 2):  # true and false have nothing more to say; a page's header has no other kinds
            raise ValueError(f"a page's header has a field of kind {kind}")
    return fields


def _signed(zigzag: int) -> int:
    return (zigzag >> 1) ^ -(zigzag & 1)
