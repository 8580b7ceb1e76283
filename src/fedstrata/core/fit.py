"""`fit()`: rounds on an engine, one after the other.

It is a generator of (state, record): evaluation, history, checkpoints and reports consume it. It knows nothing of how
orders reach clients; that is `engine.exchange`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np

from fedstrata.core.axes import Algorithm
from fedstrata.core.layers import Layers
from fedstrata.core.messages import Answer, Order
from fedstrata.core.record import RoundRecord
from fedstrata.core.round import Participants, Round, Terms, check_cohort, play
from fedstrata.core.state import ServerState
from fedstrata.core.status import Status
from fedstrata.core.training import LocalTraining, Participation, check_training


class Engine(Protocol):
    """Carries orders to clients and answers back: the only difference between engines."""

    @property
    def sizes(self) -> np.ndarray:
        """How many training samples each existing client has, int64 [N]."""
        ...

    def exchange(self, orders: Sequence[Order]) -> Iterable[tuple[Order, Answer]]:
        """Each order with its answer, as they come; an order may have none."""
        ...


@runtime_checkable
class RemembersElsewhere(Protocol):
    """An engine whose clients keep their memory themselves, beside that of other runs."""

    run: str
    afresh: bool
    """Whether a client that lost its memory starts with none."""


@dataclass(frozen=True)
class Plan:
    """What `fit` needs to know besides the algorithm."""

    layers: Layers
    rounds: int
    participation: Participation = field(default_factory=Participation)
    training: LocalTraining = field(default_factory=LocalTraining)
    seed: int = 0
    record: bool = True
    """Whether to keep the per-layer record of every round."""
    checkpoint_every: int = 1
    """Rounds between checkpoints: clients keep the memory that a run may come back to, which has the last two."""
    reports_steps: bool = False
    """Whether clients have a training loop of their own, and tell how many steps they took."""


def fit(
    state: ServerState, algorithm: Algorithm, engine: Engine, plan: Plan
) -> Iterator[tuple[ServerState, RoundRecord]]:
    """Run the rounds that are left, and yield the state and the record after each."""
    terms = terms_of(plan, engine.sizes)
    check_cohort(algorithm, plan.participation.cohort_size(terms.population))
    check_training(algorithm, plan.training)
    while state.round < plan.rounds:
        number = state.round + 1

        def draw(attempt: int, number: int = number) -> Participants:
            return draw_participants(plan, engine.sizes, number, attempt)

        since = max(0, state.round // plan.checkpoint_every - 1) * plan.checkpoint_every
        round = Round(state, algorithm, replace(terms, since=since), draw, number)
        play(round, engine.exchange)
        state, record = round.finish()
        del round  # its replies may lie in memory that the next one needs
        yield state, record


def terms_of(plan: Plan, sizes: np.ndarray) -> Terms:
    """What is the same in all rounds of a plan."""
    part = plan.participation
    return Terms(
        plan.layers,
        plan.seed,
        part.attempts,
        part.min_replies,
        record=plan.record,
        training=plan.training,
        reports_steps=plan.reports_steps,
        population=int((sizes > 0).sum()),
    )


def draw_participants(plan: Plan, sizes: np.ndarray, number: int, attempt: int) -> Participants:
    """Sample the round's clients, how much each will do, and who is lost on the way."""
    part, seed, full = plan.participation, plan.seed, plan.training.full_work
    clients = part.sample(sizes, seed, number, attempt)
    work = np.full(len(clients), full, dtype=np.int64)
    slow = part.draw_stragglers(len(clients), seed, number, attempt, full)
    absent = {} if part.keep_stragglers else dict.fromkeys(slow, Status("straggler dropped"))
    for at, done in slow.items():
        work[at] = done
    for at, client in enumerate(clients.tolist()):
        if part.drops_out(seed, number, attempt, client):
            absent[at] = Status("dropped out")
    return Participants(clients, sizes=sizes[clients], work=work, absent=absent)
