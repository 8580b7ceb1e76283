"""Measuring: the server's sets, the clients' own data, metrics that need all samples, and nothing that depends on who
computes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedstrata
from fedstrata import rng
from fedstrata.client import IMAGES, Client
from fedstrata.errors import FedstrataError, RecipeError
from fedstrata.evaluation import PART, evaluate
from fedstrata.experiment import load
from fedstrata.messages import Order
from fedstrata.prepared import prepare
from fedstrata.tasks.builtin import ClientShards
from fedstrata.tasks.partitions import Partition
from fedstrata.tasks.task import Metric, Samples, Task


def auc(outputs: Tensor, targets: Tensor) -> float:
    """The chance that a positive sample scores above a negative one."""
    scores = outputs[:, 1] - outputs[:, 0]
    positive, negative = scores[targets == 1], scores[targets == 0]
    above = (positive[:, None] > negative[None, :]).double()
    return float((above + 0.5 * (positive[:, None] == negative[None, :]).double()).mean())


def task_of(blobs: Any, **changes: Any) -> Task:
    fields: dict[str, Any] = {
        "model": lambda: nn.Linear(2, 2),
        "clients": [blobs(8, k) for k in range(4)],
        "held_out": [blobs(size, 20 + size) for size in (3, 10, 0, 5)],
        "evaluation": {"test": blobs(2 * PART + 501, 9), "validation": blobs(7, 8)},
    }
    return Task(**(fields | changes))


def measure(task: Task, on: list[str], workers: int = 1, batch: int = 1000, **options: Any) -> Any:
    table = {"engine": {"workers": workers}, "evaluation": {"on": ["test"], "batch_size": batch}}
    setup = prepare(load(table), task)
    with setup.engine() as engine:
        return evaluate(engine, task, setup.first_state().model, on, 1, 0, **options)[0], setup.model


def by_hand(model: nn.Module, data: tuple[Tensor, Tensor]) -> tuple[float, float]:
    with torch.no_grad():
        outputs = model(data[0]).double()
    loss = nn.functional.cross_entropy(outputs, data[1])
    return float(loss), float((outputs.argmax(1) == data[1]).double().mean())


def test_the_servers_sets(blobs: Any) -> None:
    task = task_of(blobs)
    figures, model = measure(task, ["validation", "test"])
    for name in ("validation", "test"):
        loss, accuracy = by_hand(model, task.evaluation[name])
        assert figures[name]["loss"] == pytest.approx(loss, rel=1e-6)
        assert figures[name]["accuracy"] == pytest.approx(accuracy, abs=1e-12)
        assert figures[name]["samples"] == len(task.evaluation[name][1])


def test_clients_own_data_counts_by_its_size(blobs: Any) -> None:
    task = task_of(blobs)
    figures, model = measure(task, ["clients"])
    sizes = np.array([3, 10, 5])
    results = [by_hand(model, task.held_out[k]) for k in (0, 1, 3)]
    losses, accuracies = (np.array([r[i] for r in results]) for i in (0, 1))
    found = figures["clients"]
    assert found["loss"] == pytest.approx((losses * sizes).sum() / 18, rel=1e-6)
    assert found["accuracy"] == pytest.approx((accuracies * sizes).sum() / 18)
    assert found["samples"] == 18
    assert found["clients"] == 3  # the one without data is not asked
    assert found["std"] == pytest.approx(accuracies.std())
    assert found["min"] == pytest.approx(accuracies.min())
    assert found["max"] == pytest.approx(accuracies.max())
    assert found["median"] == pytest.approx(np.median(accuracies))
    assert found["failed"] == 0


def test_a_client_that_cannot_be_measured_is_counted(blobs: Any) -> None:
    held_out = [blobs(3, 1), (torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)), blobs(4, 2), blobs(5, 3)]
    figures, _ = measure(task_of(blobs, held_out=held_out), ["clients"])
    assert figures["clients"]["failed"] == 1
    assert figures["clients"]["clients"] == 3
    assert figures["clients"]["samples"] == 12


class Spoiled:
    """An engine whose clients say what we like, or nothing."""

    def __init__(self, engine: Any, said: dict[int, dict[str, float] | None]) -> None:
        self.engine, self.said, self.sizes = engine, said, engine.sizes

    def exchange(self, orders: Any) -> Any:
        for reply in self.engine.exchange(orders):
            said = self.said.get(reply.client, reply.metrics)
            if said is not None:
                yield replace(reply, metrics=said)


def test_what_a_client_says_of_its_data_costs_nobody_else(blobs: Any) -> None:
    task = task_of(blobs, held_out=[blobs(3, 1), blobs(4, 2), blobs(5, 3), blobs(6, 4)])
    setup = prepare(load({"evaluation": {"on": ["clients"]}}), task)
    model = setup.first_state().model
    with setup.engine() as engine:
        true = evaluate(engine, task, model, ["clients"], 1, 0)[0]["clients"]
        said: dict[int, dict[str, float] | None] = {0: {"loss": 1.0, "accuracy": math.nan}, 2: None, 3: {"loss": 1.0}}
        figures, unmeasured = evaluate(Spoiled(engine, said), task, model, ["clients"], 1, 0)
        assert unmeasured == [
            (0, "refused: accuracy is not finite"),
            (2, "no reply"),
            (3, "refused: accuracy is missing"),
        ]
        found = figures["clients"]
        assert (found["clients"], found["failed"], found["samples"]) == (1, 3, 4)
        assert (found["loss"], found["accuracy"]) == pytest.approx(by_hand(setup.model, blobs(4, 2)))
        assert true["failed"] == 0
        figures, unmeasured = evaluate(Spoiled(engine, dict.fromkeys(range(4))), task, model, ["clients"], 1, 0)
        assert [client for client, _ in unmeasured] == [0, 1, 2, 3]
        assert figures == {}
        # A model may be so far off on someone's data that its loss is no number; its accuracy counts.
        figures, unmeasured = evaluate(
            Spoiled(engine, {0: {"loss": math.inf, "accuracy": 0.0}}), task, model, ["clients"], 1, 0
        )
        assert unmeasured == []
        assert figures["clients"]["loss"] == math.inf
        assert figures["clients"]["min"] == 0.0


@pytest.mark.parametrize("whole", [False, True])
def test_a_mistake_that_every_evaluation_would_repeat_ends_the_run(blobs: Any, whole: bool) -> None:
    def broken(outputs: Tensor, targets: Tensor) -> float:
        raise ZeroDivisionError("of nothing")

    task = task_of(blobs, metric=Metric("f1", broken, whole=whole), held_out=[blobs(3, k) for k in range(4)])
    for on in ("clients", "test"):
        with pytest.raises(FedstrataError, match=f"evaluation on {on} in round 1: failed: ZeroDivisionError"):
            measure(task, [on])
    empty = task_of(blobs, evaluation={"test": blobs(0, 1)}, metric=Metric("f1", lambda o, t: 0.0, whole=whole))
    with pytest.raises(FedstrataError, match="nobody has any sample"):
        measure(empty, ["test"])


def test_a_sample_of_clients_that_all_fail_ends_nothing(blobs: Any) -> None:
    """Of four, one has data that cannot be read: whenever it is drawn alone, the round has no figures of clients."""

    class Unreadable:
        def __len__(self) -> int:
            return 3

        def batch(self, indices: Any) -> Any:
            raise OSError("the disk is gone")

    task = task_of(blobs, held_out=[Unreadable(), *(blobs(3, k) for k in range(1, 4))])
    setup = prepare(load({"evaluation": {"on": ["clients"]}}), task)
    model = setup.first_state().model
    with setup.engine() as engine:
        found = [evaluate(engine, task, model, ["clients"], round, 0, clients=1) for round in range(1, 30)]
        assert {bool(figures) for figures, _ in found} == {True, False}
        for figures, unmeasured in found:
            assert [client for client, _ in unmeasured] == ([] if figures else [0])


@pytest.mark.parametrize("batch", [7, 1000, 10_000])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_parts_do_not_depend_on_workers(blobs: Any, workers: int, batch: int) -> None:
    task = task_of(blobs)
    on = ["test", "clients", "validation"]
    assert measure(task, on, workers, batch)[0] == measure(task, on, 1, batch)[0]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_whole_metric_sees_all_samples_at_once(blobs: Any, workers: int) -> None:
    task = task_of(blobs, metric=Metric("auc", auc, whole=True))
    figures, model = measure(task, ["test", "clients"], workers, batch=100)
    with torch.no_grad():
        whole = auc(model(task.evaluation["test"][0]), task.evaluation["test"][1])
    assert figures["test"]["auc"] == pytest.approx(whole, abs=1e-12)
    pieces = [auc(model(x).detach(), y) for x, y in zip(*(t.split(100) for t in task.evaluation["test"]), strict=True)]
    assert np.mean(pieces) != pytest.approx(whole, abs=1e-6), "a mean over batches would give the same: a bad example"
    assert figures["test"]["loss"] == pytest.approx(by_hand(model, task.evaluation["test"])[0], rel=1e-6)


def test_a_sample_of_clients(tiny: Any, tmp_path: Path) -> None:
    settings = {"evaluation.on": ["clients"], "evaluation.clients": 2, "training.rounds": 6}
    runs = [
        fedstrata.run(tiny(settings | {"engine.workers": w, "seed": seed}), out=tmp_path / f"{w}-{seed}")
        for w, seed in ((1, 0), (2, 0), (1, 1))
    ]
    lines = [[line["metrics"]["clients"] for line in run.history()] for run in runs]
    assert all(line["clients"] == 2 for line in lines[0])
    assert lines[0] == lines[1]
    assert lines[0] != lines[2]
    layers = runs[0].directory.info["layers"]
    assert runs[0].history()[0]["bytes"]["evaluation"] == 2 * sum(layer["bytes"] for layer in layers)
    everyone = fedstrata.run(tiny(settings | {"evaluation.clients": 99}), out=tmp_path / "all")
    assert everyone.history()[0]["metrics"]["clients"]["clients"] == 4
    assert everyone.summary()["weights_sha256"] == runs[0].summary()["weights_sha256"]


def test_the_sample_changes_from_round_to_round(blobs: Any) -> None:
    from fedstrata.evaluation import _holders

    task = task_of(blobs)
    drawn = {tuple(_holders(task, 2, 0, round)) for round in range(20)}
    assert drawn == {(0, 1), (0, 3), (1, 3)}
    assert _holders(task, None, 0, 1).tolist() == [0, 1, 3]


def test_validation_and_training_sets_of_a_recipe(tiny: Any, tmp_path: Path) -> None:
    settings = {"task.validation": 100, "evaluation.on": ["validation", "train", "test"], "training.rounds": 1}
    run = fedstrata.run(tiny(settings), out=tmp_path / "run")
    metrics = run.history()[0]["metrics"]
    assert {name: metrics[name]["samples"] for name in metrics} == {"validation": 100, "train": 48, "test": 2000}
    assert run.curve() == [(1, metrics["validation"]["accuracy"])]  # the first one decides
    task = prepare(run.experiment).task
    used = set(np.concatenate([task.clients[k].rows for k in range(4)]).tolist())
    assert used.isdisjoint(task.evaluation["validation"].rows.tolist())
    assert used == set(task.evaluation["train"].rows.tolist())


def test_held_out_and_training_parts_are_disjoint_and_always_the_same(tiny: Any) -> None:
    settings = {"evaluation.on": ["clients"], "evaluation.held_out": 0.25, "task.partition.samples": 10}
    task, again = (prepare(load(tiny(settings))).task for _ in range(2))
    other = prepare(load(tiny(settings | {"seed": 1}))).task
    whole = prepare(load(tiny(settings | {"evaluation.on": ["test"]}))).task
    for k in range(4):
        train, held_out = task.clients[k].rows, task.held_out[k].rows
        assert len(held_out) == 2  # 2.5, rounded to even
        assert set(train).isdisjoint(held_out)
        assert sorted([*train, *held_out]) == sorted(whole.clients[k].rows)
        assert np.array_equal(train, again.clients[k].rows)
        assert np.array_equal(held_out, again.held_out[k].rows)
        assert not np.array_equal(held_out, other.held_out[k].rows)
    assert whole.held_out is None
    assert task.sizes().tolist() == [8] * 4
    assert task.held_out_sizes().tolist() == [2] * 4


@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 100])
@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.99])
def test_either_side_has_a_sample_where_there_are_two(size: int, share: float) -> None:
    whole = Samples(torch.arange(size)[:, None].float(), torch.zeros(size, dtype=torch.int64))
    partition = Partition.from_lists([np.arange(size)])
    train, held_out = (ClientShards(whole, partition, 0, share, part) for part in ("train", "held_out"))
    assert len(train[0]) == train.sizes[0]
    assert len(held_out[0]) == held_out.sizes[0]
    assert len(train[0]) + len(held_out[0]) == size
    assert len(train[0]) >= min(size, 1)
    assert len(held_out[0]) >= (1 if size >= 2 else 0)


def test_sets_a_task_does_not_have(blobs: Any) -> None:
    with pytest.raises(RecipeError, match=r"evaluation.on = \['clients'\]: task 'custom' has no held-out data"):
        prepare(load({"evaluation": {"on": ["clients"]}}), task_of(blobs, held_out=None))
    with pytest.raises(RecipeError, match="'train' is none of the task's sets: test, validation, clients"):
        prepare(load({"evaluation": {"on": ["train"]}}), task_of(blobs))


class Images(nn.Module):
    """A small convolutional network that notes how many images it is shown, and answers in one of three forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.convolution, self.form, self.shown = nn.Conv2d(1, 2, 3), form, []

    def forward(self, images: Tensor) -> Any:
        self.shown.append(len(images))
        outputs = self.convolution(images).mean((2, 3))
        return {"each": outputs, "classes first": outputs.t(), "named": {"logits": outputs}}[self.form]


@pytest.mark.parametrize("form", ["each", "classes first", "named"])
def test_images_are_shown_a_few_at_a_time_if_the_model_speaks_of_each(form: str) -> None:
    generator = torch.Generator().manual_seed(1)
    count = 2 * IMAGES + 37
    data = torch.randn(count, 1, 6, 6, generator=generator), torch.randint(0, 2, (count,), generator=generator)

    def logits(outputs: Any) -> Tensor:
        return {"each": lambda: outputs, "classes first": lambda: outputs.t(), "named": lambda: outputs["logits"]}[
            form
        ]()

    task = Task(
        model=lambda: Images(form),
        clients=[data],
        evaluation={"test": data},
        loss=lambda outputs, targets: nn.functional.cross_entropy(logits(outputs), targets),
        metric=Metric(
            "accuracy", lambda outputs, targets: float((logits(outputs).argmax(1) == targets).float().mean())
        ),
    )
    setup = prepare(load({"evaluation": {"on": ["test"]}}), task)
    client = Client(setup.setup)
    order = Order("evaluate", 1, 0, rng.SERVER, model=setup.first_state().model, dataset="test")
    reply = client.answer(order)
    model = setup.setup.model
    assert model.shown[:3] == [IMAGES, IMAGES, 37]
    assert model.shown[3:] == ([] if form == "each" else [count])
    outputs = logits(model(data[0])).detach()
    assert reply.metrics["loss"] == pytest.approx(float(nn.functional.cross_entropy(outputs, data[1])), rel=1e-6)
    assert reply.metrics["accuracy"] == pytest.approx(float((outputs.argmax(1) == data[1]).double().mean()), abs=1e-6)
