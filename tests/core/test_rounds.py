"""How a round goes on when clients fail, vanish, are slow or talk nonsense; and what local training does."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedstrata.core.axes import Algorithm
from fedstrata.core.checks import BadValue
from fedstrata.core.errors import RecipeError, RoundFailed
from fedstrata.core.messages import Order, Reply
from fedstrata.core.rounds import fit
from fedstrata.core.training import Training
from fedstrata.engines.local import LocalEngine
from fedstrata.objectives import Plain
from fedstrata.selections import FedLDF, NeuronPruning, RandomClients, RandomLayers
from fedstrata.tasks.task import Task
from fedstrata.weightings import FedAdp, SampleSize
from tests.support.math import FEDAVG, FaultyEngine, Tiny, fit_faulty, image_task, linear_task, poisoned, prepare, run

FOUR = linear_task([5, 6, 7, 8])
ONE_ROUND = Training(rounds=1, batch_size=4, lr=0.1)
LDF = Algorithm(Plain(), FedLDF(n=2), SampleSize())


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Watched:
    """Data that remembers how it was read."""

    def __init__(self, size: int, log: list[np.ndarray], fail: Exception | None = None) -> None:
        draw = torch.Generator().manual_seed(size)
        self.inputs = torch.randn(size, 3, generator=draw, dtype=torch.float64)
        self.targets = torch.randint(0, 2, (size,), generator=draw)
        self.log, self.fail = log, fail

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        if self.fail is not None:
            raise self.fail
        self.log.append(indices.copy())
        return self.inputs[torch.from_numpy(indices)], self.targets[torch.from_numpy(indices)]


def watched_task(*sizes: int) -> tuple[Task, list[list[np.ndarray]]]:
    logs: list[list[np.ndarray]] = [[] for _ in sizes]
    return Task(lambda: nn.Linear(3, 2), [Watched(n, log) for n, log in zip(sizes, logs, strict=True)]), logs


@pytest.fixture
def unrehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs of watched tasks have the orders' own batches only."""
    monkeypatch.setattr("fedstrata.clients.client.Client._rehearse", lambda self, order, data: None)


def only(client: int, change):
    """A fault of one client; everybody else's reply passes."""
    return lambda reply, order: change(reply) if order.client == client else reply


def without(client: int, sizes=(5, 6, 7, 8)) -> Task:
    """FOUR with one client's data taken away: what a round without it looks like."""
    empty = (torch.zeros(0, 3, dtype=torch.float64), torch.zeros(0, dtype=torch.int64))
    return replace(FOUR, clients=[empty if at == client else FOUR.clients[at] for at in range(len(sizes))])


# --- one client fails --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (lambda reply: None, "no reply"),
        (lambda reply: replace(reply, error="boom"), "failed: boom"),
        (lambda reply: poisoned(reply, float("nan")), "refused: update is not finite"),
        (lambda reply: poisoned(reply, float("inf")), "refused: update is not finite"),
        (lambda reply: replace(reply, round=9), "refused: round = 9, asked for 1"),
        (lambda reply: replace(reply, attempt=5), "refused: attempt = 5, asked for 0"),
        (lambda reply: replace(reply, size=0), "refused: size = 0, must be a positive number of samples"),
        (lambda reply: replace(reply, update=reply.update[:3]), "refused: update has shape [3], expected [8]"),
        (lambda reply: replace(reply, client=77), "no reply"),  # an answer from somebody nobody asked
    ],
    ids=["silent", "error", "nan", "inf", "old round", "other attempt", "no samples", "short", "stranger"],
)
def test_a_bad_client_costs_the_round_that_client_only(change, status: str) -> None:
    """The status says why; the model is bit for bit that of a round without client 2."""
    _, states, (record,) = fit_faulty(FOUR, FEDAVG, ONE_ROUND, only(2, change))
    assert record.status == ("ok", "ok", status, "ok")
    assert record.attempt == 0
    clean, _ = run(without(2), FEDAVG, ONE_ROUND)
    assert torch.equal(states[1].model, clean[1].model)
    for figure in ("angle", "weight", "divergence"):
        assert np.isnan(record.layers[figure]).any(1).tolist() == [False, False, True, False]
    assert (record.layers["mask"][2] == 0).all()
    np.testing.assert_array_equal(record.ledger.up, 3 * 8 * np.array([8]))
    np.testing.assert_array_equal(record.ledger.down, 4 * 8 * np.array([8]))


@pytest.mark.parametrize("error", [ValueError("bad\n  sample"), RuntimeError(), KeyError("x")], ids=str)
def test_a_client_whose_data_raises(error: Exception) -> None:
    """The engine turns it into a reply; type, text and place arrive on one line."""
    clients = [Watched(size, []) for size in (5, 6, 7)]
    clients[1].fail = error
    task = Task(lambda: nn.Linear(3, 2), clients)
    states, (record,) = run(task, FEDAVG, ONE_ROUND)
    text = " ".join(str(error).split())
    first, second, third = record.status
    assert (first, third) == ("ok", "ok")
    assert re.fullmatch(
        rf"failed: {type(error).__name__}{': ' + text if text else ''} \(test_rounds.py, line \d+\)", second
    )
    assert not torch.equal(states[1].model, states[0].model)
    assert np.isnan(record.losses).tolist() == [False, True, False]
    assert np.isfinite(record.train_loss)


def test_a_client_that_diverges_is_refused() -> None:
    """One client's inputs are of the order of 1e308: its update is not finite, the others' are."""
    inputs, targets = FOUR.clients[1]
    task = replace(FOUR, clients=[FOUR.clients[0], (inputs * 1e308, targets), FOUR.clients[2]])
    _, (record,) = run(task, FEDAVG, ONE_ROUND)
    assert record.status == ("ok", "refused: update is not finite", "ok")


def test_a_failed_client_keeps_its_angle() -> None:
    """FedAdp: no row in the cohort, so angle and count stay as they were."""
    algorithm = Algorithm(Plain(), FEDAVG.selection, FedAdp())
    training = Training(rounds=3, batch_size=4, lr=0.1)

    def silent_in_round_2(reply: Reply, order: Order) -> Reply | None:
        return None if (order.client, order.round) == (2, 2) else reply

    _, states, _ = fit_faulty(FOUR, algorithm, training, silent_in_round_2)
    assert [state.weighting["count"].tolist() for state in states] == [[0] * 4, [1] * 4, [2, 2, 1, 2], [3, 3, 2, 3]]
    angles = [state.weighting["smoothed_angle"][2].item() for state in states]
    assert angles[1] == angles[2] != angles[3]


def test_replies_may_come_in_any_order() -> None:
    class Backwards(FaultyEngine):
        def exchange(self, orders):
            return reversed(list(super().exchange(orders)))

    for algorithm in (FEDAVG, LDF, Algorithm(Plain(), FEDAVG.selection, FedAdp())):
        setup, plan, state = prepare(FOUR, algorithm, ONE_ROUND)
        ((after, record),) = fit(state, algorithm, Backwards(setup), plan)
        states, (expected,) = run(FOUR, algorithm, ONE_ROUND)
        assert torch.equal(after.model, states[1].model)
        np.testing.assert_array_equal(record.layers["weight"], expected.layers["weight"])


def test_numbers_in_units_that_were_not_sent_do_not_count() -> None:
    """A client says it sent some units and fills the others with 10⁶: refused, or without any effect on the angles."""
    algorithm = Algorithm(Plain(), NeuronPruning(share=0.4), FedAdp())
    task = image_task([6, 7, 8])

    def stuffed(reply: Reply, order: Order) -> Reply:
        if order.client != 1 or reply.update is None:
            return reply
        return replace(reply, update=torch.where(reply.update == 0, 1e6, reply.update))

    _, _, (record,) = fit_faulty(task, algorithm, ONE_ROUND, stuffed)
    if record.status[1] == "ok":
        _, (clean,) = run(task, algorithm, ONE_ROUND)
        np.testing.assert_allclose(record.layers["model_angle"], clean.layers["model_angle"], rtol=1e-9)


def test_a_second_reply_of_the_same_client_does_not_confuse_the_record() -> None:
    """A good reply, then a bad one: whichever counts, status and weight say the same."""

    class Twice(FaultyEngine):
        def exchange(self, orders):
            for reply in super().exchange(orders):
                yield reply
                if reply.client == 1:
                    yield replace(reply, size=0)

    setup, plan, state = prepare(FOUR, FEDAVG, ONE_ROUND)
    ((_, record),) = fit(state, FEDAVG, Twice(setup), plan)
    assert (record.status[1] == "ok") == bool(record.layers["mask"][1].any())


# --- the second exchange -----------------------------------------------------------------------------------------


def test_fedldf_goes_on_without_a_client_that_sends_no_scores() -> None:
    """n = 2 of the three that are left; the model is that of a round without client 2."""
    _, states, (record,) = fit_faulty(FOUR, LDF, ONE_ROUND, only(2, lambda reply: None))
    assert record.status[2] == "no reply"
    assert record.layers["mask"].sum() == 2
    clean, _ = run(without(2), LDF, ONE_ROUND)
    assert torch.equal(states[1].model, clean[1].model)


def test_fedldf_with_an_upload_that_never_comes() -> None:
    """Two are chosen and one of them fails to upload: the other's layer is adopted as it is."""
    _, (clean,) = run(FOUR, LDF, ONE_ROUND)
    winners = np.flatnonzero(clean.layers["mask"][:, 0])
    lost, kept = winners

    def change(reply: Reply, order: Order) -> Reply | None:
        return None if order.kind == "upload" and order.client == lost else reply

    engine, states, (record,) = fit_faulty(FOUR, LDF, ONE_ROUND, change)
    assert record.status[lost] == "no reply"
    assert record.status[kept] == "ok"
    assert [record.status[k] for k in range(4) if k not in winners] == ["ok, nothing chosen"] * 2
    assert record.layers["weight"][kept].tolist() == [1.0]
    alone = replace(FOUR, clients=[FOUR.clients[k] if k == kept else without(k).clients[k] for k in range(4)])
    expected, _ = run(alone, FEDAVG, ONE_ROUND)
    assert torch.equal(states[1].model, expected[1].model)
    assert [order.client for order in engine.orders if order.kind == "upload"] == winners.tolist()


def test_fedldf_upload_of_a_forgotten_update_is_an_error() -> None:
    """A client that restarted between the exchanges has nothing kept."""

    class Forgetful(FaultyEngine):
        def exchange(self, orders):
            self.client.kept.clear() if orders and orders[0].kind == "upload" else None
            return super().exchange(orders)

    setup, plan, state = prepare(FOUR, LDF, Training(rounds=1, attempts=1))
    with pytest.raises(RoundFailed, match="failed: LookupError: no update kept for round 1, attempt 0"):
        list(fit(state, LDF, Forgetful(setup), plan))


def test_nothing_is_kept_for_longer_than_a_round() -> None:
    """An update that was not chosen is of no use in the next round: at most K are kept, however many clients exist."""
    task = linear_task([5] * 30)
    training = Training(rounds=8, clients_per_round=4, batch_size=4)
    engine, _, _ = fit_faulty(task, Algorithm(Plain(), FedLDF(n=1), SampleSize()), training)
    assert {kept.round for kept in engine.client.kept.values()} <= {8}
    assert len(engine.client.kept) <= 4


# --- too few replies ---------------------------------------------------------------------------------------------


def test_too_few_replies_and_the_round_is_tried_again() -> None:
    """Half the replies are wanted; in attempt 0 one of four comes. Attempt 1 has other batches; its model counts.

    Both attempts' bytes are in the ledger: 8 models down, 1 + 4 up.
    """
    training = ONE_ROUND.model_copy(update={"min_replies": 0.5})

    def change(reply: Reply, order: Order) -> Reply | None:
        return None if order.attempt == 0 and order.client > 0 else reply

    engine, states, (record,) = fit_faulty(FOUR, FEDAVG, training, change)
    assert record.attempt == 1
    assert record.status == ("ok",) * 4
    assert [order.attempt for order in engine.orders] == [0] * 4 + [1] * 4
    clean, _ = run(FOUR, FEDAVG, training)
    assert not torch.equal(states[1].model, clean[1].model)
    torch.testing.assert_close(states[1].model, clean[1].model, rtol=0.5, atol=0.1)
    assert record.ledger.down.tolist() == [8 * 64]
    assert record.ledger.up.tolist() == [5 * 64]


def test_exactly_enough_replies_are_enough() -> None:
    training = ONE_ROUND.model_copy(update={"min_replies": 0.5})
    _, _, (record,) = fit_faulty(FOUR, FEDAVG, training, lambda reply, order: reply if order.client < 2 else None)
    assert record.attempt == 0
    assert record.status == ("ok", "ok", "no reply", "no reply")


def test_a_new_attempt_draws_new_clients() -> None:
    """2 of 12 clients a round: the attempts' clients are those that `sample` gives for each attempt."""
    task = linear_task([5] * 12)
    training = Training(rounds=1, clients_per_round=2, min_replies=1.0, attempts=4)
    engine, _, (record,) = fit_faulty(
        task, FEDAVG, training, lambda reply, order: reply if order.attempt == 3 else None
    )
    assert record.attempt == 3
    drawn = [training.sample(engine.sizes, 0, 1, attempt).tolist() for attempt in range(4)]
    assert [order.client for order in engine.orders] == [client for pair in drawn for client in pair]
    assert len({tuple(pair) for pair in drawn}) > 1


def test_a_new_attempt_draws_new_masks() -> None:
    """HDFL, 2 of 12, all of them sampled: whom the first attempt asked is not whom the next ones ask."""
    task = linear_task([5] * 12)
    training = Training(rounds=1, attempts=4)
    hdfl = Algorithm(Plain(), RandomClients(n=2), SampleSize())
    engine, _, _ = fit_faulty(task, hdfl, training, lambda reply, order: reply if order.attempt == 3 else None)
    asked = {t: [order.client for order in engine.orders if order.attempt == t] for t in range(4)}
    assert all(len(pair) == 2 for pair in asked.values())
    assert len({tuple(pair) for pair in asked.values()}) > 1


@pytest.mark.parametrize(
    "selection",
    [RandomLayers(n=2), FedLDF(n=1), NeuronPruning(share=0.4)],
    ids=lambda rule: type(rule).__name__,
)
def test_a_reply_holds_zeros_where_nothing_was_sent(selection: RandomLayers | FedLDF | NeuronPruning) -> None:
    """A client gives away nothing but the layers, or the rows, that go up."""
    task = image_task([6, 7, 8])
    seen: list[Reply] = []

    def watch(reply: Reply, order: Order) -> Reply:
        if reply.update is not None:
            seen.append(reply)
        return reply

    algorithm = Algorithm(Plain(), selection, SampleSize())
    setup, _, _ = prepare(task, algorithm, ONE_ROUND)
    fit_faulty(task, algorithm, ONE_ROUND, watch)
    assert seen
    for reply in seen:
        assert reply.sent is not None
        for layer, sent in zip(setup.layers.layers, reply.sent.tolist(), strict=True):
            for entry in layer.entries:
                rows = reply.update[entry.start : entry.stop].view(entry.units, -1)
                units = torch.full((entry.units,), sent)
                if reply.units is not None:
                    units = reply.units[entry.first_unit : entry.first_unit + entry.units]
                assert (rows[~units] == 0).all()
                if entry.name == "fc.weight":
                    assert (rows[units] != 0).all()


def test_a_round_that_fails_every_time_says_why() -> None:
    training = ONE_ROUND.model_copy(update={"attempts": 2, "min_replies": 0.75})
    with pytest.raises(RoundFailed) as caught:
        fit_faulty(FOUR, FEDAVG, training, lambda reply, order: reply if order.client < 2 else None)
    assert str(caught.value) == "round 1: 2 of 4 replies usable after 2 attempts; client 2: no reply"
    with pytest.raises(RoundFailed, match=r"0 of 4 replies usable after 3 attempts; client 0: failed: 0 is out"):
        fit_faulty(FOUR, FEDAVG, ONE_ROUND, lambda reply, order: replace(reply, error=f"{order.client} is out"))


def test_when_everyone_fails_alike_the_round_is_not_tried_again() -> None:
    with pytest.raises(RoundFailed, match=r"0 of 4 replies usable after 1 attempt; client 0: failed: out of memory"):
        fit_faulty(FOUR, FEDAVG, ONE_ROUND, lambda reply, order: replace(reply, error="out of memory"))


def test_without_a_single_reply_there_is_no_round() -> None:
    """min_replies = 0 still needs one."""
    with pytest.raises(RoundFailed, match="0 of 4"):
        fit_faulty(FOUR, FEDAVG, ONE_ROUND, lambda reply, order: None)


def test_who_was_not_selected_is_not_missed() -> None:
    """HDFL asks 2 of 4; both answer, so all that were asked did."""
    training = ONE_ROUND.model_copy(update={"min_replies": 1.0, "attempts": 1})
    _, _, (record,) = fit_faulty(FOUR, Algorithm(Plain(), RandomClients(n=2), SampleSize()), training)
    assert sorted(record.status) == ["not selected"] * 2 + ["ok"] * 2


def test_n_above_k_is_refused_before_anything_happens() -> None:
    with pytest.raises(RecipeError, match=r"algorithm\.selection\.n = 5"):
        run(FOUR, Algorithm(Plain(), FedLDF(n=5), SampleSize()), ONE_ROUND)
    with pytest.raises(RecipeError, match="at most the clients of a round, 3"):
        run(without(0), Algorithm(Plain(), FedLDF(n=4), SampleSize()), ONE_ROUND)


# --- dropouts and stragglers -------------------------------------------------------------------------------------


def test_dropouts_vanish_after_the_model_was_sent() -> None:
    """They get no order, their status says so, and the model went down to them all the same."""
    task = linear_task([5] * 20)
    training = Training(rounds=1, dropouts=0.4, lr=0.1)
    engine, _, (record,) = fit_faulty(task, FEDAVG, training)
    lost = [k for k in range(20) if training.drops_out(0, 1, 0, k)]
    assert 0 < len(lost) < 20
    assert [k for k, status in enumerate(record.status) if status == "dropped out"] == lost
    assert {order.client for order in engine.orders} == set(range(20)) - set(lost)
    assert record.ledger.down.tolist() == [20 * 64]
    assert record.ledger.up.tolist() == [(20 - len(lost)) * 64]


def test_dropouts_come_with_their_probability_and_anew_each_time() -> None:
    """0.3 of 4000 draws, ± 4 σ; another round, attempt or client is another draw."""
    training = Training(dropouts=0.3)
    drawn = np.array([[training.drops_out(0, t, 0, k) for k in range(40)] for t in range(100)])
    assert abs(drawn.mean() - 0.3) < 4 * (0.3 * 0.7 / 4000) ** 0.5
    assert len({row.tobytes() for row in drawn}) == 100
    again = np.array([training.drops_out(0, 1, 1, k) for k in range(40)])
    assert not np.array_equal(again, drawn[1])
    assert not any(Training().drops_out(0, t, 0, 0) for t in range(50))


@pytest.mark.usefixtures("unrehearsed")
def test_stragglers_do_part_of_the_work_and_count() -> None:
    """Half of four clients, E = 5, B = 4: each reads work · ⌈n/4⌉ batches, and the record says how much work."""
    task, logs = watched_task(5, 6, 7, 9)
    training = Training(rounds=1, epochs=5, batch_size=4, lr=0.1, stragglers=0.5)
    _, (record,) = run(task, FEDAVG, training, seed=4)
    slow = training.draw_stragglers(4, 4, 1, 0)
    assert len(slow) == 2
    assert all(1 <= work <= 5 for work in slow.values())
    assert min(slow.values()) < 5, "choose a seed in which somebody is slow"
    assert record.work.tolist() == [slow.get(k, 5) for k in range(4)]
    assert [len(log) for log in logs] == [slow.get(k, 5) * n for k, n in enumerate((2, 2, 2, 3))]
    assert record.status == ("ok",) * 4
    assert np.isfinite(record.layers["weight"]).all()


def test_stragglers_that_are_not_waited_for() -> None:
    """keep_stragglers = false: no order reaches them, the model went down, and nothing of theirs counts."""
    training = Training(rounds=1, epochs=5, batch_size=4, lr=0.1, stragglers=0.5, keep_stragglers=False)
    engine, _, (record,) = fit_faulty(FOUR, FEDAVG, training, seed=4)
    slow = training.draw_stragglers(4, 4, 1, 0)
    expected = tuple("straggler, not waited for" if k in slow else "ok" for k in range(4))
    assert record.status == expected
    assert {order.client for order in engine.orders} == set(range(4)) - set(slow)
    assert record.ledger.down.tolist() == [4 * 64]
    assert record.ledger.up.tolist() == [2 * 64]
    assert record.ledger.control == 4
    assert (record.layers["mask"].sum(1) > 0).tolist() == [k not in slow for k in range(4)]


@pytest.mark.parametrize(
    ("share", "clients", "slow"), [(0.5, 10, 5), (0.9, 10, 9), (0.5, 5, 3), (0.0, 10, 0), (1.0, 3, 3)]
)
def test_share_of_stragglers(share: float, clients: int, slow: int) -> None:
    assert len(Training(stragglers=share).draw_stragglers(clients, 0, 1, 0)) == slow


def test_stragglers_work_is_uniform_over_the_epochs() -> None:
    """[1, E] with E = 4, 4000 draws: each about a quarter (± 4 σ)."""
    training = Training(epochs=4, stragglers=1.0)
    work = np.array([list(training.draw_stragglers(10, 0, t, 0).values()) for t in range(400)]).ravel()
    counts = np.bincount(work, minlength=5)
    assert counts[0] == 0
    assert (abs(counts[1:] / 4000 - 0.25) < 4 * (0.25 * 0.75 / 4000) ** 0.5).all()


def test_nobody_left_is_refused() -> None:
    with pytest.raises((BadValue, ValueError), match="nobody would be left"):
        Training(stragglers=1.0, keep_stragglers=False)


# --- sampling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["uniform", "size"])
def test_sampling_frequencies(sampling: Any) -> None:
    """One client a round, sizes 1, 2, 3, 0, 4: probability ¼ each, or n/10; the empty one never (± 4 σ)."""
    sizes = np.array([1, 2, 3, 0, 4])
    training = Training(clients_per_round=1, sampling=sampling)
    drawn = np.bincount([int(training.sample(sizes, 1, t, 0)[0]) for t in range(4000)], minlength=5) / 4000
    expected = sizes / 10 if sampling == "size" else np.array([1, 1, 1, 0, 1]) / 4
    sigma = np.sqrt(expected * (1 - expected) / 4000)
    assert drawn[3] == 0
    assert (abs(drawn - expected) <= 4 * sigma).all()


@pytest.mark.parametrize("sampling", ["uniform", "size"])
def test_a_sample_is_sorted_without_repetition_and_without_empty_shards(sampling: Any) -> None:
    sizes = np.array([3, 0, 1, 50, 0, 2, 7])
    for t in range(100):
        clients = Training(clients_per_round=4, sampling=sampling).sample(sizes, 0, t, 0)
        assert len(clients) == 4
        assert (np.diff(clients) > 0).all()
        assert (sizes[clients] > 0).all()
    assert Training(clients_per_round=9).sample(sizes, 0, 1, 0).tolist() == [0, 2, 3, 5, 6], "all there are"
    assert Training().sample(sizes, 0, 1, 0).tolist() == [0, 2, 3, 5, 6]


def test_empty_shards_take_no_part_in_a_run() -> None:
    task = without(1)
    training = Training(rounds=6, clients_per_round=2, batch_size=4)
    _, records = run(task, FEDAVG, training)
    assert 1 not in {int(k) for record in records for k in record.clients}
    assert all(record.status == ("ok", "ok") for record in records)


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
        Training(optimizer="adam", momentum=0.9)


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


# --- fit ---------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_from_any_state() -> None:
    """Rounds 3 and 4 from the state after round 2 are those of the whole run, bit for bit, memory included."""
    algorithm = Algorithm(Plain(), FedLDF(n=2), FedAdp())
    training = Training(rounds=4, clients_per_round=3, batch_size=4, lr=0.1)
    whole, records = run(FOUR, algorithm, training)
    setup, plan, _ = prepare(FOUR, algorithm, training)
    with LocalEngine(setup, workers=1) as engine:
        rest = list(fit(whole[2], algorithm, engine, plan))
    assert [record.round for _, record in rest] == [3, 4]
    assert torch.equal(rest[-1][0].model, whole[4].model)
    assert torch.equal(rest[-1][0].weighting["smoothed_angle"], whole[4].weighting["smoothed_angle"])
    np.testing.assert_array_equal(rest[-1][1].clients, records[3].clients)


def test_states_are_not_changed_by_later_rounds() -> None:
    setup, plan, state = prepare(FOUR, FEDAVG, Training(rounds=2, lr=0.1))
    first = state.model.clone()
    with LocalEngine(setup, workers=1) as engine:
        rounds = fit(state, FEDAVG, engine, plan)
        after, _ = next(rounds)
        kept = after.model.clone()
        next(rounds)
    assert torch.equal(state.model, first)
    assert torch.equal(after.model, kept)


class Dropping(Tiny):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


def test_a_users_randomness_is_seeded_and_ours_does_not_leak() -> None:
    """A model with dropout: the same whatever the global generator's state, which is left as it was."""
    task = image_task([6, 7], Dropping)
    finals = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        states, _ = run(task, FEDAVG, Training(rounds=2, batch_size=4, lr=0.1))
        assert torch.equal(torch.get_rng_state(), before)
        finals.append(states[-1].model)
    assert torch.equal(*finals)


def test_integer_buffers_start_every_order_as_the_first_did() -> None:
    """BatchNorm(momentum=None) averages over num_batches_tracked: a second client must not see the first one's count.

    Two clients with the same data and batches in one go: same update.
    """

    class Cumulative(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm2d(3, momentum=None)

    task = image_task([8], Cumulative)
    task = replace(task, clients=[task.clients[0]] * 2)
    setup, plan, state = prepare(task, FEDAVG, Training(rounds=1, batch_size=100, lr=0.1))
    engine = FaultyEngine(setup)
    list(fit(state, FEDAVG, engine, plan))
    (first, second) = (engine.client.answer(order) for order in engine.orders)
    torch.testing.assert_close(first.update, second.update, rtol=1e-9, atol=1e-12)


def test_the_record_can_be_left_out() -> None:
    setup, plan, state = prepare(FOUR, FEDAVG, ONE_ROUND)
    with LocalEngine(setup, workers=1) as engine:
        ((after, record),) = fit(state, FEDAVG, engine, replace(plan, record=False))
    assert record.layers == {}
    states, _ = run(FOUR, FEDAVG, ONE_ROUND)
    assert torch.equal(after.model, states[1].model)
