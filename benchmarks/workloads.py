"""The work that every system does: model, data, partition and cohorts, all taken from fedstrata."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedstrata.clients.setup import build_model
from fedstrata.recipes.experiment import Experiment, build_experiment
from fedstrata.recipes.schema import load

WARM_UP = 2
"""Rounds of a turn that are not timed: the first is start-up, the second fills the last caches."""


@dataclass(frozen=True)
class Workload:
    """A setting to be timed: a recipe, and how many rounds a turn times after warming up."""

    description: str
    recipe: dict[str, Any]
    rounds: int = 5


def _recipe(dataset: str, partition: dict[str, Any], model: dict[str, Any], **training: Any) -> dict[str, Any]:
    validation = training.pop("validation", 0)
    task = {"dataset": dataset, "partition": partition, "model": model, "validation": validation}
    # The peers keep no per-layer record, so none is kept here; what it costs is among the overheads.
    return {"task": task, "training": training, "record": {"layers": False}, "algorithm": {"name": "fedavg"}}


WORKLOADS = {
    "logreg-250": Workload(
        "adaptive μ's: MNIST, 250 two-class clients, 20 a round drawn by size, E = 3, B = 20",
        _recipe(
            "mnist",
            {"name": "two_class_dirichlet", "clients": 250, "alpha": 0.5},
            {"name": "logreg"},
            validation=12_000,
            clients_per_round=20,
            sampling="size",
            epochs=3,
            batch_size=20,
            lr=0.03,
            momentum=0.9,
        ),
        rounds=8,
    ),
    "mlp-100": Workload(
        "FedLap's: MNIST, 100 clients with 2 shards of 300, 10 a round, MLP 784-200-10, E = 10, B = 10",
        _recipe(
            "mnist",
            {"name": "shards", "clients": 100, "per_client": 2, "shard_size": 300},
            {"name": "mlp", "hidden": 200},
            clients_per_round=10,
            epochs=10,
            batch_size=10,
            lr=0.01,
            momentum=0.9,
        ),
    ),
    "cnn-10": Workload(
        "FedAdp's: MNIST, 5 IID and 5 one-class clients of 600, CNN with 582,026 parameters, E = 1, B = 32",
        _recipe(
            "mnist",
            {"name": "iid_mix", "iid": 5, "non_iid": 5, "classes": 1, "samples": 600},
            {"name": "cnn"},
            epochs=1,
            batch_size=32,
            lr=0.01,
        ),
    ),
    "vgg9-50-reduced": Workload(
        "FedLDF's, reduced: CIFAR-10, 50 clients of 100, 20 a round, VGG-9 of width 16, E = 1, B = 20",
        _recipe(
            "cifar10",
            {"name": "iid", "clients": 50, "samples": 100},
            {"name": "vgg9", "width": 16},
            clients_per_round=20,
            epochs=1,
            batch_size=20,
            lr=0.01,
        ),
    ),
    "flute-lr": Workload(
        "FLUTE's: MNIST, 1,000 clients of 60, 10 a round, logistic regression, E = 1, B = 10",
        _recipe(
            "mnist",
            {"name": "iid", "clients": 1000, "samples": 60},
            {"name": "logreg"},
            clients_per_round=10,
            epochs=1,
            batch_size=10,
            lr=0.03,
        ),
        rounds=20,
    ),
    "pfl-cifar10": Workload(
        "pfl-research's: CIFAR-10, 1,000 users of 50, cohort 50, two-convolution CNN, E = 1, B = 10",
        _recipe(
            "cifar10",
            {"name": "iid", "clients": 1000, "samples": 50},
            {"name": "cnn"},
            clients_per_round=50,
            epochs=1,
            batch_size=10,
            lr=0.05,
        ),
    ),
}
QUICK = ("logreg-250", "mlp-100", "cnn-10")


@dataclass(frozen=True)
class Work:
    """A workload with its data loaded: what a peer needs to do the same as fedstrata."""

    experiment: Experiment

    @classmethod
    def load(cls, name: str, rounds: int, data: str | None = None, settings: tuple[str, ...] = ()) -> Work:
        """Read the data and cut it into clients."""
        recipe = {**WORKLOADS[name].recipe, "name": name}
        recipe["training"] = {**recipe["training"], "rounds": rounds}
        return cls(build_experiment(load(recipe, settings=settings), data=Path(data) if data else None))

    @property
    def training(self) -> Any:
        """Epochs, batch size, learning rate, momentum, …"""
        return self.experiment.recipe.training

    @cached_property
    def sizes(self) -> np.ndarray:
        """Every client's number of samples."""
        return self.experiment.task.sizes()

    @cached_property
    def cohorts(self) -> list[list[int]]:
        """The clients of each round, as fedstrata draws them."""
        training, seed = self.training, self.experiment.recipe.seed
        return [training.participation.sample(self.sizes, seed, t + 1, 0).tolist() for t in range(training.rounds)]

    def model(self) -> nn.Module:
        """A model with the initial weights."""
        return build_model(self.experiment.task, self.experiment.recipe.seed)

    def client(self, index: int) -> tuple[Tensor, Tensor]:
        """A client's inputs and targets."""
        shard = self.experiment.task.clients[index]
        rows = torch.from_numpy(shard.rows)
        return shard.inputs[rows], shard.targets[rows]

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """On the test set. BatchNorm uses each batch's statistics: not every peer averages the running ones."""
        test = self.experiment.task.evaluation["test"]
        model.eval()
        for module in model.modules():
            module.train(isinstance(module, nn.BatchNorm2d))
        right = sum(
            int((model(x).argmax(1) == y).sum())
            for x, y in zip(test.inputs.split(1000), test.targets.split(1000), strict=True)
        )
        return right / len(test.targets)


@dataclass(frozen=True)
class Batches:
    """Shuffled mini-batches of one client's data, anew in every epoch; the last may be short."""

    inputs: Tensor
    targets: Tensor
    size: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for at in torch.split(torch.randperm(len(self.inputs)), self.size):
            yield self.inputs[at], self.targets[at]


def train_locally(model: nn.Module, inputs: Tensor, targets: Tensor, training: Any) -> None:
    """The obvious PyTorch loop of one client."""
    optimizer = torch.optim.SGD(model.parameters(), lr=training.lr, momentum=training.momentum)
    model.train()
    for _ in range(training.epochs):
        for x, y in Batches(inputs, targets, training.batch_size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def arguments(*extra: str) -> argparse.Namespace:
    """The command line of every system's script; `extra` are options of its own, with an integer each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the peers' batches")
    parser.add_argument("--data", default=None)
    parser.add_argument("--weights", default=None, help="a file for the final weights")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="fedstrata's recipe only")
    for option in extra:
        parser.add_argument(option, type=int)
    return parser.parse_args()


def report(**line: Any) -> None:
    """A line for the harness."""
    print(json.dumps(line), flush=True)


def finish(work: Work, model: nn.Module, options: argparse.Namespace) -> None:
    """The test accuracy for the harness, and how far the weights moved, for its check that all did the same work."""
    moved = nn.utils.parameters_to_vector(model.parameters()) - nn.utils.parameters_to_vector(work.model().parameters())
    if options.weights:
        np.save(options.weights, moved.detach().numpy())
    report(accuracy=work.accuracy(model))
