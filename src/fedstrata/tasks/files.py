"""Files of samples for which nobody vouches: idx, PNG and JPEG, and images in parquet.

No file is trusted to be small: what it may come to is known before it is unpacked, and no more than that is unpacked.
Whatever does not fit is a `DataError` that names the file.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedstrata.core.errors import DataError, MissingExtra
from fedstrata.tasks import parquet

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Pixels = tuple[Bytes, Ints]
"""Images [N, C, H, W] and labels [N]."""
Shape = tuple[int, int, int]
"""Channels, height and width."""
Encoded = Iterable[tuple[str, bytes, int]]
"""Where images come from, the contents of their files, and their labels."""

LIMIT = 2 << 30
"""What a compressed file that nobody published may come to, in bytes: idx.gz when unzipped, parquet when unpacked."""
SPARE = 1 << 20
"""What a file may have besides what it is read for, such as the header of a gzip file or an image's description."""


def file_size(path: Path) -> int:
    """The bytes of a file that may be opened: a regular one with something in it, or a link to one."""
    if not path.is_file():  # a FIFO or a device may never answer
        raise DataError(f"{path}: not a regular file, nor a link to one")
    size = path.stat().st_size
    if not size:  # also what the system makes up when it is read
        raise DataError(f"{path}: is empty")
    return size


def regular(paths: Iterable[Path]) -> list[Path]:
    """Those that are no folders, in order; each of them may be opened."""
    found = sorted(path for path in paths if not path.is_dir())
    for path in found:
        file_size(path)
    return found


def check_sizes(paths: Iterable[Path], most: int) -> None:
    """Refuse files that are empty or that have more bytes than they can need, all together."""
    total = 0
    for path in paths:
        total += file_size(path)
        if total > most:
            raise DataError(f"{path}: {total:,} bytes with the files before it, expected at most {most:,}")


# --- classes ---------------------------------------------------------------------------------------------------------


def class_numbers(class_names: Sequence[str]) -> dict[str, int]:
    """How a class may be called: by its number or by its name."""
    return {str(index): index for index in range(len(class_names))} | {
        name: index for index, name in enumerate(class_names)
    }


def class_number(path: Path, row: int, label: str, number: Mapping[str, int], column: str = "label") -> int:
    """The class that a row's label names."""
    if label not in number:
        raise DataError(f"{path}: {column} = {label[:50]!r} in row {row} is no class; there are: {', '.join(number)}")
    return number[label]


# --- idx -------------------------------------------------------------------------------------------------------------


def read_idx(images: Path, labels: Path, shape: Shape, most: int | None = None) -> tuple[Pixels, tuple[str, str]]:
    """Images of one channel and their labels, at most so many, and the SHA-256 digests of both files when unpacked."""
    pixels, digest = _idx_array(images, shape[1:], most)
    numbers, digest_of_labels = _idx_array(labels, (), most)
    if len(pixels) != len(numbers):
        raise DataError(f"{images}: {len(pixels)} images but {len(numbers)} labels")
    return (pixels[:, None], numbers.astype(np.int64)), (digest, digest_of_labels)


def _idx_array(path: Path, inner: tuple[int, ...], most: int | None) -> tuple[Bytes, str]:
    """Bytes [N, *inner], N of at most so many, and the digest of the file when unpacked."""
    start = 8 + 4 * len(inner)
    size = file_size(path)
    with path.open("rb") as file:
        zipped = file.peek(2)[:2] == b"\x1f\x8b"
        stream: IO[bytes] = gzip.GzipFile(fileobj=file) if zipped else file  # type: ignore[assignment]
        try:
            header = stream.read(start)
            if header[:4] != bytes([0, 0, 8, 1 + len(inner)]):
                raise DataError(f"{path}: magic number {header[:4].hex()}, expected 0000080{1 + len(inner)}")
            if len(header) < start:
                raise DataError(f"{path}: {len(header)} bytes, expected {start} at least")
            count, *found = np.frombuffer(header, ">u4", offset=4).tolist()
            if tuple(found) != inner:
                raise DataError(f"{path}: images of shape {(1, *found)}, expected {(1, *inner)}")
            if most is not None and count > most:
                raise DataError(f"{path}: {count} {'images' if inner else 'labels'}, expected {most}")
            expected = start + count * math.prod(inner)
            told = f"expected {expected} for dimensions {[count, *inner]}"
            if zipped and expected > LIMIT:
                problem = f"{expected:,} bytes when unpacked, expected at most {LIMIT:,}"
                raise DataError(f"{path}: {problem}; if it really is that large, gunzip it")
            if zipped and size > expected + SPARE:  # what is left over would be looked at byte by byte
                raise DataError(f"{path}: {size:,} bytes of gzip for {expected:,} bytes of data")
            if not zipped and size != expected:
                raise DataError(f"{path}: {size} bytes, {told}")
            content = stream.read(expected - start + 1)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path}: the gzip file is cut short or damaged ({error})") from error
    read = start + len(content)
    if read != expected:
        raise DataError(f"{path}: {f'more than {expected}' if read > expected else read} bytes, {told}")
    digest = hashlib.sha256(header)
    digest.update(content)
    return np.frombuffer(content, np.uint8).reshape(count, *inner).copy(), digest.hexdigest()


# --- PNG and JPEG ----------------------------------------------------------------------------------------------------


def in_table(path: Path, table: Any, number: Mapping[str, int], most: int) -> Encoded:
    """The samples of a parquet file, at most so many."""
    if sorted(table.column_names) != [parquet.IMAGE, parquet.LABEL]:
        raise DataError(f"{path}: not parquet with columns img or image (bytes) and label")
    if len(table) > most:
        raise DataError(f"{path}: {len(table):,} rows, expected at most {most:,}")
    for row, (content, label) in enumerate(zip(table[parquet.IMAGE], table[parquet.LABEL], strict=True), 1):
        answer = label.as_py()
        if not isinstance(answer, int):  # that a number is one of a class is checked for all of them at once
            answer = class_number(path, row, str(answer), number)
        yield f"{path}, row {row}", content.as_py(), answer


def in_folders(paths: Sequence[Path], shape: Shape, number: Mapping[str, int]) -> Encoded:
    """The samples of image files, each in the folder of its class."""
    for path in paths:
        if path.parent.name not in number:
            raise DataError(f"{path.parent}: {path.parent.name!r} is not one of {', '.join(number)}")
        check_sizes([path], _most_encoded(shape))
        yield str(path), path.read_bytes(), number[path.parent.name]


def _most_encoded(shape: Shape) -> int:
    """What the file of an image may have: a PNG that cannot be compressed is little more than its pixels."""
    return SPARE + 2 * math.prod(shape)


def decode(samples: Encoded, shape: Shape) -> tuple[Pixels, bool]:
    """Images and labels, and whether any of the images was a JPEG."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra("pillow", "data", "reading image files") from error
    channels, height, width = shape
    pixels, labels, jpeg = bytearray(), list[int](), False
    for where, content, label in samples:
        if content is not None and len(content) > _most_encoded(shape):
            raise DataError(f"{where}: an image of {len(content):,} bytes, expected at most {_most_encoded(shape):,}")
        try:
            # Of the many formats of Pillow, some run other programs.
            with Image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as image:
                if image.size != (width, height):
                    raise DataError(f"{where}: an image of {image.size} pixels, expected {(width, height)}")
                values = np.asarray(image.convert("L" if channels == 1 else "RGB"))
        except DataError:
            raise
        except Exception as error:  # a damaged file makes Pillow raise almost anything
            raise DataError(f"{where}: not a readable PNG or JPEG ({type(error).__name__})") from error
        pixels += values.reshape(height, width, channels).transpose(2, 0, 1).tobytes()
        labels.append(label)
        jpeg = jpeg or content[:2] == b"\xff\xd8"
    images = np.frombuffer(pixels, np.uint8).reshape(len(labels), *shape)
    return (images, np.array(labels, np.int64)), jpeg
