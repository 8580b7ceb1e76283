"""Folders of data as nodes have them: the same samples in every layout."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import numpy as np

CLASSES = 10


def digits(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that look like images of 1×28×28, and their classes."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (count, 1, 28, 28), dtype=np.uint8), generator.integers(0, CLASSES, count)


def idx(array: np.ndarray) -> bytes:
    shape = b"".join(size.to_bytes(4) for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + shape + array.astype(np.uint8).tobytes()


def png(image: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "png")
    return buffer.getvalue()


def write_idx(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    folder.mkdir(parents=True)
    (folder / "my-images-idx3-ubyte").write_bytes(idx(images[:, 0]))
    (folder / "my-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))


def write_csv(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Numbers in [0, 1], exactly those that float32 has; the label in the middle."""
    folder.mkdir(parents=True)
    values = images.reshape(len(images), -1).astype(np.float32) / np.float32(255)
    header = [f"pixel{number}" for number in range(values.shape[1])]
    lines = [",".join([*header[:5], "label", *header[5:]])]
    for row, label in zip(values.tolist(), labels.tolist(), strict=True):
        lines.append(",".join([*map(repr, row[:5]), str(label), *map(repr, row[5:])]))
    (folder / "samples.csv").write_text("\n".join(lines) + "\n")


def write_images(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Files in folders of classes; they are read class by class, so the order is that of `sorted_by_class`."""
    for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        path = folder / str(label) / f"{number:05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(image[0]))


def write_parquet(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(parents=True)
    column = [{"bytes": png(image[0]), "path": None} for image in images]
    parquet.write_table(pyarrow.table({"image": column, "label": labels.tolist()}), folder / "samples.parquet")


WRITERS = {"idx": write_idx, "csv": write_csv, "image": write_images, "parquet": write_parquet}


def sorted_by_class(images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(labels, kind="stable")
    return images[order], labels[order]
