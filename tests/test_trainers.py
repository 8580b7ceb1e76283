"""The trainer `stack` against the trainer `client`: one round from the same state agrees, for every combination."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers_math import FEDAVG, Tiny, image_task, prepare
from test_battery import COMBINATIONS, OBJECTIVES, SELECTIONS, SIZES, WEIGHTINGS
from torch import Tensor, nn
from torch.nn import functional as F

import fedstrata
from fedstrata.algorithm import Algorithm
from fedstrata.engines.local import LocalEngine, units_of_work
from fedstrata.layers import Layers
from fedstrata.messages import Order
from fedstrata.objectives import FedLap, FedProx, Plain
from fedstrata.rounds import RoundRecord, fit
from fedstrata.selections import Everything
from fedstrata.tasks.task import Samples, Task
from fedstrata.trainers.choice import choose
from fedstrata.trainers.mlp import as_perceptron
from fedstrata.trainers.motion import OnDisplacements, Rows, Springs
from fedstrata.trainers.stack import stack_size
from fedstrata.training import Training
from fedstrata.weightings import SampleSize

TRAINING = Training(
    rounds=1, clients_per_round=5, epochs=3, batch_size=4, lr=0.1, momentum=0.9, weight_decay=0.01, stragglers=0.4
)


def perceptron() -> nn.Module:
    """16 – 6 – 5 – 3, one layer without bias: the kernel's case."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 3)
    )


def convolution() -> nn.Module:
    """A model that goes through torch.func."""
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))


def one_round(
    task: Task, algorithm: Algorithm, trainer: str, size: int = 1, training: Training = TRAINING, **options: Any
) -> tuple[Tensor, RoundRecord]:
    workers = options.pop("workers", 1)
    setup, plan, state = prepare(task, algorithm, training, **options)
    with LocalEngine(replace(setup, trainer=trainer, stack_size=size), workers=workers) as engine:  # type: ignore[arg-type]
        ((after, record),) = fit(state, algorithm, engine, plan)
    return after.model, record


@pytest.mark.parametrize("model", [perceptron, convolution])
@pytest.mark.parametrize(("objective", "selection", "weighting"), COMBINATIONS, ids="+".join)
def test_every_combination(objective: str, selection: str, weighting: str, model: Any) -> None:
    algorithm = Algorithm(OBJECTIVES[objective][0], SELECTIONS[selection][0], WEIGHTINGS[weighting][0])
    task = image_task(SIZES, model)
    expected, one = one_round(task, algorithm, "client")
    for size in (1, 3):
        found, stacked = one_round(task, algorithm, "stack", size)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(stacked.losses, one.losses, rtol=1e-9)
        for name, values in one.layers.items():
            np.testing.assert_allclose(stacked.layers[name], values, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("model", [perceptron, convolution])
@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "adam", "momentum": 0.0, "lr": 0.01},
        {"momentum": 0.0},
        {"momentum": 0.0, "weight_decay": 0.0, "batch_size": 100},
        {"steps": 7},
        {"batch_size": 1},
        {"lr_decay": 0.5, "stragglers": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("objective", [Plain(), FedLap(q=1.0, refresh="step", units="output"), FedProx(0.5)])
def test_every_way_to_train(model: Any, changes: dict[str, Any], objective: Any) -> None:
    training = TRAINING.model_copy(update=changes)
    algorithm = Algorithm(objective, Everything(), SampleSize())
    task = image_task(SIZES, model)
    expected, _ = one_round(task, algorithm, "client", training=training)
    found, _ = one_round(task, algorithm, "stack", 4, training=training)
    # Adam divides by the root of a second moment that may be tiny, which magnifies rounding.
    tolerance = 1e-7 if training.optimizer == "adam" else 1e-9
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("model", [perceptron, convolution])
def test_single_precision(model: Any) -> None:
    task = image_task(SIZES, model)
    expected, _ = one_round(task, FEDAVG, "client", dtype=torch.float32)
    found, _ = one_round(task, FEDAVG, "stack", 3, dtype=torch.float32)
    assert ((found - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("model", [perceptron, convolution])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_any_number_of_workers_gives_the_same_bits(model: Any, size: int) -> None:
    algorithm = Algorithm(FedLap(), SELECTIONS["fedldf"][0], WEIGHTINGS["fedlayerwise"][0])
    task = image_task(SIZES, model)
    results = [one_round(task, algorithm, "stack", size, workers=workers, dtype=torch.float32) for workers in (1, 2, 3)]
    assert all(torch.equal(model, results[0][0]) for model, _ in results)


@pytest.mark.parametrize("nothing", [FedLap(q=0), FedProx(0), FedLap(q=1.0)])
def test_a_spring_that_never_pulls_is_plain_to_the_bit(nothing: Any) -> None:
    """q = 0, μ = 0, and FedLap in a single epoch, in which nothing has turned yet."""
    task, training = image_task(SIZES, perceptron), TRAINING.model_copy(update={"epochs": 1})
    plain, _ = one_round(task, FEDAVG, "stack", 3, training=training, dtype=torch.float32)
    found, _ = one_round(
        task, Algorithm(nothing, Everything(), SampleSize()), "stack", 3, training=training, dtype=torch.float32
    )
    assert torch.equal(found, plain)


def test_labels_to_be_ignored() -> None:
    """cross_entropy leaves out −100; the kernel does not know that, so such data goes another way."""
    task = image_task(SIZES, perceptron)
    clients = [(inputs, torch.where(torch.arange(len(labels)) == 1, -100, labels)) for inputs, labels in task.clients]
    task = replace(task, clients=clients)
    expected, record = one_round(task, FEDAVG, "client")
    found, _ = one_round(task, FEDAVG, "stack", 3)
    assert set(record.status) == {"ok"}
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_frozen_parameters_stay_where_they_are() -> None:
    def half_frozen() -> nn.Module:
        model = perceptron()
        model[1].weight.requires_grad_(False)
        return model

    task = image_task(SIZES, half_frozen)
    expected, _ = one_round(task, FEDAVG, "client")
    found, _ = one_round(task, FEDAVG, "stack", 3)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


class Broken(Samples):
    """Data that cannot be gathered."""

    def __len__(self) -> int:
        return 5

    @property
    def rows(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no such disk")

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no such disk")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_broken_client_costs_its_stack_nothing_but_itself(workers: int) -> None:
    task = image_task(SIZES, perceptron)
    clients = list(task.clients)
    clients[2] = type("Bad", (), {"__len__": lambda self: 5, "batch": Broken.batch})()
    training = TRAINING.model_copy(update={"clients_per_round": None})
    _, record = one_round(replace(task, clients=clients), FEDAVG, "stack", 6, training=training, workers=workers)
    assert [status.split(" (")[0] for status in record.status] == [
        *["ok"] * 2,
        "failed: RuntimeError: no such disk",
        *["ok"] * 3,
    ]


def test_a_client_that_diverges_does_not_touch_the_others_of_its_stack() -> None:
    task = image_task(SIZES, perceptron)
    clients = list(task.clients)
    inputs, targets = clients[2]
    clients[2] = (torch.full_like(inputs, torch.nan), targets)
    training = TRAINING.model_copy(update={"clients_per_round": None})
    sound = replace(task, clients=[client for at, client in enumerate(clients) if at != 2])
    _, record = one_round(replace(task, clients=clients), FEDAVG, "stack", 6, training=training)
    assert record.status[2] == "refused: update is not finite"
    assert [status for at, status in enumerate(record.status) if at != 2] == ["ok"] * len(sound.clients)


def test_units_of_work_are_alike_and_depend_on_the_orders_alone() -> None:
    setup, _, _ = prepare(image_task(SIZES, perceptron), FEDAVG, TRAINING)
    sizes = np.array([50, 10, 40, 20, 30, 60])
    orders = [Order("train", 1, 0, client) for client in range(6)]
    units = units_of_work(orders, sizes, replace(setup, trainer="stack", stack_size=3))
    # 4 stacks, 52.5 samples each: 60, 50, 40, 30, 20 and 10 in a row have their middles at 30, 85, 130, 165, 190, 205.
    assert [[order.client for order in unit] for unit in units] == [[5], [0], [2], [4, 3, 1]]
    alike = units_of_work(orders, np.full(6, 20), replace(setup, trainer="stack", stack_size=3))
    assert sorted(len(unit) for unit in alike) == [1, 1, 2, 2]
    assert max(len(unit) for unit in units_of_work(orders, sizes, replace(setup, trainer="stack", stack_size=2))) == 2
    alone = units_of_work(orders, sizes, setup)
    assert [unit[0].client for unit in alone] == [5, 0, 2, 4, 3, 1]
    assert [len(unit) for unit in units_of_work([Order("evaluate", 1, 0, 3)], sizes, setup)] == [1]


# --- choice ---------------------------------------------------------------------------------------------------------


def choice(model: nn.Module, asked: Any = "auto", size: int | None = None, **changes: Any) -> Any:
    task = Task(
        lambda: model,
        [(torch.zeros(1, 1, 4, 4), torch.zeros(1, dtype=torch.long))],
        loss=changes.pop("loss", F.cross_entropy),
    )
    options = {"objective": Plain(), "device": "cpu", **changes}
    return choose(asked, size, task=task, model=model, layers=Layers.of(model), **options)


def test_auto_stacks_plain_perceptrons_only() -> None:
    assert choice(perceptron()).trainer == "stack"
    assert choice(convolution()).trainer == "client"
    assert choice(perceptron(), loss=lambda outputs, targets: F.cross_entropy(outputs, targets)).trainer == "client"
    assert choice(perceptron(), "client").trainer == "client"
    assert choice(perceptron(), "stack", 7).stack_size == 7
    assert choice(convolution(), "stack").trainer == "stack"


@pytest.mark.parametrize(
    ("model", "changes", "why"),
    [
        (Tiny(), {}, r"bn \(BatchNorm2d\) has buffers"),
        (nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 3)), {}, "1 is a Dropout"),
        (perceptron(), {"objective": FedLap(through=True)}, "flows through"),
        (perceptron(), {"device": "cuda"}, "cuda"),
    ],
)
def test_what_cannot_be_stacked_falls_back_and_says_why(model: nn.Module, changes: dict[str, Any], why: str) -> None:
    found = choice(model, "stack", **changes)
    assert found.trainer == "client"
    assert re.search(why, found.why)


def test_the_stack_fits_into_the_cache() -> None:
    """LogReg on MNIST has 7,850 numbers, 2 · 31,400 bytes a client: five, the most; the MLP's 159,010 fit once."""
    small, large = nn.Sequential(nn.Linear(784, 10)), nn.Sequential(nn.Linear(784, 200), nn.Linear(200, 10))
    assert stack_size(Layers.of(small)) == 20
    assert stack_size(Layers.of(large)) == 1


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 3), nn.ReLU()),
        nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(4, 3)),
        nn.Sequential(nn.Flatten(0), nn.Linear(4, 3)),
        nn.Linear(4, 3),
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 3))),
    ],
)
def test_what_is_no_plain_perceptron(model: nn.Module) -> None:
    assert as_perceptron(model, Layers.of(model), F.cross_entropy) is None


class Residual(nn.Sequential):
    """A Sequential with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.flatten(1)[:, :3]


def test_a_sequential_with_its_own_mind_is_no_plain_perceptron() -> None:
    plain = perceptron()
    residual = Residual(*plain)
    assert as_perceptron(residual, Layers.of(residual), F.cross_entropy) is None
    plain[1].register_forward_hook(lambda module, inputs, output: output * 2)
    assert as_perceptron(plain, Layers.of(plain), F.cross_entropy) is None


def test_the_choice_is_recorded_and_kept_on_resume(tiny: Any, tmp_path: Any) -> None:
    run = fedstrata.run(tiny({"training.rounds": 2}), out=tmp_path / "run")
    assert run.directory.info["resolved"] == {
        "trainer": "stack",
        "stack_size": 20,
        "why": "a plain perceptron under cross-entropy",
        "threads": 1,
        "dtype": "float32",
    }
    other = fedstrata.run(tiny({"training.rounds": 2, "engine.trainer": "client"}), out=tmp_path / "client")
    assert other.directory.info["resolved"]["trainer"] == "client"


# --- motion ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("c", [1e-12, 0.01, 1.0, 30.0])
def test_two_positions_move_as_position_and_velocity_do(c: float, momentum: float) -> None:
    """300 steps with given gradients; the stiffest spring swings about the anchor, the weakest is next to none."""
    lr, start, steps = 0.05, torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), 300
    gradients = torch.randn(steps, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    layers = Layers.of(nn.Linear(3, 1, bias=False).double())
    training = Training(rounds=1, lr=lr, momentum=momentum)
    setup = replace(prepare(image_task(SIZES, perceptron), FEDAVG, TRAINING)[0], layers=layers, training=training)
    springs = Springs(FedProx(mu=c), [Order("train", 1, 0, 0)], layers, start)
    motion = OnDisplacements(setup, 1, springs)
    motion.refresh(0, [0])
    position, velocity = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for step, gradient in enumerate(gradients):
        _, into = motion.buffers(step)
        into.numbers.mul_(motion.keep).add_(gradient, alpha=motion.share)
        motion.step(step, 1)
        velocity = momentum * velocity + gradient + c * position
        position = position - lr * velocity
    torch.testing.assert_close(motion.update(0, steps), position, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("active", [1, 2, 3])
def test_rows_of_a_stack(active: int) -> None:
    """What is done to the first clients' numbers in pieces is done to their flat vectors, and to nobody else's."""
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 2))
    layers = Layers.of(model)
    start = layers.flatten(model)
    rows = Rows(layers, start, 3)
    for stretch in rows.stretches(active):
        stretch.mul_(2)
    for client in range(3):
        torch.testing.assert_close(rows.flat(client), start * (2 if client < active else 1), rtol=0, atol=0)
    for entry in rows.entries:
        torch.testing.assert_close(rows.of(entry, active)[-1], 2 * dict(model.named_parameters())[entry.name].detach())
        assert rows.stretch([entry], active).is_contiguous()
