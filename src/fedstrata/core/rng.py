"""All randomness, as a function of (seed, round, attempt, client, purpose).

Nothing is drawn from a stream that goes on from round to round, so a resumed run needs only the round's number, and
no engine or worker can change what another one draws.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from fedstrata.core.lazy import torch

SERVER = -1
"""The "client" of what the server itself draws."""


def _digest(seed: int, purpose: str, round: int, attempt: int, client: int) -> bytes:
    return hashlib.sha256(f"{seed}/{round}/{attempt}/{client}/{purpose}".encode()).digest()


def generator(
    seed: int, purpose: str, *, round: int = 0, attempt: int = 0, client: int = SERVER
) -> np.random.Generator:
    """A NumPy generator that depends on its arguments and on nothing else."""
    key = np.frombuffer(_digest(seed, purpose, round, attempt, client)[:16], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


@contextmanager
def global_scope(seed: int, purpose: str, *, round: int = 0, attempt: int = 0, client: int = SERVER) -> Iterator[None]:
    """Seed the global generators for code that is not ours (initialisation, Dropout), and restore them after."""
    digest = _digest(seed, purpose, round, attempt, client)
    before_torch, before_numpy, before_python = torch.get_rng_state(), np.random.get_state(), random.getstate()
    before_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    seed_of_scope = int.from_bytes(digest[:7], "little")
    torch.default_generator.manual_seed(seed_of_scope)  # torch.manual_seed would note a stack trace for CUDA each time
    if before_cuda is not None:
        torch.cuda.manual_seed_all(seed_of_scope)  # an experiment may be on any of them
    np.random.seed(int.from_bytes(digest[8:12], "little"))
    random.seed(digest)
    try:
        yield
    finally:
        torch.set_rng_state(before_torch)
        np.random.set_state(before_numpy)
        random.setstate(before_python)
        if before_cuda is not None:
            torch.cuda.set_rng_state_all(before_cuda)
