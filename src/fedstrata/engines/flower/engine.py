"""The engine over Flower's Grid.

Clients are numbered as in the recipe; which node has which one, the nodes say themselves when they are first seen. A
node that is silent, gone or talks nonsense costs the round its own client only, and the record says why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from fedstrata.clients.client import Client
from fedstrata.clients.training import Setup
from fedstrata.core import rng
from fedstrata.core.errors import FedstrataError, MessageError, printable, tail
from fedstrata.core.messages import Answer, Kind, Order
from fedstrata.core.status import Status
from fedstrata.engines.flower.codec import Hello, decode_hello, decode_reply, encode_model, encode_order
from fedstrata.engines.flower.failures import NodeFailed
from fedstrata.engines.flower.grid import fetch

MESSAGE_TYPES: dict[Kind, str] = {"train": "train", "upload": "query.upload", "evaluate": "evaluate"}
HELLO = "query.hello"

_EXPIRED = 3
_FAILURES = {1: "the ClientApp cannot be loaded", 2: "the ClientApp raised", 7: "the app cannot be installed"}
_SILENCE = {_EXPIRED: "time is up", 4: "the reply was lost", 5: "the node is gone", 8: "the ClientApp died"}
"""Flower's error codes. A failure would happen again; silence is worth another attempt."""

_log = logging.getLogger("fedstrata")

Read = TypeVar("Read")


class FlowerEngine:
    """Carries orders to the nodes of a Grid."""

    def __init__(
        self,
        grid: Grid,
        setup: Setup,
        agreement: str,
        clients: int,
        *,
        timeout: float,
        poll: float = 0.1,
        simulated: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """So many `clients` may exist; each node must come to the same `agreement` by its own recipe.

        `check`, called while waiting, raises if there is nothing left to wait for. Nodes that are `simulated` are on
        this machine, and trusted: their replies are fetched all at once, and failures are told in full.
        """
        self.sizes = np.zeros(clients, dtype=np.int64)
        self.held_out_sizes = np.zeros(clients, dtype=np.int64)
        self._grid, self._timeout, self._poll, self._check = grid, timeout, poll, check
        self.run, self.afresh = "", False
        """Which run the clients' memory belongs to; and whether who lost it starts afresh."""
        self._simulated = simulated
        self._layers, self._agreement = setup.layers, agreement
        self._metric = setup.task.metric.name
        self._server = Client(setup)  # the server's own data sets are measured here
        self._asked: dict[str, int] = {}  # message -> node, where there is no introduction yet
        self._met: dict[int, Hello] = {}  # in the order in which they came
        self._strange: dict[int, str] = {}  # why a node cannot take part
        self._troubled: dict[int, str] = {}  # why a node could not introduce itself yet
        self._online: set[int] = set()

    # --- orders -----------------------------------------------------------------------------------------------------

    def exchange(self, orders: Sequence[Order]) -> Iterator[tuple[Order, Answer]]:
        """Send every order to its client's node, and wait for the answers until time is up."""
        remote = [order for order in orders if order.client != rng.SERVER]
        yield from ((order, self._server.answer(order)) for order in orders if order.client == rng.SERVER)
        if not remote:
            return
        self._greet()
        holders = self._holders()
        model = None if remote[0].model is None else encode_model(remote[0].model, self._layers)
        waiting: dict[str, Order] = {}
        unsent = []
        for order in remote:
            named = replace(order, run=self.run, afresh=self.afresh) if self._server.remembers else order
            if order.kind == "evaluate":
                named = replace(named, metric=self._metric)
            content = encode_order(named, self._layers, model if order.model is remote[0].model else None)
            node = holders.get(order.client)
            message = None if node is None else self._push(node, MESSAGE_TYPES[order.kind], content, self._timeout)
            if message is None:
                unsent.append(order)
            else:
                waiting[message] = order
        yield from ((order, Status("no reply", "no node that is online has this client")) for order in unsent)
        deadline = time.monotonic() + self._timeout
        while waiting:
            replies = self._pull(waiting)
            for answered, reply in replies.items():
                order = waiting.pop(answered)
                yield order, self._read(order, reply)
            if waiting and time.monotonic() > deadline:
                break
            if waiting and not replies:
                self._check()
                time.sleep(self._poll)
        yield from ((order, self._late()) for order in waiting.values())

    def _read(self, order: Order, message: Message | MessageError) -> Answer:
        if isinstance(message, Message) and message.has_error():
            if message.error.code == _EXPIRED:
                return self._late()
            return Status("no reply" if message.error.code in _SILENCE else "failed", self._explain(message.error))
        try:
            return _decoded(message, lambda content: decode_reply(content, order, self._layers, self._simulated))
        except NodeFailed as failure:
            return Status("failed", str(failure))
        except MessageError as problem:
            return Status("refused", str(problem))

    def _late(self) -> Status:
        return Status("no reply", f"nothing within {self._timeout:g} s")

    # --- nodes ------------------------------------------------------------------------------------------------------

    def wait_for(self, clients: int, patience: float) -> None:
        """Wait until so many clients have a node."""
        deadline, told = time.monotonic() + patience, -1
        while True:
            self._greet()
            self._pull(())
            here = len(self._holders())
            if here >= clients:
                return
            if time.monotonic() > deadline:
                problems = (*self._strange.values(), *self._troubled.values(), *self._rivals().values())
                reasons = "".join(f"; {why}" for why in problems)
                raise FedstrataError(f"waited {patience:g} s for {clients} clients, {here} are here{reasons}")
            if here != told:
                _log.info("waiting for %d clients, %d are here", clients, here)
                told = here
            self._check()
            time.sleep(self._poll)

    def _greet(self) -> None:
        """Ask every node that was not here just now who it is. One that was away may come back with another recipe."""
        self._online = set(self._grid.get_node_ids())
        for known in (self._met, self._strange, self._troubled):
            for node in known.keys() - self._online:
                del known[node]
        for node in sorted(self._online - set(self._met) - set(self._strange) - set(self._asked.values())):
            message = self._push(node, HELLO, RecordDict(), lifetime=None)
            if message is not None:
                self._asked[message] = node

    def _introduce(self, node: int, message: Message | MessageError) -> None:
        try:
            if isinstance(message, Message) and message.has_error():
                raise NodeFailed(self._explain(message.error))
            hello = _decoded(message, lambda content: decode_hello(content, self._simulated))
            if hello.client >= len(self.sizes):
                raise MessageError(f"client = {hello.client}, there are only {len(self.sizes)}")
            if hello.agreement != self._agreement:
                raise MessageError(f"client {hello.client} has another recipe than the server")
        except NodeFailed as failure:
            problem = f"node {node}: {failure}"
            if self._troubled.get(node) != problem:  # it is asked again and again, and need not be told of each time
                _log.warning("%s", problem)
            self._troubled[node] = problem
            return
        except MessageError as refusal:
            self._strange[node] = f"node {node}: {refusal}"
            _log.warning("%s", self._strange[node])
            return
        self._met[node] = hello
        self._troubled.pop(node, None)
        if (rival := self._rivals().get(node)) is not None:
            _log.warning("%s", rival)

    def _holders(self) -> dict[int, int]:
        """Each client's node. Whoever came first keeps a client for as long as it is online."""
        holders: dict[int, int] = {}
        for node, hello in self._met.items():
            if node in self._online and hello.client not in holders:
                holders[hello.client] = node
                self.sizes[hello.client], self.held_out_sizes[hello.client] = hello.size, hello.held_out
        return holders

    def _rivals(self) -> dict[int, str]:
        """Nodes that say to be a client that another one already is."""
        holders = self._holders()
        return {
            node: f"node {node}: says to be client {hello.client}, which is node {holders[hello.client]}"
            for node, hello in self._met.items()
            if node in self._online and holders[hello.client] != node
        }

    def _explain(self, error: Error) -> str:
        """What Flower's error means. Its reason may come from the node, and quote what nobody else may see."""
        what = (_FAILURES | _SILENCE).get(error.code, f"Flower's error {error.code}")
        reason = (error.reason or "") if self._simulated else ""
        detail = printable(tail(reason))
        return f"{what}: {detail}" if detail else what

    # --- messages ---------------------------------------------------------------------------------------------------

    def _push(self, node: int, kind: str, content: RecordDict, lifetime: float | None) -> str | None:
        """Send a message and return its id. What nobody fetches in its lifetime is not carried out later."""
        message = Message(content, dst_node_id=node, message_type=kind, ttl=lifetime)
        return next(iter(self._grid.push_messages([message])), None)

    def _pull(self, waiting: Collection[str]) -> dict[str, Message | MessageError]:
        """What has come for these messages; introductions are taken in on the way."""
        replies = {}
        for about, message in self._fetch([*waiting, *self._asked]):
            if about in self._asked:
                self._introduce(self._asked.pop(about), message)
            elif about in waiting:
                replies[about] = message
        return replies

    def _fetch(self, wanted: Sequence[str]) -> Iterator[tuple[str, Message | MessageError]]:
        """What has come, by the message that it answers."""
        if not self._simulated:
            yield from fetch(self._grid, wanted)
            return
        for message in self._grid.pull_messages(wanted) if wanted else ():
            yield message.metadata.reply_to_message_id, message


def _decoded(message: Message | MessageError, decode: Callable[[RecordDict], Read]) -> Read:
    """What a message says. Whatever it does to the decoder, it is the message that is wrong."""
    if isinstance(message, MessageError):
        raise message
    try:
        return decode(message.content)
    except (MessageError, NodeFailed):
        raise
    except Exception as error:
        raise MessageError(f"cannot be read: {type(error).__name__}: {error}") from None
