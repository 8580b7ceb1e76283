"""What a node says and does, with the same `Client` as every engine.

That is configured on its own side: `recipe` (a path or a name), `data` (its own data, or where data sets are) and
`partition-id` (which client it is) in its node config. Where that does not say, the first two come from the
environment. Nothing that arrives in a message names code or data.

Everything that leaves a node is here: an introduction, replies, and what failures.py makes of an exception.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict

from fedstrata.clients.client import Client, Kept
from fedstrata.core.errors import MISSING, DataError, MemoryLost, MessageError, RecipeError
from fedstrata.core.memory import Version
from fedstrata.core.messages import Kind, Order
from fedstrata.engines.flower.codec import (
    Hello,
    decode_array,
    decode_order,
    encode_array,
    encode_hello,
    encode_reply,
)
from fedstrata.engines.flower.failures import Kind as FailureKind
from fedstrata.engines.flower.failures import during
from fedstrata.nodes.environment import DATA, MEMORY, RECIPE
from fedstrata.nodes.memory import NodeMemory, folder_of
from fedstrata.processes import keep_memory
from fedstrata.recipes.experiment import build_experiment
from fedstrata.recipes.schema import Recipe, load
from fedstrata.tasks.nodes import own_task

_log = logging.getLogger("fedstrata")

_FAILURES: dict[Kind, FailureKind] = {"train": "training", "upload": "upload", "evaluate": "evaluation"}


def introduction(context: Context) -> RecordDict:
    """Which client this is."""
    node = own_client(context.node_config)
    return encode_hello(Hello(node.client, node.size, node.held_out, node.agreement))


def answer(content: RecordDict, context: Context) -> RecordDict:
    """Carry out an order."""
    node = own_client(context.node_config)
    layers = node.answers.setup.layers
    with during("order"):
        order = decode_order(content, layers)
    _object(order, node, context.state)
    context.state["latest"] = ConfigRecord({"round": order.round, "attempt": order.attempt})
    with during("memory"):
        memory = _memory(node, order, context.node_config)
        order = _attached(order, memory)
    with during(_FAILURES[order.kind]):
        node.answers.kept = _kept(order, context.state)
        try:
            reply = node.answers.carry_out(order)
        finally:
            _keep(node.answers.kept.get(order.client), context.state)
    if memory is not None and reply.memory is not None:
        with during("memory"):
            memory.put(order, reply.memory)
    return encode_reply(reply, order, layers)


def _object(order: Order, node: OwnClient, state: RecordDict) -> None:
    """Refuse an order that is not to be carried out."""
    with during("another client"):
        _require(order.client == node.client, f"order for client {order.client}, this node has client {node.client}")
    with during("work"):
        setup = node.answers.setup
        most = setup.training.full_work
        _require(order.work <= most, f"work = {order.work}, this node's recipe has {most}")
        _require(order.fine_tune <= setup.fine_tune, f"fine_tune = {order.fine_tune}, it has {setup.fine_tune}")
    if order.kind == "evaluate":
        with during("metric"):
            own = node.answers.setup.task.metric.name
            _require(order.metric == own, f"metric = {order.metric!r}, this node's task has {own!r}")
    if (seen := state.config_records.get("latest")) is not None:
        with during("late"):
            latest = (int(seen["round"]), int(seen["attempt"]))  # type: ignore[arg-type]
            has_begun = f"late: round {latest[0]}, attempt {latest[1]} has begun"
            _require((order.round, order.attempt) >= latest, has_begun)


def _memory(node: OwnClient, order: Order, config: Mapping[str, object]) -> NodeMemory | None:
    """What the client remembers; None, if by its own recipe it remembers nothing."""
    if not node.answers.remembers:
        return None
    if (folder := folder_of(config)) is None:
        raise RecipeError("memory", MISSING, f"set it in the node config, or {MEMORY} in the environment")
    return NodeMemory(folder, order.run, order.client)


def _attached(order: Order, memory: NodeMemory | None) -> Order:
    if memory is None or order.base is None or order.kind == "upload":
        return order
    try:
        return replace(order, memory=memory.of(order))
    except MemoryLost as lost:
        if not order.afresh:
            raise
        _log.warning("%s; it starts afresh, as the server wants it", lost)
        return order


def _require(condition: bool, objection: str) -> None:
    if not condition:
        raise MessageError(objection)


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
    with during("configuration"):
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
    with during("data"):
        held_out = 0 if task.held_out is None else len(task.client_held_out(client))
        return OwnClient(client, len(task.clients), len(task.client(client)), held_out, agreement, answers)


def _text(config: Mapping[str, object], key: str) -> str | None:
    value = config.get(key, "")
    if not isinstance(value, str):
        raise RecipeError(key, value, "must be text, in quotation marks")
    return value or None


@cache
def _recipe(path: str) -> Recipe:
    return load(path, settings={"engine.name": "flower"})


def _has_own_data(recipe: str) -> bool:
    return _recipe(recipe).task.nodes is not None


@cache
def _load(path: str, data: str | None, owner: int | None) -> tuple[Client, str]:
    """The task and a model, once per process: an actor of a simulation answers for many nodes.

    `owner` is the client whose own data `data` is; otherwise all clients' data is in the recipe's data set.
    """
    recipe = _recipe(path)
    if owner is None:
        with during("data", of=DataError):
            experiment = build_experiment(recipe, data=Path(data).expanduser() if data else None)
    else:
        experiment = build_experiment(recipe)
        config, held_out = recipe.task.nodes, recipe.evaluation.held_out
        assert config is not None
        with during("data"):
            task = own_task(experiment.task, config, data, owner, held_out, recipe.seed, recipe.task.augment)
        experiment = replace(experiment, task=task)
    keep_memory()
    return Client(experiment.setup), experiment.agreement


# --- between two exchanges -----------------------------------------------------------------------------------------
# A node's process may end, or serve another node, before the second exchange. Its context stays with the node.


def _keep(kept: Kept | None, state: RecordDict) -> None:
    for name in ("kept", "update", *_MEMORIES):
        state.pop(name, None)
    if kept is not None:
        state["kept"] = ConfigRecord({"round": kept.round, "attempt": kept.attempt, "size": kept.size})
        state["update"] = ArrayRecord({"update": encode_array(kept.update)})
        for name in _MEMORIES:
            if (version := getattr(kept, name)) is not None:
                state[name] = ArrayRecord({key: encode_array(value) for key, value in version.items()})


def _kept(order: Order, state: RecordDict) -> dict[int, Kept]:
    control, arrays = state.config_records.get("kept"), state.array_records.get("update")
    if control is None or arrays is None:
        return {}
    update = decode_array("update", arrays["update"])
    round, attempt, size = (int(control[name]) for name in ("round", "attempt", "size"))  # type: ignore[arg-type]
    memory, candidate = (_version(state.array_records.get(name)) for name in _MEMORIES)
    return {order.client: Kept(round, attempt, size, update, memory, candidate)}


def _version(record: ArrayRecord | None) -> Version | None:
    return None if record is None else {name: decode_array(name, array) for name, array in record.items()}


_MEMORIES = ("memory", "candidate")
