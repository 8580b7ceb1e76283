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

from fedstrata import rng
from fedstrata.algorithm import Objective, Selection, SelectsAfterScores, SelectsOnClient
from fedstrata.arithmetic import steady
from fedstrata.layers import Layers
from fedstrata.messages import SCORE_DTYPE, Order, Reply, layers_with_units
from fedstrata.tasks.task import Task
from fedstrata.trainers.choice import TrainerName
from fedstrata.trainers.one import train_one
from fedstrata.trainers.stack import StackTrainer
from fedstrata.training import Training

IMAGES = 100
"""To show a network at once when it is only evaluated: so few that what lies between its layers stays in the cache."""


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
    evaluation_batch: int = 1000
    trainer: TrainerName = "client"
    stack_size: int = 1

    def to_device(self, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        """Inputs and targets where the model is, floating-point ones in its dtype."""
        dtype, device = self.layers.dtype, torch.device(self.device)

        def move(part: Any) -> Any:
            if isinstance(part, Tensor):
                return part.to(device, dtype) if part.is_floating_point() else part.to(device)
            if isinstance(part, dict):
                return {key: move(inner) for key, inner in part.items()}
            if isinstance(part, tuple | list):
                return type(part)(move(inner) for inner in part)
            return part

        return move(batch[0]), move(batch[1])


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
        part, parts = order.part
        rows = np.arange(len(data) * part // parts, len(data) * (part + 1) // parts)
        model = self._bound(order.model.to(self.device).clone())
        model.eval()
        loss, score = 0.0, 0.0
        whole: list[tuple[object, object]] = []
        for start in range(0, len(rows), self.setup.evaluation_batch):
            indices = rows[start : start + self.setup.evaluation_batch]
            inputs, targets = self.setup.to_device(data.batch(indices))
            outputs = _outputs(model, inputs)
            loss += float(task.loss(outputs, targets)) * len(indices)
            if task.metric.whole:
                whole.append((outputs, targets))
            else:
                score += float(task.metric.function(outputs, targets)) * len(indices)
        if whole:
            outputs, targets = (torch.cat([pair[i] for pair in whole]) for i in (0, 1))  # type: ignore[misc]
            score = float(task.metric.function(outputs, targets)) * len(rows)
        size = max(1, len(rows))
        metrics = {"loss": loss / size, task.metric.name: score / size}
        return Reply(
            "evaluate", order.round, order.attempt, order.client, size=len(rows), metrics=metrics, part=order.part
        )


def _outputs(model: nn.Module, inputs: Any) -> Any:
    """What the model says; of images, a few at a time, if it speaks of each of them."""
    if not isinstance(inputs, Tensor) or inputs.ndim != 4 or inputs.device.type != "cpu":
        return model(inputs)
    pieces = torch.split(inputs, IMAGES)
    outputs = [model(piece) for piece in pieces]
    of_each = (isinstance(o, Tensor) and o.shape[:1] == x.shape[:1] for o, x in zip(outputs, pieces, strict=True))
    return torch.cat(outputs) if all(of_each) else model(inputs)


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
