"""Who takes part in a round, and what local training does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedstrata.core.errors import BadValue
from fedstrata.core.training import LocalTraining, Participation
from fedstrata.recipes.schema import Training
from fedstrata.tasks.task import Task
from tests.support.math import (
    FEDAVG,
    FOUR,
    double,
    fit_faulty,
    linear_task,
    run,
    watched_task,
    without,
    words,
)


@pytest.fixture
def unrehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs of watched tasks have the orders' own batches only."""
    monkeypatch.setattr("fedstrata.clients.client.Client._rehearse", lambda self, order, data: None)


def test_dropouts_vanish_after_the_model_was_sent() -> None:
    """They get no order, their status says so, and the model went down to them all the same."""
    task = linear_task([5] * 20)
    training = Training(rounds=1, dropouts=0.4, lr=0.1)
    engine, _, (record,) = fit_faulty(task, FEDAVG, training)
    lost = [k for k in range(20) if training.participation.drops_out(0, 1, 0, k)]
    assert 0 < len(lost) < 20
    assert [k for k, status in enumerate(words(record)) if status == "dropped out"] == lost
    assert {order.client for order in engine.orders} == set(range(20)) - set(lost)
    assert record.ledger.down.tolist() == [20 * 64]
    assert record.ledger.up.tolist() == [(20 - len(lost)) * 64]


def test_dropouts_come_with_their_probability_and_anew_each_time() -> None:
    """0.3 of 4000 draws, ± 4 σ; another round, attempt or client is another draw."""
    part = Participation(dropouts=0.3)
    drawn = np.array([[part.drops_out(0, t, 0, k) for k in range(40)] for t in range(100)])
    assert abs(drawn.mean() - 0.3) < 4 * (0.3 * 0.7 / 4000) ** 0.5
    assert len({row.tobytes() for row in drawn}) == 100
    again = np.array([part.drops_out(0, 1, 1, k) for k in range(40)])
    assert not np.array_equal(again, drawn[1])
    assert not any(Participation().drops_out(0, t, 0, 0) for t in range(50))


@pytest.mark.usefixtures("unrehearsed")
def test_stragglers_do_part_of_the_work_and_count() -> None:
    """Half of four clients, E = 5, B = 4: each reads work · ⌈n/4⌉ batches, and the record says how much work."""
    task, logs = watched_task(5, 6, 7, 9)
    training = Training(rounds=1, epochs=5, batch_size=4, lr=0.1, stragglers=0.5)
    _, (record,) = run(task, FEDAVG, training, seed=4)
    slow = training.participation.draw_stragglers(4, 4, 1, 0, full_work=5)
    assert len(slow) == 2
    assert all(1 <= work <= 5 for work in slow.values())
    assert min(slow.values()) < 5, "choose a seed in which somebody is slow"
    assert record.work.tolist() == [slow.get(k, 5) for k in range(4)]
    assert [len(log) for log in logs] == [slow.get(k, 5) * n for k, n in enumerate((2, 2, 2, 3))]
    assert words(record) == ("ok",) * 4
    assert np.isfinite(record.layers["weight"]).all()


def test_stragglers_that_are_not_waited_for() -> None:
    """keep_stragglers = false: no order reaches them, the model went down, and nothing of theirs counts."""
    training = Training(rounds=1, epochs=5, batch_size=4, lr=0.1, stragglers=0.5, keep_stragglers=False)
    engine, _, (record,) = fit_faulty(FOUR, FEDAVG, training, seed=4)
    slow = training.participation.draw_stragglers(4, 4, 1, 0, full_work=5)
    expected = tuple("straggler dropped" if k in slow else "ok" for k in range(4))
    assert words(record) == expected
    assert {order.client for order in engine.orders} == set(range(4)) - set(slow)
    assert record.ledger.down.tolist() == [4 * 64]
    assert record.ledger.up.tolist() == [2 * 64]
    assert record.ledger.control == 4
    assert (record.layers["mask"].sum(1) > 0).tolist() == [k not in slow for k in range(4)]


@pytest.mark.parametrize(
    ("share", "clients", "slow"), [(0.5, 10, 5), (0.9, 10, 9), (0.5, 5, 3), (0.0, 10, 0), (1.0, 3, 3)]
)
def test_share_of_stragglers(share: float, clients: int, slow: int) -> None:
    assert len(Participation(stragglers=share).draw_stragglers(clients, 0, 1, 0, full_work=1)) == slow


def test_stragglers_work_is_uniform_over_the_epochs() -> None:
    """[1, E] with E = 4, 4000 draws: each about a quarter (± 4 σ)."""
    part = Participation(stragglers=1.0)
    work = np.array([list(part.draw_stragglers(10, 0, t, 0, full_work=4).values()) for t in range(400)]).ravel()
    counts = np.bincount(work, minlength=5)
    assert counts[0] == 0
    assert (abs(counts[1:] / 4000 - 0.25) < 4 * (0.25 * 0.75 / 4000) ** 0.5).all()


def test_nobody_left_is_refused() -> None:
    with pytest.raises(BadValue, match="nobody would be left"):
        Participation(stragglers=1.0, keep_stragglers=False)


# --- sampling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["uniform", "size"])
def test_sampling_frequencies(sampling: Any) -> None:
    """One client a round, sizes 1, 2, 3, 0, 4: probability ¼ each, or n/10; the empty one never (± 4 σ)."""
    sizes = np.array([1, 2, 3, 0, 4])
    part = Participation(clients_per_round=1, sampling=sampling)
    drawn = np.bincount([int(part.sample(sizes, 1, t, 0)[0]) for t in range(4000)], minlength=5) / 4000
    expected = sizes / 10 if sampling == "size" else np.array([1, 1, 1, 0, 1]) / 4
    sigma = np.sqrt(expected * (1 - expected) / 4000)
    assert drawn[3] == 0
    assert (abs(drawn - expected) <= 4 * sigma).all()


@pytest.mark.parametrize("sampling", ["uniform", "size"])
def test_a_sample_is_sorted_without_repetition_and_without_empty_shards(sampling: Any) -> None:
    sizes = np.array([3, 0, 1, 50, 0, 2, 7])
    for t in range(100):
        clients = Participation(clients_per_round=4, sampling=sampling).sample(sizes, 0, t, 0)
        assert len(clients) == 4
        assert (np.diff(clients) > 0).all()
        assert (sizes[clients] > 0).all()
    assert Participation(clients_per_round=9).sample(sizes, 0, 1, 0).tolist() == [0, 2, 3, 5, 6], "all there are"
    assert Participation().sample(sizes, 0, 1, 0).tolist() == [0, 2, 3, 5, 6]


def test_empty_shards_take_no_part_in_a_run() -> None:
    task = without(1)
    training = Training(rounds=6, clients_per_round=2, batch_size=4)
    _, records = run(task, FEDAVG, training)
    assert 1 not in {int(k) for record in records for k in record.clients}
    assert all(words(record) == ("ok", "ok") for record in records)


# --- local training ----------------------------------------------------------------------------------------------


class One(nn.Module):
    """A single number w, trained towards the targets: ½ (w − y)²."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x))


def train_one(**training: Any) -> list[float]:
    """The number after each round: one client with one sample, y = 1."""
    task = Task(One, [(double([[0.0]]), double([1.0]))], loss=lambda w, y: (w - y).square().mean() / 2)
    states, _ = run(task, FEDAVG, Training(**training))
    return [state.model.item() for state in states]


def test_learning_rate_decay() -> None:
    """η = 0.1, factor ½ a round: 0 + 0.1·1 = 0.1; + 0.05·0.9 = 0.145; + 0.025·0.855 = 0.166375."""
    assert train_one(rounds=3, lr=0.1, lr_decay=0.5) == pytest.approx([0, 0.1, 0.145, 0.166375], abs=1e-15)


def test_momentum_starts_fresh_every_round() -> None:
    """Two steps a round at η = 0.1, momentum 0.9. Round 1: 0.1, then v = 0.9 + 0.9 = 1.8 → 0.28.

    Round 2, fresh: 0.72·0.1 → 0.352, then v = 0.9·0.72 + 0.648 = 1.296 → 0.4816. With old momentum it would be further.
    """
    assert train_one(rounds=2, epochs=2, lr=0.1, momentum=0.9) == pytest.approx([0, 0.28, 0.4816], abs=1e-15)


def test_adam_starts_fresh_every_round() -> None:
    """Adam's first step is η · g/|g|, whatever the gradient: 0.1 in each round. A second step in a round is not.

    Two steps: m = (0.1·1)·0.9 + 0.1·0.9 = 0.18, m̂ = 0.18/0.19; v = 0.001·0.999 + 0.001·0.81, v̂ = v/0.001999.
    """
    assert train_one(rounds=3, optimizer="adam", lr=0.1) == pytest.approx([0, 0.1, 0.2, 0.3], abs=1e-7)
    second = 0.1 * (0.18 / 0.19) / ((0.000999 + 0.00081) / 0.001999) ** 0.5
    assert train_one(rounds=1, epochs=2, optimizer="adam", lr=0.1)[1] == pytest.approx(0.1 + second, abs=1e-7)


def test_weight_decay() -> None:
    """g = (0 − 1) + 0.5·0, then (0.1 − 1) + 0.5·0.1 = −0.85: 0.1, 0.185."""
    assert train_one(rounds=2, lr=0.1, weight_decay=0.5) == pytest.approx([0, 0.1, 0.185], abs=1e-15)


def test_adam_has_no_momentum_option() -> None:
    with pytest.raises(ValueError, match="is SGD's"):
        LocalTraining(optimizer="adam", momentum=0.9)


@pytest.mark.usefixtures("unrehearsed")
def test_the_last_short_batch_is_kept_and_an_epoch_sees_every_sample_once() -> None:
    task, (log,) = watched_task(7)
    run(task, FEDAVG, Training(rounds=1, epochs=3, batch_size=3))
    assert [len(batch) for batch in log] == [3, 3, 1] * 3
    epochs = [np.concatenate(log[i : i + 3]) for i in (0, 3, 6)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(7))
    assert len({epoch.tobytes() for epoch in epochs}) == 3, "each epoch has its own order"


@pytest.mark.usefixtures("unrehearsed")
def test_a_batch_larger_than_the_shard_is_the_shard() -> None:
    task, (log,) = watched_task(4)
    run(task, FEDAVG, Training(rounds=1, epochs=2, batch_size=100))
    assert [len(batch) for batch in log] == [4, 4]


@pytest.mark.usefixtures("unrehearsed")
def test_steps_instead_of_epochs() -> None:
    """Five samples, B = 2: an epoch is 2, 2, 1; seven steps go into the third epoch."""
    task, (log,) = watched_task(5)
    _, (record,) = run(task, FEDAVG, Training(rounds=1, steps=7, batch_size=2, epochs=99))
    assert [len(batch) for batch in log] == [2, 2, 1, 2, 2, 1, 2]
    assert record.work.tolist() == [7]


def test_batches_differ_by_client_and_round() -> None:
    task, logs = watched_task(6, 6)
    run(task, FEDAVG, Training(rounds=2, batch_size=6))
    orders = {batch.tobytes() for log in logs for batch in log}
    assert len(orders) == 4


def test_the_recorded_loss_is_the_mean_over_samples() -> None:
    """w = 0, targets 1, 1, 3, one sample a step, a learning rate that moves nothing: (½ + ½ + 4½)/3."""
    data = (torch.zeros(3, 1, dtype=torch.float64), double([1.0, 1.0, 3.0]))
    task = Task(One, [data, data], loss=lambda w, y: (w - y).square().mean() / 2)
    _, (record,) = run(task, FEDAVG, Training(rounds=1, batch_size=2, lr=1e-12))
    np.testing.assert_allclose(record.losses, 5.5 / 3, rtol=1e-9)
    assert record.train_loss == pytest.approx(5.5 / 3)
