"""Models in and out of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import fedstrata
from fedstrata.core.errors import RecipeError, RunDirectoryError
from fedstrata.runs.writer import last_state
from fedstrata.tasks.task import Task
from tests.support.runs import checkpoint_content


class Norms(nn.Module):
    """BatchNorm, a frozen layer, a tied weight and a buffer that is not stored."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(2, 6)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.first = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.out = nn.Linear(6, 2)
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.tied(self.first(self.norm(self.frozen(x) * self.scale)).relu()))


def norms_task(blobs: Any) -> Task:
    return Task(model=Norms, clients=[blobs(20, k) for k in range(3)], evaluation={"test": blobs(40, 9)})


def test_export_is_a_whole_state_dict(blobs: Any, tmp_path: Path) -> None:
    task = norms_task(blobs)
    table = {"training": {"rounds": 3, "batch_size": 5, "lr": 0.1}, "engine": {"workers": 1}}
    run = fedstrata.run(table, task=task, out=tmp_path / "run")
    run.export(tmp_path / "deep" / "model.safetensors", task=task)
    state = load_file(tmp_path / "deep" / "model.safetensors")
    fresh = Norms()
    fresh.load_state_dict(state, strict=True)
    trained = run.model(task=task)
    inputs = blobs(40, 9)[0]
    assert torch.equal(fresh.eval()(inputs), trained(inputs))
    accuracy = (trained(inputs).argmax(1) == blobs(40, 9)[1]).double().mean()
    assert run.curve()[-1][1] == pytest.approx(float(accuracy))
    # trained, ridden along, left alone, and tied
    assert not torch.equal(state["norm.running_mean"], torch.zeros(6))
    torch.manual_seed(0)
    assert torch.equal(state["first.weight"], state["tied.weight"])
    assert "scale" not in state
    with safe_open(tmp_path / "deep" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"experiment": "experiment", "algorithm": "fedavg"}
    with pytest.raises(RunDirectoryError, match="it is not overwritten"):
        run.export(tmp_path / "deep" / "model.safetensors", task=task)


def test_frozen_parameters_stay_what_they_were(blobs: Any, tmp_path: Path) -> None:
    task = norms_task(blobs)
    table = {"training": {"rounds": 2, "batch_size": 5, "lr": 0.1}, "engine": {"workers": 1}}
    short = fedstrata.run(table | {"training": table["training"] | {"rounds": 1}}, task=task, out=tmp_path / "short")
    long = fedstrata.run(table, task=task, out=tmp_path / "long")
    first, second = short.model(task=task).state_dict(), long.model(task=task).state_dict()
    assert torch.equal(first["frozen.weight"], second["frozen.weight"])
    assert not torch.equal(first["first.weight"], second["first.weight"])
    assert "frozen" not in long.layer_names


def test_initial_weights_from_an_export(tiny: Any, tmp_path: Path) -> None:
    start = fedstrata.run(tiny({"training.rounds": 2}), out=tmp_path / "start")
    start.export(tmp_path / "start.safetensors")
    settings = {"training.initial_weights": str(tmp_path / "start.safetensors"), "training.rounds": 1, "seed": 5}
    run = fedstrata.run(tiny(settings), out=tmp_path / "run")
    first = checkpoint_content(run.path / "checkpoints" / "000000.safetensors")[1]["model"]
    assert torch.equal(first, last_state(start.directory).model)
    assert not torch.equal(last_state(run.directory).model, first)


def test_initial_weights_of_another_model_are_refused(tiny: Any, tmp_path: Path) -> None:
    fedstrata.run(tiny({"training.rounds": 1}), out=tmp_path / "start").export(tmp_path / "w.safetensors")
    settings = {"training.initial_weights": str(tmp_path / "w.safetensors"), "task.model.hidden": 5}
    with pytest.raises(RecipeError, match=r"training.initial_weights = .*does not fit the model") as caught:
        fedstrata.run(tiny(settings), out=tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_convolutional_model_is_exported_in_torchs_own_layout(tiny: Any, tmp_path: Path) -> None:
    """The flat vector has convolutions channels last; what leaves it is an ordinary state dict."""
    run = fedstrata.run(tiny({"task.model": {"name": "cnn"}, "training.rounds": 1}), out=tmp_path / "run")
    run.export(tmp_path / "model.safetensors")
    exported, model = load_file(tmp_path / "model.safetensors"), run.model()
    for name, tensor in model.state_dict().items():
        assert exported[name].is_contiguous()
        assert torch.equal(exported[name], tensor), name
