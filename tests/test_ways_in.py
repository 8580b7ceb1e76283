"""The four ways in, each without the next: a server, rounds in a loop, a run with a directory, a comparison."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata
from fedstrata import Task, fedavg, fedlayerwise, fedldf, fedprox
from fedstrata.recipes.schema import Training
from fedstrata.recipes.settings import KEYS, Settings

UNKNOWN: Any = {"leraning_rate": 0.1}
MISSPELT: Any = {"round": 4}
QUICK: Any = {"rounds": 3, "lr": 0.3, "batch_size": 8, "workers": 1}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def data(seed: int, count: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 3, (count,), generator=generator)
    return torch.randn(count, 4, generator=generator) + targets[:, None], targets


@pytest.fixture
def task() -> Task:
    return Task(model=net, clients=[data(k) for k in range(4)], evaluation={"test": data(9, 60)}, name="blobs")


def test_a_server_takes_state_dicts_and_arrays() -> None:
    """The snippet of the documents; three clients whose updates agree count by their samples alone."""
    model = net()
    moved = {name: value + 1 for name, value in model.state_dict().items()}
    server = fedstrata.Server(model, fedlayerwise())
    new = server.aggregate([moved, moved, moved], sizes=[100, 250, 80])
    assert new.keys() == moved.keys()
    for name, value in new.items():
        torch.testing.assert_close(value, moved[name])
    assert server.last_record.layers["weight"][:, 0].tolist() == pytest.approx([100 / 430, 250 / 430, 80 / 430])


def test_a_simulation_is_the_run_without_its_directory(task: Task, tmp_path: Path) -> None:
    run = fedstrata.run(task, fedlayerwise(), out=tmp_path / "run", seed=3, **QUICK)
    pairs = list(fedstrata.simulate(task, fedlayerwise(), seed=3, **QUICK))
    assert [state.round for state, _ in pairs] == [record.round for _, record in pairs] == [1, 2, 3]
    for line, (_, record) in zip(run.history(), pairs, strict=True):
        assert line["metrics"] == {name: dict(values) for name, values in record.metrics.items()}
    for name, value in run.model(task=task).state_dict().items():
        assert torch.equal(value, pairs[-1][0].state_dict()[name])
    np.testing.assert_array_equal(run.layers(2)["angle"], pairs[1][1].layers["angle"])


def test_a_state_that_was_handed_out_stays(task: Task) -> None:
    states, copies = [], []
    for state, _ in fedstrata.simulate(task, **QUICK):
        states.append(state)
        copies.append(state.model.clone())
        net().load_state_dict(state.state_dict())
    for state, copy in zip(states, copies, strict=True):
        assert torch.equal(state.model, copy)
    assert not torch.equal(states[0].model, states[1].model)


def test_a_simulation_writes_nothing(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in fedstrata.simulate(task, fedprox(0.1), rounds=1, workers=2):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda task: fedstrata.simulate(task, lr=-1.0), "training.lr = -1.0"),
        (lambda task: fedstrata.simulate(task, "fedldf:n=9"), r"algorithm.selection.n = 9.*at most the clients"),
        (lambda task: fedstrata.simulate(task, **UNKNOWN), "leraning_rate is no setting"),
        (lambda task: fedstrata.simulate(task, **MISSPELT), r"round is no setting \(did you mean rounds\?\)"),
        (lambda task: fedstrata.simulate(task, evaluate_on="validation"), "'validation' is none of the task's sets"),
        (lambda task: fedstrata.simulate("quickstrt"), "quickstrt"),
        (lambda task: fedstrata.compare(task, []), "names nothing to run"),
        (lambda task: fedstrata.compare(task, [fedavg(), fedavg()]), "fedavg, got 'fedavg'|is there twice"),
        (lambda task: fedstrata.compare(task, [fedavg()], seeds=[1, 1]), "names the same one twice"),
    ],
)
def test_what_is_wrong_is_told_by_the_call(task: Task, wrong: Callable[[Task], object], message: str) -> None:
    with pytest.raises(fedstrata.UserError, match=message):
        wrong(task)


def test_a_task_without_a_test_set_is_evaluated_on_what_it_has() -> None:
    clients = [data(k) for k in range(3)]
    on_clients = Task(model=net, clients=clients, held_out=clients)
    *_, (_, record) = fedstrata.simulate(on_clients, rounds=1, workers=1)
    assert record.metrics["clients"]["clients"] == 3
    other = Task(model=net, clients=clients, evaluation={"winter": data(5)})
    *_, (_, record) = fedstrata.simulate(other, rounds=1, workers=1)
    assert list(record.metrics) == ["winter"]


def test_a_comparison_is_paired_and_goes_on(task: Task, tmp_path: Path) -> None:
    """The first run of a comparison is `run`'s; a second call runs nothing again, and more seeds are added."""
    algorithms = [fedavg(), fedprox(0.5), fedldf(n=2)]
    found = fedstrata.compare(task, algorithms, seeds=range(2), out=tmp_path / "found", **QUICK)
    assert found.algorithms == ("fedavg", "fedprox:mu=0.5", "fedldf:n=2")
    alone = fedstrata.run(task, fedprox(0.5), seed=1, out=tmp_path / "alone", **QUICK)
    assert alone.summary()["weights_sha256"] == found.runs["fedprox:mu=0.5", 1].summary()["weights_sha256"]
    values = {key: outcome.metric for key, outcome in found.outcomes().items()}
    expected = [values["fedldf:n=2", seed] - values["fedavg", seed] for seed in (0, 1)]
    assert found.differences() == {
        "fedprox:mu=0.5": [values["fedprox:mu=0.5", s] - values["fedavg", s] for s in (0, 1)],
        "fedldf:n=2": expected,
    }
    assert found.differences("upload")["fedldf:n=2"][0] < 0
    assert found.differences(baseline="fedldf:n=2")["fedavg"] == [-value for value in expected]
    with pytest.raises(fedstrata.BadValue, match="baseline is none of fedavg"):
        found.differences(baseline="fedadp")
    told: list[int] = []
    again = fedstrata.compare(
        task, algorithms, seeds=[1, 2], out=tmp_path / "found", on_round=lambda job, _: told.append(job.seed), **QUICK
    )
    assert set(told) == {2}
    assert again.runs["fedavg", 1].summary() == found.runs["fedavg", 1].summary()


def test_arms_have_names_of_ones_own(task: Task, tmp_path: Path) -> None:
    arms: Any = {"none": fedavg(), "strong": fedprox(5.0), "by name": "fedldf:n=2"}
    found = fedstrata.compare(task, arms, out=tmp_path / "found", **QUICK)
    assert found.algorithms == ("none", "strong", "by name")
    assert all(math.isfinite(outcome.metric) for outcome in found.outcomes().values())


def test_recipes_are_ways_in_too(tmp_path: Path) -> None:
    """By name; settings by their own names and by their places in a recipe."""
    settings = {"training.clients_per_round": 2}
    *_, (state, record) = fedstrata.simulate("quickstart", fedldf(n=1), rounds=1, workers=1, settings=settings)
    assert len(record.clients) == 2
    recipe = fedstrata.load("quickstart", algorithm="fedldf:n=1", settings={"training.rounds": 1, **settings})
    *_, (same, _) = fedstrata.simulate(recipe, workers=1)
    assert torch.equal(state.model, same.model)


def test_settings_are_a_recipes() -> None:
    """Every key of `[training]` has its own name, of the same type; no key is wrong."""
    hints = get_type_hints(Settings)
    assert set(hints) == set(KEYS)
    assert set(Training.model_fields) <= set(hints)
    for name, field in Training.model_fields.items():
        assert str(field.annotation) in (str(hints[name]), *OTHERWISE.get(name, ())), name
    for key in KEYS.values():
        table, name = key.split(".")
        inner = fedstrata.Recipe.model_fields[table].annotation
        assert name in inner.model_fields
    for function in (fedstrata.run, fedstrata.simulate, fedstrata.compare):
        assert "more" in inspect.signature(function).parameters


OTHERWISE = {
    "optimizer_options": (str(Training.model_fields["optimizer_options"].annotation),),  # a table
    "schedule": (str(Training.model_fields["schedule"].annotation),),
    "initial_weights": ("pathlib.Path | None",),  # which may be given as text
    "optimizer": ("typing.Literal['sgd', 'adam']",),
}
