"""What moves one client's weights at each step, by the gradients that autograd left on them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from fedstrata.training import Training


class Optimizer(Protocol):
    """As torch's optimisers are used here."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def step(self) -> object:
        """Move the weights."""


class Sgd:
    """SGD with momentum in torch's functional form.

    The class `torch.optim.SGD` does the same, but imports torch's compiler first: a second or two for every worker.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        self.parameters = list(parameters)
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.velocities: dict[Tensor, Tensor | None] = {}

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move the weights that have a gradient; a weight may get its first one later than others."""
        moved = [parameter for parameter in self.parameters if parameter.grad is not None]
        for group in (
            [parameter for parameter in moved if self.velocities.get(parameter) is not None],
            [parameter for parameter in moved if self.velocities.get(parameter) is None],
        ):
            velocities = [self.velocities.get(parameter) for parameter in group]
            sgd(
                group,
                [parameter.grad for parameter in group if parameter.grad is not None],
                velocities,  # torch puts the first ones into this list
                fused=True,
                lr=self.lr,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                dampening=0,
                nesterov=False,
                maximize=False,
            )
            self.velocities.update(zip(group, velocities, strict=True))


def make_dense(weights: Iterable[Tensor]) -> None:
    """Gradients of sparse embeddings as others are: neither springs nor all optimisers can take them."""
    for weight in weights:
        if weight.grad is not None and weight.grad.layout is not torch.strided:
            weight.grad = weight.grad.to_dense()


def local_optimizer(training: Training, parameters: Iterable[Tensor], round: int) -> Optimizer:
    """A fresh optimiser for one client's round."""
    lr, decay = training.learning_rate(round), training.weight_decay
    if training.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=lr, weight_decay=decay, fused=True)
    return Sgd(parameters, lr, training.momentum, decay)
