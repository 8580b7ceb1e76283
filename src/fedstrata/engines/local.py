"""The local engine: every client in this process, or in forked worker processes with one thread each.

Workers only change who computes an order, never its result. They are forked after the data is loaded, so that it is
shared, not copied; models and updates pass through memory mapped before the fork, everything else through pipes.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import multiprocessing as mp
import os
import pickle
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstrata.arithmetic import cores
from fedstrata.client import Client, Setup
from fedstrata.messages import Order, Reply
from fedstrata.processes import held_back, leave_to_parent


def available_workers(device: str = "cpu") -> int:
    """How many workers to use when nobody says: the cores we may use, where forking is safe."""
    if not sys.platform.startswith("linux") or device != "cpu":
        return 1
    return cores()


class LocalEngine:
    """Runs clients on this machine. Use it as a context manager."""

    def __init__(self, setup: Setup, workers: int | None = None) -> None:
        self._setup = setup
        self.sizes = setup.task.sizes()
        slots = setup.training.cohort_size(int((self.sizes > 0).sum()))
        self.workers = max(1, min(workers or available_workers(setup.device), max(slots, 2)))
        if setup.device != "cpu":
            self.workers = 1
        self._slots = slots
        self._crew: _Crew | None = None
        self._client: Client | None = None

    def __enter__(self) -> LocalEngine:
        if self.workers > 1:
            self._crew = _Crew(self._setup, self.workers, self._slots, self.sizes)
        else:
            self._client = Client(self._setup)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._crew is not None:
            self._crew.stop()
        self._crew = self._client = None

    def exchange(self, orders: Sequence[Order]) -> Iterator[Reply]:
        """Answer every order."""
        if self._crew is not None:
            yield from self._crew.exchange(orders)
        elif self._client is not None:
            for unit in units_of_work(orders, self.sizes, self._setup):
                yield from _answer(self._client, unit, [None] * len(unit))
        else:
            raise RuntimeError("LocalEngine is used outside its `with` block")


def units_of_work(orders: Sequence[Order], sizes: np.ndarray, setup: Setup) -> list[list[Order]]:
    """What one worker does at a time: an order, or a stack of them. It depends on the orders, not on the workers."""
    if not orders or orders[0].kind != "train":
        return [[order] for order in orders]
    longest_first = sorted(orders, key=lambda order: -int(sizes[order.client]) * order.work)
    if setup.trainer == "client":
        return [[order] for order in longest_first]
    # Stacks of clients with alike numbers of samples, who finish together, and of alike work, to share out evenly.
    work = np.array([int(sizes[order.client]) * order.work for order in longest_first], dtype=np.float64)
    stacks = STACKS_TO_SHARE * -(-len(orders) // setup.stack_size)
    which = ((work.cumsum() - work / 2) * stacks // work.sum()).astype(np.int64)
    units: list[list[Order]] = [[] for _ in range(stacks)]
    for order, at in zip(longest_first, which, strict=True):
        units[at].append(order)
    size = setup.stack_size
    return [unit[first : first + size] for unit in units for first in range(0, len(unit), size)]


STACKS_TO_SHARE = 2
"""How many times more stacks than the clients would fill: more of them leave no worker idle, fewer cost less."""


def _answer(client: Client, unit: Sequence[Order], buffers: Sequence[Tensor | None]) -> list[Reply]:
    if unit[0].kind == "train" and client.setup.trainer == "stack":
        return client.answer_stack(unit, buffers)
    return [client.answer(order, buffer) for order, buffer in zip(unit, buffers, strict=True)]


def _shared(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A matrix that forked processes share; it needs no room in /dev/shm."""
    size = max(1, rows * columns * dtype.itemsize)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype, count=rows * columns).view(rows, columns)


class _Post:
    """What passes through pipes: tensors in shared memory by name, the small others as arrays."""

    def __init__(self, model: Tensor, updates: Tensor) -> None:
        self._shared = [*updates, model]
        self._names = {tensor.data_ptr(): name for name, tensor in enumerate(self._shared)}

    def pack(self, message: Any) -> bytes:
        """As bytes."""
        file = io.BytesIO()
        _Packer(file, self._names).dump(message)
        return file.getvalue()

    def unpack(self, message: bytes) -> Any:
        """Back again."""
        return _Unpacker(io.BytesIO(message), self._shared).load()


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, names: dict[int, int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._names = names

    def persistent_id(self, value: Any) -> int | None:
        return self._names.get(value.data_ptr()) if isinstance(value, Tensor) and value.ndim == 1 else None

    def reducer_override(self, value: Any) -> Any:
        """Torch would open a file descriptor for each tensor."""
        return (torch.from_numpy, (value.numpy(),)) if isinstance(value, Tensor) else NotImplemented


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: list[Tensor]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, name: int) -> Tensor:
        return self._shared[name]


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    job: list[Order] | None = None


class _Crew:
    """The worker processes and the memory they share with us: one model, and a row for each update."""

    def __init__(self, setup: Setup, workers: int, slots: int, sizes: np.ndarray) -> None:
        self._setup, self._sizes = setup, sizes
        self._model = _shared(1, setup.layers.numel, setup.layers.dtype)[0]
        self._updates = _shared(slots, setup.layers.numel, setup.layers.dtype)
        self._post = _Post(self._model, self._updates)
        self._slot: dict[int, int] = {}  # client -> its row
        self._home: dict[int, int] = {}  # client -> the worker that keeps its update
        self._team: list[_Worker] = []
        for _ in range(workers):
            self._team.append(self._hire())

    def _hire(self) -> _Worker:
        ours, theirs = mp.Pipe()
        inherited = [worker.pipe for worker in self._team] + [ours]
        process = mp.get_context("fork").Process(
            target=_work, args=(self._setup, self._model, self._updates, theirs, inherited), daemon=True
        )
        with held_back():  # until it can answer in its own way
            process.start()
        theirs.close()
        return _Worker(process, ours)

    def exchange(self, orders: Sequence[Order]) -> Iterator[Reply]:
        if not orders:
            return
        if orders[0].model is not None:
            self._model.copy_(orders[0].model)
            orders = [replace(order, model=self._model) for order in orders]
        if orders[0].kind == "train":
            self._slot = {order.client: slot for slot, order in enumerate(orders)}
            self._home = {}
        queues = self._assign(units_of_work(orders, self._sizes, self._setup))
        self._next(range(len(self._team)), queues)
        while busy := {w.pipe: at for at, w in enumerate(self._team) if w.job is not None}:
            for pipe in wait(list(busy)):
                at = busy[pipe]  # type: ignore[index]
                unit = self._team[at].job or []
                replies = self._receive(at)
                if isinstance(replies, str) and len(unit) > 1:  # one of a stack took the worker down: find out which
                    queues[None].extend([order] for order in unit)
                    replies = []
                elif isinstance(replies, str):
                    replies = [unit[0].failure(replies)]
                self._next([at], queues)  # it goes on while we look at what it did
                yield from replies

    def _assign(self, units: list[list[Order]]) -> dict[int | None, deque[list[Order]]]:
        """A queue per worker for those who must answer themselves (they keep the update), one for all the rest."""
        queues: dict[int | None, deque[list[Order]]] = {at: deque() for at in range(len(self._team))}
        queues[None] = deque()
        for unit in units:
            queues[self._home.get(unit[0].client) if unit[0].kind == "upload" else None].append(unit)
        return queues

    def _next(self, which: Iterable[int], queues: dict[int | None, deque[list[Order]]]) -> None:
        """Give some workers their next unit. They may take our place at once, so all is packed before any is sent."""
        ready: list[tuple[_Worker, bytes]] = []
        for at in which:
            queue, worker = queues[at] or queues[None], self._team[at]
            if not queue:
                continue
            unit = worker.job = queue.popleft()
            if unit[0].kind == "train":
                self._home |= dict.fromkeys((order.client for order in unit), at)
            ready.append((worker, self._post.pack((unit, [self._slot.get(order.client) for order in unit]))))
        for worker, message in ready:
            with suppress(OSError):  # a worker that has died is noticed when its reply is awaited
                worker.pipe.send_bytes(message)

    def _receive(self, at: int) -> list[Reply] | str:
        """What a worker answers; or how it died, in which case there is a new one in its place."""
        worker = self._team[at]
        worker.job = None
        try:
            replies: list[Reply] = self._post.unpack(worker.pipe.recv_bytes())
        except (EOFError, OSError):
            worker.process.join()
            worker.pipe.close()
            self._team[at] = self._hire()
            return f"worker process died with exit code {worker.process.exitcode}"
        return replies

    def stop(self) -> None:
        for worker in self._team:
            worker.pipe.close()
            worker.process.kill()  # it keeps nothing, and may be stopped, when it would not hear anything else
        for worker in self._team:
            worker.process.join()


def _work(setup: Setup, model: Tensor, updates: Tensor, pipe: Connection, inherited: list[Connection]) -> None:
    """A worker's life: answer orders until the pipe closes."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    leave_to_parent(signal.SIGINT, signal.SIGHUP)
    for other in inherited:  # or a pipe would stay open after the parent's death
        other.close()
    torch.set_num_threads(1)
    keep_memory()
    client, post = Client(setup), _Post(model, updates)
    with suppress(EOFError, OSError):
        while True:
            orders, slots = post.unpack(pipe.recv_bytes())
            buffers = [None if slot is None else updates[slot] for slot in slots]
            pipe.send_bytes(post.pack(_answer(client, orders, buffers)))
    os._exit(0)


def keep_memory() -> None:
    """Ask glibc not to give freed memory back: a training step frees what the next one needs again."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
