"""The trainer `client`: one client at a time, with autograd and torch's optimisers. It takes any model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedstrata.messages import Order
from fedstrata.tasks.task import Data
from fedstrata.trainers.optimizer import local_optimizer
from fedstrata.trainers.schedule import schedule
from fedstrata.trainers.springs import Spring, is_due, mean_per_layer

if TYPE_CHECKING:
    from fedstrata.client import Setup


def train_one(setup: Setup, model: nn.Module, order: Order, data: Data, anchor: Tensor) -> tuple[float, Tensor | None]:
    """Train the model, whose weights are bound to the client's flat vector; return mean task loss and stiffness."""
    model.train()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    anchors = setup.layers.views(anchor, trainable_only=True)
    spring = Spring(setup.objective, order.objective_state, setup.layers, parameters, anchors)
    optimizer = local_optimizer(setup.training, parameters.values(), order.round)
    total, seen = torch.zeros((), dtype=torch.float64), 0
    plan = schedule(len(data), order, setup.training, setup.seed)
    for step in range(len(plan)):
        if is_due(setup.objective, first_of_epoch=plan.opens_epoch(step), first_of_round=step == 0):
            spring.refresh()
        indices = plan.batch(step)
        inputs, targets = setup.to_device(data.batch(indices))
        optimizer.zero_grad()
        loss = setup.task.loss(model(inputs), targets)
        if setup.objective.differentiable:
            (loss + spring.energy()).backward()  # type: ignore[no-untyped-call]
        else:
            loss.backward()  # type: ignore[no-untyped-call]
            spring.pull()
        optimizer.step()
        total += loss.detach().double().cpu() * len(indices)
        seen += len(indices)
    stiffness = mean_per_layer(spring.stiffness, setup.layers) if setup.record else None
    return float(total) / max(1, seen), stiffness
