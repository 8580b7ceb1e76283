"""Parquet files, unpacked by pyarrow in a process of its own, which may take only so much memory.

A small file can come to any size: its pages are compressed, one value of a dictionary can be that of every row, and
what it says of its own sizes need not be true. pyarrow has no limit for any of this, the operating system has one for
all of it. A file that crashes pyarrow is refused like any other that cannot be read.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fedstrata.core.errors import DataError, MissingExtra, printable

IMAGE, LABEL = "image", "label"
IMAGES = ("img", IMAGE)
"""What a column of images is called on the hub."""
SPARE = 1 << 27
"""The bytes that pyarrow may take besides what a file may come to."""
ROWS_AT_ONCE = 1 << 10
READ_AT_ONCE = 1 << 16
_TABLE = 1
"""Where the child writes: the standard output's handle, as nobody reads it as text."""


def read(path: Path, most: int, label: str = LABEL) -> Any:
    """A pyarrow.Table that comes to at most so many bytes: columns image (files) and label, or float32 and label.

    A label is a number where the file has numbers, else text.
    """
    try:
        import PIL  # noqa: F401 - what is in parquet is images, mostly
        import pyarrow
    except ImportError as error:
        raise MissingExtra("pyarrow and pillow", "data", "reading parquet") from error
    # Nothing is imported from the current directory (-P), and Ctrl-C is for the parent, which then ends the child.
    command = [sys.executable, "-P", "-m", __name__, str(path), str(most), label]
    with tempfile.TemporaryFile() as table:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=table, stderr=subprocess.PIPE, check=False, process_group=0
        )
        if done.returncode:
            reason = printable(done.stderr.decode(errors="replace").strip().rpartition("\n")[2])
            expected = f"columns of images or numbers, and {label}, that come to at most {most:,} bytes"
            raise DataError(f"{path}: not parquet with {expected} ({reason or f'exit code {done.returncode}'})")
        return pyarrow.ipc.open_stream(pyarrow.memory_map(f"/dev/fd/{table.fileno()}")).read_all()


def _unpack(path: str, most: int, label: str) -> None:
    """Write the table to the standard output, as Arrow's stream."""
    import resource

    import pyarrow
    import pyarrow.compute  # now, as it takes memory, too
    from pyarrow import parquet

    pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # the others reserve more than they use
    with contextlib.suppress(ValueError, OSError):  # a stricter limit is there already; a system that does not say
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
        resource.setrlimit(resource.RLIMIT_AS, (taken + most + SPARE,) * 2)
    file = parquet.ParquetFile(path, buffer_size=READ_AT_ONCE, pre_buffer=False)
    image = next(filter(file.schema_arrow.names.__contains__, IMAGES), None)
    fields = [field for field in file.schema_arrow if image is None or field.name in (image, label)]
    schema = pyarrow.schema([_plain(field, image, label) for field in fields])
    columns = None if image is None else [field.name for field in fields]
    with open(_TABLE, "wb") as table, pyarrow.ipc.new_stream(table, schema) as stream:
        for batch in file.iter_batches(ROWS_AT_ONCE, columns=columns, use_threads=False):
            arrays = map(_cast, batch.columns, schema.types)
            rows = pyarrow.record_batch(list(arrays), schema=schema)
            most -= rows.nbytes
            if most < 0:
                raise MemoryError("it comes to more")
            stream.write_batch(rows)


def _plain(field: Any, image: str | None, label: str) -> Any:
    """A column as it is handed over: images, labels or numbers, of a type that has no structure."""
    import pyarrow
    from pyarrow import types

    if field.name == image:
        return pyarrow.field(IMAGE, pyarrow.binary())
    if field.name != label:
        return pyarrow.field(field.name, pyarrow.float32())
    kind = field.type.value_type if types.is_dictionary(field.type) else field.type
    if types.is_integer(kind):
        return pyarrow.field(label, pyarrow.int64())
    return pyarrow.field(label, kind if types.is_floating(kind) or types.is_boolean(kind) else pyarrow.string())


def _cast(column: Any, kind: Any) -> Any:
    """A column in that type: a number is rounded, and what does not fit in another way is an error."""
    import pyarrow
    from pyarrow import types

    if types.is_struct(column.type):
        column = column.field("bytes")
    number = kind == pyarrow.float32()
    if number and types.is_decimal(column.type):  # which pyarrow does not round to the nearest float32
        column = column.cast(pyarrow.string()).cast(pyarrow.float64())
    return column.cast(kind, safe=not number)


if __name__ == "__main__":
    _unpack(sys.argv[1], int(sys.argv[2]), sys.argv[3])
