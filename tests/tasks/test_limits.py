"""Small files that would come to gigabytes are refused before they do, whatever they say of themselves."""

from __future__ import annotations

import contextlib
import io
import os
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstrata.core.errors import DataError
from fedstrata.tasks import files, parquet
from fedstrata.tasks.config import NodesConfig
from fedstrata.tasks.nodes import read_own_folder
from tests.support import node_data

pyarrow = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

MIB = 1 << 20
DIGITS = NodesConfig(clients=1, shape=[1, 28, 28], classes=10)

# In a process of its own, as the peak of a process never falls. What is imported is so before.
READ = """
import resource, sys
from pathlib import Path
from fedstrata.core.errors import DataError
from fedstrata.tasks import parquet

path, what, shape = Path(sys.argv[1]), sys.argv[2], [int(size) for size in sys.argv[3].split(",")]
if what != "64 MiB":
    import PIL.Image, PIL.JpegImagePlugin, PIL.PngImagePlugin
    from fedstrata.tasks import fetching
    from fedstrata.tasks.config import NodesConfig
from fedstrata.tasks.nodes import read_own_folder

def peak():
    whose = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(resource.getrusage(who).ru_maxrss for who in whose) // 1024

before = peak()
try:
    if what == "64 MiB":
        parquet.read(path, 64 << 20)
    elif what == "own":
        read_own_folder(path, NodesConfig(clients=1, shape=shape, classes=10))
    else:
        fetching.get(what, path, path.parent / "data")
except DataError as error:
    print(peak() - before, error)
"""


def refused(folder: Path, what: str, most: int, shape: str = "1,28,28") -> str:
    """What is said of a folder of a published set's or of somebody's own files, or of a parquet file that may come to
    64 MiB, in at most so many MiB of memory."""
    path = os.pathsep.join([str(Path(__file__).parents[2] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", READ, str(folder), what, shape],
        env={**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(folder.parent / "cache")},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout, "it was read"
    taken, message = done.stdout.rstrip("\n").split(" ", 1)
    assert int(taken) < most
    assert "\n" not in message
    return message


# --- gzip ------------------------------------------------------------------------------------------------------------


def zipped(header: bytes, zeros: int) -> bytes:
    """A gzip file of a header and MiB of zeros, made without having them."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return packer.compress(header) + b"".join(packer.compress(bytes(MIB)) for _ in range(zeros)) + packer.flush()


def idx_header(*shape: int) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4) for size in shape)


NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@pytest.mark.parametrize("members", [1, 4])
def test_a_gzip_bomb_in_place_of_a_published_file(members: int, tmp_path: Path) -> None:
    """256 MiB where 47 MB are expected, in one gzip file or several in a row; the header is right."""
    (tmp_path / "in").mkdir()
    for name in NAMES:
        (tmp_path / "in" / f"{name}.gz").write_bytes(b"not read")
    bomb = tmp_path / "in" / f"{NAMES[0]}.gz"
    bomb.write_bytes(zipped(idx_header(60_000, 28, 28), 256 // members) + zipped(b"", 256 // members) * (members - 1))
    message = refused(tmp_path / "in", "mnist", most=70)
    assert message == f"{bomb}: more than 47040016 bytes, expected 47040016 for dimensions [60000, 28, 28]"


@pytest.mark.parametrize(
    ("name", "header", "problem"),
    [
        ("my-images-idx3-ubyte", (3, 28, 28), "more than 2368 bytes, expected 2368 for dimensions"),
        ("my-images-idx3-ubyte", (3_000_000, 28, 28), "2,352,000,016 bytes when unpacked, .* gunzip it"),
        ("my-images-idx3-ubyte", (3, 28, 28_000_000), "images of shape .1, 28, 28000000., expected .1, 28, 28."),
        ("my-labels-idx1-ubyte.gz", (3,), "more than 11 bytes, expected 11 for dimensions"),
        ("my-labels-idx1-ubyte.gz", (1 << 31,), "2,147,483,656 bytes when unpacked, .* gunzip it"),
    ],
)
def test_a_gzip_bomb_among_somebodys_own_files(
    name: str, header: tuple[int, ...], problem: str, tmp_path: Path
) -> None:
    """No more is unpacked than the header says; the header cannot say another shape than the recipe, nor anything."""
    folder = tmp_path / "data"
    node_data.write_idx(folder, *node_data.digits(3))
    (folder / name).write_bytes(zipped(idx_header(*header), 256))
    assert re.search(f"^{folder / name}: {problem}", refused(folder, "own", most=20))


def test_a_plain_file_is_as_long_as_it_says(tmp_path: Path) -> None:
    """Terabytes that are not there, and some that take no room on the disk."""
    folder = tmp_path / "data"
    node_data.write_idx(folder, *node_data.digits(3))
    images = folder / "my-images-idx3-ubyte"
    images.write_bytes(idx_header(1 << 31, 28, 28))
    with pytest.raises(DataError, match=f"{images}: 16 bytes, expected 1683627180048 for dimensions"):
        read_own_folder(folder, DIGITS)
    images.write_bytes(idx_header(3, 28, 28))
    os.truncate(images, 1 << 43)
    with pytest.raises(DataError, match=f"{images}: 8796093022208 bytes, expected 2368 for dimensions"):
        read_own_folder(folder, DIGITS)


# --- parquet ---------------------------------------------------------------------------------------------------------


def write_part(folder: Path, table: Any, **options: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "test"):
        pq.write_table(table, folder / f"{part}-00000-of-00001.parquet", store_schema=False, **options)
    return folder / "train-00000-of-00001.parquet"


def repeated(value: Any, times: int) -> Any:
    """A column that has the same value in every row, and stores it once."""
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array(np.zeros(times, np.int32)), pyarrow.array([value]))


def with_lies(content: bytes, true: int, told: int) -> bytes:
    """The file with every number of that size in its footer replaced; numbers are variable in length, padded here."""

    def number(value: int, length: int) -> bytes:
        zigzag = value << 1
        parts = [(zigzag >> shift) & 0x7F for shift in range(0, 7 * length, 7)]
        return bytes([*(part | 0x80 for part in parts[:-1]), parts[-1]])

    length = -(-(true << 1).bit_length() // 7)
    footer = len(content) - 8 - struct.unpack("<I", content[-8:-4])[0]
    assert number(true, length) in content[footer:]
    return content[:footer] + content[footer:].replace(number(true, length), number(told, length))


LIBRARIES = 100
"""MiB that Python and pyarrow take in a process of their own before they read anything."""
SMALL = 64 + parquet.SPARE // MIB + LIBRARIES
PUBLISHED = 415 + parquet.SPARE // MIB + LIBRARIES
"""What MNIST's training images may come to are 1 MiB and 60,000 times 4096 bytes and 4 for each of the 784 pixels."""


def test_a_page_that_comes_to_much_more(tmp_path: Path) -> None:
    """One image of 256 MiB of zeros in 8 kB of zstd, with a footer that says so, then with one that does not."""
    table = pyarrow.table({"image": [bytes(256 * MIB)], "label": [0]})
    path = write_part(tmp_path / "in", table, compression="zstd", use_dictionary=False, write_statistics=False)
    assert path.stat().st_size < 20_000
    true = pq.read_metadata(path).row_group(0).column(0).total_uncompressed_size
    message = refused(tmp_path / "in", "mnist", PUBLISHED)
    assert message.startswith(f"{path}: not parquet with ")
    assert "at most 434,968,576 bytes (pyarrow.lib.ArrowMemoryError" in message
    assert "ArrowMemoryError: malloc of size 2684" in refused(path, "64 MiB", SMALL)
    path.write_bytes(with_lies(path.read_bytes(), true, 1000))
    assert pq.read_metadata(path).row_group(0).column(0).total_uncompressed_size == 1000
    assert "ArrowMemoryError: malloc of size 2684" in refused(path, "64 MiB", SMALL)
    (tmp_path / "in" / "test-00000-of-00001.parquet").unlink()
    too_large = "row 1: an image of 268,435,456 bytes, expected at most 1,050,144"
    assert too_large in refused(tmp_path / "in", "own", most=2048)


def test_one_large_value_in_every_row(tmp_path: Path) -> None:
    """64 rows of 16 MiB, which are a gigabyte, stored once: no page is large."""
    for column in ("image", "label"):
        table = {"image": [b""] * 64, "label": [0] * 64} | {column: repeated("0" * (16 * MIB), 64)}
        path = write_part(
            tmp_path / column, pyarrow.table(table), compression="zstd", dictionary_pagesize_limit=64 * MIB
        )
        assert path.stat().st_size < 20_000
        assert "ArrowMemoryError" in refused(path, "64 MiB", SMALL)


def test_more_rows_than_there_can_be(tmp_path: Path) -> None:
    """Five million rows of the same small image, which as pixels are 4 GB."""
    image = node_data.png(np.zeros((28, 28), np.uint8))
    table = pyarrow.table({"image": repeated(image, 5_000_000), "label": repeated(0, 5_000_000)})
    path = write_part(tmp_path / "in", table, compression="zstd")
    assert path.stat().st_size < MIB
    assert "parquet: 5,000,000 rows, expected at most 60,000" in refused(tmp_path / "in", "mnist", PUBLISHED)
    with pytest.raises(DataError, match="5,000,000 rows, expected at most 2,739,137"):
        read_own_folder(tmp_path / "in", DIGITS)


def test_rows_that_the_footer_does_not_count(tmp_path: Path) -> None:
    """The number of rows stands in the footer for the file and for each part of it; that of the file is not asked."""
    images, _ = node_data.digits(300)
    path = tmp_path / "a.parquet"
    pq.write_table(pyarrow.table({"image": [node_data.png(image[0]) for image in images], "label": [1] * 300}), path)
    content = path.read_bytes()
    footer = len(content) - 8 - struct.unpack("<I", content[-8:-4])[0]
    true, told = (b"\x16" + bytes([(rows << 1) & 0x7F | 0x80, rows >> 6]) for rows in (300, 200))
    path.write_bytes(content[:footer] + content[footer:].replace(true, told, 1))
    assert pq.read_metadata(path).num_rows == 200
    assert np.array_equal(read_own_folder(tmp_path, DIGITS).inputs.numpy(), images / np.float32(255))


def test_a_list_in_a_row(tmp_path: Path) -> None:
    """Ten million labels of one row."""
    labels = pyarrow.ListArray.from_arrays([0, 10_000_000], pyarrow.array(np.zeros(10_000_000, np.int8)))
    table = pyarrow.table({"image": [node_data.png(np.zeros((28, 28), np.uint8))], "label": labels})
    path = write_part(tmp_path / "in", table, compression="zstd")
    assert "not parquet with columns of images or numbers, and label" in refused(path, "64 MiB", SMALL)


def test_a_table_that_comes_to_much_more(tmp_path: Path) -> None:
    """20 million rows of two numbers and a label, which are always the same: as float32 and float64, 320 MB."""
    number = repeated(1.0, 20_000_000)
    path = write_part(tmp_path / "in", pyarrow.table({"x": number, "y": number, "label": number}))
    assert path.stat().st_size < MIB
    assert "67,108,864 bytes (MemoryError: it comes to more)" in refused(path, "64 MiB", SMALL)


def test_a_table_of_texts(tmp_path: Path) -> None:
    """Inputs are numbers."""
    pq.write_table(pyarrow.table({"x": ["one"], "y": [1], "label": [0]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: not parquet with .* numbers, and label.*'one'"):
        read_own_folder(tmp_path, NodesConfig(clients=1, shape=[2], classes=2))


def test_a_footer_of_a_million_columns(tmp_path: Path) -> None:
    """900 000 descriptions of three bytes each, which are 250 times as much in memory; so many are never needed."""
    chunk = b"\x26\x08\x00"
    group = b"\x19" + b"\xfc" + b"\xe8\x07" + chunk * 1000 + b"\x16\x00\x16\x00\x00"
    footer = b"\x15\x02\x19\x1c\x48\x01a\x00\x16\x00\x19\xfc\x84\x07" + group * 900 + b"\x00"
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1" + footer + struct.pack("<I", len(footer)) + b"PAR1")
    assert "bad_alloc" in refused(path, "64 MiB", SMALL)


@pytest.mark.parametrize(
    ("compression", "version", "dictionary"),
    [("none", "1.0", True), ("snappy", "2.0", False), ("gzip", "1.0", False), ("zstd", "2.0", True)],
)
def test_a_table_is_read_as_it_was_written(compression: str, version: str, dictionary: bool, tmp_path: Path) -> None:
    """In many row groups, pages and batches; float32 has all of these numbers."""
    numbers = {"x": [n % 97 for n in range(8000)], "y": [n / 4 for n in range(8000)]}
    pq.write_table(
        pyarrow.table(numbers | {"label": [str(n) for n in range(8000)]}),
        tmp_path / "a.parquet",
        compression=compression,
        use_dictionary=dictionary,
        data_page_version=version,
        data_page_size=1000,
        row_group_size=3000,
    )
    table = parquet.read(tmp_path / "a.parquet", MIB)
    assert table.schema.types == [pyarrow.float32(), pyarrow.float32(), pyarrow.string()]
    assert table.to_pydict() == numbers | {"label": [str(n) for n in range(8000)]}


@pytest.mark.parametrize(
    ("labels", "read"),
    [
        (pyarrow.array([3, 1], pyarrow.uint8()), [3, 1]),
        (pyarrow.array([3, 1]).dictionary_encode(), [3, 1]),
        (pyarrow.array(["cat", "dog"]).dictionary_encode(), ["cat", "dog"]),
        (pyarrow.array([1.0, 1.5]), [1.0, 1.5]),
        (pyarrow.array([True, None]), [True, None]),
    ],
    ids=["small", "a category of numbers", "a category", "numbers", "truth"],
)
def test_labels_are_handed_over_as_they_are(labels: Any, read: list[Any], tmp_path: Path) -> None:
    pq.write_table(pyarrow.table({"x": [0, 0], "label": labels}), tmp_path / "a.parquet")
    table = parquet.read(tmp_path / "a.parquet", MIB)
    assert [(type(label), label) for label in table["label"].to_pylist()] == [(type(label), label) for label in read]


def test_a_damaged_parquet_file_is_a_data_error(tmp_path: Path) -> None:
    """Whichever byte is another one, it is refused in one line, or read."""
    images, labels = node_data.digits(20)
    node_data.write_parquet(tmp_path / "data", images, labels)
    path = tmp_path / "data" / "samples.parquet"
    sound = path.read_bytes()
    generator = np.random.default_rng(0)
    for _ in range(20):
        content = bytearray(sound)
        place = int(generator.choice([generator.integers(300), -generator.integers(1, 1500)]))
        content[place] = int(generator.integers(256))
        path.write_bytes(content)
        with contextlib.suppress(DataError):
            read_own_folder(tmp_path / "data", DIGITS)


def test_a_file_that_crashes_its_reader_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not so much as a traceback is left."""
    node_data.write_parquet(tmp_path / "data", *node_data.digits(3))
    reader = tmp_path / "python"
    reader.write_text("#!/bin/sh\nkill -SEGV $$\n")
    reader.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(reader))
    with pytest.raises(DataError, match=r"samples\.parquet: not parquet with .* \(exit code -11\)"):
        read_own_folder(tmp_path / "data", DIGITS)


def test_nothing_is_imported_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's folder of data may have modules in it."""
    node_data.write_parquet(tmp_path / "data", *node_data.digits(3))
    for module in ("pyarrow", "numpy", "fedstrata", "resource"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    assert len(read_own_folder(tmp_path / "data", DIGITS)) == 3


# --- images ----------------------------------------------------------------------------------------------------------


def chunk(name: bytes, content: bytes) -> bytes:
    return len(content).to_bytes(4) + name + content + zlib.crc32(name + content).to_bytes(4)


def png_with(*chunks: bytes) -> bytes:
    """A black image of 28×28 with other chunks before its pixels."""
    whole = node_data.png(np.zeros((28, 28), np.uint8))
    return whole[:33] + b"".join(chunks) + whole[33:]


def png_of_size(side: int) -> bytes:
    header = struct.pack(">2I5B", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", ZEROS)


def bitmap() -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("L", (28, 28)).save(buffer, "bmp")
    return buffer.getvalue()


ZEROS = zlib.compress(bytes(100 * MIB), 9)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (lambda: png_with(chunk(b"zTXt", b"a\0\0" + ZEROS)), "not a readable PNG or JPEG"),
        (lambda: png_with(chunk(b"iTXt", b"a\0\1\0\0\0" + ZEROS)), "not a readable PNG or JPEG"),
        (lambda: png_with(chunk(b"iCCP", b"a\0\0" + ZEROS)), "not a readable PNG or JPEG"),
        (
            lambda: png_with(chunk(b"tEXt", b"a\0" + bytes(2 * MIB))),
            "2,097,239 bytes",
        ),
        (lambda: png_of_size(60_000), "not a readable PNG or JPEG"),
        (lambda: png_of_size(9_000), "an image of (9000, 9000) pixels, expected (28, 28)"),
        (bitmap, "not a readable PNG or JPEG"),
    ],
    ids=["zTXt", "iTXt", "iCCP", "long", "huge", "large", "another format"],
)
def test_an_image_with_more_in_it_than_its_pixels(content: Callable[[], bytes], problem: str, tmp_path: Path) -> None:
    """Nothing in an image is unpacked that is larger than it should be, and Pillow's other formats are not read."""
    path = tmp_path / "in" / "3" / "a.png"
    path.parent.mkdir(parents=True)
    path.write_bytes(content())
    message = refused(tmp_path / "in", "own", most=20)
    assert message.startswith(str(path))
    assert problem in message


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_a_damaged_image_is_a_data_error(form: str, tmp_path: Path) -> None:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(node_data.digits(1)[0][0, 0]).save(buffer, form)
    generator = np.random.default_rng(0)
    for _ in range(300):
        content = bytearray(buffer.getvalue())
        for place in generator.integers(0, len(content), 3):
            content[place] = int(generator.integers(256))
        with contextlib.suppress(DataError):
            files.decode([("here", bytes(content), 0)], (1, 28, 28))


# --- what is not a file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a-images-idx3-ubyte", "my-labels-idx1-ubyte.gz", "a.csv", "a.parquet", "3/a.png"])
def test_a_fifo_among_somebodys_own_files_is_never_opened(name: str, tmp_path: Path) -> None:
    """If it were, the test would not end."""
    if "idx" in name:
        node_data.write_idx(tmp_path / "in", *node_data.digits(3))
    path = tmp_path / "in" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(DataError, match=f"^{path}: not a regular file"):
        read_own_folder(tmp_path / "in", DIGITS)
