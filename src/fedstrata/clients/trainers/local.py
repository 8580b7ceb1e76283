"""Local training: one client's steps, each by a gradient of its own and the spring's pull."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fedstrata.clients.setup import Setup
from fedstrata.clients.trainers.optimizer import local_optimizer, make_dense
from fedstrata.clients.trainers.schedule import Schedule
from fedstrata.clients.trainers.springs import Spring, is_due, mean_per_layer
from fedstrata.core.messages import Order
from fedstrata.tasks.task import Data

Function = TypeVar("Function", bound=Callable[..., Any])


def own_copy(function: Function) -> Function:
    """A loss or metric may count, too: every order has one that was never called."""
    try:
        return copy.deepcopy(function)
    except Exception:  # whatever a user's object raises when it is copied
        return function


class Steps(Protocol):
    """How one client's weights are moved by its batches."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The trainable ones by name; a step leaves its gradients on them."""
        ...

    def take(self, step: int, spring: Spring) -> None:
        """Find the gradient on the step's batch, let the spring pull, and move the weights."""
        ...

    def loss(self) -> float:
        """The mean task loss over the samples seen."""
        ...


def train(setup: Setup, order: Order, schedule: Schedule, steps: Steps, anchor: Tensor) -> tuple[float, Tensor | None]:
    """Take the steps of the schedule; return the mean task loss, and the stiffness in the end, if it is recorded."""
    anchors = setup.layers.views(anchor, trainable_only=True)
    spring = Spring(setup.objective, order.objective_state, setup.layers, steps.weights, anchors)
    stays = setup.objective.refresh == "round"
    for step in range(len(schedule)):
        if not (stays and step) and is_due(setup.objective, schedule.opens_epoch(step), first_of_round=step == 0):
            spring.refresh()
        steps.take(step, spring)
    stiffness = mean_per_layer(spring.stiffness, setup.layers) if setup.record else None
    return steps.loss(), stiffness


class AutogradSteps:
    """With autograd and torch's optimisers, for any model."""

    def __init__(self, setup: Setup, model: nn.Module, data: Data, schedule: Schedule, round: int) -> None:
        self.setup, self.model, self.data, self.schedule = setup, model, data, schedule
        self.weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.task_loss = own_copy(setup.task.loss)
        model.train()
        self.optimizer = local_optimizer(setup.training, self.weights.values(), round)
        self.total, self.seen = torch.zeros((), dtype=torch.float64), 0

    def take(self, step: int, spring: Spring) -> None:
        """Forward, backward, pull, move."""
        indices = self.schedule.batch(step)
        inputs, targets = self.setup.to_device(self.data.batch(indices))
        self.optimizer.zero_grad()
        loss = self.task_loss(self.model(inputs), targets)
        if self.setup.objective.differentiable:
            (loss + spring.energy()).backward()  # type: ignore[no-untyped-call]
            make_dense(self.weights.values())
        else:
            loss.backward()  # type: ignore[no-untyped-call]
            make_dense(self.weights.values())
            spring.pull()
        self.optimizer.step()
        self.total += loss.detach().double().cpu() * len(indices)
        self.seen += len(indices)

    def loss(self) -> float:
        """Over every sample as often as it was seen."""
        return float(self.total) / max(1, self.seen)
