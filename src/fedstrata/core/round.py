"""One round, without I/O: what is asked of whom, what becomes of every answer, and the next state of the server.

A `Round` sends nothing and decodes nothing. Whoever has a transport drives it:

    while orders := round.next_orders():
        for order, answer in transport(orders):      # a Reply, or a Status that says why there is none
            round.receive(order, answer)
    state, record = round.finish()

`fit`, `fedstrata.Server` and Flower's Strategy are such drivers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstrata.core import rng
from fedstrata.core.axes import Algorithm, MovesSome, SelectsAfterScores, SelectsBefore, State
from fedstrata.core.cohort import Cohort
from fedstrata.core.determinism import steady
from fedstrata.core.errors import BadValue, RecipeError, RuleError
from fedstrata.core.layers import Layers
from fedstrata.core.memory import renewed, tags
from fedstrata.core.messages import MOST_SAMPLES, Answer, Order, Reply, Wanted, check_reply, judge
from fedstrata.core.record import Ledger, RoundFailed, RoundRecord, layer_record
from fedstrata.core.state import ServerState, conclude, stays_finite
from fedstrata.core.status import SILENT, Status
from fedstrata.core.training import LocalTraining

WANTED: dict[str, Wanted] = {
    "before": "layers",
    "after_scores": "scores",
    "on_client": "units",
}
"""What a client is asked for after training, by when the selection decides."""

LONGEST = 50
"""Letters of the name of something that a client logs."""


@dataclass(frozen=True)
class Terms:
    """What is the same in every round, besides the algorithm."""

    layers: Layers
    seed: int = 0
    attempts: int = 1
    """How often a round is tried with other clients."""
    min_share: float = 0.0
    """Of those who were asked, how many must have done their part, as a share …"""
    min_replies: int = 0
    """… and as a number."""
    record: bool = True
    """Whether to keep the per-layer record of every round."""
    training: LocalTraining | None = None
    """What clients do locally, where they do as the server says; it tells how many steps each one takes."""
    reports_steps: bool = False
    """Whether clients have a training loop of their own, and tell how many steps they took."""
    population: int = 0
    """How many clients have data, in a round or not."""
    since: int = 0
    """The first round that the server may still come back to."""
    wire_bytes: Tensor | None = None
    """What each layer weighs on the wire, int64 [L], if not its numbers in the model's precision."""
    spells_out_whole: bool = True
    """Whether a client that sends all layers is told which."""
    first_attempt: int = 0
    """The one to begin with: not 0 where a round is played again, of which a later one counted."""


@dataclass(frozen=True)
class Participants:
    """Who takes part in one attempt at a round. A client's position is its place in this order.

    Three kinds of number stand for a client: its name, which orders and records have; its position; and its row in the
    tables that rules keep from round to round.
    """

    clients: np.ndarray  # [K] names: int64, or uint64 where a transport has such names
    rows: np.ndarray | None = None  # int64 [K], the names themselves if not given
    sizes: np.ndarray | None = None  # [K] training samples; the first replies tell, if not given
    work: np.ndarray | None = None  # int64 [K], epochs or steps; 0 if that is the client's own affair
    absent: Mapping[int, Status] = field(default_factory=dict)
    """Positions whose answer is lost whatever it is, and why; they are asked all the same."""
    in_order: bool = True
    """Whether this order is the same whenever the same clients take part. If not, sums are taken in another one."""


class Round:
    """One round, from the draw of its participants to the next state. It is played once."""

    min_replies: int
    """`Terms.min_replies`; a driver may ask for more before it asks for the next orders."""

    def __init__(
        self,
        state: ServerState,
        algorithm: Algorithm,
        terms: Terms,
        draw: Callable[[int], Participants],
        number: int,
    ) -> None:
        """`draw` gives the participants of each attempt, from 0."""
        self.state, self.algorithm, self.terms, self.number = state, algorithm, terms, number
        self.min_replies = terms.min_replies
        nothing = torch.zeros(len(terms.layers), dtype=torch.int64)
        self._ledger = Ledger(up=nothing.clone(), down=nothing.clone())
        self._weights = terms.layers.bytes_per_layer() if terms.wire_bytes is None else terms.wire_bytes
        self._started = time.perf_counter()
        self._waiting: dict[Order, int] = {}  # an order without an answer, and its client's position
        self._earlier: list[tuple[int, int, Status]] = []
        self._decided = False
        self._bases = tags(state.memory)
        self._steps = self._play(draw)

    # --- the protocol -----------------------------------------------------------------------------------------------

    def next_orders(self) -> list[Order]:
        """Close one exchange and open the next one: its orders, or none, if the round is decided.

        An order that has no answer by now never gets one.
        """
        return next(self._steps, [])

    def receive(self, order: Order, answer: Answer) -> Status | None:
        """Take in the answer to an order: what became of it. A late or second answer changes nothing."""
        at = self._waiting.pop(order, None)
        if at is None:
            return None
        samples = self._size_of(at)
        status, reply = judge(answer, lambda reply: check_reply(reply, order, self.terms.layers, samples))
        self.status[at] = status
        if reply is not None:
            self._ledger.up += reply.upload_bytes(self.terms.layers, self._weights)
            self._ledger.feedback_numbers += reply.feedback_numbers()
            (self.trained if order.kind == "train" else self._uploaded)[at] = reply
            if at in self._slow:
                self.status[at] = status = Status("nothing chosen")
        return status

    def finish(self) -> tuple[ServerState, RoundRecord]:
        """The next state of the server, and what happened; `RoundFailed`, if nothing can come of it."""
        if not self._decided:
            raise RuntimeError("the round is under way: ask for the next orders until there are none")
        if not self._is_enough():
            record = self._record({})
            tried = f"{self.attempt + 1} attempt{'s' if self.attempt else ''}"
            lost = record.lost
            problem = f"client {lost[0][0]}: {lost[0][1]}" if lost else "nobody sent a layer"
            raise RoundFailed(
                f"round {self.number}: {record.replies} of {len(self.status)} replies usable after {tried}; {problem}",
                record,
                diverged=bool(lost) and all(status.kind == "not finite" for _, status in lost),
            )
        with steady():
            cohort, rows = self.cohort()
            state, weights = conclude(self.state, self.algorithm, cohort)
            if not stays_finite(state.model, self.state.model):
                problem = "the clients' updates are finite, and the model that comes of them is not"
                raise RoundFailed(f"round {self.number}: {problem}", self._record({}), diverged=True)
            layers = {}
            if self.terms.record:
                count = len(self.status)
                layers = layer_record(count, rows, cohort, weights, state.weighting, self.trained)
        return replace(state, memory=self._remembered()), self._record(layers)

    def _remembered(self) -> State:
        """Who did its part has a new version of its memory, whether or not a layer of it was wanted."""
        if not self.state.memory:
            return self.state.memory
        done = [self._row(at) for at, status in enumerate(self.status) if status.counts]
        return renewed(self.state.memory, done, (self.number, self.attempt))

    def _row(self, at: int) -> int:
        """A client's row in what is kept from round to round."""
        who = self.participants
        return int((who.clients if who.rows is None else who.rows)[at])

    def cohort(self) -> tuple[Cohort, list[int]]:
        """The accepted updates, in the order of sums, and the positions of their clients."""
        positions = self._in_order_of_sums()
        return self._cohort(positions), positions

    def _play(self, draw: Callable[[int], Participants]) -> Iterator[list[Order]]:
        """The exchanges of a round."""
        selection = self.algorithm.selection
        for attempt in range(self.terms.first_attempt, self.terms.attempts):
            self._begin(attempt, draw(attempt))
            yield from self._exchange(self._training_orders())
            if isinstance(selection, SelectsAfterScores):
                yield from self._exchange(self._upload_orders())
            if self._is_enough() or self._is_hopeless() or attempt + 1 == self.terms.attempts:
                break
            self._earlier += [(attempt, client, status) for client, status in self._record({}).lost]
        self._decided = True

    def _begin(self, attempt: int, participants: Participants) -> None:
        count = len(participants.clients)
        self.attempt, self.participants = attempt, participants
        self.work = np.zeros(count, dtype=np.int64) if participants.work is None else participants.work.copy()
        self.status = [SILENT] * count
        self.trained: dict[int, Reply] = {}
        """Usable first replies, by position."""
        self._uploaded: dict[int, Reply] = {}
        self._slow = {at for at in range(count) if not self._reaches_shared(at)}
        self._selection = self.algorithm.selection
        if for_cohort := getattr(self._selection, "for_cohort", None):
            with _named("selection"):
                self._selection = for_cohort(count)

    def _exchange(self, orders: Mapping[Order, int]) -> Iterator[list[Order]]:
        self._waiting = dict(orders)
        for at in orders.values():
            self.status[at] = SILENT
        if orders:
            yield list(orders)
        self._waiting = {}
        # Replies come in any order, and everything that follows goes by position.
        self.trained, self._uploaded = (dict(sorted(found.items())) for found in (self.trained, self._uploaded))

    def _training_orders(self) -> dict[Order, int]:
        """Who trains, and what it is asked for; whom the selection wants no layer of is not asked."""
        count, terms, orders = len(self.status), self.terms, {}
        masks: Tensor | None = None
        if isinstance(self._selection, SelectsBefore):
            generator = rng.generator(terms.seed, "selection", round=self.number, attempt=self.attempt)
            masks = self._checked(self._selection.draw(count, terms.layers, generator), count)
        for at, client in enumerate(self.participants.clients.tolist()):
            mask = None if masks is None else masks[at]
            if at in self._slow:
                mask = torch.zeros(len(terms.layers), dtype=torch.bool)
            if mask is not None and len(mask) and not mask.any() and at not in self._slow:
                self.status[at], self.work[at] = Status("not selected"), 0
                continue
            if mask is not None and mask.all() and not terms.spells_out_whole:
                mask = None
            order = Order(
                "train",
                self.number,
                self.attempt,
                client,
                model=self.state.model,
                objective_state=self.state.objective,
                answer="layers" if at in self._slow else WANTED[self._selection.decides],
                mask=mask,
                work=int(self.work[at]),
                base=self._bases.get(self._row(at)),
                since=self.terms.since if self.state.memory else 0,
            )
            self._ledger.down += self._weights
            self._ledger.control += order.control_bytes()
            if at in self.participants.absent:
                self.status[at] = self.participants.absent[at]
            else:
                orders[order] = at
        return orders

    def _upload_orders(self) -> dict[Order, int]:
        """Whose layers are wanted, now that everybody's scores are here."""
        assert isinstance(self._selection, SelectsAfterScores)
        if not self.trained:
            return {}
        scores = [reply.scores for reply in self.trained.values() if reply.scores is not None]
        if not scores:
            return {}
        chosen = self._checked(self._selection.choose(torch.stack(scores)), len(scores))
        orders = {}
        for at, row in zip((at for at in self.trained if at not in self._slow), chosen, strict=True):
            if not row.any():
                self.status[at] = Status("nothing chosen")
                continue
            client = int(self.participants.clients[at])
            order = Order("upload", self.number, self.attempt, client, mask=row, base=self._bases.get(self._row(at)))
            self._ledger.control += order.control_bytes()
            orders[order] = at
        return orders

    def _checked(self, mask: Tensor, rows: int) -> Tensor:
        """A selection's answer, unless it is nonsense."""
        shape = (rows, len(self.terms.layers))
        if tuple(mask.shape) != shape or mask.dtype != torch.bool:
            found = f"{mask.dtype} {list(mask.shape)}"
            name = type(self._selection).__name__
            raise RuleError(f"selection {name} gave a mask of {found}, expected torch.bool {list(shape)}")
        return mask

    # --- what came of it --------------------------------------------------------------------------------------------

    @property
    def uploads(self) -> dict[int, Reply]:
        """The replies with updates, by position."""
        found = self._uploaded if isinstance(self.algorithm.selection, SelectsAfterScores) else self.trained
        return {at: reply for at, reply in found.items() if at not in self._slow} if self._slow else found

    def _reaches_shared(self, at: int) -> bool:
        """Whether a client does so much work that it moves what it is to send."""
        objective, training, who = self.algorithm.objective, self.terms.training, self.participants
        if training is None or not self.terms.layers.trains_private or not isinstance(objective, MovesSome):
            return True
        work = int(self.work[at])
        if training.steps is not None and who.sizes is not None:
            work = -(-work // max(1, -(-int(who.sizes[at]) // training.batch_size)))
        return any(objective.moves(epoch) != "private" for epoch in range(work))

    def _is_enough(self) -> bool:
        """Whether a model can be made of the replies that are here."""
        asked = sum(status.kind != "not selected" for status in self.status)
        needed = self.terms.min_share * asked - 1e-9  # 0.07 · 100 is 7.000000000000001
        return bool(self.uploads) and sum(status.counts for status in self.status) >= max(needed, self.min_replies)

    def _is_hopeless(self) -> bool:
        """Whether everyone failed in the same way, which another attempt would not change."""
        return len(set(self.status)) == 1 and self.status[0].kind == "failed"

    def _size_of(self, at: int) -> float | None:
        """How many samples a client has, as far as that is known: an upload has as many as the training before it."""
        if self.participants.sizes is not None:
            return int(self.participants.sizes[at])
        return self.trained[at].size if at in self.trained else None

    def _in_order_of_sums(self) -> list[int]:
        """The positions whose updates are summed up: by position, or where that is chance, by what was sent.

        So a sum does not depend on the ids that a transport gives its clients.
        """
        if self.participants.in_order:
            return list(self.uploads)
        keys: dict[int, tuple[object, ...]] = {}
        for at, reply in self.uploads.items():
            assert reply.update is not None
            keys[at] = (self._size_of(at), float(torch.linalg.vector_norm(reply.update, dtype=torch.float64)))
        repeated = Counter(keys.values())
        for at, key in keys.items():
            if repeated[key] > 1:
                keys[at] = (*key, sha256(self.uploads[at].update.numpy().tobytes()).digest())  # type: ignore[union-attr]
        return sorted(keys, key=lambda at: keys[at])

    def _cohort(self, positions: Sequence[int]) -> Cohort:
        """The accepted updates."""
        who = self.participants
        replies = [self.uploads[at] for at in positions]
        units = [reply.units for reply in replies if reply.units is not None]
        rows = who.clients if who.rows is None else who.rows
        return Cohort(
            round=self.number,
            clients=torch.from_numpy(rows[list(positions)]),
            sizes=torch.tensor([self._size_of(at) for at in positions], dtype=torch.float64),
            layers=self.terms.layers,
            updates=tuple(reply.update for reply in replies if reply.update is not None),
            sent=torch.stack([reply.sent for reply in replies if reply.sent is not None]),
            model=self.state.model,
            units=torch.stack(units) if units else None,
            **self._local_steps(positions),
        )

    def _local_steps(self, positions: Sequence[int]) -> dict[str, Any]:
        """What a cohort has of its clients' local training: by the orders, or as they tell of a loop of their own."""
        known: dict[str, Any] = {"population": max(self.terms.population, len(positions))}
        training = self.terms.training
        if training is None:
            return known
        known["lr"] = training.learning_rate(self.number)
        if self.terms.reports_steps:
            told = [self.trained[at].metrics.get("steps", 0.0) for at in positions]
            if not all(1 <= count <= MOST_SAMPLES and count == int(count) for count in told):
                return known
            steps = [int(count) for count in told]
        else:
            steps = [training.local_steps(self._size_of(at) or 0, int(self.work[at])) for at in positions]
        reach = [training.reach(count) for count in steps]
        known["steps"] = torch.tensor(steps)
        return known | ({} if None in reach else {"reach": torch.tensor(reach, dtype=torch.float64)})

    def _record(self, layers: dict[str, np.ndarray]) -> RoundRecord:
        losses, logged = np.full(len(self.status), np.nan), dict[str, np.ndarray]()
        for at, reply in self.trained.items():
            losses[at] = reply.metrics.get("loss", np.nan)
            for name, value in reply.metrics.items():
                if name != "loss" and len(name) <= LONGEST and name.isprintable():
                    logged.setdefault(name, np.full(len(self.status), np.nan))[at] = value
        sizes = self.participants.sizes
        if sizes is None:
            sizes = np.array([self._size_of(at) or 0 for at in range(len(self.status))])
        return RoundRecord(
            round=self.number,
            attempt=self.attempt,
            clients=self.participants.clients,
            status=tuple(self.status),
            sizes=sizes,
            work=self.work,
            losses=losses,
            ledger=self._ledger,
            seconds=time.perf_counter() - self._started,
            layers=layers,
            logged=logged,
            earlier=tuple(self._earlier),
        )


def play(round: Round, exchange: Callable[[Sequence[Order]], Iterable[tuple[Order, Answer]]]) -> None:
    """Play a round until it is decided, where all answers of an exchange come from one call."""
    with steady():  # more threads would wait for the cores that the clients have
        while orders := round.next_orders():
            for order, answer in exchange(orders):
                round.receive(order, answer)


def check_cohort(algorithm: Algorithm, clients: int) -> None:
    """Refuse a rule that makes no sense in rounds of so many clients (FedLDF's n, Krum's f)."""
    for axis in ("selection", "weighting"):
        if check := getattr(getattr(algorithm, axis), "check_cohort", None):
            with _named(axis):
                check(clients)


@contextmanager
def _named(axis: str) -> Iterator[None]:
    """What a rule refuses is told with the place that a recipe has it in."""
    try:
        yield
    except BadValue as error:
        raise RecipeError(f"algorithm.{axis}.{error.field}", error.value, error.problem) from None
