"""A task that is no classification, with a metric that goes down."""

from __future__ import annotations

import torch
from torch import nn

from fedstrata.tasks.metric import Metric
from fedstrata.tasks.task import Task


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, targets)


def regression(seed: int = 0, clients: int = 3) -> Task:
    generator = torch.Generator().manual_seed(seed)
    truth = torch.tensor([[1.0], [-2.0]])

    def data(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(count, 2, generator=generator)
        return inputs, inputs @ truth

    return Task(
        model=lambda: nn.Linear(2, 1),
        clients=[data(20) for _ in range(clients)],
        evaluation={"test": data(50)},
        loss=nn.functional.mse_loss,
        metric=Metric("mse", squared, "min"),
        name="regression",
    )
