"""What the server does with the aggregate: by hand, against a slow second implementation, and in its limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.core.axes import Algorithm, ServerStep
from fedstrata.core.errors import BadValue
from fedstrata.core.state import ServerState, conclude, initial_state
from fedstrata.recipes.schema import Training
from fedstrata.servers import SERVERS, FedAdagrad, FedAdam, FedAvgM, FedYogi
from fedstrata.servers._adaptive import Forgetting
from tests.support.math import cohort, double, image_task, run, vectors
from tests.support.server_side import LAYERS, NUMBERS, Stepping, as_cohort, rounds

ADAPTIVE = [FedAdagrad, FedAdam, FedYogi]
EVERY = [FedAvgM, *ADAPTIVE]
TASK = image_task([5, 12, 8, 9, 6])
TRAINING = Training(rounds=4, clients_per_round=4, epochs=2, batch_size=4, lr=0.1, momentum=0.9)


def final(server: ServerStep, **options: Any) -> torch.Tensor:
    states, _ = run(TASK, replace(Algorithm(), server=server), TRAINING, **options)
    return states[-1].model


def one_number(server: ServerStep, deltas: Sequence[float]) -> tuple[list[float], ServerState]:
    """The global model after each round, from 0, when a single client of a single number goes so far."""
    layers, algorithm = vectors(1), Algorithm(server=server)
    state, models = initial_state(double([0.0]), algorithm, 1, layers), []
    for at, delta in enumerate(deltas):
        state, _ = conclude(state, algorithm, cohort(layers, [[delta]], [1], model=state.model, round=at + 1))
        models.append(float(state.model))
    return models, state


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_fedavgm_by_hand() -> None:
    """β = ½, η = ½: v = 4, ½·4 + 2 = 4, ½·4 − 6 = −4; θ = 2, 4, 2."""
    models, state = one_number(FedAvgM(lr=0.5, beta=0.5), [4, 2, -6])
    assert models == [2, 4, 2]
    assert state.server["velocity"].tolist() == [-4]


def test_fedadagrad_by_hand() -> None:
    """τ = 3, η = 1: v = 9 + 4² = 25, 25 + 12² = 169; steps 4/(5 + 3) = ½ and 12/(13 + 3) = ¾."""
    models, state = one_number(FedAdagrad(lr=1.0, tau=3.0), [4, 12])
    assert models == [0.5, 1.25]
    assert state.server["v"].tolist() == [169]


def test_fedadam_by_hand() -> None:
    """τ = 1, η = 12, β₁ = β₂ = ½: m = 3½ and v = ½ + ½·49 = 25, then m = 1¾ + 2½ = 4¼ and v = 12½ + ½·25 = 25.

    Steps 12·3½/(5 + 1) = 7 and 12·4¼/6 = 8½. With a correction of m and v for their first rounds they would be others.
    """
    models, state = one_number(FedAdam(lr=12.0, beta1=0.5, tau=1.0, beta2=0.5), [7, 5])
    assert models == [7, 15.5]
    assert (state.server["m"].tolist(), state.server["v"].tolist()) == ([4.25], [25])


def test_fedyogi_by_hand() -> None:
    """τ = 1, η = 1, β₁ = β₂ = ½, Δ = 4, 3, 2.

    v = 1 + ½·16 = 9; then Δ² = v, and v stays; then 9 − ½·4 = 7. m = 2, 1 + 1½ = 2½, 1¼ + 1 = 2¼. Steps 2/(3 + 1) = ½,
    2½/4 = 0.625, 2¼/(√7 + 1).
    """
    models, state = one_number(FedYogi(lr=1.0, beta1=0.5, tau=1.0, beta2=0.5), [4, 3, 2])
    assert models[:2] == [0.5, 1.125]
    assert models[2] == pytest.approx(1.125 + 2.25 / (7**0.5 + 1), rel=1e-15)
    assert state.server["v"].tolist() == [7]


# --- against the slow one --------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, float]] = {
    "fedavgm": {"lr": 0.7, "beta": 0.6},
    "fedadagrad": {"lr": 0.3, "beta1": 0.2, "tau": 0.0123},
    "fedadam": {"lr": 0.3, "beta1": 0.8, "beta2": 0.95, "tau": 0.0123},
    "fedyogi": {"lr": 0.3, "beta1": 0.8, "beta2": 0.95, "tau": 0.0123},
}


@pytest.mark.parametrize("name", OPTIONS)
@settings(deadline=None, max_examples=60)
@given(st.lists(rounds(), min_size=1, max_size=4))
def test_every_step_is_the_slow_one(name: str, uploads: Any) -> None:
    """Any number of clients, any layers of theirs; numbers that nobody sent stay, and buffers follow the mean."""
    algorithm = Algorithm(server=SERVERS[name](**OPTIONS[name]))
    model = [0.5 * at - 1 for at in range(NUMBERS)]
    state, slow = initial_state(double(model), algorithm, 7, LAYERS), Stepping(name, OPTIONS[name])
    for at, one in enumerate(uploads):
        state, _ = conclude(state, algorithm, as_cohort(one, state.model.tolist(), round=at + 1))
        model = slow.step(model, one)
        assert state.model.tolist() == pytest.approx(model, rel=1e-9, abs=1e-9)


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_fedavgm_without_momentum_is_fedavg(dtype: torch.dtype) -> None:
    """Bit for bit."""
    assert torch.equal(final(FedAvgM(lr=1.0, beta=0.0), dtype=dtype), final(SERVERS["adopt"](), dtype=dtype))
    assert not torch.equal(final(FedAvgM(), dtype=dtype), final(SERVERS["adopt"](), dtype=dtype))


def huge_tau(rule: type, beta1: float) -> ServerStep:
    """√v stays τ where τ is huge and v does not forget, so that η = 2 τ makes the step m."""
    memory = {"beta2": 1 - 2**-53} if issubclass(rule, Forgetting) else {}
    step: ServerStep = rule(lr=2e8, beta1=beta1, tau=1e8, **memory)
    return step


@pytest.mark.parametrize("rule", ADAPTIVE)
def test_a_huge_tau_is_fedavg(rule: type) -> None:
    torch.testing.assert_close(final(huge_tau(rule, 0.0)), final(SERVERS["adopt"]()), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", ADAPTIVE)
def test_a_huge_tau_with_momentum_is_fedavgm(rule: type) -> None:
    """m is (1 − β₁) times FedAvgM's velocity."""
    torch.testing.assert_close(final(huge_tau(rule, 0.6)), final(FedAvgM(lr=0.4, beta=0.6)), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", ADAPTIVE)
def test_a_tiny_tau_goes_by_signs(rule: type) -> None:
    """In the first round, without memory: η Δ / √Δ²."""
    memory = {"beta2": 0.0} if issubclass(rule, Forgetting) else {}
    step = rule(lr=0.25, beta1=0.0, tau=1e-30, **memory)
    assert [one_number(step, [delta])[0][0] for delta in (3.0, -1e-6, 0.0)] == [0.25, -0.25, 0]


@pytest.mark.parametrize("rule", EVERY)
def test_statistics_and_what_nobody_sent(rule: type) -> None:
    """Client 0 sent a and b, nobody c. The buffer (number 3) is the clients' mean; c and its state are as before."""
    algorithm = Algorithm(server=rule())
    first = initial_state(double([0.0] * 7), algorithm, 2, LAYERS)
    before = {name: value + 0.25 for name, value in first.server.items()}
    sent = [[True, True, False], [False, True, False]]
    round = cohort(LAYERS, [[1, 2, 3, 4, 0, 0, 0], [0, 0, 5, 8, 0, 0, 0]], [1, 3], sent=sent)
    after, _ = conclude(replace(first, server=before), algorithm, round)
    assert after.model[3:].tolist() == [7, 0, 0, 0]
    assert (after.model[:3] != 0).all()
    for name, value in after.server.items():
        assert torch.equal(value[3:], before[name][3:])
        assert (value[:3] != before[name][:3]).all()


@pytest.mark.parametrize("rule", EVERY)
def test_what_goes_in_is_not_changed(rule: type) -> None:
    algorithm = Algorithm(server=rule())
    state = initial_state(double([1.0] * 7), algorithm, 1, LAYERS)
    known = {name: value.clone() for name, value in state.server.items()}
    conclude(state, algorithm, cohort(LAYERS, [[1.0] * 7], [1], model=state.model))
    assert all(torch.equal(value, known[name]) for name, value in state.server.items())
    assert torch.equal(state.model, torch.ones(7, dtype=torch.float64))


@pytest.mark.parametrize("rule", EVERY)
@pytest.mark.parametrize("lr", [0.0, -1.0, float("inf"), float("nan")])
def test_a_learning_rate_that_is_none(rule: type, lr: float) -> None:
    with pytest.raises(BadValue, match="lr must be > 0 and finite"):
        rule(lr=lr)


@pytest.mark.parametrize(
    ("rule", "option", "value"),
    [
        *((rule, "tau", value) for rule in ADAPTIVE for value in (0.0, -1.0, float("inf"))),
        *((rule, "beta1", value) for rule in ADAPTIVE for value in (-0.1, 1.0)),
        *((rule, "beta2", value) for rule in (FedAdam, FedYogi) for value in (-0.1, 1.0)),
        (FedAvgM, "beta", 1.0),
    ],
)
def test_options_that_cannot_be(rule: Any, option: str, value: float) -> None:
    with pytest.raises(BadValue, match=f"{option} must be"):
        rule(**{option: value})
