"""The model that a run has trained, as a module and as a file."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save
from torch import Tensor, nn

from fedstrata.core.errors import RunDirectoryError, require
from fedstrata.core.memory import Version, empty_table, renewed, tags
from fedstrata.core.messages import Order
from fedstrata.core.state import ServerState
from fedstrata.core.versions import Versions
from fedstrata.nodes.memory import NodeMemory
from fedstrata.recipes.experiment import build_experiment
from fedstrata.runs.directory import RunDirectory
from fedstrata.runs.files import write_whole
from fedstrata.runs.packs import Packs
from fedstrata.runs.writer import last_state
from fedstrata.tasks.seeded import AnyTask


def trained_model(
    directory: RunDirectory, task: AnyTask | None = None, data: Path | None = None, client: int | None = None
) -> nn.Module:
    """The recipe's model with the weights of the last checkpoint; of a client, with what that keeps to itself."""
    experiment = build_experiment(directory.recipe, task, data)
    state = last_state(directory, experiment.layers)
    if client is None:
        return experiment.module(state)
    require(0 <= client < directory.about.clients, "client", client, f"must be from 0 to {directory.about.clients - 1}")
    return experiment.module(state, _memory(directory, state, client))


def _memory(directory: RunDirectory, state: ServerState, client: int) -> Version:
    """What a client remembers at the last checkpoint; nothing, if it has not taken part."""
    tag = tags(state.memory).get(client)
    if tag is None:
        return {}
    if directory.recipe.engine.name == "flower":
        where = directory.path / "nodes"
        if not where.is_dir():
            raise RunDirectoryError(f"{directory.path}: what client {client} remembers is on its own node")
        order = Order("evaluate", state.round, 0, client, base=tag)
        return NodeMemory(where, str(directory.id), client).of(order)
    versions = Versions()
    Packs(directory.files, str(directory.id)).load(state.round, renewed(empty_table(), [client], tag), versions)
    return versions.of(client, tag)


def write_model(
    directory: RunDirectory,
    path: Path,
    task: AnyTask | None = None,
    data: Path | None = None,
    client: int | None = None,
) -> None:
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
    state = trained_model(directory, task, data, client).state_dict()
    tensors = {name: tensor.clone() for name, tensor in state.items() if isinstance(tensor, Tensor)}
    metadata = {"experiment": directory.recipe.name, "algorithm": directory.recipe.label}
    write_whole(path, save(tensors, metadata))
