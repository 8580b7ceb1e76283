"""The local engine: every client in this process, or in forked worker processes with one thread each.

Workers only change who computes an order, never its result; nor does one that is killed. They are forked after the data
is loaded, so that it is shared, not copied; models and updates pass through memory mapped before the fork, everything
else through pipes.
"""

from __future__ import annotations

import io
import mmap
import multiprocessing as mp
import os
import pickle
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstrata.clients.client import Client, Kept
from fedstrata.clients.training import Setup
from fedstrata.core.determinism import cores
from fedstrata.core.errors import ModelError
from fedstrata.core.messages import Answer, Order, Reply
from fedstrata.core.status import Status
from fedstrata.core.versions import Versions
from fedstrata.processes import held_back, keep_memory, leave_to_parent


def available_workers(device: str = "cpu") -> int:
    """How many workers to use when nobody says: the cores we may use, where forking is safe."""
    if not sys.platform.startswith("linux") or device != "cpu":
        return 1
    return cores()


class LocalEngine:
    """Runs clients on this machine. Use it as a context manager."""

    def __init__(self, setup: Setup, workers: int | None = None, cohort: int | None = None) -> None:
        """`cohort` is the most clients that a round has; if not given, all of them may be in one."""
        self._setup = setup
        self.sizes = setup.task.sizes()
        self._slots = int((self.sizes > 0).sum()) if cohort is None else cohort
        wanted = workers if workers and setup.device == "cpu" else available_workers(setup.device)
        self.workers = min(wanted, max(self._slots, 2))
        self._crew: _Crew | None = None
        self._client: Client | None = None
        self.versions = Versions()
        """The clients' memory."""

    def __enter__(self) -> LocalEngine:
        self._client = Client(self._setup)
        if self.workers > 1:
            self._crew = _Crew(self._client, self.workers, self._slots, self.sizes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._crew is not None:
            self._crew.stop()
        self._crew = self._client = None

    def exchange(self, orders: Sequence[Order]) -> Iterator[tuple[Order, Answer]]:
        """Answer every order."""
        if self._client is None:
            raise RuntimeError("LocalEngine is used outside its `with` block")
        if self._crew is None or not orders or orders[0].kind == "upload":  # what was kept lies in our own memory
            answers: Iterator[tuple[Order, Answer]] = (
                (order, self._client.answer(self.versions.attached(order))) for order in orders
            )
        else:
            turns = self._crew.in_turns(orders)
            answers = chain.from_iterable(self._crew.exchange(some, self.versions.attached) for some in turns)
        yield from ((order, self.versions.detached(order, answer)) for order, answer in answers)


def _shared(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A matrix that forked processes share; it needs no room in /dev/shm."""
    size = rows * columns * dtype.itemsize
    if size == 0:
        return torch.empty(rows, columns, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype, count=rows * columns).view(rows, columns)


class _Post:
    """What passes through pipes: tensors in shared memory by name, the small others as arrays."""

    def __init__(self, shared: list[Tensor]) -> None:
        self._shared = shared
        self._names = {tensor.data_ptr(): name for name, tensor in enumerate(shared) if len(tensor)}

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
class _Job:
    """An order, memory for its update, and, for each worker that died of it, whether that one had begun with it."""

    order: Order
    shared: Order
    """The same with the model in shared memory."""
    row: Tensor | None = None
    deaths: list[bool] = field(default_factory=list)


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    job: _Job | None = None


class _Crew:
    """The worker processes and the memory they share with us: a model, and a row for each update (or another model)."""

    def __init__(self, client: Client, workers: int, slots: int, sizes: np.ndarray) -> None:
        layers = client.setup.layers
        self._client, self._sizes = client, sizes
        model = _shared(1, layers.numel, layers.dtype)[0]
        self._rows = list(_shared(slots, layers.numel, layers.dtype))
        self._begun = mmap.mmap(-1, workers)
        self._places = [model, *self._rows]
        self._post = _Post(self._places)
        self._team: list[_Worker] = []
        for at in range(workers):
            self._team.append(self._hire(at))

    def _hire(self, at: int) -> _Worker:
        ours, theirs = mp.Pipe()
        inherited = [worker.pipe for worker in self._team] + [ours]
        process = mp.get_context("fork").Process(
            target=_work, args=(self._client, self._post, self._begun, at, theirs, inherited), daemon=True
        )
        with held_back():  # until it can answer in its own way
            process.start()
        theirs.close()
        return _Worker(process, ours)

    def in_turns(self, orders: Sequence[Order]) -> Iterator[Sequence[Order]]:
        """Orders for which there is room: of one model all at once; of more, the rows of updates have room as well."""
        turn: list[Order] = []
        models: set[int] = set()
        for order in orders:
            if id(order.model) not in models and len(models) == len(self._places):
                yield turn
                turn, models = [], set()
            turn.append(order)
            models.add(id(order.model))
        yield turn

    def exchange(
        self, orders: Sequence[Order], attached: Callable[[Order], Order] = lambda order: order
    ) -> Iterator[tuple[Order, Answer]]:
        """Every order's answer. A worker that dies changes none: its order is given out once more, whole.

        An order goes to a worker with the client's memory `attached`.
        """
        places: dict[int, Tensor] = {}
        for order in orders:
            assert order.model is not None
            if id(order.model) not in places:
                places[id(order.model)] = self._places[len(places)]
                places[id(order.model)].copy_(order.model)
        jobs = deque(_Job(order, replace(attached(order), model=places[id(order.model)])) for order in orders)
        if orders[0].kind == "train":
            self._client.kept.clear()
            for slot, job in enumerate(jobs):
                job.row = self._rows[slot]
            jobs = deque(sorted(jobs, key=lambda job: -int(self._sizes[job.order.client]) * job.order.work))
        self._give(range(len(self._team)), jobs)
        while busy := {worker.pipe: at for at, worker in enumerate(self._team) if worker.job is not None}:
            for pipe in wait(list(busy)):
                at = busy[pipe]  # type: ignore[index]
                answered = self._receive(at, jobs)
                self._give([at], jobs)  # it goes on while we look at what it did
                if answered is not None:
                    yield answered

    def _give(self, which: Iterable[int], jobs: deque[_Job]) -> None:
        """Give some workers their next order. They may take our place at once, so all is packed before any is sent."""
        ready: list[tuple[_Worker, bytes]] = []
        for at, _ in zip(which, range(len(jobs)), strict=False):
            worker = self._team[at]
            worker.job = jobs.popleft()
            self._begun[at] = False
            ready.append((worker, self._post.pack((worker.job.shared, worker.job.row))))
        for worker, message in ready:
            with suppress(OSError):  # a worker that has died is noticed when its reply is awaited
                worker.pipe.send_bytes(message)

    def _receive(self, at: int, jobs: deque[_Job]) -> tuple[Order, Answer] | None:
        """What a worker answers. If it died, there is a new one in its place, and its order waits for another turn."""
        worker = self._team[at]
        job, worker.job = worker.job, None
        assert job is not None
        order = job.order
        try:
            message = worker.pipe.recv_bytes()
        except (EOFError, OSError):
            worker.pipe.close()
            worker.process.join()
            job.deaths.append(bool(self._begun[at]))
            self._team[at] = self._hire(at)
            if sum(job.deaths) < _TURNS and len(job.deaths) < _STARTS:
                jobs.append(job)  # the last, when it may have the machine to itself
                return None
            code, times = worker.process.exitcode, len(job.deaths)
            return order, Status("failed", f"worker process died {times} times, the last time with exit code {code}")
        answer: Answer | ModelError = self._post.unpack(message)
        if isinstance(answer, ModelError):
            raise answer
        if job.row is not None and order.answer == "scores" and isinstance(answer, Reply):
            kept = Kept(order.round, order.attempt, int(answer.size or 0), job.row, answer.memory, answer.candidate)
            self._client.kept[order.client] = kept
        return order, answer

    def stop(self) -> None:
        for worker in self._team:
            worker.pipe.close()
            worker.process.kill()  # it keeps nothing, and may be stopped, when it would not hear anything else
        for worker in self._team:
            worker.process.join()


_TURNS = 2
"""So many workers must die after they have begun with an order, for it to be the fault of its client."""
_STARTS = 10
"""So many at all: there may be a machine on which no process lives long enough to begin."""


def _work(
    client: Client, post: _Post, begun: mmap.mmap, at: int, pipe: Connection, inherited: list[Connection]
) -> None:
    """A worker's life: answer orders until the pipe closes."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    leave_to_parent(signal.SIGINT, signal.SIGHUP)
    for other in inherited:  # or a pipe would stay open after the parent's death
        other.close()
    torch.set_num_threads(1)
    keep_memory()
    with suppress(EOFError, OSError):
        while True:
            order, row = post.unpack(pipe.recv_bytes())
            begun[at] = True
            answer: Answer | ModelError
            try:
                answer = client.answer(order, row)
            except ModelError as error:
                answer = error
            pipe.send_bytes(post.pack(answer))
    os._exit(0)
