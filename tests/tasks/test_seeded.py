"""Tasks, partitions and models as typed functions: what a recipe makes of the same table, and what it says of them."""

from __future__ import annotations

import doctest
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedstrata
from fedstrata import models, partitions, tasks
from fedstrata.core.errors import BadValue, FedstrataError, RecipeError
from fedstrata.recipes.experiment import build_experiment
from fedstrata.recipes.schema import load
from fedstrata.runs.runner import create_run
from fedstrata.tasks import datasets, seeded
from fedstrata.tasks.builtin import build_task
from fedstrata.tasks.config import TaskConfig
from fedstrata.tasks.task import Task

SETTINGS: dict[str, Any] = {
    "name": "tiny",
    "training": {"rounds": 2, "batch_size": 6, "lr": 0.1},
    "engine": {"workers": 1},
}


def values_of(task: Task) -> list[Any]:
    """All that a client or the server could see of a task."""
    with fedstrata.core.rng.global_scope(0, "model"):
        numbers = torch.cat([p.detach().flatten() for p in task.model().parameters()])
    sets = [task.client(k) for k in range(len(task.clients))]
    sets += [task.client_held_out(k) for k in range(len(task.held_out or ()))]
    sets += [task.server_data(name) for name in task.evaluation]
    read = [data.batch(np.arange(min(len(data), 40))) for data in sets]
    return [numbers.numpy().tobytes(), [(x.numpy().tobytes(), y.numpy().tobytes()) for x, y in read], task.notes]


@pytest.mark.parametrize(
    ("options", "table"),
    [
        ({}, {}),
        (
            {"partition": partitions.dirichlet(clients=9, alpha=0.3), "model": "mlp"},
            {"partition": {"name": "dirichlet", "clients": 9, "alpha": 0.3}, "model": {"name": "mlp"}},
        ),
        (
            {"partition": partitions.shards(5, 3), "model": partial(models.mlp, hidden=7), "inputs": "unit"},
            {
                "partition": {"name": "shards", "clients": 5, "per_client": 3},
                "model": {"name": "mlp", "hidden": 7},
                "inputs": "unit",
            },
        ),
        (
            {"partition": {"name": "iid", "clients": 3}, "model": models.logreg, "validation": 50, "augment": ["flip"]},
            {
                "partition": {"name": "iid", "clients": 3},
                "model": {"name": "logreg"},
                "validation": 50,
                "augment": ["flip"],
            },
        ),
    ],
    ids=["defaults", "dirichlet", "shards", "tables"],
)
def test_a_function_makes_what_a_recipe_with_the_same_table_makes(
    options: dict[str, Any], table: dict[str, Any], tiny: Any
) -> None:
    task = tasks.mnist_mini(**options)
    assert task.config == TaskConfig(dataset="mnist-mini", **table)
    for seed, held_out in ((0, 0.0), (7, 0.25)):
        by_recipe = build_task(load({"task": {"dataset": "mnist-mini", **table}}).task, seed, held_out)
        torch.manual_seed(seed)  # for those that draw when they are read
        expected = values_of(by_recipe)
        torch.manual_seed(seed)
        assert values_of(task.build(seed, held_out)) == expected


def test_there_is_a_function_for_every_data_set_and_a_name_for_every_scheme_and_network() -> None:
    made = {
        function().config.dataset for function in (tasks.mnist, tasks.fashion_mnist, tasks.cifar10, tasks.mnist_mini)
    }
    assert made == set(datasets.NAMES)
    assert {getattr(partitions, name) for name in partitions.PARTITIONS} == set(partitions.PARTITIONS.values())
    assert {getattr(models, name) for name in models.MODELS} == set(models.MODELS.values())
    assert set(dir(tasks)) >= {"mnist", "fashion_mnist", "cifar10", "mnist_mini", "partitions", "models"}
    assert {"tasks", "partitions", "models"} <= set(dir(fedstrata))


def test_another_seed_is_another_partition() -> None:
    task = tasks.mnist_mini(partition=partitions.dirichlet(clients=9, alpha=0.3))
    assert task.build(1).sizes().tolist() != task.build(2).sizes().tolist()


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_of_it_is_the_recipes_and_resumes_without_it(
    tiny: Any, tmp_path: Path, same_run: Callable[..., None]
) -> None:
    task = tasks.mnist_mini(partition=partitions.iid(clients=4, samples=12), model=partial(models.mlp, hidden=4))
    first = fedstrata.run(SETTINGS, task=task, out=tmp_path / "python", seed=3)
    table = tiny({"training.rounds": 2})
    fedstrata.run(table, out=tmp_path / "recipe", seed=3)
    same_run(tmp_path / "python", tmp_path / "recipe")
    assert first.recipe.task == task.config
    fedstrata.resume(tmp_path / "python", settings={"training.rounds": 3})
    fedstrata.run(table, settings={"training.rounds": 3}, out=tmp_path / "whole", seed=3)
    same_run(tmp_path / "python", tmp_path / "whole")


def test_every_way_in_takes_it(tiny: Any, tmp_path: Path) -> None:
    """The one that a recipe can say, and one that it cannot; a comparison's seeds have partitions of their own."""
    scheme = partitions.dirichlet(clients=4, alpha=1.0)
    named = tasks.mnist_mini(partition=scheme, model="logreg")
    for number, task in enumerate((named, tasks.mnist_mini(partition=scheme, model=lambda classes: Small(classes)))):
        options: dict[str, Any] = {"rounds": 1, "workers": 1, "steps": 2, "batch_size": 4}
        ((state, record),) = fedstrata.simulate(task, "fedavg", seed=1, **options)
        run = fedstrata.run(task, "fedavg", seed=1, out=tmp_path / str(number), **options)
        assert run.summary()["weights_sha256"] is not None
        assert run.history()[0]["metrics"] == record.metrics
        assert torch.equal(run.model(task=task).state_dict()["fc.weight"], state.state_dict()["fc.weight"])
        compared = fedstrata.compare(task, ["fedavg"], seeds=[1, 2], out=tmp_path / f"compared-{number}", **options)
        runs = [fedstrata.Run(job.path) for job in compared.jobs]
        assert runs[0].history()[0]["metrics"] == record.metrics
        tables = [one.about.data.table for one in runs]
        assert tables == [task.build(seed).notes["table"] for seed in (1, 2)]
        assert tables[0] != tables[1]
    with pytest.raises(BadValue, match="second task"):
        fedstrata.run(named, task=named)


def test_a_loop_of_ones_own_sees_the_batches_that_ours_sees(tiny: Any) -> None:
    """Augmented ones, too: a plain loop of SGD ends where the recipe's own training does."""

    def train(model: Any, data: Any, local: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=local.lr)
        for inputs, targets in local.batches():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    options: dict[str, Any] = {"partition": partitions.iid(3, 12), "model": Small, "augment": ["crop", "flip"]}
    ends = []
    for loop in (None, train):
        task = tasks.mnist_mini(**options, train=loop)
        assert (task.config.function == "python") is (loop is not None)
        ((state, _),) = fedstrata.simulate(task, rounds=1, epochs=2, batch_size=5, lr=0.1, workers=1)
        ends.append(state.model)
    torch.testing.assert_close(ends[0], ends[1])


def test_settings_still_change_what_a_recipe_can_say(tiny: Any, tmp_path: Path) -> None:
    task = tasks.mnist_mini(partition=partitions.iid(4, 12), model="mlp")
    run = fedstrata.run(SETTINGS, task=task, settings={"task.model.hidden": 3}, out=tmp_path / "run")
    assert run.recipe.task.model == {"name": "mlp", "hidden": 3}
    assert run.about.layers[0].units == 3


class Small(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(784, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(images.flatten(1))


@dataclass(frozen=True)
class FirstSamples:
    """Client k holds twelve samples from 12 k on."""

    clients: int = 2

    def split(self, labels: np.ndarray, generator: np.random.Generator) -> list[np.ndarray]:
        return [np.arange(12 * k, 12 * k + 12) for k in range(self.clients)]


def test_what_can_be_imported_goes_by_its_name(tiny: Any) -> None:
    task = tasks.mnist_mini(partition=FirstSamples(3), model=Small)
    assert task.config.model == {"name": f"{__name__}:Small"}
    assert task.config.partition == {"name": f"{__name__}:FirstSamples", "clients": 3}
    built = task.build()
    assert built.sizes().tolist() == [12, 12, 12]
    assert isinstance(built.model(), Small)


def test_what_has_no_name_is_given_again_to_resume(tiny: Any, tmp_path: Path, same_run: Callable[..., None]) -> None:
    """A lambda: the recipe says only that the task came from Python, and a run with it is that of the same network."""

    def darker(inputs: Tensor) -> Tensor:
        return inputs / 2

    scheme = partitions.iid(clients=4, samples=12)
    task = tasks.mnist_mini(partition=scheme, model=lambda classes: Small(classes), augment=[darker])
    assert task.config == TaskConfig(function="python")
    run = fedstrata.run(SETTINGS, task=task, out=tmp_path / "run", seed=2)
    assert run.recipe.task.function == "python"
    with pytest.raises(RecipeError, match=r"given in Python"):
        fedstrata.resume(tmp_path / "run", settings={"training.rounds": 3})
    fedstrata.resume(tmp_path / "run", settings={"training.rounds": 3}, task=task)
    named = tasks.mnist_mini(partition=scheme, model=Small, augment=[darker])
    fedstrata.run(SETTINGS, task=named, settings={"training.rounds": 3}, out=tmp_path / "whole", seed=2)
    same_run(tmp_path / "run", tmp_path / "whole")


def test_an_experiment_takes_it_as_it_takes_a_task(tiny: Any, tmp_path: Path) -> None:
    """Built for the recipe's seed, and with data to evaluate clients on where the recipe asks for it."""
    task = tasks.mnist_mini(partition=partitions.iid(4, 12), model="logreg")
    recipe = load({**SETTINGS, "seed": 5, "evaluation": {"on": ["clients"], "held_out": 0.5}})
    experiment = build_experiment(recipe, task)
    assert experiment.task.held_out_sizes().tolist() == [6] * 4
    assert values_of(experiment.task) == values_of(task.build(5, 0.5))
    run, _ = create_run(recipe, tmp_path / "run", task=task)
    assert run.recipe.task == task.config


# --- what is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field", "problem"),
    [
        ({"partitoin": partitions.iid(3)}, "partitoin", "did you mean partition"),
        ({"nodes": {}}, "nodes", "is no argument"),
        ({"partition": {"name": "dirichlet", "clients": 3}}, "partition.alpha", "needs it"),
        ({"partition": {"name": "irichlet"}}, "partition.name", "did you mean dirichlet"),
        ({"partition": {"name": "dirichlet", "clients": 3, "alpha": "high"}}, "partition.alpha", "number"),
        ({"model": "cn"}, "model.name", "did you mean cnn"),
        ({"model": nn.Linear(1, 1)}, "model", "not a model"),
        ({"model": {"name": "mlp", "hiden": 3}}, "model.hiden", "did you mean hidden"),
        ({"model": {"name": "mlp", "hidden": "wide"}}, "model.hidden", "integer"),
        ({"validation": -1}, "validation", "greater than or equal to 0"),
        ({"inputs": "raw"}, "inputs", "'normalised' or 'unit'"),
        ({"augment": "crop"}, "augment", "list of operations"),
        ({"augment": ["crp"]}, "augment", "none of crop, flip"),
    ],
    ids=lambda part: str(part) if isinstance(part, str) else "",
)
def test_a_wrong_argument_is_told_at_the_call(options: Mapping[str, Any], field: str, problem: str) -> None:
    with pytest.raises(FedstrataError) as caught:
        tasks.mnist(**options)
    assert isinstance(caught.value, BadValue)
    assert caught.value.field == field
    assert problem in caught.value.problem


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        (partitions.dirichlet, {"clients": 3, "alpha": "high"}),
        (partitions.iid, {"clients": 2.5}),
        (partitions.shards, {"clients": 0}),
    ],
)
def test_a_wrong_argument_of_a_scheme_is_one_kind_of_error(scheme: Any, options: dict[str, Any]) -> None:
    with pytest.raises(BadValue) as caught:
        scheme(**options)
    assert caught.value.field in options


def test_the_examples_in_docstrings_run() -> None:
    results = doctest.testmod(seeded)
    assert results.attempted >= 2
    assert results.failed == 0
