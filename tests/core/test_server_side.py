"""What the server's side sees of a round: local steps and their reach, sums over clients, gains, steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedstrata.core.axes import Algorithm, SampleSize, ServerStep, State
from fedstrata.core.cohort import Cohort
from fedstrata.core.errors import RuleError
from fedstrata.core.layers import Layers
from fedstrata.core.state import conclude, initial_state
from fedstrata.core.training import LocalTraining
from fedstrata.recipes.schema import Training
from tests.support.math import cohort, image_task, run

LAYERS = Layers.of_shapes({"a.weight": (2, 1), "b.weight": (1,), "b.running_mean": (1,)}, "module", dtype=torch.float64)
"""a: numbers 0 and 1, a unit each; b: number 2, and the buffer 3."""


def test_reach_is_the_sum_of_what_momentum_keeps() -> None:
    """β = ½, three steps: v = 1, 1½, 1¾, in all 4¼. Without momentum a step is a step."""
    assert LocalTraining(momentum=0.5).reach(3) == pytest.approx(4.25)
    assert LocalTraining().reach(3) == 3
    assert LocalTraining(optimizer="adam").reach(3) is None


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 17])
def test_reach_is_how_far_a_constant_gradient_goes(steps: int, momentum: float) -> None:
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=momentum)
    for _ in range(steps):
        weight.grad = torch.ones(1, dtype=torch.float64)
        optimizer.step()
    assert float(-weight.detach() / 0.1) == pytest.approx(LocalTraining(momentum=momentum).reach(steps))


def test_local_steps() -> None:
    """Seven samples in batches of three are three steps an epoch; a plan in steps is one."""
    assert LocalTraining(batch_size=3).local_steps(7, work=2) == 6
    assert LocalTraining(batch_size=30).local_steps(7, work=2) == 2
    assert LocalTraining(batch_size=3, steps=5).local_steps(7, work=4) == 4


def test_sums_over_clients() -> None:
    """Two clients; the second sent only a. Factors 1 and 2 for a, 3 and 4 for b; the buffer is left out."""
    found = cohort(LAYERS, [[1, 2, 3, 4], [10, 20, 0, 0]], [1, 1], sent=[[True, True], [True, False]])
    factors = torch.tensor([[1.0, 3.0], [2.0, 4.0]], dtype=torch.float64)
    assert found.sum(factors).tolist() == [21, 42, 9, 0]
    assert found.mass(factors).tolist() == [3, 3, 3, 0]


def test_sums_over_units() -> None:
    """The first client sent a's first unit, the second its second, and b."""
    units = torch.tensor([[True, False, False], [False, True, True]])
    found = cohort(LAYERS, [[1, 0, 0, 0], [0, 20, 30, 7]], [1, 1], sent=[[True, False], [True, True]], units=units)
    ones = torch.ones(2, 2, dtype=torch.float64)
    assert found.mass(ones).tolist() == [1, 1, 1, 0]
    assert found.sum(2 * ones).tolist() == [2, 40, 60, 0]


@dataclass(frozen=True)
class Far(SampleSize):
    gains: tuple[float, ...] = (3.0, 0.5)

    def gain(self, cohort: Cohort) -> Tensor:
        return torch.tensor(self.gains, dtype=torch.float64)


def concluded(algorithm: Algorithm, round: Cohort) -> Tensor:
    state = initial_state(round.model, algorithm, 2, round.layers)
    return conclude(state, algorithm, round)[0].model


def test_a_gain_stretches_parameters_and_no_buffer() -> None:
    """The mean of the updates is (2, 4, 6, 8); a goes three times as far, b half, its buffer is averaged."""
    model = torch.tensor([1.0, 1, 1, 1], dtype=torch.float64)
    round = cohort(LAYERS, [[1, 2, 3, 4], [3, 6, 9, 12]], [1, 1], model=model)
    assert concluded(Algorithm(weighting=Far()), round).tolist() == [7, 13, 4, 9]
    plain = concluded(Algorithm(), round)
    assert torch.equal(concluded(Algorithm(weighting=Far((1.0, 1.0))), round), plain)


@pytest.mark.parametrize("gains", [(1.0,), (1.0, -1.0), (1.0, float("nan"))], ids=str)
def test_a_gain_that_is_none(gains: tuple[float, ...]) -> None:
    round = cohort(LAYERS, [[1, 2, 3, 4]], [1])
    with pytest.raises(RuleError, match="weighting Far gave a gain of"):
        concluded(Algorithm(weighting=Far(gains)), round)


@dataclass(frozen=True)
class Looks(ServerStep):
    """Writes down what it sees."""

    def init(self, layers: Layers) -> State:
        return {"steps": torch.zeros(6), "reach": torch.zeros(6), "lr": torch.zeros(1), "population": torch.zeros(1)}

    def step(self, old: Tensor, aggregate: Tensor, state: State, cohort: Cohort) -> tuple[Tensor, State]:
        assert cohort.steps is not None
        assert cohort.reach is not None
        steps, reach = torch.zeros(6), torch.zeros(6)
        steps[cohort.clients], reach[cohort.clients] = cohort.steps.float(), cohort.reach.float()
        return aggregate, {
            "steps": steps,
            "reach": reach,
            "lr": torch.tensor([cohort.lr]),
            "population": torch.tensor([cohort.population]),
        }


def test_a_server_step_sees_local_steps() -> None:
    """Shards of 5, 0, 8, 12, 3 and 9 samples, batches of 4, half of the round's clients stragglers in epochs."""
    sizes = [5, 0, 8, 12, 3, 9]
    training = Training(
        rounds=2, clients_per_round=3, epochs=3, batch_size=4, lr=0.1, lr_decay=0.5, momentum=0.5, stragglers=0.5
    )
    states, records = run(image_task(sizes), replace(Algorithm(), server=Looks()), training, seed=3)
    known: Any = states[-1].server
    record = records[-1]
    by_hand = np.zeros(6)
    for client, epochs in zip(record.clients, record.work, strict=True):
        by_hand[client] = epochs * -(-sizes[client] // 4)
    np.testing.assert_array_equal(known["steps"], by_hand)
    assert len(set(record.work.tolist())) > 1, "there are stragglers"
    expected = [sum(2 - 0.5 ** (s - 1) for s in range(1, int(count) + 1)) for count in by_hand]
    np.testing.assert_allclose(known["reach"], expected, rtol=1e-6)
    assert float(known["lr"]) == pytest.approx(0.05)
    assert int(known["population"]) == 5
