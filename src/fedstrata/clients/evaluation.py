"""Measuring a model: on the server's data sets, on the clients' own held-out data, or both.

Evaluation is an order like any other, so it goes through the engine, and every engine gives the same results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from fedstrata.core import rng
from fedstrata.core.axes import State
from fedstrata.core.errors import FedstrataError, NotFinite, ReplyError
from fedstrata.core.fit import Engine
from fedstrata.core.memory import PRIVATE, Tag, Version, tags
from fedstrata.core.messages import Order, Reply, check_size, judge
from fedstrata.core.status import SILENT, Status
from fedstrata.core.versions import Versions
from fedstrata.tasks.metric import Metric
from fedstrata.tasks.task import Task

PART = 2000
"""Samples in one order on the server's data: small enough for workers to share a data set, the same on every engine."""

Results = dict[str, dict[str, float]]
"""Per data set: loss, the metric, samples; for clients also the spread over them."""

Unmeasured = list[tuple[int, Status]]
"""The clients without a usable answer, and why."""

Each = dict[str, np.ndarray]
"""What every client was measured to, [K]: `client`, `samples`, `loss`, the `metric`, and if it has `taken_part`."""

NEWCOMERS = "newcomers"
"""The clients that have not taken part yet, where those that did have something of their own."""


def evaluate(
    engine: Engine,
    task: Task,
    model: Tensor,
    on: Sequence[str],
    round: int,
    seed: int,
    clients: int | None = None,
    attempt: int = 0,
    memory: State | None = None,
    fine_tune: int = 0,
    private: str | None = None,
) -> tuple[Results, Unmeasured, Each]:
    """Evaluate a model on the server's named sets, and on `clients`, if `on` has that name.

    `memory` is the table of what clients remember: each is measured with its own private layers. Those that have not
    taken part yet have the first ones, and results of their own, `newcomers`. With `fine_tune`, clients first train a
    copy for so many epochs on their training data. On the server private layers are the first ones, or, with `private`
    = "mean", the mean of those of all clients that took part.

    `attempt` is the round's own: a node refuses orders of earlier ones. Clients that do not answer, or nonsense, end
    nothing; without any other there are no results of clients. If everyone who could be asked was, and failed, the
    mistake would be repeated.
    """
    orders: dict[str, list[Order]] = {}
    base = tags(memory or {})
    of_server = _mean_private(engine, base) if private == "mean" else None
    for name in on:
        if name == "clients":
            who = _holders(task, clients, seed, round)
            orders[name] = [
                Order("evaluate", round, attempt, int(k), model=model, base=base.get(int(k)), fine_tune=fine_tune)
                for k in who
            ]
        else:
            orders[name] = _server_orders(task, model, name, round, attempt, of_server)
    results: Results = {}
    unmeasured: Unmeasured = []
    each: Each = {}
    for name, asked in orders.items():
        samples = task.held_out_sizes() if name == "clients" else None
        found, missing = _collect(engine, asked, samples, task.metric.name)
        good = list(found.values())
        everyone = samples is None or len(asked) == np.count_nonzero(samples)
        hopeless = everyone and not good and all(why.kind == "failed" for _, why in missing)
        if hopeless or (name != "clients" and (missing or not sum(reply.size or 0 for reply in good))):
            reason = str(missing[0][1]) if missing else "nobody has any sample"
            raise FedstrataError(f"evaluation on {name} in round {round}: {reason}")
        if name != "clients":
            results[name] = _combine(good, task.metric.name)
            continue
        unmeasured, each = missing, _each(found, task.metric.name)
        by_place: dict[str, list[Reply]] = {name: [], NEWCOMERS: []}
        for order, reply in found.items():
            by_place[NEWCOMERS if memory and order.base is None else name].append(reply)
        for place, replies in by_place.items():
            if replies:
                results[place] = _combine(replies, task.metric.name) | _spread(replies, task.metric.name)
                results[place]["worst_tenth"] = worst_tenth(replies, task.metric)
                results[place] |= {"failed": float(len(missing))} if place == name else {}
    return results, unmeasured, each


def _mean_private(engine: Engine, base: Mapping[int, Tag]) -> Version | None:
    """The clients' mean private layers, where one process has them all."""
    versions: Versions | None = getattr(engine, "versions", None)
    if versions is None or not base:
        return None
    found = [versions.of(client, tag)[PRIVATE].double() for client, tag in base.items()]
    total = found[0].clone()
    for one in found[1:]:
        total += one
    return {PRIVATE: (total / len(found)).to(versions.of(*next(iter(base.items())))[PRIVATE].dtype)}


def measure(
    engine: Engine, task: Task, models: Sequence[Tensor], on: str, round: int, attempt: int = 0
) -> list[dict[str, float]]:
    """Several models on one of the server's sets, all at once: what `evaluate` says of each of them."""
    asked = [_server_orders(task, model, on, round, attempt) for model in models]
    status, good = _answers(engine, [order for orders in asked for order in orders], lambda order, reply: None)
    for order, why in status.items():
        if order not in good:
            raise FedstrataError(f"evaluation on {on} in round {round}: {why}")
    return [_combine([good[order] for order in orders], task.metric.name) for orders in asked]


def _server_orders(
    task: Task, model: Tensor, name: str, round: int, attempt: int, memory: Version | None = None
) -> list[Order]:
    """A model on one of the server's sets, in parts."""
    parts = 1 if task.metric.whole else -(-len(task.server_data(name)) // PART)
    return [
        Order("evaluate", round, attempt, rng.SERVER, model=model, dataset=name, part=(part, parts), memory=memory)
        for part in range(parts)
    ]


def _collect(
    engine: Engine, orders: Sequence[Order], samples: np.ndarray | None, metric: str
) -> tuple[dict[Order, Reply], Unmeasured]:
    """The usable replies, by client and part, and why others are not; `samples` is how many each client holds out."""

    def check(order: Order, reply: Reply) -> None:
        if samples is not None:
            check_size(reply.size, int(samples[order.client]), order)
            _check_metrics(reply, metric)

    status, good = _answers(engine, orders, check)
    in_order = sorted(orders, key=lambda order: (order.client, order.part))
    missing = [(order.client, status[order]) for order in in_order if order not in good]
    return {order: good[order] for order in in_order if order in good}, missing


def _answers(
    engine: Engine, orders: Sequence[Order], check: Callable[[Order, Reply], None]
) -> tuple[dict[Order, Status], dict[Order, Reply]]:
    """What became of each order, and the replies that can be used."""
    status, good = dict.fromkeys(orders, SILENT), {}
    waiting = set(orders)
    for order, answer in engine.exchange(orders):
        if order not in waiting:
            continue  # nobody asked it, or it has answered already
        waiting.remove(order)
        status[order], reply = judge(answer, partial(check, order))
        if reply is not None:
            good[order] = reply
    return status, good


def _check_metrics(reply: Reply, metric: str) -> None:
    """Of a client: one that says NaN must not make the whole federation's metric one. A loss may be so large."""
    for name in ("loss", metric):
        if name not in reply.metrics:
            raise ReplyError(f"{name} is missing")
    if not math.isfinite(reply.metrics[metric]):
        raise NotFinite(metric)


def _holders(task: Task, count: int | None, seed: int, round: int) -> np.ndarray:
    """The clients to ask: those with held-out data, all or a sample."""
    who = np.flatnonzero(task.held_out_sizes())
    if count is None or count >= len(who):
        return who
    return np.sort(rng.generator(seed, "evaluation", round=round).choice(who, count, replace=False))


def _combine(replies: Sequence[Reply], metric: str) -> dict[str, float]:
    """Means over samples."""
    sizes = [reply.size or 0 for reply in replies]
    means = {
        name: sum(reply.metrics[name] * size for reply, size in zip(replies, sizes, strict=True)) / sum(sizes)
        for name in ("loss", metric)
    }
    return means | {"samples": float(sum(sizes))}


def _each(found: Mapping[Order, Reply], metric: str) -> Each:
    """Every client's results."""
    columns = {
        "client": [order.client for order in found],
        "samples": [int(reply.size or 0) for reply in found.values()],
        "loss": [reply.metrics["loss"] for reply in found.values()],
        "metric": [reply.metrics[metric] for reply in found.values()],
        "taken_part": [order.base is not None for order in found],
    }
    return {name: np.array(column) for name, column in columns.items()}


def worst_tenth(replies: Sequence[Reply], metric: Metric) -> float:
    """The mean over the tenth of the clients that fare worst, at least one."""
    values = sorted((reply.metrics[metric.name] for reply in replies), reverse=metric.direction == "min")
    return float(np.mean(values[: max(1, len(values) // 10)]))


def _spread(replies: Sequence[Reply], metric: str) -> dict[str, float]:
    """How differently the clients fare."""
    values = np.array([reply.metrics[metric] for reply in replies])
    return {
        "clients": float(len(values)),
        "std": float(values.std()),
        "min": float(values.min()),
        "median": float(np.median(values)),
        "max": float(values.max()),
    }
