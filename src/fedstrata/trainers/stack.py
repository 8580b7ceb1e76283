"""The trainer `stack`: several clients in one batched computation, their weights laid out together.

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
from torch.nn.modules.dropout import _DropoutNd

from fedstrata.algorithm import Objective
from fedstrata.layers import Layers
from fedstrata.messages import Order
from fedstrata.tasks.task import Data, Samples
from fedstrata.trainers.mlp import Pass, Perceptron, as_perceptron
from fedstrata.trainers.motion import Motion, OnDisplacements, OnWeights, Springs
from fedstrata.trainers.schedule import Schedule, schedule
from fedstrata.trainers.springs import is_due, mean_per_layer

if TYPE_CHECKING:
    from fedstrata.client import Setup

CACHE = 5 << 18
"""Bytes of weights and gradients that a stack may take: a bit more than half of a core's second-level cache."""

LARGEST = 20
"""Clients in a stack: more of them share the cost of a call further, but leave fewer stacks for the workers."""

GATHERED, FEWEST_GATHERED = 1 << 18, 16
"""Bytes of samples to gather in one go; but at least those of so many steps."""


def stack_size(layers: Layers) -> int:
    """How many clients to stack at most, from the model's size alone."""
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
    plan: Schedule


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
            members.append(_Member(order, data, schedule(len(data), order, training, setup.seed)))
        ranking = sorted(range(len(members)), key=lambda k: -len(members[k].plan))
        ranked = [members[k] for k in ranking]
        network = self.network
        kernel = network is not None and all(_has_classes(member.data, network.classes) for member in ranked)
        refreshes = _refreshes(setup.objective, ranked)
        springs = Springs(setup.objective, [member.order for member in ranked], setup.layers, anchor)
        free = not refreshes and _is_free(setup.objective, ranked[0].order, setup.layers, anchor)
        # Displacements need a model that can be given as the anchor's part and theirs: the kernel.
        displaced = kernel and training.optimizer == "sgd" and not free
        motion: Motion = (OnDisplacements if displaced else OnWeights)(setup, orders[0].round, springs)
        gradients: _Gradients
        if kernel:
            assert network is not None
            gradients = _PerceptronGradients(network, ranked, motion)
        else:
            gradients = _FunctionalGradients(ranked, motion, setup)
        active = len(ranked)
        for step in range(len(ranked[0].plan)):
            while len(ranked[active - 1].plan) <= step:
                active -= 1
            if step == 0:
                motion.refresh(step, range(active))
            elif step in refreshes:
                motion.refresh(step, refreshes[step])
            gradients.merge(step, active)
            motion.step(step, active)
        gradients.close()
        results: list[Any] = [None] * len(ranked)
        for row, place in enumerate(ranking):
            plan = ranked[row].plan
            loss = float(gradients.losses[row]) / max(1, int((plan.positions >= 0).sum()))
            stiffness = mean_per_layer(springs.of(row), setup.layers) if setup.record else None
            results[place] = (motion.update(row, len(plan)), loss, stiffness)
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
    """Before which steps, other than the first, which rows compute their stiffness anew."""
    due: dict[int, list[int]] = {}
    if objective.refresh != "round":
        for row, member in enumerate(members):
            for step in range(1, len(member.plan)):
                if is_due(objective, first_of_epoch=member.plan.opens_epoch(step), first_of_round=step == 0):
                    due.setdefault(step, []).append(row)
    return due


class _Gradients(Protocol):
    losses: Tensor
    """The sum of each client's losses, float64 [S], once `close` was called."""

    def merge(self, step: int, active: int) -> None:
        """Merge the step's gradient, for the first rows, as the motion wants it."""
        ...

    def close(self) -> None:
        """The last step is done."""
        ...


class _PerceptronGradients:
    """Through the kernel; in a stack, short batches are padded with samples that do not count."""

    def __init__(self, network: Perceptron, members: list[_Member], motion: Motion) -> None:
        self.network, self.members, self.motion = network, members, motion
        anchor = motion.anchor
        self.dtype = motion.buffers(0)[0].numbers.dtype
        self.inputs, targets, owned = _in_one_place([member.data for member in members], copied=anchor is not None)
        width = max(member.plan.positions.shape[1] for member in members)
        rows = np.zeros((len(members[0].plan), len(members), width), dtype=np.int64)
        valid = np.zeros(rows.shape, dtype=bool)
        for at, (member, own) in enumerate(zip(members, owned, strict=True)):
            positions = member.plan.positions
            rows[: len(positions), at, : positions.shape[1]] = own[positions]  # at −1, some sample, as padding
            valid[: len(positions), at, : positions.shape[1]] = positions >= 0
        self.rows = torch.from_numpy(rows)
        self.labels = targets[self.rows].where(torch.from_numpy(valid), -1)  # padding is of no class
        scale = motion.share * valid / np.maximum(valid.sum(2, keepdims=True), 1)
        self.scale = torch.from_numpy(scale).to(self.dtype)[:, :, None, :]
        self.base: Tensor | None = None
        if anchor is not None:
            first = network.chain[0]
            self.base = self.inputs.to(self.dtype) @ first.weight.of(anchor).t()
            if first.bias is not None:
                self.base += first.bias.of(anchor)
        self.classes = torch.arange(network.classes)[:, None]
        self.ahead = max(FEWEST_GATHERED, GATHERED // (rows[0].size * network.inputs * self.dtype.itemsize))
        self.passes: dict[tuple[int, int], Pass] = {}
        self.block: _Block | None = None
        self.losses = torch.zeros(len(members), dtype=torch.float64)

    def merge(self, step: int, active: int) -> None:
        block = self.block
        if block is None or step == block.until:
            self.close()
            block = self.block = self._gather(step, active)
        self._pass(step, active).merge(*block.steps[step - block.first])

    def _pass(self, step: int, active: int) -> Pass:
        """The rows and where their gradients go are the same in every second step, if not in all."""
        key = (step % 2, active)
        if key not in self.passes:
            motion, batch = self.motion, self.rows.shape[2]
            self.passes[key] = Pass(self.network, *motion.buffers(step), active, motion.keep, batch, motion.anchor)
        return self.passes[key]

    def close(self) -> None:
        if self.block is not None:
            right = self.block.outputs.log_softmax(-2) * self.block.is_class
            losses = right.sum((0, -1, -2)).neg_()
            self.losses[: losses.numel()] += losses

    def _gather(self, step: int, active: int) -> _Block:
        """The next steps' batches, up to where a client has no more."""
        until = min(step + self.ahead, len(self.members[active - 1].plan))
        here = np.s_[step:until, 0] if active == 1 else np.s_[step:until, :active]
        rows, scale = self.rows[here], self.scale[here]

        def gather(table: Tensor) -> Tensor:
            return table.index_select(0, rows.reshape(-1)).view(*rows.shape, -1)

        inputs = gather(self.inputs).to(self.dtype)
        is_class = self.labels[here].unsqueeze(-2) == self.classes
        targets = is_class * -scale
        outputs = torch.empty_like(targets)
        base = [None] * len(rows) if self.base is None else gather(self.base).unbind()
        parts = (part.unbind() for part in (inputs, targets, scale, outputs))
        return _Block(step, until, is_class, outputs, list(zip(*parts, base, strict=True)))


@dataclass
class _Block:
    """Some steps with the same active clients, gathered together: [steps, active, …], or [steps, …] for one client."""

    first: int
    until: int
    is_class: Tensor
    outputs: Tensor
    steps: list[tuple[Any, ...]]
    """For each of them what `Pass.merge` asks for: inputs, targets, scale, outputs, base."""


def _in_one_place(clients: Sequence[Data], copied: bool) -> tuple[Tensor, Tensor, list[np.ndarray]]:
    """Inputs as vectors, labels, and which rows are whose. Tensors that clients share stay, unless `copied`."""
    samples = [data for data in clients if isinstance(data, Samples)]
    inputs, targets = samples[0].inputs, samples[0].targets
    owned = [np.arange(len(data)) if data.rows is None else data.rows for data in samples]
    if copied or any(data.inputs is not inputs or data.targets is not targets for data in samples):
        pairs = [(data, torch.from_numpy(own)) for data, own in zip(samples, owned, strict=True)]
        inputs = torch.cat([data.inputs[own] for data, own in pairs])
        targets = torch.cat([data.targets[own] for data, own in pairs])
        ends = np.cumsum([len(own) for own in owned])
        owned = [np.arange(end - len(own), end) for own, end in zip(owned, ends, strict=True)]
    return inputs.flatten(1), targets, owned


class _FunctionalGradients:
    """Through `torch.func`: any model and loss, for groups of clients whose batches are equally long."""

    def __init__(self, members: list[_Member], motion: Motion, setup: Setup) -> None:
        self.members, self.motion, self.setup = members, motion, setup
        self.losses = torch.zeros(len(members), dtype=torch.float64)
        frozen = {name: p.detach() for name, p in setup.model.named_parameters() if not p.requires_grad}
        setup.model.train()

        def loss(parameters: dict[str, Tensor], inputs: Any, targets: Any) -> Tensor:
            outputs = functional_call(setup.model, {**parameters, **frozen}, (inputs,))
            return setup.task.loss(outputs, targets)

        self.compute = vmap(grad_and_value(loss))

    def merge(self, step: int, active: int) -> None:
        weights, into = self.motion.buffers(step)
        by_length: dict[int, list[tuple[int, np.ndarray]]] = {}
        for row in range(active):
            indices = self.members[row].plan.batch(step)
            by_length.setdefault(len(indices), []).append((row, indices))
        for length, group in by_length.items():
            rows = [row for row, _ in group]
            parts = [self.setup.to_device(self.members[row].data.batch(indices)) for row, indices in group]
            inputs, targets = (torch.stack([part[i] for part in parts]) for i in (0, 1))
            parameters = {entry.name: weights.of(entry, active)[rows] for entry in weights.entries}
            gradients, values = self.compute(parameters, inputs, targets)
            for entry in into.entries:
                place = into.of(entry, active)
                merged = place[rows].mul_(self.motion.keep).add_(gradients[entry.name], alpha=self.motion.share)
                place[rows] = merged
            self.losses[rows] += values.double() * length

    def close(self) -> None:
        """Losses are up to date after each step."""
