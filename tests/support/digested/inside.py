"""The cases that need the inside. Adapt this file to where things are, and what they are called.

An engine that loses replies and answers nonsense, a server step, and the records of rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedstrata
from fedstrata.core.status import Status
from fedstrata.runs.engine import open_engine
from fedstrata.runs.runner import create_run, run_rounds
from tests.support.digested.recipes import ALL, BASE, CHOSEN, MODELS, RETRIES, merged
from tests.support.digested.values import (
    Case,
    Values,
    as_arrays,
    contents,
    ending,
    leaves,
    no_values,
    values_of_run,
)

CASES: dict[str, Case] = {}


# --- records of rounds -----------------------------------------------------------------------------------------------


def values_of_records(records: Iterable[Any]) -> Values:
    """What a run directory would hold of them."""
    values = no_values()
    for record in records:
        where, ledger = f"round {record.round}", record.ledger
        measured = {"attempt": record.attempt, "train_loss": record.train_loss}
        rows = {"work": record.work, "sizes": record.sizes, "losses": record.losses}
        values["history"] += leaves(measured | {name: row.tolist() for name, row in rows.items()}, where)
        values["layers"] += contents(as_arrays(record.layers), where)
        sent = {"up": ledger.up.tolist(), "down": ledger.down.tolist(), "control": ledger.control}
        values["ledger"] += leaves(sent | {"feedback": [ledger.feedback_numbers, ledger.feedback]}, where)
        for client, status in zip(record.clients.tolist(), record.status, strict=True):
            values["status"].append(f"{where}: client {client} {status.kind}")
        for attempt, client, status in record.earlier:
            values["status"].append(f"{where}.{attempt}: client {client} {status.kind}")
    return values


# --- a server step, which no recipe can name -------------------------------------------------------------------------


@dataclass(frozen=True)
class Momentum:
    beta: float = 0.9

    def init(self, layers: Any) -> Mapping[str, Tensor]:
        return {"velocity": torch.zeros(layers.numel, dtype=layers.dtype)}

    def step(self, old: Tensor, aggregate: Tensor, state: Any, layers: Any) -> tuple[Tensor, Any]:
        velocity = self.beta * state["velocity"] + (aggregate - old)
        return old + velocity, {"velocity": velocity}


def with_server_step(folder: Path, algorithm: Any) -> Values:
    recipe = fedstrata.load(BASE, algorithm=algorithm, settings=merged(MODELS["batchnorm"], RETRIES))
    _, experiment = create_run(recipe, folder / "run")
    stepping, layers = replace(experiment.algorithm, server=Momentum()), experiment.layers
    with open_engine(experiment) as engine:
        first = fedstrata.initial_state(experiment.initial.clone(), stepping, len(experiment.task.clients), layers)
        states, records = zip(*fedstrata.fit(first, stepping, engine, experiment.plan), strict=True)
    values = values_of_records(records)
    tensors = {name: tensor.contiguous().numpy() for name, tensor in layers.views(states[-1].model).items()}
    values["weights"] += contents(as_arrays(tensors), "at the end")
    return values


for name, algorithm in CHOSEN.items():
    CASES[f"server-step/{name}"] = partial(with_server_step, algorithm=algorithm)


# --- an engine that cannot be relied upon ----------------------------------------------------------------------------


@dataclass
class Unreliable:
    """The local engine, with another thing in the place of some replies, or nothing, or several, now or later.

    `faults(order)` names the fault of the reply to an order, if it is to have one.
    """

    engine: Any
    faults: Callable[[Any], str | None]

    def __post_init__(self) -> None:
        self.sizes = self.engine.sizes
        self.asked: list[str] = []
        self.late: list[Any] = []

    def exchange(self, orders: Sequence[Any]) -> Iterator[Any]:
        for order in orders:
            if order.kind != "evaluate":
                what = f"{order.work} with {None if order.mask is None else order.mask.int().tolist()}"
                self.asked.append(f"asked {order.round}.{order.attempt}: client {order.client} {order.kind} {what}")
        late, self.late = self.late, []
        yield from late
        asked = {order.client: order for order in orders}
        for order, answer in self.engine.exchange(orders):
            fault = self.faults(order)
            yield from [(order, answer)] if fault is None else FAULTS[fault](order, answer, self.late, asked)


Fault = Callable[[Any, Any, list[Any], Mapping[int, Any]], list[Any]]
"""From an order and its true reply to what comes in their place. What is put into the list comes with the next
exchange; the last argument has the exchange's orders by client."""


def late(order: Any, reply: Any, later: list[Any], asked: Mapping[int, Any]) -> list[Any]:
    later.append((order, reply))
    return []


def but(**changes: Any) -> Fault:
    """The reply with other values; a function makes them from the true ones."""

    def fault(order: Any, reply: Any, later: list[Any], asked: Mapping[int, Any]) -> list[Any]:
        found = {name: new(getattr(reply, name)) if callable(new) else new for name, new in changes.items()}
        return [(order, replace(reply, **found))]

    return fault


def status(kind: str, reason: str = "") -> Fault:
    """No reply at all, and why."""
    return lambda order, reply, later, asked: [(order, Status(kind, reason))]  # type: ignore[arg-type]


def in_place(*replies: Callable[[Any, Any, Mapping[int, Any]], tuple[Any, Any]]) -> Fault:
    """These pairs of an order and an answer, one after the other."""
    return lambda order, reply, later, asked: [one(order, reply, asked) for one in replies]


def true(order: Any, reply: Any, asked: Mapping[int, Any]) -> tuple[Any, Any]:
    return order, reply


def empty(order: Any, reply: Any, asked: Mapping[int, Any]) -> tuple[Any, Any]:
    return order, replace(reply, size=0)


def first_is(value: float) -> Callable[[Tensor], Tensor]:
    return lambda update: torch.cat([torch.full_like(update[:1], value), update[1:]])


OF_ANY: dict[str, Fault] = {
    "lost": in_place(),
    "late": late,
    "twice": in_place(true, true),
    "bad-then-good": in_place(empty, true),
    "good-then-bad": in_place(true, empty),
    "for-a-stranger": in_place(lambda order, reply, asked: (replace(order, client=77), reply)),
    "for-another": in_place(lambda order, reply, asked: (asked.get(0), reply)),
    "another-round": status("refused", "round = 9"),
    "another-attempt": status("refused", "attempt = 5"),
    "another-kind": status("refused", "kind = 'evaluate'"),
    "no-samples": but(size=0),
    "more-samples": but(size=lambda size: size + 1),
    "error": status("failed", "boom"),
    "error-not-finite": status("failed", "the loss is not finite"),
    "unreadable": status("refused", "garbage"),
    "unreadable-not-finite": status("refused", "a layer is not finite"),
    "gone": status("no reply", "the node is gone"),
    "no-loss": but(metrics={}),
    "stiffness-short": but(stiffness=torch.zeros(1, dtype=torch.float64)),
}
OF_UPDATES: dict[str, Fault] = {
    "nan": but(update=first_is(np.nan)),
    "inf": but(update=first_is(-np.inf)),
    "another-number": but(update=first_is(0.5)),
    "short": but(update=lambda update: update[:-1]),
    "another-dtype": but(update=lambda update: update.double()),
    "no-update": but(update=None),
    "sent-nothing": but(sent=torch.zeros_like),
    "scores-too": but(scores=torch.ones(2)),
}
OF_UNITS: dict[str, Fault] = {
    "units-stuffed": but(update=lambda update: update.where(update != 0, 9.0)),
    "units-missing": but(units=None),
}
OF_SCORES: dict[str, Fault] = {
    "scores-nan": but(scores=lambda scores: scores * np.nan),
    "scores-short": but(scores=lambda scores: scores[1:]),
    "scores-missing": but(scores=None),
    "scores-equal": but(scores=torch.ones_like),
    "scores-with-layers": but(update=torch.zeros(9)),
}
FAULTS = OF_ANY | OF_UPDATES | OF_UNITS | OF_SCORES


def with_faults(folder: Path, algorithm: str, faults: Callable[[Any], str | None], **settings: Any) -> Values:
    recipe = fedstrata.load(BASE, algorithm=CHOSEN[algorithm], settings=merged(ALL, settings))
    run, experiment = create_run(recipe, folder / "run")
    with open_engine(experiment) as engine:
        unreliable = Unreliable(engine, faults)
        end = ending(lambda: list(run_rounds(run, experiment, unreliable)))
    values = values_of_run(folder / "run", end)
    values["status"] += unreliable.asked
    return values


def of_two(order: Any, fault: str, kind: str) -> str | None:
    """Clients 1 and 4 are at fault in the first two rounds."""
    return fault if order.kind == kind and order.client in (1, 4) and order.round < 3 else None


def of_all(order: Any, faults: Sequence[str], attempts: int, spared: int) -> str | None:
    """From round 2 on, all but so many are at fault in the first attempts, one in this way and the next in that."""
    at_fault = order.kind == "train" and order.round > 1 and order.attempt < attempts and order.client >= spared
    return faults[order.client % len(faults)] if at_fault else None


for algorithm, kind, faults in (
    ("fedlayerwise", "train", OF_ANY | OF_UPDATES),
    ("mixed", "train", OF_ANY | OF_SCORES),
    ("mixed", "upload", OF_ANY | OF_UPDATES),
    ("neuron_pruning", "train", OF_UPDATES | OF_UNITS),
    ("random_layers", "train", OF_UPDATES),
    ("adaptive_mu", "train", OF_UPDATES),
):
    for fault in faults:
        two = partial(of_two, fault=fault, kind=kind)
        CASES[f"fault/{algorithm}/{kind}/{fault}"] = partial(with_faults, algorithm=algorithm, faults=two)
for algorithm, nan in (("fedlayerwise", "nan"), ("mixed", "scores-nan")):
    for every in (
        (nan,),
        ("lost",),
        ("error",),
        ("error-not-finite",),
        ("unreadable-not-finite",),
        ("no-samples",),
        (nan, "lost"),
        (nan, "error-not-finite"),
        (nan, "unreadable-not-finite"),
        ("error", "error-not-finite"),
        ("lost", "unreadable"),
    ):
        name = f"{algorithm}/{'+'.join(every)}"
        two_attempts: dict[str, Any] = {"training.attempts": 2}
        half_are_enough: dict[str, Any] = {"training.min_replies": 0.5}
        always, at_first = (partial(of_all, faults=every, attempts=n, spared=spared) for n, spared in ((9, 0), (2, 1)))
        failing = partial(with_faults, algorithm=algorithm, faults=always, **two_attempts)
        CASES[f"failed/{name}"] = failing
        retried = partial(with_faults, algorithm=algorithm, faults=at_first, **half_are_enough)
        CASES[f"retried/{name}"] = retried
