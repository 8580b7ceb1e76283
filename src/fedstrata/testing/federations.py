"""Checks that let a few clients train: the rule in a federation, with all that it runs on."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load, save
from torch import Tensor

from fedstrata.algorithms import to_table
from fedstrata.clients.client import Client
from fedstrata.clients.memory import First
from fedstrata.core.axes import Remembers
from fedstrata.core.errors import FedstrataError
from fedstrata.core.fit import Engine, fit
from fedstrata.core.memory import PRIVATE, tags
from fedstrata.core.messages import Answer, Order, Reply
from fedstrata.core.state import ServerState
from fedstrata.core.status import Status
from fedstrata.core.versions import Versions
from fedstrata.engines.local import LocalEngine
from fedstrata.recipes.experiment import Experiment, build_experiment
from fedstrata.recipes.schema import load as load_recipe
from fedstrata.runs import runner
from fedstrata.runs.writer import last_state
from fedstrata.testing.report import Skipped, Unmet, check, expect
from fedstrata.testing.subject import Given, Subject, kind_of, same

ROUNDS = 3
PARTS = ("objective", "weighting", "server", "memory")


class Federation:
    """A few clients, of which all but one take part in a round."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        count = next((count for count in (4, 8, 16, 32, 64) if subject.selection(count) is not None), 4)
        algorithm = subject.algorithm()
        self.table: dict[str, Any] = {
            "name": "check",
            "task": {"function": "fedstrata.testing.cases:federation", "options": {"clients": count + 1}},
            "layers": {"grouping": algorithm.grouping},
            "algorithm": {"private": list(algorithm.private)},
            "training": {"rounds": ROUNDS, "clients_per_round": count, "epochs": 2, "batch_size": 4, "lr": 0.1},
            "evaluation": {"private": "initial"} if algorithm.private else {},
            "engine": {"workers": 1},
        }
        self._experiment = build_experiment(load_recipe(self.table))

    def experiment(self) -> Experiment:
        """It, with a copy of the rule, as each machine has one of its own."""
        return replace(self._experiment, algorithm=self.subject.algorithm(self.subject.fresh()))

    @cached_property
    def uninterrupted(self) -> list[ServerState]:
        """The states after each round, in this process."""
        return self.local()

    def local(
        self,
        workers: int = 1,
        rounds: int = ROUNDS,
        state: ServerState | None = None,
        versions: Versions | None = None,
    ) -> list[ServerState]:
        """The states after each round on the local engine, from the beginning or from a state and what clients know."""
        experiment = self.experiment()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 of every fork: torch has threads
            with LocalEngine(experiment.setup, workers, experiment.cohort_size) as engine:
                engine.versions = engine.versions if versions is None else versions
                return self.run(experiment, engine, rounds, state)

    def run(
        self, experiment: Experiment, engine: Engine, rounds: int = ROUNDS, state: ServerState | None = None
    ) -> list[ServerState]:
        """The same on any engine; a client that is lost ends it."""
        found = []
        state = experiment.first_state() if state is None else state
        for after, record in fit(state, experiment.algorithm, engine, replace(experiment.plan, rounds=rounds)):
            if record.lost:
                client, why = record.lost[0]
                raise FedstrataError(f"in round {record.round} client {client} is lost: {why}")
            found.append(after)
        return found


@lru_cache(maxsize=1)
def _federation(subject: Subject) -> Federation:
    """All checks of a rule have the same one."""
    return Federation(subject)


def _tensors(state: ServerState) -> dict[str, Tensor]:
    parts = ((part, name, tensor) for part in PARTS for name, tensor in getattr(state, part).items())
    return {"model": state.model} | {f"{part}/{name}": tensor for part, name, tensor in parts}


def _expect_same(found: ServerState, wanted: ServerState, where: str) -> None:
    one, other = _tensors(found), _tensors(wanted)
    expect(one.keys() == other.keys(), f"another state {where}: {sorted(one.keys() ^ other.keys())}")
    different = [name for name, tensor in one.items() if not same(tensor, other[name])]
    expect(not different, f"{', '.join(different)} different {where}")


@check("objective")
def memory(subject: Subject) -> None:
    """What clients remember keeps the names, shapes and dtypes of `memory`, without NaN; the old one is not changed."""
    if not isinstance(subject.rule, Remembers):
        return
    experiment = _federation(subject).experiment()
    first, state = First.of(experiment.setup, experiment.build()), experiment.first_state()
    given = Given()
    update = 0.1 * torch.ones_like(state.model)
    order = Order("train", 1, 0, 0, model=state.model, objective_state=state.objective)
    before, tail = first.memory, first.memory.get(PRIVATE, torch.zeros(0))
    for number in range(1, 3):
        given.note(memory=before, update=update, model=state.model, state=state.objective)
        force = subject.rule.force(before, state.objective, experiment.layers)
        if force is not None:
            expect(kind_of(force) == kind_of(state.model), f"a force of {kind_of(force)}, not {kind_of(state.model)}")
            expect(force.isfinite().all(), "a force with NaN or infinity")
        _, after = first.after(order, before, update, tail, torch.cat([state.model + update, tail]), number)
        expect(not given.changed(), f"{', '.join(given.changed())} changed in place")
        kinds, wanted = ({name: kind_of(value) for name, value in found.items()} for found in (after, first.memory))
        expect(kinds == wanted, f"{kinds} after {number} rounds, at first {wanted}")
        expect(not any(value.isnan().any() for value in after.values()), f"NaN after {number} rounds")
        before = after


@check()
def clients_train(subject: Subject) -> None:
    """A few clients train for three rounds; none fails, and the model moves and stays finite."""
    federation = _federation(subject)
    try:
        states = federation.uninterrupted
    except FedstrataError as error:
        raise Unmet(str(error)) from None
    moved = states[-1].model - federation.experiment().initial
    expect(moved.any(), "the model is the first one")
    expect(states[-1].model.isfinite().all(), "the model has NaN or infinity")


@check()
def resuming(subject: Subject) -> None:
    """A federation that is stopped after a round, saved and resumed ends as one that never stopped, bit for bit."""
    federation = _federation(subject)
    wanted = federation.uninterrupted
    versions, kept = Versions(), Versions()
    stopped = federation.local(rounds=1, versions=versions)[-1]
    for client, tag in tags(stopped.memory).items():
        version = {name: tensor.numpy() for name, tensor in versions.of(client, tag).items()}
        kept.put(client, tag, {name: torch.from_numpy(array) for name, array in load(save(version)).items()})
    arrays = load(save({name: tensor.contiguous().numpy() for name, tensor in _tensors(stopped).items()}))
    found = {name: torch.from_numpy(array) for name, array in arrays.items()}
    parts = {part: {n.partition("/")[2]: t for n, t in found.items() if n.startswith(f"{part}/")} for part in PARTS}
    resumed = federation.local(state=ServerState(stopped.round, found["model"], **parts), versions=kept)
    _expect_same(resumed[-1], wanted[-1], f"after round {ROUNDS}")


@check()
def workers(subject: Subject) -> None:
    """With two worker processes a federation ends as with one, bit for bit."""
    if not sys.platform.startswith("linux"):
        raise Skipped("workers are forked on Linux only")
    federation = _federation(subject)
    _expect_same(federation.local(workers=2)[-1], federation.uninterrupted[-1], "with two workers")


@check()
def flower(subject: Subject) -> None:
    """With every order and reply in Flower's messages a federation ends as without, bit for bit."""
    if find_spec("flwr") is None:
        raise Skipped("flwr is not installed (pip install 'fedstrata[flower]')")
    federation = _federation(subject)
    wanted = federation.uninterrupted
    try:
        found = federation.run(federation.experiment(), Nodes(federation))
    except FedstrataError as error:
        raise Unmet(str(error)) from None
    _expect_same(found[-1], wanted[-1], "on Flower")


class Nodes:
    """An engine of nodes, each with a rule of its own; all that they are told and answer is in Flower's messages."""

    def __init__(self, federation: Federation) -> None:
        experiment = federation.experiment()
        self.sizes: np.ndarray = experiment.task.sizes()
        self._layers = experiment.layers
        self._clients = [Client(federation.experiment().setup) for _ in self.sizes]
        self._versions = [Versions() for _ in self.sizes]

    def exchange(self, orders: Sequence[Order]) -> Iterator[tuple[Order, Answer]]:
        """Every order's answer."""
        return ((order, self._answer(order)) for order in orders)

    def _answer(self, order: Order) -> Answer:
        from flwr.app import RecordDict
        from flwr.common.serde import recorddict_from_proto, recorddict_to_proto

        from fedstrata.engines.flower import codec

        def sent(content: RecordDict) -> RecordDict:
            return recorddict_from_proto(recorddict_to_proto(content))

        try:
            arrived = codec.decode_order(sent(codec.encode_order(order, self._layers)), self._layers)
            versions = self._versions[order.client]
            answer = versions.detached(arrived, self._clients[order.client].answer(versions.attached(arrived)))
            if not isinstance(answer, Reply):
                return answer
            reply = sent(codec.encode_reply(answer, arrived, self._layers))
            return codec.decode_reply(reply, order, self._layers)
        except Exception as error:
            return Status("refused", str(error))


@contextmanager
def _quiet() -> Iterator[None]:
    """Nobody has to be told that this recipe names code."""
    log = logging.getLogger("fedstrata")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@check()
def recipe(subject: Subject) -> None:
    """A recipe that names the rule runs, is resumed by its directory alone, and ends as the same in Python."""
    federation = _federation(subject)
    wanted = federation.uninterrupted
    table = {**federation.table, "algorithm": to_table(subject.algorithm())}
    with TemporaryDirectory() as folder, _quiet():
        path = Path(folder) / "run"
        try:
            runner.run(table, settings={"training.rounds": ROUNDS - 1}, out=path)
            run = runner.resume(path, settings={"training.rounds": ROUNDS})
        except FedstrataError as error:
            raise Unmet(str(error)) from None
        _expect_same(last_state(run.directory), wanted[-1], "by a recipe")
