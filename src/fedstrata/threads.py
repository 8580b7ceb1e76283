"""How many threads compute: never so that their number could change a bit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeVar

import torch

Item = TypeVar("Item")


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread, so that the number of workers cannot change the order of a sum."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for _ in pool.map(work, [items[first:last] for first, last in pairwise(bounds)]):
            pass  # an exception in a thread is raised here
