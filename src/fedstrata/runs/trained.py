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
from fedstrata.tasks.seeded import AnyTask


def trained_model(directory: RunDirectory, task: AnyTask | None = None, data: Path | None = None) -> nn.Module:
    """The recipe's model with the weights of the last checkpoint."""
    experiment = build_experiment(directory.recipe, task, data)
    return experiment.module(last_state(directory, experiment.layers))


def write_model(directory: RunDirectory, path: Path, task: AnyTask | None = None, data: Path | None = None) -> None:
    """Write its whole state dict as safetensors, where there is nothing yet."""
    if path.suffix not in ("", ".safetensors"):
        name, module = path.with_suffix(".safetensors"), f"fedstrata.Run({str(directory.path)!r}).model()"
        what = f"the model is written as safetensors: name it {name}"
        if path.suffix in (".pt", ".pth", ".bin"):
            what += f", or in Python torch.save({module}.state_dict(), {str(path)!r})"
        raise RunDirectoryError(f"{path}: {what}")
    if path.exists():
        raise RunDirectoryError(f"{path} exists; it is not overwritten")
    path.parent.mkdir(parents=True, exist_ok=True)
    state = trained_model(directory, task, data).state_dict()
    tensors = {name: tensor.clone() for name, tensor in state.items() if isinstance(tensor, Tensor)}
    metadata = {"experiment": directory.recipe.name, "algorithm": directory.recipe.label}
    write_whole(path, save(tensors, metadata))
