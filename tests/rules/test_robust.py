"""Krum, multi-Krum, median, trimmed mean and norm bounding: by hand, Flower's own, a slow one, and in their limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, RecordDict
from flwr.server.strategy.aggregate import aggregate_krum, aggregate_median, aggregate_trimmed_avg
from flwr.serverapp.strategy.multikrum import select_multikrum
from hypothesis import given, settings
from hypothesis import strategies as st

import fedstrata
from fedstrata.core.axes import Algorithm
from fedstrata.core.cohort import Cohort
from fedstrata.core.errors import BadValue, RecipeError
from fedstrata.core.state import conclude, initial_state
from fedstrata.recipes.schema import Training
from fedstrata.weightings import FedAdp, Krum, MultiKrum, Uniform
from tests.support.math import FEDAVG, cohort, double, image_task, run, vectors
from tests.support.server_side import (
    COMBINED,
    LAYERS,
    TRAINABLE,
    as_cohort,
    krum_scores,
    numbers,
    rounds,
)

TASK = image_task([5, 12, 8, 9, 6])
TRAINING = Training(rounds=3, epochs=2, batch_size=4, lr=0.1, momentum=0.9)
SEVEN = [0.3, -0.7, 0.2, 1.0, -2.0, 0.5, 0.1]


def after(algorithm: Algorithm, round: Cohort) -> torch.Tensor:
    """The next global model."""
    state = initial_state(round.model, algorithm, len(round), round.layers)
    return conclude(state, algorithm, round)[0].model


def moved(algorithm: Algorithm, updates: Sequence[Sequence[float]], sizes: Sequence[float] = ()) -> list[float]:
    """How far one layer goes, from 0."""
    round = cohort(vectors(len(updates[0])), updates, sizes or [1] * len(updates))
    found: list[float] = after(algorithm, round).tolist()
    return found


def final(algorithm: Algorithm, **options: Any) -> torch.Tensor:
    return run(TASK, algorithm, TRAINING, **options)[0][-1].model


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_krum_by_hand() -> None:
    """K = 5, f = 1: two neighbours each. Scores of 0, 1, 2½, 4, 100: 7¼, 3¼, 4½, 11¼ and more; 1 wins."""
    updates = [[0.0], [1.0], [2.5], [4.0], [100.0]]
    scores = Krum(byzantine=1).scores(cohort(vectors(1), updates, [1] * 5))
    assert scores.tolist() == [7.25, 3.25, 4.5, 11.25, 96**2 + 97.5**2]
    assert moved(fedstrata.krum(byzantine=1), updates) == [1]
    assert moved(fedstrata.krum(), updates) == [1], "of five, Krum withstands one"


def test_multi_krum_by_hand() -> None:
    """The same: the best two are 1 and 2½, with 1 and 3 samples 2.125; the best three also 0, in equal parts 7/6."""
    updates = [[0.0], [1.0], [2.5], [4.0], [100.0]]
    assert moved(fedstrata.multi_krum(byzantine=1, keep=2), updates, [9, 1, 3, 9, 9]) == [2.125]
    assert moved(fedstrata.multi_krum(byzantine=1, keep=3), updates) == pytest.approx([3.5 / 3])
    assert moved(fedstrata.multi_krum(byzantine=1), updates) == [1.75], "by default 5 − 1 − 2 of them"


def test_krum_takes_the_first_of_equals() -> None:
    assert moved(fedstrata.krum(byzantine=0), [[0.0], [1.0], [2.0], [3.0]]) == [1]
    assert moved(fedstrata.krum(byzantine=0), [[3.0], [2.0], [1.0], [0.0]]) == [2]


def test_krum_leaves_out_who_sent_nothing() -> None:
    """Of 1, 2 and 5 the first two tie; somebody at 0 who sent nothing is no neighbour, and no winner."""
    sent = [[False], [True], [True], [True]]
    round = cohort(vectors(1), [[0.0], [1.0], [2.0], [5.0]], [1] * 4, sent=sent)
    assert Krum().scores(round).tolist() == [float("inf"), 1, 1, 9]
    assert after(fedstrata.krum(), round).tolist() == [1]
    assert after(fedstrata.krum(), cohort(vectors(1), [[0.0], [7.0]], [1] * 2, sent=sent[:2])).tolist() == [7]


def test_median_by_hand() -> None:
    """Of three the second, of four the mean of the second and third."""
    assert moved(fedstrata.median(), [[5, 0], [1, -8], [2, 3]]) == [2, 0]
    assert moved(fedstrata.median(), [[5, 0], [1, -8], [2, 3], [4, 1]], [1, 9, 9, 1]) == [3, 0.5]


def test_trimmed_mean_by_hand() -> None:
    """Of five, a share of 0.25 is one at either end: 1, 2, 6 are left of 0, 1, 2, 6, 99."""
    updates = [[99.0], [2.0], [0.0], [6.0], [1.0]]
    assert moved(fedstrata.trimmed_mean(trim=0.25), updates) == [3]
    assert moved(fedstrata.trimmed_mean(trim=0.19), updates) == pytest.approx([21.6])
    assert moved(fedstrata.trimmed_mean(trim=0.49), updates) == [2]


def test_norm_bounding_by_hand() -> None:
    """Norms 5 and 1 with a bound of 1: (0.6, 0.8) and (0, 1). Without one, the median is 3: (1.8, 2.4) and (0, 1)."""
    updates = [[3.0, 4.0], [0.0, 1.0]]
    assert moved(fedstrata.norm_bounding(bound=1.0), updates) == pytest.approx([0.3, 0.9])
    assert moved(fedstrata.norm_bounding(), updates) == pytest.approx([0.9, 1.7])
    assert moved(fedstrata.norm_bounding(bound=1.0), updates, [1, 3]) == pytest.approx([0.15, 0.95])


def test_units_that_clients_pick() -> None:
    """In `a` clients 0 and 1 sent unit 0, client 2 unit 1; all sent `b` and its buffer; nobody a unit of c."""
    units = torch.tensor([[1, 0, 1, 0, 0, 0], [1, 0, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0]], dtype=torch.bool)
    rows = [[2, 0, 1, 1, 0, 0, 0], [6, 0, 2, 8, 0, 0, 0], [0, 5, 9, 3, 0, 0, 0]]
    model = double([1.0] * 7)
    round = cohort(LAYERS, rows, [1] * 3, sent=[[True, True, False]] * 3, units=units, model=model)
    assert after(fedstrata.median(), round).tolist() == [5, 6, 3, 4, 1, 1, 1]
    assert after(fedstrata.trimmed_mean(trim=0.4), round).tolist() == [5, 6, 3, 4, 1, 1, 1]
    short = after(fedstrata.norm_bounding(bound=5.0), round).tolist()  # norms √5, √40, √106
    by_hand = [1 + (2 + 6 * 5 / 40**0.5) / 2, 1 + 25 / 106**0.5, 1 + (1 + 10 / 40**0.5 + 45 / 106**0.5) / 3, 5]
    assert short == pytest.approx([*by_hand, 1, 1, 1])


# --- Flower's --------------------------------------------------------------------------------------------------------


def some_models(seed: int, count: int, dtype: Any) -> tuple[list[list[np.ndarray]], list[int]]:
    """Models of two arrays each, of which two are far from the others, and samples."""
    draw = np.random.default_rng(seed)
    models = [[draw.normal(size=(4, 3)), draw.normal(size=5)] for _ in range(count)]
    for model in models[:2]:
        model[0] *= 7
    return [[array.astype(dtype) for array in model] for model in models], draw.integers(1, 50, count).tolist()


def ours(algorithm: Algorithm, models: list[list[np.ndarray]], sizes: list[int]) -> list[np.ndarray]:
    """What a Server makes of the same models; the first global one is no client's."""
    draw = np.random.default_rng(99)
    first = {f"l{at}.weight": draw.normal(size=a.shape).astype(a.dtype) for at, a in enumerate(models[0])}
    trained = [{f"l{at}.weight": array for at, array in enumerate(model)} for model in models]
    return list(fedstrata.Server(first, algorithm).aggregate(trained, sizes).values())


CLOSE: dict[Any, float] = {np.float32: 1e-6, np.float64: 1e-13}


def same(found: list[np.ndarray], expected: list[np.ndarray], dtype: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(one, other, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [7, 10])
@pytest.mark.parametrize("f", [0, 1, 2])
def test_krum_is_flowers(f: int, count: int, dtype: Any) -> None:
    for seed in range(5):
        models, sizes = some_models(seed, count, dtype)
        results = list(zip(models, sizes, strict=True))
        same(ours(fedstrata.krum(byzantine=f), models, sizes), aggregate_krum(results, f, 0), dtype)
        for keep in (1, 3, count):
            algorithm = fedstrata.multi_krum(byzantine=f, keep=keep)
            same(ours(algorithm, models, sizes), aggregate_krum(results, f, keep), dtype)


@pytest.mark.parametrize("f", [0, 1, 2])
def test_multi_krum_keeps_whom_flowers_strategy_keeps(f: int) -> None:
    for seed in range(5):
        models, sizes = some_models(seed, 8, np.float64)
        contents = [RecordDict({"arrays": ArrayRecord(model)}) for model in models]
        kept = {id(content) for content in select_multikrum(contents, f, 3)}
        flat = [np.concatenate([array.ravel() for array in model]).tolist() for model in models]
        weights, _ = MultiKrum(f, 3).weigh(cohort(vectors(17), flat, sizes), {})
        assert weights[:, 0].tolist() == [
            size if id(content) in kept else 0 for content, size in zip(contents, sizes, strict=True)
        ]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [1, 2, 7, 10])
def test_median_and_trimmed_mean_are_flowers(count: int, dtype: Any) -> None:
    for seed in range(5):
        models, sizes = some_models(seed, count, dtype)
        results = list(zip(models, sizes, strict=True))
        same(ours(fedstrata.median(), models, sizes), aggregate_median(results), dtype)
        for trim in (0.0, 0.1, 0.2, 0.3, 0.49):
            expected = aggregate_trimmed_avg(results, trim)
            same(ours(fedstrata.trimmed_mean(trim=trim), models, sizes), expected, dtype)


# --- the slow one ----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(rounds(), st.sampled_from([0.0, 0.1, 0.25, 0.45]), st.sampled_from([None, 0.5, 4.0]))
def test_combinations_are_the_slow_ones(uploads: Any, trim: float, bound: float | None) -> None:
    """Any layers of any clients: each number over its senders."""
    round = as_cohort(uploads, SEVEN)
    for algorithm, steps in (
        (fedstrata.median(), COMBINED["median"](uploads)),
        (fedstrata.trimmed_mean(trim=trim), COMBINED["trimmed_mean"](uploads, trim)),
        (fedstrata.norm_bounding(bound=bound), COMBINED["norm_bounding"](uploads, bound)),
    ):
        expected = [old + step for old, step in zip(SEVEN, steps, strict=True)]
        assert after(algorithm, round).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(deadline=None, max_examples=100)
@given(rounds(masked=False), st.integers(0, 2))
def test_krums_scores_are_the_slow_ones(uploads: Any, byzantine: int) -> None:
    found = Krum(byzantine).scores(as_cohort(uploads)).tolist()
    assert found == pytest.approx(krum_scores(uploads, byzantine), rel=1e-6, abs=1e-9)


# --- limits and properties -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_where_they_are_the_mean(dtype: torch.dtype) -> None:
    """A bound that nobody reaches, and keeping everybody: bit for bit. Nothing trimmed: in another order of sums."""
    fedavg = final(FEDAVG, dtype=dtype)
    assert torch.equal(final(fedstrata.norm_bounding(bound=1e9), dtype=dtype), fedavg)
    assert torch.equal(final(fedstrata.multi_krum(keep=5), dtype=dtype), fedavg)
    uniform, tolerance = (
        final(replace(FEDAVG, weighting=Uniform()), dtype=dtype),
        1e-5 if dtype == torch.float32 else 1e-12,
    )
    torch.testing.assert_close(
        final(fedstrata.trimmed_mean(trim=0.0), dtype=dtype), uniform, rtol=tolerance, atol=tolerance
    )
    for other in (fedstrata.krum(), fedstrata.median(), fedstrata.trimmed_mean(), fedstrata.norm_bounding()):
        assert not torch.allclose(final(other, dtype=dtype), fedavg, rtol=1e-4)


ROBUST = [
    fedstrata.krum(),
    fedstrata.multi_krum(),
    fedstrata.median(),
    fedstrata.trimmed_mean(),
    fedstrata.norm_bounding(),
]


@pytest.mark.parametrize("algorithm", ROBUST, ids=repr)
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_identical_updates_are_adopted(algorithm: Algorithm, count: int) -> None:
    assert moved(algorithm, [[2.0, -1.0, 0.5]] * count, list(range(1, count + 1))) == pytest.approx([2, -1, 0.5])


@settings(deadline=None, max_examples=50)
@given(st.lists(numbers, min_size=4, max_size=4), st.lists(numbers, min_size=4, max_size=4))
def test_a_median_of_two_is_their_mean(first: list[float], second: list[float]) -> None:
    assert moved(fedstrata.median(), [first, second], [3, 5]) == [
        (x + y) / 2 for x, y in zip(first, second, strict=True)
    ]


@settings(deadline=None, max_examples=50)
@given(rounds(), st.randoms())
def test_the_order_of_clients_changes_no_bit_of_a_median(uploads: Any, random: Any) -> None:
    shuffled = list(uploads)
    random.shuffle(shuffled)
    for algorithm in (fedstrata.median(), fedstrata.trimmed_mean()):
        assert torch.equal(after(algorithm, as_cohort(uploads)), after(algorithm, as_cohort(shuffled)))


@settings(deadline=None, max_examples=50)
@given(rounds(), st.floats(0.01, 5))
def test_a_bounded_mean_moves_by_no_more_than_the_bound(uploads: Any, bound: float) -> None:
    """Where everybody sends everything; a client of a single layer has that layer's mean for itself."""
    for one in uploads:
        one.sent = [True] * 3
    model = after(fedstrata.norm_bounding(bound=bound), as_cohort(uploads))
    assert float(torch.linalg.vector_norm(model[list(TRAINABLE)])) <= bound * (1 + 1e-12)


@settings(deadline=None, max_examples=50)
@given(rounds(masked=False), st.integers(0, 1))
def test_krum_gives_one_clients_model(uploads: Any, byzantine: int) -> None:
    """Its statistics as well."""
    found = after(fedstrata.krum(byzantine=byzantine), as_cohort(uploads, SEVEN))
    assert any(torch.equal(found, double(SEVEN) + double(one.update)) for one in uploads)


def test_one_liar_of_seven_does_nothing() -> None:
    """An update of 10⁹ moves the mean, and none of the others beyond what the honest ones sent."""
    honest = [[1.0 + 0.1 * k, -1.0 - 0.05 * k] for k in range(6)]
    for algorithm in ROBUST:
        for liar in ([1e9, 1e9], [-1e9, 1e9]):
            found = moved(algorithm, [*honest, liar])
            assert 0.7 <= found[0] <= 1.6, algorithm
            assert -1.4 <= found[1] <= -0.7, algorithm
    assert abs(moved(FEDAVG, [*honest, [1e9, 1e9]])[0]) > 1e8


def test_who_has_no_weight_is_in_no_median() -> None:
    """Multi-Krum keeps 1, 2 and 2½ of 1, 2, 2½, 9 and 9: their median is 2, that of all would be 2½."""
    algorithm = replace(fedstrata.median(), weighting=MultiKrum(byzantine=0, keep=3))
    assert moved(algorithm, [[1.0], [2.0], [2.5], [9.0], [9.5]]) == [2]
    assert moved(replace(algorithm, weighting=FedAdp()), [[1.0], [2.0], [2.5], [9.0], [9.5]]) == [2.5]


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [Krum(), MultiKrum()], ids=repr)
@pytest.mark.parametrize("selection", ["fedldf", "random_layers", "neuron_pruning"])
def test_krum_needs_whole_models(rule: Any, selection: str) -> None:
    name = {"Krum": "krum", "MultiKrum": "multi_krum"}[type(rule).__name__]
    with pytest.raises(RecipeError, match=r"algorithm\.weighting\.name = '(Multi)?Krum': needs whole models, and with"):
        fedstrata.named(name, selection={"name": selection})
    fedstrata.named(name, selection={"name": "random_clients"})


def test_krum_withstands_fewer_than_half() -> None:
    """2 f + 2 < K, told before the first round; a keep that is too large as well."""
    training = TRAINING.model_copy(update={"clients_per_round": 4})
    for algorithm, problem in (
        (fedstrata.krum(byzantine=1), r"algorithm\.weighting\.byzantine = 1: of 4 clients a round it withstands 0"),
        (fedstrata.multi_krum(keep=5), r"algorithm\.weighting\.keep = 5: must be at most the clients of a round, 4"),
    ):
        with pytest.raises(RecipeError, match=problem):
            run(TASK, algorithm, training)
    five = TRAINING.model_copy(update={"clients_per_round": 5, "rounds": 1})
    run(TASK, fedstrata.krum(byzantine=1), five)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: fedstrata.Krum(byzantine=-1), "byzantine must be at least 0"),
        (lambda: fedstrata.MultiKrum(keep=0), "keep must be at least 1"),
        (lambda: fedstrata.TrimmedMean(trim=0.5), "trim must be ≥ 0 and below 0.5"),
        (lambda: fedstrata.TrimmedMean(trim=float("nan")), "trim must be ≥ 0"),
        (lambda: fedstrata.NormBounding(bound=0.0), "bound must be > 0 and finite"),
    ],
)
def test_options_that_cannot_be(make: Any, problem: str) -> None:
    with pytest.raises(BadValue, match=problem):
        make()


def test_a_combination_goes_by_its_name() -> None:
    """As in the recipe's `combine = "median"`."""
    assert (
        fedstrata.load("quickstart", settings=["algorithm.combine=median"]).built_algorithm.combine
        == fedstrata.Median()
    )
    assert fedstrata.named("fedavg", combine="trimmed_mean").combine == fedstrata.TrimmedMean()
    with pytest.raises(RecipeError, match=r"algorithm\.combine\.name = 'mode': unknown"):
        fedstrata.named("fedavg", combine="mode")
