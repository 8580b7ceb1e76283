"""The ClientApp: a node answers orders for its one client, with the same `Client` as every engine.

What a node does is configured on its own side: `recipe` (a path or a name), `data` (its own data, or where data sets
are) and `partition-id` (which client it is) in its node config. Where that does not say, the first two come from the
environment. Nothing that arrives in a message names code or data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedstrata.client import Client, Kept
from fedstrata.engines.flower.codec import (
    Hello,
    decode_array,
    decode_order,
    encode_array,
    encode_hello,
    encode_reply,
)
from fedstrata.engines.local import keep_memory
from fedstrata.errors import RecipeError
from fedstrata.experiment import Experiment, load
from fedstrata.messages import Order
from fedstrata.prepared import prepare
from fedstrata.tasks.nodes import own_task

RECIPE, DATA = "FEDSTRATA_FLOWER_RECIPE", "FEDSTRATA_FLOWER_DATA"

app = ClientApp()


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Say which client this is."""
    node = own_client(context.node_config)
    return Message(encode_hello(Hello(node.client, node.size, node.held_out, node.agreement)), reply_to=message)


@app.train()
@app.query("upload")
@app.evaluate()
def answer(message: Message, context: Context) -> Message:
    """Carry out an order; a failure is a reply with an error."""
    node = own_client(context.node_config)
    layers = node.answers.setup.layers
    order = decode_order(message.content, layers)
    problem = _objection(order, node, context.state)
    if problem is not None:
        reply = order.failure(problem)
    else:
        context.state["latest"] = ConfigRecord({"round": order.round, "attempt": order.attempt})
        node.answers.kept = _kept(order.client, context.state)
        reply = node.answers.answer(order)
        _keep(node.answers.kept.get(order.client), context.state)
    return Message(encode_reply(reply, layers), reply_to=message)


def _objection(order: Order, node: OwnClient, state: RecordDict) -> str | None:
    """Why an order is not carried out."""
    if order.client != node.client:
        return f"order for client {order.client}, this node has client {node.client}"
    most = node.answers.setup.training.full_work
    if order.work > most:
        return f"work = {order.work}, this node's recipe has {most}"
    if (seen := state.config_records.get("latest")) is not None:
        latest = (int(seen["round"]), int(seen["attempt"]))  # type: ignore[arg-type]
        if (order.round, order.attempt) < latest:
            return f"late: round {latest[0]}, attempt {latest[1]} has begun"
    return None


# --- what this node is ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnClient:
    """A node's client: what it says of itself, and what carries out its orders."""

    client: int
    clients: int
    size: int
    held_out: int
    agreement: str
    answers: Client


def own_client(config: Mapping[str, object]) -> OwnClient:
    """What a node's own configuration comes to."""
    recipe = _text(config, "recipe") or os.environ.get(RECIPE)
    data = _text(config, "data") or os.environ.get(DATA)
    client = config.get("partition-id")
    if recipe is None:
        raise RecipeError("recipe", recipe, "this node's config does not say which recipe it follows")
    if type(client) is not int or client < 0:
        raise RecipeError("partition-id", client, "must say which client this node is: a whole number from 0")
    answers, agreement = _load(recipe, data, client if _has_own_data(recipe) else None)
    task = answers.setup.task
    if client >= len(task.clients):
        raise RecipeError("partition-id", client, f"the recipe has {len(task.clients)} clients, from 0")
    held_out = 0 if task.held_out is None else len(task.client_held_out(client))
    return OwnClient(client, len(task.clients), len(task.client(client)), held_out, agreement, answers)


def _text(config: Mapping[str, object], key: str) -> str | None:
    value = config.get(key, "")
    if not isinstance(value, str):
        raise RecipeError(key, value, "must be text, in quotation marks")
    return value or None


@cache
def _recipe(path: str) -> Experiment:
    return load(path, settings={"engine.name": "flower"})


def _has_own_data(recipe: str) -> bool:
    return _recipe(recipe).task.nodes is not None


@cache
def _load(recipe: str, data: str | None, owner: int | None) -> tuple[Client, str]:
    """The task and a model, once per process: an actor of a simulation answers for many nodes.

    `owner` is the client whose own data `data` is; otherwise all clients' data is in the recipe's data set.
    """
    experiment = _recipe(recipe)
    if owner is None:
        prepared = prepare(experiment, data=Path(data).expanduser() if data else None)
    else:
        prepared = prepare(experiment)
        config, held_out = experiment.task.nodes, experiment.evaluation.held_out
        assert config is not None
        prepared = replace(prepared, task=own_task(prepared.task, config, data, owner, held_out, experiment.seed))
    keep_memory()
    return Client(prepared.setup), prepared.agreement


# --- between two exchanges -----------------------------------------------------------------------------------------
# A node's process may end, or serve another node, before the second exchange. Its context stays with the node.


def _keep(kept: Kept | None, state: RecordDict) -> None:
    for name in ("kept", "update"):
        state.pop(name, None)
    if kept is not None:
        state["kept"] = ConfigRecord({"round": kept.round, "attempt": kept.attempt, "size": kept.size})
        state["update"] = ArrayRecord({"update": encode_array(kept.update)})


def _kept(client: int, state: RecordDict) -> dict[int, Kept]:
    control, arrays = state.config_records.get("kept"), state.array_records.get("update")
    if control is None or arrays is None:
        return {}
    update = decode_array("update", arrays["update"])
    return {client: Kept(int(control["round"]), int(control["attempt"]), int(control["size"]), update)}  # type: ignore[arg-type]
