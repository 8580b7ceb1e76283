"""Small models, tasks and cohorts for the mathematical tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedstrata.clients.client import Client
from fedstrata.clients.training import Setup, build_model
from fedstrata.core.axes import Algorithm
from fedstrata.core.cohort import Cohort
from fedstrata.core.fit import Plan, fit
from fedstrata.core.grouping import Grouping
from fedstrata.core.layers import Layers
from fedstrata.core.messages import Answer, Order, Reply
from fedstrata.core.record import RoundRecord
from fedstrata.core.state import ServerState, initial_state
from fedstrata.core.status import Status
from fedstrata.engines.local import LocalEngine
from fedstrata.objectives import Plain
from fedstrata.recipes.schema import Training
from fedstrata.selections import Everything
from fedstrata.tasks.task import Task
from fedstrata.weightings import SampleSize

FEDAVG = Algorithm(Plain(), Everything(), SampleSize())


class Tiny(nn.Module):
    """conv – BatchNorm – ReLU – linear on 1×4×4 images: 75 trainable numbers, 6 statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.bn = nn.BatchNorm2d(3)
        self.fc = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.bn(self.conv(x))).flatten(1))


class Vectors(nn.Module):
    """Bare parameters p0, p1, … of the given lengths: layers for hand-made updates."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        for at, size in enumerate(sizes):
            self.register_parameter(f"p{at}", nn.Parameter(torch.zeros(size, dtype=torch.float64)))


def vectors(*sizes: int) -> Layers:
    """One layer for each size."""
    return Layers.of(Vectors(*sizes), "tensor")


def cohort(
    layers: Layers,
    updates: Sequence[Sequence[float]],
    sizes: Sequence[float],
    *,
    sent: Sequence[Sequence[bool]] | None = None,
    clients: Sequence[int] | None = None,
    round: int = 1,
    model: Tensor | None = None,
    units: Tensor | None = None,
    reach: Sequence[float] | None = None,
) -> Cohort:
    """A cohort from plain lists."""
    count = len(updates)
    mask = torch.ones(count, len(layers), dtype=torch.bool) if sent is None else torch.tensor(sent)
    return Cohort(
        round=round,
        clients=torch.tensor(list(range(count)) if clients is None else clients),
        sizes=torch.tensor(sizes, dtype=torch.float64),
        layers=layers,
        updates=tuple(torch.tensor(row, dtype=torch.float64) for row in updates),
        sent=mask,
        model=torch.zeros(layers.numel, dtype=torch.float64) if model is None else model,
        units=units,
        reach=None if reach is None else torch.tensor(reach, dtype=torch.float64),
    )


def image_task(sizes: Sequence[int], model: Callable[[], nn.Module] = Tiny, *, seed: int = 7) -> Task:
    """Random 1×4×4 images of three classes; every client has its own bias in inputs and labels."""
    draw = np.random.default_rng(seed)
    clients = []
    for at, size in enumerate(sizes):
        labels = (draw.integers(0, 2, size) + at) % 3
        images = draw.normal(size=(size, 1, 4, 4)) + labels[:, None, None, None] * 0.7 - 0.1 * at
        clients.append((torch.from_numpy(images), torch.from_numpy(labels)))
    return Task(model=model, clients=clients)


def linear_task(sizes: Sequence[int], *, inputs: int = 3, classes: int = 2, seed: int = 3) -> Task:
    """A single Linear layer on random vectors."""
    draw = np.random.default_rng(seed)
    clients = [
        (torch.from_numpy(draw.normal(size=(size, inputs))), torch.from_numpy(draw.integers(0, classes, size)))
        for size in sizes
    ]
    return Task(model=lambda: nn.Linear(inputs, classes), clients=clients)


def prepare(
    task: Task,
    algorithm: Algorithm,
    training: Training,
    *,
    seed: int = 0,
    grouping: Grouping | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Setup, Plan, ServerState]:
    """Everything a run needs."""
    build = partial(build_model, task, seed, dtype)
    model = build()
    layers = Layers.of(model, algorithm.grouping if grouping is None else grouping, algorithm.private)
    setup = Setup(task, layers, algorithm.objective, algorithm.selection, training.local, seed, build)
    state = initial_state(layers.flatten(model), algorithm, len(task.clients), layers)
    is_own = task.train is not None
    plan = Plan(layers, training.rounds, training.participation, training.local, seed, reports_steps=is_own)
    return setup, plan, state


def run(
    task: Task, algorithm: Algorithm, training: Training, **options: object
) -> tuple[list[ServerState], list[RoundRecord]]:
    """All rounds on the local engine; the states begin with the initial one."""
    setup, plan, state = prepare(task, algorithm, training, **options)  # type: ignore[arg-type]
    states, records = [state], []
    with LocalEngine(setup, workers=1) as engine:
        for after, record in fit(state, algorithm, engine, plan):
            states.append(after)
            records.append(record)
    return states, records


class FaultyEngine:
    """A client in this process whose replies pass through `change(reply, order)`; None is a reply that never comes."""

    def __init__(self, setup: Setup, change: Callable[[Reply, Order], Answer | None] = lambda reply, order: reply):
        self.sizes = setup.task.sizes()
        self.client, self.change = Client(setup), change
        self.orders: list[Order] = []

    def exchange(self, orders: Sequence[Order]) -> Iterator[tuple[Order, Answer]]:
        self.orders += orders
        for order in orders:
            answer: Answer | None = self.client.answer(order)
            if isinstance(answer, Reply):
                answer = self.change(answer, order)
            if answer is not None:
                yield order, answer


def fit_faulty(
    task: Task,
    algorithm: Algorithm,
    training: Training,
    change: Callable[[Reply, Order], Answer | None] = lambda reply, order: reply,
    **options: object,
) -> tuple[FaultyEngine, list[ServerState], list[RoundRecord]]:
    """Like `run`, on a `FaultyEngine`."""
    setup, plan, state = prepare(task, algorithm, training, **options)  # type: ignore[arg-type]
    engine = FaultyEngine(setup, change)
    states, records = [state], []
    for after, record in fit(state, algorithm, engine, plan):
        states.append(after)
        records.append(record)
    return engine, states, records


def words(record: RoundRecord) -> tuple[str, ...]:
    """What became of each client, in words."""
    return tuple(map(str, record.status))


def by_client(record: RoundRecord) -> dict[int, str]:
    """The same, by the clients' names."""
    return dict(zip(record.clients.tolist(), words(record), strict=True))


def missing(entries: Sequence[Mapping[str, Any]]) -> list[tuple[int, Status]]:
    """Who is missing, as a line of a run's history has it in `lost` or `unmeasured`."""
    return [(entry["client"], Status(entry["kind"], entry["reason"])) for entry in entries]


def poisoned(reply: Reply, value: float) -> Reply:
    """The same reply with one number of its update replaced."""
    assert reply.update is not None
    update = reply.update.clone()
    update[0] = value
    return replace(reply, update=update)


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Watched:
    """Data that remembers how it was read."""

    def __init__(self, size: int, log: list[np.ndarray], fail: Exception | None = None) -> None:
        draw = torch.Generator().manual_seed(size)
        self.inputs = torch.randn(size, 3, generator=draw, dtype=torch.float64)
        self.targets = torch.randint(0, 2, (size,), generator=draw)
        self.log, self.fail = log, fail

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        if self.fail is not None:
            raise self.fail
        self.log.append(indices.copy())
        return self.inputs[torch.from_numpy(indices)], self.targets[torch.from_numpy(indices)]


def watched_task(*sizes: int) -> tuple[Task, list[list[np.ndarray]]]:
    logs: list[list[np.ndarray]] = [[] for _ in sizes]
    return Task(lambda: nn.Linear(3, 2), [Watched(n, log) for n, log in zip(sizes, logs, strict=True)]), logs


FOUR = linear_task([5, 6, 7, 8])


def without(client: int, sizes=(5, 6, 7, 8)) -> Task:
    """FOUR with one client's data taken away: what a round without it looks like."""
    empty = (torch.zeros(0, 3, dtype=torch.float64), torch.zeros(0, dtype=torch.int64))
    return replace(FOUR, clients=[empty if at == client else FOUR.clients[at] for at in range(len(sizes))])
