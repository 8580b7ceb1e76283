"""What must be the same, and what must always hold.

Identities between algorithms, bit for bit where they take the same path; and properties of any updates, sizes and
masks, which Hypothesis tries to break.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedstrata.core.aggregation import aggregate
from fedstrata.core.axes import Algorithm
from fedstrata.core.cohort import angle
from fedstrata.objectives import AdaptiveMu, FedLap, FedProx, Plain
from fedstrata.recipes.schema import Training
from fedstrata.selections import Everything, FedLDF, NeuronPruning, RandomClients, RandomLayers
from fedstrata.weightings import FedAdp, FedLayerWise, SampleSize, Uniform
from tests.support.math import FEDAVG, cohort, image_task, run, vectors

TRAINING = Training(rounds=3, clients_per_round=4, epochs=2, batch_size=4, lr=0.1, momentum=0.9)
UNEQUAL, EQUAL = image_task([5, 12, 8, 9, 6]), image_task([7, 7, 7, 7, 7])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
ONE_LAYER = {"all": ["*"]}


def final(algorithm: Algorithm, training: Training = TRAINING, task=UNEQUAL, **options: object) -> torch.Tensor:
    states, _ = run(task, algorithm, training, **options)
    return states[-1].model


def objective(rule: Any) -> Algorithm:
    return Algorithm(rule, Everything(), SampleSize())


# --- identities --------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("grouping", ["module", "tensor", "block"])
def test_fedldf_with_everyone_is_fedavg(dtype: torch.dtype, grouping: str) -> None:
    everyone = Algorithm(Plain(), FedLDF(n=4), SampleSize())
    assert torch.equal(final(everyone, dtype=dtype, grouping=grouping), final(FEDAVG, dtype=dtype, grouping=grouping))
    fewer = Algorithm(Plain(), FedLDF(n=3), SampleSize())
    assert not torch.equal(final(fewer, dtype=dtype, grouping=grouping), final(FEDAVG, dtype=dtype, grouping=grouping))


@DTYPES
@pytest.mark.parametrize("selection", [RandomLayers(n=4), RandomClients(n=4)], ids=lambda rule: type(rule).__name__)
def test_drawing_everyone_is_fedavg(dtype: torch.dtype, selection: RandomLayers | RandomClients) -> None:
    assert torch.equal(final(Algorithm(Plain(), selection, SampleSize()), dtype=dtype), final(FEDAVG, dtype=dtype))


@pytest.mark.parametrize("smoothing", ["participation", "round"])
@pytest.mark.parametrize("selection", [Everything(), FedLDF(n=2)], ids=lambda rule: type(rule).__name__)
def test_fedlayerwise_with_one_layer_is_fedadp(smoothing: Any, selection: Everything | FedLDF) -> None:
    by_layer = Algorithm(Plain(), selection, FedLayerWise(smoothing=smoothing))
    by_model = Algorithm(Plain(), selection, FedAdp(smoothing=smoothing))
    one = final(by_layer, grouping=ONE_LAYER)
    torch.testing.assert_close(one, final(by_model, grouping=ONE_LAYER), rtol=1e-12, atol=1e-14)
    assert not torch.allclose(final(by_layer), final(by_model), rtol=1e-6, atol=0)


@DTYPES
def test_fedprox_zero_is_fedavg(dtype: torch.dtype) -> None:
    assert torch.equal(final(objective(FedProx(0.0)), dtype=dtype), final(FEDAVG, dtype=dtype))
    assert not torch.equal(final(objective(FedProx(0.1)), dtype=dtype), final(FEDAVG, dtype=dtype))


@DTYPES
@pytest.mark.parametrize("mu", [0.01, 0.3])
def test_adaptive_mu_without_adaptation_is_fedprox(dtype: torch.dtype, mu: float) -> None:
    adaptive = final(objective(AdaptiveMu(mu0=mu, a=0.0)), dtype=dtype, grouping="tensor")
    assert torch.equal(adaptive, final(objective(FedProx(mu)), dtype=dtype, grouping="tensor"))


@DTYPES
@pytest.mark.parametrize("a", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("mu", [0.01, 0.3])
def test_adaptive_mu_with_one_layer_is_fedprox(dtype: torch.dtype, mu: float, a: float) -> None:
    adaptive = final(objective(AdaptiveMu(mu0=mu, a=a)), dtype=dtype, grouping=ONE_LAYER)
    assert torch.equal(adaptive, final(objective(FedProx(mu)), dtype=dtype, grouping=ONE_LAYER))


def test_adaptive_mu_adapts() -> None:
    """The counterpart: several layers and a > 0 are not FedProx."""
    adaptive = final(objective(AdaptiveMu(mu0=0.3)), grouping="tensor")
    assert not torch.equal(adaptive, final(objective(FedProx(0.3)), grouping="tensor"))


@pytest.mark.parametrize("form", ["factor", "exponent"])
@pytest.mark.parametrize("through", [False, True])
@DTYPES
def test_fedlap_of_no_importance_is_plain_and_uniform(dtype: torch.dtype, form: Any, through: bool) -> None:
    lap = Algorithm(FedLap(q=0.0, form=form, through=through), Everything(), Uniform())
    plain = Algorithm(Plain(), Everything(), Uniform())
    assert torch.equal(final(lap, dtype=dtype), final(plain, dtype=dtype))


@DTYPES
@pytest.mark.parametrize("units", ["input", "output"])
def test_fedlap_with_one_epoch_is_plain_and_uniform(dtype: torch.dtype, units: Any) -> None:
    """λ is computed at the start of each epoch, where in the first nothing has moved."""
    one = TRAINING.model_copy(update={"epochs": 1})
    lap, plain = (Algorithm(rule, Everything(), Uniform()) for rule in (FedLap(q=1.0, units=units), Plain()))
    assert torch.equal(final(lap, one, dtype=dtype), final(plain, one, dtype=dtype))
    assert not torch.equal(final(lap, dtype=dtype), final(plain, dtype=dtype)), "two epochs are another matter"


@DTYPES
@pytest.mark.parametrize("rule", [FedLap(q=0.0), FedLap(q=1.0)], ids=["q = 0", "one epoch"])
def test_fedlap_is_fedavg_where_shards_are_equal(dtype: torch.dtype, rule: FedLap) -> None:
    one = TRAINING.model_copy(update={"epochs": 1})
    lap = Algorithm(rule, Everything(), Uniform())
    assert torch.equal(final(lap, one, EQUAL, dtype=dtype), final(FEDAVG, one, EQUAL, dtype=dtype))


@DTYPES
def test_fedlap_exponent_at_one_half_is_equation_10(dtype: torch.dtype) -> None:
    """λ^((1 − ½)/½) = λ: eq 10 without a factor, which is the factor form at q = 1."""
    exponent, factor = objective(FedLap(q=0.5, form="exponent")), objective(FedLap(q=1.0))
    assert torch.equal(final(exponent, dtype=dtype), final(factor, dtype=dtype))


@DTYPES
def test_neuron_pruning_of_nothing_is_fedavg(dtype: torch.dtype) -> None:
    pruned = final(Algorithm(Plain(), NeuronPruning(share=1.0), SampleSize()), dtype=dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(pruned, final(FEDAVG, dtype=dtype), rtol=tolerance, atol=tolerance)


@DTYPES
def test_sample_size_is_uniform_where_shards_are_equal(dtype: torch.dtype) -> None:
    uniform = Algorithm(Plain(), Everything(), Uniform())
    assert torch.equal(final(uniform, task=EQUAL, dtype=dtype), final(FEDAVG, task=EQUAL, dtype=dtype))
    assert not torch.equal(final(uniform, dtype=dtype), final(FEDAVG, dtype=dtype))


def test_one_client_is_adopted() -> None:
    """With a single client every weighting gives its model."""
    task = image_task([9])
    models = [final(Algorithm(Plain(), Everything(), w), task=task) for w in (SampleSize(), Uniform(), FedAdp())]
    assert torch.equal(models[0], models[1])
    assert torch.equal(models[0], models[2])


# --- properties --------------------------------------------------------------------------------------------------

SIZES = (3, 1, 2)  # three layers of a six-number model
numbers = st.floats(-10, 10, allow_nan=False, allow_subnormal=False).map(lambda x: 0.0 if abs(x) < 1e-6 else x)


@st.composite
def crowds(draw, masked: bool = False):
    """Updates of 1…6 clients on three layers, their sizes, and a mask."""
    count = draw(st.integers(1, 6))
    updates = draw(st.lists(st.lists(numbers, min_size=6, max_size=6), min_size=count, max_size=count))
    sizes = draw(st.lists(st.integers(1, 1000), min_size=count, max_size=count))
    row = st.lists(st.booleans(), min_size=3, max_size=3)
    sent = draw(st.lists(row, min_size=count, max_size=count)) if masked else [[True] * 3] * count
    layers = vectors(*SIZES)
    for update, mask in zip(updates, sent, strict=True):
        for layer, keep in zip(layers.layers, mask, strict=True):
            if not keep:
                update[layer.start : layer.stop] = [0.0] * layer.numel
    return cohort(layers, updates, sizes, sent=sent)


def direct_angle(x: np.ndarray, y: np.ndarray) -> float:
    lengths = float(np.linalg.norm(x) * np.linalg.norm(y))
    return math.pi / 2 if lengths == 0 else math.acos(min(1.0, max(-1.0, float(x @ y) / lengths)))


@settings(deadline=None, max_examples=100)
@given(crowds(), st.floats(0.1, 10))
def test_fedadp_theorem_2_in_the_first_round(crowd, alpha: float) -> None:
    """Σ ψ_k cos θ_k ≥ Σ p_k cos θ_k: a smaller angle never counts less than its share of the data."""
    rule = FedAdp(alpha=alpha)
    weights, state = rule.weigh(crowd, rule.init(len(crowd), crowd.layers))
    psi = weights[:, 0] / weights[:, 0].sum()
    p = crowd.sizes / crowd.sizes.sum()
    cosines = state["smoothed_angle"].cos()
    assert float(psi @ cosines) >= float(p @ cosines) - 1e-12


@settings(deadline=None, max_examples=100)
@given(crowds())
def test_fedlayerwise_theorem_2_in_the_first_round(crowd) -> None:
    """The same inequality, layer by layer."""
    rule = FedLayerWise()
    weights, state = rule.weigh(crowd, rule.init(len(crowd), crowd.layers))
    psi = weights / weights.sum(0)
    p = (crowd.sizes / crowd.sizes.sum())[:, None]
    cosines = state["smoothed_angle"].cos()
    assert ((psi * cosines).sum(0) >= (p * cosines).sum(0) - 1e-12).all()


@settings(deadline=None, max_examples=100)
@given(crowds(), st.data())
def test_fedldf_lemma_1_for_any_subset(crowd, data) -> None:
    """‖ŵ_l − w̄_l‖ ≤ 2 (1 − P_l) max_k ‖Δ_{k,l}‖, P_l the senders' share of the data; ŵ partial, w̄ full average."""
    count = len(crowd)
    columns = [data.draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(any)) for _ in SIZES]
    mask = torch.tensor(columns).T
    partial = cohort(
        crowd.layers, [update.tolist() for update in crowd.updates], crowd.sizes.tolist(), sent=mask.tolist()
    )
    model = torch.arange(6, dtype=torch.float64)
    some = aggregate(model, partial, SampleSize().weigh(partial, {})[0])
    full = aggregate(model, crowd, SampleSize().weigh(crowd, {})[0])
    gap = crowd.layers.norms(some - full)
    share = (crowd.sizes[:, None] * mask).sum(0) / crowd.sizes.sum()
    largest = torch.stack([crowd.layers.norms(update) for update in crowd.updates]).amax(0)
    assert (gap <= 2 * (1 - share) * largest + 1e-12).all()


@settings(deadline=None, max_examples=100)
@given(crowds(masked=True))
def test_gram_angles_are_the_direct_ones(crowd) -> None:
    """Angles from Gram matrices against explicit vectors, wherever G is not lost in cancellation."""
    gram = angle(crowd.inner_with_mean, crowd.update_squared.sqrt(), crowd.mean_squared.sqrt())
    for at, layer in enumerate(crowd.layers.layers):
        senders = [k for k in range(len(crowd)) if crowd.sent[k, at]]
        if not senders:
            continue
        vectors_ = {k: crowd.updates[k][layer.start : layer.stop].numpy() for k in senders}
        total = sum(float(crowd.sizes[k]) for k in senders)
        mean = sum(float(crowd.sizes[k]) / total * vectors_[k] for k in senders)
        longest = max(float(np.linalg.norm(v)) for v in vectors_.values())
        assume(longest == 0 or np.linalg.norm(mean) > 1e-3 * longest)
        for k in senders:
            assert math.cos(float(gram[k, at])) == pytest.approx(math.cos(direct_angle(vectors_[k], mean)), abs=1e-9)


@settings(deadline=None, max_examples=100)
@given(
    crowds(masked=True),
    st.sampled_from([SampleSize(), Uniform(), FedAdp(), FedLayerWise()]),
    st.lists(numbers, min_size=6, max_size=6),
)
def test_aggregation_is_a_convex_combination_and_what_nobody_sent_stays(crowd, rule, start) -> None:
    """Every number of the new model lies between its senders' smallest and largest; without senders it is the old."""
    model = torch.tensor(start, dtype=torch.float64)
    weights, _ = rule.weigh(crowd, rule.init(len(crowd), crowd.layers))
    assert (weights >= 0).all()
    new = aggregate(model, crowd, weights)
    for at, layer in enumerate(crowd.layers.layers):
        local = [
            model[layer.start : layer.stop] + crowd.updates[k][layer.start : layer.stop]
            for k in range(len(crowd))
            if crowd.sent[k, at]
        ]
        mine = new[layer.start : layer.stop]
        if local:
            assert (mine >= torch.stack(local).amin(0) - 1e-12).all()
            assert (mine <= torch.stack(local).amax(0) + 1e-12).all()
        else:
            assert torch.equal(mine, model[layer.start : layer.stop])


@settings(deadline=None, max_examples=100)
@given(crowds(), st.data())
def test_per_unit_aggregation_is_convex_and_what_nobody_sent_stays(crowd, data) -> None:
    """The same with a mask for each unit; in these layers every number is a unit."""
    count = len(crowd)
    picked = [data.draw(st.lists(st.booleans(), min_size=6, max_size=6)) for _ in range(count)]
    units = torch.tensor(picked)
    sent = [[any(row[0:3]), any(row[3:4]), any(row[4:6])] for row in picked]
    updates = [(update * mask).tolist() for update, mask in zip(crowd.updates, units, strict=True)]
    partial = cohort(crowd.layers, updates, crowd.sizes.tolist(), sent=sent, units=units)
    model = torch.linspace(-1, 1, 6, dtype=torch.float64)
    new = aggregate(model, partial, SampleSize().weigh(partial, {})[0])
    for u in range(6):
        senders = [k for k in range(count) if picked[k][u]]
        if not senders:
            assert new[u] == model[u]
            continue
        total = sum(float(crowd.sizes[k]) for k in senders)
        expected = float(model[u]) + sum(float(crowd.sizes[k]) * updates[k][u] for k in senders) / total
        assert float(new[u]) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@settings(deadline=None, max_examples=100)
@given(
    st.floats(1e-6, 10),
    st.floats(0, 0.99),
    st.lists(st.lists(numbers, min_size=6, max_size=6), min_size=1, max_size=20),
)
def test_adaptive_mu_stays_between_zero_and_mu0(mu0: float, a: float, moves: list[list[float]]) -> None:
    """0 < μ_l ≤ μ₀ for a < 1, however the layers move; and the layer that moved most is never let go."""
    rule, layers = AdaptiveMu(mu0=mu0, a=a), vectors(*SIZES)
    state, model = rule.init(layers), torch.zeros(6, dtype=torch.float64)
    for move in moves:
        state = rule.after_round(model + torch.tensor(move, dtype=torch.float64), model, state, layers)
        assert (state["mu"] > 0).all()
        assert (state["mu"] <= mu0 * (1 + 1e-14)).all()


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 8), st.data())
def test_fedldf_chooses_n_of_the_largest(clients: int, columns: int, n: int, data) -> None:
    """min(n, K) in every column; nobody left out has a larger score than somebody chosen, or an equal one in front."""
    scores = torch.tensor(
        data.draw(
            st.lists(
                st.lists(st.integers(0, 3), min_size=columns, max_size=columns), min_size=clients, max_size=clients
            )
        ),
        dtype=torch.float32,
    )
    chosen = FedLDF(n=n).choose(scores)
    assert (chosen.sum(0) == min(n, clients)).all()
    for column, picked in zip(scores.T.tolist(), chosen.T.tolist(), strict=True):
        keys = [(-score, k) for k, score in enumerate(column)]
        inside = [key for key, take in zip(keys, picked, strict=True) if take]
        outside = [key for key, take in zip(keys, picked, strict=True) if not take]
        assert not outside or max(inside) < min(outside)
