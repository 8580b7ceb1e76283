"""A zoo of modules, ordinary and odd: what test_zoo.py trains in every way that there is, and in plain PyTorch.

`python tests/zoo.py [part of a name …]` prints how they fare as a Markdown table.
"""

from __future__ import annotations

import functools
import io
import itertools
import os
import random
import sys
import threading
import time
import warnings
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from fedstrata.tasks.task import ACCURACY, Metric, Task

SIZES = (12, 7, 10)
"""Samples of the clients: with a batch size of 4, none of them ends with a batch of one."""
FEATURES, CLASSES, WORDS, LENGTH = 6, 3, 11, 5


@dataclass(frozen=True)
class Animal:
    """A module with what it learns from, and what is to become of it."""

    name: str
    model: Callable[[], nn.Module]
    clients: Callable[[], Sequence[Any]]
    loss: Callable[[Any, Any], Tensor] = F.cross_entropy
    metric: Metric = ACCURACY
    training: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float64"
    refused: str | None = None
    """What the refusal must say, as a regular expression."""
    or_right: bool = False
    """Whether a right result will do as well."""
    one_instance: bool = False
    """Whether the task's factory gives the same module again and again."""

    def task(self) -> Task:
        """As a user would write it. The last client's data is also what the model is evaluated on."""
        model, clients = self.model, self.clients()
        if self.one_instance:
            net = self.model()

            def model() -> nn.Module:
                return net

        return Task(
            model=model,
            clients=clients,
            evaluation={"test": clients[-1]},
            loss=self.loss,
            metric=self.metric,
            name="zoo",
        )


ZOO: dict[str, Animal] = {}


def add(name: str, model: Callable[[], nn.Module], clients: Any = None, **options: Any) -> None:
    ZOO[name] = Animal(name, model, clients or points, **options)


def task(name: str) -> Task:
    """For recipes: task.function = "tests.zoo:task"."""
    return ZOO[name].task()


# --- data -----------------------------------------------------------------------------------------------------------


def _labelled(make: Callable[[int, torch.Generator], Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Each client's inputs and classes, which have something to do with each other."""
    pairs = []
    for client, size in enumerate(SIZES):
        generator = torch.Generator().manual_seed(client)
        inputs = make(size, generator)
        scores = inputs.flatten(1).float().cumsum(1)[:, -CLASSES:] + torch.randn(size, CLASSES, generator=generator)
        pairs.append((inputs, scores.argmax(1)))
    return pairs


def points() -> list[Any]:
    return _labelled(lambda size, generator: torch.randn(size, FEATURES, generator=generator))


def images() -> list[Any]:
    return _labelled(lambda size, generator: torch.randn(size, 2, 6, 6, generator=generator))


def sequences() -> list[Any]:
    return _labelled(lambda size, generator: torch.randn(size, LENGTH, 4, generator=generator))


def words() -> list[Any]:
    return _labelled(lambda size, generator: torch.randint(WORDS, (size, LENGTH), generator=generator))


def texts() -> list[Any]:
    """Every word's target is the next one."""
    return [(inputs[:, :-1], inputs[:, 1:]) for inputs, _ in words()]


def themselves() -> list[Any]:
    return [(inputs, inputs) for inputs, _ in images()]


class Changed(Dataset[Any]):
    """Pairs, of which the inputs are changed when they are fetched."""

    def __init__(self, pair: tuple[Tensor, Tensor], change: Callable[[Tensor], Any] = lambda x: x) -> None:
        self.inputs, self.targets = pair
        self.change = change

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        return self.change(self.inputs[index]), self.targets[index]


def changed(change: Callable[[Tensor], Any]) -> Callable[[], list[Any]]:
    return lambda: [Changed(pair, change) for pair in points()]


def with_own_generators() -> list[Any]:
    def noisy(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        return lambda x: x + torch.randn(x.shape, generator=generator)

    return [Changed(pair, noisy(torch.Generator().manual_seed(at))) for at, pair in enumerate(points())]


def with_ignored_targets() -> list[Any]:
    """One target of each client is cross-entropy's sign for "does not count"."""
    pairs = points()
    for _, targets in pairs:
        targets[1] = -100
    return pairs


def with_soft_targets() -> list[Any]:
    return [(inputs, inputs[:, :CLASSES].softmax(1)) for inputs, _ in points()]


def dicts_of_tensors() -> list[Any]:
    return [({"left": inputs, "right": inputs.flip(1)}, targets) for inputs, targets in points()]


def lists_of_samples() -> list[Any]:
    """The first client has two samples, which are not to be taken for inputs and targets."""
    clients = [list(zip(inputs, targets.tolist(), strict=True)) for inputs, targets in points()]
    return [clients[0][:2], *clients[1:]]


class Packed:
    """Sequences of different lengths."""

    def __init__(self, pair: tuple[Tensor, Tensor]) -> None:
        self.inputs, self.targets = pair

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: np.ndarray) -> tuple[PackedSequence, Tensor]:
        chosen = [self.inputs[i, : 2 + i % (LENGTH - 1)] for i in indices.tolist()]
        return pack_sequence(chosen, enforce_sorted=False), self.targets[torch.from_numpy(indices)]


def packed() -> list[Any]:
    return [Packed(pair) for pair in sequences()]


# --- losses and metrics ---------------------------------------------------------------------------------------------


def of_every_word(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


CROSS_ENTROPY = Metric("entropy", F.cross_entropy, "min")
MSE = Metric("mse", F.mse_loss, "min")
WORDS_RIGHT = Metric("words", lambda outputs, targets: (outputs.argmax(-1) == targets).double().mean())


# --- ordinary modules -----------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A linear layer, for animals that are odd elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def mlp(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 5, bias=bias), nn.ReLU(), nn.Linear(5, CLASSES, bias=bias))


def linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, CLASSES))


def one_relu_for_all() -> nn.Sequential:
    relu = nn.ReLU()
    return nn.Sequential(nn.Linear(FEATURES, 5), relu, nn.Linear(5, 5), relu, nn.Linear(5, CLASSES))


def one_layer_twice() -> nn.Sequential:
    middle = nn.Linear(5, 5)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), middle, nn.ReLU(), middle, nn.ReLU(), nn.Linear(5, CLASSES))


def frozen(names: Sequence[str], model: nn.Module) -> nn.Module:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def after(layer: nn.Module, features: int = 5) -> nn.Sequential:
    """A layer between two linear ones."""
    return nn.Sequential(nn.Linear(FEATURES, features), layer, nn.Tanh(), nn.Linear(features, CLASSES))


def cnn(*layers: nn.Module, channels: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 3), *layers, nn.ReLU(), nn.Flatten(), nn.Linear(channels * 16, CLASSES))


def autoencoder() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 3, 3, stride=2), nn.Tanh(), nn.ConvTranspose2d(3, 2, 4, stride=2))


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(4, 5, batch_first=True)
        self.fc = nn.Linear(5, CLASSES)

    def forward(self, x: Any) -> Tensor:
        hidden = self.rnn(x)[1]
        return self.fc((hidden[0] if isinstance(hidden, tuple) else hidden)[-1])


class Embeds(nn.Module):
    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found = self.embedding(x)
        return self.fc(found.mean(1) if found.ndim == 3 else found)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, dropout=0.2, batch_first=True)
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.encoder(x).mean(1))


class TinyGPT(nn.Module):
    """Tied embeddings, and the causal mask as PyTorch makes it: a persistent buffer with −inf."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(WORDS, 4), nn.Embedding(LENGTH, 4)
        self.norm, self.attention = nn.LayerNorm(4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        hidden = self.embedding(x) + self.positions.weight[:length]
        normed = self.norm(hidden)
        mask = self.mask[:length, :length]
        return self.head(hidden + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


add("logistic regression", linear, training={"momentum": 0.0, "weight_decay": 0.0})
add("perceptron", mlp, training={"momentum": 0.0, "weight_decay": 0.0, "epochs": 2})
add("perceptron, float32", mlp, dtype="float32")
add("perceptron, Adam", mlp, training={"optimizer": "adam", "momentum": 0.0, "lr": 0.01})
add("perceptron without bias", lambda: mlp(bias=False))
add("perceptron, a frozen bias", lambda: frozen(["0.bias"], mlp()))
add("perceptron, a frozen first layer", lambda: frozen(["0.weight", "0.bias"], mlp()))
add("perceptron on images", lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 5), nn.ReLU(), nn.Linear(5, 3)), images)
add("perceptron, one ReLU for all", one_relu_for_all)
add("perceptron, one layer twice", one_layer_twice)
add("perceptron, ignored targets", mlp, with_ignored_targets)
add("perceptron, soft targets", mlp, with_soft_targets, metric=CROSS_ENTROPY)
add("perceptron, a Dataset", mlp, lambda: [Changed(pair) for pair in points()])
add("float64 model", lambda: mlp().double())
add("convolutions", cnn, images)
add("convolutions, float32", lambda: cnn(nn.Conv2d(4, 4, 3, padding=1)), images, dtype="float32")
add(
    "depthwise and grouped convolutions",
    lambda: cnn(nn.Conv2d(4, 4, 1, groups=4), nn.Conv2d(4, 4, 1, groups=2)),
    images,
)
add("channels-last convolutions", lambda: cnn().to(memory_format=torch.channels_last), images)
add("ConvTranspose autoencoder", autoencoder, themselves, loss=F.mse_loss, metric=MSE)
add("BatchNorm1d", lambda: after(nn.BatchNorm1d(5)))
add("BatchNorm2d", lambda: cnn(nn.BatchNorm2d(4)), images)
add("BatchNorm, cumulative average", lambda: after(nn.BatchNorm1d(5, momentum=None)), training={"epochs": 2})
add("GroupNorm", lambda: cnn(nn.GroupNorm(2, 4)), images)
add("LayerNorm", lambda: after(nn.LayerNorm(5)))
add("InstanceNorm with statistics", lambda: cnn(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)), images)
add("Dropout", lambda: after(nn.Dropout(0.4)))
add("AlphaDropout", lambda: after(nn.AlphaDropout(0.3)))
add("Embedding", lambda: Embeds(nn.Embedding(WORDS, 4)), words)
add("EmbeddingBag", lambda: Embeds(nn.EmbeddingBag(WORDS, 4)), words)
add(
    "Embedding, sparse",
    lambda: Embeds(nn.Embedding(WORDS, 4, sparse=True)),
    words,
    training={"momentum": 0.0, "weight_decay": 0.0},
)
add(
    "Embedding, sparse, with momentum",
    lambda: Embeds(nn.Embedding(WORDS, 4, sparse=True)),
    words,
    training={"weight_decay": 0.0},
)
add("LSTM", lambda: Recurrent(nn.LSTM), sequences)
add("GRU", lambda: Recurrent(nn.GRU), sequences)
add("RNN", lambda: Recurrent(nn.RNN), sequences)
add("MultiheadAttention", Attends, sequences)
add("TransformerEncoderLayer", Transformer, sequences)
add("GPT, tied, with an infinite mask", TinyGPT, texts, loss=of_every_word, metric=WORDS_RIGHT)
add("residual net", Residual)


# --- weights that are computed, shared or held elsewhere --------------------------------------------------------------


def quietly(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Without a word about what is old."""

    def model() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return build()

    return model


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def symmetric() -> nn.Module:
    model = after(nn.Linear(5, 5))
    parametrize.register_parametrization(model[1], "weight", Symmetric())
    return model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.code, self.decode = nn.Linear(FEATURES, 4), nn.Linear(4, FEATURES)
        self.decode.weight = nn.Parameter(self.code.weight.detach().T.clone())
        self.again = nn.Linear(FEATURES, 4, bias=False)
        self.again.weight = self.code.weight
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.again(self.decode(torch.tanh(self.code(x))))))


class Shares(nn.Module):
    """One submodule under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(torch.tanh(self.first(x))))


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.randn(FEATURES)) for _ in range(CLASSES)])
        self.terms = nn.ParameterDict(
            {"shift": nn.Parameter(torch.zeros(CLASSES)), "scale": nn.Parameter(torch.ones(()))}
        )

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.stack(list(self.rows)).T * self.terms["scale"] + self.terms["shift"]


class Alias(Net):
    """Its weight is also held in a list, and used from there."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [self.fc.weight]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.held[0], self.fc.bias)


class ViewOfWeight(Net):
    """A view of the weight, which sees every step."""

    def __init__(self) -> None:
        super().__init__()
        self.row = self.fc.weight.detach()[0]

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        super()._apply(*arguments, **options)
        self.row = self.fc.weight.detach()[0]
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + (x @ self.row).unsqueeze(1) * torch.arange(CLASSES)


class OneStorage(nn.Module):
    """Two parameters that are one in memory: a step of one is a step of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES, bias=False), nn.Linear(FEATURES, FEATURES, bias=False)
        self.second.weight = nn.Parameter(self.first.weight)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(torch.tanh(self.first(x))))


class OddBuffers(Net):
    """Of no number, of one number in many places, and none at all until the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("places", torch.arange(FEATURES).expand(4, -1), persistent=False)
        self.register_buffer("late", None)
        self.unused = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.late = x.detach().mean(0) if self.late is None else 0.5 * self.late
        return self.fc(x[:, self.places[-1]] + self.late)


class PlainList(Net):
    """A module that nobody registered: it is never trained, but changes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.hidden[1](self.hidden[0](x))
        return self.fc(x + self.hidden[1].running_mean)


class Views(nn.Module):
    """Reads a convolution's weights as PyTorch says that they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.conv.weight.view(4, -1)
        weight = (rows - rows.mean(1, keepdim=True)).view(self.conv.weight.shape)
        first = self.conv.weight.view(-1)[:5].sum()
        return self.head(torch.relu(F.conv2d(x, weight, self.conv.bias)).flatten(1)) * (1 + first)


class Scaled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.5


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


def with_another_layers_forward() -> nn.Module:
    model = mlp()
    usual = model[2].forward
    model[2].forward = lambda x: usual(x) * 1.5
    return model


def with_another_forward() -> nn.Module:
    """A closure on the instance, which a copy would share."""
    model = mlp()
    usual = model.forward
    model.forward = lambda x: usual(x) * 1.5
    return model


class Lambdas(Net):
    def __init__(self) -> None:
        super().__init__()
        self.compute = lambda x: torch.tanh(self.fc(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)


class Checkpoints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = after(nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


add("weight_norm", lambda: after(parametrizations.weight_norm(nn.Linear(5, 5))))
add("weight_norm, the old kind", quietly(lambda: after(nn.utils.weight_norm(nn.Linear(5, 5)))))
add("spectral_norm", lambda: after(parametrizations.spectral_norm(nn.Linear(5, 5))))
add("spectral_norm, the old kind", quietly(lambda: after(nn.utils.spectral_norm(nn.Linear(5, 5)))))
add("orthogonal", lambda: after(parametrizations.orthogonal(nn.Linear(5, 5))))
add("a parametrization of its own", symmetric)
add("tied weights", Tied)
add("shared submodules", Shares)
add("ParameterList and ParameterDict", Lists)
add("a parameter held in a list, too", Alias)
add("a view of a parameter", ViewOfWeight, refused=r"fc\.weight|row", or_right=True)
add("two parameters in one storage", OneStorage, dtype="float32", refused=r"(first|second)\.weight", or_right=True)
add("odd buffers", OddBuffers)
add("odd buffers, float32", OddBuffers, dtype="float32")
add("modules in a plain list", PlainList, dtype="float32")
add("weight.view on a convolution", Views, images)
add("weight.view on a convolution, float32", Views, images, dtype="float32")
add("a Sequential with its own forward", lambda: Scaled(*mlp()))
add("a Linear with its own forward", lambda: nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), Doubling(5, CLASSES)))
add("a forward put on the instance", with_another_forward)
add("a forward put on a layer", with_another_layers_forward)
add("a lambda over self", Lambdas)
add("checkpointed activations", Checkpoints)
add("torch.jit.script", quietly(lambda: torch.jit.script(after(nn.BatchNorm1d(5)))), refused="[Ss]cript", or_right=True)


# --- state that changes while training --------------------------------------------------------------------------------


class AssignsBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.ema = 0.9 * self.ema + 0.1 * x.detach().mean(0)
        return self.fc(x - self.ema)


class ChangesBuffer(AssignsBuffer):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.ema.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.fc(x - self.ema)


class NotPersistent(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(FEATURES), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.ema = 0.9 * self.ema + 0.1 * x.detach().mean(0)
        return self.fc(x - self.ema)


class RegistersLate(Net):
    """A buffer that is there only after the first forward."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "first"):
            self.register_buffer("first", x.detach().mean(0))
        return self.fc(x - self.first)


class PlainTensor(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.fc(x) * (1 + 0.01 * float(self.seen))


class AddsModule(Net):
    """A layer that is there only after the first forward: it is used, but never trained."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Linear(FEATURES, CLASSES).to(x.dtype)
        return self.fc(x) + self.late(x)


class AssignsData(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.fc.weight.data = self.fc.weight.data.clamp(-0.2, 0.2)
        return self.fc(x)


class AssignsParameter(Net):
    """What the optimiser holds is no longer what the module has."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.fc.bias = nn.Parameter(self.fc.bias.detach() + 0.1)
        return self.fc(x)


class Teacher(Net):
    """A frozen copy of the student follows it, and has a say."""

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.teacher, self.by_data = nn.Linear(FEATURES, CLASSES).requires_grad_(False), by_data

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for ours, theirs in zip(self.teacher.parameters(), self.fc.parameters(), strict=True):
                if self.by_data:
                    ours.data = 0.5 * ours.data + 0.5 * theirs.data
                else:
                    ours.mul_(0.5).add_(theirs.detach(), alpha=0.5)
        return self.fc(x) + self.teacher(x)


class Counts(Net):
    """How often it was called decides what it says."""

    def __init__(self, start: Any) -> None:
        super().__init__()
        self.calls = start

    def count(self) -> int:
        if isinstance(self.calls, int):
            self.calls += 1
            return self.calls
        if isinstance(self.calls, list):
            self.calls.append(None)
        else:
            self.calls[len(self.calls)] = None
        return len(self.calls)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * (1 + 0.1 * self.count())


class CountsInBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x) * (1 + 0.1 * self.calls)


class CountsInSlot(Net):
    __slots__ = ("calls",)

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x) * (1 + 0.1 * self.calls)


LATE = 6
"""Calls that leave no trace in what some modules say."""


class CountsInSlotLate(CountsInSlot):
    """The first calls make no difference: a glance at two batches does not show it."""

    __slots__ = ()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x) * (1 + 0.1 * max(0, self.calls - LATE))


class CountsInClosure(Net):
    """A counter that only a function knows of."""

    def __init__(self, late: int) -> None:
        super().__init__()
        calls = itertools.count(1)
        self.louder = lambda: 1 + 0.1 * max(0, next(calls) - late)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.louder()


class CountsByMethod(Net):
    """A list, and one of its methods."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[None] = []
        self.count = self.calls.append

    def forward(self, x: Tensor) -> Tensor:
        self.count(None)
        return self.fc(x) * (1 + 0.1 * len(self.calls))


class Iterates(Net):
    """A generator of numbers, in Python's sense."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = (1 + 0.1 * number for number in itertools.count())

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * next(self.factors)


class ExtraState(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x) * (1 + 0.1 * self.calls)


class NoisyByTorch(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x + 0.3 * torch.randn(x.shape, generator=self.generator, dtype=x.dtype))


class NoisyByNumpy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.RandomState(7)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x + 0.3 * torch.from_numpy(self.generator.normal(size=tuple(x.shape))).to(x.dtype))


class Remembers(Net):
    """Its last output, with the graph that led to it, which no copy can have."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before = 0.0 if self.last is None else self.last.detach().mean(0)
        self.last = self.fc(x + before.mean() if isinstance(before, Tensor) else x)
        return self.last


class Toggles(nn.Module):
    """Freezes its first layer in every second call, and thaws one that was built frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)
        self.extra = nn.Linear(FEATURES, CLASSES).requires_grad_(False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.first.requires_grad_(self.calls % 2 == 0)
        self.extra.requires_grad_(True)
        return self.head(torch.tanh(self.first(x))) + self.extra(x)


class KeepsEval(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)

    def train(self, mode: bool = True) -> KeepsEval:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(x))


class LargeBase(nn.Module):
    """A frozen table of a few megabytes, of which little is looked at."""

    def __init__(self, changes: str = "") -> None:
        super().__init__()
        self.base = nn.Embedding(20_000, 50, _freeze=True)
        self.fc, self.changes = nn.Linear(50, CLASSES), changes

    def forward(self, x: Tensor) -> Tensor:
        if self.changes and self.training:
            table = self.base.weight.data if self.changes == "data" else self.base.weight
            table[x.flatten()] += 0.1
        return self.fc(self.base(x).mean(1))


add("a buffer that forward assigns", AssignsBuffer)
add("a buffer that forward changes", ChangesBuffer)
add("a buffer that is not persistent", NotPersistent)
add("a buffer that forward registers", RegistersLate)
add("a layer that forward adds", AddsModule)
add("p.data assigned in forward", AssignsData)
add("a new Parameter in forward", AssignsParameter, refused=r"fc\.bias", or_right=True)
add("an EMA teacher, by .data", lambda: Teacher(by_data=True))
add("an EMA teacher, in place", lambda: Teacher(by_data=False))
add("a counter: an int", lambda: Counts(0))
add("a counter: a list", lambda: Counts([]))
add("a counter: a dict", lambda: Counts({}))
add("a counter: an integer buffer", CountsInBuffer)
add("a counter: a plain tensor", PlainTensor)
add("a counter: a list and its method", CountsByMethod, refused="count", or_right=True)
add("a counter: a generator", Iterates)
add("a counter in __slots__", CountsInSlot, refused="calls|fc", or_right=True)
add("a counter in __slots__, later", CountsInSlotLate, training={"epochs": 3}, refused="calls|fc", or_right=True)
add("a counter in a closure", lambda: CountsInClosure(0), refused="louder|fc", or_right=True)
add(
    "a counter in a closure, later",
    lambda: CountsInClosure(LATE),
    training={"epochs": 3},
    refused="louder|fc",
    or_right=True,
)
add("get_extra_state", ExtraState)
add("a torch.Generator of its own", NoisyByTorch)
add("a RandomState of its own", NoisyByNumpy)
add("the last output is kept", Remembers)
add("requires_grad toggled in forward", Toggles)
add("train() keeps BatchNorm in eval", KeepsEval)
add("a large frozen base", LargeBase, words, dtype="float32")
for way in ("in place", "data"):
    add(
        f"a large frozen base that changes, {way}",
        lambda way=way: LargeBase(way),  # type: ignore[misc]
        words,
        dtype="float32",
        refused=r"base\.weight",
        or_right=True,
    )


# --- dtypes -----------------------------------------------------------------------------------------------------------


class ComplexParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(FEATURES // 2 + 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=FEATURES))


class ComplexBuffer(Net):
    def __init__(self, persistent: bool) -> None:
        super().__init__()
        turns = torch.polar(torch.ones(FEATURES), torch.linspace(0, 3, FEATURES))
        self.register_buffer("turns", turns, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if "turns" in self._non_persistent_buffers_set:
            self.turns = self.turns * self.turns[1]
        return self.fc((x * self.turns * self.turns).real)


class HalfBase(Net):
    """A frozen part in bfloat16: its rounding is part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(FEATURES, FEATURES).bfloat16().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.base(x.to(self.base.weight.dtype)).to(x.dtype))


class MixedTypes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(CLASSES, CLASSES).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fc(x).to(self.head.weight.dtype)).to(x.dtype)


add("complex parameters", ComplexParameter, dtype="float32", refused="filter", or_right=True)
add("a complex buffer", lambda: ComplexBuffer(True), dtype="float32", refused="turns", or_right=True)
add("a complex buffer that changes", lambda: ComplexBuffer(False), dtype="float32", refused="turns", or_right=True)
add("a frozen bfloat16 part", HalfBase, dtype="float32")
add("travelling dtypes that differ", MixedTypes, dtype="float32", refused=r"head\.(weight|bias)")


# --- gradients --------------------------------------------------------------------------------------------------------


class GradientHook(Net):
    """Every gradient is smaller than the one before."""

    def __init__(self) -> None:
        super().__init__()
        calls: list[None] = []

        def smaller(gradient: Tensor) -> Tensor:
            calls.append(None)
            return gradient / len(calls)

        self.fc.weight.register_hook(smaller)


def hooked_perceptron() -> nn.Module:
    model = mlp()
    model[0].weight.register_hook(lambda gradient: 0.5 * gradient)
    model[2].weight.register_post_accumulate_grad_hook(clip)
    return model


def clip(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.05, 0.05)


class AccumulateHook(Net):
    def __init__(self) -> None:
        super().__init__()
        self.fc.weight.register_post_accumulate_grad_hook(clip)


class HooksLate(Net):
    """Registers hooks in its first forward, once."""

    def __init__(self) -> None:
        super().__init__()
        self.hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.hooked = True
            self.fc.weight.register_hook(lambda gradient: 0.5 * gradient)
            self.fc.register_forward_hook(lambda module, inputs, output: 1.5 * output)
        return self.fc(x)


def with_module_hooks() -> nn.Module:
    """State in closures: a forward hook that counts, a backward hook that alternates."""
    model = mlp()
    calls = {"forward": 0, "backward": 0}

    def louder(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        calls["forward"] += 1
        return output * (1 + 0.1 * calls["forward"])

    def turn(module: nn.Module, inputs: tuple[Tensor, ...], outputs: Any) -> tuple[Tensor, ...]:
        calls["backward"] += 1
        return tuple(gradient / calls["backward"] for gradient in inputs)

    model[2].register_forward_hook(louder)
    model[2].register_full_backward_hook(turn)
    return model


class Unused(Net):
    """Without a gradient there is no weight decay either."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(FEATURES, CLASSES)


class SometimesUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.low(x) if x.sum() < 0 else self.high(x)


add("a gradient hook", GradientHook)
add("a hook after a gradient is accumulated", AccumulateHook)
add("gradient hooks on a perceptron", hooked_perceptron)
add("hooks that forward registers", HooksLate, refused=r"fc\.weight", or_right=True)
add("module hooks with state", with_module_hooks)
add("unused parameters under weight decay", Unused, training={"weight_decay": 0.1})
add("parameters unused in some batches", SometimesUsed, training={"epochs": 2})


# --- data and what it comes in ----------------------------------------------------------------------------------------


class OfTwo(Net):
    def forward(self, x: Any) -> Tensor:
        left, right = (x["left"], x["right"]) if isinstance(x, dict) else (x.left, x.right)
        return self.fc(left - right)


Two = namedtuple("Two", ["left", "right"])

add("augmentation by torch", mlp, changed(lambda x: x + 0.5 * torch.randn(x.shape)))
add("augmentation by NumPy and random", mlp, changed(lambda x: x + float(np.random.normal()) + random.random()))
add("dict inputs", OfTwo, changed(lambda x: {"left": x, "right": x.flip(0)}))
add("namedtuple inputs", OfTwo, changed(lambda x: Two(x, x.flip(0))))
add("PackedSequence inputs", lambda: Recurrent(nn.GRU), packed)
add("dict of tensors", OfTwo, dicts_of_tensors)
add("a list of two samples", Net, lists_of_samples)
add("a list of two samples, perceptron", mlp, lists_of_samples)


# --- what cannot be copied, or does not repeat ------------------------------------------------------------------------


class HoldsLock(Counts):
    def __init__(self) -> None:
        super().__init__(0)
        self.lock, self.log = threading.Lock(), io.StringIO()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return super().forward(x)


class RefusesCopies(Counts):
    def __init__(self) -> None:
        super().__init__(0)

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is only one of me")


class CountsForAll(Net):
    """A counter on the class: no new module is like the last one."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return self.fc(x) * (1 + 0.1 * self.calls)


class ByTheClock(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * (1 + time.perf_counter_ns() % 1_000_003 / 1e7)


class ByTheSystem(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * (1 + int.from_bytes(os.urandom(4), "little") / 2**36)


def always_the_same() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp()


add("a lock inside", HoldsLock)
add("no copy allowed", RefusesCopies)
add("Task(model=lambda: net)", always_the_same, one_instance=True, refused="model", or_right=True)
add("lazy modules", lambda: nn.Sequential(nn.LazyLinear(CLASSES)), refused=r"0\.weight.*not initialised")
add("a counter on the class", CountsForAll, refused=r"fc\.(weight|bias)")
add("the time", ByTheClock, refused=r"fc\.(weight|bias)")
add("os.urandom", ByTheSystem, refused=r"fc\.(weight|bias)")
add("a Dataset with its own generator", Net, with_own_generators, refused=r"clients\[\d\]")


# --- traps for a module that is put back ------------------------------------------------------------------------------

LATE = 6
"""Calls after which some of them begin to matter: more than are rehearsed."""


class CachedByMethod(Net):
    @functools.cache  # noqa: B019
    def scale(self) -> float:
        return float(self.fc.weight.detach().abs().sum())

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale() * 0.1


class CountsOnParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.fc.weight.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.fc.weight.calls += 1
        return self.fc(x) * (1 + 0.1 * max(0, self.fc.weight.calls - LATE))


class Lookahead(Net):
    """Slow weights that forward puts on the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        weight = self.fc.weight
        if self.training:
            self.calls += 1
            if not hasattr(weight, "slow"):
                weight.slow = weight.detach().clone()
            if self.calls % 3 == 0:
                with torch.no_grad():
                    weight.copy_(weight.slow.lerp_(weight, 0.5))
        return self.fc(x)


class HooksLate(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == LATE:
            self.fc.weight.register_hook(lambda gradient: gradient * 0.5)
        return self.fc(x)


class Remembers(Net):
    """A memory that is changed in place, with its graph."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(CLASSES), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.memory.detach_()
        out = self.fc(x)
        self.memory.mul_(0.5).add_(out.mean(0))
        return out + self.memory


class SeesThroughNumPy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen = self.fc.weight.detach().numpy()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * float(np.abs(self.seen).sum()) * 0.1


class Bank(Net):
    """A frozen memory of more than a megabyte, of which the order changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.randn(3000, 100), persistent=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.training and self.calls > 2:
            self.bank.data.copy_(self.bank.roll(1, 0))
        return self.fc(x + self.bank[: len(x), :FEATURES].to(x.dtype))


class BestSoFar(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("best", torch.tensor(1e9))

    def forward(self, x: Tensor) -> Tensor:
        out = self.fc(x)
        if self.training:
            self.best = torch.minimum(self.best, out.detach().square().mean())
        return out * (1 + self.best)


class Graph(Net):
    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(FEATURES).to_sparse(), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.sparse.mm(self.adjacency.to(x.dtype), x.t()).t())


class Unseeded(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1 + int.from_bytes(os.urandom(2), "little") / 2**16

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale


class Spatial(nn.Module):
    """Maps of any size, by a view that channels-last memory has only where they are small."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv(x)
        batch, channels, height, width = hidden.shape
        return self.head(hidden.view(batch * channels, height * width).logsumexp(1).view(batch, channels))


class ViewsInEval(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.conv(x))
        return self.head(hidden.flatten(1) if self.training else hidden.view(len(hidden), -1))


def small_and_large_images() -> Sequence[Any]:
    first, second, third = images()
    small = [(x[:, :, :3, :3].contiguous(), y) for x, y in (first, second)]
    return [small[0], third, small[1]]


def tied_by_storage(transposed: bool) -> nn.Module:
    first, second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
    second.weight = nn.Parameter(first.weight.t() if transposed else first.weight)
    return nn.Sequential(first, nn.ReLU(), second)


add("a method that is cached", CachedByMethod)
add("an attribute of a parameter, late", CountsOnParameter, training={"epochs": 3})
add("slow weights on the parameter", Lookahead, training={"epochs": 2})
add("a gradient hook registered late", HooksLate, training={"epochs": 3})
add("a memory with its graph", lambda: Remembers(persistent=False))
add("a memory with its graph, persistent", lambda: Remembers(persistent=True))
add("a weight seen through NumPy", SeesThroughNumPy, dtype="float32")
add("a large memory whose order changes", Bank, training={"epochs": 2}, dtype="float32")
add("a buffer that falls from 1e9", BestSoFar, dtype="float32", refused="best goes from 1e\\+09")
add("a sparse buffer", lambda: Graph(persistent=True), refused="adjacency.*is sparse")
add("a number that nobody seeds", Unseeded, refused="scale.*another one each time")
add("half precision", lambda: mlp().to(torch.float16), refused=r"0\.weight.*float16")
add("images of two sizes", Spatial, small_and_large_images)
add("a view in evaluation only", ViewsInEval, images)
add("perceptron, tied by storage", lambda: tied_by_storage(transposed=False), dtype="float32")
add("perceptron, tied by storage and transposed", lambda: tied_by_storage(transposed=True), dtype="float32")


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # where `tests` is found
    from tests.clients.test_zoo import print_table

    print_table(sys.argv[1:])
