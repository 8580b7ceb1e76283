"""The model that a run has trained, as a module and as a file."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save
from torch import Tensor, nn

from fedstrata.core.errors import RunDirectoryError
from fedstrata.recipes.experiment import build_experiment
from fedstrata.runs.directory import RunDirectory
from fedstrata.runs.files import write_whole
from fedstrata.runs.writer import last_state
from fedstrata.tasks.task import Task


def trained_model(directory: RunDirectory, task: Task | None = None, data: Path | None = None) -> nn.Module:
    """The recipe's model with the weights of the last checkpoint."""
    experiment = build_experiment(directory.recipe, task, data)
    return experiment.module(last_state(directory, experiment.layers))


def write_model(directory: RunDirectory, path: Path, task: Task | None = None, data: Path | None = None) -> None:
    """Write its whole state dict as safetensors, where there is nothing yet."""
    if path.exists():
        raise RunDirectoryError(f"{path} exists; it is not overwritten")
    path.parent.mkdir(parents=True, exist_ok=True)
    state = trained_model(directory, task, data).state_dict()
    tensors = {name: tensor.clone() for name, tensor in state.items() if isinstance(tensor, Tensor)}
    metadata = {"experiment": directory.recipe.name, "algorithm": directory.recipe.label}
    write_whole(path, save(tensors, metadata))
