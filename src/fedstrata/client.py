"""What a client does with an order: the same code for every engine.

Local training minimises task loss + spring. An objective only says how stiff the spring is; its value and its pull are
derived here, once: ½ Σ c (w − a)² and c (w − a).
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedstrata import rng
from fedstrata.algorithm import Objective, Selection, SelectsAfterScores, SelectsOnClient, State, Tensors
from fedstrata.layers import Layers
from fedstrata.messages import SCORE_DTYPE, Order, Reply, layers_with_units
from fedstrata.tasks.task import Data, Task
from fedstrata.training import Training


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


def build_model(task: Task, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A fresh model, the same for everyone with this seed."""
    with rng.global_scope(seed, "model"):
        return task.model().to(dtype)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread, so that the number of workers cannot change the order of a sum."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class _Kept:
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
        self._kept: dict[int, _Kept] = {}

    def answer(self, order: Order, buffer: Tensor | None = None) -> Reply:
        """Carry out an order. `buffer`, if given, is memory for the update. A failure is a reply with an error."""
        try:
            with one_thread(), self._random_scope(order):
                if order.kind == "train":
                    return self._train(order, buffer)
                if order.kind == "upload":
                    return self._upload(order)
                return self._evaluate(order)
        except Exception as error:
            return Reply(order.kind, order.round, order.attempt, order.client, error=_reason(error))

    def _random_scope(self, order: Order):  # type: ignore[no-untyped-def]
        return rng.global_scope(
            self.setup.seed, order.kind, round=order.round, attempt=order.attempt, client=order.client
        )

    # --- train --------------------------------------------------------------------------------------------------

    def _train(self, order: Order, buffer: Tensor | None) -> Reply:
        setup, layers = self.setup, self.setup.layers
        assert order.model is not None
        self._forget_other_rounds(order)
        data = setup.task.client(order.client)
        anchor = order.model.to(self.device)
        flat = anchor.clone()
        loss, spring = self._fit_locally(data, flat, anchor, order)

        update = buffer if buffer is not None else torch.empty_like(order.model)
        update.copy_(flat.sub_(anchor))
        reply = Reply(
            "train",
            order.round,
            order.attempt,
            order.client,
            size=len(data),
            metrics={"loss": loss},
            stiffness=spring.mean_per_layer(layers) if setup.record else None,
        )
        if order.answer == "scores":
            assert isinstance(setup.selection, SelectsAfterScores)
            self._kept[order.client] = _Kept(order.round, order.attempt, len(data), update)
            scores = setup.selection.score(update, layers).to(SCORE_DTYPE)
            return replace(reply, scores=scores)
        if order.answer == "units":
            assert isinstance(setup.selection, SelectsOnClient)
            units = setup.selection.pick(update, layers)
            _keep_units(update, units, layers)
            return replace(reply, update=update, units=units, sent=layers_with_units(units, layers))
        assert order.mask is not None
        _keep_layers(update, order.mask, layers)
        return replace(reply, update=update, sent=order.mask)

    def _forget_other_rounds(self, order: Order) -> None:
        """An update that nobody asked for in its own round is of no more use."""
        now = (order.round, order.attempt)
        self._kept = {client: kept for client, kept in self._kept.items() if (kept.round, kept.attempt) == now}

    def _fit_locally(self, data: Data, flat: Tensor, anchor: Tensor, order: Order) -> tuple[float, _Spring]:
        setup, model = self.setup, self._bound(flat)
        model.train()
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        anchors = setup.layers.views(anchor, trainable_only=True)
        spring = _Spring(setup.objective, order.objective_state, setup.layers, parameters, anchors)
        optimizer = setup.training.local_optimizer(parameters.values(), order.round)
        batches = _batches(len(data), order, setup)
        total, seen = torch.zeros((), dtype=torch.float64), 0
        refresh = setup.objective.refresh
        for first_of_epoch, indices in batches:
            if refresh == "step" or (first_of_epoch and (refresh == "epoch" or seen == 0)):
                spring.refresh()
            inputs, targets = self._to_device(data.batch(indices))
            optimizer.zero_grad(set_to_none=True)
            loss = setup.task.loss(model(inputs), targets)
            if setup.objective.differentiable:
                (loss + spring.energy()).backward()  # type: ignore[no-untyped-call]
            else:
                loss.backward()  # type: ignore[no-untyped-call]
                spring.pull()
            optimizer.step()
            total += loss.detach().double().cpu() * len(indices)
            seen += len(indices)
        return float(total) / max(1, seen), spring

    def _bound(self, flat: Tensor) -> nn.Module:
        """The model with the flat vector as its weights and everything else as at the start."""
        self.setup.layers.bind(self.model, flat)
        with torch.no_grad():
            for name, value in self._other_buffers.items():
                self.model.get_buffer(name).copy_(value)
        return self.model

    def _to_device(self, batch: tuple[object, object]) -> tuple[object, object]:
        dtype, device = self.setup.layers.dtype, self.device

        def move(part: object) -> object:
            if isinstance(part, Tensor):
                return part.to(device, dtype) if part.is_floating_point() else part.to(device)
            if isinstance(part, dict):
                return {key: move(inner) for key, inner in part.items()}
            if isinstance(part, tuple | list):
                return type(part)(move(inner) for inner in part)
            return part

        return move(batch[0]), move(batch[1])

    # --- upload, evaluate ---------------------------------------------------------------------------------------

    def _upload(self, order: Order) -> Reply:
        kept = self._kept.pop(order.client, None)
        if kept is None or (kept.round, kept.attempt) != (order.round, order.attempt):
            raise LookupError(f"no update kept for round {order.round}, attempt {order.attempt}")
        assert order.mask is not None
        _keep_layers(kept.update, order.mask, self.setup.layers)
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
            inputs, targets = self._to_device(data.batch(indices))
            outputs = model(inputs)
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


class _Spring:
    """½ Σ c (w − a)² for one client's round."""

    def __init__(
        self, objective: Objective, state: State, layers: Layers, local: dict[str, nn.Parameter], anchor: Tensors
    ) -> None:
        self.objective, self.state, self.layers, self.local, self.anchor = objective, state, layers, local, anchor
        self.stiffness: Tensors = {}

    def refresh(self) -> None:
        if self.objective.differentiable:
            self.stiffness = self.objective.stiffness(self.local, self.anchor, self.state, self.layers)
            return
        detached = {name: w.detach() for name, w in self.local.items()}
        self.stiffness = self.objective.stiffness(detached, self.anchor, self.state, self.layers)

    def energy(self) -> Tensor | float:
        """The value, for an objective whose gradient flows through c."""
        return sum(
            ((c * (self.local[name] - self.anchor[name]).square()).sum() / 2 for name, c in self.stiffness.items()), 0.0
        )

    @torch.no_grad()
    def pull(self) -> None:
        """Add c (w − a) to the gradients; a tensor without stiffness is left alone, so no spring *is* plain."""
        for name, c in self.stiffness.items():
            w = self.local[name]
            force = c * (w - self.anchor[name])
            if w.grad is None:
                w.grad = force
            else:
                w.grad += force

    @torch.no_grad()
    def mean_per_layer(self, layers: Layers) -> Tensor:
        """The mean of c over each layer's trainable numbers, float64 [L]."""
        means = torch.zeros(len(layers), dtype=torch.float64)
        for at, layer in enumerate(layers.layers):
            for entry in layer.entries:
                if entry.name in self.stiffness:
                    means[at] += float(self.stiffness[entry.name].double().mean()) * (entry.stop - entry.start)
            means[at] /= max(1, layer.measured - layer.start)
        return means


def _reason(error: Exception) -> str:
    """What went wrong and where, in one line: the innermost place that is neither torch's nor ours."""
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if not _LIBRARIES.search(frame.filename)]
    where = f" ({Path(ours[-1].filename).name}, line {ours[-1].lineno})" if ours else ""
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"


_LIBRARIES = re.compile(r"[/\\](torch|numpy|fedstrata)[/\\]")


def _batches(samples: int, order: Order, setup: Setup) -> Iterator[tuple[bool, np.ndarray]]:
    """Batches of positions, with whether each opens an epoch: `work` epochs, or `work` steps."""
    generator = rng.generator(setup.seed, "batches", round=order.round, attempt=order.attempt, client=order.client)
    size, counts_steps = setup.training.batch_size, setup.training.steps is not None
    epochs = steps = 0
    while steps < order.work if counts_steps else epochs < order.work:
        order_of_samples = generator.permutation(samples)
        for start in range(0, samples, size):
            if counts_steps and steps == order.work:
                return
            yield start == 0, order_of_samples[start : start + size]
            steps += 1
        epochs += 1


def _keep_layers(update: Tensor, mask: Tensor, layers: Layers) -> None:
    """Zero what is not sent."""
    for layer, keep in zip(layers.layers, mask.tolist(), strict=True):
        if not keep:
            update[layer.start : layer.stop].zero_()


def _keep_units(update: Tensor, units: Tensor, layers: Layers) -> None:
    """Zero the units that are not sent."""
    for layer in layers.layers:
        for entry in layer.entries:
            rows = update[entry.start : entry.stop].view(entry.units, -1)
            rows.mul_(units[entry.first_unit : entry.first_unit + entry.units, None])
