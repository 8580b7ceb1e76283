"""Processes of ours: commands in this one or in their own, children that cannot hurt us, and none left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.support import ROOT, SOURCE


class Answer(NamedTuple):
    """What a command came to."""

    code: int
    out: str
    err: str


def process_environment() -> dict[str, str]:
    """For a fedstrata, or our reproductions, in a process of its own."""
    return os.environ | {"PYTHONPATH": f"{SOURCE}{os.pathsep}{ROOT}", "COLUMNS": "200"}


def default_sigint() -> None:
    """A shell that starts pytest in the background has its children ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def fork(work: Callable[[], object], log: Path) -> int:
    """Do something in a child that cannot hurt us; what it says goes to a file."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until the child can take it
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        with contextlib.suppress(OSError):  # whoever comes first
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        torch.set_num_threads(1)
        work()
        code = 0
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def end_of(pid: int) -> int:
    """The child's exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def living(group: int) -> list[int]:
    """Processes of a group that are not yet dead."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                _, _, rest = (entry / "stat").read_text().rpartition(")")
            except OSError:
                continue
            state, _, process_group = rest.split()[:3]
            if int(process_group) == group and state not in "ZX":
                found.append(int(entry.name))
    return found


def assert_no_orphans(group: int) -> None:
    deadline = time.monotonic() + 20
    while living(group) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = living(group)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "workers outlived the process that was killed"


def wait_for_rounds(path: Path, process: Any, rounds: int) -> None:
    while not (path / "history.jsonl").exists() or (path / "history.jsonl").read_bytes().count(b"\n") < rounds:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
