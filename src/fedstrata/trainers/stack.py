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
        weights = anchor.expand(len(ranked), -1).clone()
        springs = _Springs(setup.objective, [m.order for m in ranked], setup.layers, weights, anchor)
        optimizer = _Optimizer(setup, weights, orders[0].round)
        gradients = self._gradients(ranked, weights, optimizer.gradients)
        refreshes = _refreshes(setup.objective, ranked)
        losses = torch.zeros(len(ranked[0].steps), len(ranked), dtype=weights.dtype)
        active = len(ranked)
        for step, losses_now in enumerate(losses):
            while len(ranked[active - 1].steps) <= step:
                active -= 1
            for row in refreshes.get(step, ()):
                springs.refresh(row)
            gradients.merge(step, active, optimizer.beta, losses_now)
            springs.pull(optimizer.gradients, active)
            optimizer.step(active)
        totals = losses.double().sum(0)
        samples = [sum(len(indices) for _, indices in member.steps) for member in ranked]
        results: list[Any] = [None] * len(ranked)
        for row, place in enumerate(ranking):
            stiffness = mean_per_layer(springs.of(row), setup.layers) if setup.record else None
            results[place] = (weights[row] - anchor, float(totals[row]) / max(1, samples[row]), stiffness)
        return results

    def _gradients(self, members: list[_Member], weights: Tensor, into: Tensor) -> _Gradients:
        if self.network is not None and all(_has_classes(member.data) for member in members):
            return _PerceptronGradients(self.network, members, weights, into, self.setup)
        return _FunctionalGradients(members, weights, into, self.setup)


def _has_classes(data: Data) -> bool:
    """Whether the data is tensors with a class per sample."""
    return isinstance(data, Samples) and data.targets.ndim == 1 and not data.targets.is_floating_point()


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
        self, network: Perceptron, members: list[_Member], weights: Tensor, into: Tensor, setup: Setup
    ) -> None:
        self.network, self.weights, self.into = network, weights, into
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
        counts = (rows >= 0).sum(2)
        self.lengths = counts[:, 0].tolist()
        self.rows = torch.from_numpy(np.maximum(rows, 0))
        if len(members) > 1:
            self.valid = torch.from_numpy(rows >= 0).to(weights.dtype)[..., None]
            self.scale = self.valid / torch.from_numpy(np.maximum(counts, 1))[..., None, None]
        bytes_per_step = rows[0].size * network.inputs * weights.itemsize
        self.ahead = max(1, GATHERED // bytes_per_step)  # steps whose samples are gathered in one go
        self.gathered: tuple[Tensor, Tensor]

    def merge(self, step: int, active: int, beta: float, losses: Tensor) -> None:
        if active not in self.passes:
            self.passes[active] = Pass(self.network, self.weights, self.into, active)
        within = step % self.ahead
        if within == 0:
            rows = self.rows[step : step + self.ahead]
            shape = (*rows.shape, -1)
            flat = rows.reshape(-1)
            inputs, targets = self.inputs.index_select(0, flat), self.targets.index_select(0, flat)
            self.gathered = inputs.view(shape), targets.view(shape)
        inputs, targets = self.gathered[0][within], self.gathered[1][within]
        if active == 1:
            length = self.lengths[step]
            losses[0] = self.passes[1].merge_one(inputs[0, :length], targets[0, :length], beta)
        else:
            padded = targets[:active] * self.valid[step, :active]
            scale = self.scale[step, :active]
            losses[:active] = self.passes[active].merge_many(inputs[:active], padded, scale, beta)


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
        self, objective: Objective, orders: Sequence[Order], layers: Layers, weights: Tensor, anchor: Tensor
    ) -> None:
        self.objective, self.orders, self.layers = objective, orders, layers
        self.anchor = layers.views(anchor, trainable_only=True)
        self.locals = [layers.views(row, trainable_only=True) for row in weights]
        self.entries = {entry.name: entry for layer in layers.layers for entry in layer.entries}
        self.weights, self.stiffness = weights, dict[str, Tensor]()

    def refresh(self, row: int) -> None:
        """Compute one client's stiffness."""
        state = self.orders[row].objective_state
        fresh = self.objective.stiffness(self.locals[row], self.anchor, state, self.layers)
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
        for name, c in self.stiffness.items():
            entry = self.entries[name]
            stretch = entry.of(self.weights[:active]) - self.anchor[name]
            c = c[:active].view(active, *[1] * (len(entry.shape) - c.ndim + 1), *c.shape[1:])
            entry.of(gradients[:active]).addcmul_(stretch, c)


class _Optimizer:
    """SGD or Adam on the rows of a stack; `beta` is what the next gradient is merged with."""

    def __init__(self, setup: Setup, weights: Tensor, round: int) -> None:
        training = setup.training
        self.weights, self.gradients = weights, torch.zeros_like(weights)
        self.lr, self.decay = training.learning_rate(round), training.weight_decay
        self.adam = training.optimizer == "adam"
        self.beta = training.momentum
        if self.adam:
            self.first, self.second, self.count = torch.zeros_like(weights), torch.zeros_like(weights), 0

    def step(self, active: int) -> None:
        """Move the first rows."""
        weights, gradients = self.weights[:active], self.gradients[:active]
        if self.decay:
            gradients.add_(weights, alpha=self.decay)
        if not self.adam:
            weights.add_(gradients, alpha=-self.lr)
            return
        self.count += 1
        first, second = self.first[:active], self.second[:active]
        first.lerp_(gradients, 1 - 0.9)
        second.mul_(0.999).addcmul_(gradients, gradients, value=1 - 0.999)
        scale = (second / (1 - 0.999**self.count)).sqrt_().add_(1e-8)
        weights.addcdiv_(first, scale, value=-self.lr / (1 - 0.9**self.count))
