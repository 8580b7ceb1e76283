"""A round without I/O: driven by hand, by an engine of a few lines, and by drivers that misbehave."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedstrata.core.axes import Algorithm
from fedstrata.core.fit import Plan, fit
from fedstrata.core.layers import Layers
from fedstrata.core.messages import Answer, Order, Reply
from fedstrata.core.record import RoundFailed, RoundRecord
from fedstrata.core.round import Participants, Round, Terms, play
from fedstrata.core.state import ServerState, initial_state
from fedstrata.core.status import Status
from fedstrata.objectives import Plain
from fedstrata.selections import FedLDF
from fedstrata.weightings import FedAdp, SampleSize, Uniform
from tests.support.math import FEDAVG, vectors

LAYERS = vectors(2, 1)  # two layers, of two numbers and of one
FEDLDF = Algorithm(Plain(), FedLDF(n=1), SampleSize())


def double(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def begin(
    algorithm: Algorithm = FEDAVG,
    clients: Sequence[int] = (0, 1, 2),
    *,
    layers: Layers = LAYERS,
    model: Tensor | None = None,
    number: int = 1,
    in_order: bool = True,
    **terms: object,
) -> Round:
    """A round whose clients tell their sizes; a client's name is its row."""
    start = torch.zeros(layers.numel, dtype=layers.dtype) if model is None else model
    state = initial_state(start, algorithm, 10, layers)
    who = Participants(np.array(clients), in_order=in_order)
    return Round(state, algorithm, Terms(layers, **terms), lambda attempt: who, number)  # type: ignore[arg-type]


def update(order: Order, numbers: Sequence[float], size: float = 1) -> Reply:
    """The layers that an order asks for."""
    mask = torch.ones(2, dtype=torch.bool) if order.mask is None else order.mask
    return Reply(size=size, update=double(numbers), sent=mask)


def played(round: Round, answer: object) -> tuple[ServerState, RoundRecord]:
    """Play a round whose answers a function gives, and conclude it."""
    play(round, lambda orders: [(order, answer(order)) for order in orders])
    return round.finish()


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_fedldf_driven_by_hand() -> None:
    """Three clients, n = 1. Layer A diverges most at client 2, layer B at client 0; client 1 is not asked again.

    A ← (0, 4), which is client 2's alone, and B ← 3, client 0's. Up: 3 clients · 2 scores of 4 bytes, 2 doubles of A
    and 1 of B. Down: the model of 3 doubles three times, and a byte of mask for each of the two uploads.
    """
    updates = {0: (1.0, 0.0, 3.0), 1: (2.0, 0.0, 1.0), 2: (0.0, 4.0, 2.0)}
    scores = {0: (1.0, 3.0), 1: (2.0, 1.0), 2: (4.0, 2.0)}
    round = begin(FEDLDF)
    first = round.next_orders()
    assert [(order.kind, order.client, order.answer, order.mask) for order in first] == [
        ("train", client, "scores", None) for client in (0, 1, 2)
    ]
    for order in reversed(first):  # they may come in any order
        round.receive(order, Reply(size=5, scores=torch.tensor(scores[order.client])))
    second = round.next_orders()
    assert [(order.kind, order.client, order.mask.tolist()) for order in second if order.mask is not None] == [
        ("upload", 0, [False, True]),
        ("upload", 2, [True, False]),
    ]
    for order in second:
        assert order.mask is not None
        sent = torch.where(order.mask.repeat_interleave(torch.tensor([2, 1])), double(updates[order.client]), 0.0)
        round.receive(order, Reply(update=sent, sent=order.mask))
    assert round.next_orders() == []
    state, record = round.finish()
    assert state.model.tolist() == [0, 4, 3]
    assert [status.kind for status in record.status] == ["ok", "nothing chosen", "ok"]
    assert (record.ledger.up.tolist(), record.ledger.feedback) == ([16, 8], 24)
    assert (record.ledger.down.tolist(), record.ledger.control) == ([48, 24], 2)
    assert record.sizes.tolist() == [5, 5, 5]


class Fake:
    """A whole engine: every client goes from the model towards its own number, half the way."""

    sizes = np.array([1, 2, 3])

    def exchange(self, orders: Sequence[Order]) -> Iterator[tuple[Order, Answer]]:
        for order in orders:
            assert order.model is not None
            goal = torch.full_like(order.model, float(order.client))
            size = int(self.sizes[order.client])
            yield order, Reply(size=size, update=(goal - order.model) / 2, sent=order.mask)


def test_an_engine_of_a_few_lines() -> None:
    """FedAvg: θ ← θ + Σ n_k (k − θ)/2 / 6, so θ = ⅔ after one round, and 1 after two: halfway to 4/3 each time."""
    state = initial_state(torch.zeros(3, dtype=torch.float64), FEDAVG, 3, LAYERS)
    models = [after.model for after, _ in fit(state, FEDAVG, Fake(), Plan(LAYERS, rounds=2))]
    torch.testing.assert_close(models[0], double([2 / 3] * 3))
    torch.testing.assert_close(models[1], double([1.0] * 3))


# --- drivers that misbehave ------------------------------------------------------------------------------------------


def test_a_late_a_second_and_a_strangers_answer_change_nothing() -> None:
    round = begin(FEDLDF)
    orders = round.next_orders()
    good = {order.client: Reply(size=1, scores=torch.tensor([1.0 + order.client, 1.0])) for order in orders}
    assert round.receive(orders[0], good[0]) == Status("ok")
    assert round.receive(orders[0], Status("failed", "twice")) is None
    assert round.receive(replace(orders[0], client=7), good[0]) is None
    assert round.receive(orders[1], good[1]) == Status("ok")
    uploads = round.next_orders()
    assert round.receive(orders[2], good[2]) is None, "its exchange is over"
    assert round.receive(orders[0], update(orders[0], (9, 9, 9))) is None
    for order in uploads:
        round.receive(order, update(order, (0, 1, 0) if order.client else (0, 0, 2)))
    assert round.next_orders() == []
    state, record = round.finish()
    assert state.model.tolist() == [0, 1, 2]
    assert [str(status) for status in record.status] == ["ok", "ok", "no reply"]


def test_an_order_that_two_attempts_share_in_all_but_the_number_is_another() -> None:
    """An answer to the first attempt, when the second has begun, is late."""
    round = begin(attempts=2, min_share=1.0)
    first = round.next_orders()
    for order in first[:2]:
        round.receive(order, update(order, (1, 1, 1)))
    second = round.next_orders()
    assert [order.attempt for order in second] == [1, 1, 1]
    assert round.receive(first[2], update(first[2], (1, 1, 1))) is None
    for order in second:
        round.receive(order, update(order, (2, 2, 2)))
    assert round.next_orders() == []
    state, record = round.finish()
    assert state.model.tolist() == [2, 2, 2]
    assert (record.attempt, record.earlier) == (1, ((0, 2, Status("no reply")),))
    assert record.ledger.down.tolist() == [6 * 16, 6 * 8]
    assert record.ledger.up.tolist() == [5 * 16, 5 * 8]


def test_a_round_is_not_finished_before_it_is_decided() -> None:
    round = begin()
    round.next_orders()
    with pytest.raises(RuntimeError, match="under way"):
        round.finish()


def test_an_attempt_without_orders_is_no_end() -> None:
    """Everybody drops out of the first attempt; nobody does of the second."""
    clients = np.array([0, 1])

    def draw(attempt: int) -> Participants:
        return Participants(clients, absent={} if attempt else dict.fromkeys((0, 1), Status("dropped out")))

    state = initial_state(torch.zeros(3, dtype=torch.float64), FEDAVG, 2, LAYERS)
    round = Round(state, FEDAVG, Terms(LAYERS, attempts=3), draw, 1)
    after, record = played(round, lambda order: update(order, (1, 1, 1)))
    assert after.model.tolist() == [1, 1, 1]
    assert record.attempt == 1
    assert record.earlier == ((0, 0, Status("dropped out")), (0, 1, Status("dropped out")))
    assert record.ledger.down.tolist() == [4 * 16, 4 * 8], "the model went down to them all the same"


# --- what a round weighs ---------------------------------------------------------------------------------------------


def test_a_mask_that_selects_everything_is_not_the_same_as_none() -> None:
    """FedAvg: a byte for each mask where it travels, nothing where it does not; the model that comes of it is one."""
    ends = []
    for spells_out, control in ((True, 3), (False, 0)):
        round = begin(spells_out_whole=spells_out)
        after, record = played(round, lambda order: update(order, (order.client, 1, 1)))
        assert record.ledger.control == control
        ends.append(after.model)
    assert torch.equal(*ends)


def test_layers_weigh_what_the_driver_says() -> None:
    """Half precision on the wire: 2 bytes a number."""
    round = begin(wire_bytes=torch.tensor([4, 2]))
    _, record = played(round, lambda order: update(order, (1, 1, 1)))
    assert record.ledger.up.tolist() == record.ledger.down.tolist() == [12, 6]


# --- status is data --------------------------------------------------------------------------------------------------


def test_a_reason_decides_nothing() -> None:
    """Clients that say "not finite" have failed; a round of such has not diverged. Numbers that are none have."""

    def says_so(order: Order) -> Answer:
        return Status("failed", f"client {order.client}: the loss is not finite")

    def nan(order: Order) -> Answer:
        return update(order, (np.nan, 0, 0))

    for answer, diverged in ((says_so, False), (nan, True)):
        with pytest.raises(RoundFailed) as caught:
            played(begin(), answer)
        assert caught.value.diverged is diverged
    with pytest.raises(RoundFailed) as caught:
        played(begin(), lambda order: says_so(order) if order.client else nan(order))
    assert not caught.value.diverged, "one of them has failed otherwise"


def test_a_failed_round_keeps_its_record() -> None:
    with pytest.raises(
        RoundFailed, match=r"round 4: 1 of 3 replies usable after 2 attempts; client 1: failed: boom"
    ) as caught:
        played(
            begin(attempts=2, min_replies=2, number=4),
            lambda order: Status("failed", "boom") if order.client else update(order, (1, 1, 1)),
        )
    record = caught.value.record
    assert (record.round, record.attempt, record.replies) == (4, 1, 1)
    assert [str(status) for status in record.status] == ["ok", "failed: boom", "failed: boom"]
    assert [(attempt, client) for attempt, client, _ in record.earlier] == [(0, 1), (0, 2)]
    assert record.ledger.up.tolist() == [2 * 16, 2 * 8]


def test_a_reason_is_one_line_that_a_terminal_shows() -> None:
    assert Status("failed", "bad\x1b[2J\n  sample").reason == "bad\\x1b[2J sample"


# --- numbers that are too large --------------------------------------------------------------------------------------


def test_a_model_that_overflows_is_a_round_that_diverged() -> None:
    """Two finite float32 updates whose sum with the model is not: no status is to blame, and the model is not taken."""
    layers = replace(LAYERS, dtype=torch.float32)
    round = begin(layers=layers, model=torch.full((3,), 3e38))
    with pytest.raises(RoundFailed, match="the model that comes of them is not") as caught:
        played(round, lambda order: replace(update(order, (3e38, 0, 0)), update=torch.tensor([3e38, 0, 0])))
    assert caught.value.diverged
    assert [status.kind for status in caught.value.record.status] == ["ok"] * 3


def test_what_was_infinite_before_may_stay_so() -> None:
    """A causal mask rides along as −∞ and does not move."""
    round = begin(model=double([1, -np.inf, 1]))
    after, _ = played(round, lambda order: update(order, (1, 0, 1)))
    assert after.model.tolist() == [2, -np.inf, 2]


@pytest.mark.parametrize("weighting", [SampleSize(), FedAdp()], ids=lambda rule: type(rule).__name__)
def test_a_client_whose_square_no_float64_can_hold_costs_itself_only(weighting: object) -> None:
    """1e200: its angle would be no number, and FedAdp would be blamed for its weight."""
    algorithm = replace(FEDAVG, weighting=weighting)  # type: ignore[arg-type]
    numbers = {0: (1, 1, 1), 1: (1e200, 0, 0), 2: (2, 1, 1)}
    after, record = played(begin(algorithm), lambda order: update(order, numbers[order.client]))
    assert [status.kind for status in record.status] == ["ok", "not finite", "ok"]
    without, _ = played(begin(algorithm, (0, 2)), lambda order: update(order, numbers[order.client]))
    assert torch.equal(after.model, without.model)


# --- clients whose names are chance ----------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", [SampleSize(), Uniform(), FedAdp()], ids=lambda rule: type(rule).__name__)
def test_sums_do_not_depend_on_the_order_of_clients_that_have_none(weighting: object) -> None:
    """Seven updates whose sum depends on its order: one model, bit for bit. By position there are several."""
    draw = np.random.default_rng(0)
    numbers = draw.normal(size=(7, 3)) * 10.0 ** draw.integers(-9, 9, size=(7, 3))
    numbers[3] = -numbers[4]  # as long as another one
    algorithm = replace(FEDAVG, weighting=weighting)  # type: ignore[arg-type]
    for in_order in (False, True):
        found = set()
        for _ in range(12):
            who = draw.permutation(7)
            round = begin(algorithm, range(7), in_order=in_order)
            after, record = played(round, lambda order, who=who: update(order, numbers[who[order.client]]))
            found.add(after.model.numpy().tobytes())
            weights = record.layers["weight"][np.argsort(who)]
            np.testing.assert_allclose(weights.sum(0), 1)
        assert (len(found) == 1) is not in_order


def test_records_keep_the_order_of_positions() -> None:
    """Whatever the order of sums: client k is k-th in the record."""
    round = begin(replace(FEDAVG, weighting=Uniform()), (5, 3, 4), in_order=False)
    _, record = played(round, lambda order: update(order, (order.client, 0, 1)))
    assert record.clients.tolist() == [5, 3, 4]
    np.testing.assert_allclose(record.layers["divergence"][:, 0], [5, 3, 4])


def test_fedldfs_n_follows_the_number_of_clients() -> None:
    """A fifth of the round's clients, in this round and in the next, whatever it was before."""
    algorithm = replace(FEDLDF, selection=FedLDF())
    for count, n in ((5, 1), (20, 4), (10, 2)):
        round = begin(algorithm, range(count))
        for order in round.next_orders():
            round.receive(order, Reply(size=1, scores=torch.tensor([1.0 + order.client, 1.0])))
        wanted = torch.stack([order.mask for order in round.next_orders() if order.mask is not None])
        assert wanted.sum(0).tolist() == [n, n]


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [FEDAVG, FEDLDF], ids=["fedavg", "fedldf"])
def test_a_finished_round_is_freed_at_once(algorithm: Algorithm) -> None:
    """It holds every client's update: nothing may wait for the garbage collector."""
    gc.disable()
    try:
        round = begin(algorithm)
        orders = round.next_orders()
        for order in orders:
            scores = torch.tensor([1.0, 2.0 + order.client])
            asked = order.answer == "scores"
            round.receive(order, Reply(size=1, scores=scores) if asked else update(order, (1, 2, 3)))
        for order in round.next_orders():
            round.receive(order, update(order, (1, 2, 3)))
        assert round.next_orders() == []
        kept = weakref.ref(next(iter(round.uploads.values())))
        round.finish()
        whole = weakref.ref(round)
        del round, orders, order
        assert whole() is None
        assert kept() is None
    finally:
        gc.enable()
