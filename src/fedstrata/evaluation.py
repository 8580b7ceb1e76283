"""Measuring a model: on the server's data sets, on the clients' own held-out data, or both.

Evaluation is an order like any other, so it goes through the engine, and every engine gives the same figures.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fedstrata import rng
from fedstrata.errors import FedstrataError
from fedstrata.messages import Order, Reply
from fedstrata.rounds import Engine
from fedstrata.tasks.task import Task

PART = 2000
"""Samples in one order on the server's data: small enough for workers to share a data set, the same on every engine."""

Figures = dict[str, dict[str, float]]
"""Per data set: loss, the metric, samples; for clients also the spread over them."""


def evaluate(
    engine: Engine, task: Task, model: Tensor, on: Sequence[str], round: int, seed: int, clients: int | None = None
) -> Figures:
    """Evaluate a model on the server's named sets, and on `clients`, if `on` has that name."""
    orders: dict[str, list[Order]] = {}
    for name in on:
        if name == "clients":
            who = _holders(task, clients, seed, round)
            orders[name] = [Order("evaluate", round, 0, int(k), model=model) for k in who]
        else:
            parts = 1 if task.metric.whole else -(-len(task.server_data(name)) // PART)
            orders[name] = [
                Order("evaluate", round, 0, rng.SERVER, model=model, dataset=name, part=(part, parts))
                for part in range(parts)
            ]
    figures: Figures = {}
    for name, asked in orders.items():
        replies = {(reply.client, reply.part): reply for reply in engine.exchange(asked)}
        broken = [problem for reply in replies.values() if (problem := _problem(reply, round, task.metric.name))]
        answered = [reply for _, reply in sorted(replies.items()) if not _problem(reply, round, task.metric.name)]
        good = [reply for reply in answered if reply.size > 0]
        if not good or (broken and name != "clients"):
            reason = broken[0] if broken else "nobody has any sample" if answered else "nobody answered"
            raise FedstrataError(f"evaluation on {name} failed in round {round}: {reason}")
        figures[name] = _combine(good, task.metric.name)
        if name == "clients":
            figures[name] |= _spread(good, task.metric.name)
            figures[name]["failed"] = float(len(asked) - len(good))
    return figures


def _problem(reply: Reply, round: int, metric: str) -> str | None:
    """Why a reply cannot be used; the server trusts nothing that a client says."""
    if reply.error is not None:
        return reply.error
    if (reply.kind, reply.round) != ("evaluate", round):
        return f"{reply.kind} of round {reply.round} instead of this evaluation"
    missing = [name for name in ("loss", metric) if name not in reply.metrics]
    return f"{missing[0]} is missing" if missing else None


def _holders(task: Task, count: int | None, seed: int, round: int) -> np.ndarray:
    """The clients to ask: those with held-out data, all or a sample."""
    who = np.flatnonzero(task.held_out_sizes())
    if count is None or count >= len(who):
        return who
    return np.sort(rng.generator(seed, "evaluation", round=round).choice(who, count, replace=False))


def _combine(replies: Sequence[Reply], metric: str) -> dict[str, float]:
    """Means over samples."""
    samples = sum(reply.size for reply in replies)
    return {name: sum(reply.metrics[name] * reply.size for reply in replies) / samples for name in ("loss", metric)} | {
        "samples": float(samples)
    }


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
