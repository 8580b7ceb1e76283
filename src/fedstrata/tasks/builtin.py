"""From a recipe's `[task]` to a `Task`: a data set, a partition and a model, each ours or the user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn

from fedstrata.core import rng
from fedstrata.core.errors import MISSING, BadValue, DataError, FedstrataError, RecipeError
from fedstrata.registry import check_type, did_you_mean, find, import_object
from fedstrata.tasks import datasets
from fedstrata.tasks.augment import Operation, augmented
from fedstrata.tasks.config import NODES, PYTHON_TASK, NodesConfig, TaskConfig
from fedstrata.tasks.mapped import Mapped
from fedstrata.tasks.models import MODELS
from fedstrata.tasks.nodes import RemoteData
from fedstrata.tasks.own_files import read_files
from fedstrata.tasks.partitions import Partition, Scheme, held_out_sizes, split
from fedstrata.tasks.task import Data, Samples, Task, as_data, rows_of
from fedstrata.tasks.whole import Whole


@dataclass(frozen=True)
class ClientShards(Sequence[Data]):
    """Every client's part of one data set, made when asked for: a hundred thousand clients cost nothing.

    With a `held_out` share, each client's own samples are split, at random and for good, into a part to train on and
    a part to be evaluated on; `part` says which one this is.
    """

    whole: Data
    partition: Partition
    seed: int = 0
    held_out: float = 0.0
    part: Literal["train", "held_out"] = "train"

    def __len__(self) -> int:
        return len(self.partition)

    def __getitem__(self, client: int) -> Data:  # type: ignore[override]
        rows = self.partition[client]
        if self.held_out:
            train, held_out = split(rows, self.held_out, self.seed, client)
            rows = held_out if self.part == "held_out" else train
        return rows_of(self.whole, rows)

    @property
    def sizes(self) -> np.ndarray:
        """Each client's number of samples."""
        sizes = self.partition.sizes
        if not self.held_out:
            return sizes
        held_out = held_out_sizes(sizes, self.held_out)
        return held_out if self.part == "held_out" else sizes - held_out


class Given(TypedDict, total=False):
    """What Python may hand over itself in the place of what a recipe names."""

    data: Mapped
    partition: Scheme
    model: Callable[..., nn.Module]
    augment: Sequence[str | Operation]


def build_task(
    config: TaskConfig, seed: int, held_out: float = 0.0, data: Path | None = None, given: Given | None = None
) -> Task:
    """Load, partition, and put together what the recipe names, or what was given."""
    given = given or {}
    if config.function is not None:
        return _users_task(config, seed)
    if config.nodes is not None:
        return _task_of_nodes(config.model, config.nodes)
    whole = given["data"]() if "data" in given else _load(config, seed, data)
    train, labels = whole.train, whole.labels
    evaluation: dict[str, Any] = {} if whole.test is None else {"test": whole.test}
    rows = np.arange(len(labels))
    if config.validation:
        if config.validation >= len(rows):
            raise RecipeError("task.validation", config.validation, f"must be below the {len(rows)} training samples")
        rows = rng.generator(seed, "validation").permutation(rows)
        evaluation["validation"] = rows_of(train, rows[: config.validation])
        rows = np.sort(rows[config.validation :])
    if whole.owners is None:
        partition = _partition(config, labels[rows], seed, given.get("partition"))
    else:
        partition = Partition.from_owners(np.arange(len(rows)), whole.owners[rows], len(whole.client_names))
    partition = Partition(rows[partition.indices], partition.offsets)
    evaluation["train"] = rows_of(train, partition.indices)
    notes: dict[str, Any] = {"dataset": config.dataset, "source": whole.source}
    if labels.ndim == 1 and not np.issubdtype(labels.dtype, np.floating):
        table = partition.table(labels, len(whole.class_names))
        notes |= {"class_names": list(whole.class_names), "table": table.tolist()}
    if whole.client_names:
        notes["client_names"] = list(whole.client_names)
    operations = given.get("augment", config.augment)
    return Task(
        model=model_factory(config.model, whole.shape, len(whole.class_names), given.get("model")),
        clients=ClientShards(augmented(train, operations, whole.shape), partition, seed, held_out, "train"),
        held_out=ClientShards(train, partition, seed, held_out, "held_out") if held_out else None,
        evaluation=evaluation,
        name=config.dataset,
        notes=notes,
    )


def _task_of_nodes(model: Mapping[str, Any], nodes: NodesConfig) -> Task:
    """What is known without any data; how much each client has, it says itself later."""
    unknown = np.ones(nodes.clients, dtype=np.int64)
    return Task(
        model=model_factory(model, tuple(nodes.shape), len(nodes.class_names)),
        clients=RemoteData(unknown),
        held_out=RemoteData(unknown),
        name=NODES,
        notes={"dataset": NODES, "source": "the nodes' own data", "class_names": list(nodes.class_names)},
    )


def _users_task(config: TaskConfig, seed: int) -> Task:
    assert config.function is not None
    if config.function == PYTHON_TASK:
        raise RecipeError("task.function", PYTHON_TASK, "this run's Task was given in Python; give it again there")
    function = import_object(config.function, "task.function")
    if not callable(function):
        raise RecipeError("task.function", config.function, f"is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind(**config.options)
    except TypeError as error:
        raise RecipeError("task.options", config.options, str(error)) from None
    try:
        with rng.global_scope(seed, "task"):
            task = function(**config.options)
    except FedstrataError:
        raise
    except Exception as error:
        raise RecipeError("task.function", config.function, f"{type(error).__name__}: {error}") from error
    if not isinstance(task, Task):
        raise RecipeError("task.function", config.function, f"gave a {type(task).__name__}, not a fedstrata.Task")
    return task


def _load(config: TaskConfig, seed: int, data: Path | None) -> Whole:
    if config.files is not None:
        return read_files(config.files, scale=config.inputs == "normalised")
    if ":" in config.dataset:
        try:
            with rng.global_scope(seed, "task"):
                train, test = import_object(config.dataset, "task.dataset")()
        except FedstrataError:
            raise
        except Exception as error:
            problem = f"must give ((x, y), (x, y)): {type(error).__name__}: {error}"
            raise RecipeError("task.dataset", config.dataset, problem) from error
        train, test = as_data(train, "train"), as_data(test, "test")
        if not isinstance(train, Samples) or not isinstance(test, Samples):
            raise RecipeError("task.dataset", config.dataset, "must give tensors; use task.function for a Dataset")
        integer = not train.targets.is_floating_point() and train.targets.ndim == 1
        classes = int(train.targets.max()) + 1 if integer else 1
        return _in_memory(train, test, [str(c) for c in range(classes)], config.dataset)
    if config.dataset not in datasets.NAMES:
        raise RecipeError("task.dataset", config.dataset, f"unknown; there are: {', '.join(datasets.NAMES)}")
    loaded = datasets.load(config.dataset, data)
    scale = _scaling(loaded.train_images, config.inputs)
    train = Samples(scale(loaded.train_images), loaded.train_labels)
    test = Samples(scale(loaded.test_images), loaded.test_labels)
    return _in_memory(train, test, loaded.class_names, loaded.source)


def _in_memory(train: Samples, test: Samples, class_names: Sequence[str], source: str) -> Whole:
    return Whole(train, train.targets.numpy(), tuple(train.inputs.shape[1:]), class_names, source, test)


def _scaling(images: Tensor, inputs: str) -> Callable[[Tensor], Tensor]:
    """Bytes to floats: [0, 1], or with the training images' mean and standard deviation per channel taken out."""
    if inputs == "unit":
        return lambda pixels: pixels.float().div_(255)
    mean, std = (numbers.float().view(1, -1, 1, 1) for numbers in channel_statistics(images))

    def scale(pixels: Tensor) -> Tensor:
        floats = torch.empty(pixels.shape)
        for some, into in zip(torch.split(pixels, _AT_A_TIME), torch.split(floats, _AT_A_TIME), strict=True):
            into.copy_(some).sub_(mean).div_(std)
        return floats

    return scale


_AT_A_TIME = 256
"""Images to scale at once: so few that they stay in the cache between one operation and the next."""


def channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel's bytes."""
    channels = images.shape[1]
    # Counting each byte is exact and needs no copy of the images as floats.
    counts = torch.stack([torch.bincount(images[:, c].flatten(), minlength=256) for c in range(channels)]).double()
    values = torch.arange(256, dtype=torch.float64)
    share = counts / counts.sum(1, keepdim=True)
    mean = share @ values
    return mean, (share @ values.square() - mean.square()).sqrt()


_TOO_MUCH = "needs more memory than there is"


def _partition(config: TaskConfig, labels: np.ndarray, seed: int, given: Scheme | None = None) -> Partition:
    name, scheme = config.partition.get("name"), given or config.built_partition
    if given is not None:
        name = type(given).__name__
    try:
        partition = scheme.split(labels, rng.generator(seed, "partition"))
    except BadValue as error:
        raise RecipeError(f"task.partition.{error.field}", error.value, error.problem) from None
    except (ValueError, MemoryError) as error:
        raise RecipeError("task.partition", name, str(error) or _TOO_MUCH) from None
    if not isinstance(partition, Partition):
        lists = [np.asarray(rows) for rows in partition]
        for client, rows in enumerate(lists):
            if rows.ndim != 1 or (len(rows) and not np.issubdtype(rows.dtype, np.integer)):
                raise RecipeError("task.partition", name, f"client {client} has no array of whole numbers")
            if len(rows) and not 0 <= rows.min() <= rows.max() < len(labels):
                problem = f"client {client} has an index outside 0 … {len(labels) - 1}"
                raise RecipeError("task.partition", name, problem)
        partition = Partition.from_lists(lists)
    if len(partition) == 0 or not (partition.sizes > 0).any():
        raise DataError(f"task.partition = {name!r}: no client has any sample")
    return partition


def model_factory(
    table: Mapping[str, Any], shape: tuple[int, ...], classes: int, own: Callable[..., nn.Module] | None = None
) -> Callable[[], nn.Module]:
    """Our models take the input's shape and the number of classes; a user's takes of these what it has a name for."""
    options = dict(table) if own is None else {"name": getattr(own, "__name__", type(own).__name__)}
    if "name" not in options:
        raise RecipeError("task.model.name", MISSING, f"is missing; there are: {', '.join(MODELS)}")
    name = options.pop("name")
    factory = find("task.model.name", name, MODELS) if own is None else own
    accepted = inspect.signature(factory).parameters
    types = get_type_hints(factory) if inspect.isfunction(factory) else {}
    given = {key: value for key, value in (("input_shape", shape), ("classes", classes)) if key in accepted}
    for key, value in options.items():
        anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
        if key in given or (key not in accepted and not anything):
            raise RecipeError(f"task.model.{key}", value, f"{name} has no such option{did_you_mean(key, accepted)}")
        check_type(f"task.model.{key}", value, types.get(key, Any))

    def make() -> nn.Module:
        try:
            model = factory(**given, **options)
        except (TypeError, ValueError) as error:
            reason, *_ = str(error).splitlines()  # of torch's, the rest is where it was raised
            raise RecipeError("task.model", dict(table), reason) from None
        except (RuntimeError, MemoryError) as error:
            if name not in MODELS:  # a user wants to see where
                raise
            raise RecipeError("task.model", dict(table), _TOO_MUCH) from error
        if not isinstance(model, nn.Module):
            raise RecipeError("task.model.name", name, f"gave a {type(model).__name__}, not a torch.nn.Module")
        return model

    return make
