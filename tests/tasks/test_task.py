"""A user's own task: tensors or data sets, any loss, any metric, from Python or named in a recipe."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import fedstrata
from fedstrata.core.errors import DataError, RecipeError
from fedstrata.tasks.metric import Metric
from fedstrata.tasks.task import Samples, Task, as_data
from tests import support
from tests.support.regression import regression, squared

QUICK = {"training": {"rounds": 2, "batch_size": 4, "lr": 0.1}, "engine": {"workers": 1}}


class Pairs(Dataset[Any]):
    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


def linear() -> nn.Module:
    return nn.Linear(2, 2)


def test_a_run_in_under_ten_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = """
import torch, fedstrata
data = [(torch.randn(20, 3), torch.randint(0, 2, (20,))) for _ in range(4)]
task = fedstrata.Task(model=lambda: torch.nn.Linear(3, 2), clients=data, evaluation={"test": data[0]})
run = fedstrata.run({"training": {"rounds": 2}}, task=task, algorithm="fedlayerwise", out="run")
print(run.summary()["accuracy"], run.layers(2)["angle"])
"""
    assert len(code.strip().splitlines()) < 10
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["run"].finished()


def test_tensors_arrays_and_data_sets_give_the_same_run(blobs: Any, tmp_path: Path) -> None:
    data = [blobs(9, k) for k in range(3)]
    kinds = {
        "tensors": data,
        "arrays": [(x.numpy(), y.numpy()) for x, y in data],
        "datasets": [Pairs(x, y) for x, y in data],
        "samples": [Samples(x, y) for x, y in data],
        "rows": [Samples(x.flip(0), y.flip(0), np.arange(len(x))[::-1].copy()) for x, y in data],
    }
    digests = {}
    for name, clients in kinds.items():
        task = Task(model=linear, clients=clients, evaluation={"test": data[0]})
        digests[name] = fedstrata.run(QUICK, task=task, out=tmp_path / name).summary()["weights_sha256"]
    assert len(set(digests.values())) == 1, digests


def test_regression_and_a_metric_that_goes_down(tmp_path: Path) -> None:
    table = QUICK | {"training": {"rounds": 12, "batch_size": 5, "lr": 0.05}, "evaluation": {"target": 0.5}}
    run = fedstrata.run(table, task=regression(), out=tmp_path / "run")
    values = [value for _, value in run.curve()]
    assert values[-1] < 0.5 < values[0]
    summary = run.summary()
    assert summary["mse"] == values[-1]
    assert summary["best"] == min(values)
    assert summary["rounds_to_target"] == next(r for r, v in run.curve() if v <= 0.5) > 1
    assert run.metric.direction == "min"
    loss = run.history()[-1]["metrics"]["test"]["loss"]
    assert loss == pytest.approx(values[-1])
    stopping = table | {"evaluation": {"target": 0.5, "stop_at_target": True}}
    stopped = fedstrata.run(stopping, task=regression(), out=tmp_path / "stopped")
    assert len(stopped.history()) == summary["rounds_to_target"]


def test_a_target_above_one_is_fine_for_what_is_no_accuracy(tmp_path: Path) -> None:
    run = fedstrata.run(QUICK | {"evaluation": {"target": 95.0}}, task=regression(), out=tmp_path / "run")
    assert run.summary()["rounds_to_target"] == 1


def test_a_recipe_names_a_function(user_module: Any, tmp_path: Path, cli: Any) -> None:
    user_module("regression_task", inspect.getsource(support.regression))
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        """
        [task]
        function = "regression_task:regression"
        options = { seed = 3, clients = 4 }
        [training]
        rounds = 3
        lr = 0.05
        [evaluation]
        target = 1.5
        [engine]
        workers = 1
        """
    )
    answer = cli("run", recipe, "--out", tmp_path / "run")
    assert answer.code == 0, answer.err
    assert "mse" in answer.out
    assert "rounds to 1.5" in answer.out
    run = fedstrata.Run(tmp_path / "run")
    assert run.about.clients == 4
    # the recipe is enough to go on
    assert cli("run", "--resume", tmp_path / "run", "--set", "training.rounds=4").code == 0
    assert cli("export", tmp_path / "run", tmp_path / "m.safetensors").code == 0
    assert cli("show", tmp_path / "run").code == 0
    answer = cli("partition", recipe)
    assert answer.code == 2
    assert "has no classes to count" in answer.err
    answer = cli("compare", recipe, "-a", "fedavg,fedprox", "--seeds", "0,1", "--out", tmp_path / "compare")
    assert answer.code == 0, answer.err
    assert "mse" in answer.out
    assert "rounds to 1.5" in answer.out
    answer = cli("run", recipe, "--out", tmp_path / "no", "--set", "task.options.sed=3")
    assert answer.code == 2, answer
    assert answer.err.count("\n") == 1
    assert "task." in answer.err
    assert "'sed'" in answer.err


DATASET_MODULE = """
import torch
from torch import nn

def load():
    x = torch.linspace(-1, 1, 60)[:, None].repeat(1, 2)
    y = (x[:, 0] > 0).long()
    return (x, y), (x[::3], y[::3])

def floats():
    x = torch.linspace(-1, 1, 60)[:, None]
    return (x, x), (x, x)

class Net(nn.Module):
    def __init__(self, input_shape, classes, hidden=3):
        super().__init__()
        self.body = nn.Linear(input_shape[0], hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.head(self.body(x).relu())

def fixed():
    return nn.Linear(2, 2)
"""


def test_a_recipe_names_a_data_set_and_a_model(user_module: Any, tmp_path: Path) -> None:
    user_module("my_data", DATASET_MODULE)
    table = QUICK | {
        "task": {
            "dataset": "my_data:load",
            "partition": {"name": "iid", "clients": 3},
            "model": {"name": "my_data:Net", "hidden": 5},
        }
    }
    run = fedstrata.run(table, out=tmp_path / "run")
    assert run.layer_names == ["body", "head"]
    assert run.about.layers[0].numbers == 2 * 5 + 5
    assert run.about.data.dataset == "my_data:load"
    assert np.array(run.about.data.table).sum() == 60
    assert run.history()[0]["metrics"]["test"]["samples"] == 20
    table["task"] = table["task"] | {"model": {"name": "my_data:fixed"}}
    assert fedstrata.run(table, out=tmp_path / "fixed").layer_names == ["(root)"]
    table["task"] = table["task"] | {"model": {"name": "my_data:Net", "hiden": 5}}
    with pytest.raises(RecipeError, match=r"task.model.hiden = 5: my_data:Net has no such option"):
        fedstrata.run(table, out=tmp_path / "no")


@pytest.mark.parametrize("workers", [1, 2])
def test_dropout_is_reproducible(blobs: Any, tmp_path: Path, workers: int) -> None:
    task = Task(
        model=lambda: nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 2)),
        clients=[blobs(12, k) for k in range(4)],
        evaluation={"test": blobs(30, 9)},
    )
    table = QUICK | {"engine": {"workers": workers}}
    digests = set()
    for number in range(2):
        torch.manual_seed(number)
        digests.add(fedstrata.run(table, task=task, out=tmp_path / str(number)).summary()["weights_sha256"])
    digests.add(fedstrata.run(QUICK, task=task, out=tmp_path / "one").summary()["weights_sha256"])
    assert len(digests) == 1
    other = fedstrata.run(table, task=task, seed=1, out=tmp_path / "seed").summary()["weights_sha256"]
    assert other not in digests


def test_clients_without_data_are_never_asked(blobs: Any, tmp_path: Path) -> None:
    empty = (torch.empty(0, 2), torch.empty(0, dtype=torch.int64))
    task = Task(model=linear, clients=[blobs(5, 0), empty, blobs(6, 1)], evaluation={"test": blobs(9, 9)})
    run = fedstrata.run(QUICK, task=task, out=tmp_path / "run")
    assert run.layers(1)["clients"].tolist() == [0, 2]
    assert run.history()[0]["clients"] == 2


def test_what_is_no_task(blobs: Any) -> None:
    with pytest.raises(DataError, match="clients is empty"):
        Task(model=linear, clients=[])
    with pytest.raises(DataError, match="1 held_out sets for 2 clients"):
        Task(model=linear, clients=[blobs(3), blobs(3)], held_out=[blobs(3)])
    with pytest.raises(DataError, match="train: inputs has 3 samples, but targets has 2"):
        as_data((torch.ones(3), torch.ones(2)), "train")
    with pytest.raises(DataError, match=r"train: expected .* got int"):
        as_data(3, "train")
    task = Task(model=linear, clients=[blobs(3)])
    with pytest.raises(DataError, match="no evaluation set 'test'"):
        task.server_data("test")
    with pytest.raises(DataError, match="no held_out data"):
        task.client_held_out(0)
    assert task.held_out_sizes().tolist() == []


def test_a_metric_knows_what_is_better() -> None:
    up, down = Metric("a", squared), Metric("b", squared, "min")
    assert up.reached(0.5, 0.5)
    assert not up.reached(0.4, 0.5)
    assert down.reached(0.5, 0.5)
    assert not down.reached(0.6, 0.5)


def test_a_model_without_parameters_or_with_mixed_types_is_refused(blobs: Any, tmp_path: Path) -> None:
    for model, message in (
        (nn.Flatten, "has no trainable parameter"),
        (lambda: nn.LazyLinear(2), "is not initialised"),
    ):
        task = Task(model=model, clients=[blobs(3)], evaluation={"test": blobs(3)})
        with pytest.raises(RecipeError, match=message):
            fedstrata.run(QUICK, task=task, out=tmp_path / "run")


def test_classes_are_counted_where_targets_are_class_numbers(tmp_path: Path) -> None:
    x = torch.zeros(5, 2)
    y = torch.tensor([0, 2, 2, 1, 0])
    shared = Samples(x, y, np.array([1, 2, 3]))
    counted = Task(linear, [(x, y), shared, (x[:0], y[:0])]).described()
    assert counted == {"class_names": ["0", "1", "2"], "table": [[2, 1, 2], [0, 1, 2], [0, 0, 0]]}
    for targets in (y.double(), y - 1, y * 1000, torch.zeros(5, 3, dtype=torch.int64)):
        assert Task(linear, [(x, targets)]).described() == {}
    assert Task(linear, [Pairs(x, y)]).described() == {}  # would have to be read from wherever it is
    noted = Task(linear, [(x, y)], name="digits", notes={"table": [[5]], "source": "mine"}).described()
    assert noted == {"table": [[5]], "class_names": ["0"], "source": "mine", "dataset": "digits"}
    run = fedstrata.run(QUICK, task=Task(lambda: nn.Linear(2, 3), [(x, y)], {"test": (x, y)}), out=tmp_path / "run")
    assert run.about.data.table == [[2, 1, 2]]


@pytest.mark.parametrize("notes", [{"source": "my own"}, {"table": [[2, 3]]}, {}], ids=str)
def test_a_task_may_note_what_it_likes(notes: dict[str, Any], tmp_path: Path, cli: Any) -> None:
    x, y = torch.zeros(5, 2), torch.tensor([0, 2, 2, 1, 0])
    task = Task(lambda: nn.Linear(2, 3), [(x, y)], {"test": (x, y)}, name="mine", notes=notes)
    run = fedstrata.run(QUICK, task=task, out=tmp_path / "run")
    shown = cli("show", run.path)
    assert shown.code == 0
    assert ("data: mine (my own)" in shown.out) == ("source" in notes)
    assert cli("report", run.path, "--out", tmp_path / "report.html").code == 0


@pytest.mark.parametrize(
    ("notes", "problem"),
    [
        ({"n": np.int64(3)}, "its notes cannot be kept as JSON"),
        ({"n": {1, 2}}, "its notes cannot be kept as JSON"),
        ({"n": math.nan}, "its notes cannot be kept as JSON"),
        ({"table": [5, 3]}, r"notes\.table = \[5, 3\]: must have a list of counts per client"),
    ],
    ids=str,
)
def test_notes_that_cannot_be_kept_are_refused_before_anything_is_made(
    notes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    x, y = torch.zeros(5, 2), torch.tensor([0, 2, 2, 1, 0])
    task = Task(lambda: nn.Linear(2, 3), [(x, y)], {"test": (x, y)}, name="mine", notes=notes)
    with pytest.raises(DataError, match=f"task 'mine': {problem}"):
        fedstrata.run(QUICK, task=task, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())
