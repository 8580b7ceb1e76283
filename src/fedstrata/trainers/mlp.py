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
        self.chain = network.chain
        self.weights = [self._matrix(weights, affine.weight, active) for affine in self.chain]
        self.biases = [self._row(weights, affine.bias, active) for affine in self.chain]
        self.to_weights = [self._matrix(gradients, affine.weight, active) for affine in self.chain]
        self.to_biases = [self._row(gradients, affine.bias, active) for affine in self.chain]

    def _matrix(self, flat: Tensor, entry: Entry, active: int) -> Tensor:
        view = flat[:active, entry.start : entry.stop].view(active, *entry.shape)
        return view[0] if self.single else view

    def _row(self, flat: Tensor, entry: Entry | None, active: int) -> Tensor | None:
        if entry is None:
            return None
        view = flat[:active, entry.start : entry.stop]
        return view[0] if self.single else view[:, None, :]

    def merge_gradient(self, inputs: Tensor, targets: Tensor, scale: Tensor, beta: float) -> Tensor:
        """Merge the gradient of Σ scale · loss into the gradients, and return the sum of the losses, [active].

        `inputs` are [(active,) B, in]; `targets` one-hot, all zero for a sample that only pads; `scale` is one over the
        batch's length, zero for such a sample.
        """
        product, merge = (torch.addmm, Tensor.addmm_) if self.single else (torch.baddbmm, Tensor.baddbmm_)
        values = [inputs]
        for affine, weight, bias in zip(self.chain, self.weights, self.biases, strict=True):
            transposed = weight.transpose(-1, -2)
            out = values[-1] @ transposed if bias is None else product(bias, values[-1], transposed)
            values.append(out.relu_() if affine.relu else out)
        log_shares = values.pop().log_softmax(-1)
        losses = (log_shares * targets).sum((-2, -1)).neg_()
        error = log_shares.exp_().sub_(targets).mul_(scale)
        for at in reversed(range(len(self.chain))):
            merge(self.to_weights[at], error.transpose(-1, -2), values[at], beta=beta)
            bias_gradient = self.to_biases[at]
            if bias_gradient is not None:
                summed = error.sum(-2, keepdim=not self.single)
                bias_gradient.mul_(beta).add_(summed) if beta else bias_gradient.copy_(summed)
            if at:
                error = error @ self.weights[at]
                if self.chain[at - 1].relu:
                    error = torch.ops.aten.threshold_backward(error, values[at], 0)
        return losses.reshape(-1)
