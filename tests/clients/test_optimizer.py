"""One client's optimizer: our SGD is torch's, to the bit; others by name, clipping, learning rates."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fedstrata import Local, algorithms
from fedstrata.clients.client import Client
from fedstrata.clients.training import local_optimizer
from fedstrata.core.axes import Algorithm
from fedstrata.core.errors import RecipeError
from fedstrata.core.schedules import Cosine, Step, Warmup
from fedstrata.core.training import LocalTraining
from fedstrata.recipes.experiment import build_experiment
from fedstrata.recipes.schema import Training, load
from fedstrata.tasks.task import Task
from tests.support.math import FEDAVG, double, image_task, run


def descend(optimizer: object, weights: list[Tensor]) -> None:
    """Three steps with given gradients."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        optimizer.zero_grad()  # type: ignore[attr-defined]
        assert all(weight.grad is None for weight in weights)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()  # type: ignore[attr-defined]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_equal_to_the_class_of_torch(momentum: float, decay: float) -> None:
    ours = [torch.ones(7, 3, requires_grad=True), torch.ones(4, requires_grad=True)]
    theirs = [weight.detach().clone().requires_grad_() for weight in ours]
    training = LocalTraining(lr=0.1, lr_decay=0.5, momentum=momentum, weight_decay=decay)
    descend(local_optimizer(training, ours, round=2), ours)
    descend(torch.optim.SGD(theirs, lr=0.05, momentum=momentum, weight_decay=decay, fused=True), theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not torch.equal(ours[0], torch.ones(7, 3))


def test_a_weight_whose_first_gradient_comes_late() -> None:
    """Its velocity starts with that gradient; the others' go on. By hand: v ← 0.5 v + g, w ← w − 0.1 v."""
    early, late = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = local_optimizer(LocalTraining(lr=0.1, momentum=0.5), [early, late], round=1)
    early.grad = torch.tensor([1.0])
    optimizer.step()
    early.grad, late.grad = torch.tensor([1.0]), torch.tensor([2.0])
    optimizer.step()
    optimizer.step()
    assert early.item() == pytest.approx(-0.1 * (1 + 1.5 + 1.75))
    assert late.item() == pytest.approx(-0.1 * (2 + 3))


def test_the_compiler_is_not_imported() -> None:
    """It costs each worker a second or two before its first step."""
    code = """
import sys, torch
from fedstrata.clients.training import local_optimizer
from fedstrata.core.training import LocalTraining
weight = torch.ones(2, requires_grad=True)
optimizer = local_optimizer(LocalTraining(momentum=0.9), [weight], 1)
optimizer.zero_grad()
weight.sum().backward()
optimizer.step()
assert torch.allclose(weight, torch.full((2,), 0.99)), weight
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# --- any class of torch.optim ---------------------------------------------------------------------------------------

TASK = image_task(
    [5, 9, 6], lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 4, bias=False), nn.Linear(4, 3, bias=False))
)
"""A perceptron whose weights are matrices, as Muon wants them."""

OTHERS: dict[str, tuple[type[Any], dict[str, Any], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"betas": [0.8, 0.9]}, {"weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"amsgrad": True}, {}),
    "SGD": (torch.optim.SGD, {"nesterov": True}, {"momentum": 0.9, "weight_decay": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True}, {"momentum": 0.5}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}, {}),
    "Muon": (torch.optim.Muon, {"ns_steps": 3}, {"momentum": 0.9, "weight_decay": 0.1}),
    **{
        name: (getattr(torch.optim, name), {}, {})
        for name in ("Adadelta", "Adafactor", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop")
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_optimizer_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a loop that makes it by itself, in each round a new one; the kernel for perceptrons steps aside."""
    make, options, keys = OTHERS[name]

    def own(model: nn.Module, data: Any, local: Local) -> None:
        decay = {"weight_decay": 0.0} if make is not torch.optim.Rprop else {}
        optimizer = make(model.parameters(), lr=local.lr, **decay | keys | options)
        for inputs, targets in local.batches():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            local.pull()
            optimizer.step()

    monkeypatch.setattr("fedstrata.clients.client.PerceptronSteps", None)
    training = Training(rounds=2, epochs=2, batch_size=4, lr=0.02, optimizer=name, optimizer_options=options, **keys)
    rule = algorithms.fedprox(mu=0.3)
    found, _ = run(TASK, rule, training)
    expected, _ = run(replace(TASK, train=own), rule, Training(rounds=2, epochs=2, batch_size=4, lr=0.02))
    assert torch.equal(found[-1].model, expected[-1].model)
    assert not torch.equal(found[-1].model, found[0].model)


def by_kernel(training: Training) -> bool:
    experiment = build_experiment(load("quickstart", settings={"task.model.name": "mlp"}))
    return Client(replace(experiment.setup, training=training.local))._network is not None


def test_the_kernel_steps_aside_for_what_it_cannot_do() -> None:
    schedule = {"name": "cosine", "rounds": 5}
    for kept in ({}, {"momentum": 0.9, "schedule": schedule}, {"optimizer": "adam"}):
        assert by_kernel(Training(**kept)), kept
    nesterov = {"momentum": 0.9, "optimizer_options": {"nesterov": True}}
    for left in ({"optimizer": "adamw"}, nesterov, {"clip_norm": 1.0}, {"clip_value": 1.0}):
        assert not by_kernel(Training(**left)), left


class One(nn.Module):
    """Numbers w, trained towards the targets: ½ ‖w − y‖²."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(list(self.w)).expand(len(x), -1)


def train_to(*targets: float, algorithm: Algorithm = FEDAVG, **training: Any) -> list[list[float]]:
    """The numbers after each round: one client with one sample."""
    task = Task(
        lambda: One(len(targets)), [(double([[0.0]]), double([targets]))], loss=lambda w, y: (w - y).square().sum() / 2
    )
    states, _ = run(task, algorithm, Training(**training))
    return [state.model.tolist() for state in states[1:]]


def test_nesterov_by_hand() -> None:
    """Gradients w − 1, η = 0.1, β = ½: v = −1, w = 0.1 (1 + ½) = 0.15; v = −0.5 − 0.85, w += 0.1 (0.85 + ½ · 1.35)."""
    nesterov = {"nesterov": True}
    ((first,),) = train_to(1.0, rounds=1, epochs=1, lr=0.1, momentum=0.5, optimizer_options=nesterov)
    ((second,),) = train_to(1.0, rounds=1, epochs=2, lr=0.1, momentum=0.5, optimizer_options=nesterov)
    assert [first, second] == pytest.approx([0.15, 0.3025])


def test_clipping_by_hand() -> None:
    """The gradient (−3, −4) has norm 5: at most 1 is (−0.6, −0.8); each number at most 3½ is (−3, −3½)."""
    assert train_to(3.0, 4.0, rounds=1, lr=0.1, clip_norm=1.0) == [pytest.approx([0.06, 0.08], rel=1e-5)]
    assert train_to(3.0, 4.0, rounds=1, lr=0.1, clip_norm=50.0) == [pytest.approx([0.3, 0.4])]
    assert train_to(3.0, 4.0, rounds=1, lr=0.1, clip_value=3.5) == [pytest.approx([0.3, 0.35])]
    assert train_to(3.0, 4.0, rounds=1, lr=0.1, clip_value=3.0, clip_norm=3.0) == [
        pytest.approx([0.3 / 2**0.5, 0.3 / 2**0.5], rel=1e-5)
    ]


def test_the_gradient_that_is_clipped_has_the_proximal_term_in_it() -> None:
    """μ = 10, at most ½: −1 → −½, w = 0.05; then −0.95 + 0.5 = −0.45, w = 0.095. Clipped first: 0.05."""
    prox = algorithms.fedprox(mu=10.0)
    assert train_to(1.0, algorithm=prox, rounds=1, epochs=2, lr=0.1, clip_value=0.5) == [[pytest.approx(0.095)]]


def test_an_optimizer_that_cannot_take_the_model_is_refused_before_round_one() -> None:
    settings = {"training.optimizer": "Muon"}
    with pytest.raises(RecipeError, match=r"training.optimizer = 'muon': Muon only supports 2D parameters"):
        build_experiment(load("quickstart", settings=settings))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"optimizer": "adamv"},
            r"optimizer = 'adamv': is no class of torch.optim \(did you mean adam\?\); there are: ad",
        ),
        ({"optimizer": "LBFGS"}, "optimizer = 'lbfgs': needs a closure that computes the loss again"),
        ({"optimizer": "SparseAdam"}, "optimizer = 'sparseadam': takes sparse gradients only"),
        ({"optimizer": "adamw", "momentum": 0.9}, "momentum = 0.9: is no option of AdamW"),
        ({"optimizer": "rprop", "weight_decay": 0.1}, "weight_decay = 0.1: is no option of Rprop"),
        (
            {"optimizer": "adamw", "optimizer_options": {"beta": 1}},
            r"optimizer_options.beta = 1: AdamW has no such option \(did you mean betas\?\)",
        ),
        (
            {"optimizer": "adamw", "optimizer_options": {"betas": [0.9, 1.5]}},
            r"optimizer_options.betas = \[0.9, 1.5\]: is refused by AdamW: Invalid beta parameter at index 1: 1.5",
        ),
        (
            {"optimizer_options": {"nesterov": True}},
            "optimizer_options.nesterov = True: is refused by SGD: Nesterov momentum requires a momentum",
        ),
        ({"optimizer_options": {"nesterov": 1}}, "optimizer_options.nesterov = 1: must be true or false"),
        ({"optimizer_options": {"dampening": True}}, "optimizer_options.dampening = True: must not be true or false"),
        ({"optimizer_options": {"lr": 0.1}}, "optimizer_options.lr = 0.1: has a key of its own: write training.lr"),
        ({"optimizer_options": {"differentiable": True}}, "optimizer_options.differentiable = True: is refused by SGD"),
        ({"optimizer_options": 3}, "optimizer_options = 3: input should be a valid dictionary"),
        ({"schedule": {"name": "cosin", "rounds": 3}}, r"schedule.name = 'cosin': unknown \(did you mean cosine\?\)"),
        ({"schedule": {"rounds": 3}}, "schedule.name: unknown; there are: cosine, step, warmup"),
        ({"schedule": {"name": "cosine"}}, "schedule.rounds: Cosine needs it"),
        ({"schedule": {"name": "cosine", "rounds": 0}}, "schedule.rounds = 0: must be at least 1"),
        ({"schedule": {"name": "cosine", "rounds": 5, "final": 2.0}}, "schedule.final = 2.0: must be a share"),
        ({"schedule": {"name": "step", "every": 0}}, "schedule.every = 0: must be at least 1"),
        ({"schedule": [{"name": "step", "every": 2, "by": 0.0}]}, "schedule.by = 0.0: must be > 0 and at most 1"),
        ({"schedule": {"name": "warmup", "rounds": 2, "start": 0.0}}, "schedule.start = 0.0: must be > 0"),
        ({"schedule": 3}, "schedule = 3: input should be a valid"),
    ],
    ids=str,
)
def test_what_is_refused_names_field_and_value(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=rf"^training\.{message}"):
        load({"training": given})


# --- the learning rate over rounds ------------------------------------------------------------------------------------

TORCHS = torch.optim.lr_scheduler

SCHEDULERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "cosine": (Cosine(7, final=0.2), lambda optimizer: TORCHS.CosineAnnealingLR(optimizer, 7, eta_min=0.2 * 0.3)),
    "step": (Step(3, by=0.5), lambda optimizer: TORCHS.StepLR(optimizer, 3, gamma=0.5)),
    "warmup": (Warmup(4, start=0.25), lambda optimizer: TORCHS.LinearLR(optimizer, 0.25, total_iters=4)),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedules_are_torchs(name: str) -> None:
    """Its schedulers, stepped once a round. Its cosine turns up again after its end; ours stays there."""
    schedule, make = SCHEDULERS[name]
    training = LocalTraining(lr=0.3, schedule=schedule)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler = make(optimizer)
    for round in range(1, 9):
        assert training.learning_rate(round) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        scheduler.step()
    if name == "cosine":
        assert [training.learning_rate(round) for round in (8, 9, 100)] == pytest.approx([0.06] * 3)


@given(
    lr=st.floats(1e-6, 10),
    decay=st.floats(0.1, 1),
    rounds=st.integers(1, 50),
    share=st.floats(0.01, 1),
    round=st.integers(1, 200),
)
def test_schedules_are_multiplied(lr: float, decay: float, rounds: int, share: float, round: int) -> None:
    """With each other and with `lr_decay`; the first round has lr times the start of a warm-up, and none exceeds lr."""
    parts = (Warmup(rounds, start=share), Cosine(rounds, final=share), Step(rounds, by=share))
    training = LocalTraining(lr=lr, lr_decay=decay, schedule=parts)
    expected = lr * decay ** (round - 1) * parts[0].factor(round) * parts[1].factor(round) * parts[2].factor(round)
    assert training.learning_rate(round) == pytest.approx(expected)
    assert training.learning_rate(round) <= lr
    assert training.learning_rate(1) == pytest.approx(lr * share)
    assert LocalTraining(lr=lr, lr_decay=decay).learning_rate(round) == lr * decay ** (round - 1), "to the bit"


def test_a_schedule_of_a_recipe() -> None:
    """η = 0.4, then half of it: 0.4, then 0.4 + 0.2 · 0.6 = 0.52. In a list they are multiplied."""
    step = {"name": "step", "every": 1, "by": 0.5}
    assert train_to(1.0, rounds=2, lr=0.4, schedule=step) == [[pytest.approx(0.4)], [pytest.approx(0.52)]]
    both = [step, {"name": "warmup", "rounds": 1, "start": 0.5}]  # 0.2, then 0.2
    assert train_to(1.0, rounds=2, lr=0.4, schedule=both) == [[pytest.approx(0.2)], [pytest.approx(0.36)]]
