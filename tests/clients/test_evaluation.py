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
from fedstrata.clients.client import IMAGES, Client
from fedstrata.clients.evaluation import PART, evaluate
from fedstrata.core.determinism import steady
from fedstrata.core.errors import FedstrataError, RecipeError
from fedstrata.core.messages import Reply
from fedstrata.core.status import Status
from fedstrata.recipes.experiment import build_experiment
from fedstrata.recipes.schema import load
from fedstrata.runs.engine import open_engine
from fedstrata.tasks.builtin import ClientShards
from fedstrata.tasks.metric import Metric
from fedstrata.tasks.partitions import Partition
from fedstrata.tasks.task import Samples, Task


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
    setup = build_experiment(load(table), task)
    with open_engine(setup) as engine:
        return evaluate(engine, task, setup.first_state().model, on, 1, 0, **options)[0], setup.build()


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


class Doubles(nn.Module):
    """A layer that writes to what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def forgetful(outputs: Tensor, targets: Tensor) -> Tensor:
    """An accuracy that leaves nothing of outputs and targets."""
    right = (outputs.argmax(1) == targets).double().mean()
    outputs.zero_()
    targets.zero_()
    return right


@pytest.mark.parametrize("doubles", [False, True])
def test_what_is_evaluated_stays_as_it_is(blobs: Any, doubles: bool) -> None:
    def build() -> nn.Module:
        return nn.Sequential(Doubles(), nn.Linear(2, 2)) if doubles else nn.Sequential(nn.Linear(2, 2))

    task = task_of(blobs, model=build, metric=Metric("accuracy", forgetful))
    before = [tensor.clone() for tensor in task.evaluation["test"]]
    first, second = (measure(task, ["test"])[0] for _ in range(2))
    assert first == second
    assert all(map(torch.equal, before, task.evaluation["test"]))


@pytest.mark.parametrize("offset", [0, 1, 16])
def test_inputs_give_the_same_wherever_they_lie(offset: int) -> None:
    """In their own memory or in the middle of another tensor's, gathered by rows or not."""
    generator = torch.Generator().manual_seed(5)
    inputs, targets = torch.randn(2700, 7, generator=generator), torch.randint(0, 3, (2700,), generator=generator)
    room = torch.empty(offset + inputs.numel())
    lying = room[offset:].view_as(inputs).copy_(inputs)
    sets: dict[str, Any] = {
        "test": (inputs, targets),
        "lying": (lying, targets),
        "rows": Samples(inputs, targets, np.arange(2700)),
        "transposed": (inputs.t().contiguous().t(), targets),
    }
    task = Task(lambda: nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)), [sets["test"]], evaluation=sets)
    figures, model = measure(task, list(sets))
    assert all(found == figures["test"] for found in figures.values())
    assert figures["test"]["loss"] == pytest.approx(by_hand(model, sets["test"])[0], rel=1e-6)


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
        for order, reply in self.engine.exchange(orders):
            said = self.said.get(order.client, reply.metrics)
            if said is not None:
                yield order, replace(reply, metrics=said)


def test_what_a_client_says_of_its_data_costs_nobody_else(blobs: Any) -> None:
    task = task_of(blobs, held_out=[blobs(3, 1), blobs(4, 2), blobs(5, 3), blobs(6, 4)])
    setup = build_experiment(load({"evaluation": {"on": ["clients"]}}), task)
    model = setup.first_state().model
    with open_engine(setup) as engine:
        true = evaluate(engine, task, model, ["clients"], 1, 0)[0]["clients"]
        said: dict[int, dict[str, float] | None] = {0: {"loss": 1.0, "accuracy": math.nan}, 2: None, 3: {"loss": 1.0}}
        figures, unmeasured, _ = evaluate(Spoiled(engine, said), task, model, ["clients"], 1, 0)
        assert unmeasured == [
            (0, Status("not finite", "accuracy")),
            (2, Status("no reply")),
            (3, Status("refused", "accuracy is missing")),
        ]
        found = figures["clients"]
        assert (found["clients"], found["failed"], found["samples"]) == (1, 3, 4)
        assert (found["loss"], found["accuracy"]) == pytest.approx(by_hand(setup.build(), blobs(4, 2)))
        assert true["failed"] == 0
        figures, unmeasured, _ = evaluate(Spoiled(engine, dict.fromkeys(range(4))), task, model, ["clients"], 1, 0)
        assert [client for client, _ in unmeasured] == [0, 1, 2, 3]
        assert figures == {}
        # A model may be so far off on someone's data that its loss is no number; its accuracy counts.
        figures, unmeasured, _ = evaluate(
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
    setup = build_experiment(load({"evaluation": {"on": ["clients"]}}), task)
    model = setup.first_state().model
    with open_engine(setup) as engine:
        found = [evaluate(engine, task, model, ["clients"], round, 0, clients=1) for round in range(1, 30)]
        assert {bool(figures) for figures, *_ in found} == {True, False}
        for figures, unmeasured, _ in found:
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
    layers = runs[0].about.layers
    assert runs[0].history()[0]["bytes"]["evaluation"] == 2 * sum(layer.bytes for layer in layers)
    everyone = fedstrata.run(tiny(settings | {"evaluation.clients": 99}), out=tmp_path / "all")
    assert everyone.history()[0]["metrics"]["clients"]["clients"] == 4
    assert everyone.summary()["weights_sha256"] == runs[0].summary()["weights_sha256"]


def test_the_sample_changes_from_round_to_round(blobs: Any) -> None:
    from fedstrata.clients.evaluation import _holders

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
    task = build_experiment(run.recipe).task
    used = set(np.concatenate([task.clients[k].rows for k in range(4)]).tolist())
    assert used.isdisjoint(task.evaluation["validation"].rows.tolist())
    assert used == set(task.evaluation["train"].rows.tolist())


def test_held_out_and_training_parts_are_disjoint_and_always_the_same(tiny: Any) -> None:
    settings = {"evaluation.on": ["clients"], "evaluation.held_out": 0.25, "task.partition.samples": 10}
    task, again = (build_experiment(load(tiny(settings))).task for _ in range(2))
    other = build_experiment(load(tiny(settings | {"seed": 1}))).task
    whole = build_experiment(load(tiny(settings | {"evaluation.on": ["test"]}))).task
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
    with pytest.raises(RecipeError, match="'train' is none of the task's sets: test, validation, clients"):
        build_experiment(load({"evaluation": {"on": ["train"]}}), task_of(blobs))


# --- how many samples a model is shown at a time ---------------------------------------------------------------------

SHOWN: list[int] = []
"""Outside of the model, which forgets between orders."""


class Shown(nn.Module):
    """A small network that notes how many samples it is shown, and answers in one of three forms."""

    def __init__(self, body: nn.Module, form: str = "each") -> None:
        super().__init__()
        self.body, self.form = body, form

    def forward(self, inputs: Any) -> Any:
        inputs = inputs["images"] if isinstance(inputs, dict) else inputs
        if not self.training:
            SHOWN.append(len(inputs))
        outputs = self.body(inputs).flatten(2).mean(2)
        return {"each": outputs, "classes first": outputs.t(), "named": {"logits": outputs}}[self.form]


def logits_of(outputs: Any, form: str) -> Tensor:
    return outputs["logits"] if form == "named" else outputs.t() if form == "classes first" else outputs


def images(count: int, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, *shape, generator=generator), torch.randint(0, 2, (count,), generator=generator)


def shown_to(task: Task, **evaluation: Any) -> tuple[list[int], list[dict[str, float]], Shown]:
    """How many samples the model was shown, call by call, with all orders of an evaluation, and what it came to."""
    setup = build_experiment(load({"evaluation": evaluation}), task)
    client, seen = Client(setup.setup), []
    SHOWN.clear()

    class Here:
        def exchange(self, orders: Any) -> Any:
            for order in orders:
                reply = client.answer(order)
                assert isinstance(reply, Reply)
                seen.append(dict(reply.metrics))
                yield order, reply

    found = evaluate(Here(), task, setup.first_state().model, ["test"], 1, 0)[0]["test"]  # type: ignore[arg-type]
    model = setup.build()
    assert isinstance(model, Shown)
    return list(SHOWN), [found, *seen], model


@pytest.mark.parametrize("form", ["each", "classes first", "named"])
def test_convolutions_are_shown_a_few_at_a_time_if_they_speak_of_each(form: str) -> None:
    count = 2 * IMAGES + 37
    data = images(count, 1, 6, 6)
    task = Task(
        model=lambda: Shown(nn.Conv2d(1, 2, 3), form),
        clients=[data],
        evaluation={"test": data},
        loss=lambda outputs, targets: nn.functional.cross_entropy(logits_of(outputs, form), targets),
        metric=Metric("accuracy", lambda o, t: float((logits_of(o, form).argmax(1) == t).double().mean())),
    )
    shown, (found, *_), model = shown_to(task)
    assert shown[:3] == [IMAGES, IMAGES, 37]
    assert shown[3:] == ([] if form == "each" else [count])
    outputs = logits_of(model(data[0]), form).detach()
    assert found["loss"] == pytest.approx(float(nn.functional.cross_entropy(outputs, data[1])), rel=1e-6)
    assert found["accuracy"] == pytest.approx(float((outputs.argmax(1) == data[1]).double().mean()), abs=1e-12)


CONVOLUTIONS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "Conv1d": (lambda: nn.Conv1d(3, 2, 2), (3, 5)),
    "Conv2d": (lambda: nn.Conv2d(1, 2, 3), (1, 6, 6)),
    "Conv3d": (lambda: nn.Conv3d(1, 2, 2), (1, 3, 3, 3)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(1, 2, 2), (1, 3, 3)),
    "inside": (lambda: nn.Sequential(nn.Sequential(nn.Conv1d(3, 2, 2)), nn.ReLU()), (3, 5)),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_by_default_any_convolution_is_shown_a_hundred(kind: str) -> None:
    body, shape = CONVOLUTIONS[kind]
    data = images(250, *shape)
    assert shown_to(Task(lambda: Shown(body()), [data], {"test": data}))[0] == [100, 100, 50]


@pytest.mark.parametrize("shape", [(4,), (1, 2, 2)], ids=["vectors", "images"])
def test_by_default_other_models_are_shown_a_thousand(shape: tuple[int, ...]) -> None:
    """An order has up to 2000 samples: 2500 are two orders of 1250."""
    data = images(2500, *shape)
    body = lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.Unflatten(1, (2, 1)))  # noqa: E731
    shown, *_ = shown_to(Task(lambda: Shown(body()), [data], {"test": data}))
    assert shown == [1000, 250, 1000, 250]


def test_by_default_convolutions_on_nests_are_shown_a_thousand() -> None:
    inputs, targets = images(1200, 1, 6, 6)
    data = ({"images": inputs}, targets)
    assert shown_to(Task(lambda: Shown(nn.Conv2d(1, 2, 3)), [data], {"test": data}))[0] == [1000, 200]


def test_inputs_whose_first_dimension_is_not_the_samples_are_not_cut() -> None:
    """120 steps of 5 samples: a convolution over time must see all steps."""
    steps, targets = images(120, 5, 3)[0], torch.zeros(5, dtype=torch.int64)

    class TimeFirst(Shown):
        def forward(self, inputs: Tensor) -> Tensor:
            SHOWN.append(len(inputs))
            return self.body(inputs.permute(1, 2, 0)).permute(2, 0, 1)

    class Batches:
        def __len__(self) -> int:
            return 5

        def batch(self, rows: np.ndarray) -> Any:
            return steps[:, rows], targets[rows]

    task = Task(
        lambda: TimeFirst(nn.Conv1d(3, 2, 3, padding=1)),
        [Batches()],
        {"test": Batches()},
        loss=lambda outputs, targets: outputs.square().mean(),
        metric=Metric("mean", lambda outputs, targets: outputs.mean()),
    )
    shown, (found, *_), model = shown_to(task)
    assert shown == [120]
    assert found["mean"] == pytest.approx(model(steps).mean().item(), rel=1e-5)


@pytest.mark.parametrize("kind", ["convolution", "linear"])
@pytest.mark.parametrize(
    ("size", "count"),
    [(1, 250), (64, 250), (64, 2 * PART + 501), (700, 2 * PART + 501), (1000, 1000), (5000, 2 * PART + 501)],
)
def test_a_given_batch_size_is_obeyed(kind: str, size: int, count: int) -> None:
    """The data set is cut into batches of that size, whoever is given which part; the loss, here the largest output of
    a batch, is of whole batches, and counts by their sizes."""
    data = images(count, 1, 2, 2)
    bodies = {
        "convolution": lambda: nn.Conv2d(1, 2, 2),
        "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.Unflatten(1, (2, 1))),
    }
    task = Task(
        lambda: Shown(bodies[kind]()),
        [data],
        {"test": data},
        loss=lambda outputs, targets: outputs.max(),
        metric=Metric("lowest", lambda outputs, targets: outputs.min(), "min"),
    )
    shown, (found, *_), model = shown_to(task, batch_size=size)
    assert shown == [size] * (count // size) + [count % size] * (count % size > 0)
    with torch.no_grad():
        pieces = [model(piece).double() for piece in data[0].split(size)]
    for name, worst in (("loss", Tensor.max), ("lowest", Tensor.min)):
        by_hand = sum(float(worst(piece)) * len(piece) for piece in pieces) / count
        assert found[name] == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.parametrize("size", [1, 7, 2500, 99_999])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_given_batch_size_gives_the_same_on_any_number_of_workers(blobs: Any, size: int, workers: int) -> None:
    task = task_of(blobs, loss=lambda outputs, targets: outputs.max())
    found, model = measure(task, ["test"], workers, size)
    pieces = [(len(part), model(part).max().item()) for part in task.evaluation["test"][0].split(size)]
    by_hand = sum(count * value for count, value in pieces) / sum(count for count, _ in pieces)
    assert found["test"]["loss"] == pytest.approx(by_hand, rel=1e-6)
    assert found["test"]["samples"] == 2 * PART + 501


def test_the_default_for_convolutions_is_a_loss_of_a_thousand_in_pieces_of_a_hundred() -> None:
    """To the last bit: outputs of 100 samples each, put together; loss and metric of 1000, weighed by their number."""
    data = images(1750, 1, 6, 6)
    task = Task(lambda: Shown(nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3))), [data], {"test": data})
    _, (found, *_), model = shown_to(task)
    loss = 0.0
    with torch.no_grad(), steady():
        for inputs, targets in zip(*(part.split(1000) for part in data), strict=True):
            outputs = torch.cat([model(piece) for piece in inputs.split(100)])
            loss += float(nn.functional.cross_entropy(outputs, targets)) * len(targets)
    assert found["loss"] == loss / 1750


def test_a_batch_size_is_stored_only_where_it_is_given() -> None:
    assert "batch_size" not in load({}).to_table()["evaluation"]
    assert load({"evaluation": {"batch_size": 1000}}).to_table()["evaluation"]["batch_size"] == 1000
    for wrong in (0, -1, 1.5, "many"):
        with pytest.raises(RecipeError, match=r"^evaluation\.batch_size = "):
            load({"evaluation": {"batch_size": wrong}})
