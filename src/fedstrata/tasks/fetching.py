"""Getting a data set: from the hub, or from a folder or files one has, checked before it is put in place.

Archives and packages are for their own programs to unpack: what these may write, and how much, is not for us to judge.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gzip
import re
import shlex
import shutil
import tempfile
import zlib
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from fedstrata.core.errors import DataError, MissingExtra
from fedstrata.tasks.datasets import (
    MINI,
    PUBLISHED,
    Found,
    among_files,
    data_directory,
    find_files,
    in_words,
    known,
    layouts,
    load_folder,
    mini_path,
    read,
)
from fedstrata.tasks.files import file_size


class HubUnreachable(DataError):
    """The hub did not answer; `hints` are the commands that get the set in another way."""

    def __init__(self, name: str, reason: Exception) -> None:
        self.hints = list(PUBLISHED[name].hints)
        super().__init__(f"{name}: the hub could not be reached ({type(reason).__name__}); other ways to get it:")


def get(name: str, source: Path | Sequence[Path] | None = None, directory: Path | None = None) -> Path:
    """Put a set into the data directory, from a folder or from its files, else from the hub; return its folder.

    The files are checked before they replace anything. Without `source`, a set that is there and sound is kept.
    Archives are not unpacked.
    """
    if name == MINI:
        return mini_path()
    target = data_directory(directory) / known(name)
    sources = [Path(source)] if isinstance(source, (str, Path)) else [Path(path) for path in source or ()]
    if not sources and _is_sound(name, target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as scratch:
            fresh = Path(scratch) / "fresh"
            found = _checked(name, sources) if sources else _downloaded(name, Path(scratch) / "download")
            for relative, path in chain.from_iterable(files.items() for files in found.parts.values()):
                (fresh / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, fresh / relative)
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


def _downloaded(name: str, into: Path) -> Found:
    try:
        import PIL  # noqa: F401 - needed to read what comes, so rather now than after the download
        import pyarrow  # noqa: F401
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingExtra("huggingface-hub, pyarrow and pillow", "data", "getting data from the hub") from error
    hub = PUBLISHED[name].hub
    try:
        snapshot_download(hub, repo_type="dataset", allow_patterns="*.parquet", local_dir=into)
    except Exception as error:  # the hub's client lets through what its HTTP library raises, which differs by version
        raise HubUnreachable(name, error) from error
    try:
        return _checked(name, [into])
    except DataError as error:
        raise DataError(str(error).replace(str(into), hub)) from error


# --- what is given ---------------------------------------------------------------------------------------------------


def _checked(name: str, sources: Sequence[Path]) -> Found:
    """The set's files in a folder or among files, after they have been read."""
    for path in sources:
        if not path.exists():
            raise DataError(f"{path}: no such folder or file")
    if len(sources) == 1 and sources[0].is_dir():
        found = find_files(name, sources[0])
    else:
        by_name: dict[str, Path] = {}
        for path in sources:
            _check_given(name, path)
            if by_name.setdefault(path.name, path) != path:
                raise DataError(f"{path}: another file of this name was given, {by_name[path.name]}")
        found = among_files(name, sources)
    if found is None:
        raise DataError(f"{sources[0]}: no files of {name} in it (idx, parquet or image folders)")
    read(name, found)
    return found


def _check_given(name: str, path: Path) -> None:
    """Refuse what is not one of the set's files by its name; say of an archive how it is unpacked."""
    if path.is_dir():
        raise DataError(f"{path}: a folder is given alone, without other folders or files")
    file_size(path)  # before it is opened
    folder = f"{name}-files"
    if command := _unpacking(path, folder):
        commands = f"`{command}`, then `fedstrata data get {name} --from {folder}`"
        raise DataError(f"{path}: archives are not unpacked here; run {commands}")
    patterns = (pattern for layout in layouts(name).values() for pattern in chain(*layout.values()))
    expected = [pattern for pattern in patterns if "/" not in pattern]
    if not any(fnmatch.fnmatchcase(path.name, pattern) for pattern in expected):
        raise DataError(f"{path}: not a file of {name}; expected a folder or {', '.join(map(in_words, expected))}")


_COMPRESSED = (b"\xfd7zXZ\0", b"BZh", b"\x28\xb5\x2f\xfd")  # xz, bzip2, zstd
_TAR = re.compile(r"\.(tar(\..*)?|t[bgx]z2?)$")


def _unpacking(path: Path, folder: str) -> str | None:
    """The command that unpacks an archive, known by its content or by its name; None for other files."""
    with path.open("rb") as file:
        start = file.read(512)
        if start.startswith(b"\x1f\x8b"):
            file.seek(0)
            with contextlib.suppress(EOFError, OSError, zlib.error):
                start = gzip.GzipFile(fileobj=file).read(512)
    archive = shlex.quote(str(path))
    if start.startswith(b"!<arch>") or path.suffix == ".deb":
        return f"dpkg-deb -x {archive} {folder}"
    if start.startswith((b"PK\3\4", b"PK\5\6")) or path.suffix == ".zip":
        return f"unzip {archive} -d {folder}"
    if start[257:262] == b"ustar" or start.startswith(_COMPRESSED) or _TAR.search(path.name):
        return f"mkdir {folder} && tar xf {archive} -C {folder}"
    return None
