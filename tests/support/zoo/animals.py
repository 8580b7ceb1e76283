"""What an animal is, and what animals learn from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import Dataset

from fedstrata.tasks.metric import ACCURACY, Metric
from fedstrata.tasks.task import Task

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


def register(
    zoo: dict[str, Animal], name: str, model: Callable[[], nn.Module], clients: Any = None, **options: Any
) -> None:
    zoo[name] = Animal(name, model, clients or points, **options)


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
