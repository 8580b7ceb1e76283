"""The one special kernel: plain multilayer perceptrons under cross-entropy, with the backward pass written out.

All weights of a client lie in one vector, and their gradients, or momentum, in another. The new gradient is merged with
it in the matrix product that computes it (V ← β V + dᵀ a), and one addition moves all weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedstrata.clients.local import ProximalTerm, Schedule
from fedstrata.clients.modules import has_hooks
from fedstrata.clients.training import Setup, local_optimizer
from fedstrata.core.axes import Tensors
from fedstrata.core.layers import Entry, Layers
from fedstrata.tasks.task import Data, Samples

GATHERED, FEWEST_GATHERED = 1 << 18, 16
"""Bytes of samples to gather in one go; but at least those of so many steps."""


@dataclass(frozen=True)
class Affine:
    """One linear layer: where its weight and bias are, and whether a ReLU follows."""

    weight: Entry
    bias: Entry | None
    relu: bool


@dataclass(frozen=True)
class Perceptron:
    """A chain of linear layers, and whether it takes samples of any shape as vectors."""

    chain: tuple[Affine, ...]
    flattens: bool

    def takes(self, data: Data) -> bool:
        """Whether these are tensors of the right shape with a class for every sample, none of them to be ignored."""
        if not isinstance(data, Samples):
            return False
        inputs, targets = data.inputs, data.targets
        if not inputs.is_floating_point() or not (inputs.ndim == 2 or (self.flattens and inputs.ndim > 2)):
            return False
        if inputs[:1].numel() != self.chain[0].weight.shape[1] or targets.ndim != 1 or targets.dtype != torch.int64:
            return False
        labels = targets if data.rows is None else targets[torch.from_numpy(data.rows)]
        return len(labels) > 0 and bool(labels.min() >= 0) and bool(labels.max() < self.chain[-1].weight.shape[0])


def as_perceptron(model: nn.Module, layers: Layers, loss: Callable[..., Tensor]) -> Perceptron | None:
    """The model as a chain of linear layers, if that is all it is and cross-entropy is what it is trained on."""
    if loss is not F.cross_entropy or type(model) is not nn.Sequential or has_hooks(model):
        return None  # a subclass may have a forward of its own
    if any(callable(value) for module in model.modules() for value in module.__dict__.values()):
        return None  # and so may an object
    places = {p.untyped_storage().data_ptr() for p in model.parameters() if type(p) is nn.Parameter}
    if len(places) != len(list(model.parameters())):
        return None  # a parameter of another class, or two that share their numbers
    entries = {entry.name: entry for layer in layers.layers for entry in layer.entries}
    chain: list[Affine] = []
    flattens = False
    for at, (name, module) in enumerate(model._modules.items()):  # a ReLU may be there several times
        if type(module) is nn.Linear and f"{name}.weight" in entries:
            bias = entries.get(f"{name}.bias")
            if (bias is None) != (module.bias is None):
                return None  # a frozen bias
            chain.append(Affine(entries[f"{name}.weight"], bias, relu=False))
        elif type(module) is nn.ReLU and chain and not chain[-1].relu:
            chain[-1] = Affine(chain[-1].weight, chain[-1].bias, relu=True)
        elif type(module) is nn.Flatten and at == 0 and module.start_dim == 1 and module.end_dim == -1:
            flattens = True
        else:
            return None
    travelling = sum(2 if affine.bias is not None else 1 for affine in chain)
    if not chain or chain[-1].relu or travelling != len(entries):
        return None
    return Perceptron(tuple(chain), flattens)


class PerceptronSteps:
    """A client's steps by the kernel, on its flat weights in place."""

    def __init__(
        self,
        setup: Setup,
        network: Perceptron,
        data: Samples,
        schedule: Schedule,
        flat: Tensor,
        round: int,
        anchor: Tensor,
    ) -> None:
        training, self.layers = setup.training, setup.layers.whole
        self.flat, self.gradients = flat, torch.zeros_like(flat)
        self.anchor, self.moved = anchor, torch.empty_like(flat)
        self.pulls: tuple[Tensors, list[tuple[Tensor, Tensor, float | Tensor]]] | None = None
        self.weights = self.layers.views(flat, trainable_only=True)
        for name, gradient in self.layers.views(self.gradients, trainable_only=True).items():
            self.weights[name].grad = gradient
        self.keep, self.lr, self.decay = 0.0, training.learning_rate(round), training.weight_decay
        self.optimizer = None
        if training.optimizer == "sgd":
            self.keep = training.momentum
        else:
            flat.grad = self.gradients
            self.optimizer = local_optimizer(training, [flat], round)
        before = (None, *network.chain)
        self.chain = [_Link(*pair, flat, self.gradients) for pair in zip(before, network.chain, strict=False)]
        self.hidden, self.backwards = self.chain[:-1], self.chain[::-1]
        own = torch.arange(len(data)) if data.rows is None else torch.from_numpy(data.rows)
        self.inputs, self.schedule, self.step = data.inputs.flatten(1), schedule, 0
        positions = torch.from_numpy(schedule.positions)
        is_sample = positions >= 0
        self.rows = own[positions.clamp(min=0)]  # where a batch is short, some sample that does not count
        scale = is_sample.double() / is_sample.sum(1, keepdim=True).clamp(min=1)
        self.scale = scale.to(flat.dtype)[:, None, :]
        self.labels = torch.where(is_sample, data.targets[self.rows], -1)
        self.classes = torch.arange(network.chain[-1].weight.shape[0])[:, None]
        self.ones = flat.new_ones(positions.shape[1])
        self.ahead = max(FEWEST_GATHERED, GATHERED // (self.rows[0].numel() * self.inputs.shape[1] * flat.itemsize))
        self.block: _Block | None = None
        self.total, self.seen = 0.0, int(is_sample.sum())

    def take(self, step: int, term: ProximalTerm) -> None:
        """Merge the gradient of the mean loss, pull, move."""
        block = self.block
        if block is None or step == block.until:
            block = self.block = self._gather(step)
        self._merge(*block.steps[step - block.first])
        if term.stiffness:
            self._pull(term)
        if term.force is not None:
            self.gradients[: len(term.force)].add_(term.force)
        if self.optimizer is not None:
            self.optimizer.step()
            return
        if self.decay:
            self.gradients.add_(self.flat, alpha=self.decay)
        self.flat.add_(self.gradients, alpha=-self.lr)

    def _pull(self, term: ProximalTerm) -> None:
        """Add c (w − a) to the gradients, as the term itself would, in fewer passes over the weights."""
        if self.pulls is None or self.pulls[0] is not term.stiffness:
            self.pulls = (term.stiffness, self._pulls(term))
        torch.sub(self.flat, self.anchor, out=self.moved)
        for gradient, moved, c in self.pulls[1]:
            if isinstance(c, float):
                gradient.add_(moved, alpha=c)
            else:
                gradient.addcmul_(moved, c)

    def _pulls(self, term: ProximalTerm) -> list[tuple[Tensor, Tensor, float | Tensor]]:
        """Gradient, displacement and stiffness of each tensor, or of all together, if their stiffness is one number."""
        numbers = [float(c) if c.numel() == 1 else None for c in term.stiffness.values()]
        if len(numbers) == len(self.weights) and len(set(numbers)) == 1 and numbers[0] is not None:
            return [(self.gradients, self.moved, numbers[0])]
        displacements, pairs = self.layers.views(self.moved), zip(term.stiffness.items(), numbers, strict=True)
        return [
            (self.weights[name].grad, displacements[name], c if number is None else number)  # type: ignore[misc]
            for (name, c), number in pairs
        ]

    def _merge(self, inputs: Tensor, targets: Tensor, scale: Tensor, outputs: Tensor) -> None:
        """Gradients ← keep · gradients + the gradient of the scaled losses' sum; `outputs` ← what the model says.

        `inputs` are [B, in] and `outputs` [classes, B]: the classes first, because a softmax along neighbours in memory
        is slow. `scale` is [1, B], and zero for a sample that only pads; `targets` are −scale where the class is the
        sample's and zero elsewhere.
        """
        values, last = [inputs], self.backwards[0]
        for link in self.hidden:
            values.append(link.forward(values[-1]))
        torch.addmm(last.column, last.weight, values[-1].t(), out=outputs)
        error = torch.addcmul(targets, outputs.softmax(0), scale)  # [out, B]
        for link, entered in zip(self.backwards, reversed(values), strict=True):
            if link.to_bias is not None:
                link.to_bias.addmv_(error, self.ones, beta=self.keep)
            link.to_weight.addmm_(error, entered, beta=self.keep)
            if entered is not inputs:
                error = error.t() @ link.weight
                if link.after_relu:
                    error = torch.ops.aten.threshold_backward(error, entered, 0)
                error = error.t()

    def _gather(self, step: int) -> _Block:
        """The next steps' batches."""
        self._close()
        until = min(step + self.ahead, len(self.schedule))
        rows, scale = self.rows[step:until], self.scale[step:until]
        inputs = self.inputs.index_select(0, rows.reshape(-1)).view(*rows.shape, -1).to(self.flat.dtype)
        is_class = self.labels[step:until].unsqueeze(1) == self.classes
        targets = is_class * -scale
        outputs = torch.empty_like(targets)
        parts = (part.unbind() for part in (inputs, targets, scale, outputs))
        return _Block(step, until, is_class, outputs, list(zip(*parts, strict=True)))

    def _close(self) -> None:
        """Add up the losses of the last block's steps."""
        if self.block is not None:
            self.total -= float((self.block.outputs.log_softmax(1) * self.block.is_class).sum(dtype=torch.float64))
            self.block = None

    def loss(self) -> float:
        """Over every sample as often as it was seen."""
        self._close()
        return self.total / max(1, self.seen)


class _Link:
    """A linear layer's weights and where their gradients go."""

    def __init__(self, before: Affine | None, affine: Affine, flat: Tensor, gradients: Tensor) -> None:
        self.after_relu, self.relu = before is not None and before.relu, affine.relu
        self.weight, self.to_weight = affine.weight.of(flat), affine.weight.of(gradients)
        self.transposed = self.weight.t()
        self.row = self.column = flat.new_zeros(1)
        self.to_bias: Tensor | None = None
        if affine.bias is not None:
            self.row, self.to_bias = affine.bias.of(flat), affine.bias.of(gradients)
            self.column = self.row[:, None]

    def forward(self, inputs: Tensor) -> Tensor:
        out = torch.addmm(self.row, inputs, self.transposed)
        return out.relu_() if self.relu else out


@dataclass
class _Block:
    """Some steps, gathered together."""

    first: int
    until: int
    is_class: Tensor  # bool [steps, classes, B]
    outputs: Tensor  # [steps, classes, B]
    steps: list[tuple[Tensor, Tensor, Tensor, Tensor]]
    """For each of them what `_merge` asks for: inputs, targets, scale, outputs."""
