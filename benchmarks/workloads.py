"""The work that every system does: model, data, partition and cohorts, all taken from fedstrata."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import problems
from benchmarks.problems import Problem
from fedstrata.clients.training import build_model
from fedstrata.recipes.experiment import Experiment, build_experiment
from fedstrata.recipes.schema import Recipe, load
from fedstrata.tasks.metric import Metric
from fedstrata.tasks.task import Samples, Task

WARM_UP = 2
"""Rounds of a turn that are not timed: the first is start-up, the second fills the last caches."""


@dataclass(frozen=True)
class Workload:
    """A setting to be timed: a recipe, how many rounds a turn times after warming up, and how many a whole run has."""

    description: str
    recipe: dict[str, Any]
    rounds: int = 5
    whole: int | None = None

    def as_recipe(self, name: str, rounds: int, settings: tuple[str, ...] = ()) -> Recipe:
        """As a user's recipe with so many rounds says it."""
        recipe = {**self.recipe, "name": name, "training": {**self.recipe["training"], "rounds": rounds}}
        return load(recipe, settings=settings)


def _recipe(dataset: str, partition: dict[str, Any], model: dict[str, Any], **training: Any) -> dict[str, Any]:
    validation = training.pop("validation", 0)
    task = {"dataset": dataset, "partition": partition, "model": model, "validation": validation}
    return {"task": task, "training": training, "algorithm": {"name": "fedavg"}}


def _own(problem: str, options: dict[str, Any] | None = None, **training: Any) -> dict[str, Any]:
    task = {"function": f"benchmarks.workloads:{problem}", "options": options or {}}
    return {"task": task, "training": training, "algorithm": {"name": "fedavg"}}


def _task(problem: Problem, name: str) -> Task:
    return Task(
        model=problem.model,
        clients=problem.clients,
        evaluation={"test": problem.test},
        loss=problem.loss,
        metric=Metric("accuracy", problems.accuracy),
        name=name,
    )


def gpt() -> Task:
    """`problems.gpt` as a recipe's task."""
    return _task(problems.gpt(), "gpt")


def frozen() -> Task:
    """`problems.frozen` as a recipe's task."""
    return _task(problems.frozen(), "frozen")


def deep(layers: int) -> Task:
    """`problems.deep` as a recipe's task."""
    return _task(problems.deep(layers), f"deep-{layers}")


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
        whole=50,
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
        whole=20,
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
        whole=6,
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
    "gpt": Workload(
        "a causal decoder with 808,475 parameters, 16 clients with 64 lines of 64 letters, 8 a round, E = 1, B = 8",
        _own("gpt", clients_per_round=8, batch_size=8, lr=0.1, momentum=0.9),
        whole=6,
    ),
    "frozen": Workload(
        "20 million frozen parameters and 20,500 trained ones, 50 clients of 200 texts, 10 a round, E = 2, B = 20",
        _own("frozen", clients_per_round=10, epochs=2, batch_size=20, lr=0.1),
        whole=10,
    ),
}
PEERLESS = ("gpt", "frozen")
"""Timed against loops only."""
LAYERS = {
    f"layers-{layers}-steps-{steps}": Workload(
        f"a million parameters in {layers:,} layers, 10 clients, 5 a round, {steps} steps of 32 samples",
        _own("deep", {"layers": layers}, clients_per_round=5, steps=steps, batch_size=32, lr=0.2),
        rounds=3,
    )
    for layers in (10, 100, 1000)
    for steps in (2, 10)
}
QUICK = ("logreg-250", "mlp-100", "cnn-10")


@dataclass(frozen=True)
class Work:
    """A workload with its data loaded: what a peer needs to do the same as fedstrata."""

    experiment: Experiment

    @classmethod
    def load(cls, name: str, rounds: int, data: str | None = None, settings: tuple[str, ...] = ()) -> Work:
        """Read the data and cut it into clients."""
        recipe = (WORKLOADS | LAYERS)[name].as_recipe(name, rounds, settings)
        return cls(build_experiment(recipe, data=Path(data) if data else None))

    @property
    def training(self) -> Any:
        """Epochs, batch size, learning rate, momentum, …"""
        return self.experiment.recipe.training

    @property
    def local(self) -> dict[str, Any]:
        """What `loop.train_locally` needs of it."""
        return self.training.model_dump(include={"lr", "momentum", "batch_size", "epochs", "steps"})

    @property
    def loss(self) -> Any:
        """What is minimised."""
        return self.experiment.task.loss

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
        return _tensors(self.experiment.task.client(index))

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """On the test set. BatchNorm uses each batch's statistics: not every peer averages the running ones."""
        inputs, targets = _tensors(self.experiment.task.server_data("test"))
        model.eval()
        for module in model.modules():
            module.train(isinstance(module, nn.BatchNorm2d))
        right = 0.0
        for x, y in zip(inputs.split(1000), targets.split(1000), strict=True):
            right += float(self.experiment.task.metric.function(model(x), y)) * len(y)
        return right / len(targets)


def _tensors(data: Any) -> tuple[Tensor, Tensor]:
    assert isinstance(data, Samples)
    if data.rows is None:
        return data.inputs, data.targets
    rows = torch.from_numpy(data.rows)
    return data.inputs[rows], data.targets[rows]


def arguments(*extra: str) -> argparse.Namespace:
    """The command line of every system's script; `extra` are options of its own, with an integer each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS | LAYERS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the peers' batches")
    parser.add_argument("--data", default=None)
    parser.add_argument("--weights", default=None, help="a file for the final weights")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="fedstrata's recipe only")
    for option in extra:
        parser.add_argument(option, type=int)
    return parser.parse_args()


def report(**line: Any) -> None:
    """A line for the harness, which says when it has looked at its clocks."""
    print(json.dumps(line), flush=True)
    if not sys.stdin.isatty():
        sys.stdin.readline()


def trained(model: nn.Module) -> list[nn.Parameter]:
    """All that is not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def finish(work: Work, model: nn.Module, options: argparse.Namespace) -> None:
    """The test accuracy for the harness, and how far the weights moved, for its check that all did the same work."""
    after, before = (nn.utils.parameters_to_vector(trained(which)) for which in (model, work.model()))
    if options.weights:
        np.save(options.weights, (after - before).detach().numpy())
    report(accuracy=work.accuracy(model))
