"""Fetching replies so that one which Flower cannot put together again costs nothing but itself."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from flwr.app import Error, Message
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError

from fedstrata.core.errors import MessageError

_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, DecodeError)
"""What Flower raises when a message's parts do not fit together; never a connection that breaks."""

UNREADABLE = 1000
"""The error code of a reply that Flower cannot read: none of Flower's own."""

_POLL = 0.1


def fetch(grid: Grid, wanted: Iterable[str]) -> Iterator[tuple[str, Message | MessageError]]:
    """What has come for these messages, by the message that it answers.

    One at a time, as what Flower cannot put together again would take with it all that is fetched with it.
    """
    for one in wanted:
        try:
            found: list[Message | MessageError] = list(grid.pull_messages([one]))
        except _UNREADABLE as error:
            found = [MessageError(f"Flower cannot read it: {type(error).__name__}: {error}")]
        yield from ((one, message) for message in found)


class OneByOne(Grid):
    """A grid that fetches replies one by one: one that Flower cannot read becomes an error reply."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    @classmethod
    def of(cls, grid: Grid) -> OneByOne:
        """A grid that is one already stays as it is."""
        return grid if isinstance(grid, cls) else cls(grid)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages, and wait for their replies until all are here or time is up."""
        messages = list(messages)
        sent = set(self._grid.push_messages(messages))
        waiting = {m.metadata.message_id: m for m in messages if m.metadata.message_id in sent}
        deadline = None if timeout is None else time.monotonic() + timeout
        replies: list[Message] = []
        while waiting:
            asked = time.monotonic()
            for about, reply in fetch(self._grid, list(waiting)):
                message = waiting.pop(about, None)
                if isinstance(reply, Message):
                    replies.append(reply)
                elif message is not None:
                    replies.append(Message(Error(UNREADABLE, str(reply)), reply_to=message))
            now = time.monotonic()
            if not waiting or (deadline is not None and now >= deadline):
                break
            pause = max(_POLL, 2 * (now - asked))  # many nodes are asked for less often
            time.sleep(pause if deadline is None else min(pause, deadline - now))
        return replies

    # --- the rest is the grid's own -----------------------------------------------------------------------------

    def set_run(self, run: Any) -> None:
        """Set the run that the grid works for."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """The run that the grid works for."""
        return self._grid.run

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        """Make a message, as Flower once did."""
        return self._grid.create_message(*arguments, **options)

    def get_node_ids(self) -> Iterable[int]:
        """The nodes that are connected."""
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[NodeInfo]:
        """The nodes that are connected, and what is known of them."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Fetch what has come."""
        return self._grid.pull_messages(message_ids)
