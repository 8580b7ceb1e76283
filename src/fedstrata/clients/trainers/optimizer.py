"""What moves one client's weights at each step, by the gradients that autograd left on them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from fedstrata.core.training import LocalTraining


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
        self.velocities: list[Tensor | None] = [None] * len(self.parameters)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move the weights that have a gradient; a weight may get its first one later than others."""
        moved = [(at, weight, weight.grad) for at, weight in enumerate(self.parameters) if weight.grad is not None]
        for has_begun in (True, False):
            group = [one for one in moved if (self.velocities[one[0]] is not None) is has_begun]
            velocities = [self.velocities[at] for at, _, _ in group]
            sgd(
                [weight for _, weight, _ in group],
                [gradient for _, _, gradient in group],
                velocities,  # torch puts the first ones into this list
                fused=True,
                lr=self.lr,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                dampening=0,
                nesterov=False,
                maximize=False,
            )
            for (at, _, _), velocity in zip(group, velocities, strict=True):
                self.velocities[at] = velocity


def make_dense(weights: Iterable[Tensor]) -> None:
    """Gradients of sparse embeddings as others are: neither springs nor all optimisers can take them."""
    for weight in weights:
        gradient = weight.grad
        if gradient is not None and gradient.layout is not torch.strided:
            weight.grad = gradient.to_dense()


def local_optimizer(training: LocalTraining, parameters: Iterable[Tensor], round: int) -> Optimizer:
    """A fresh optimiser for one client's round."""
    lr, decay = training.learning_rate(round), training.weight_decay
    if training.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=lr, weight_decay=decay, fused=True)
    return Sgd(parameters, lr, training.momentum, decay)
