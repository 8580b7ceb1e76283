"""Where we compute: the same bits in every process, at full speed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
