"""What a client does with an order: the same code for every engine. Training minimises task loss + proximal term."""

from __future__ import annotations

import math
import os
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.rnn import PackedSequence

from fedstrata.clients.local import Local, ProximalTerm, Schedule, draw_schedule
from fedstrata.clients.memory import First
from fedstrata.clients.modules import CleanModule, same_bits
from fedstrata.clients.perceptron import PerceptronSteps, as_perceptron
from fedstrata.clients.training import Comparison, Setup, own_copy, train
from fedstrata.core import rng
from fedstrata.core.axes import (
    Compares,
    MovesSome,
    Plain,
    Remembers,
    SelectsAfterScores,
    SelectsOnClient,
    TrainsTwice,
)
from fedstrata.core.determinism import steady
from fedstrata.core.errors import DataError, ModelError
from fedstrata.core.memory import OWN, Version, merged
from fedstrata.core.messages import SCORE_DTYPE, Answer, Order, Reply, keep_layers, keep_units, layers_with_units
from fedstrata.core.status import Status
from fedstrata.tasks.nests import joined, leaves
from fedstrata.tasks.task import Data, NestedSamples, Samples

Result = TypeVar("Result")

SAMPLES = 1000
"""To evaluate a model on at a time, unless the recipe says how many."""

IMAGES = 100
"""Of these, to show a convolutional network at once: so few that what lies between its layers stays in the cache."""

ALIGNED = 64
"""Bytes: torch's own tensors begin at a multiple of it, and a matrix product may be rounded otherwise elsewhere."""


@dataclass(frozen=True)
class Kept:
    """An update that waits for the second exchange; round and attempt guard it."""

    round: int
    attempt: int
    size: int
    update: Tensor
    memory: Version | None = None
    """The client's, if no layer is sent …"""
    candidate: Version | None = None
    """… and if all are."""


class Client:
    """Answers orders for any client whose data is in the task. Nothing carries over from one round to the next."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.device = torch.device(setup.device)
        whole = setup.layers.whole
        self._module = CleanModule(lambda: setup.build().to(self.device), whole)
        self._first = First.of(setup, self._module.model)
        network = as_perceptron(self._module.model, whole, setup.task.loss)
        is_special = setup.objective.differentiable or isinstance(setup.objective, MovesSome | Compares)
        is_special |= setup.task.train is not None or setup.training.names_an_optimizer or setup.training.clips
        by_kernel = setup.device == "cpu" and not is_special
        self._network = network if by_kernel else None
        self._layout_is_known = not self._module.layout_matters
        self._has_rehearsed = False
        self._read_twice: set[int] = set()
        self.kept: dict[int, Kept] = {}
        """By client: what waits for the second exchange. An engine whose clients forget keeps it for them."""

    @property
    def remembers(self) -> bool:
        """Whether clients remember anything from round to round."""
        return bool(self._first.memory)

    def answer(self, order: Order, buffer: Tensor | None = None) -> Answer:
        """Carry out an order. `buffer`, if given, is memory for the update. A failure is a status with its reason.

        A model that would fail every client's order, or be different for each, is nobody's failure: ModelError.
        """
        try:
            return self.carry_out(order, buffer)
        except ModelError:
            raise
        except Exception as error:
            return Status("failed", reason(error))

    def carry_out(self, order: Order, buffer: Tensor | None = None) -> Reply:
        """The same, for an engine that has its own way to tell of a failure."""
        with steady():
            if order.kind == "upload":
                return self._upload(order)
            if order.kind == "evaluate":
                return self._in_any_layout(order, lambda: self._evaluate(order))
            with self._random_scope(order):
                data = self._data(order)
                if self._by_kernel(data):
                    return self._train(order, data, buffer, by_kernel=True)
            self._rehearse(order, data)
            return self._in_any_layout(order, lambda: self._train(order, self._data(order), buffer))

    def _by_kernel(self, data: Data) -> bool:
        return self._network is not None and self._network.takes(data)

    def _random_scope(self, order: Order):  # type: ignore[no-untyped-def]
        return rng.global_scope(
            self.setup.seed, order.kind, round=order.round, attempt=order.attempt, client=order.client
        )

    # --- train --------------------------------------------------------------------------------------------------

    def _train(self, order: Order, data: Data, buffer: Tensor | None, by_kernel: bool = False) -> Reply:
        assert order.model is not None
        schedule = draw_schedule(len(data), order, self.setup.training, self.setup.seed)
        memory = self._first.checked(order)
        flat, metrics, stiffness = self._trained(order, data, schedule, memory, by_kernel)
        numel = self.setup.layers.numel
        update = self._kept_in(buffer, self._difference(flat[:numel], order.model.to(self.device)))
        remembered = None
        if self._first.memory:
            second = self._second(order, data, schedule, memory, by_kernel)
            steps = int(metrics.get("steps", len(schedule)))
            remembered = self._first.after(order, memory, update, flat[numel:], second, steps)
        return self._reply(order, len(data), update, metrics, stiffness, remembered)

    def _trained(
        self, order: Order, data: Data, schedule: Schedule, memory: Version, by_kernel: bool = False
    ) -> tuple[Tensor, Mapping[str, float], Tensor | None]:
        """The weights after the schedule's steps, what was measured on the way, and the stiffness in the end."""
        start = self._first.whole(order, memory).to(self.device)
        return self._trained_from(start, start, self.setup, order, data, schedule, memory, by_kernel)

    def _second(self, order: Order, data: Data, schedule: Schedule, memory: Version, by_kernel: bool) -> Tensor | None:
        """Where a second training comes, on the same batches, from what the client has of its own."""
        objective = self.setup.objective
        if not isinstance(objective, TrainsTwice):
            return None
        setup, anchor = replace(self.setup, objective=objective.second()), self._first.whole(order, memory)
        start, anchor = memory[OWN].to(self.device), anchor.to(self.device)
        return self._trained_from(start, anchor, setup, order, data, schedule, memory, by_kernel)[0]

    def _trained_from(
        self,
        start: Tensor,
        anchor: Tensor,
        setup: Setup,
        order: Order,
        data: Data,
        schedule: Schedule,
        memory: Version,
        by_kernel: bool,
    ) -> tuple[Tensor, Mapping[str, float], Tensor | None]:
        flat = start.clone()
        if by_kernel:
            assert self._network is not None
            assert isinstance(data, Samples)
            with torch.no_grad():
                steps = PerceptronSteps(setup, self._network, data, schedule, flat, order.round, anchor)
                local = self._local(setup, order, data, schedule, steps.weights, anchor, memory)
                for step in local.each_step():
                    steps.take(step, local.term)
                return flat, {"loss": steps.loss()}, local.stiffness() if setup.record else None
        model = self._module.fresh(start)
        weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        model.train()
        local = self._local(setup, order, data, schedule, weights, anchor, memory)
        if setup.task.train is None:
            compare = None
            if isinstance(setup.objective, Compares):
                compare = Comparison(setup, model, anchor, memory[OWN].to(self.device))
            train(setup, model, local, compare)
            metrics = local.metrics
        else:
            own_copy(setup.task.train)(model, setup.task.clients[order.client], local)
            local.require_pulled()
            metrics = {**local.metrics, "steps": local.steps_taken}
        self._module.read(flat)
        return flat, metrics, local.stiffness() if setup.record else None

    def _local(
        self,
        setup: Setup,
        order: Order,
        data: Data,
        schedule: Schedule,
        weights: Mapping[str, Tensor],
        anchor: Tensor,
        memory: Version,
    ) -> Local:
        """What a loop is told: `weights` are all that it may move."""
        layers, objective, force = setup.layers, setup.objective, None
        if isinstance(objective, Remembers):
            force = objective.force(memory, order.objective_state, layers)
        term = ProximalTerm(
            objective,
            order.objective_state,
            layers,
            # nothing holds private layers back: there are no global ones
            {name: w for name, w in weights.items() if name in layers.entries} if layers.private else weights,
            layers.views(anchor[: layers.numel], trainable_only=True),
            force=None if force is None else force.to(anchor.device),
        )
        return Local(
            order,
            setup.training,
            term,
            weights,
            seed=setup.seed,
            device=setup.device,
            data=data,
            schedule=schedule,
            place=setup.to_device,
        )

    def _difference(self, flat: Tensor, anchor: Tensor) -> Tensor:
        """How far training came, in `flat` itself. What stays has not moved, be it −∞, as in a causal mask."""
        rides = [entry for entry in self.setup.layers.entries.values() if not entry.trainable]
        new = [flat[entry.start : entry.stop].clone() for entry in rides]
        flat.sub_(anchor)
        for entry, after in zip(rides, new, strict=True):
            before, moved = anchor[entry.start : entry.stop], flat[entry.start : entry.stop]
            moved.masked_fill_((after == before) | (after.isnan() & before.isnan()), 0)
            arrives = torch.isclose(before + moved, after, rtol=1e-3, atol=1e-6, equal_nan=True) | after.isinf()
            if not arrives.all():
                at = int((~arrives).nonzero()[0])
                what = f"model: {entry.name} goes from {float(before[at]):g} to {float(after[at]):g} in training"
                raise ModelError(f"{what}; what travels is the difference, which is not exact: start nearer to it")
        return flat

    def _kept_in(self, buffer: Tensor | None, update: Tensor) -> Tensor:
        return update.cpu() if buffer is None else buffer.copy_(update)

    def _reply(
        self,
        order: Order,
        size: int,
        update: Tensor,
        metrics: Mapping[str, float],
        stiffness: Tensor | None,
        remembered: tuple[Version, Version] | None,
    ) -> Reply:
        """The update, as far as it was asked for; `remembered` is what will be if nothing is sent, and if all is."""
        self._forget_other_rounds(order)
        setup, layers = self.setup, self.setup.layers
        reply = Reply(size=size, metrics=metrics, stiffness=stiffness)
        if order.answer == "scores":
            assert isinstance(setup.selection, SelectsAfterScores)
            self.kept[order.client] = Kept(order.round, order.attempt, size, update, *(remembered or ()))
            scores = setup.selection.score(update, layers).to(SCORE_DTYPE)
            memory, candidate = remembered or (None, None)
            return replace(reply, scores=scores, memory=memory, candidate=candidate)
        if order.answer == "units":
            assert isinstance(setup.selection, SelectsOnClient)
            units = setup.selection.pick(update, layers)
            keep_units(update, units, layers)
            sent = layers_with_units(units, layers)
            memory = None if remembered is None else merged(*remembered, layers, sent, units)
            return replace(reply, update=update, units=units, sent=sent, memory=memory)
        assert order.mask is not None
        keep_layers(update, order.mask, layers)
        memory = None if remembered is None else merged(*remembered, layers, order.mask)
        return replace(reply, update=update, sent=order.mask, memory=memory)

    def _forget_other_rounds(self, order: Order) -> None:
        """An update that nobody asked for in its own round is of no more use."""
        now = (order.round, order.attempt)
        self.kept = {client: kept for client, kept in self.kept.items() if (kept.round, kept.attempt) == now}

    # --- before the first order -----------------------------------------------------------------------------------

    def _rehearse(self, order: Order, data: Data) -> None:
        """Whether a client's data is the same when it is read again, and two steps repeat: once for each process.

        What cannot be read or trained is the client's own failure, and is left to the order itself.
        """
        schedule = draw_schedule(len(data), order, self.setup.training, self.setup.seed).first(2)
        memory = self._first.checked(order)
        try:
            batches = self._batch_twice(order, data, schedule)
            flats = []
            for _ in range(0 if self._has_rehearsed else 2):
                flats.append(self._in_any_layout(order, lambda: self._trained(order, data, schedule, memory)[0]))
            lost = self._module.lost() if flats else None
        except ModelError:
            raise
        except Exception:
            return
        for (place, leaf), (_, again) in zip(*(leaves(batch, "batch") for batch in batches), strict=True):
            if isinstance(leaf, Tensor | PackedSequence) and not same_bits(leaf.data, again.data):
                what = f"clients[{order.client}]: {place} of the same samples"
                self._must_repeat(f"{what} is different the second time (a random generator of the data's own?)")
        if lost is not None:
            raise ModelError(lost)
        for name, entry in self.setup.layers.whole.entries.items() if flats else ():
            if not same_bits(entry.of(flats[0]), entry.of(flats[1])):
                why = "after the same two batches from the same weights (a random generator of its own, or the time?)"
                self._must_repeat(f"model: {name} is different the second time, {why}")
        self._has_rehearsed = True
        self._read_twice.add(order.client)

    def _batch_twice(self, order: Order, data: Data, schedule: Schedule) -> list[tuple[Any, Any]]:
        """The first batch, read two times; none, where that needs no look, or training reads in a way of its own."""
        if isinstance(data, NestedSamples) or order.client in self._read_twice:
            return []
        try:
            return [self._batch(order, data, schedule) for _ in range(2)]
        except Exception:
            if self.setup.task.train is None:
                raise
            return []

    def _batch(self, order: Order, data: Data, schedule: Schedule) -> tuple[Any, Any]:
        with self._random_scope(order):
            return data.batch(schedule.batch(0))

    def _must_repeat(self, problem: str) -> None:
        if self.device.type == "cpu":
            raise ModelError(problem)
        warnings.warn(f"{problem}; kernels of this device may not repeat", stacklevel=2)

    def _in_any_layout(self, order: Order, what: Callable[[], Result]) -> Result:
        """Do something with the weights of convolutions channels last; where that fails, with them contiguous.

        Whether it fails depends on the order alone, so every worker and engine does the same.
        """
        module = self._module
        if not self._layout_is_known:
            self._settle_layout(order)
        try:
            with self._random_scope(order):
                return what()
        except ModelError:
            raise
        except Exception:
            if not (module.layout_matters and module.channels_last):
                raise
        module.channels_last = False
        try:
            with self._random_scope(order):
                return what()
        finally:
            module.channels_last = True

    def _settle_layout(self, order: Order) -> None:
        """A forward that reads memory as it lies gives another loss for another layout, and is given its own."""
        data, found = self._data(order), []
        for channels_last in (False, True):
            self._module.channels_last = channels_last
            try:
                found.append(self._loss_of_two(order, data))
            except ModelError:
                raise
            except Exception:
                found.append(math.nan)  # which decides nothing
        self._layout_is_known = True
        self._module.channels_last = math.isnan(sum(found)) or math.isclose(*found, rel_tol=1e-3, abs_tol=1e-4)

    @torch.no_grad()
    def _loss_of_two(self, order: Order, data: Data) -> float:
        with self._random_scope(order):
            model = self._module.fresh(self._first.whole(order, {}).to(self.device)).train()
            inputs, targets = self.setup.to_device(data.batch(np.arange(min(2, len(data)))))
            return float(own_copy(self.setup.task.loss)(model(inputs), targets))

    def _data(self, order: Order) -> Data:
        task = self.setup.task
        if order.kind == "train":
            return task.client(order.client)
        return task.server_data(order.dataset) if order.client == rng.SERVER else task.client_held_out(order.client)

    # --- upload, evaluate ---------------------------------------------------------------------------------------

    def _upload(self, order: Order) -> Reply:
        kept = self.kept.pop(order.client, None)
        if kept is None or (kept.round, kept.attempt) != (order.round, order.attempt):
            raise LookupError(f"no update kept for round {order.round}, attempt {order.attempt}")
        assert order.mask is not None
        layers, memory = self.setup.layers, None
        keep_layers(kept.update, order.mask, layers)
        if kept.memory is not None and kept.candidate is not None:
            memory = merged(kept.memory, kept.candidate, layers, order.mask)
        return Reply(size=kept.size, update=kept.update, sent=order.mask, memory=memory)

    @torch.no_grad()
    def _evaluate(self, order: Order) -> Reply:
        task = self.setup.task
        data = self._data(order)
        given = self.setup.evaluation_batch
        rows = _rows(len(data), *order.part, given or 1)
        weights = self._measured(order).to(self.device)
        model = self._module.fresh(self._fine_tuned(weights, order) if order.fine_tune else weights)
        model.eval()
        task_loss, metric = own_copy(task.loss), own_copy(task.metric.function)
        loss, score = 0.0, 0.0
        whole: list[tuple[Any, Any]] = []
        in_pieces = given is None and any(isinstance(module, _ConvNd) for module in model.modules())
        is_only_read = self._by_kernel(data)  # another forward may write to its inputs
        for start in range(0, len(rows), given or SAMPLES):
            indices = rows[start : start + (given or SAMPLES)]
            inputs, targets = self.setup.to_device(_lying(data, indices) if is_only_read else data.batch(indices))
            outputs = _outputs(model, inputs, len(indices)) if in_pieces else model(inputs)
            loss += float(task_loss(outputs, targets)) * len(indices)
            if task.metric.whole:
                whole.append((outputs, targets))
            else:
                score += float(metric(outputs, targets)) * len(indices)
        if whole:
            outputs, targets = (_joined([pair[i] for pair in whole], task.metric.name) for i in (0, 1))
            score = float(metric(outputs, targets)) * len(rows)
        size = max(1, len(rows))
        metrics = {"loss": loss / size, task.metric.name: score / size}
        return Reply(size=len(rows), metrics=metrics)

    def _measured(self, order: Order) -> Tensor:
        """The weights to measure: with the client's private layers, or a model of its own, if it has one."""
        memory = self._first.checked(order)
        if isinstance(self.setup.objective, TrainsTwice) and order.client != rng.SERVER and order.base is not None:
            return memory[OWN]
        return self._first.whole(order, memory)

    @torch.enable_grad()
    def _fine_tuned(self, weights: Tensor, order: Order) -> Tensor:
        """A copy that was trained on the client's training data, by the task loss alone."""
        setup, data = self.setup, self.setup.task.client(order.client)
        local = replace(setup.training, steps=None)
        setup = replace(setup, objective=Plain(), training=local)
        schedule = draw_schedule(len(data), replace(order, work=order.fine_tune), local, setup.seed)
        return self._trained_from(weights, weights, setup, order, data, schedule, {}, self._by_kernel(data))[0]


def _rows(size: int, part: int, parts: int, batch: int) -> np.ndarray:
    """A part of a data set; it begins where a batch does, so that no batch but the last is short."""
    start, stop = (size * edge // parts // batch * batch for edge in (part, part + 1))
    return np.arange(start, size if part + 1 == parts else stop)


def _lying(data: Data, indices: np.ndarray) -> tuple[Any, Any]:
    """Inputs where they lie, for whoever only reads them; gathered, if that is no place to compute from."""
    assert isinstance(data, Samples)
    if data.rows is None:
        inputs = data.inputs[indices[0] : indices[-1] + 1]
        if inputs.data_ptr() % ALIGNED == 0 and inputs.is_contiguous():
            return inputs, data.targets[torch.from_numpy(indices)]
    return data.batch(indices)


def _outputs(model: nn.Module, inputs: Any, count: int) -> Any:
    """What a convolutional network says; it is shown a few samples at a time, if it speaks of each of them."""
    if not isinstance(inputs, Tensor) or inputs.shape[:1] != (count,) or inputs.device.type != "cpu":
        return model(inputs)
    pieces = torch.split(inputs, IMAGES)
    outputs = [model(piece) for piece in pieces]
    of_each = (isinstance(o, Tensor) and o.shape[:1] == x.shape[:1] for o, x in zip(outputs, pieces, strict=True))
    return torch.cat(outputs) if all(of_each) else model(inputs)


def _joined(batches: list[Any], metric: str) -> Any:
    """What a metric needs of all samples at once."""
    try:
        return joined(batches)
    except (TypeError, ValueError, LookupError, RuntimeError) as error:
        problem = "needs all samples at once, and outputs or targets of several batches cannot be put together"
        raise DataError(f"metric {metric!r} {problem}: {error}") from error


def reason(error: BaseException) -> str:
    """What went wrong and where, in one line: the innermost place that is neither torch's nor ours."""
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    where = f" ({Path(ours[-1].filename).name}, line {ours[-1].lineno})" if ours else ""
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"


_LIBRARIES = tuple(f"{Path(str(module.__file__)).parent}{os.sep}" for module in (torch, np, rng))
