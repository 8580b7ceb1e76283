"""The one special kernel: plain multilayer perceptrons under cross-entropy, with the backward pass written out.

It works on displacements, D = W − A from the global weights A, where a spring pulls on them. What A itself does to the
samples in the first and largest layer, x Aᵀ, is computed once for all of a round.

Gradients, or momentum, are merged with the new gradient in the matrix product that computes it (V ← β V + dᵀ a). One
client works on matrices, several on batches of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedstrata.layers import Entry, Layers
from fedstrata.trainers.motion import Rows


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
    """Forward and backward for the first rows of a stack; the views are made once.

    With an `anchor`, the rows are displacements from it, and a step is given the anchor's part of the first layer.
    """

    def __init__(
        self,
        network: Perceptron,
        rows: Rows,
        gradients: Rows,
        active: int,
        keep: float,
        batch: int,
        anchor: Tensor | None = None,
    ) -> None:
        self.single, self.active = active == 1, active
        self.relu = [affine.relu for affine in network.chain]
        self.weights = [self._matrix(rows, affine.weight) for affine in network.chain]
        self.biases = [self._row(rows, affine.bias) for affine in network.chain]
        self.to_weights = [self._matrix(gradients, affine.weight) for affine in network.chain]
        self.to_biases = [self._row(gradients, affine.bias) for affine in network.chain]
        self.keep, self.nothing = keep, rows.numbers.new_zeros(1)
        self.ones = rows.numbers.new_ones(*(() if self.single else (active, 1)), batch)
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

    def _matrix(self, rows: Rows, entry: Entry) -> Tensor:
        view = rows.of(entry, self.active)
        return view[0] if self.single else view

    def _row(self, rows: Rows, entry: Entry | None) -> Tensor | None:
        if entry is None:
            return None
        view = rows.of(entry, self.active)
        return view if self.single else view[:, None, :]

    def merge(
        self, inputs: Tensor, targets: Tensor, scale: Tensor, outputs: Tensor, base: Tensor | None = None
    ) -> None:
        """Gradients ← keep · gradients + the gradient of the scaled losses' sum; `outputs` ← what the model says.

        For one client, `inputs` are [B, in] and `outputs` [classes, B]: the classes first, because a softmax along
        neighbours in memory is slow. `scale` is [1, B], and zero for a sample that only pads; `targets` are −scale
        where the class is the sample's and zero elsewhere. `base` is the anchor's x Aᵀ + b. For several clients all of
        them have one more dimension in front.
        """
        values = self._forward(inputs, outputs, base)
        error = torch.addcmul(targets, outputs.softmax(-2), scale).transpose(-1, -2)
        for at in reversed(range(len(self.weights))):
            to_weight, to_bias = self.to_weights[at], self.to_biases[at]
            if self.single:
                if to_bias is not None:
                    to_bias[0].addmv_(error.t(), self.ones, beta=self.keep)
                to_weight.addmm_(error.t(), values[at], beta=self.keep)
            else:
                if to_bias is not None:
                    to_bias.baddbmm_(self.ones, error, beta=self.keep)
                to_weight.baddbmm_(error.transpose(1, 2), values[at], beta=self.keep)
            error = self._back(error, values, at)

    def _forward(self, inputs: Tensor, outputs: Tensor, base: Tensor | None) -> list[Tensor]:
        """What enters each layer, [B, in]; the last one's result goes to `outputs`."""
        for anchor, displacement, place in self.displaced:
            torch.add(anchor, displacement, out=place)
        values, product = [inputs], torch.addmm if self.single else torch.baddbmm
        for at, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            if at == 0 and base is not None:
                bias = base if bias is None else base + bias
            if at + 1 == len(self.weights):
                start = self.nothing if bias is None else bias.transpose(-1, -2)
                product(start, weight, values[-1].transpose(-1, -2), out=outputs)
            else:
                start = self.nothing if bias is None else bias
                out = product(start, values[-1], self.transposed[at])
                values.append(out.relu_() if self.relu[at] else out)
        return values

    def _back(self, error: Tensor, values: list[Tensor], at: int) -> Tensor:
        """The error one layer further down."""
        if at == 0:
            return error
        error = error @ self.weights[at]
        return torch.ops.aten.threshold_backward(error, values[at], 0) if self.relu[at - 1] else error
