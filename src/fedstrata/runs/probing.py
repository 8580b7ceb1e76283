"""Who harms: a round is computed again, and the model that it would have made without a client, or without a layer.

probe = fedstrata.probe("runs/example", round=20)
print(probe.sentences())

A round is a function of the checkpoint before it, so its replies can be had again to the bit. Then one of them is kept
back, and the same round, selection, weighting and server step included, is concluded without it. Every model that comes
of it is evaluated on the server's data, which is most of the work, on all cores. Nothing is trained more than once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedstrata.clients.evaluation import measure
from fedstrata.core.cohort import Cohort
from fedstrata.core.determinism import steady
from fedstrata.core.errors import RecipeError, RunDirectoryError, printable
from fedstrata.core.fit import Engine, draw_participants, terms_of
from fedstrata.core.memory import tags
from fedstrata.core.messages import Answer, Order, Reply, keep_layers
from fedstrata.core.record import RoundFailed
from fedstrata.core.round import Participants, Round, play
from fedstrata.core.state import ServerState, conclude
from fedstrata.core.status import SILENT, Status
from fedstrata.engines.local import LocalEngine
from fedstrata.recipes.experiment import Experiment, build_experiment
from fedstrata.runs.formats import Line
from fedstrata.runs.packs import Packs
from fedstrata.runs.probes import Probe, Sizes, store_probe
from fedstrata.runs.reader import Run
from fedstrata.runs.writer import state_after
from fedstrata.tasks.task import Task

_log = logging.getLogger("fedstrata")

AT_ONCE = 64
"""Models that are made before they are evaluated."""


def probe(
    path: str | Path,
    round: int | None = None,
    *,
    on: str | None = None,
    task: Task | None = None,
    data: str | Path | None = None,
    workers: int | None = None,
    engine: Engine | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Probe:
    """Leave out each client, each layer, and each layer of each client; measured, stored beside the run, and returned.

    Without a `round`, it is the last one that can be probed. `on` is one of the server's evaluation sets, else the
    first that the recipe names. A `task` that was given in Python is given again, and so is an `engine`, if the run had
    one of its own. `on_progress` is told how many of how many models are evaluated.
    """
    run = Run(path)
    run.directory.require_resumable()
    history = run.history()
    number = _round(run, history, round)
    if task is None:
        run.announce_imports()
    experiment = build_experiment(run.recipe, task, None if data is None else Path(data))
    experiment.require_data()
    place = _evaluation_set(experiment, on)
    before, line = state_after(run.directory, experiment.layers, number - 1), history[number - 1]
    with ExitStack() as stack:
        local = LocalEngine(experiment.setup, workers or run.recipe.engine.workers, experiment.cohort_size)
        runs: Engine = stack.enter_context(local if engine is None else nullcontext(engine))
        if before.memory and (versions := getattr(runs, "versions", None)) is not None:
            Packs(run.directory.files, str(run.directory.id)).load(before.round, before.memory, versions)
        again = Again(experiment, before, line, runs)
        checked, matches = _compared(run, again)
        if not matches:
            problem = f"round {number} computed again differs from {checked}: what follows is of a round like it"
            _log.warning("%s", printable(f"{run.path}: {problem}"))
        found = _measured(again, runs, place, on_progress)
    metric, clients, names = experiment.task.metric.name, again.record.clients, run.about.data.client_names
    result = Probe(number, place, metric, clients, run.layer_names, checked, matches, **found, names=names)
    store_probe(run.directory, result)
    return result


def _round(run: Run, history: Sequence[Line], wanted: int | None) -> int:
    """The round to probe, if there is a checkpoint that it began with."""
    kept = set(run.directory.rounds("checkpoints"))
    possible = [line["round"] for line in history if line["round"] - 1 in kept]
    if wanted is None and possible:
        return possible[-1]
    if wanted in possible:
        assert wanted is not None
        return wanted
    there = f"rounds that can be probed: {', '.join(map(str, possible))}" if possible else "no round can be probed"
    keep = "record.keep_checkpoints and checkpoint_every say how many are kept (--set record.keep_checkpoints=100)"
    if wanted is not None and not 1 <= wanted <= len(history):
        raise RunDirectoryError(f"{run.path}: round = {wanted}, and {len(history)} are done; {there}")
    problem = "a round" if wanted is None else f"round {wanted}, that of round {wanted - 1},"
    raise RunDirectoryError(f"{run.path}: the checkpoint before {problem} is gone; {there}; {keep}")


def _evaluation_set(experiment: Experiment, on: str | None) -> str:
    """One of the server's."""
    if experiment.layers.private and experiment.recipe.evaluation.private is None:
        problem = "they stay with the clients, so that the server has no whole model to evaluate"
        raise RecipeError("algorithm.private", [layer.name for layer in experiment.layers.private], problem)
    known = list(experiment.task.evaluation)
    chosen = on if on is not None else next((name for name in experiment.recipe.evaluation.on if name in known), None)
    if chosen is None and known:
        chosen = known[0]
    if chosen not in known:
        problem = f"is none of the server's evaluation sets: {', '.join(known) or 'it has none'}"
        raise RecipeError("on", chosen, problem)
    assert chosen is not None
    return chosen


# --- the round once more ---------------------------------------------------------------------------------------------


class Again:
    """A round whose replies are at hand, so that it can be played as often as one likes."""

    def __init__(self, experiment: Experiment, before: ServerState, line: Line, engine: Engine) -> None:
        self.experiment, self.before = experiment, before
        self.number, self.attempt, sizes = line["round"], line["attempt"], engine.sizes
        who = draw_participants(experiment.plan, sizes, self.number, self.attempt)
        terms = terms_of(experiment.plan, sizes)
        self._terms = replace(terms, first_attempt=self.attempt, attempts=self.attempt + 1, min_share=0.0)
        lost = {one["client"]: Status(one["kind"], one["reason"]) for one in line["lost"]}
        absent = {at: lost[client] for at, client in enumerate(who.clients.tolist()) if client in lost}
        self.participants = replace(who, absent={**who.absent, **absent})
        self._replies: dict[int, Answer] = {}
        self._whole: dict[int, Reply] = {}
        """With a second exchange: whole updates, of which any layers can be had."""
        round = self._played(lambda orders: self._recorded(engine, orders), record=True)
        self.after, self.record = round.finish()
        self._cohort, self._positions = round.cohort()

    @property
    def layers(self) -> int:
        """How many."""
        return len(self.experiment.layers)

    def _played(self, exchange: Callable[[Sequence[Order]], Iterator[tuple[Order, Answer]]], record: bool) -> Round:
        terms = replace(self._terms, record=record)
        round = Round(self.before, self.experiment.algorithm, terms, self._draw, self.number)
        play(round, exchange)
        return round

    def _draw(self, attempt: int) -> Participants:
        return self.participants

    def _recorded(self, engine: Engine, orders: Sequence[Order]) -> Iterator[tuple[Order, Answer]]:
        """The engine's answers, kept. Updates are copied: they may lie in memory that evaluation needs."""
        if orders[0].kind == "train":
            for order, answer in engine.exchange(orders):
                self._replies[order.client] = _own(answer) if isinstance(answer, Reply) else answer
            if orders[0].answer == "scores":
                everything, base = torch.ones(self.layers, dtype=torch.bool), tags(self.before.memory)
                uploads = [
                    Order("upload", self.number, self.attempt, client, mask=everything.clone(), base=base.get(client))
                    for client, answer in sorted(self._replies.items())
                    if isinstance(answer, Reply)
                ]
                for order, answer in engine.exchange(uploads):
                    if isinstance(answer, Reply):
                        self._whole[order.client] = _own(answer)
        yield from self._replayed(orders)

    def _replayed(self, orders: Sequence[Order], silent: int | None = None) -> Iterator[tuple[Order, Answer]]:
        """What the clients answered, but for one."""
        for order in orders:
            if order.client == silent:
                yield order, SILENT
            elif order.kind == "train":
                yield order, self._replies.get(order.client, SILENT)
            elif order.client in self._whole:
                whole = self._whole[order.client]
                assert whole.update is not None
                assert order.mask is not None
                update = whole.update.clone()
                keep_layers(update, order.mask, self.experiment.layers)
                yield order, replace(whole, update=update, sent=order.mask)

    # --- without something --------------------------------------------------------------------------------------

    def without_client(self, at: int) -> Tensor:
        """The next model, had the reply of the client at this position not come; the old one, if no other came."""
        silent = int(self.participants.clients[at])
        try:
            round = self._played(lambda orders: self._replayed(orders, silent), record=False)
            return round.finish()[0].model
        except RoundFailed:
            return self.before.model

    def without_layer(self, layer: int, at: int | None = None) -> Tensor:
        """The next model, had this layer not come: of nobody, or only of the client at one position."""
        rows = [row for row, position in enumerate(self._positions) if at in (None, position)]
        left = _without(self._cohort, layer, rows)
        if left is None:
            return self.after.model
        with steady():
            return conclude(self.before, self.experiment.algorithm, left)[0].model


def _own(reply: Reply) -> Reply:
    """With an update of its own."""
    return reply if reply.update is None else replace(reply, update=reply.update.clone())


def _without(cohort: Cohort, layer: int, rows: Sequence[int]) -> Cohort | None:
    """A cohort some of whose rows do not have a layer; None, if they did not have it anyway."""
    rows = [row for row in rows if cohort.sent[row, layer]]
    if not rows:
        return None
    updates, sent = list(cohort.updates), cohort.sent.clone()
    units = None if cohort.units is None else cohort.units.clone()
    where = cohort.layers.layers[layer]
    for row in rows:
        sent[row, layer] = False
        updates[row] = updates[row].clone()
        updates[row][where.start : where.stop] = 0
        if units is not None:
            units[row, where.first_unit : where.last_unit] = False
    return replace(cohort, updates=tuple(updates), sent=sent, units=units)


def _compared(run: Run, again: Again) -> tuple[str, bool]:
    """What is stored of the round, and whether the round computed again has the same bits."""
    if again.number in run.directory.rounds("checkpoints"):
        stored = state_after(run.directory, again.experiment.layers, again.number)
        parts = ("objective", "weighting", "server", "memory")
        same = torch.equal(stored.model, again.after.model) and all(
            _same_states(getattr(stored, part), getattr(again.after, part)) for part in parts
        )
        return "the checkpoint", same
    if run.recipe.record.layers:
        stored_layers = run.layers(again.number)
        same = all(np.array_equal(stored_layers[n], v, equal_nan=True) for n, v in again.record.layers.items())
        return "the record of its layers", same
    loss = run.history()[again.number - 1]["train_loss"]
    return "its training loss", loss == again.record.train_loss or (loss is None and np.isnan(again.record.train_loss))


def _same_states(stored: object, again: object) -> bool:
    assert isinstance(stored, dict)
    assert isinstance(again, dict)
    return stored.keys() == again.keys() and all(torch.equal(stored[name], again[name]) for name in stored)


# --- measuring -------------------------------------------------------------------------------------------------------


def _cases(again: Again) -> Iterator[tuple[Tensor, tuple[int | None, int | None]]]:
    clients, layers = range(len(again.participants.clients)), range(again.layers)
    for layer in layers:
        yield again.without_layer(layer), (None, layer)
    for client in clients:
        yield again.without_client(client), (client, None)
    for client in clients:
        for layer in layers:
            yield again.without_layer(layer, client), (client, layer)


def _measured(
    again: Again, engine: Engine, on: str, on_progress: Callable[[int, int], None] | None
) -> dict[str, Sizes]:
    """The loss and the metric of all models; one that was measured already is not measured again."""
    experiment = again.experiment
    clients, layers = len(again.participants.clients), again.layers
    total = 2 + layers + clients + clients * layers
    names = ("loss", experiment.task.metric.name)
    done = 0

    def numbers(models: Sequence[Tensor]) -> list[tuple[float, float]]:
        found = measure(engine, experiment.task, models, on, again.number, again.attempt)
        return [(values[names[0]], values[names[1]]) for values in found]

    def progress(more: int) -> None:
        nonlocal done
        done += more
        if on_progress is not None:
            on_progress(done, total)

    whole, before = numbers([again.after.model, again.before.model])
    known = [(again.after.model, whole), (again.before.model, before)]
    progress(2)
    tables = [
        Sizes(w, b, np.full(clients, np.nan), np.full(layers, np.nan), np.full((clients, layers), np.nan))
        for w, b in zip(whole, before, strict=True)
    ]

    def put(place: tuple[int | None, int | None], values: tuple[float, float]) -> None:
        for table, value in zip(tables, values, strict=True):
            table.put(place, value)

    cases = _cases(again)
    while some := list(islice(cases, AT_ONCE)):
        fresh = []
        for model, place in some:
            same = next((values for other, values in known if torch.equal(other, model)), None)
            if same is None:
                fresh.append((model, place))
            else:
                put(place, same)
        for (_, place), values in zip(fresh, numbers([model for model, _ in fresh]), strict=True):
            put(place, values)
        progress(len(some))
    return {"loss": tables[0], "score": tables[1]}
