"""Tasks as functions: `mnist(partition=partitions.dirichlet(clients=100, alpha=0.1), model="cnn")`.

Who holds what depends on a run's seed. So these functions give a `SeededTask`, of which each run builds its own `Task`.
What they are given is checked as a recipe's `[task]` table is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
from pydantic import ValidationError
from torch import Tensor, nn

from fedstrata.core.errors import BadValue, RecipeError, require
from fedstrata.registry import did_you_mean
from fedstrata.tasks.augment import AUGMENTATIONS, Operation
from fedstrata.tasks.builtin import Given, build_task, model_factory
from fedstrata.tasks.config import FILES, PYTHON_TASK, TaskConfig
from fedstrata.tasks.mapped import Columns, Key, Mapped
from fedstrata.tasks.metric import ACCURACY, Metric
from fedstrata.tasks.models import MODELS
from fedstrata.tasks.parquet import LABEL
from fedstrata.tasks.partitions import PARTITIONS, Scheme
from fedstrata.tasks.task import Task

Model = str | Mapping[str, Any] | Callable[..., nn.Module]
"""A name of ours, a recipe's table, or a function like those in `fedstrata.models`, with options by `partial`."""


Train = Callable[[Any, Any, Any], object]
"""`train(model, data, local)`: a way to train of one's own, as `Task` takes it."""


class Options(TypedDict, total=False):
    """What the functions for data sets have in common."""

    partition: Scheme | Mapping[str, Any]
    model: Model
    inputs: Literal["normalised", "unit"]
    validation: int
    augment: Sequence[str | Operation]
    train: Train | None


@dataclass(frozen=True)
class SeededTask:
    """A task that is built for a run when the run's seed is known; whatever takes a `Task` takes it, too."""

    table: TaskConfig
    """What a recipe would say of it."""
    given: Given = field(default_factory=lambda: Given(), repr=False)
    """What a recipe has no words for."""
    changes: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Of the task that is built: its loss, its metric."""

    @property
    def config(self) -> TaskConfig:
        """The `[task]` table that makes it; if its function is "python", no recipe can, and it is given again."""
        return TaskConfig(function=PYTHON_TASK) if self.given or self.changes else self.table

    @property
    def has_test(self) -> bool:
        """Whether the server has a data set "test" to evaluate on."""
        data = self.given.get("data")
        if data is not None:
            return data.test is not None
        return self.table.nodes is None and (self.table.files is None or self.table.files.test is not None)

    def build(self, seed: int = 0, held_out: float = 0.0, data: Path | None = None) -> Task:
        """The task of a run with this seed.

        `held_out`: the share of each client's samples that is kept from training, to evaluate on. `data`: where data
        sets are, if not in the usual place.
        """
        return replace(build_task(self.table, seed, held_out, data, self.given), **self.changes)


AnyTask = Task | SeededTask
"""A task, or what is one when the run's seed is known."""


def mnist(**options: Unpack[Options]) -> SeededTask:
    """MNIST: 60,000 images of handwritten digits to train on and 10,000 to test on, 1×28×28, in 10 classes.

    `partition`: who holds which samples, one of `fedstrata.partitions` (`iid(clients=10)` if not given). `model`: a
    name ("cnn"), one of `fedstrata.models`, or a function that builds a module. `inputs`: "normalised", or "unit" for
    [0, 1]. `validation`: so many training samples are set apart. `augment`: "crop" and "flip", or functions of one's
    own. `train`: a training loop of one's own, as `Task` takes it.

    >>> from fedstrata import partitions, tasks
    >>> tasks.mnist(partition=partitions.dirichlet(clients=100, alpha=0.1), model="mlp").config.partition
    {'name': 'dirichlet', 'clients': 100, 'alpha': 0.1}
    """
    return _seeded(options, dataset="mnist")


def fashion_mnist(**options: Unpack[Options]) -> SeededTask:
    """FashionMNIST: as MNIST, but of clothes and shoes. The arguments are those of `mnist`."""
    return _seeded(options, dataset="fashion-mnist")


def cifar10(**options: Unpack[Options]) -> SeededTask:
    """CIFAR-10: 50,000 + 10,000 photographs, 3×32×32, in 10 classes. The arguments are those of `mnist`."""
    return _seeded(options, dataset="cifar10")


def mnist_mini(**options: Unpack[Options]) -> SeededTask:
    """A tenth of MNIST that comes with fedstrata: 8,000 + 2,000 images. The arguments are those of `mnist`."""
    return _seeded(options, dataset="mnist-mini")


def from_dataset(
    dataset: Any,
    *,
    model: Model,
    inputs: Key | Sequence[Key] = 0,
    targets: Key = 1,
    partition_by: Key | Sequence[Any] | np.ndarray | None = None,
    partition: Scheme | Mapping[str, Any] | None = None,
    test: Any = None,
    transform: Callable[[Any], Any] | None = None,
    validation: int = 0,
    augment: Sequence[str | Operation] = (),
    train: Train | None = None,
    loss: Callable[[Any, Any], Tensor] = nn.functional.cross_entropy,
    metric: Metric = ACCURACY,
    name: str = "dataset",
) -> SeededTask:
    """A Hugging Face `Dataset`, or whatever has a length and gives samples by number, such as torch's.

    `inputs`, `targets`: columns by name, or places in a sample that is a tuple; several inputs become a dict. Images
    become floats from 0 to 1, channels first; a target that is a text becomes the number of its class.
    `partition_by`: the column, or an array, that says whose each sample is: every value is a client, by its name.
    `partition`: or else how samples are drawn, one of `fedstrata.partitions`. `test`: another data set, with the same
    columns, to evaluate on; without one, clients are evaluated on samples of their own. `transform`: what else is done
    with a batch of inputs. What is too large to be kept in memory is read whenever it is trained on. The other
    arguments are those of `mnist` and of `Task`.

    >>> from fedstrata import tasks
    >>> patients = [{"age": [0.1 * k], "ill": k % 2, "hospital": "north" if k < 4 else "south"} for k in range(10)]
    >>> task = tasks.from_dataset(patients, inputs="age", targets="ill", partition_by="hospital", model="logreg")
    >>> task.build().sizes().tolist()
    [4, 6]
    """
    if (partition is None) == (partition_by is None):
        problem = "must say who holds which samples" if partition is None else "and partition_by are two answers"
        raise BadValue("partition", partition, f"{problem}: give partition_by or partition")
    columns = inputs if isinstance(inputs, str | int) else tuple(inputs)
    read = partial(Columns, inputs=columns, targets=targets, transform=transform)
    whole = Mapped(
        read(dataset, what="dataset"), None if test is None else read(test, what="test"), partition_by=partition_by
    )
    options: dict[str, Any] = {"model": model, "validation": validation, "augment": augment, "train": train}
    if partition is not None:
        options["partition"] = partition
    return _seeded(options, {"loss": loss, "metric": metric}, data=whole, dataset=name)


def from_files(
    clients: str,
    *,
    target: str = LABEL,
    model: Model = "logreg",
    test: str | None = None,
    classes: Sequence[str] | None = None,
    shape: Sequence[int] | None = None,
    inputs: Literal["normalised", "unit"] = "normalised",
    validation: int = 0,
    augment: Sequence[str | Operation] | None = None,
    train: Train | None = None,
) -> SeededTask:
    """A file for each client: `from_files("hospitals/*.csv", target="ill")`, by the names of the files.

    `clients`: a pattern of CSV or parquet files with the same columns, all numbers but for the target; or of folders as
    nodes have them. `target`: the column with the classes. `test`: such a file to evaluate on; without one, clients are
    evaluated on samples of their own. `classes`: their names, if not those in the files. `shape`: that of an input,
    where clients have folders. `inputs`: "normalised", each column, or channel, as (x − mean)/std over all clients, or
    "unit", as they are. The other arguments are those of `mnist`.

    >>> from fedstrata import tasks
    >>> tasks.from_files("hospitals/*.csv", target="ill", model="mlp").config.files.target
    'ill'
    """
    files = {"clients": clients, "target": target, "test": test, "classes": classes, "shape": shape}
    given = {key: list(value) if isinstance(value, tuple) else value for key, value in files.items() if value}
    options: dict[str, Any] = {"model": model, "inputs": inputs, "validation": validation, "train": train}
    if augment is not None:
        options["augment"] = augment
    return _seeded(options, dataset=FILES, files=given)


def _seeded(options: Mapping[str, Any], changes: Mapping[str, Any] | None = None, **table: Any) -> SeededTask:
    for key, value in options.items():
        if key not in Options.__annotations__:
            raise BadValue(key, value, f"is no argument{did_you_mean(key, Options.__annotations__)}")
    given: dict[str, Any] = {key: table.pop(key) for key in ("data",) if key in table}
    changes = dict(changes or {})
    for key, value in options.items():
        if key == "train":
            changes |= {} if value is None else {key: value}
            continue
        named: Any = value
        if key == "model":
            require(not isinstance(value, nn.Module), key, value, "must be a function that builds a model, not a model")
            named = _table(value, MODELS)
        elif key == "partition":
            named = _table(value, PARTITIONS)
        elif key == "augment":
            require(not isinstance(value, str), key, value, "must be a list of operations")
            names = [one if isinstance(one, str) else _name(one, AUGMENTATIONS) for one in value]
            named = None if None in names else names
        if named is None:
            given[key] = value
        else:
            table[key] = named
    try:
        config = TaskConfig(**table)
        _ = config.built_partition, model_factory(config.model, (), 0, given.get("model"))  # which check their options
    except RecipeError as error:
        raise BadValue(error.field.removeprefix("task."), error.value, error.problem) from None
    except ValidationError as error:
        problem = error.errors()[0]
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, BadValue):
            raise cause from None
        raise BadValue(".".join(map(str, problem["loc"])), problem["input"], problem["msg"].lower()) from None
    return SeededTask(config, Given(**given), changes)  # type: ignore[typeddict-item]


def _table(thing: Any, known: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a recipe's table would say; None if nobody else could find the thing by its name."""
    if isinstance(thing, str):
        return {"name": thing}
    if isinstance(thing, Mapping):
        return dict(thing)
    kind, options = thing, {}
    if isinstance(thing, partial):
        kind, options = thing.func, thing.keywords
        if thing.args:
            return None
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        kind = type(thing)
        values = {item.name: (getattr(thing, item.name), item.default) for item in dataclasses.fields(thing)}
        options = {name: value for name, (value, default) in values.items() if value != default}
    name = _name(kind, known)
    return None if name is None else {"name": name, **options}


def _name(thing: Any, known: Mapping[str, Any]) -> str | None:
    """Our name for it, or `module:name` if it can be imported elsewhere."""
    for ours, one in known.items():
        if one is thing:
            return ours
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "<none>")
    return None if module in (None, "__main__") or "<" in name else f"{module}:{name}"
