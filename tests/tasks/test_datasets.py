"""Data sets: where they are looked for, and what is read of their files."""

from __future__ import annotations

import gzip
import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedstrata.core.errors import DataError, MissingExtra
from fedstrata.tasks import builtin, datasets, fetching, files
from tests.support.published import (
    IMAGES,
    LABELS,
    assert_is_the_set,
    encode,
    expect_digests,
    idx,
    idx_contents,
    labels,
    pixels,
    write_binary,
    write_idx,
    write_image_folders,
    write_parquet,
)

pytestmark = pytest.mark.usefixtures("small_world")

# --- where data is looked for


def test_data_directory_order(tmp_path, monkeypatch):
    assert datasets.data_directory() == tmp_path / "share" / "fedstrata"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert datasets.data_directory() == Path.home() / ".local/share/fedstrata"
    monkeypatch.setenv("FEDSTRATA_DATA", str(tmp_path / "chosen"))
    assert datasets.data_directory() == tmp_path / "chosen"
    assert datasets.data_directory(tmp_path / "argument") == tmp_path / "argument"


def test_missing_data_says_how_to_get_it(tmp_path):
    with pytest.raises(DataError) as caught:
        datasets.load("mnist", tmp_path)
    assert str(tmp_path / "mnist") in str(caught.value)
    assert "fedstrata data get mnist" in str(caught.value)
    assert "--data DIR" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_names():
    with pytest.raises(DataError, match="'svhn' is not known; there are mnist, fashion-mnist, cifar10, mnist-mini"):
        datasets.load("svhn")


# --- the embedded set


def test_mnist_mini_is_embedded_and_balanced():
    mini = datasets.load("mnist-mini", Path("ignored"))
    assert mini.train_images.shape == (8000, 1, 28, 28)
    assert mini.test_images.shape == (2000, 1, 28, 28)
    assert mini.train_labels.bincount().tolist() == [800] * 10
    assert mini.test_labels.bincount().tolist() == [200] * 10
    assert mini.train_images.dtype == torch.uint8
    assert mini.train_labels.dtype == torch.int64
    assert datasets.mini_path().stat().st_size < 3_000_000
    assert fetching.get("mnist-mini") == datasets.mini_path()


# --- idx


@pytest.mark.parametrize(
    ("spelling", "pack"),
    [
        (lambda name: name, lambda content: content),
        (lambda name: f"{name}.gz", gzip.compress),
        (lambda name: name.replace("-idx", ".idx"), lambda content: content),
        (lambda name: name.replace("-idx", ".idx") + ".gz", gzip.compress),
    ],
    ids=["plain", "gzip", "dotted", "dotted gzip"],
)
def test_idx_in_every_spelling(tmp_path, monkeypatch, spelling, pack):
    contents = idx_contents()
    digests = {name.split("-idx")[0]: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    expect_digests(monkeypatch, "mnist", digests)
    write_idx(tmp_path / "mnist", spelling, pack)
    dataset = datasets.load("mnist", tmp_path)
    assert_is_the_set(dataset, (1, 28, 28))
    assert dataset.source == "idx files, canonical digests"
    dataset.train_images[0] = 0  # writable memory: torch warns of tensors over read-only buffers


def spoil(change, name="train-images-idx3-ubyte"):
    def apply(folder):
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (spoil(lambda c: c[:-1]), f"{IMAGES}: 15695 bytes, expected 15696 for dimensions"),
        (spoil(lambda c: c + b"x"), f"{IMAGES}: 15697 bytes, expected 15696"),
        (spoil(lambda c: b""), f"{IMAGES}: is empty"),
        (spoil(lambda c: c[:9]), f"{IMAGES}: 9 bytes, expected"),
        (spoil(lambda c: b"\0\0\x08\x01" + c[4:]), f"{IMAGES}: magic number 00000801, expected 00000803"),
        (spoil(lambda c: gzip.compress(c)[:-20]), f"{IMAGES}: the gzip file is cut short or damaged"),
        (spoil(lambda c: gzip.compress(c[:-1])), f"{IMAGES}: 15695 bytes, expected 15696 for dimensions"),
        (spoil(lambda c: gzip.compress(c + b"x")), f"{IMAGES}: more than 15696 bytes, expected 15696"),
        (spoil(lambda c: gzip.compress(c) + gzip.compress(b"x")), f"{IMAGES}: more than 15696 bytes, expected 15696"),
        (
            spoil(lambda c: gzip.compress(c) + bytes(2 << 20)),
            f"{IMAGES}: 2,1.* bytes .*expected at most",
        ),
        (spoil(lambda c: idx(np.zeros((21, 28, 28)))), f"{IMAGES}: 21 images, expected 20"),
        (spoil(lambda c: idx(np.zeros(21)), LABELS), f"{LABELS}: 21 labels, expected 20"),
        (spoil(lambda c: b"\x1f\x8bgarbage"), f"{IMAGES}: the gzip file is cut short or damaged"),
        (spoil(lambda c: idx(np.zeros(19)), LABELS), f"{IMAGES}: 20 images but 19 labels"),
        (spoil(lambda c: idx(np.full(20, 10)), LABELS), f"{IMAGES}: labels from 10 to 10, expected 0 to 9"),
        (spoil(lambda c: idx(np.zeros((20, 27, 28)))), f"{IMAGES}: images of shape .1, 27, 28., expected .1, 28, 28."),
        (lambda folder: (folder / LABELS).unlink(), f"mnist: {LABELS} is missing"),
    ],
)
def test_damaged_idx_files_are_named_with_what_is_wrong(tmp_path, damage, message):
    damage(write_idx(tmp_path / "mnist"))
    with pytest.raises(DataError, match=message) as caught:
        datasets.load("mnist", tmp_path)
    assert "\n" not in str(caught.value)


def test_too_few_images(tmp_path):
    folder = write_idx(tmp_path / "mnist")
    (folder / IMAGES).write_bytes(idx(pixels("train")[:15, 0]))
    (folder / LABELS).write_bytes(idx(labels("train")[:15]))
    with pytest.raises(DataError, match="15 images, expected 20"):
        datasets.load("mnist", tmp_path)


def test_idx_with_other_content_is_refused(tmp_path, monkeypatch):
    expect_digests(monkeypatch, "mnist", {"train-images": "ab" * 32})
    folder = write_idx(tmp_path / "mnist")
    found = hashlib.sha256((folder / IMAGES).read_bytes()).hexdigest()[:12]
    with pytest.raises(DataError, match=f"{IMAGES}: .*{found}…, expected abababababab…"):
        datasets.load("mnist", tmp_path)


def test_unreadable_file(tmp_path, monkeypatch):
    write_idx(tmp_path / "mnist")

    def refuse(path, mode):  # file modes would not do: they do not stop root
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=f"{IMAGES}: Permission denied"):
        datasets.load("mnist", tmp_path)


# --- parquet, binary batches, image folders


@pytest.mark.parametrize(
    ("name", "column", "shape"), [("cifar10", "img", (3, 32, 32)), ("mnist", "image", (1, 28, 28))]
)
def test_parquet_in_the_hubs_layout(tmp_path, name, column, shape):
    write_parquet(tmp_path / name, column, shape=shape)
    dataset = datasets.load(name, tmp_path)
    assert_is_the_set(dataset, shape)
    assert dataset.source == "parquet files, digests not known to fedstrata"


def test_parquet_of_jpegs_says_so_and_known_digests_are_known(tmp_path, monkeypatch):
    folder = write_parquet(tmp_path / "cifar10", form="JPEG")
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    expect_digests(monkeypatch, "cifar10", digests)
    for _ in ("decoded", "cached"):
        source = datasets.load("cifar10", tmp_path).source
        assert source == "parquet files, known digests; JPEG re-encoding, not the original pixels"


def rewrite_train(folder, **columns):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), folder / "train-00000-of-00001.parquet")


def test_damaged_parquet(tmp_path):
    folder = write_parquet(tmp_path / "cifar10")
    train = folder / "train-00000-of-00001.parquet"
    image = {"bytes": encode(pixels("train", (3, 32, 32))[0], "PNG"), "path": None}

    def fails(message):
        with pytest.raises(DataError, match=message) as caught:
            datasets.load("cifar10", tmp_path)
        assert "\n" not in str(caught.value)

    train.write_bytes(train.read_bytes()[:-100])
    fails("train-00000-of-00001.parquet: not parquet with columns")
    rewrite_train(folder, picture=[image], label=[0])
    fails("not parquet with columns of images")
    rewrite_train(folder, x=[0.5], label=[0])
    fails("not parquet with columns img or image")
    rewrite_train(folder, img=[image])
    fails("not parquet with columns img or image .* label")
    rewrite_train(folder, img=[1.5], label=[0])
    fails("not parquet with columns of images")
    rewrite_train(folder, img=[image], label=["mouse"])
    fails("label = 'mouse' in row 1 is no class; there are: 0, .*, airplane, ")
    rewrite_train(folder, img=[image], label=[[3]])
    fails("not parquet with columns .* label")
    rewrite_train(folder, img=[image], label=pytest.importorskip("pyarrow").array([None], "int64"))
    fails("label = 'None' in row 1 is no class")
    rewrite_train(folder, img=[image], label=[1.5])
    fails("label = '1.5' in row 1 is no class")
    rewrite_train(folder, img=[image, {"bytes": b"not an image", "path": None}], label=[0, 1])
    fails("parquet, row 2: not a readable PNG or JPEG")
    rewrite_train(folder, img=[{"bytes": None, "path": "x"}, image], label=[0, 1])
    fails("parquet, row 1: not a readable PNG or JPEG")
    rewrite_train(folder, img=[{"bytes": encode(pixels("train")[0], "PNG"), "path": None}], label=[0])
    fails(r"row 1: an image of \(28, 28\) pixels, expected \(32, 32\)")
    rewrite_train(folder, img=[image] * 21, label=[0] * 21)
    fails("parquet: 21 rows, expected at most 20")
    rewrite_train(folder, img=[image] * 20, label=[-1] * 20)
    fails("labels from -1 to -1, expected 0 to 9")


@pytest.mark.parametrize("below", ["", "cifar-10-batches-bin"])
def test_binary_batches(tmp_path, below):
    write_binary(tmp_path / "cifar10" / below)
    dataset = datasets.load("cifar10", tmp_path)
    assert_is_the_set(dataset, (3, 32, 32))
    assert dataset.source == "binary files, digests not known to fedstrata"


def test_damaged_binary_batches(tmp_path):
    folder = write_binary(tmp_path / "cifar10")
    batch = folder / "data_batch_3.bin"
    whole = batch.read_bytes()
    batch.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"data_batch_3\.bin: 12291 bytes, expected a multiple of 3073"):
        datasets.load("cifar10", tmp_path)
    batch.unlink()
    with pytest.raises(DataError, match=r"data_batch_3\.bin is missing"):
        datasets.load("cifar10", tmp_path)


@pytest.mark.parametrize(("suffix", "form"), [("png", "PNG"), ("jpg", "JPEG"), ("jpeg", "JPEG")])
def test_image_folders(tmp_path, suffix, form):
    write_image_folders(tmp_path / "cifar10", suffix, form)
    dataset = datasets.load("cifar10", tmp_path)
    order = np.argsort(labels("train"), kind="stable")
    assert np.array_equal(dataset.train_labels.numpy(), labels("train")[order])
    assert ("JPEG re-encoding, not the original pixels" in dataset.source) == (form == "JPEG")
    if form == "PNG":
        assert np.array_equal(dataset.train_images.numpy(), pixels("train", (3, 32, 32))[order])


def test_image_folders_of_unknown_classes(tmp_path):
    folder = write_image_folders(tmp_path / "cifar10")
    (folder / "train" / "cat").rename(folder / "train" / "kitten")
    with pytest.raises(DataError, match=r"'kitten' is not one of 0, .*, airplane, automobile"):
        datasets.load("cifar10", tmp_path)


def test_missing_packages_are_named(tmp_path, monkeypatch):
    write_parquet(tmp_path / "cifar10")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        MissingExtra, match=r"reading parquet needs pyarrow and pillow: pip install 'fedstrata\[data\]'"
    ):
        datasets.load("cifar10", tmp_path)
    write_image_folders(tmp_path / "images" / "cifar10")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match="reading image files needs pillow"):
        datasets.load("cifar10", tmp_path / "images")


# --- the cache


def counted_decoding(monkeypatch):
    calls = []

    def decode(*arguments):
        calls.append(1)
        return files.decode(*arguments)

    monkeypatch.setattr(datasets, "decode", decode)
    return calls


def test_decoded_pixels_are_cached_under_the_files_digests(tmp_path, monkeypatch):
    decoded = counted_decoding(monkeypatch)
    write_parquet(tmp_path / "cifar10")
    for expected in (2, 2):  # train and test once, then nothing
        assert_is_the_set(datasets.load("cifar10", tmp_path), (3, 32, 32))
        assert len(decoded) == expected
    assert len(list((tmp_path / "cache" / "fedstrata").iterdir())) == 2
    write_parquet(tmp_path / "cifar10", form="JPEG")
    assert "JPEG" in datasets.load("cifar10", tmp_path).source
    assert len(decoded) == 4


def flipped(content, place):
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c[:-5],
        lambda c: b"junk",
        lambda c: flipped(c, 5000),
        lambda c: flipped(c, c.index(b"PK\1\2") + 8),
        lambda c: flipped(c, c.index(b"PK\1\2") + 10),
    ],
    ids=["cut short", "junk", "another pixel", "encrypted", "compressed in another way"],
)
def test_a_corrupt_cache_is_rewritten(tmp_path, monkeypatch, change):
    decoded = counted_decoding(monkeypatch)
    write_parquet(tmp_path / "cifar10")
    datasets.load("cifar10", tmp_path)
    cache, _ = (tmp_path / "cache" / "fedstrata").iterdir()
    sound = cache.read_bytes()
    cache.write_bytes(change(sound))
    assert_is_the_set(datasets.load("cifar10", tmp_path), (3, 32, 32))
    assert len(decoded) == 3
    assert len(cache.read_bytes()) == len(sound)
    datasets.load("cifar10", tmp_path)
    assert len(decoded) == 3


def test_an_unwritable_cache_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file where the folder should be")
    write_parquet(tmp_path / "cifar10")
    assert_is_the_set(datasets.load("cifar10", tmp_path), (3, 32, 32))


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_scaled_a_few_at_a_time_as_they_would_be_at_once(channels: int) -> None:
    """More images than are scaled at once, and an odd rest: the same bits as one operation over all of them."""
    images = torch.randint(0, 256, (517, channels, 5, 4), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    numbers = images.double().transpose(0, 1).flatten(1)
    shape = (1, channels, 1, 1)
    mean, std = (found.float().view(shape) for found in builtin.channel_statistics(images))
    torch.testing.assert_close(mean.flatten(), numbers.mean(1).float())
    torch.testing.assert_close(std.flatten(), numbers.std(1, correction=0).float())
    assert torch.equal(builtin._scaling(images, "normalised")(images), (images.float() - mean) / std)
