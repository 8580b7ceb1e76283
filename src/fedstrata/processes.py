"""Processes of ours: signals that ask them to stop, children that leave those to their parent, and memory."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

ASKED_TO_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, `kill`, and a terminal that is closed."""


def stop_when_asked() -> None:
    """Treat every request to stop as Ctrl-C, which loses no whole round. A second one ends the process at once.

    Whoever started us may want SIGINT or SIGHUP ignored, as a script does in the background, and nohup.
    """
    for number in ASKED_TO_STOP:
        if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    for other in ASKED_TO_STOP:
        if signal.getsignal(other) == _interrupt:
            signal.signal(other, _leave)
    raise KeyboardInterrupt


def _leave(number: int, frame: FrameType | None) -> None:
    """Every file is whole at any instant, so there is nothing to wait for, and nothing to tell."""
    with suppress(OSError):
        if os.isatty(_STDOUT):
            os.write(_STDOUT, _SHOW_CURSOR)
    os._exit(130)


_STDOUT = 1
_SHOW_CURSOR = b"\x1b[?25h\n"  # the live table hides it


@contextmanager
def held_back() -> Iterator[None]:
    """Requests to stop wait, and so they do in a child that is forked meanwhile until it says `leave_to_parent`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKED_TO_STOP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_parent(*numbers: signal.Signals) -> None:
    """In a child: a terminal sends its signals to us, too, but it is the parent that will ask us."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKED_TO_STOP)


def hold_collection() -> None:
    """Collect no garbage for now: a third of what it takes to import torch, and to end, would be looking for some.

    For a process that is ours alone: what is there when it goes on, or ends, is never looked at again.
    """
    gc.disable()
    _held.add(True)
    atexit.register(gc.freeze)


def resume_collection() -> None:
    """Collect garbage again, if it was we who stopped it; what is imported by now stays until the end."""
    if _held:
        _held.clear()
        gc.freeze()
        gc.enable()


_held: set[bool] = set()


def keep_memory() -> None:
    """Ask glibc not to give freed memory back: a training step frees what the next one needs again."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
