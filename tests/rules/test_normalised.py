"""FedNova, FedExP and IDA: by hand, against a slow second implementation, where they are FedAvg, and refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedstrata
from fedstrata.core.axes import Algorithm, Weighting
from fedstrata.core.cohort import Cohort
from fedstrata.core.errors import BadValue, RecipeError, RuleError
from fedstrata.core.state import conclude, initial_state
from fedstrata.recipes.schema import Training
from fedstrata.weightings import IDA, FedExP, FedNova
from tests.support.math import FEDAVG, cohort, image_task, run, vectors
from tests.support.server_side import COMBINED, LAYERS, NUMBERS, TRAINABLE, as_cohort, numbers, rounds

UNEQUAL, EQUAL = image_task([5, 12, 8, 9, 6]), image_task([7, 7, 7, 7, 7])
TRAINING = Training(rounds=3, clients_per_round=4, epochs=2, batch_size=4, lr=0.1, momentum=0.9)
BY_STEPS = TRAINING.model_copy(update={"steps": 5})


def moved(weighting: Weighting, round: Cohort) -> list[float]:
    """How far the global model goes, from 0."""
    algorithm = Algorithm(weighting=weighting)
    state = initial_state(torch.zeros_like(round.model), algorithm, len(round), round.layers)
    found: list[float] = conclude(state, algorithm, replace(round, model=state.model))[0].model.tolist()
    return found


def final(weighting: Weighting | None, task: Any = UNEQUAL, training: Training = TRAINING, **options: Any) -> Any:
    algorithm = FEDAVG if weighting is None else replace(FEDAVG, weighting=weighting)
    return run(task, algorithm, training, **options)[0][-1].model


@pytest.mark.parametrize(("name", "rule"), [("fednova", FedNova()), ("ida", IDA())])
@settings(deadline=None, max_examples=100)
@given(rounds())
def test_the_slow_one(name: str, rule: Weighting, uploads: Any) -> None:
    assert moved(rule, as_cohort(uploads)) == pytest.approx(COMBINED[name](uploads), rel=1e-6, abs=1e-6)


@settings(deadline=None, max_examples=100)
@given(rounds(), st.sampled_from([1e-3, 1.0]))
def test_fedexp_is_the_slow_one(uploads: Any, epsilon: float) -> None:
    expected = COMBINED["fedexp"](uploads, epsilon)
    assert moved(FedExP(epsilon), as_cohort(uploads)) == pytest.approx(expected, rel=1e-9, abs=1e-9)


# --- FedNova ---------------------------------------------------------------------------------------------------------


def test_fednova_by_hand() -> None:
    """n = 1 and 3, a = 2 and 4, Δ = 4 and 4: τ_eff = ¼·2 + ¾·4 = 3½, Σ p Δ/a = ¼·2 + ¾·1 = 1¼, in all 4.375.

    As weights these are ½ and ¾, so 0.4 and 0.6, with a gain of 3½ · (¼/2 + ¾/4) = 1.09375. FedAvg comes to 4.
    """
    round = cohort(vectors(1), [[4], [4]], [1, 3], reach=[2, 4])
    weights, _ = FedNova().weigh(round, {})
    assert (weights / weights.sum(0))[:, 0].tolist() == pytest.approx([0.4, 0.6])
    assert FedNova().gain(round).tolist() == [1.09375]
    assert moved(FedNova(), round) == pytest.approx([4.375])


def test_fednova_over_a_layers_senders() -> None:
    """The second layer comes from the second client alone, and goes as far as that client went."""
    sent = [[True, False], [True, True]]
    round = cohort(vectors(1, 1), [[4, 0], [4, 9]], [1, 3], reach=[2, 4], sent=sent)
    assert moved(FedNova(), round) == pytest.approx([4.375, 9])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_fednova_with_equal_steps_is_fedavg(dtype: torch.dtype) -> None:
    """Bit for bit: in a plan that counts steps, and where shards are equal."""
    assert torch.equal(final(FedNova(), training=BY_STEPS, dtype=dtype), final(None, training=BY_STEPS, dtype=dtype))
    assert torch.equal(final(FedNova(), EQUAL, dtype=dtype), final(None, EQUAL, dtype=dtype))
    assert not torch.equal(final(FedNova(), dtype=dtype), final(None, dtype=dtype))


@settings(deadline=None, max_examples=100)
@given(rounds(masked=False), st.lists(numbers, min_size=NUMBERS, max_size=NUMBERS))
def test_fednova_with_one_gradient_goes_as_far_as_the_mean_of_the_reaches(uploads: Any, gradient: Any) -> None:
    """Δ_k = −η a_k g with the same g: the global model goes −η g Σ p a, which is FedAvg's step."""
    for one in uploads:
        one.update = [-0.1 * one.reach * g for g in gradient]
    far = sum(one.size * one.reach for one in uploads) / sum(one.size for one in uploads)
    found = moved(FedNova(), as_cohort(uploads))
    assert [found[at] for at in TRAINABLE] == pytest.approx([-0.1 * far * gradient[at] for at in TRAINABLE], abs=1e-9)


def test_a_straggler_counts_as_much_as_its_data() -> None:
    """Each client's gradient is constant, as its loss is linear: FedNova moves along the mean gradient by data.

    Client 0 pulls down, client 1 up, and both hold four samples. One does four steps, the other one.
    """
    round = cohort(vectors(1), [[-4.0], [1.0]], [4, 4], reach=[4, 1])
    assert moved(FedNova(), round) == [0]
    assert moved(FEDAVG.weighting, round) == [-1.5]


def test_fednova_where_no_step_has_a_reach(recipe: Any) -> None:
    adam = TRAINING.model_copy(update={"optimizer": "adam", "momentum": 0.0})
    problem = "training.optimizer = 'adam': FedNova must know how far local steps reach: it takes SGD"
    with pytest.raises(RecipeError, match=problem):
        final(FedNova(), training=adam)
    with pytest.raises(RecipeError, match=problem):
        fedstrata.load(recipe({"algorithm.name": "fednova", "training.optimizer": "adam"}))
    with pytest.raises(RuleError, match="weighting FedNova needs the reach of local steps"):
        FedNova().weigh(cohort(vectors(1), [[1]], [1]), {})


def own_loop(reports: bool) -> Any:
    """SGD, by hand; it takes the order's batches, or others of which nobody knows."""

    def train(model: nn.Module, data: Any, local: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=local.lr, momentum=TRAINING.momentum)
        for x, y in local.batches() if reports else [data]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    return train


def test_fednova_with_a_training_loop_of_ones_own() -> None:
    """One that reports its steps is taken for SGD with the recipe's momentum; another one has no known reach."""
    found = final(FedNova(), replace(UNEQUAL, train=own_loop(reports=True)))
    torch.testing.assert_close(found, final(FedNova()), rtol=1e-9, atol=1e-9)
    with pytest.raises(RuleError, match="weighting FedNova needs the reach of local steps"):
        final(FedNova(), replace(UNEQUAL, train=own_loop(reports=False)))


def test_fednova_where_nobody_knows_the_steps() -> None:
    with pytest.raises(RecipeError, match=r"algorithm\.weighting = 'FedNova': needs to know each client's local steps"):
        fedstrata.Server(nn.Linear(2, 2), fedstrata.fednova())


# --- FedExP ----------------------------------------------------------------------------------------------------------


def test_fedexp_by_hand() -> None:
    """Three at right angles, Δ_k = 3 e_k: Σ p ‖Δ‖² = 9, ‖(1, 1, 1)‖² = 3, g = 9/(2·3) = 1½.

    In layers of one and two numbers the gain is the same for both. ε = 1½ makes it 9/(2·4½) = 1.
    """
    round = cohort(vectors(1, 2), [[3, 0, 0], [0, 3, 0], [0, 0, 3]], [1, 1, 1])
    assert moved(FedExP(epsilon=0.0), round) == pytest.approx([1.5, 1.5, 1.5])
    assert moved(FedExP(epsilon=1.5), round) == pytest.approx([1, 1, 1])


def test_fedexp_is_fedavg_where_clients_agree() -> None:
    """Then Σ p ‖Δ‖² is at most twice ‖mean‖²: bit for bit. One client is adopted."""
    near = cohort(vectors(2), [[1.0, 0.3], [0.7, 0.5], [0.9, -0.1]], [3, 4, 5])
    assert moved(FedExP(0.0), near) == moved(FEDAVG.weighting, near)
    alone = image_task([9])
    assert torch.equal(final(FedExP(0.0), alone), final(None, alone))
    assert not torch.equal(final(FedExP(0.0)), final(None))


def test_fedexp_of_updates_that_cancel() -> None:
    """The mean is 0, and stays 0 however large the gain is; without ε too, where none is defined."""
    round = cohort(vectors(1), [[2.0], [-2.0]], [1, 1])
    assert FedExP(epsilon=0.5).gain(round).tolist() == [4]
    assert moved(FedExP(epsilon=0.5), round) == [0]
    assert FedExP(epsilon=0.0).gain(round).tolist() == [1]
    with pytest.raises(BadValue, match="epsilon must be ≥ 0"):
        FedExP(epsilon=-1.0)


# --- IDA -------------------------------------------------------------------------------------------------------------


def test_ida_by_hand() -> None:
    """Δ = 0, 0, 3 with mean 1: distances 1, 1, 2, weights 1, 1, ½, and so ½·3 / 2½ = 0.6."""
    round = cohort(vectors(1), [[0], [0], [3]], [5, 5, 5])
    weights, _ = IDA().weigh(round, {})
    assert weights[:, 0].tolist() == [1, 1, 0.5]
    assert moved(IDA(), round) == pytest.approx([0.6])


def test_ida_with_partial_uploads_by_hand() -> None:
    """Layers of one and four numbers; clients 0 and 1 send both, client 2 only the first.

    Means: ⅓(0 + 3 + 3) = 2, and ½(2 + 0) = 1 four times. d² = (4 + 4·1)/5 = 1.6, (1 + 4·1)/5 = 1 and 1/1 = 1: weights
    1/√1.6, 1, 1. By sums instead of means client 2 would be as near as 1, to client 1's √5.
    """
    rows = [[0, 2, 2, 2, 2], [3, 0, 0, 0, 0], [3, 0, 0, 0, 0]]
    round = cohort(vectors(1, 4), rows, [1, 1, 1], sent=[[True, True], [True, True], [True, False]])
    weights, _ = IDA().weigh(round, {})
    assert weights[:, 0].tolist() == pytest.approx([1.6**-0.5, 1, 1])


@pytest.mark.parametrize("update", [[2.0, -1.0, 0.3], [0.0, 0.0, 0.0], [1e-30, 0.0, 0.0]], ids=str)
def test_ida_of_identical_updates_is_their_mean(update: list[float]) -> None:
    """No distance is a weight of ∞, and rounding tells nobody apart."""
    round = cohort(vectors(1, 2), [update] * 3, [1, 2, 4])
    weights, _ = IDA().weigh(round, {})
    assert (weights == 1).all()
    assert moved(IDA(), round) == pytest.approx(update)


def test_ida_counts_an_outlier_less_than_fedavg() -> None:
    rows = [[1.0, 0.0], [1.1, 0.1], [0.9, -0.1], [50.0, 50.0]]
    near, far = (
        moved(IDA(), cohort(vectors(2), rows, [1] * 4)),
        moved(FEDAVG.weighting, cohort(vectors(2), rows, [1] * 4)),
    )
    assert near[0] < far[0] * 0.7


# --- where they cannot be --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [FedNova(), FedExP(), IDA()], ids=repr)
def test_single_units_are_refused_and_layers_are_not(rule: Weighting) -> None:
    Algorithm(weighting=rule, selection=fedstrata.FedLDF())
    with pytest.raises(BadValue, match="needs whole layers, and with NeuronPruning clients send single units"):
        Algorithm(weighting=rule, selection=fedstrata.NeuronPruning())


@pytest.mark.parametrize("rule", [FedNova(), FedExP()], ids=repr)
def test_a_gain_needs_a_mean(rule: Weighting) -> None:
    with pytest.raises(BadValue, match="weighting stretches the mean, which Median takes the place of"):
        Algorithm(weighting=rule, combine=fedstrata.Median())
    with pytest.raises(RecipeError, match=r"algorithm\.weighting\.name = 'Fed"):
        fedstrata.named("median", weighting={"name": {"FedNova": "fednova", "FedExP": "fedexp"}[type(rule).__name__]})


def test_statistics_follow_the_mean() -> None:
    """The buffer, number 3, is averaged as it is: no gain; FedExP's is 9/(2·3) for everything else."""
    rows = [[3, 0, 0, 6, 0, 0, 0], [0, 3, 0, 0, 0, 0, 0], [0, 0, 3, 0, 0, 0, 0]]
    assert moved(FedExP(0.0), cohort(LAYERS, rows, [1, 1, 1])) == pytest.approx([1.5, 1.5, 1.5, 2, 0, 0, 0])
