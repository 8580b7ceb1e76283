"""A training function of one's own: the same batches, the same proximal term and the same bits as the recipe's loop."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedstrata
from fedstrata import Local, algorithms
from fedstrata.core.axes import Algorithm
from fedstrata.core.errors import DataError, ModelError, RecipeError
from fedstrata.core.fit import fit
from fedstrata.core.record import RoundFailed, RoundRecord
from fedstrata.engines.local import LocalEngine
from fedstrata.recipes.schema import Training
from fedstrata.tasks.task import Task
from tests.support import ROOT
from tests.support.math import FEDAVG, Tiny, double, image_task, linear_task, prepare, run, words

TRAINING = Training(rounds=2, epochs=3, batch_size=4, lr=0.1, stragglers=0.4)
TASK = image_task([5, 9, 6, 8])
SNIPPET = """
def train(model, data, local):             # local: lr, epochs or steps, batches, generator, device, pull, log
    optimizer = torch.optim.AdamW(model.parameters(), lr=local.lr)
    for x, y in local.batches():           # all epochs of the order, seeded; opens epochs by itself
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(); loss.backward(); local.pull(); optimizer.step()   # pull: the proximal term, on the gradients
        local.log(loss=float(loss))
"""  # noqa: E501
PROXIMAL = {
    "fedprox": algorithms.fedprox(mu=0.5),
    "adaptive_mu": algorithms.adaptive_mu(),
    "fedlap": algorithms.fedlap(q=1.0),
    "fedlap every step": algorithms.fedlap(q=1.0, refresh="step"),
    "fedlap through": algorithms.fedlap(q=1.0, through=True),
}

Train = Callable[[Any, Any, Local], object]


def plain(model: nn.Module, data: Any, local: Local) -> None:
    """The loop that a recipe with plain SGD describes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=local.lr, fused=True)
    for inputs, targets in local.batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        local.pull()
        optimizer.step()
        local.log(loss=loss)


def with_function(train: Train, algorithm: Algorithm = FEDAVG, training: Training = TRAINING, task: Task = TASK) -> Any:
    return run(replace(task, train=train), algorithm, training)


def the_same(ours: Any, theirs: Any) -> None:
    """Models, losses and stiffness of all rounds."""
    for (state, record), (other, its) in zip(*(zip(*both, strict=True) for both in (ours, theirs)), strict=True):
        assert torch.equal(state.model, other.model)
        np.testing.assert_array_equal(record.losses, its.losses)
        np.testing.assert_array_equal(record.layers["mu"], its.layers["mu"])


def rounds(found: Any) -> Any:
    states, records = found
    return states[1:], records


# --- the snippet ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")  # torch's, of the snippet's float(…)
@pytest.mark.parametrize("algorithm", ["fedavg", *PROXIMAL])
def test_the_snippet_is_adamw_of_a_recipe(algorithm: str) -> None:
    """As it stands. AdamW's own weight decay is 0.01, which a recipe says as `weight_decay`."""
    names: dict[str, Any] = {"torch": torch, "F": F}
    exec(SNIPPET, names)
    rule = PROXIMAL.get(algorithm, FEDAVG)
    found = with_function(names["train"], rule)
    by_recipe = TRAINING.model_copy(update={"optimizer": "adamw", "weight_decay": 0.01})
    expected = run(TASK, rule, by_recipe)
    if rule.objective.differentiable:  # a recipe's loop differentiates loss and penalty as one sum; Adam magnifies that
        torch.testing.assert_close(found[0][-1].model, expected[0][-1].model, rtol=1e-5, atol=1e-7)
    else:
        the_same(rounds(found), rounds(expected))
    assert all(set(words(record)) == {"ok"} for record in found[1])


@pytest.mark.parametrize("algorithm", PROXIMAL)
def test_a_loop_of_ones_own_has_the_bits_of_the_recipes(algorithm: str) -> None:
    """Also of stragglers, who are given fewer epochs. `penalty` in the loss is what a recipe does with `through`."""
    rule = PROXIMAL[algorithm]

    def added_to_the_loss(model: nn.Module, data: Any, local: Local) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=local.lr, fused=True)
        for inputs, targets in local.batches():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            (loss + local.penalty()).backward()
            optimizer.step()
            local.log(loss=loss)

    expected, pulled, added = (
        run(TASK, rule, TRAINING),
        with_function(plain, rule),
        with_function(added_to_the_loss, rule),
    )
    exact, other = (added, pulled) if rule.objective.differentiable else (pulled, added)
    the_same(rounds(exact), rounds(expected))
    torch.testing.assert_close(other[0][-1].model, expected[0][-1].model, rtol=1e-9, atol=1e-12)


def test_a_pull_by_hand() -> None:
    """Weight 2, sent as 0: one number, gradient 1 of the loss w. FedProx's μ = 3 adds 3 (w − 0) each time.

    w₀ = 0: gradient 1 + 0, w₁ = −0.1. Then 1 + 3 · (−0.1) = 0.7, w₂ = −0.17. Then 1 − 0.51 = 0.49, w₃ = −0.219.
    """

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def train(model: Any, data: Any, local: Local) -> None:
        for _ in range(3):
            model.w.grad = torch.ones(1, dtype=torch.float64)
            local.pull()
            with torch.no_grad():
                model.w -= local.lr * model.w.grad

    data = (torch.zeros(2, 1, dtype=torch.float64), double([0.0, 0.0]))
    states, (record,) = with_function(
        train, algorithms.fedprox(mu=3.0), Training(rounds=1, lr=0.1), Task(One, [data, data])
    )
    assert states[-1].model.item() == pytest.approx(-0.219, abs=1e-12)
    assert record.logged["steps"].tolist() == [3, 3]
    assert np.isnan(record.losses).all(), "none was logged"


@pytest.mark.parametrize("name", ["feddyn", "ditto", "fedper", "fedrep", "fedbabu", "fedbn"])
def test_what_clients_remember_and_what_is_private(name: str) -> None:
    """A force, a second training, private layers, and epochs in which only some weights move: by `local` as by us."""
    rule = algorithms.named(name)
    the_same(rounds(with_function(plain, rule)), rounds(run(TASK, rule, TRAINING)))


def test_a_force_is_in_the_penalty() -> None:
    """FedDyn's second round, in which h is not zero: pulled, or as ⟨b, w⟩ + ½ Σ c (w − a)² in the loss."""

    def added(model: nn.Module, data: Any, local: Local) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=local.lr, fused=True)
        for inputs, targets in local.batches():
            optimizer.zero_grad()
            (F.cross_entropy(model(inputs), targets) + local.penalty()).backward()
            optimizer.step()

    rule = algorithms.named("feddyn", alpha=0.3)
    found, expected = with_function(added, rule), run(TASK, rule, TRAINING)
    torch.testing.assert_close(found[0][-1].model, expected[0][-1].model, rtol=1e-9, atol=1e-12)


def test_algorithms_that_a_training_function_cannot_serve(tmp_path: Path) -> None:
    """SCAFFOLD and FedNova have to know how far steps reach, and MOON has a loss of its own in the middle of a step."""
    task, reach = replace(TASK, train=plain, evaluation={"test": TASK.clients[0]}), "how far local steps reach"
    for name, rule, needs in (
        ("scaffold", "algorithm.objective = 'Scaffold'", reach),
        ("fednova", "algorithm.weighting = 'FedNova'", reach),
        ("moon", "algorithm.objective = 'Moon'", "a loss of its own in every step"),
    ):
        with pytest.raises(RecipeError, match=rf"{rule}: needs {needs}, which a task's training function cannot give"):
            fedstrata.run(task, name, rounds=1, out=tmp_path / name)


# --- what it is told, and what it tells -------------------------------------------------------------------------------


def test_what_a_loop_is_told() -> None:
    seen: list[tuple[Any, ...]] = []

    def train(model: nn.Module, data: Any, local: Local) -> None:
        seen.append((local.round, local.lr, local.epochs, local.steps, local.batch_size, local.device, len(data[0])))
        assert model.training
        plain(model, data, local)

    schedule = {"name": "step", "every": 1, "by": 0.5}
    training = Training(rounds=2, epochs=2, batch_size=4, lr=0.4, lr_decay=0.5, schedule=schedule)
    with_function(train, training=training, task=image_task([8]))
    cpu = torch.device("cpu")
    orders = seen[2:]  # the rehearsal is one epoch of two batches, twice
    assert [told[2] for told in seen[:2]] == [1, 1]
    assert orders == [(1, 0.4, 2, None, 4, cpu, 8), (2, 0.1, 2, None, 4, cpu, 8)]
    seen.clear()
    with_function(train, training=Training(rounds=1, steps=7, batch_size=4, lr=0.4), task=image_task([8]))
    assert [told[2:4] for told in seen] == [(None, 2), (None, 2), (None, 7)]


def test_a_straggler_is_asked_for_less() -> None:
    asked: list[int | None] = []

    def train(model: nn.Module, data: Any, local: Local) -> None:
        asked.append(local.epochs)
        plain(model, data, local)

    _, (record,) = with_function(train, training=Training(rounds=1, epochs=9, batch_size=4, lr=0.1, stragglers=1))
    assert asked[2:] == record.work.tolist()
    assert 1 <= min(asked[2:]) < 9  # type: ignore[type-var]
    steps = [work * -(-size // 4) for work, size in zip(record.work, record.sizes, strict=True)]
    assert record.logged["steps"].tolist() == steps


def test_what_is_logged_is_a_mean_over_samples(tmp_path: Path) -> None:
    """Batches of 2 and 1 that log 1 and 4: (2 · 1 + 1 · 4)/3 = 2. What is logged at the end is what it is."""

    def train(model: nn.Module, data: Any, local: Local) -> None:
        for (inputs, _), value in zip(local.batches(), [1.0, torch.tensor([4.0], requires_grad=True)], strict=True):
            local.log(loss=value, size=len(inputs))
        local.log(norm=np.float32(7.5))

    task = replace(linear_task([3, 3]), train=train, evaluation={"test": linear_task([5]).clients[0]})
    training = Training(rounds=1, batch_size=2)
    _, (record,) = run(task, FEDAVG, training)
    assert record.train_loss == 2
    assert {name: told.tolist() for name, told in record.logged.items()} == {
        "size": [pytest.approx(5 / 3)] * 2,
        "norm": [7.5, 7.5],
        "steps": [2, 2],
    }
    finished = fedstrata.run({"training": {"rounds": 1, "batch_size": 2}}, task=task, out=tmp_path / "run")
    (line,) = finished.history()
    assert line["train_loss"] == 2
    assert line["logged"] == {"size": pytest.approx(5 / 3), "norm": 7.5, "steps": 2}


def test_a_generator_for_a_loader_of_ones_own() -> None:
    """It depends on seed, client and round, and on nothing that anybody drew before."""
    drawn: dict[tuple[int, int], list[int]] = {}

    def train(model: nn.Module, data: Any, local: Local) -> None:
        torch.randn(3)
        key = (local.round, len(data[0]))
        numbers = torch.randperm(1000, generator=local.generator)[:5].tolist()
        assert drawn.setdefault(key, numbers) == numbers, "the rehearsal and the order itself"

    for _ in range(2):
        with_function(train)
    assert len({tuple(numbers) for numbers in drawn.values()}) == 2 * 4


# --- loops that others own --------------------------------------------------------------------------------------------


DOCUMENT = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def documented() -> dict[str, Any]:
    """What the examples of docs/training.md define; the first one is run, the others are called by tests."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL):
        exec(block, names)
    assert names["record"].train_loss > 0
    return names


class LightningsTrainer:
    """As Lightning's: it owns the loop, accumulates gradients, and knows a module by its hooks."""

    def __init__(self, max_epochs: int, accumulate_grad_batches: int = 1, **options: Any) -> None:
        self.max_epochs, self.every = max_epochs, accumulate_grad_batches

    def fit(self, module: Any, loader: Any) -> None:
        optimizer = module.configure_optimizers()
        for _ in range(self.max_epochs):
            module.on_train_epoch_start()
            for at, batch in enumerate(loader):
                if at % self.every == 0:
                    optimizer.zero_grad()
                (module.training_step(batch, at) / self.every).backward()
                if at % self.every == self.every - 1:
                    module.on_before_optimizer_step(optimizer)
                    optimizer.step()


WHOLE = TRAINING.model_copy(update={"batch_size": 100, "lr": 0.01})
"""Full batches, so that the order of samples changes no more than last bits."""

ADAMW = WHOLE.model_copy(update={"optimizer": "adamw", "weight_decay": 0.01})


def about_the_same(found: Any, expected: Any) -> None:
    """Models, losses, stiffness, and a step for each epoch."""
    torch.testing.assert_close(found[0][-1].model, expected[0][-1].model, rtol=1e-5, atol=1e-7)
    for record, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(record.losses, other.losses, rtol=1e-5)
        np.testing.assert_allclose(record.layers["mu"], other.layers["mu"], rtol=1e-3, atol=1e-9)
        assert record.logged["steps"].tolist() == record.work.tolist()


@pytest.mark.parametrize("algorithm", ["fedavg", *PROXIMAL])
def test_a_loop_shaped_like_lightnings(algorithm: str, documented: dict[str, Any]) -> None:
    """The document's module and function, in a stand-in for Lightning's Trainer."""
    rule = PROXIMAL.get(algorithm, FEDAVG)
    documented["lightning"] = SimpleNamespace(Trainer=LightningsTrainer)
    task = replace(TASK, clients=[list(zip(*pair, strict=True)) for pair in TASK.clients])
    found = with_function(documented["train_with_lightning"], rule, WHOLE, task)
    about_the_same(found, run(TASK, rule, ADAMW))


def test_accumulated_gradients_are_pulled_once(documented: dict[str, Any]) -> None:
    """Two equal halves of a batch are the batch, and a step is a step."""
    task = image_task([8, 8], lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.Tanh(), nn.Linear(3, 3)))
    rule = algorithms.fedprox(mu=0.5)

    def train(model: nn.Module, data: Any, local: Local) -> None:
        halves = list(zip(data[0].split(4), data[1].split(4), strict=True))
        LightningsTrainer(local.epochs or 0, 2).fit(documented["Classifier"](model, local), halves)

    about_the_same(with_function(train, rule, WHOLE, task), run(task, rule, ADAMW))


class TransformersTrainer:
    """As Hugging Face's: it reads a data set of dicts, clips, calls back, and logs when an epoch is over."""

    def __init__(self, model: nn.Module, args: Any, train_dataset: Any, callbacks: list[Any]) -> None:
        self.model, self.args, self.data, (self.callback,) = model.to("cpu"), args, train_dataset, callbacks

    def train(self) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.args.learning_rate)
        for epoch in range(self.args.num_train_epochs):
            self.callback.on_epoch_begin(self.args, None, None, model=self.model)
            samples = [self.data[at] for at in range(len(self.data))]
            inputs, labels = (torch.stack([sample[key] for sample in samples]) for key in ("pixels", "label"))
            loss = F.cross_entropy(self.model(inputs), labels)
            self.model.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1e9)
            with torch.no_grad():
                self.callback.on_pre_optimizer_step(self.args, None, None, model=self.model)
            optimizer.step()
            self.callback.on_log(self.args, None, None, logs={"loss": loss.item(), "epoch": epoch + 1.0})
        self.callback.on_log(self.args, None, None, logs={"train_runtime": 1.0})


class Dicts:
    """A data set that no `default_collate` makes pairs of."""

    def __init__(self, pair: tuple[Tensor, Tensor]) -> None:
        self.pair = pair

    def __len__(self) -> int:
        return len(self.pair[0])

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        return {"pixels": self.pair[0][at], "label": self.pair[1][at]}


def arguments(folder: str, **given: Any) -> SimpleNamespace:
    return SimpleNamespace(**given)


@pytest.mark.parametrize("algorithm", ["fedavg", *PROXIMAL])
def test_a_trainer_shaped_like_hugging_faces(algorithm: str, documented: dict[str, Any]) -> None:
    """Of data that only the training function can read: `local.batches()` is never called."""
    rule = PROXIMAL.get(algorithm, FEDAVG)
    documented["transformers"] = SimpleNamespace(Trainer=TransformersTrainer, TrainingArguments=arguments)
    task = replace(TASK, clients=[Dicts(pair) for pair in TASK.clients])
    about_the_same(with_function(documented["train_with_transformers"], rule, WHOLE, task), run(TASK, rule, ADAMW))


# --- what is refused --------------------------------------------------------------------------------------------------


def failure(train: Train, algorithm: Algorithm = FEDAVG, **training: Any) -> str:
    with pytest.raises(RoundFailed) as failed:
        with_function(train, algorithm, TRAINING.model_copy(update=training))
    return str(failed.value)


@pytest.mark.parametrize("algorithm", PROXIMAL)
def test_a_loop_that_never_pulls_is_a_failure(algorithm: str) -> None:
    def train(model: nn.Module, data: Any, local: Local) -> None:
        for _ in local.batches():
            pass

    name = type(PROXIMAL[algorithm].objective).__name__
    text = failure(train, PROXIMAL[algorithm])
    assert f"the training loop never called local.pull(), and {name} has a proximal term" in text
    assert set(words(with_function(train)[1][0])) == {"ok"}, "without a proximal term nobody minds"


def test_an_epoch_that_nobody_was_told_of_is_a_failure() -> None:
    def train(model: nn.Module, data: Any, local: Local) -> None:
        F.cross_entropy(model(data[0]), data[1]).backward()
        local.pull()

    assert "FedLap has to know when an epoch begins: call local.epoch()" in failure(train, PROXIMAL["fedlap"])
    assert set(words(with_function(train, PROXIMAL["fedprox"])[1][0])) == {"ok"}


def test_what_a_loop_cannot_do() -> None:
    def twice(model: nn.Module, data: Any, local: Local) -> None:
        for _ in range(2):
            for _ in local.batches():
                pass

    def both(model: nn.Module, data: Any, local: Local) -> None:
        local.penalty()
        local.pull()

    def no_number(model: nn.Module, data: Any, local: Local) -> None:
        local.log(loss="low")

    assert "local.batches() has all epochs in it: loop over it once" in failure(twice)
    assert "local.pull() and local.penalty() are the same term" in failure(both, PROXIMAL["fedprox"])
    assert "local.log(loss='low'): is not a number" in failure(no_number)


def test_training_that_does_not_repeat_is_refused() -> None:
    """The rehearsal trains two batches two times, with whatever loop there is."""
    generator = torch.Generator().manual_seed(0)

    def train(model: nn.Module, data: Any, local: Local) -> None:
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype))

    with pytest.raises(ModelError, match="is different the second time"):
        with_function(train)


def test_the_model_is_clean_before_every_order() -> None:
    """A loop may wrap, freeze, hook and count: nothing of it is there in the next order."""

    def train(model: Any, data: Any, local: Local) -> None:
        assert not hasattr(model, "calls")
        assert not model.bn._forward_hooks
        assert all(p.requires_grad and p.grad is None for p in model.parameters())
        model.calls = 1
        model.bn.register_forward_hook(lambda *_: None)
        plain(model, data, local)
        model.fc.bias.requires_grad_(False)
        model.eval()

    the_same(rounds(with_function(train)), rounds(run(TASK, FEDAVG, TRAINING)))


def test_keys_that_a_training_function_would_not_use_are_refused(tmp_path: Path) -> None:
    task = replace(TASK, train=plain, evaluation={"test": TASK.clients[0]})
    for key, value in {"optimizer": "adam", "momentum": 0.9, "weight_decay": 0.1, "clip_norm": 1.0}.items():
        with pytest.raises(RecipeError, match=rf"training.{key} = .*: the task has a training function, which would"):
            fedstrata.run({"training": {key: value}}, task=task, out=tmp_path / key)
    with pytest.raises(DataError, match=r"train must be a function train\(model, data, local\)"):
        replace(TASK, train=3)  # type: ignore[arg-type]


# --- wherever it runs -------------------------------------------------------------------------------------------------


def dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Dropout(0.5), nn.Linear(6, 3))


@pytest.mark.parametrize("algorithm", ["fedavg", "fedlap"])
def test_one_worker_or_two_and_a_resumed_run(algorithm: str) -> None:
    """Bits, with a network that draws random numbers, for two rounds or for one and one more."""
    rule = PROXIMAL.get(algorithm, FEDAVG)
    setup, plan, state = prepare(replace(image_task([5, 9, 6, 8], dropout), train=plain), rule, TRAINING)

    def after(workers: int, *stops: int) -> tuple[Tensor, list[RoundRecord]]:
        now, records = state, []
        for stop in stops:
            with LocalEngine(setup, workers=workers) as engine:
                done = list(fit(now, rule, engine, replace(plan, rounds=stop)))
            now = done[-1][0]
            records += [record for _, record in done]
        return now.model, records

    model, records = after(1, 2)
    for other, its in (after(2, 2), after(2, 1, 2)):
        assert torch.equal(model, other)
        assert [record.losses.tolist() for record in records] == [record.losses.tolist() for record in its]
    expected, _ = run(setup.task if setup.task.train is None else replace(setup.task, train=None), rule, TRAINING)
    assert torch.equal(model, expected[-1].model)


MODULE = """
import torch
from torch import nn
from torch.nn import functional as F
import fedstrata


def train(model, data, local):
    optimizer = torch.optim.AdamW(model.parameters(), lr=local.lr)
    for x, y in local.batches():
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        local.pull()
        optimizer.step()
        local.log(loss=loss, samples=len(y))


def task():
    draw = torch.Generator().manual_seed(0)
    sets = [(torch.randn(n, 3, generator=draw), torch.randint(0, 2, (n,), generator=draw)) for n in (6, 9, 7, 30)]
    return fedstrata.Task(lambda: nn.Linear(3, 2), sets[:3], evaluation={"test": sets[3]}, train=train)
"""


def test_the_same_on_flower(user_module: Any, recipe: Any, tmp_path: Path, same_run: Callable[..., None]) -> None:
    """Of a task that a recipe names: over Flower's messages, here, and here after an interruption."""
    pytest.importorskip("flwr")
    from fedstrata.deployment.server import serve
    from tests.support.fake_grid import FakeGrid

    user_module("own_training", MODULE)
    settings = {
        "task": {"function": "own_training:task"},
        "algorithm": {"name": "fedlap"},
        "training": {"rounds": 3, "epochs": 2, "batch_size": 4, "lr": 0.05, "stragglers": 0.4},
    }
    path = recipe(settings)
    lines = list(
        serve(FakeGrid(path, 3), {"recipe": str(path), "out": str(tmp_path / "flower"), "data": "", "wait": 10})
    )
    whole = fedstrata.run(path, out=tmp_path / "whole")
    same_run(tmp_path / "flower", whole.path, recipe=False)
    assert lines[-1]["logged"].keys() == {"samples", "steps"}
    part = fedstrata.run(path, settings={"training.rounds": 1, "engine.workers": 2}, out=tmp_path / "part")
    fedstrata.resume(part.path, settings={"training.rounds": 3})
    same_run(part.path, whole.path, recipe=False)


def test_a_model_of_any_kind_may_be_wrapped() -> None:
    """Its parameters are what counts: a loop may put the model into another module, and train that."""

    def train(model: nn.Module, data: Any, local: Local) -> None:
        plain(nn.Sequential(nn.Identity(), model), data, local)

    the_same(rounds(with_function(train)), rounds(run(TASK, FEDAVG, TRAINING)))
    assert isinstance(TASK.model(), Tiny)
