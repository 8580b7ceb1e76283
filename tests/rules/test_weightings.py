"""The weightings, with numbers worked out by hand."""

from __future__ import annotations

import decimal
import math
from decimal import Decimal
from typing import Any

import pytest
import torch
from torch import nn

from fedstrata.core.cohort import angle
from fedstrata.core.errors import BadValue
from fedstrata.core.layers import Layers
from fedstrata.weightings import WEIGHTINGS, FedAdp, FedLayerWise, SampleSize, Uniform
from fedstrata.weightings.angles import importance, psi, smooth
from tests.support.math import cohort, vectors


def close(value: object, expected: object, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(
        torch.as_tensor(value, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        rtol=tolerance,
        atol=tolerance,
    )


def normalised(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(0)


# --- the pieces --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theta", "value"),
    [
        (0.0, 5.0),  # exp(5) = 148.4, exp(−148.4) ≈ 0
        (1.0, 5 * (1 - math.exp(-1))),  # exp(0) = 1: 3.1606
        (math.pi / 2, 0.2799),  # exp(−5 · 0.570796) = 0.057614; 5 (1 − exp(−0.057614)) = 0.27993
        (math.pi, 0.000112),  # exp(−10.70796) = 2.2366e-5, times 5
    ],
)
def test_importance_by_hand(theta: float, value: float) -> None:
    """f(θ) = α (1 − exp(−exp(−α(θ − 1)))) at α = 5."""
    assert float(importance(torch.tensor(theta, dtype=torch.float64), 5.0)) == pytest.approx(value, abs=1e-4)


def test_importance_of_another_alpha() -> None:
    """α = 1: f(0) = 1 − exp(−e) = 0.934012; f(1) = 1 − 1/e = 0.632121."""
    close(importance(torch.tensor([0.0, 1.0], dtype=torch.float64), 1.0), [0.934012, 0.632121], 1e-6)


def test_angle_by_hand() -> None:
    """60°, 180°, clipped on both sides of the arccos, and π/2 where a vector is zero."""
    inner = torch.tensor([0.5, -6.0, 1 + 1e-15, -1 - 1e-15, 0.0, 0.0], dtype=torch.float64)
    update = torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0, 3.0], dtype=torch.float64)
    mean = torch.tensor([1.0, 3.0, 1.0, 1.0, 2.0, 0.0], dtype=torch.float64)
    close(angle(inner, update, mean), [math.pi / 3, math.pi, 0, math.pi, math.pi / 2, math.pi / 2])


def test_smooth_by_hand() -> None:
    """A client with θ̃ = 0.5 after two rounds, now 1.4 in round 9: (2·0.5 + 1.4)/3 = 0.8, or (8·0.5 + 1.4)/9 = 0.6.

    The first angle is taken as it is, whatever the round.
    """
    before = torch.tensor([0.5, 0.0], dtype=torch.float64)
    count = torch.tensor([2, 0])
    now = torch.tensor([1.4, 1.1], dtype=torch.float64)
    close(smooth(before, count, now, 9, "participation"), [0.8, 1.1])
    close(smooth(before, count, now, 9, "round"), [0.6, 1.1])


# --- sample size, uniform ----------------------------------------------------------------------------------------


def test_sample_size_and_uniform() -> None:
    """n = 3 and 1 give ¾ and ¼; uniform gives ½ each. Neither remembers anything."""
    crowd = cohort(vectors(2, 1), [[1, 0, 1], [0, 1, 1]], [3, 1])
    weights, state = SampleSize().weigh(crowd, {})
    close(normalised(weights), [[0.75, 0.75], [0.25, 0.25]])
    assert state == {}
    weights, state = Uniform().weigh(crowd, {})
    close(normalised(weights), [[0.5, 0.5], [0.5, 0.5]])
    assert state == {}
    assert SampleSize().init(9, crowd.layers) == Uniform().init(9, crowd.layers) == {}


# --- FedAdp ------------------------------------------------------------------------------------------------------


def test_fedadp_first_round_by_hand() -> None:
    """Δ₀ = (1, 0) with n = 3, Δ₁ = (0, 1) with n = 1: G = (¾, ¼), so θ₀ = arctan ⅓ = 0.321751, θ₁ = arctan 3.

    f(θ₀) = 5 (1 − exp(−exp(3.391247))) = 5 (1 − exp(−29.70)) = 5.000000;
    f(θ₁) = 5 (1 − exp(−exp(−1.245229))) = 5 (1 − exp(−0.287875)) = 5 · 0.250145 = 1.250723;
    ψ₀ = 3 e⁵ / (3 e⁵ + e^1.250723) = 445.2395 / (445.2395 + 3.4929) = 0.992216.
    """
    layers = vectors(2)
    weights, state = FedAdp().weigh(cohort(layers, [[1, 0], [0, 1]], [3, 1]), FedAdp().init(2, layers))
    close(state["smoothed_angle"], [math.atan(1 / 3), math.atan(3)])
    assert state["count"].tolist() == [1, 1]
    close(normalised(weights)[:, 0], [0.992216, 0.007784], 2e-6)


def test_fedadp_second_round_is_the_running_mean() -> None:
    """Equal sizes, Δ₀ = (1, 0), Δ₁ = (0, 1): θ = π/4 for both. Before, θ̃ = (0, 1.2) after one round each.

    So θ̃ = (π/8, (1.2 + π/4)/2) = (0.392699, 0.992699), f = (5.000000, 3.227734), and
    ψ₀ = 1/(1 + exp(3.227734 − 5)) = 0.854739. Without the memory both would be ½.
    """
    layers = vectors(2)
    state = {"smoothed_angle": torch.tensor([0.0, 1.2], dtype=torch.float64), "count": torch.tensor([1, 1])}
    weights, after = FedAdp().weigh(cohort(layers, [[1, 0], [0, 1]], [1, 1], round=2), state)
    close(after["smoothed_angle"], [math.pi / 8, (1.2 + math.pi / 4) / 2])
    exponent = math.exp(-5 * ((1.2 + math.pi / 4) / 2 - 1))
    expected = 1 / (1 + math.exp(-5 * math.exp(-exponent)))  # f₁ − f₀ = −5 exp(−exponent); exp(−exp(3.04)) ≈ 8e-10
    close(normalised(weights)[0, 0], expected, 1e-8)
    close(normalised(weights)[0, 0], 0.854739, 1e-6)
    assert state["count"].tolist() == [1, 1], "the state that went in is not changed"


def test_fedadp_measures_the_whole_model_not_layers() -> None:
    """Layers of 1 and 2 numbers; the model is one vector: Δ₀ = (2, 0, 0), Δ₁ = (0, 0, 2), n equal → θ = π/4 each.

    Layer by layer there would be angles 0 and π/2 instead.
    """
    layers = vectors(1, 2)
    weights, state = FedAdp().weigh(cohort(layers, [[2, 0, 0], [0, 0, 2]], [1, 1]), FedAdp().init(2, layers))
    close(state["smoothed_angle"], [math.pi / 4] * 2)
    assert weights.shape == (2, 2)


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        ([[0, 0], [1, 0]], [math.pi / 2, 0.0]),  # a client that did not move
        ([[1, 0], [-1, 0]], [math.pi / 2, math.pi / 2]),  # G = 0
        ([[3, 4], [-1, 0]], [math.acos(11 / (5 * math.sqrt(5))), math.acos(-1 / math.sqrt(5))]),  # G = (1, 2)
    ],
    ids=["zero update", "zero mean", "obtuse"],
)
def test_fedadp_angles_of_zero_vectors_and_obtuse_ones(updates: list[list[float]], expected: list[float]) -> None:
    layers = vectors(2)
    weights, state = FedAdp().weigh(cohort(layers, updates, [1, 1]), FedAdp().init(2, layers))
    close(state["smoothed_angle"], expected, 1e-7)
    assert torch.isfinite(weights).all()


def test_parallel_updates_have_angle_zero_not_nan() -> None:
    """A cosine that rounds to more than 1 is clipped."""
    layers = vectors(3)
    for scale in (0.1, 0.3, 1e-3, 7.7, 1e5):
        updates = [[0.1 * scale, 0.2 * scale, 0.3 * scale]] * 3
        _, state = FedAdp().weigh(cohort(layers, updates, [1, 2, 4]), FedAdp().init(3, layers))
        assert (state["smoothed_angle"] < 1e-7).all()


def partial_uploads() -> tuple[Layers, list[list[float]], list[list[bool]]]:
    """Layers A, B of two numbers; client 5 sends A, client 1 both, client 3 nothing; n = 1, 1, 2.

    G_A = ½(1, 0) + ½(0, 1) = (½, ½), G_B = (3, 0): client 3 is in neither.
    """
    updates = [[0.0, 1, 3, 0], [0.0, 0, 0, 0], [1.0, 0, 0, 0]]
    return vectors(2, 2), updates, [[True, True], [False, False], [True, False]]


def test_fedadp_with_partial_uploads_by_hand() -> None:
    """θ₅ over A alone: cos((1,0), (½,½)) → π/4. θ₁ over both: ⟨(0,1,3,0), (½,½,3,0)⟩ = 9.5, norms √10 and √9.5,

    so cos = √0.95 and θ₁ = arcsin √0.05 = 0.225513. Client 3 sent nothing: it keeps θ̃ = 0.7 and its count of 3.
    Clients 0, 2, 4 were not there at all.
    """
    layers, updates, sent = partial_uploads()
    state = FedAdp().init(6, layers)
    state["smoothed_angle"][3], state["count"][3] = 0.7, 3
    crowd = cohort(layers, updates, [1, 2, 1], sent=sent, clients=[1, 3, 5])
    weights, after = FedAdp().weigh(crowd, state)
    close(after["smoothed_angle"], [0, math.asin(math.sqrt(0.05)), 0, 0.7, 0, math.pi / 4])
    assert after["count"].tolist() == [0, 1, 0, 3, 0, 1]
    # layer A, over its senders 1 and 5: f(0.225513) = 5.000000 and f(π/4) = 5 (1 − exp(−exp(1.073009)))
    share = weights[:, 0] * crowd.sent[:, 0]
    close(share[0] / share.sum(), 1 / (1 + math.exp(-5 * math.exp(-math.exp(1.0730092)))), 1e-7)


@pytest.mark.parametrize(("smoothing", "t"), [("participation", 3), ("round", 9)])
def test_fedadp_smoothing_under_partial_participation(smoothing: Any, t: int) -> None:
    """Client 1 has θ̃ = 0.5 from two rounds; in round 9 its angle is π/4: ((t − 1)·0.5 + π/4)/t with t = 3 or 9.

    Client 0 was never there: π/4, in either reading.
    """
    layers = vectors(2)
    state = {"smoothed_angle": torch.tensor([0.0, 0.5], dtype=torch.float64), "count": torch.tensor([0, 2])}
    crowd = cohort(layers, [[1, 0], [0, 1]], [1, 1], round=9)
    _, after = FedAdp(smoothing=smoothing).weigh(crowd, state)
    close(after["smoothed_angle"], [math.pi / 4, ((t - 1) * 0.5 + math.pi / 4) / t])
    assert after["count"].tolist() == [1, 3]


# --- FedLayerWise ------------------------------------------------------------------------------------------------


def test_fedlayerwise_by_hand() -> None:
    """Layer A is FedAdp's example (n = 3, 1): 0.321751 and 1.249046, ψ₀ = 0.992216. In layer B both agree: ψ = ¾, ¼."""
    layers = vectors(2, 1)
    rule = FedLayerWise()
    weights, state = rule.weigh(cohort(layers, [[1, 0, 5], [0, 1, 2]], [3, 1]), rule.init(2, layers))
    close(state["smoothed_angle"], [[math.atan(1 / 3), 0], [math.atan(3), 0]], 1e-7)
    assert state["count"].tolist() == [[1, 1], [1, 1]]
    close(normalised(weights), [[0.992216, 0.75], [0.007784, 0.25]], 2e-6)


def test_fedlayerwise_with_partial_uploads_by_hand() -> None:
    """A: clients 1 and 5 at π/4 each. B: client 1 alone, angle 0. Angle and count of what was not sent stay."""
    layers, updates, sent = partial_uploads()
    rule = FedLayerWise()
    state = rule.init(6, layers)
    state["smoothed_angle"][3] = torch.tensor([0.7, 0.9])
    state["count"][3] = torch.tensor([3, 2])
    state["smoothed_angle"][5] = torch.tensor([1.0, 0.4])
    state["count"][5] = torch.tensor([1, 4])
    crowd = cohort(layers, updates, [1, 2, 1], sent=sent, clients=[1, 3, 5], round=2)
    weights, after = rule.weigh(crowd, state)
    expected = torch.zeros(6, 2, dtype=torch.float64)
    expected[1, 0] = math.pi / 4
    expected[3] = torch.tensor([0.7, 0.9], dtype=torch.float64)
    expected[5] = torch.tensor([(1.0 + math.pi / 4) / 2, 0.4], dtype=torch.float64)
    close(after["smoothed_angle"], expected, 1e-7)
    assert after["count"].tolist() == [[0, 0], [1, 1], [0, 0], [3, 2], [0, 0], [2, 4]]
    assert weights.shape == (3, 2)


@pytest.mark.parametrize(("smoothing", "t"), [("participation", 3), ("round", 9)])
def test_fedlayerwise_counts_per_client_and_layer(smoothing: Any, t: int) -> None:
    """Client 1 sent layer A twice before and layer B never: in round 9, A is smoothed and B is taken as it is."""
    layers = vectors(2, 2)
    rule = FedLayerWise(smoothing=smoothing)
    state = rule.init(2, layers)
    state["smoothed_angle"][1, 0], state["count"][1, 0] = 0.5, 2
    crowd = cohort(layers, [[1, 0, 1, 0], [0, 1, 0, 1]], [1, 1], round=9)
    _, after = rule.weigh(crowd, state)
    close(after["smoothed_angle"][1], [((t - 1) * 0.5 + math.pi / 4) / t, math.pi / 4])


# --- both --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [FedAdp(), FedLayerWise()], ids=lambda rule: type(rule).__name__)
def test_statistics_are_not_part_of_the_angle(rule: FedAdp | FedLayerWise) -> None:
    """BatchNorm: weight and bias agree (angle 0), the running statistics point apart."""
    layers = Layers.of(nn.BatchNorm1d(1).double())
    assert [entry.trainable for entry in layers.layers[0].entries] == [True, True, False, False]
    crowd = cohort(layers, [[1, 1, 50, 0], [2, 2, 0, -50]], [1, 1])
    _, state = rule.weigh(crowd, rule.init(2, layers))
    assert (state["smoothed_angle"] < 1e-7).all()


@pytest.mark.parametrize("rule", [FedAdp, FedLayerWise])
@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_alpha_must_be_positive(rule: type, alpha: float) -> None:
    with pytest.raises(BadValue, match="alpha"):
        rule(alpha=alpha)


def test_a_larger_alpha_punishes_a_large_angle_more() -> None:
    """ψ₁/ψ₀ = exp(f(θ₁) − f(θ₀)): with α = 1, f(0.321751) = 0.860602 and f(1.249046) = 0.541385 → ratio 0.7267;

    n = 3 and 1 → ψ₁ = 0.7267/3.7267 = 0.19500.
    """
    layers = vectors(2)
    crowd = cohort(layers, [[1, 0], [0, 1]], [3, 1])
    f0 = 1 - math.exp(-math.exp(1 - math.atan(1 / 3)))
    f1 = 1 - math.exp(-math.exp(1 - math.atan(3)))
    weights, _ = FedAdp(alpha=1.0).weigh(crowd, FedAdp().init(2, layers))
    close(normalised(weights)[1, 0], math.exp(f1 - f0) / (3 + math.exp(f1 - f0)))
    close(normalised(weights)[1, 0], 0.195, 1e-3)


def exact_shares(sizes: list[int], angles: list[float], alpha: float) -> list[float]:
    """n_k exp f_k over its sum, with fifty digits."""
    with decimal.localcontext(prec=50, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN):
        a = Decimal(alpha)
        # from α (1 − θ) = 50 on, exp(−exp(50)) is 0 here and anywhere
        inner = [min(-a * (Decimal(angle) - 1), Decimal(50)).exp() for angle in angles]
        raw = [n * (a * (1 - (-x).exp())).exp() for n, x in zip(sizes, inner, strict=True)]
        return [float(x / sum(raw)) for x in raw]


@pytest.mark.parametrize("alpha", [1e-3, 1.0, 5.0, 300.0, 599.0, 601.0, 709.0, 720.0, 5000.0, 1e5])
@pytest.mark.parametrize("rule", [FedAdp, FedLayerWise])
def test_weights_of_any_alpha(rule: type[FedAdp] | type[FedLayerWise], alpha: float) -> None:
    """Angles so near to 1 that f differs by a few units for the large α as well, and one of 0; exact to 1e-9.

    Layer A: angles 0, 1 + 2/α and 1 + 3/α; layer B: the latter two alone, whose f is far below that of client 0.
    """
    sizes = [100_000, 20_000, 300_000]
    layers = vectors(1, 1)
    crowd = cohort(layers, [[1, 0], [1, 1], [1, 1]], sizes, sent=[[True, False], [True, True], [True, True]])
    angles = [0.0, 1 + 2 / alpha, 1 + 3 / alpha]
    before = rule(alpha=alpha).init(3, layers)
    smoothed = torch.tensor(angles, dtype=torch.float64).reshape([-1] + [1] * (before["smoothed_angle"].ndim - 1))
    # A count so large that the round's own angle does not matter.
    state = {
        "smoothed_angle": smoothed.expand(before["smoothed_angle"].shape).clone(),
        "count": before["count"] + 10**18,
    }
    weights, _ = rule(alpha=alpha).weigh(crowd, state)
    assert torch.isfinite(weights).all()
    for at, senders in enumerate(([0, 1, 2], [1, 2])):
        mass = weights[senders, at]
        expected = exact_shares([sizes[k] for k in senders], [angles[k] for k in senders], alpha)
        torch.testing.assert_close(
            mass / mass.sum(), torch.tensor(expected, dtype=torch.float64), rtol=max(1e-12, 1e-15 * alpha), atol=1e-300
        )


@pytest.mark.parametrize("alpha", [0.5, 5.0, 590.0])
def test_ordinary_weights_keep_their_bits(alpha: float) -> None:
    """Below 600 nothing is subtracted: n exp f as it is written, to the last bit, for who did not send as well."""
    draw = torch.Generator().manual_seed(1)
    f = importance(torch.rand(7, 3, generator=draw, dtype=torch.float64) * 2, alpha)
    sizes = torch.tensor([1.0, 2, 3, 4, 5, 6, 7], dtype=torch.float64)
    sent = torch.rand(7, 3, generator=draw) < 0.5
    assert torch.equal(psi(sizes, f, sent), sizes[:, None] * torch.exp(f))
    assert torch.equal(psi(sizes, f[:, :1], sent), (sizes * torch.exp(f[:, 0]))[:, None].expand(-1, 3))


def test_the_registry() -> None:
    ours = ["sample_size", "uniform", "fedadp", "fedlayerwise", "fednova", "fedexp", "ida", "krum", "multi_krum"]
    assert list(WEIGHTINGS) == ours
