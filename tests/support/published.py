"""Published data sets with made-up pixels, 20 to train with and 10 to test with, in all layouts that there are."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import torch

from fedstrata.tasks import datasets

TRAIN, TEST = 20, 10
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def expect_digests(monkeypatch, name, digests):
    monkeypatch.setitem(datasets.PUBLISHED, name, dataclasses.replace(datasets.PUBLISHED[name], digests=digests))


def pixels(part, shape=(1, 28, 28)):
    count = TRAIN if part == "train" else TEST
    return np.random.default_rng(count).integers(0, 256, (count, *shape), dtype=np.uint8)


def labels(part):
    return np.arange(TRAIN if part == "train" else TEST) % 10


def idx(array):
    shape = b"".join(size.to_bytes(4) for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + shape + array.astype(np.uint8).tobytes()


def idx_contents():
    contents = {}
    for prefix, part in (("train", "train"), ("t10k", "test")):
        contents[f"{prefix}-images-idx3-ubyte"] = idx(pixels(part)[:, 0])
        contents[f"{prefix}-labels-idx1-ubyte"] = idx(labels(part))
    return contents


def write_idx(folder, spelling=lambda name: name, pack=lambda content: content):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in idx_contents().items():
        (folder / spelling(name)).write_bytes(pack(content))
    return folder


def encode(image, form):
    from PIL import Image

    channels_last = image.transpose(1, 2, 0)
    buffer = io.BytesIO()
    Image.fromarray(channels_last[..., 0] if len(image) == 1 else channels_last).save(buffer, form)
    return buffer.getvalue()


def write_parquet(folder, column="img", form="PNG", shape=(3, 32, 32)):
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "test"):
        images = [{"bytes": encode(image, form), "path": None} for image in pixels(part, shape)]
        table = pyarrow.table({column: images, "label": labels(part)})
        parquet.write_table(table, folder / f"{part}-00000-of-00001.parquet")
    return folder


def write_image_folders(folder, suffix="png", form="PNG"):
    names = datasets.PUBLISHED["cifar10"].class_names
    for part in ("train", "test"):
        for number, (image, label) in enumerate(zip(pixels(part, (3, 32, 32)), labels(part), strict=True)):
            path = folder / part / names[label] / f"{number:04}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode(image, form))
    return folder


def write_binary(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for part, files in (("train", [f"data_batch_{n}.bin" for n in range(1, 6)]), ("test", ["test_batch.bin"])):
        records = np.hstack([labels(part)[:, None].astype(np.uint8), pixels(part, (3, 32, 32)).reshape(-1, 3072)])
        for name, batch in zip(files, np.split(records, len(files)), strict=True):
            (folder / name).write_bytes(batch.tobytes())
    return folder


def assert_is_the_set(dataset, shape):
    assert dataset.train_images.dtype == dataset.test_images.dtype == torch.uint8
    assert dataset.train_labels.dtype == dataset.test_labels.dtype == torch.int64
    for part in ("train", "test"):
        assert np.array_equal(getattr(dataset, f"{part}_images").numpy(), pixels(part, shape))
        assert np.array_equal(getattr(dataset, f"{part}_labels").numpy(), labels(part))
    assert dataset.classes == 10
