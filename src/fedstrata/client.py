"""What a client does with an order: the same code for every engine. Local training minimises task loss + spring."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedstrata import rng
from fedstrata.algorithm import Objective, Selection, SelectsAfterScores, SelectsOnClient
from fedstrata.arithmetic import steady
from fedstrata.errors import DataError
from fedstrata.layers import Layers
from fedstrata.messages import SCORE_DTYPE, Order, Reply, layers_with_units
from fedstrata.tasks.nests import joined, moved
from fedstrata.tasks.task import Task
from fedstrata.trainers.choice import TrainerName
from fedstrata.trainers.one import train_one
from fedstrata.trainers.stack import StackTrainer
from fedstrata.training import Training

SAMPLES = 1000
"""To evaluate a model on at a time, unless the recipe says how many."""

IMAGES = 100
"""Of these, to show a convolutional network at once: so few that what lies between its layers stays in the cache."""


@dataclass(frozen=True)
class Setup:
    """What a client knows before the first order. It is configured on the client's own side and never sent."""

    task: Task
    layers: Layers
    objective: Objective
    selection: Selection
    training: Training
    seed: int
    model: nn.Module
    """A model of the right shape; its frozen parameters and other untravelled state are part of the setup."""
    device: str = "cpu"
    record: bool = True
    evaluation_batch: int | None = None
    trainer: TrainerName = "client"
    stack_size: int = 1

    def to_device(self, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        """Inputs and targets where the model is, floating-point ones in its dtype."""
        dtype, device = self.layers.dtype, torch.device(self.device)
        return moved(batch[0], device, dtype), moved(batch[1], device, dtype)


def build_model(task: Task, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A fresh model, the same for everyone with this seed."""
    with rng.global_scope(seed, "model"):
        return task.model().to(dtype)


@dataclass(frozen=True)
class Kept:
    """An update that waits for the second exchange; round and attempt guard it."""

    round: int
    attempt: int
    size: int
    update: Tensor


class Client:
    """Answers orders for any client whose data is in the task. Nothing carries over from one round to the next."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.device = torch.device(setup.device)
        self.model = setup.model.to(self.device)
        travelling = setup.layers.views(torch.empty(setup.layers.numel, dtype=setup.layers.dtype))
        # Integer and non-persistent buffers do not travel; every order finds them as the first one did.
        self._other_buffers = {n: b.clone() for n, b in self.model.named_buffers() if n not in travelling}
        self.kept: dict[int, Kept] = {}
        """By client: what waits for the second exchange. An engine whose clients forget keeps it for them."""
        self._stack = StackTrainer(setup) if setup.trainer == "stack" else None

    def answer(self, order: Order, buffer: Tensor | None = None) -> Reply:
        """Carry out an order. `buffer`, if given, is memory for the update. A failure is a reply with an error."""
        try:
            return self.carry_out(order, buffer)
        except Exception as error:
            return order.failure(reason(error))

    def carry_out(self, order: Order, buffer: Tensor | None = None) -> Reply:
        """The same, for an engine that has its own way to tell of a failure."""
        with steady(), self._random_scope(order):
            if order.kind == "train":
                return self._train(order, buffer)
            if order.kind == "upload":
                return self._upload(order)
            return self._evaluate(order)

    def answer_stack(self, orders: Sequence[Order], buffers: Sequence[Tensor | None]) -> list[Reply]:
        """Carry out several training orders together; if that fails, one by one, so that only the culprit is lost."""
        assert self._stack is not None
        try:
            with steady(), self._random_scope(orders[0]):
                assert orders[0].model is not None
                trained = self._stack.train(orders, orders[0].model)
                return [
                    self._reply(order, self._kept_in(buffer, update), loss, stiffness)
                    for order, buffer, (update, loss, stiffness) in zip(orders, buffers, trained, strict=True)
                ]
        except Exception as error:
            if len(orders) > 1:
                pairs = zip(orders, buffers, strict=True)
                return [reply for order, buffer in pairs for reply in self.answer_stack([order], [buffer])]
            return [orders[0].failure(reason(error))]

    def _random_scope(self, order: Order):  # type: ignore[no-untyped-def]
        return rng.global_scope(
            self.setup.seed, order.kind, round=order.round, attempt=order.attempt, client=order.client
        )

    # --- train --------------------------------------------------------------------------------------------------

    def _train(self, order: Order, buffer: Tensor | None) -> Reply:
        assert order.model is not None
        anchor = order.model.to(self.device)
        flat = anchor.clone()
        data = self.setup.task.client(order.client)
        loss, stiffness = train_one(self.setup, self._bound(flat), order, data, anchor)
        return self._reply(order, self._kept_in(buffer, flat.sub_(anchor)), loss, stiffness)

    def _kept_in(self, buffer: Tensor | None, update: Tensor) -> Tensor:
        return update.cpu() if buffer is None else buffer.copy_(update)

    def _reply(self, order: Order, update: Tensor, loss: float, stiffness: Tensor | None) -> Reply:
        """The update, as far as it was asked for."""
        self._forget_other_rounds(order)
        setup, layers = self.setup, self.setup.layers
        size = len(setup.task.client(order.client))
        reply = Reply(
            "train",
            order.round,
            order.attempt,
            order.client,
            size=size,
            metrics={"loss": loss},
            stiffness=stiffness,
        )
        if order.answer == "scores":
            assert isinstance(setup.selection, SelectsAfterScores)
            self.kept[order.client] = Kept(order.round, order.attempt, size, update)
            scores = setup.selection.score(update, layers).to(SCORE_DTYPE)
            return replace(reply, scores=scores)
        if order.answer == "units":
            assert isinstance(setup.selection, SelectsOnClient)
            units = setup.selection.pick(update, layers)
            _keep_units(update, units, layers)
            return replace(reply, update=update, units=units, sent=layers_with_units(units, layers))
        assert order.mask is not None
        keep_layers(update, order.mask, layers)
        return replace(reply, update=update, sent=order.mask)

    def _forget_other_rounds(self, order: Order) -> None:
        """An update that nobody asked for in its own round is of no more use."""
        now = (order.round, order.attempt)
        self.kept = {client: kept for client, kept in self.kept.items() if (kept.round, kept.attempt) == now}

    def _bound(self, flat: Tensor) -> nn.Module:
        """The model with the flat vector as its weights and everything else as at the start."""
        self.setup.layers.bind(self.model, flat)
        with torch.no_grad():
            for name, value in self._other_buffers.items():
                self.model.get_buffer(name).copy_(value)
        return self.model

    # --- upload, evaluate ---------------------------------------------------------------------------------------

    def _upload(self, order: Order) -> Reply:
        kept = self.kept.pop(order.client, None)
        if kept is None or (kept.round, kept.attempt) != (order.round, order.attempt):
            raise LookupError(f"no update kept for round {order.round}, attempt {order.attempt}")
        assert order.mask is not None
        keep_layers(kept.update, order.mask, self.setup.layers)
        return Reply(
            "upload", order.round, order.attempt, order.client, size=kept.size, update=kept.update, sent=order.mask
        )

    @torch.no_grad()
    def _evaluate(self, order: Order) -> Reply:
        task = self.setup.task
        assert order.model is not None
        on_server = order.client == rng.SERVER
        data = task.server_data(order.dataset) if on_server else task.client_held_out(order.client)
        given = self.setup.evaluation_batch
        rows = _rows(len(data), *order.part, given or 1)
        model = self._bound(order.model.to(self.device).clone())
        model.eval()
        loss, score = 0.0, 0.0
        whole: list[tuple[Any, Any]] = []
        in_pieces = given is None and any(isinstance(module, _ConvNd) for module in model.modules())
        for start in range(0, len(rows), given or SAMPLES):
            indices = rows[start : start + (given or SAMPLES)]
            inputs, targets = self.setup.to_device(data.batch(indices))
            outputs = _outputs(model, inputs, len(indices)) if in_pieces else model(inputs)
            loss += float(task.loss(outputs, targets)) * len(indices)
            if task.metric.whole:
                whole.append((outputs, targets))
            else:
                score += float(task.metric.function(outputs, targets)) * len(indices)
        if whole:
            outputs, targets = (_joined([pair[i] for pair in whole], task.metric.name) for i in (0, 1))
            score = float(task.metric.function(outputs, targets)) * len(rows)
        size = max(1, len(rows))
        metrics = {"loss": loss / size, task.metric.name: score / size}
        return Reply(
            "evaluate", order.round, order.attempt, order.client, size=len(rows), metrics=metrics, part=order.part
        )


def _rows(size: int, part: int, parts: int, batch: int) -> np.ndarray:
    """A part of a data set; it begins where a batch does, so that no batch but the last is short."""
    start, stop = (size * edge // parts // batch * batch for edge in (part, part + 1))
    return np.arange(start, size if part + 1 == parts else stop)


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


def keep_layers(update: Tensor, mask: Tensor, layers: Layers) -> None:
    """Zero what is not sent."""
    for layer, keep in zip(layers.layers, mask.tolist(), strict=True):
        if not keep:
            update[layer.start : layer.stop].zero_()


def _keep_units(update: Tensor, units: Tensor, layers: Layers) -> None:
    """Zero the units that are not sent."""
    for layer in layers.layers:
        for entry in layer.entries:
            rows = update[entry.start : entry.stop].view(entry.units, -1)
            rows.masked_fill_(~units[entry.first_unit : entry.first_unit + entry.units, None], 0)
