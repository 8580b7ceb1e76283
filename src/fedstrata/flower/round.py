"""One round over Flower's grid, from the messages that FedAvg would send to the accepted updates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from logging import WARNING
from typing import TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log
from torch import Tensor

from fedstrata.clients.client import keep_layers
from fedstrata.core import rng
from fedstrata.core.axes import Algorithm, SelectsAfterScores, SelectsBefore
from fedstrata.core.cohort import Cohort
from fedstrata.core.errors import ReplyError
from fedstrata.core.messages import NOT_FINITE, Order, Reply, is_finite
from fedstrata.core.rounds import Ledger, RoundRecord, ServerState, checked_mask
from fedstrata.flower.grid import OneByOne
from fedstrata.flower.replies import SILENCE, read_arrays, read_receipt, read_scores, read_size, told
from fedstrata.flower.wire import FIRST_MOD, Ask, Packing

Read = TypeVar("Read")


@dataclass(frozen=True)
class Server:
    """What the server knows when a round begins; `rows` are the nodes' places in the weighting's tables."""

    algorithm: Algorithm
    packing: Packing
    state: ServerState
    model: ArrayRecord
    rows: Mapping[int, int]


@dataclass(frozen=True)
class Trained:
    """A usable reply to a round's first message."""

    reply: Reply
    size: float
    content: RecordDict
    passed: Mapping[str, Array]


class RoundUnderWay:
    """A round between Flower's `configure_train` and `aggregate_train`. Positions are its nodes, in the order of rows.

    `ask` has what every node is asked for; the answer and the arrays are filled in here. Under `config_key` messages
    have their configuration, which mods read in both exchanges.
    """

    def __init__(
        self,
        number: int,
        server: Server,
        ask: Ask,
        messages: Iterable[Message],
        seed: int,
        config_key: str,
    ) -> None:
        self.number, self.server, self.started = number, server, time.perf_counter()
        self.config_key = config_key
        self.ask = replace(ask, round=number)
        addressed = sorted(messages, key=lambda message: server.rows[message.metadata.dst_node_id])
        self.nodes = [message.metadata.dst_node_id for message in addressed]
        self.position = {node: at for at, node in enumerate(self.nodes)}
        self.status = [SILENCE] * len(self.nodes)
        self.configs = [message.content.config_records.get(config_key, ConfigRecord()) for message in addressed]
        self.masks = self._draw(seed)
        nothing = torch.zeros(len(server.packing.layers), dtype=torch.int64)
        self.ledger = Ledger(up=nothing.clone(), down=nothing.clone())
        self.messages = [message for at, message in enumerate(addressed) if self._address(at, message)]
        self.trained: dict[int, Trained] = {}
        self.uploads: dict[int, Reply] = {}

    def _draw(self, seed: int) -> Tensor:
        """Which layers each node is to send, bool [K, L]; all, where that is not decided before training."""
        algorithm, layers = self.server.algorithm, self.server.packing.layers
        shape = (len(self.nodes), len(layers))
        if not isinstance(algorithm.selection, SelectsBefore):
            return torch.ones(shape, dtype=torch.bool)
        generator = rng.generator(seed, "selection", round=self.number)
        return checked_mask(algorithm.selection.draw(shape[0], layers, generator), shape, algorithm).clone()

    def _address(self, at: int, message: Message) -> bool:
        """Put what the algorithm asks for into a node's message; a node that is to send nothing gets none."""
        row, state, packing = self.masks[at], self.server.state.objective, self.server.packing
        if not row.any():
            self.status[at] = "not selected"
            return False
        some = not bool(row.all())
        if self.ask.objective or self.ask.selection or some:
            answer = "scores" if self.ask.selection else "arrays" if some else "all"
            ask = replace(self.ask, answer=answer, arrays=packing.arrays_of(row) if some else ())
            config = ask.added_to(self.configs[at], state)
            message.content = RecordDict({**message.content, self.config_key: config})  # FedAvg gives all the same
        order = Order("train", self.number, 0, at, objective_state=state, mask=row if some else None)
        self.ledger.control += order.control_bytes()
        self.ledger.down += packing.bytes_per_layer
        return True

    # --- replies ------------------------------------------------------------------------------------------------

    def receive(self, replies: Iterable[Message], weighted_by: str, grid: Grid, timeout: float | None) -> None:
        """Read the replies and, for a selection that wanted scores first, fetch what was chosen."""

        def read(at: int, content: RecordDict) -> Trained:
            return self._read_trained(at, content, read_size(content, weighted_by))

        self.trained = self._collect(self.messages, replies, read)
        if not isinstance(self.server.algorithm.selection, SelectsAfterScores):
            self.uploads = {at: answer.reply for at, answer in self.trained.items()}
        elif self.trained:
            messages = self._choose(self.server.algorithm.selection)
            second = OneByOne.of(grid).send_and_receive(messages, timeout=timeout)
            self.uploads = self._collect(messages, second, self._read_chosen)

    def _collect(
        self, messages: Sequence[Message], replies: Iterable[Message], read: Callable[[int, RecordDict], Read]
    ) -> dict[int, Read]:
        """Read every reply, and keep the usable ones by position."""
        at_node = [self.position[message.metadata.dst_node_id] for message in messages]
        status, good = dict.fromkeys(sorted(at_node), SILENCE), {}
        # Only the message that it answers says whose a reply is: an error that Flower makes does not name its node, and
        # whatever else a reply says of its origin, the node has written itself.
        waiting = {message.metadata.message_id: at for message, at in zip(messages, at_node, strict=True)}
        for reply in replies:
            at = waiting.pop(reply.metadata.reply_to_message_id, None)
            if at is None:
                continue  # nobody asked it, or it has answered already
            status[at], answer = told(reply, partial(read, at))
            if answer is not None:
                good[at] = answer
        for at, word in status.items():
            self.status[at] = word
            if word != "ok":
                log(WARNING, "\t> node %s: %s", self.nodes[at], word)
        return dict(sorted(good.items()))

    def _read_trained(self, at: int, content: RecordDict, size: float) -> Trained:
        """A first reply, with everything that was asked for."""
        packing, row = self.server.packing, self.masks[at]
        reply = Reply("train", self.number, 0, at)
        if self.ask.objective:
            reply = replace(reply, stiffness=read_receipt(content, self.ask, len(row)))
        if self.ask.selection:
            scores = read_scores(content, self.ask, len(row))
            self.ledger.feedback_numbers += len(scores)
            return Trained(replace(reply, scores=scores), size, content, {})
        whole = bool(row.all())
        record = read_arrays(content, packing.order if whole else packing.arrays_of(row), packing)
        passed = packing.passed(record) if whole else {}
        return Trained(self._with_update(reply, record, row), size, content, passed)

    def _choose(self, selection: SelectsAfterScores) -> list[Message]:
        """Which layers are wanted of whom, by the scores, and the messages that say so."""
        scores = torch.stack([t.reply.scores for t in self.trained.values() if t.reply.scores is not None])
        shape = (len(self.trained), len(self.server.packing.layers))
        chosen = checked_mask(selection.choose(scores), shape, self.server.algorithm)
        messages = []
        for at, row in zip(self.trained, chosen, strict=True):
            self.masks[at] = row
            if not row.any():
                self.status[at] = "ok, nothing chosen"
                continue
            ask = Ask(self.number, self.ask.model, answer="kept", arrays=self.server.packing.arrays_of(row))
            content = RecordDict({self.config_key: ask.added_to(self.configs[at], {})})
            messages.append(Message(content, dst_node_id=self.nodes[at], message_type=MessageType.TRAIN))
            self.ledger.control += Order("upload", self.number, 0, at, mask=row).control_bytes()
        return messages

    def _read_chosen(self, at: int, content: RecordDict) -> Reply:
        packing, row = self.server.packing, self.masks[at]
        record = read_arrays(content, packing.arrays_of(row), packing)
        return self._with_update(Reply("upload", self.number, 0, at), record, row)

    def _with_update(self, reply: Reply, record: ArrayRecord, row: Tensor) -> Reply:
        update = self.server.packing.flatten(record).sub_(self.server.state.model)
        keep_layers(update, row, self.server.packing.layers)
        if not is_finite(update):  # two finite numbers may be further apart than any
            raise ReplyError(f"the update is {NOT_FINITE}")
        if update.dtype == torch.float64 and not torch.linalg.vector_norm(update).square().isfinite():
            raise ReplyError(f"the squared norm of the update is {NOT_FINITE}")  # float32 cannot be so large
        self.ledger.up += self.server.packing.bytes_per_layer * row
        return replace(reply, update=update, sent=row)

    # --- what came of it ----------------------------------------------------------------------------------------

    def usable(self) -> int:
        """How many nodes did what they were asked for."""
        return sum(word.startswith("ok") for word in self.status)

    def hopeless(self) -> str | None:
        """Why nobody's answer can be used, though everyone who was asked has answered: the first reason."""
        if self.uploads or any(word.startswith(SILENCE) for word in self.status):
            return None
        asked = [(node, word) for node, word in zip(self.nodes, self.status, strict=True) if word != "not selected"]
        reasons = [f"node {node}: {word}" for node, word in asked if not word.startswith("ok")]
        if not reasons:
            return None
        selects = bool(self.ask.selection) or not bool(self.masks.all())
        doubt = selects and ": failed: " in reasons[0] and FIRST_MOD not in reasons[0]
        hint = f"; if a mod has failed, {FIRST_MOD}" if doubt else ""
        return f"round {self.number}: all {len(asked)} nodes answered, and no answer can be used; {reasons[0]}{hint}"

    def cohort(self) -> Cohort:
        """The accepted updates, in the order of rows."""
        replies = self.uploads.values()
        return Cohort(
            round=self.number,
            clients=torch.tensor([self.server.rows[self.nodes[at]] for at in self.uploads]),
            sizes=torch.tensor([float(self.trained[at].size) for at in self.uploads], dtype=torch.float64),
            layers=self.server.packing.layers,
            updates=tuple(reply.update for reply in replies if reply.update is not None),
            sent=torch.stack([reply.sent for reply in replies if reply.sent is not None]),
            model=self.server.state.model,
        )

    def passed(self) -> Mapping[str, Array]:
        """Integers have no mean: they come from the node with the most examples, or stay if only layers were sent."""
        whole = [answer for answer in self.trained.values() if answer.passed]
        if whole:
            return max(whole, key=lambda answer: answer.size).passed
        return {name: self.server.model[name] for name in self.server.packing.passing}

    def record(self, figures: dict[str, np.ndarray]) -> RoundRecord:
        """For the history. How long a Flower client trains is its own affair, and its losses are its metrics."""
        count = len(self.nodes)
        return RoundRecord(
            round=self.number,
            attempt=0,
            clients=np.array(self.nodes, dtype=np.uint64),
            status=tuple(self.status),
            sizes=np.array([self.trained[at].size if at in self.trained else 0 for at in range(count)]),
            work=np.zeros(count, dtype=np.int64),
            losses=np.full(count, np.nan),
            ledger=self.ledger,
            seconds=time.perf_counter() - self.started,
            layers=figures,
        )
