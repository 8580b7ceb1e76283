"""The kernel for perceptrons against autograd: one round from the same state agrees, for every combination."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedstrata.clients.client import Client
from fedstrata.clients.perceptron import as_perceptron
from fedstrata.core.axes import Algorithm
from fedstrata.core.fit import fit
from fedstrata.core.layers import Layers
from fedstrata.core.record import RoundRecord
from fedstrata.engines.local import LocalEngine
from fedstrata.objectives import FedLap, FedProx, Plain
from fedstrata.recipes.schema import Training
from fedstrata.selections import Everything
from fedstrata.tasks.task import Samples, Task, as_data
from fedstrata.weightings import SampleSize
from tests.support.combinations import COMBINATIONS, OBJECTIVES, SELECTIONS, SIZES, WEIGHTINGS
from tests.support.math import FEDAVG, image_task, prepare, words

TRAINING = Training(
    rounds=1, clients_per_round=5, epochs=3, batch_size=4, lr=0.1, momentum=0.9, weight_decay=0.01, stragglers=0.4
)


def perceptron() -> nn.Module:
    """16 – 6 – 5 – 3, one layer without bias, one ReLU missing: the kernel's case."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.ReLU(),
        nn.Linear(6, 5, bias=False),
        nn.Linear(5, 4),
        nn.ReLU(),
        nn.Linear(4, 3),
    )


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The same loss under a name that the kernel does not know: this goes through autograd."""
    return F.cross_entropy(outputs, targets)


def one_round(
    task: Task, algorithm: Algorithm, training: Training = TRAINING, **options: Any
) -> tuple[Tensor, RoundRecord]:
    workers = options.pop("workers", 1)
    setup, plan, state = prepare(task, algorithm, training, **options)
    with LocalEngine(setup, workers=workers) as engine:
        ((after, record),) = fit(state, algorithm, engine, plan)
    return after.model, record


@pytest.fixture(autouse=True)
def kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Which of a test's clients were trained by the kernel: the comparison must not be of autograd with itself."""
    used: list[bool] = []
    trained = Client._trained

    def watched(self: Client, order: Any, data: Any, plan: Any, memory: Any, by_kernel: bool = False) -> Any:
        used.append(by_kernel)
        return trained(self, order, data, plan, memory, by_kernel)

    monkeypatch.setattr(Client, "_trained", watched)
    return used


def both(task: Task, algorithm: Algorithm, used: list[bool], **options: Any) -> Any:
    """A round by the kernel, and one by autograd."""
    found = one_round(task, algorithm, **options)
    assert used
    assert all(used)
    used.clear()
    expected = one_round(replace(task, loss=cross_entropy), algorithm, **options)
    assert used
    assert not any(used)
    return found, expected


@pytest.mark.parametrize(("objective", "selection", "weighting"), COMBINATIONS, ids="+".join)
def test_every_combination(objective: str, selection: str, weighting: str, kernel_is_used: list[bool]) -> None:
    algorithm = Algorithm(OBJECTIVES[objective][0], SELECTIONS[selection][0], WEIGHTINGS[weighting][0])
    task = image_task(SIZES, perceptron)
    if algorithm.objective.differentiable:  # only autograd can
        one_round(task, algorithm)
        assert not any(kernel_is_used)
        return
    (found, by_kernel), (expected, by_autograd) = both(task, algorithm, kernel_is_used)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(by_kernel.losses, by_autograd.losses, rtol=1e-9)
    for name, values in by_autograd.layers.items():
        np.testing.assert_allclose(by_kernel.layers[name], values, rtol=1e-6, atol=1e-7, err_msg=name)


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
def test_every_way_to_train(changes: dict[str, Any], objective: Any, kernel_is_used: list[bool]) -> None:
    training = TRAINING.model_copy(update=changes)
    algorithm = Algorithm(objective, Everything(), SampleSize())
    task = image_task(SIZES, perceptron)
    (found, _), (expected, _) = both(task, algorithm, kernel_is_used, training=training)
    # Adam divides by the root of a second moment that may be tiny, which magnifies rounding.
    tolerance = 1e-7 if training.optimizer == "adam" else 1e-9
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_single_precision(kernel_is_used: list[bool]) -> None:
    (found, _), (expected, _) = both(image_task(SIZES, perceptron), FEDAVG, kernel_is_used, dtype=torch.float32)
    assert ((found - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("loss", [F.cross_entropy, cross_entropy])
def test_any_number_of_workers_gives_the_same_bits(loss: Any) -> None:
    algorithm = Algorithm(FedLap(), SELECTIONS["fedldf"][0], WEIGHTINGS["fedlayerwise"][0])
    task = replace(image_task(SIZES, perceptron), loss=loss)
    results = [one_round(task, algorithm, workers=workers, dtype=torch.float32) for workers in (1, 2, 3)]
    assert all(torch.equal(model, results[0][0]) for model, _ in results)


@pytest.mark.parametrize("nothing", [FedLap(q=0), FedProx(0), FedLap(q=1.0)])
def test_a_spring_that_never_pulls_is_plain_to_the_bit(nothing: Any) -> None:
    """q = 0, μ = 0, and FedLap in a single epoch, in which nothing has turned yet."""
    task, training = image_task(SIZES, perceptron), TRAINING.model_copy(update={"epochs": 1})
    plain, _ = one_round(task, FEDAVG, training=training, dtype=torch.float32)
    algorithm = Algorithm(nothing, Everything(), SampleSize())
    found, _ = one_round(task, algorithm, training=training, dtype=torch.float32)
    assert torch.equal(found, plain)


def test_a_client_that_diverges_does_not_touch_the_others() -> None:
    task = image_task(SIZES, perceptron)
    clients = list(task.clients)
    inputs, targets = clients[2]
    clients[2] = (torch.full_like(inputs, torch.nan), targets)
    training = TRAINING.model_copy(update={"clients_per_round": None})
    _, record = one_round(replace(task, clients=clients), FEDAVG, training=training)
    assert words(record) == tuple("not finite: update" if at == 2 else "ok" for at in range(len(clients)))


# --- what the kernel takes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 3), nn.ReLU()),
        nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(4, 3)),
        nn.Sequential(nn.Flatten(0), nn.Linear(4, 3)),
        nn.Linear(4, 3),
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 3))),
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
    ],
)
def test_what_is_no_plain_perceptron(model: nn.Module) -> None:
    assert as_perceptron(model, Layers.of(model), F.cross_entropy) is None


class Residual(nn.Sequential):
    """A Sequential with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.flatten(1)[:, :3]


def with_hook(which: str) -> nn.Module:
    model: Any = perceptron()
    if which == "forward of a layer":
        model[1].register_forward_hook(lambda module, inputs, output: output * 2)
    elif which == "forward of the model":
        model.register_forward_pre_hook(lambda module, inputs: None)
    elif which == "backward":
        model[3].register_full_backward_hook(lambda module, inputs, outputs: None)
    elif which == "gradient":
        model[1].weight.register_hook(lambda gradient: gradient * 2)
    elif which == "accumulated gradient":
        model[1].bias.register_post_accumulate_grad_hook(lambda weight: None)
    elif which == "a forward of the object":
        model[2].forward = torch.abs
    elif which == "frozen bias":
        model[1].bias.requires_grad_(False)
    elif which == "a forward of the class":
        return Residual(*model)
    return model


HOOKS = ["forward of a layer", "forward of the model", "backward", "gradient", "accumulated gradient"]
OTHERS = ["a forward of the object", "frozen bias", "a forward of the class"]


@pytest.mark.parametrize("which", [*HOOKS, *OTHERS])
def test_the_kernel_steps_aside(which: str) -> None:
    plain, other = perceptron(), with_hook(which)
    assert as_perceptron(plain, Layers.of(plain), F.cross_entropy) is not None
    assert as_perceptron(other, Layers.of(other), F.cross_entropy) is None
    assert as_perceptron(plain, Layers.of(plain), cross_entropy) is None


def images(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("data", "taken"),
    [
        ((images(3, 1, 4, 4), torch.tensor([0, 1, 2])), True),
        ((images(3, 16), torch.tensor([0, 1, 2])), True),
        ((images(3, 1, 4, 4), torch.tensor([0, -100, 2])), False),  # cross_entropy leaves it out
        ((images(3, 1, 4, 4), torch.tensor([0, 3, 2])), False),  # no such class: autograd says so
        ((images(3, 1, 4, 5), torch.tensor([0, 1, 2])), False),
        ((images(3, 1, 4, 4, dtype=torch.int64), torch.tensor([0, 1, 2])), False),
        ((images(3, 1, 4, 4), torch.tensor([0.0, 1, 2])), False),
        ((images(3, 1, 4, 4), torch.eye(3)), False),
        ([(images(1, 4, 4), 0), (images(1, 4, 4), 1), (images(1, 4, 4), 2)], False),
    ],
)
def test_what_data_the_kernel_takes(data: Any, taken: bool) -> None:
    model = perceptron()
    network = as_perceptron(model, Layers.of(model), F.cross_entropy)
    assert network is not None
    assert network.takes(as_data(data, "clients[0]")) is taken


def test_vectors_only_if_nothing_flattens() -> None:
    """Linear layers take [B, T, in] too, and mean something else by it."""
    model = nn.Sequential(nn.Linear(16, 3))
    network = as_perceptron(model, Layers.of(model), F.cross_entropy)
    assert network is not None
    labels = torch.tensor([0, 1])
    assert network.takes(Samples(images(2, 16), labels))
    assert not network.takes(Samples(images(2, 1, 16), labels))


def test_labels_to_be_ignored() -> None:
    task = image_task(SIZES, perceptron)
    clients = [(inputs, torch.where(torch.arange(len(labels)) == 1, -100, labels)) for inputs, labels in task.clients]
    task = replace(task, clients=clients)
    found, record = one_round(task, FEDAVG)
    expected, _ = one_round(replace(task, loss=cross_entropy), FEDAVG)
    assert set(words(record)) == {"ok"}
    assert torch.equal(found, expected)
