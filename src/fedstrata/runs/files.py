"""Files that survive a kill at any instant, in folders that somebody else may have filled.

A file is replaced as a whole, or grows by whole lines. Nothing below a folder is reached through a link, and only
regular files are opened: whatever lies in a run directory, nothing outside it is read, changed or removed through it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from fedstrata.core.errors import DiskFull, RunDirectoryError, printable
from fedstrata.formatting import size

if TYPE_CHECKING:
    import numpy as np

TEMPORARY = ".partial"

_held: set[int] = set()  # handles of the locks that this process holds


class Folder:
    """The files below a folder, by their names relative to it, such as `layers/000001.safetensors`.

    The folder itself is where its owner says, and may be a link; or it is the one that `handle` has open, as the one
    that is locked, wherever it is moved to and whatever takes its place.
    """

    def __init__(self, path: Path, handle: int | None = None) -> None:
        self.path, self._handle = path, handle

    # --- looking ------------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether there is a file or folder of this name; a link is an error."""
        with self._folder_of(name, missing_ok=True) as (handle, last):
            return handle is not None and self._kind(name, handle, last) is not None

    def names(self, folder: str = "") -> list[str]:
        """What a folder below holds, in order, without looking at it."""
        with self._opened(folder) as handle:
            return sorted(os.listdir(handle))

    def read(self, name: str, most: int = 1 << 26) -> bytes:
        """A whole file, if it has at most so many bytes."""
        with os.fdopen(self._open(name, os.O_RDONLY), "rb") as file:
            content = file.read(most + 1) if os.fstat(file.fileno()).st_size <= most else None
        if content is None or len(content) > most:
            raise RunDirectoryError(f"{self.path / name} is damaged: it has more than {size(most)}")
        return content

    def read_arrays(self, name: str, prefix: str = "") -> tuple[dict[str, np.ndarray], dict[str, str]]:
        """The arrays, of which those whose name begins so, and the metadata of a safetensors file."""
        handle = self._open(name, os.O_RDONLY)
        try:
            with safe_open(f"/dev/fd/{handle}", framework="numpy") as file:
                names = [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118 (not a dict)
                arrays = {key: file.get_tensor(key) for key in names}
                return arrays, dict(file.metadata() or {})
        except (SafetensorError, MemoryError, TypeError, AttributeError) as error:  # the latter: no dtype of NumPy's
            raise RunDirectoryError(f"{self.path / name} is damaged: {str(error) or 'too large'}") from None
        finally:
            os.close(handle)

    def array_names(self, name: str) -> list[str]:
        """The arrays of a safetensors file, by name, without reading them."""
        handle = self._open(name, os.O_RDONLY)
        try:
            with safe_open(f"/dev/fd/{handle}", framework="numpy") as file:
                return list(file.keys())
        except (SafetensorError, MemoryError) as error:
            raise RunDirectoryError(f"{self.path / name} is damaged: {str(error) or 'too large'}") from None
        finally:
            os.close(handle)

    def read_versioned(self, name: str, versions: Collection[int]) -> dict[str, Any]:
        """A JSON object of ours, if it is whole and of a format we read."""
        path = self.path / name
        try:
            content = json.loads(self.read(name).decode(), parse_constant=_refuse)
        except (OSError, ValueError, RecursionError) as error:
            raise RunDirectoryError(f"{path} is damaged: {printable(str(error))}") from None
        found = content.get("format") if isinstance(content, dict) else content
        if not isinstance(content, dict) or type(found) is not int or found not in versions:
            readable = " and ".join(map(str, sorted(versions)))
            theirs = printable(repr(found))
            raise RunDirectoryError(f"{path}: format = {theirs}; this version of fedstrata reads format {readable}")
        return content

    def folder(self, name: str) -> Folder:
        """A folder below, if no link leads there; it need not be there yet."""
        with self._folder_of(name, missing_ok=True) as (handle, last):
            if handle is not None and self._kind(name, handle, last) not in (None, stat.S_IFDIR):
                raise RunDirectoryError(f"{self.path / name} is no folder")
        return Folder(self.path / name)

    # --- writing ------------------------------------------------------------------------------------------------

    def write(self, name: str, content: bytes) -> None:
        """Replace a file in one step: a reader sees the old one or the new one, also after the power went."""
        with self._folder_of(name) as (folder, last):
            assert folder is not None
            partial = last + TEMPORARY
            try:
                handle = self._new(folder, partial)
                try:
                    _write_all(handle, content)
                    os.fsync(handle)
                finally:
                    os.close(handle)
                os.replace(partial, last, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
            except OSError:
                self._unlink(folder, partial)  # a full disk needs the room
                raise

    def make_folder(self, name: str) -> None:
        """Make a folder below, unless it is there."""
        with self._folder_of(name) as (folder, last):
            assert folder is not None
            if self._kind(name, folder, last) is None:
                os.mkdir(last, dir_fd=folder)
                os.fsync(folder)

    def append_line(self, name: str, line: bytes) -> None:
        """Add a line to a file. A kill in the middle leaves a torn last line, which readers drop."""
        handle = self._open(name, os.O_WRONLY | os.O_APPEND)
        with self._told(name):
            try:
                if os.fstat(handle).st_nlink > 1:
                    raise RunDirectoryError(f"{self.path / name} has a second name elsewhere (a hard link); copy it")
                _write_all(handle, line)
                os.fsync(handle)
            finally:
                os.close(handle)

    def remove(self, name: str) -> None:
        """Remove a file, or a link and not what it leads to."""
        with self._folder_of(name) as (folder, last):
            assert folder is not None
            self._unlink(folder, last)

    def _new(self, folder: int, name: str) -> int:
        """A handle of a file that was not there before: it is no link, and nobody else has it open."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return os.open(name, flags, 0o644, dir_fd=folder)
        except FileExistsError:  # of a process that was killed; or a link that somebody left there
            self._unlink(folder, name)
            return os.open(name, flags, 0o644, dir_fd=folder)

    @staticmethod
    def _unlink(folder: int, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)

    # --- without following links ----------------------------------------------------------------------------------

    @contextmanager
    def _folder_of(self, name: str, missing_ok: bool = False) -> Iterator[tuple[int | None, str]]:
        """A handle of the folder that has a file, and the file's name in it; None if there is no such folder."""
        *folders, last = _parts(name)
        with self._told(name), self._opened("/".join(folders), missing_ok) as handle:
            yield handle, last

    @contextmanager
    def _opened(self, name: str, missing_ok: bool = False) -> Iterator[int | None]:
        """A handle of a folder below, reached one step at a time."""
        handle = None
        try:
            with self._told(name):
                root = self.path if self._handle is None else "."
                handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._handle)
                steps = _parts(name) if name else []
                for at, step in enumerate(steps):
                    below = "/".join(steps[: at + 1])
                    if self._kind(below, handle, step) not in (None, stat.S_IFDIR):
                        raise RunDirectoryError(f"{self.path / below} is no folder")
                    above, handle = handle, None
                    try:
                        handle = os.open(step, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
                    finally:
                        os.close(above)
        except FileNotFoundError:
            if not missing_ok:
                raise
        try:
            yield handle
        finally:
            if handle is not None:
                os.close(handle)

    def _kind(self, name: str, folder: int, last: str) -> int | None:
        """Whether there is a file (S_IFREG) or a folder (S_IFDIR), or nothing; all else is refused."""
        try:
            kind = stat.S_IFMT(os.stat(last, dir_fd=folder, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return None
        if kind == stat.S_IFLNK:
            raise RunDirectoryError(f"{self.path / name} is a link; what it leads to is not touched")
        if kind not in (stat.S_IFREG, stat.S_IFDIR):
            raise RunDirectoryError(f"{self.path / name} is neither a file nor a folder")
        return kind

    def _open(self, name: str, flags: int) -> int:
        """A handle of a regular file. One that is exchanged for something else meanwhile is refused, too."""
        with self._folder_of(name) as (folder, last):
            assert folder is not None
            self._kind(name, folder, last)
            handle = os.open(last, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                os.close(handle)
                raise RunDirectoryError(f"{self.path / name} is no file")
            return handle

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Errors of the system name the whole path; that of a full disk also which disk it is."""
        try:
            yield
        except OSError as error:
            path = self.path / name
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(f"{path} cannot be written: {_disk_of(self.path)}; make room there and go on") from None
            raise OSError(error.errno, error.strerror, str(path)) from None


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file in one step: a reader sees the old one or the new one."""
    Folder(path.parent).write(path.name, content)


def sync_folder(path: Path) -> None:
    """Make sure that what a folder holds, by name, is on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number that JSON has")


def _parts(name: str) -> list[str]:
    parts = list(PurePosixPath(name).parts)
    if not parts or PurePosixPath(name).is_absolute() or ".." in parts or not _can_name(name):
        raise RunDirectoryError(f"{name!r} is no name of a file in a folder")
    return parts


def _can_name(text: str) -> bool:
    """Whether a file can be called so: a half surrogate pair that stands for no byte is in no encoding."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _write_all(handle: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(handle, view) :]


def _disk_of(path: Path) -> str:
    """Where the disk is mounted that a folder is on, and how much room it has left."""
    place = path.resolve()
    while not os.path.ismount(place):
        place = place.parent
    free = os.statvfs(place)
    return f"no space left on the disk at {place} ({size(free.f_bavail * free.f_frsize)} free)"


# --- one process at a time -------------------------------------------------------------------------------------------


@contextmanager
def locked(directory: Path, patience: float = 0.0) -> Iterator[int]:
    """Hold a directory for this process alone, after waiting for others if there is `patience` (in seconds).

    The directory itself is locked, so there is no file to be deleted. What it gives is a handle of the directory, which
    stays that of this one. The operating system lets go when the process ends, however it ends.
    """
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise RunDirectoryError(f"{directory} cannot be locked: {error.strerror}") from None
    try:
        deadline = time.monotonic() + max(patience, _GLANCE)
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    waited = f"; waited {patience:g} s" if patience else ""
                    raise RunDirectoryError(f"{directory} is in use by {_owner(handle)}{waited}") from None
                time.sleep(0.01)
            except OSError as error:  # a file system without locks
                raise RunDirectoryError(f"{directory} cannot be locked: {error.strerror}") from None
        _held.add(handle)
        yield handle
    finally:
        _held.discard(handle)
        os.close(handle)


def in_use(directory: Path) -> bool:
    """Whether a process works in a directory. Whoever only asks is in nobody's way for longer than a glance."""
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)
    return False


WHILE_WRITING = 30.0
"""Seconds to wait for a process that is between reading and writing."""

_GLANCE = 0.1
"""Seconds to wait for one that only asks whether a directory is in use."""


def _owner(handle: int) -> str:
    """Who holds the lock of a directory, as far as the kernel tells."""
    about = os.fstat(handle)
    place = rf"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
    try:
        found = re.search(rf"FLOCK +\w+ +WRITE +(\d+) +{place} ", Path("/proc/locks").read_text(encoding="ascii"))
    except OSError:
        found = None
    return f"process {found[1]}" if found else "another process"


def _let_go() -> None:
    """A forked worker does not hold its parent's locks: it may outlive the parent by an order."""
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
