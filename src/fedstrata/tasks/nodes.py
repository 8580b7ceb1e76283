"""Data that never leaves the clients' own machines: `task.dataset = "nodes"` (docs/flower.md).

The recipe says what every node's data must look like, and that is all the server knows. A node reads its own data, from
a folder or a function that its own configuration names, checks it, and keeps a part of it for evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstrata.core import rng
from fedstrata.core.errors import DataError, FedstrataError, RecipeError
from fedstrata.registry import import_object
from fedstrata.tasks.augment import augmented
from fedstrata.tasks.config import NodesConfig
from fedstrata.tasks.folders import read_folder
from fedstrata.tasks.partitions import split
from fedstrata.tasks.task import Data, Samples, Task, as_data, rows_of


@dataclass(frozen=True)
class RemoteData(Sequence[Any]):
    """Clients' data as the server knows it: how much there is, and no more."""

    sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, client: Any) -> Any:
        raise DataError(f"client {client}'s data is on its own node")


@dataclass(frozen=True)
class OwnData(Sequence[Any]):
    """Clients' data as a node knows it: its own. The others' sizes are not known, and said to be 1."""

    client: int
    own: Data
    clients: int

    @property
    def sizes(self) -> np.ndarray:
        """Each client's number of samples."""
        sizes = np.ones(self.clients, dtype=np.int64)
        sizes[self.client] = len(self.own)
        return sizes

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, client: Any) -> Any:
        if client != self.client:
            raise DataError(f"client {client}'s data is on its own node")
        return self.own


def own_task(
    task: Task,
    config: NodesConfig,
    data: str | None,
    client: int,
    held_out: float,
    seed: int,
    augment: Sequence[str] | None = None,
) -> Task:
    """The recipe's task as a node has it: with the data that `data`, of its own configuration, names."""
    if client >= config.clients:
        raise RecipeError("partition-id", client, f"the recipe has {config.clients} clients, from 0")
    whole = _read(config, data, seed)
    if len(whole) < 2:
        problem = f"has {len(whole)} samples; one to train on and one to be evaluated on are needed"
        raise RecipeError("data", data, problem)
    train, test = (rows_of(whole, rows) for rows in split(np.arange(len(whole)), held_out, seed, client))
    train, clients = augmented(train, augment, config.shape), config.clients
    return replace(task, clients=OwnData(client, train, clients), held_out=OwnData(client, test, clients))


# --- reading ---------------------------------------------------------------------------------------------------------


def _read(config: NodesConfig, data: str | None, seed: int) -> Data:
    if not data:
        raise RecipeError("data", data, "this node's config must name its data: a folder, or module:function")
    folder = Path(data).expanduser()
    if folder.is_dir():
        return read_own_folder(folder, config)
    if ":" in data and "/" not in data:
        return _call(config, data, seed)
    raise RecipeError("data", data, "is neither a folder on this node nor module:function")


def read_own_folder(folder: Path, config: NodesConfig) -> Samples:
    """The samples in a folder, scaled as the recipe says."""
    inputs, targets = read_folder(folder, config.shape, config.class_names)
    if config.mean is not None and config.std is not None:
        per_channel = (1, -1, *[1] * (len(config.shape) - 1))
        inputs.sub_(torch.tensor(config.mean).view(per_channel)).div_(torch.tensor(config.std).view(per_channel))
    return Samples(inputs, targets)


def _call(config: NodesConfig, name: str, seed: int) -> Data:
    """A user's function: (inputs, targets) as tensors or arrays, or a Dataset; scaled as the model wants it."""
    function = import_object(name, "data")
    try:
        with rng.global_scope(seed, "task"):
            data = as_data(function(), name)
    except FedstrataError:
        raise
    except Exception as error:
        raise RecipeError("data", name, f"{type(error).__name__}: {error}") from error
    if len(data):
        inputs, targets = (data.inputs, data.targets) if isinstance(data, Samples) else data.batch(np.arange(1))
        _check_tensors(config, name, inputs, targets)
    return data


def _check_tensors(config: NodesConfig, name: str, inputs: Any, targets: Any) -> None:
    shape, classes = tuple(config.shape), len(config.class_names)
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or tuple(inputs.shape[1:]) != shape:
        what = f"{inputs.dtype} {tuple(inputs.shape[1:])}" if isinstance(inputs, Tensor) else type(inputs).__name__
        raise RecipeError("data", name, f"gave inputs of {what}, expected floats of shape {shape}")
    if not torch.isfinite(inputs).all():
        raise RecipeError("data", name, "gave inputs that are not finite")
    if not isinstance(targets, Tensor) or targets.dtype != torch.int64 or targets.ndim != 1:
        what = f"{targets.dtype} {tuple(targets.shape)}" if isinstance(targets, Tensor) else type(targets).__name__
        raise RecipeError("data", name, f"gave targets of {what}, expected an int64 for each sample")
    if not 0 <= int(targets.min()) <= int(targets.max()) < classes:
        problem = f"gave targets from {int(targets.min())} to {int(targets.max())}, expected 0 to {classes - 1}"
        raise RecipeError("data", name, problem)
