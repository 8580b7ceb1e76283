"""The one special kernel: plain multilayer perceptrons under cross-entropy, with the backward pass written out.

It works on displacements, D = W − A from the global weights A, where a spring pulls on them: c D is then one pass over
memory. What A itself does to the samples in the first and largest layer, x Aᵀ, is computed once for all of a round.

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
    if loss is not F.cross_entropy or type(model) is not nn.Sequential or any(map(_has_hooks, model.modules())):
        return None  # a subclass may have a forward of its own
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


def _has_hooks(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


class Pass:
    """Forward and backward for the first `active` rows of a stack; the views are made once.

    With an `anchor`, the rows are displacements from it, and a step is given the anchor's part of the first layer.
    """

    def __init__(
        self, network: Perceptron, rows: Tensor, gradients: Tensor, active: int, anchor: Tensor | None = None
    ) -> None:
        self.single = active == 1
        self.relu = [affine.relu for affine in network.chain]
        self.weights = [self._matrix(rows, affine.weight, active) for affine in network.chain]
        self.biases = [self._row(rows, affine.bias, active) for affine in network.chain]
        self.to_weights = [self._matrix(gradients, affine.weight, active) for affine in network.chain]
        self.to_biases = [self._row(gradients, affine.bias, active) for affine in network.chain]
        self.ones = torch.ones(0)
        self.displaced: list[tuple[Tensor, Tensor, Tensor]] = []  # anchor, displacement, and where their sum goes
        if anchor is not None:
            for at, affine in enumerate(network.chain[1:], start=1):
                self.weights[at] = self._sum(affine.weight.of(anchor), self.weights[at])
                bias = self.biases[at]
                if bias is not None and affine.bias is not None:
                    self.biases[at] = self._sum(affine.bias.of(anchor), bias)
        self.transposed = [weight.transpose(-1, -2) for weight in self.weights]

    def _sum(self, anchor: Tensor, displacement: Tensor) -> Tensor:
        self.displaced.append((anchor, displacement, torch.empty_like(displacement)))
        return self.displaced[-1][2]

    def _matrix(self, flat: Tensor, entry: Entry, active: int) -> Tensor:
        view = entry.of(flat[:active])
        return view[0] if self.single else view

    def _row(self, flat: Tensor, entry: Entry | None, active: int) -> Tensor | None:
        if entry is None:
            return None
        view = entry.of(flat[:active])
        return view[0] if self.single else view[:, None, :]

    def merge_one(self, inputs: Tensor, targets: Tensor, beta: float, base: Tensor | None = None) -> Tensor:
        """Gradients ← β gradients + the gradient of the mean loss, for one client; return the sum of the losses.

        `inputs` are [B, in], `targets` [B, classes], one-hot; `base` is the anchor's x Aᵀ + b.
        """
        values, error, loss = self._forward(inputs, targets, base, torch.addmm)
        count = inputs.shape[0]
        scale = 1 / count
        if self.ones.shape[0] < count:
            self.ones = inputs.new_ones(count)
        for at in reversed(range(len(self.weights))):
            to_bias = self.to_biases[at]
            if to_bias is not None:
                to_bias.addmv_(error.t(), self.ones[:count], beta=beta, alpha=scale)
            self.to_weights[at].addmm_(error.t(), values[at], beta=beta, alpha=scale)
            error = self._back(error, values, at)
        return loss

    def merge_many(
        self, inputs: Tensor, targets: Tensor, scale: Tensor, beta: float, base: Tensor | None = None
    ) -> Tensor:
        """The same for several clients, [active, B, …]; return the sums of their losses, [active].

        `targets` are all zero for a sample that only pads; `scale`, [active, B, 1], is one over the batch's length, and
        zero for such a sample.
        """
        values, error, losses = self._forward(inputs, targets, base, torch.baddbmm)
        error.mul_(scale)
        for at in reversed(range(len(self.weights))):
            to_bias = self.to_biases[at]
            if to_bias is not None:
                to_bias.mul_(beta).add_(error.sum(1, keepdim=True))
            self.to_weights[at].baddbmm_(error.transpose(1, 2), values[at], beta=beta)
            error = self._back(error, values, at)
        return losses

    def _forward(
        self, inputs: Tensor, targets: Tensor, base: Tensor | None, product: Callable[..., Tensor]
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """What enters each layer, softmax − target, and the sum of the losses."""
        for anchor, displacement, place in self.displaced:
            torch.add(anchor, displacement, out=place)
        values = [inputs]
        for at, (relu, transposed, bias) in enumerate(zip(self.relu, self.transposed, self.biases, strict=True)):
            if at == 0 and base is not None:
                bias = base if bias is None else base + bias
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
