"""Where we compute: the same bits in every process, at full speed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeVar

from fedstrata.core.lazy import torch

ARITHMETIC = 2
"""Raised whenever the bits of any result change. A run goes on with the arithmetic that it began with, or not at all;
`reproductions/outdated.py` says whose bits each number changed. 1 is that of version 0.1, which does not say so."""

Item = TypeVar("Item")


@contextmanager
def steady() -> Iterator[None]:
    """Compute on one thread, and with subnormal numbers as zeros; restore both after.

    One thread, so that the number of workers cannot change the order of a sum. Without subnormals, because a client
    with few classes soon gives the others probabilities below 1e-38, with which products are a hundred times slower.
    """
    threads, flushes = torch.get_num_threads(), _flushes_subnormals()
    if threads != 1:
        torch.set_num_threads(1)
    if not flushes:
        torch.set_flush_denormal(True)
    try:
        yield
    finally:
        if threads != 1:
            torch.set_num_threads(threads)
        if not flushes:
            torch.set_flush_denormal(False)


def _flushes_subnormals() -> bool:
    """Whether this thread takes subnormal numbers for zeros (torch can only set it)."""
    return float(torch.full((1,), torch.finfo(torch.float32).tiny).mul_(0.5)) == 0


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


WORTH_IT = 1 << 25
"""How many numbers must be read before a second thread gains more than starting it and sharing Python with it costs."""


def in_threads(work: Callable[[Sequence[Item]], None], items: Sequence[Item], numbers: int) -> None:
    """Let `work` go through the items; on all cores if that means reading many numbers.

    Each thread gets a run of items. So as long as `work` does with an item what it would do with it in any other run,
    the number of threads changes no bit.
    """
    threads = cores() if numbers >= WORTH_IT else 1
    if threads == 1:
        work(items)
        return
    bounds = [part * len(items) // threads for part in range(threads + 1)]
    with ThreadPoolExecutor(threads, initializer=_steady_thread) as pool:
        for _ in pool.map(work, [items[first:last] for first, last in pairwise(bounds)]):
            pass  # an exception in a thread is raised here


def _steady_thread() -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
