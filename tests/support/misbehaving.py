"""Our ClientApp, on nodes that do wrong: a plan says which client does what in which round.

It runs where a ClientApp runs, in Ray's actors or below a SuperNode, and spoils true replies just before they leave.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedstrata.nodes.client import app as honest

PLAN = "MISBEHAVIOUR"
"""An environment variable: a JSON file with {client: {round: fault}}."""

CONTROL = "\x1b[2J\x1b]0;owned\x07"
"""Clears a terminal's screen and changes its title."""

Fault = Callable[[RecordDict, RecordDict], RecordDict]
"""From a true reply, and the node's state, to what is sent."""

app = ClientApp()


@app.train()
@app.query("upload")
def answer(message: Message, context: Context) -> Message:
    """A true reply, or a spoiled one. Faults in a second exchange have names that begin with `upload`."""
    content, state = honest(message, context).content, context.state
    order = message.content["order"]
    if "model" in message.content:
        state["model"] = message.content["model"]
    plan = json.loads(Path(os.environ[PLAN]).read_text())
    fault = plan.get(str(order["client"]), {}).get(str(order["round"]))
    if fault is not None and fault.startswith("upload") == (order["kind"] == "upload"):
        return Message(FAULTS[fault](content, state), reply_to=message)
    if "layers" in content:
        state["earlier reply"], state["earlier layers"] = content["reply"], content["layers"]
    return Message(content, reply_to=message)


@app.query("hello")
@app.evaluate()
def other(message: Message, context: Context) -> Message:
    """As it should be."""
    return honest(message, context)


# --- faults ----------------------------------------------------------------------------------------------------------


def raises(content: RecordDict, state: RecordDict) -> RecordDict:
    raise OSError(f"{CONTROL}disk on fire\n")


def reports_a_failure(content: RecordDict, state: RecordDict) -> RecordDict:
    """With a text, which only a simulated node may add."""
    text = f"ValueError: {CONTROL}{'no ' * 1000}\r\n"
    return RecordDict({"failure": ConfigRecord({"kind": "training", "type": "ValueError", "text": text})})


def sleeps(seconds: float) -> Fault:
    def fault(content: RecordDict, state: RecordDict) -> RecordDict:
        time.sleep(seconds)
        return content

    return fault


def says(**values: Any) -> Fault:
    """Other values in the control record."""

    def fault(content: RecordDict, state: RecordDict) -> RecordDict:
        for name, value in values.items():
            content["reply"][name] = value
        return content

    return fault


def first_layer(change: Callable[[Array], Any]) -> Fault:
    """Another array in place of the first layer that is sent."""

    def fault(content: RecordDict, state: RecordDict) -> RecordDict:
        record = content.array_records["layers"]
        name = next(iter(record))
        record[name] = change(record[name])
        return content

    return fault


def not_a_number(array: Array) -> Array:
    numbers = np.frombuffer(array.data, np.float32).copy()
    numbers[0] = math.nan
    return Array(array.dtype, array.shape, array.stype, numbers.tobytes())


def malformed(array: Array) -> Array:
    """What Flower puts on the wire and cannot read again."""
    array.dtype = 5  # type: ignore[assignment]
    return array


def not_asked_for(content: RecordDict, state: RecordDict) -> RecordDict:
    """All layers; those that were not wanted as the model has them."""
    content["layers"] = ArrayRecord({**state["model"], **content["layers"]})
    return content


def withheld(content: RecordDict, state: RecordDict) -> RecordDict:
    content["layers"] = ArrayRecord(dict(list(content["layers"].items())[1:]))
    return content


def of_an_earlier_round(content: RecordDict, state: RecordDict) -> RecordDict:
    return RecordDict({"reply": state["earlier reply"], "layers": state["earlier layers"]})


def more_records(content: RecordDict, state: RecordDict) -> RecordDict:
    content[f"{CONTROL}{'x' * 5000}"] = ConfigRecord({"a": 1})
    return content


def many_metrics(content: RecordDict, state: RecordDict) -> RecordDict:
    content["metrics"] = MetricRecord({f"{number}": 1.0 for number in range(10_000)})
    return content


def many_layers(content: RecordDict, state: RecordDict) -> RecordDict:
    content["layers"] = ArrayRecord({f"{CONTROL}{number}": Array(np.zeros(1)) for number in range(1000)})
    return content


def scores(change: Callable[[np.ndarray], np.ndarray]) -> Fault:
    def fault(content: RecordDict, state: RecordDict) -> RecordDict:
        given = np.frombuffer(content["figures"]["scores"].data, np.float32)
        changed = change(given.copy()).astype(np.float32)
        content.array_records["figures"]["scores"] = Array("float32", changed.shape, "raw", changed.tobytes())
        return content

    return fault


def scores_and_layers(content: RecordDict, state: RecordDict) -> RecordDict:
    content["layers"] = state["model"]
    return content


FAULTS: dict[str, Fault] = {
    "raises": raises,
    "sleeps": sleeps(20),
    "sleeps long": sleeps(45),
    "reports a failure": reports_a_failure,
    "another version": says(schema=99),
    "another version, at length": says(schema="9" * 100_000),
    "another round": says(round=1),
    "another attempt": says(attempt=7),
    "another client": says(client=0),
    "a negative size": says(size=-5),
    "an absurd size": says(size=10**18),
    "not a number": first_layer(not_a_number),
    "a wrong shape": first_layer(lambda a: Array(a.dtype, (a.shape[0] - 1,), a.stype, a.data[4:])),
    "a huge shape": first_layer(lambda a: Array(a.dtype, (10**15,), a.stype, b"")),
    "a wrong dtype": first_layer(lambda a: Array("float64", a.shape, a.stype, a.data + a.data)),
    "an odd dtype": first_layer(lambda a: Array(CONTROL, a.shape, a.stype, a.data)),
    "a pickle": first_layer(lambda a: Array(a.dtype, a.shape, "pickle", a.data)),
    "too short": first_layer(lambda a: Array(a.dtype, a.shape, a.stype, a.data[1:])),
    "malformed": first_layer(malformed),
    "layers not asked for": not_asked_for,
    "a layer withheld": withheld,
    "an earlier round's layers": of_an_earlier_round,
    "more records": more_records,
    "many metrics": many_metrics,
    "many layers": many_layers,
    "nothing": lambda content, state: RecordDict(),
    "scores not finite": scores(lambda given: given * math.inf),
    "scores too short": scores(lambda given: given[1:]),
    "scores and layers": scores_and_layers,
    "upload: raises": raises,
    "upload: layers not asked for": not_asked_for,
    "upload: an earlier round's layers": of_an_earlier_round,
    "upload: a wrong shape": first_layer(lambda a: Array(a.dtype, (a.shape[0] - 1,), a.stype, a.data[4:])),
}
