"""The trainer `stack`: several clients in one batched computation, their weights as the rows of one matrix [S, P].

Clients may have different numbers of steps: they are sorted by it, so that those still training are always the first
rows. How a step finds its gradients depends on the model: plain perceptrons have a kernel of their own, all others go
through `torch.func`, where clients whose batches have the same length are taken together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.functional import one_hot
from torch.nn.modules.dropout import _DropoutNd

from fedstrata.algorithm import Objective
from fedstrata.layers import Layers
from fedstrata.messages import Order
from fedstrata.tasks.task import Data, Samples
from fedstrata.trainers.mlp import Pass, Perceptron, as_perceptron
from fedstrata.trainers.schedule import batches
from fedstrata.trainers.springs import is_due, mean_per_layer

if TYPE_CHECKING:
    from fedstrata.client import Setup

CACHE = 1 << 20
"""Bytes of weights and gradients that a stack may take: about half of a core's second-level cache."""

LARGEST = 5
"""Clients in a stack: more of them share the cost of a call further, but leave fewer stacks for the workers."""


GATHERED = 1 << 18
"""Bytes of samples to gather in one go."""


def stack_size(layers: Layers) -> int:
    """How many clients to stack, from the model's size alone."""
    return max(1, min(LARGEST, CACHE // (2 * layers.numel * layers.itemsize)))


def obstacle(model: nn.Module, objective: Objective, device: str) -> str | None:
    """Why clients of this model cannot be stacked, if they cannot."""
    if device != "cpu":
        return f"it is for cpu, engine.device is {device}"
    if objective.differentiable:
        return "the gradient flows through the stiffness"
    for name, module in model.named_modules():
        if next(module.buffers(recurse=False), None) is not None:
            return f"{name or 'the model'} ({type(module).__name__}) has buffers that training changes"
        if isinstance(module, _DropoutNd | nn.RNNBase):
            return f"{name or 'the model'} is a {type(module).__name__}"
    return None


@dataclass
class _Member:
    """One client of a stack."""

    order: Order
    data: Data
    steps: list[tuple[bool, np.ndarray]]


class StackTrainer:
    """Trains stacks of clients."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.network = as_perceptron(setup.model, setup.layers, setup.task.loss)

    @torch.no_grad()
    def train(self, orders: Sequence[Order], anchor: Tensor) -> list[tuple[Tensor, float, Tensor | None]]:
        """Each client's update, mean task loss and stiffness, in the orders' order."""
        setup, training = self.setup, self.setup.training
        members = []
        for order in orders:
            data = setup.task.client(order.client)
            members.append(_Member(order, data, list(batches(len(data), order, training, setup.seed))))
        ranking = sorted(range(len(members)), key=lambda k: -len(members[k].steps))
        ranked = [members[k] for k in ranking]
        # Rows are weights, or, for the kernel with springs that may pull, displacements from the anchor.
        network = self.network
        kernel = network is not None and all(_has_classes(member.data, network.classes) for member in ranked)
        refreshes = _refreshes(setup.objective, ranked)
        settled = max(refreshes) == 0  # the stiffness at the anchor is that of the whole round
        displaced = kernel and not (settled and _is_free(setup.objective, ranked[0].order, setup.layers, anchor))
        rows = anchor.expand(len(ranked), -1).clone()
        if displaced:
            rows.zero_()
        optimizer = _Optimizer(setup, rows, orders[0].round, anchor if displaced else None)
        springs = _Springs(setup.objective, [m.order for m in ranked], setup.layers, rows, anchor, displaced)
        gradients: _Gradients
        if kernel:
            assert self.network is not None
            from_anchor = anchor if displaced else None
            gradients = _PerceptronGradients(self.network, ranked, rows, optimizer.gradients, from_anchor)
        else:
            gradients = _FunctionalGradients(ranked, rows, optimizer.gradients, setup)
        losses = torch.zeros(len(ranked[0].steps), len(ranked), dtype=rows.dtype)
        active = len(ranked)
        for step, losses_now in enumerate(losses):
            while len(ranked[active - 1].steps) <= step:
                active -= 1
            if step in refreshes:
                springs.refresh(refreshes[step])
            gradients.merge(step, active, optimizer.beta, losses_now)
            springs.pull(optimizer.gradients, active)
            optimizer.step(active)
        totals = losses.double().sum(0)
        samples = [sum(len(indices) for _, indices in member.steps) for member in ranked]
        results: list[Any] = [None] * len(ranked)
        for row, place in enumerate(ranking):
            stiffness = mean_per_layer(springs.of(row), setup.layers) if setup.record else None
            update = rows[row] if displaced else rows[row] - anchor
            results[place] = (update, float(totals[row]) / max(1, samples[row]), stiffness)
        return results


def _has_classes(data: Data, classes: int) -> bool:
    """Whether the data is tensors with one of the classes for every sample (none of them to be ignored)."""
    if not isinstance(data, Samples) or data.targets.ndim != 1 or data.targets.is_floating_point():
        return False
    labels = data.targets if data.rows is None else data.targets[torch.from_numpy(data.rows)]
    return len(labels) > 0 and bool(labels.min() >= 0) and bool(labels.max() < classes)


def _is_free(objective: Objective, order: Order, layers: Layers, anchor: Tensor) -> bool:
    """Whether nothing pulls at the anchor."""
    views = layers.views(anchor, trainable_only=True)
    return not objective.stiffness(views, views, order.objective_state, layers)


def _refreshes(objective: Objective, members: list[_Member]) -> dict[int, list[int]]:
    """Before which steps which rows compute their stiffness anew."""
    due: dict[int, list[int]] = {0: list(range(len(members)))}
    if objective.refresh != "round":
        for row, member in enumerate(members):
            for step, (first_of_epoch, _) in enumerate(member.steps):
                if step and is_due(objective, first_of_epoch, first_of_round=False):
                    due.setdefault(step, []).append(row)
    return due


class _Gradients(Protocol):
    def merge(self, step: int, active: int, beta: float, losses: Tensor) -> None:
        """Gradients ← β gradients + the step's gradient, for the first rows; write the sums of their losses."""
        ...


class _PerceptronGradients:
    """Through the kernel; in a stack, short batches are padded with samples that do not count."""

    def __init__(
        self, network: Perceptron, members: list[_Member], weights: Tensor, into: Tensor, anchor: Tensor | None
    ) -> None:
        self.network, self.weights, self.into, self.anchor = network, weights, into, anchor
        self.passes: dict[int, Pass] = {}
        inputs, labels, offset = [], [], 0
        size = max(len(indices) for member in members for _, indices in member.steps)
        rows = np.full((len(members[0].steps), len(members), size), -1, dtype=np.int64)
        for at, member in enumerate(members):
            data = member.data
            assert isinstance(data, Samples)
            # A client's samples, once and together: batches are then gathered from the cache, not from all of memory.
            own = slice(None) if data.rows is None else torch.from_numpy(data.rows)
            inputs.append(data.inputs[own].flatten(1))
            labels.append(data.targets[own])
            for step, (_, indices) in enumerate(member.steps):
                rows[step, at, : len(indices)] = indices + offset
            offset += len(data)
        self.inputs = torch.cat(inputs).to(weights.dtype)
        self.targets = one_hot(torch.cat(labels), network.classes).to(weights.dtype)
        self.base: Tensor | None = None
        if anchor is not None:
            first = network.chain[0]
            self.base = self.inputs @ first.weight.of(anchor).t()
            if first.bias is not None:
                self.base += first.bias.of(anchor)
        counts = (rows >= 0).sum(2)
        self.lengths = counts[:, 0].tolist()
        self.rows = torch.from_numpy(np.maximum(rows, 0))
        if len(members) > 1:
            self.valid = torch.from_numpy(rows >= 0).to(weights.dtype)[..., None]
            self.scale = self.valid / torch.from_numpy(np.maximum(counts, 1))[..., None, None]
        bytes_per_step = rows[0].size * network.inputs * weights.itemsize
        self.ahead = max(1, GATHERED // bytes_per_step)  # steps whose samples are gathered in one go
        self.gathered: list[Tensor | None] = []

    def merge(self, step: int, active: int, beta: float, losses: Tensor) -> None:
        if active not in self.passes:
            self.passes[active] = Pass(self.network, self.weights, self.into, active, self.anchor)
        within = step % self.ahead
        if within == 0:
            rows = self.rows[step : step + self.ahead]
            shape, flat = (*rows.shape, -1), rows.reshape(-1)
            sources = (self.inputs, self.targets, self.base)
            self.gathered = [None if all_ is None else all_.index_select(0, flat).view(shape) for all_ in sources]
        if active == 1:
            length = self.lengths[step]
            inputs, targets, base = (None if part is None else part[within, 0, :length] for part in self.gathered)
            assert inputs is not None
            assert targets is not None
            losses[0] = self.passes[1].merge_one(inputs, targets, beta, base)
        else:
            inputs, targets, base = (None if part is None else part[within, :active] for part in self.gathered)
            assert inputs is not None
            assert targets is not None
            padded = targets * self.valid[step, :active]
            scale = self.scale[step, :active]
            losses[:active] = self.passes[active].merge_many(inputs, padded, scale, beta, base)


class _FunctionalGradients:
    """Through `torch.func`: any model and loss, for groups of clients whose batches are equally long."""

    def __init__(self, members: list[_Member], weights: Tensor, into: Tensor, setup: Setup) -> None:
        self.members, self.weights, self.into, self.setup = members, weights, into, setup
        frozen = {name: p.detach() for name, p in setup.model.named_parameters() if not p.requires_grad}
        setup.model.train()

        def loss(parameters: dict[str, Tensor], inputs: Any, targets: Any) -> Tensor:
            outputs = functional_call(setup.model, {**parameters, **frozen}, (inputs,))
            return setup.task.loss(outputs, targets)

        self.compute = vmap(grad_and_value(loss))

    def merge(self, step: int, active: int, beta: float, losses: Tensor) -> None:
        by_length: dict[int, list[int]] = {}
        for row in range(active):
            by_length.setdefault(len(self.members[row].steps[step][1]), []).append(row)
        for length, rows in by_length.items():
            parts = [self.setup.to_device(self.members[k].data.batch(self.members[k].steps[step][1])) for k in rows]
            inputs, targets = (torch.stack([part[i] for part in parts]) for i in (0, 1))
            chosen = self.weights[rows]
            parameters = {entry.name: entry.of(chosen) for layer in self.setup.layers.layers for entry in layer.entries}
            gradients, values = self.compute(parameters, inputs, targets)
            entries = (entry for layer in self.setup.layers.layers for entry in layer.entries)
            flat = torch.cat([entry.flatten(gradients[entry.name]) for entry in entries], dim=1)
            self.into[rows] = flat if beta == 0 else self.into[rows].mul_(beta).add_(flat)
            losses[rows] = values * length


class _Springs:
    """The springs of a stack, with the stiffness of each tensor as [S, …]."""

    def __init__(
        self,
        objective: Objective,
        orders: Sequence[Order],
        layers: Layers,
        rows: Tensor,
        anchor: Tensor,
        displaced: bool,
    ) -> None:
        self.objective, self.orders, self.layers = objective, orders, layers
        self.rows, self.flat_anchor, self.displaced = rows, anchor, displaced
        self.anchor = layers.views(anchor, trainable_only=True)
        self.entries = {entry.name: entry for layer in layers.layers for entry in layer.entries}
        self.stiffness: dict[str, Tensor] = {}
        self.pulls: dict[int, list[tuple[Tensor, Tensor, Tensor | None, Tensor]]] = {}  # by the number of active rows

    def refresh(self, which: Sequence[int]) -> None:
        """Compute some clients' stiffness."""
        self.pulls.clear()
        for row in which:
            local = self.flat_anchor + self.rows[row] if self.displaced else self.rows[row]
            views = self.layers.views(local, trainable_only=True)
            fresh = self.objective.stiffness(views, self.anchor, self.orders[row].objective_state, self.layers)
            for name in self.stiffness.keys() - fresh.keys():
                self.stiffness[name][row] = 0
            for name, c in fresh.items():
                if name not in self.stiffness:
                    self.stiffness[name] = c.new_zeros(len(self.orders), *c.shape)
                self.stiffness[name][row] = c

    def of(self, row: int) -> dict[str, Tensor]:
        """One client's stiffness."""
        return {name: c[row] for name, c in self.stiffness.items()}

    def pull(self, gradients: Tensor, active: int) -> None:
        """Add c (w − a)."""
        if not self.stiffness:
            return
        if active not in self.pulls:
            self.pulls[active] = [self._views(name, gradients, active) for name in self.stiffness]
        for gradient, weights, anchor, c in self.pulls[active]:
            gradient.addcmul_(weights if anchor is None else weights - anchor, c)

    def _views(self, name: str, gradients: Tensor, active: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        entry, c = self.entries[name], self.stiffness[name][:active]
        c = c.view(active, *[1] * (len(entry.shape) - c.ndim + 1), *c.shape[1:])
        anchor = None if self.displaced else self.anchor[name]
        return entry.of(gradients[:active]), entry.of(self.rows[:active]), anchor, c


class _Optimizer:
    """SGD or Adam on the rows of a stack; `beta` is what the next gradient is merged with."""

    def __init__(self, setup: Setup, rows: Tensor, round: int, anchor: Tensor | None) -> None:
        training = setup.training
        self.rows, self.anchor, self.gradients = rows, anchor, torch.zeros_like(rows)
        self.lr, self.decay = training.learning_rate(round), training.weight_decay
        self.adam = training.optimizer == "adam"
        self.beta = training.momentum
        if self.adam:
            self.first, self.second, self.count = torch.zeros_like(rows), torch.zeros_like(rows), 0

    def step(self, active: int) -> None:
        """Move the first rows."""
        rows, gradients = self.rows[:active], self.gradients[:active]
        if self.decay:
            gradients.add_(rows, alpha=self.decay)
            if self.anchor is not None:  # the rows are displacements from it, but all of the weights decay
                gradients.add_(self.anchor, alpha=self.decay)
        if not self.adam:
            rows.add_(gradients, alpha=-self.lr)
            return
        self.count += 1
        first, second = self.first[:active], self.second[:active]
        first.lerp_(gradients, 1 - 0.9)
        second.mul_(0.999).addcmul_(gradients, gradients, value=1 - 0.999)
        scale = (second / (1 - 0.999**self.count)).sqrt_().add_(1e-8)
        rows.addcdiv_(first, scale, value=-self.lr / (1 - 0.9**self.count))
