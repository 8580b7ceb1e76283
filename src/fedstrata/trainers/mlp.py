"""The one special kernel: plain multilayer perceptrons under cross-entropy, with the backward pass written out.

A stack of S clients is a matrix of weights [S, P] and one of gradients, or of momentum, with which the new gradient is
merged in the matrix product that computes it (V ← β V + dᵀ a). One client works on matrices, several on batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedstrata.layers import Entry, Layers


@dataclass(frozen=True)
class Affine:
    """One linear layer: where its weight and bias are, and whether a ReLU follows."""

    weight: Entry
    bias: Entry | None
    relu: bool


@dataclass(frozen=True)
class Perceptron:
    """A chain of linear layers."""

    chain: tuple[Affine, ...]

    @property
    def inputs(self) -> int:
        """The number of inputs."""
        return self.chain[0].weight.shape[1]

    @property
    def classes(self) -> int:
        """The number of outputs."""
        return self.chain[-1].weight.shape[0]


def as_perceptron(model: nn.Module, layers: Layers, loss: Callable[..., Tensor]) -> Perceptron | None:
    """The model as a chain of linear layers, if that is all it is and cross-entropy is what it is trained on."""
    if loss is not F.cross_entropy or not isinstance(model, nn.Sequential):
        return None
    entries = {entry.name: entry for layer in layers.layers for entry in layer.entries}
    chain: list[Affine] = []
    for at, (name, module) in enumerate(model.named_children()):
        if type(module) is nn.Linear and f"{name}.weight" in entries:
            bias = entries.get(f"{name}.bias")
            if (bias is None) != (module.bias is None):
                return None  # a frozen bias
            chain.append(Affine(entries[f"{name}.weight"], bias, relu=False))
        elif type(module) is nn.ReLU and chain and not chain[-1].relu:
            chain[-1] = Affine(chain[-1].weight, chain[-1].bias, relu=True)
        elif not (type(module) is nn.Flatten and at == 0 and module.start_dim == 1 and module.end_dim == -1):
            return None
    travelling = sum(2 if affine.bias is not None else 1 for affine in chain)
    if not chain or chain[-1].relu or travelling != len(entries):
        return None
    return Perceptron(tuple(chain))


class Pass:
    """Forward and backward for the first `active` rows of a stack; the views are made once."""

    def __init__(self, network: Perceptron, weights: Tensor, gradients: Tensor, active: int) -> None:
        self.single = active == 1
        self.relu = [affine.relu for affine in network.chain]
        self.weights = [self._matrix(weights, affine.weight, active) for affine in network.chain]
        self.transposed = [weight.transpose(-1, -2) for weight in self.weights]
        self.biases = [self._row(weights, affine.bias, active) for affine in network.chain]
        self.to_weights = [self._matrix(gradients, affine.weight, active) for affine in network.chain]
        self.to_biases = [self._row(gradients, affine.bias, active) for affine in network.chain]
        self.ones = torch.ones(0)

    def _matrix(self, flat: Tensor, entry: Entry, active: int) -> Tensor:
        view = entry.of(flat[:active])
        return view[0] if self.single else view

    def _row(self, flat: Tensor, entry: Entry | None, active: int) -> Tensor | None:
        if entry is None:
            return None
        view = entry.of(flat[:active])
        return view[0] if self.single else view[:, None, :]

    def merge_one(self, inputs: Tensor, targets: Tensor, beta: float) -> Tensor:
        """Gradients ← β gradients + the gradient of the mean loss, for one client; return the sum of the losses.

        `inputs` are [B, in], `targets` [B, classes], one-hot.
        """
        values, error, loss = self._forward(inputs, targets, torch.addmm)
        scale, count = 1 / len(inputs), len(inputs)
        if len(self.ones) < count:
            self.ones = inputs.new_ones(count)
        for at in reversed(range(len(self.weights))):
            to_bias = self.to_biases[at]
            if to_bias is not None:
                to_bias.addmv_(error.t(), self.ones[:count], beta=beta, alpha=scale)
            self.to_weights[at].addmm_(error.t(), values[at], beta=beta, alpha=scale)
            error = self._back(error, values, at)
        return loss

    def merge_many(self, inputs: Tensor, targets: Tensor, scale: Tensor, beta: float) -> Tensor:
        """The same for several clients, [active, B, …]; return the sums of their losses, [active].

        `targets` are all zero for a sample that only pads; `scale`, [active, B, 1], is one over the batch's length, and
        zero for such a sample.
        """
        values, error, losses = self._forward(inputs, targets, torch.baddbmm)
        error.mul_(scale)
        for at in reversed(range(len(self.weights))):
            to_bias = self.to_biases[at]
            if to_bias is not None:
                to_bias.mul_(beta).add_(error.sum(1, keepdim=True))
            self.to_weights[at].baddbmm_(error.transpose(1, 2), values[at], beta=beta)
            error = self._back(error, values, at)
        return losses

    def _forward(
        self, inputs: Tensor, targets: Tensor, product: Callable[..., Tensor]
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """What enters each layer, softmax − target, and the sum of the losses."""
        values = [inputs]
        for relu, transposed, bias in zip(self.relu, self.transposed, self.biases, strict=True):
            out = values[-1] @ transposed if bias is None else product(bias, values[-1], transposed)
            values.append(out.relu_() if relu else out)
        log_shares = values.pop().log_softmax(-1)
        loss = torch.linalg.vecdot(log_shares.flatten(-2), targets.flatten(-2)).neg_()
        return values, log_shares.exp_().sub_(targets), loss

    def _back(self, error: Tensor, values: list[Tensor], at: int) -> Tensor:
        """The error one layer further down."""
        if at == 0:
            return error
        error = error @ self.weights[at]
        return torch.ops.aten.threshold_backward(error, values[at], 0) if self.relu[at - 1] else error
