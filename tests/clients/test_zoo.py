"""Every module of the zoo, trained in each way that there is: the same bits, and what plain PyTorch comes to.

Before every order a client's model is exactly what the factory builds plus the values that travel; after it, those are
read from the module by name. What that means is written down once more in `plain`, with a new module for every order.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils import parameters_to_vector

pytest.importorskip("flwr")


import fedstrata
from fedstrata.core.determinism import steady
from fedstrata.core.errors import FedstrataError
from tests.support.zoo import ZOO
from tests.support.zoo.fares import recipe, visit


@pytest.mark.parametrize("name", ZOO)
def test_the_zoo(name: str, tmp_path: Path) -> None:
    with steady():
        row = visit(ZOO[name], tmp_path)
    assert not row.problems, "\n".join(row.problems)


def test_one_instance_for_all_runs(tmp_path: Path) -> None:
    """`Task(model=lambda: net)`: no run starts where another one ended, or it is refused."""
    animal = ZOO["Task(model=lambda: net)"]
    task, table = animal.task(), recipe(animal) | {"task": {}}
    digests, refusal = [], None
    try:
        for out in (tmp_path / "first", tmp_path / "second"):
            digests.append(fedstrata.run(table, task=task, out=out).summary()["weights_sha256"])
    except FedstrataError as error:
        refusal = str(error)
    if refusal is None:
        assert digests[0] == digests[1]
    else:
        assert "model" in refusal


@pytest.mark.parametrize("name", ["convolutions", "channels-last convolutions", "BatchNorm2d"])
def test_outside_training_tensors_lie_as_torch_lays_them(name: str, tmp_path: Path) -> None:
    """Who has a run's model can use it as any other: as one vector, by views, and in a file."""
    run = fedstrata.run(recipe(ZOO[name]), out=tmp_path / "run")
    model, state = run.model(), run.model().state_dict()
    assert all(tensor.is_contiguous() for tensor in state.values())
    vector = parameters_to_vector(model.parameters())
    assert torch.equal(vector, torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    save_file(state, tmp_path / "state.safetensors")
    stored = load_file(tmp_path / "state.safetensors")
    assert stored.keys() == state.keys()
    assert all(torch.equal(stored[key], state[key]) for key in state)
