"""Flower without a network: a grid that runs ClientApps in this process, over Flower's own wire format."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_to_proto
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from torch import nn

from fedstrata import Task
from fedstrata.flower import Local, selection_mod

DROP_IN = {
    "pyproject.toml": ['+    "fedstrata[flower] @ file:///path/to/fedstrata-0.2.0-py3-none-any.whl",'],
    "pytorchexample/server_app.py": [
        "-from flwr.serverapp.strategy import FedAvg",
        "+import fedstrata.flower",
        "-    strategy = FedAvg(fraction_evaluate=fraction_evaluate)",
        "+    strategy = fedstrata.flower.Strategy(fedstrata.fedlayerwise(), fraction_evaluate=fraction_evaluate)",
    ],
}
"""What the README shows: three lines in the place of two."""


def carried(message: Message) -> Message:
    """What arrives of a message: taken apart into the objects that Flower sends, and put together again."""
    contents = {part.object_id: part.deflate() for part in get_all_nested_objects(message).values()}
    arrived = inflate_object_from_contents(message.object_id, contents)
    assert isinstance(arrived, Message)
    arrived.metadata.__dict__["_message_id"] = message.metadata.message_id
    return arrived


def record_bytes(message: Message) -> int:
    """What a message's records weigh in Flower's format."""
    return len(recorddict_to_proto(message.content).SerializeToString())


def failure(reply: Message, reason: str, code: int = 2) -> Message:
    """An error in the place of a reply."""
    failed = Message(Error(code=code, reason=reason), reply_to=reply)
    failed.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
    failed.metadata.__dict__["_src_node_id"] = reply.metadata.src_node_id
    return failed


def asked(message: Message) -> dict[str, Any]:
    """What a message asks for beyond plain training."""
    words: Any = message.content["config"]["fedstrata"]
    found: dict[str, Any] = json.loads(words)
    return found


def ask(message: Message, **changes: Any) -> None:
    """Let a message ask for something else."""
    message.content.config_records["config"]["fedstrata"] = json.dumps(asked(message) | changes)


class FakeGrid(Grid):
    """Nodes with one ClientApp each. `change(reply, node)` may spoil a reply; None is a reply that never comes.

    Replies come as objects, as over a network, or in one piece, as from Flower's simulation (`simulated`).
    """

    def __init__(
        self,
        apps: dict[int, ClientApp],
        *,
        change: Callable[[Message, int], Message | None] = lambda reply, node: reply,
        connected: Callable[[], Iterable[int]] | None = None,
        simulated: bool = False,
    ) -> None:
        self.apps, self.change, self.simulated = apps, change, simulated
        self.connected = connected or (lambda: list(apps))
        self.contexts = {
            node: Context(run_id=1, node_id=node, node_config={"partition-id": at}, state=RecordDict(), run_config={})
            for at, node in enumerate(apps)
        }
        self.sent: list[Message] = []
        self.received: list[Message] = []
        self.waiting: dict[str, Message] = {}  # replies that nobody has fetched yet

    def get_node_ids(self) -> list[int]:
        return list(self.connected())

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        pushed = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid.uuid4())
            self.sent.append(message)
            pushed.append(message.metadata.message_id)
            node = message.metadata.dst_node_id
            arrived = carried(message)
            try:
                reply = self.apps[node](arrived, self.contexts[node])
            except Exception as error:  # Flower turns what a ClientApp raises into an error reply that names no node
                reply = Message(Error(code=2, reason=str(error)), reply_to=arrived)
                reply.metadata.__dict__["_src_node_id"] = 1
            spoilt = self.change(reply, node)
            if spoilt is not None:  # one that answers nothing is lost, as on a SuperLink
                self.waiting[spoilt.metadata.reply_to_message_id] = spoilt
        return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        found = [self.waiting.pop(one) for one in message_ids if one in self.waiting]
        replies = found if self.simulated else [carried(reply) for reply in found]
        self.received += replies
        return replies[::-1]  # in no particular order

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        pushed = self.push_messages(messages)
        missing = [one for one in pushed if one not in self.waiting]
        if missing and timeout is not None:
            assert timeout < 10, f"nobody waits for {timeout} s here"
            time.sleep(timeout)
        return self.pull_messages(pushed)

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **options: Any) -> Message:
        raise NotImplementedError


def stock_app(task: Task, *, lr: float, epochs: int = 1) -> ClientApp:
    """Full-batch SGD, written as Flower's guides do, without anything of fedstrata's."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model, (inputs, targets) = _loaded(task, message, context)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for _ in range(epochs):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        return Message(_content(model, loss.item(), len(inputs)), reply_to=message)

    app.evaluate()(_evaluate(task))
    return app


def helped_app(
    task: Task, *, lr: float, epochs: int = 1, pull: bool = True, dtype: torch.dtype = torch.float64
) -> ClientApp:
    """The same with the proximal term in its loop and the mod that selects."""
    app = ClientApp(mods=[selection_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model, batch = _loaded(task, message, context, dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        local = Local(message, model)
        for _ in range(epochs):
            local.epoch()
            inputs, targets = batch
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            if pull:
                local.pull()
            optimizer.step()
        content = _content(model, loss.item(), len(batch[0]))
        return Message(local.acknowledge(content), reply_to=message)

    app.evaluate()(_evaluate(task))
    return app


def array_app(train: Callable[[dict[str, Any], int], tuple[dict[str, Any], dict[str, Any]]]) -> ClientApp:
    """A client of no framework: `train(arrays, node)` gives new arrays and metrics."""
    app = ClientApp()

    @app.train()
    def train_message(message: Message, context: Context) -> Message:
        arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
        new, metrics = train(arrays, context.node_id)
        record = ArrayRecord({name: Array(array) for name, array in new.items()})
        return Message(RecordDict({"arrays": record, "metrics": MetricRecord(metrics)}), reply_to=message)

    return app


def _loaded(
    task: Task, message: Message, context: Context, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, Sequence[torch.Tensor]]:
    model = task.model().to(dtype)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.train()
    return model, task.clients[int(context.node_config["partition-id"])]


def _content(model: nn.Module, loss: float, size: int) -> RecordDict:
    metrics = MetricRecord({"train_loss": loss, "num-examples": size})
    return RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})


def _evaluate(task: Task) -> Callable[[Message, Context], Message]:
    def evaluate(message: Message, context: Context) -> Message:
        model, (inputs, targets) = _loaded(task, message, context)
        model.eval()
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(model(inputs), targets))
        content = RecordDict({"metrics": MetricRecord({"eval_loss": loss, "num-examples": len(inputs)})})
        return Message(content, reply_to=message)

    return evaluate
