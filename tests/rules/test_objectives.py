"""The objectives, with numbers worked out by hand."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fedstrata
from fedstrata.clients.local import ProximalTerm, mean_per_layer
from fedstrata.core.aggregation import aggregate
from fedstrata.core.axes import Algorithm, Objective
from fedstrata.core.errors import BadValue
from fedstrata.core.layers import Layers
from fedstrata.objectives import OBJECTIVES, AdaptiveMu, FedLap, FedProx, Plain
from fedstrata.recipes.schema import Training
from fedstrata.runs.compare import begin_comparison, run_job
from fedstrata.selections import Everything
from fedstrata.tasks.task import Task
from fedstrata.weightings import SampleSize
from tests.support.math import cohort, image_task, run, vectors
from tests.support.processes import process_environment
from tests.support.reference import neuron_of_each_weight, one_minus_cosine

DOUBLE = torch.float64


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=DOUBLE)


class Dot(nn.Module):
    """One weight of any shape; the output is its sum, whatever the input."""

    def __init__(self, start: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(double(start))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.sum().expand(len(x))


def half_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean() / 2


def train_scalar(objective: Objective, start: object, target: float, **training: Any) -> Tensor:
    """One client, one sample: minimise ½ (Σw − target)² + proximal term; the weight after one round."""
    task = Task(lambda: Dot(start), [(double([[0.0]]), double([target]))], loss=half_square)
    states, _ = run(task, Algorithm(objective, Everything(), SampleSize()), Training(rounds=1, **training))
    return states[1].model


def test_the_registry() -> None:
    assert list(OBJECTIVES)[:4] == ["plain", "fedprox", "adaptive_mu", "fedlap"]
    assert list(OBJECTIVES)[4:] == ["fedrep", "fedbabu", "scaffold", "feddyn", "ditto", "moon"]


# --- plain, FedProx ----------------------------------------------------------------------------------------------


def test_plain_steps_by_hand() -> None:
    """w: 0 → 0.1 → 0.19 at η = 0.1 towards 1; with momentum 0.9 the second step is 0.9·0.1 + 0.09 → 0.28."""
    assert train_scalar(Plain(), [0.0], 1.0, epochs=2, lr=0.1).item() == pytest.approx(0.19, abs=1e-15)
    assert train_scalar(Plain(), [0.0], 1.0, epochs=2, lr=0.1, momentum=0.9).item() == pytest.approx(0.28, abs=1e-15)


def test_fedprox_steps_by_hand() -> None:
    """μ = 0.5: first gradient −1 + 0.5·0, w = 0.1; second −0.9 + 0.5·0.1 = −0.85, w = 0.185.

    The pull goes into the momentum: 0.9·1 + 0.85 = 1.75, w = 0.1 + 0.175 = 0.275.
    """
    assert train_scalar(FedProx(0.5), [0.0], 1.0, epochs=2, lr=0.1).item() == pytest.approx(0.185, abs=1e-15)
    with_momentum = train_scalar(FedProx(0.5), [0.0], 1.0, epochs=2, lr=0.1, momentum=0.9)
    assert with_momentum.item() == pytest.approx(0.275, abs=1e-15)


def test_fedprox_pulls_to_the_global_model_and_weight_decay_to_zero() -> None:
    """w₀ = 2, target 2, so no task gradient at first. Decay 0.1: g = 0.2, w = 1.98.

    Second: task −0.02, proximal 0.5·(−0.02) = −0.01, decay 0.198 → g = 0.168, w = 1.9632.
    """
    w = train_scalar(FedProx(0.5), [2.0], 2.0, epochs=2, lr=0.1, weight_decay=0.1)
    assert w.item() == pytest.approx(1.9632, abs=1e-14)


def test_fedprox_is_the_gradient_of_half_mu_squared() -> None:
    """μ/2 ‖w − a‖² with μ = 3, w − a = (1, −2): the energy is 1.5·5 = 7.5 and the pull (3, −6)."""
    layers = vectors(2)
    w = nn.Parameter(double([2.0, 0.0]))
    w.grad = double([10.0, 10.0])
    term = ProximalTerm(FedProx(3.0), {}, layers, {"p0": w}, {"p0": double([1.0, 2.0])})
    term.refresh()
    energy = term.energy()
    assert isinstance(energy, Tensor)
    assert energy.item() == 7.5
    term.pull()
    assert w.grad.tolist() == [13.0, 4.0]
    assert mean_per_layer(term.stiffness, layers).tolist() == [3.0]


def test_a_parameter_without_task_gradient_is_still_pulled() -> None:
    layers = vectors(1)
    w = nn.Parameter(double([3.0]))
    term = ProximalTerm(FedProx(2.0), {}, layers, {"p0": w}, {"p0": double([1.0])})
    term.refresh()
    term.pull()
    assert w.grad is not None
    assert w.grad.tolist() == [4.0]


@pytest.mark.parametrize("mu", [-0.1, float("nan")])
def test_mu_must_not_be_negative(mu: float) -> None:
    with pytest.raises(BadValue, match="mu"):
        FedProx(mu)
    with pytest.raises(BadValue, match="mu0"):
        AdaptiveMu(mu0=mu)


# --- adaptive μ --------------------------------------------------------------------------------------------------


def test_adaptive_mu_by_hand() -> None:
    """Drifts ‖(3, 4)‖ = 5 and ‖(5, 12, 0)‖ = 13, μ₀ = 0.01, a = 0.5, both μ start at 0.01.

    Round 1: μ = ½·0.01 + ½·(5/13)·0.01 = 0.0069230769, and 0.01 for the layer that moved most.
    Round 2, drifts 2 and 1: μ₀-layer: ½·0.0069230769 + ½·0.01 = 0.0084615385; other: ½·0.01 + ½·½·0.01 = 0.0075.
    """
    rule, layers = AdaptiveMu(), vectors(2, 3)
    state = rule.init(layers)
    assert state["mu"].tolist() == [0.01, 0.01]
    old = double([1.0, 1.0, 1.0, 1.0, 1.0])
    state = rule.after_round(old + double([3, 4, 5, 12, 0]), old, state, layers)
    torch.testing.assert_close(state["mu"], double([0.005 + 0.025 / 13, 0.01]), rtol=1e-12, atol=0)
    state = rule.after_round(old + double([0, 2, 1, 0, 0]), old, state, layers)
    torch.testing.assert_close(state["mu"], double([0.0025 + 0.0125 / 13 + 0.005, 0.0075]), rtol=1e-12, atol=0)


def test_adaptive_mu_a_is_the_step() -> None:
    """a = 1 forgets: μ = (d/max) μ₀ = ¼·0.2. a = 0.25: ¾·0.2 + ¼·¼·0.2 = 0.1625."""
    layers, old = vectors(1, 1), double([0.0, 0.0])
    for a, expected in ((1.0, 0.05), (0.25, 0.1625)):
        rule = AdaptiveMu(mu0=0.2, a=a)
        state = rule.after_round(double([1.0, -4.0]), old, rule.init(layers), layers)
        torch.testing.assert_close(state["mu"], double([expected, 0.2]), rtol=1e-12, atol=0)


def test_adaptive_mu_stays_if_nothing_moved() -> None:
    rule, layers = AdaptiveMu(), vectors(2, 1)
    state = {"mu": double([0.003, 0.007])}
    model = double([1.0, 2.0, 3.0])
    assert rule.after_round(model.clone(), model, state, layers)["mu"].tolist() == [0.003, 0.007]


def test_adaptive_mu_does_not_measure_statistics() -> None:
    """BatchNorm moves by 1 in its weight, by 1000 in its statistics; the next layer by 4: μ of BatchNorm is ½ + ½·¼."""
    layers = Layers.of(nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1, bias=False)).double())
    old = torch.zeros(layers.numel, dtype=DOUBLE)
    new = old.clone()
    view = layers.views(new)
    view["0.weight"][0], view["0.running_mean"][0], view["1.weight"][0, 0] = 1, 1000, 4
    rule = AdaptiveMu(mu0=1.0)
    torch.testing.assert_close(rule.after_round(new, old, rule.init(layers), layers)["mu"], double([0.625, 1.0]))


def test_adaptive_mu_stiffness_is_its_layers_mu() -> None:
    layers = vectors(2, 1)
    local = {"p0": double([1.0, 1.0]), "p1": double([1.0])}
    stiffness = AdaptiveMu().stiffness(local, local, {"mu": double([0.25, 0.0])}, layers)
    assert {name: float(c) for name, c in stiffness.items()} == {"p0": 0.25}, "a layer without a term is left out"


def test_adaptive_mu_goes_to_the_clients_of_the_next_round() -> None:
    """The recorded μ of round t is the state after round t − 1."""
    algorithm = Algorithm(AdaptiveMu(mu0=0.3), Everything(), SampleSize())
    states, records = run(image_task([5, 6]), algorithm, Training(rounds=3, batch_size=4, lr=0.1), grouping="tensor")
    assert states[0].objective["mu"].tolist() == [0.3] * 6
    for before, record in zip(states, records, strict=False):
        for row in record.layers["mu"]:
            torch.testing.assert_close(torch.from_numpy(row), before.objective["mu"], rtol=1e-12, atol=0)
    assert len(set(states[3].objective["mu"].tolist())) > 1


@pytest.mark.parametrize("a", [-0.1, 1.1, float("nan")])
def test_a_must_lie_in_range(a: float) -> None:
    with pytest.raises(BadValue, match="a must"):
        AdaptiveMu(a=a)


# --- FedLap ------------------------------------------------------------------------------------------------------

LINEAR = nn.Linear(2, 2).double()
ANCHOR = double([[1.0, 0.0], [0.0, 1.0]])
LOCAL = double([[0.0, 0.0], [1.0, 2.0]])


def turned(objective: FedLap, local: Tensor, anchor: Tensor) -> Tensor | None:
    layers = Layers.of_shapes({"weight": local.shape})
    return objective.stiffness({"weight": local}, {"weight": anchor}, {}, layers).get("weight")


def test_fedlap_columns_and_rows_by_hand() -> None:
    """Columns (the weights leaving an input): (1,0) → (0,1) turned by 90°, λ = 1; (0,1) → (0,2) only grew, λ = 0.

    Rows (`output`): (1,0) → (0,0), one is zero, λ = 1; (0,1) → (1,2), cos = 2/√5, λ = 0.105573.
    """
    columns = turned(FedLap(q=1.0), LOCAL, ANCHOR)
    assert columns is not None
    torch.testing.assert_close(columns, double([[1.0, 0.0]]))
    rows = turned(FedLap(q=1.0, units="output"), LOCAL, ANCHOR)
    assert rows is not None
    torch.testing.assert_close(rows, double([[1.0], [1 - 2 / math.sqrt(5)]]))


def test_fedlap_importance_multiplies() -> None:
    half = turned(FedLap(q=0.5), LOCAL, ANCHOR)
    assert half is not None
    torch.testing.assert_close(half, double([[0.5, 0.0]]))
    assert turned(FedLap(q=0.0), LOCAL, ANCHOR) is None


def test_fedlap_zero_vectors_and_opposites() -> None:
    """Columns: both zero → 0; local zero → 1; anchor zero → 1; opposite → 2; unmoved → 0 exactly."""
    anchor = double([[0.0, 1.0, 0.0, 1.0, 0.1], [0.0, 1.0, 0.0, 2.0, 0.7]])
    local = double([[0.0, 0.0, 3.0, -2.0, 0.1], [0.0, 0.0, 1.0, -4.0, 0.7]])
    lam = turned(FedLap(q=1.0), local, anchor)
    assert lam is not None
    torch.testing.assert_close(lam, double([[0.0, 1.0, 1.0, 2.0, 0.0]]), rtol=0, atol=1e-15)
    assert lam[0, 4] == 0
    assert ((lam >= 0) & (lam <= 2)).all()


def test_fedlap_is_exactly_zero_where_nothing_moved() -> None:
    """In floating point 1 − cos(w, w) is not always 0; nothing moved, so the term is not there at all."""
    w = torch.rand(30, 40, generator=torch.Generator().manual_seed(1))
    for units in ("input", "output"):
        assert turned(FedLap(q=1.0, units=units), w.clone(), w) is None


@pytest.mark.parametrize("seed", range(3))
def test_fedlap_is_clamped(seed: int) -> None:
    """w = s·a gives cosines a rounding error away from ±1: λ stays in [0, 2]."""
    a = torch.rand(7, 500, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
    for scale in (1.1, -0.3):
        lam = turned(FedLap(q=1.0), a * scale, a)
        assert lam is not None
        assert ((lam >= 0) & (lam <= 2)).all()


def test_fedlap_convolution_by_input_channel() -> None:
    """A (2, 2, 1, 2) kernel: input channel 0 holds (1,0 | 0,0) → (0,1 | 0,0), λ = 1; channel 1 is only scaled, λ = 0.

    By output: (1,0 | 1,1) → (0,1 | 2,2): cos = 4/(√3·3), λ = 0.2302; (0,0 | 1,1) → (0,0 | 2,2): 0.
    """
    anchor = double([[[[1, 0]], [[1, 1]]], [[[0, 0]], [[1, 1]]]])
    local = double([[[[0, 1]], [[2, 2]]], [[[0, 0]], [[2, 2]]]])
    by_input = turned(FedLap(q=1.0), local, anchor)
    by_output = turned(FedLap(q=1.0, units="output"), local, anchor)
    assert by_input is not None
    assert by_output is not None
    torch.testing.assert_close(by_input.expand(2, 2, 1, 2)[0, :, 0, 0], double([1.0, 0.0]), rtol=0, atol=1e-15)
    expected = double([1 - 4 / (3 * math.sqrt(3)), 0.0])
    torch.testing.assert_close(by_output.expand(2, 2, 1, 2)[:, 0, 0, 0], expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("units", ["input", "output"])
@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(3, 2),
        nn.Conv2d(4, 6, (2, 3)),
        nn.Conv2d(4, 6, 2, groups=2),
        nn.Conv1d(4, 8, 3, groups=4),
        nn.Conv3d(2, 2, 2, groups=2),
        nn.ConvTranspose2d(4, 6, 2),
        nn.ConvTranspose2d(4, 6, 2, groups=2),
        nn.Embedding(5, 3),
    ],
    ids=str,
)
def test_fedlap_by_what_each_weight_is_connected_to(module: nn.Module, units: Any) -> None:
    """The reference tries out which weights matter for one neuron alone; λ is 1 − cos of them, written out."""
    module = module.double()
    weights: Any = module.weight
    draw = torch.Generator().manual_seed(2)
    anchor = torch.randn(weights.shape, generator=draw, dtype=DOUBLE)
    local = anchor + torch.randn(weights.shape, generator=draw, dtype=DOUBLE)
    found = FedLap(q=1.0, units=units).stiffness({"weight": local}, {"weight": anchor}, {}, Layers.of(module))["weight"]
    neuron = neuron_of_each_weight(module, units)
    turns = [one_minus_cosine(local.numpy()[neuron == j], anchor.numpy()[neuron == j]) for j in range(neuron.max() + 1)]
    assert len(set(turns)) == len(turns) > 1
    torch.testing.assert_close(found.expand(local.shape), double(turns)[torch.from_numpy(neuron)], rtol=1e-12, atol=0)


def test_fedlap_depthwise_by_hand() -> None:
    """Two channels of their own 1×2 kernels: (1,0) → (0,1) turned by 90°, (1,1) → (3,3) only grew: λ = 1 and 0."""
    depthwise = Layers.of(nn.Conv2d(2, 2, (1, 2), groups=2, bias=False).double())
    anchor, local = double([[[[1, 0]]], [[[1, 1]]]]), double([[[[0, 1]]], [[[3, 3]]]])
    for units in ("input", "output"):
        found = FedLap(q=1.0, units=units).stiffness({"weight": local}, {"weight": anchor}, {}, depthwise)["weight"]
        torch.testing.assert_close(found.flatten(), double([1.0, 0.0]), rtol=0, atol=1e-15)


@pytest.mark.parametrize("grown", [0.01, 1.0, 1.3])
@pytest.mark.parametrize("angle", [1e-1, 1e-2, 1e-3])
@pytest.mark.parametrize("shape", [(200, 784), (64, 32, 5, 5)], ids=["linear", "conv"])
def test_fedlap_in_single_precision_at_small_angles(shape: tuple[int, ...], angle: float, grown: float) -> None:
    """Weights turned by about `angle` and grown by a factor: λ of these float32 numbers, against float64's."""
    draw = torch.Generator().manual_seed(3)
    anchor = torch.randn(shape, generator=draw) * 0.05
    local = (anchor + angle * 0.05 * torch.randn(shape, generator=draw)) * grown
    found = turned(FedLap(q=1.0), local, anchor)
    assert found is not None
    exact_w, exact_a = (x.double().transpose(0, 1).flatten(1) for x in (local, anchor))
    unit_w, unit_a = (x / x.norm(dim=1, keepdim=True) for x in (exact_w, exact_a))
    exact = (unit_w - unit_a).square().sum(1) / 2
    assert exact.mean() == pytest.approx(angle**2 / 2, rel=0.05)
    # Where w − a is mostly growth, its rounding errors are part of the turning: ε/angle. 1 − cos has ε/angle².
    tolerance = 1e-6 if grown == 1 else max(1e-6, 6e-8 / angle)
    torch.testing.assert_close(found.flatten().double(), exact, rtol=tolerance, atol=0)


def test_fedlap_in_single_precision_at_tiny_angles() -> None:
    """(1, 0) → (1, ε): cos = 1/c with c² = 1 + ε², so λ = ε²/(c² + c), where 1 − cos is 0 from ε = 2.4e-4 on."""
    for epsilon in (1e-3, 1e-5, 1e-8, 1e-15):
        lam = turned(FedLap(q=1.0), torch.tensor([[1.0], [epsilon]]), torch.tensor([[1.0], [0.0]]))
        assert lam is not None
        squared = 1 + epsilon**2
        assert lam.item() == pytest.approx(epsilon**2 / (squared + math.sqrt(squared)), rel=1e-6)


def test_fedlap_leaves_biases_free() -> None:
    local = {"weight": LOCAL, "bias": double([5.0, 5.0])}
    anchor = {"weight": ANCHOR, "bias": double([0.0, 1.0])}
    assert set(FedLap().stiffness(local, anchor, {}, Layers.of(LINEAR))) == {"weight"}


def test_fedlap_exponent_by_hand() -> None:
    """λ = 1 − 2/√5 = 0.105573 to the power (1 − q)/q: q = ½ → λ; q = 0.8 → λ^¼ = 0.570017; q = 0.2 → λ⁴ = 0.000124.

    q = 1 → 1 everywhere, also where nothing moved: FedProx's term.
    """
    lam = 1 - 2 / math.sqrt(5)
    for q, expected in ((0.5, lam), (0.8, lam**0.25), (0.2, lam**4)):
        c = turned(FedLap(q=q, form="exponent", units="output"), LOCAL, ANCHOR)
        assert c is not None
        torch.testing.assert_close(c, double([[1.0], [expected]]), rtol=1e-12, atol=0)
    c = turned(FedLap(q=1.0, form="exponent"), ANCHOR.clone(), ANCHOR)
    assert c is not None
    assert c.tolist() == [[1.0, 1.0]]
    assert turned(FedLap(q=0.0, form="exponent"), LOCAL, ANCHOR) is None


def test_fedlap_refreshes_each_epoch_by_hand() -> None:
    """w₀ = ½ towards −1 at η = 1. Epoch 1: λ = 0, g = 1.5, w = −1. Epoch 2: cos(−1, ½) = −1, λ = 2, q = ½, c = 1:

    g = 0 + 1·(−1 − ½) = −1.5, w = ½. Epoch 3: back at the anchor, unmoved, λ = 0: w = −1 again.
    """
    for epochs, expected in ((1, -1.0), (2, 0.5), (3, -1.0)):
        assert train_scalar(FedLap(q=0.5), [[0.5]], -1.0, epochs=epochs, lr=1.0).item() == pytest.approx(expected)


def test_fedlap_refresh_per_step_differs_within_the_first_epoch() -> None:
    """Two samples, B = 1, one epoch: per epoch the second step is free (w stays at −1), per step it is pulled to ½."""
    refresh: Any
    for refresh, expected in (("epoch", -1.0), ("step", 0.5)):
        task = Task(lambda: Dot([[0.5]]), [(double([[0.0], [0.0]]), double([-1.0, -1.0]))], loss=half_square)
        algorithm = Algorithm(FedLap(q=0.5, refresh=refresh), Everything(), SampleSize())
        states, _ = run(task, algorithm, Training(rounds=1, epochs=1, batch_size=1, lr=1.0))
        assert states[1].model.item() == pytest.approx(expected)


def test_through_implies_refresh_per_step() -> None:
    rule = FedLap(through=True)
    assert rule.refresh == "step"
    assert rule.differentiable
    assert not FedLap().differentiable


@pytest.mark.parametrize("units", ["input", "output"])
@pytest.mark.parametrize(("form", "q"), [("factor", 0.7), ("exponent", 0.5), ("exponent", 0.3), ("exponent", 0.8)])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 2, 2)], ids=["linear", "conv"])
def test_through_is_the_gradient_of_the_penalty(units: Any, form: Any, q: float, shape: tuple[int, ...]) -> None:
    """The gradient of ½ Σ c(w) (w − a)² against central differences of the same penalty, written out here."""
    draw = torch.Generator().manual_seed(4)
    anchor = torch.randn(shape, generator=draw, dtype=DOUBLE)
    start = anchor + 0.5 * torch.randn(shape, generator=draw, dtype=DOUBLE)

    def penalty(w: Tensor) -> float:
        total = 0.0
        axis = 1 if units == "input" else 0
        for x, y in zip(w.unbind(axis), anchor.unbind(axis), strict=True):
            lam = 1 - float((x * y).sum() / (x.norm() * y.norm()))
            c = q * lam if form == "factor" else lam ** ((1 - q) / q)
            total += 0.5 * c * float((x - y).square().sum())
        return total

    w = nn.Parameter(start.clone())
    term = ProximalTerm(
        FedLap(q=q, form=form, units=units, through=True), {}, Layers.of_shapes({"w": w.shape}), {"w": w}, {"w": anchor}
    )
    term.refresh()
    energy = term.energy()
    assert isinstance(energy, Tensor)
    assert energy.item() == pytest.approx(penalty(start), rel=1e-12)
    energy.backward()
    assert w.grad is not None
    numeric = torch.zeros(shape, dtype=DOUBLE)
    for at in range(start.numel()):
        step = torch.zeros(start.numel(), dtype=DOUBLE)
        step[at] = 1e-6
        step = step.view(shape)
        numeric.view(-1)[at] = (penalty(start + step) - penalty(start - step)) / 2e-6
    torch.testing.assert_close(w.grad, numeric, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("q", [0.3, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("form", ["factor", "exponent"])
def test_through_has_a_finite_gradient_where_a_neuron_grew_without_turning(form: Any, q: float) -> None:
    """Column 0 doubled (λ = 0 though it moved), column 1 turned: the penalty is finite, and so must its gradient be."""
    anchor = double([[1.0, 2.0], [3.0, 4.0]])
    w = nn.Parameter(double([[2.0, 2.1], [6.0, 4.0]]))
    term = ProximalTerm(
        FedLap(q=q, form=form, through=True), {}, Layers.of_shapes({"w": w.shape}), {"w": w}, {"w": anchor}
    )
    term.refresh()
    energy = term.energy()
    assert isinstance(energy, Tensor)
    energy.backward()
    assert w.grad is not None
    assert torch.isfinite(w.grad).all(), w.grad


def test_through_has_a_finite_gradient_at_zero_vectors() -> None:
    """λ = 1 where one vector is zero: the gradient is w − a."""
    for start, anchor in (([[0.0], [0.0]], [[3.0], [4.0]]), ([[3.0], [4.0]], [[0.0], [0.0]])):
        w = nn.Parameter(double(start))
        term = ProximalTerm(
            FedLap(q=1.0, through=True), {}, Layers.of_shapes({"w": w.shape}), {"w": w}, {"w": double(anchor)}
        )
        term.refresh()
        energy = term.energy()
        assert isinstance(energy, Tensor)
        energy.backward()
        assert w.grad is not None
        torch.testing.assert_close(w.grad, double(start) - double(anchor))


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-10, 1e-15])
def test_fedlap_angle_does_not_depend_on_the_scale(scale: float) -> None:
    """(1, 0) → (1, 1) turns by 45°, λ = 1 − 1/√2 = 0.292893, in single precision and for small weights too.

    (A product of squared norms, 1e-40 for weights of 1e-10, is below what single precision can hold.)
    """
    anchor, local = torch.tensor([[scale], [0.0]]), torch.tensor([[scale], [scale]])
    lam = turned(FedLap(q=1.0), local, anchor)
    assert lam is not None
    assert lam.item() == pytest.approx(1 - 1 / math.sqrt(2), rel=1e-5)


@pytest.mark.parametrize("q", [-0.1, 1.1, float("nan")])
def test_q_must_lie_in_range(q: float) -> None:
    with pytest.raises(BadValue, match="q must"):
        FedLap(q=q)


def test_only_adaptive_mu_has_a_memory() -> None:
    layers = vectors(2)
    model = double([1.0, 2.0])
    for rule in (Plain(), FedProx(), FedLap()):
        assert rule.init(layers) == {}
        assert rule.after_round(model + 1, model, {}, layers) == {}


def test_aggregate_by_hand() -> None:
    """Layers A (2 numbers) and B (1): clients n = 1, 3. A from both: ¼·4 + ¾·8 = 7; B from the first alone: 2."""
    layers = vectors(2, 1)
    crowd = cohort(layers, [[4, 0, 2], [8, 4, 0]], [1, 3], sent=[[True, True], [True, False]])
    weights, _ = SampleSize().weigh(crowd, {})
    assert aggregate(double([1, 1, 1]), crowd, weights).tolist() == [8, 4, 3]


# --- an objective that comes to nothing --------------------------------------------------------------------------

IDLE = "FedLap is refreshed when a local epoch begins, and in the first nothing has moved yet"


@dataclass(frozen=True)
class StiffFromTheStart(FedProx):
    """Refreshed with each epoch, and pulling in the first one."""

    refresh: ClassVar[Any] = "epoch"


@pytest.mark.parametrize(
    ("algorithm", "training", "warned"),
    [
        ("fedlap", {"epochs": 1}, "training.epochs = 1: "),
        ("fedlap", {"epochs": 2}, None),
        ("fedlap", {"epochs": 5, "steps": 3, "batch_size": 4}, "training.steps = 3: "),
        ("fedlap", {"epochs": 1, "steps": 4, "batch_size": 4}, None),
        ("fedlap", {"epochs": 1, "steps": 3, "batch_size": 5}, "training.steps = 3: "),  # 5 + 5 + 2 samples
        ("fedlap:refresh=step", {"epochs": 1}, None),
        ("fedlap:through=true", {"epochs": 1}, None),
        ("fedlap:q=0", {"epochs": 1}, None),  # asked for nothing
        ("fedlap:q=1:form=exponent", {"epochs": 1}, None),  # FedProx's term, which pulls from the second step on
        ("fedavg", {"epochs": 1}, None),
        ("fedprox", {"epochs": 1}, None),
        (Algorithm(StiffFromTheStart(0.1), Everything(), SampleSize()), {"epochs": 1}, None),
    ],
    ids=str,
)
def test_a_warning_where_the_objective_never_pulls(
    algorithm: Any,
    training: dict[str, int],
    warned: str | None,
    tiny: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Four clients of twelve samples: three batches of four are an epoch, the fourth opens a second one."""
    settings = {f"training.{key}": value for key, value in {"rounds": 1, **training}.items()}
    run = fedstrata.run(tiny(settings), algorithm=algorithm, out=tmp_path / "run")
    said = [record.getMessage() for record in caplog.records if record.name == "fedstrata"]
    assert [text.startswith(f"{warned}{IDLE}") for text in said] == ([True] if warned else [])
    plain = fedstrata.run(tiny(settings), algorithm="fedavg", out=tmp_path / "plain")  # shards are equal
    same = run.summary()["weights_sha256"] == plain.summary()["weights_sha256"]
    assert same == (warned is not None or algorithm in ("fedavg", "fedlap:q=0")), "the warning is right"


def test_a_comparison_warns_once_an_algorithm(recipe: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = recipe({"training.epochs": 1, "training.rounds": 1})
    comparison = begin_comparison(
        path, ["fedavg", "fedlap", "fedlap:refresh=step"], [0, 1, 2], out=tmp_path / "compare"
    )
    assert caplog.text.count(IDLE) == 1
    for job in comparison.jobs:
        list(run_job(job))
    assert caplog.text.count(IDLE) == 1


@pytest.mark.parametrize("command", [["run", "--algorithm", "fedlap"], ["compare", "--algorithms", "fedavg,fedlap"]])
def test_the_warning_is_seen_on_the_terminal(command: list[str], recipe: Any, tmp_path: Path) -> None:
    path = recipe({"training.epochs": 1, "training.rounds": 1})
    full = [sys.executable, "-m", "fedstrata", *command, str(path), "--out", str(tmp_path / "out")]
    done = subprocess.run(full, cwd=tmp_path, env=process_environment(), capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"training.epochs = 1: {IDLE}")
