"""How a round goes on when clients fail, vanish, are slow or talk nonsense; and what local training does."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedstrata.core.axes import Algorithm
from fedstrata.core.errors import RecipeError
from fedstrata.core.fit import fit
from fedstrata.core.messages import Answer, Order, Reply
from fedstrata.core.record import RoundFailed
from fedstrata.core.round import Participants, Round, Terms, play
from fedstrata.core.status import Status
from fedstrata.engines.local import LocalEngine
from fedstrata.objectives import Plain
from fedstrata.recipes.schema import Training
from fedstrata.selections import FedLDF, NeuronPruning, RandomClients, RandomLayers
from fedstrata.tasks.task import Task
from fedstrata.weightings import FedAdp, SampleSize
from tests.support.math import (
    FEDAVG,
    FOUR,
    FaultyEngine,
    Tiny,
    Watched,
    fit_faulty,
    image_task,
    linear_task,
    poisoned,
    prepare,
    run,
    without,
    words,
)

ONE_ROUND = Training(rounds=1, batch_size=4, lr=0.1)
LDF = Algorithm(Plain(), FedLDF(n=2), SampleSize())


def only(client: int, change):
    """A fault of one client; everybody else's reply passes."""
    return lambda reply, order: change(reply) if order.client == client else reply


# --- one client fails --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (lambda reply: None, "no reply"),
        (lambda reply: Status("failed", "boom"), "failed: boom"),
        (lambda reply: poisoned(reply, float("nan")), "not finite: update"),
        (lambda reply: poisoned(reply, float("inf")), "not finite: update"),
        (lambda reply: replace(reply, size=0), "refused: size = 0, must be a positive number of samples"),
        (lambda reply: replace(reply, update=reply.update[:3]), "refused: update has shape [3], expected [8]"),
    ],
    ids=["silent", "error", "nan", "inf", "no samples", "short"],
)
def test_a_bad_client_costs_the_round_that_client_only(change, status: str) -> None:
    """The status says why; the model is bit for bit that of a round without client 2."""
    _, states, (record,) = fit_faulty(FOUR, FEDAVG, ONE_ROUND, only(2, change))
    assert words(record) == ("ok", "ok", status, "ok")
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
    first, second, third = words(record)
    assert (first, third) == ("ok", "ok")
    assert re.fullmatch(rf"failed: {type(error).__name__}{': ' + text if text else ''} \(math.py, line \d+\)", second)
    assert not torch.equal(states[1].model, states[0].model)
    assert np.isnan(record.losses).tolist() == [False, True, False]
    assert np.isfinite(record.train_loss)


def test_a_client_that_diverges_is_refused() -> None:
    """One client's inputs are of the order of 1e308: its update is not finite, the others' are."""
    inputs, targets = FOUR.clients[1]
    task = replace(FOUR, clients=[FOUR.clients[0], (inputs * 1e308, targets), FOUR.clients[2]])
    _, (record,) = run(task, FEDAVG, ONE_ROUND)
    assert words(record) == ("ok", "not finite: update", "ok")


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
    if words(record)[1] == "ok":
        _, (clean,) = run(task, algorithm, ONE_ROUND)
        np.testing.assert_allclose(record.layers["model_angle"], clean.layers["model_angle"], rtol=1e-9)


def test_a_second_reply_of_the_same_client_does_not_confuse_the_record() -> None:
    """A good reply, then a bad one: whichever counts, status and weight say the same."""

    class Twice(FaultyEngine):
        def exchange(self, orders):
            for order, reply in super().exchange(orders):
                yield order, reply
                if order.client == 1:
                    assert isinstance(reply, Reply)
                    yield order, replace(reply, size=0)

    setup, plan, state = prepare(FOUR, FEDAVG, ONE_ROUND)
    ((_, record),) = fit(state, FEDAVG, Twice(setup), plan)
    assert (words(record)[1] == "ok") == bool(record.layers["mask"][1].any())


class Confused(FaultyEngine):
    """What client 2 answers comes as the answer to other orders: to a client nobody asked, and to a copy of its own."""

    def exchange(self, orders: Sequence[Order]) -> Iterator[tuple[Order, Answer]]:
        for order, answer in super().exchange(orders):
            if order.client == 2:
                yield replace(order, client=77), answer
                yield replace(order), answer
            else:
                yield order, answer


def test_answers_to_orders_that_nobody_gave_change_nothing() -> None:
    setup, plan, state = prepare(FOUR, FEDAVG, ONE_ROUND)
    ((after, record),) = fit(state, FEDAVG, Confused(setup), plan)
    assert words(record) == ("ok", "ok", "no reply", "ok")
    clean, _ = run(without(2), FEDAVG, ONE_ROUND)
    assert torch.equal(after.model, clean[1].model)
    assert record.ledger.up.tolist() == [3 * 64]


class Late(FaultyEngine):
    """What client 2 answers in one exchange comes at the beginning of the next one."""

    def exchange(self, orders: Sequence[Order]) -> Iterator[tuple[Order, Answer]]:
        late = getattr(self, "late", [])
        yield from late
        self.late = [(order, self.client.answer(order)) for order in orders if order.client == 2]
        if late:  # and now in time
            yield from self.late
        yield from super().exchange([order for order in orders if order.client != 2])


def test_an_answer_that_comes_after_its_exchange_counts_no_more() -> None:
    """All four are wanted: the second attempt is as if the late answer to the first had never come."""
    training = ONE_ROUND.model_copy(update={"min_replies": 1.0})

    def lost_at_first(reply: Reply, order: Order) -> Reply | None:
        return None if (order.client, order.attempt) == (2, 0) else reply

    setup, plan, state = prepare(FOUR, FEDAVG, training)
    ((after, record),) = fit(state, FEDAVG, Late(setup), plan)
    _, states, (expected,) = fit_faulty(FOUR, FEDAVG, training, lost_at_first)
    assert torch.equal(after.model, states[1].model)
    assert record.attempt == 1
    assert record.earlier == ((0, 2, Status("no reply")),)
    assert record.ledger.up.tolist() == expected.ledger.up.tolist() == [7 * 64]


# --- the second exchange -----------------------------------------------------------------------------------------


def test_fedldf_goes_on_without_a_client_that_sends_no_scores() -> None:
    """n = 2 of the three that are left; the model is that of a round without client 2."""
    _, states, (record,) = fit_faulty(FOUR, LDF, ONE_ROUND, only(2, lambda reply: None))
    assert words(record)[2] == "no reply"
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
    assert words(record)[lost] == "no reply"
    assert words(record)[kept] == "ok"
    assert [words(record)[k] for k in range(4) if k not in winners] == ["nothing chosen"] * 2
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
    assert words(record) == ("ok",) * 4
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
    assert words(record) == ("ok", "ok", "no reply", "no reply")


def test_a_new_attempt_draws_new_clients() -> None:
    """2 of 12 clients a round: the attempts' clients are those that `sample` gives for each attempt."""
    task = linear_task([5] * 12)
    training = Training(rounds=1, clients_per_round=2, min_replies=1.0, attempts=4)
    engine, _, (record,) = fit_faulty(
        task, FEDAVG, training, lambda reply, order: reply if order.attempt == 3 else None
    )
    assert record.attempt == 3
    drawn = [training.participation.sample(engine.sizes, 0, 1, attempt).tolist() for attempt in range(4)]
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
        fit_faulty(FOUR, FEDAVG, ONE_ROUND, lambda reply, order: Status("failed", f"{order.client} is out"))


def test_when_everyone_fails_alike_the_round_is_not_tried_again() -> None:
    with pytest.raises(RoundFailed, match=r"0 of 4 replies usable after 1 attempt; client 0: failed: out of memory"):
        fit_faulty(FOUR, FEDAVG, ONE_ROUND, lambda reply, order: Status("failed", "out of memory"))


@pytest.mark.parametrize(
    ("answers", "diverged"),
    [
        ({0: "nan", 1: "nan"}, True),
        ({0: "nan", 1: Status("not finite", "scores")}, True),
        ({0: "nan", 1: Status("failed", "the loss is not finite")}, False),  # a client's own words decide nothing
        ({0: "nan", 1: Status("no reply")}, False),
    ],
    ids=["both", "told", "words", "silent"],
)
def test_a_round_has_diverged_when_all_that_is_lost_are_numbers(
    answers: dict[int, str | Status], diverged: bool
) -> None:
    """Clients 2 and 3 did their part, which is not enough; the record of the failed round says who did not."""

    def change(reply: Reply, order: Order) -> Answer:
        answer = answers.get(order.client, reply)
        return poisoned(reply, float("nan")) if isinstance(answer, str) else answer

    training = ONE_ROUND.model_copy(update={"min_replies": 1.0, "attempts": 1})
    with pytest.raises(RoundFailed, match="2 of 4 replies usable after 1 attempt; client 0: not finite") as caught:
        fit_faulty(FOUR, FEDAVG, training, change)
    assert caught.value.diverged is diverged
    assert [client for client, _ in caught.value.record.lost] == [0, 1]
    assert caught.value.record.replies == 2


def test_a_model_that_overflows_has_diverged() -> None:
    """3e38 + 3e38 is more than float32 has: every update is finite, and what comes of them is not."""

    def far(reply: Reply, order: Order) -> Reply:
        assert reply.update is not None
        return replace(reply, update=torch.full_like(reply.update, 3e38))

    setup, plan, state = prepare(FOUR, FEDAVG, ONE_ROUND, dtype=torch.float32)
    state = replace(state, model=torch.full_like(state.model, 3e38))
    with pytest.raises(
        RoundFailed, match=r"round 1: the clients' updates are finite, and the model .* is not"
    ) as caught:
        list(fit(state, FEDAVG, FaultyEngine(setup, far), plan))
    assert caught.value.diverged
    assert words(caught.value.record) == ("ok",) * 4


def test_without_a_single_reply_there_is_no_round() -> None:
    """min_replies = 0 still needs one."""
    with pytest.raises(RoundFailed, match="0 of 4"):
        fit_faulty(FOUR, FEDAVG, ONE_ROUND, lambda reply, order: None)


def test_who_was_not_selected_is_not_missed() -> None:
    """HDFL asks 2 of 4; both answer, so all that were asked did."""
    training = ONE_ROUND.model_copy(update={"min_replies": 1.0, "attempts": 1})
    _, _, (record,) = fit_faulty(FOUR, Algorithm(Plain(), RandomClients(n=2), SampleSize()), training)
    assert sorted(words(record)) == ["not selected"] * 2 + ["ok"] * 2


def test_n_above_k_is_refused_before_anything_happens() -> None:
    with pytest.raises(RecipeError, match=r"algorithm\.selection\.n = 5"):
        run(FOUR, Algorithm(Plain(), FedLDF(n=5), SampleSize()), ONE_ROUND)
    with pytest.raises(RecipeError, match="at most the clients of a round, 3"):
        run(without(0), Algorithm(Plain(), FedLDF(n=4), SampleSize()), ONE_ROUND)


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


# --- the round itself --------------------------------------------------------------------------------------------


def by_hand(algorithm: Algorithm) -> tuple[FaultyEngine, Round]:
    """A round of four clients, and what carries out its orders."""
    setup, plan, state = prepare(FOUR, algorithm, ONE_ROUND)
    participants = Participants(np.arange(4), work=np.ones(4, dtype=np.int64))
    return FaultyEngine(setup), Round(state, algorithm, Terms(plan.layers), lambda attempt: participants, 1)


def test_a_round_is_finished_when_there_are_no_orders_left() -> None:
    """Not before the second exchange was; what no answer came for by then has none, and later ones change nothing."""
    engine, round = by_hand(LDF)
    with pytest.raises(RuntimeError, match="under way"):
        round.finish()
    first = round.next_orders()
    assert [(order.kind, order.client) for order in first] == [("train", client) for client in range(4)]
    answers = dict(engine.exchange(first))
    for order in first[1:]:
        assert round.receive(order, answers[order]) == Status("ok")
    second = round.next_orders()
    assert {order.kind for order in second} == {"upload"}
    assert round.receive(first[0], answers[first[0]]) is None
    with pytest.raises(RuntimeError, match="under way"):
        round.finish()
    for order, answer in engine.exchange(second):
        round.receive(order, answer)
    assert round.next_orders() == round.next_orders() == []
    state, record = round.finish()
    assert words(record)[0] == "no reply"
    clean, _ = run(without(0), LDF, ONE_ROUND)
    assert torch.equal(state.model, clean[1].model)


def test_a_fifth_is_a_fifth_of_those_who_take_part() -> None:
    """FedLDF without an n: 1 of 5 in the first attempt, in which no upload comes, and 2 of 10 in the second one."""
    algorithm = Algorithm(Plain(), FedLDF(), SampleSize())
    setup, plan, state = prepare(linear_task([5] * 10), algorithm, ONE_ROUND)
    engine = FaultyEngine(setup)
    counts = (5, 10)

    def draw(attempt: int) -> Participants:
        return Participants(np.arange(counts[attempt]), work=np.ones(counts[attempt], dtype=np.int64))

    round = Round(state, algorithm, Terms(plan.layers, attempts=2), draw, 1)
    play(round, lambda orders: [] if orders[0].mask is not None and len(orders) == 1 else engine.exchange(orders))
    _, record = round.finish()
    assert record.attempt == 1
    assert record.layers["mask"].sum(0).tolist() == [2.0] * len(plan.layers)
    assert sorted(words(record)) == ["nothing chosen"] * 8 + ["ok"] * 2


@pytest.mark.parametrize("algorithm", [FEDAVG, LDF], ids=["one exchange", "two"])
def test_a_round_that_was_played_is_freed_at_once(algorithm: Algorithm) -> None:
    """Its replies may lie in memory that the next round needs, so no garbage collector is waited for."""
    engine, round = by_hand(algorithm)
    gc.disable()
    try:
        play(round, engine.exchange)
        round.finish()
        gone = weakref.ref(round)
        del round
        assert gone() is None
    finally:
        gc.enable()
