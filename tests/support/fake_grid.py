"""A Grid in this process: real ClientApps behind it, everything serialised on the way, and whatever can go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.serde import message_to_proto, recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedstrata.nodes.client import app

Fault = Callable[[Message, Message], Message | None]
"""From an order and the node's true reply to what comes back: another reply, or nothing."""


class FakeGrid(Grid):
    """Nodes that carry out a message when it is pushed. `wire` has what every message and its reply weighed.

    `replies` are the bytes of all that nodes sent, also of what Flower says for them when they raise.
    """

    def __init__(self, recipe: Path, clients: int) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        self.recipe = recipe
        self.nodes: dict[int, Context] = {}
        self.faults: dict[int, Fault] = {}  # by client
        self.sent: list[Message] = []
        self.wire: list[tuple[Message, RecordDict, int]] = []
        self.replies: list[bytes] = []
        self._replies: dict[str, Message] = {}
        self._numbers = count(1)
        for client in range(clients):
            self.join(1000 + client, client)

    def join(self, node: int, client: int, **config: Any) -> None:
        """A SuperNode starts, with an empty state."""
        memory = str(self.recipe.parent / "memory of nodes")
        own = {"partition-id": client, "recipe": str(self.recipe), "memory": memory, **config}
        self.nodes[node] = Context(1, node, own, RecordDict(), {})

    def leave(self, node: int) -> None:
        del self.nodes[node]

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            identifier = f"message-{next(self._numbers)}"
            message.metadata.__dict__["_message_id"] = identifier
            self.sent.append(message)
            ids.append(identifier)
            context = self.nodes.get(message.metadata.dst_node_id)
            reply = gone(message) if context is None else self.carry_out(message, context)
            if reply is not None:
                self._replies[identifier] = reply
        return ids

    def carry_out(self, message: Message, context: Context) -> Message | None:
        """What Flower does on a node: it calls the app, and tells of an exception."""
        arrived = Message(_serialised(message.content)[0], metadata=message.metadata)  # type: ignore[call-overload]
        try:
            reply: Message | None = app(arrived, context)
        except Exception as error:
            reply = Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)
        fault = self.faults.get(int(context.node_config["partition-id"]))
        if fault is not None and reply is not None:
            reply = fault(message, reply)
        if reply is not None:
            self.replies.append(message_to_proto(reply).SerializeToString())
        if reply is not None and reply.has_content():
            content, size = _serialised(reply.content)
            self.wire.append((message, content, size))
            reply = Message(content, reply_to=message)
        return reply

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(one) for one in list(message_ids) if one in self._replies]

    def count(self, kind: str) -> int:
        """How many messages of a type were sent."""
        return sum(message.metadata.message_type == kind for message in self.sent)

    # What the engine has no use for.

    run: Any = None

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError


def _serialised(content: RecordDict) -> tuple[RecordDict, int]:
    data = recorddict_to_proto(content).SerializeToString()
    return recorddict_from_proto(ProtoRecordDict.FromString(data)), len(data)


def gone(message: Message) -> Message:
    """What the SuperLink says when a node does not answer its calls any more."""
    return Message(Error(5, "Node Unavailable"), reply_to=message)
