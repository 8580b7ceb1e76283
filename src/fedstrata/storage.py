"""Files that survive a kill at any instant: they are replaced as a whole, or grow by whole lines."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedstrata.errors import RunDirectoryError

TEMPORARY = ".partial"

_held: set[int] = set()  # handles of the locks that this process holds


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file in one step: a reader sees the old one or the new one."""
    partial = path.with_name(path.name + TEMPORARY)
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        _write_all(handle, content)
        os.fsync(handle)
    finally:
        os.close(handle)
    os.replace(partial, path)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Add one JSON line. A kill in the middle leaves a torn last line, which `read_lines` drops."""
    line = json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        _write_all(handle, line.encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a JSON-lines file."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline was torn
    try:
        return [json.loads(line) for line in lines]
    except ValueError:
        raise RunDirectoryError(f"{path} is damaged: a line is not JSON") from None


def read_versioned(path: Path, version: int) -> dict[str, Any]:
    """A JSON file of ours, if it is whole and of the format we read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{path} is damaged: {error}") from None
    found = content.get("format") if isinstance(content, dict) else content
    if not isinstance(content, dict) or found != version:
        raise RunDirectoryError(f"{path}: format = {found!r}; this version of fedstrata reads format {version}")
    return content


def _write_all(handle: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(handle, view) :]


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a directory for this process alone; the operating system lets go when the process ends, however it ends."""
    path = directory / "lock"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunDirectoryError(f"{directory} cannot be locked: {error.strerror}") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
            raise RunDirectoryError(f"{directory} is in use by process {owner}") from None
        except OSError as error:
            raise RunDirectoryError(f"{directory} cannot be locked: {error.strerror}") from None
        _held.add(handle)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        _held.discard(handle)
        os.close(handle)


@contextmanager
def alone(directory: Path, patience: float = 30.0) -> Iterator[None]:
    """Wait until no other process is between reading and writing there; nothing is left behind."""
    try:
        handle = os.open(directory, os.O_RDONLY)
    except OSError as error:
        raise RunDirectoryError(f"{directory} cannot be locked: {error.strerror}") from None
    try:
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    problem = f"others have had it locked for {patience:g} s"
                    raise RunDirectoryError(f"{directory} cannot be written to: {problem}") from None
                time.sleep(0.01)
            except OSError as error:  # a file system without locks
                raise RunDirectoryError(f"{directory} cannot be locked: {error.strerror}") from None
        _held.add(handle)
        yield
    finally:
        _held.discard(handle)
        os.close(handle)


def _let_go() -> None:
    """A forked worker does not hold its parent's locks: it may outlive the parent by an order."""
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
