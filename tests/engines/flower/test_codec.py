"""Orders and replies through Flower's records: nothing is lost, nothing is added, nothing is trusted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto

from fedstrata.core.errors import MessageError
from fedstrata.core.layers import Layers
from fedstrata.core.messages import INDEX_BYTES, Order, Reply, layers_with_units
from fedstrata.engines.flower.codec import (
    RAW,
    Hello,
    decode_hello,
    decode_order,
    decode_reply,
    encode_hello,
    encode_order,
    encode_reply,
)


class Mixed(nn.Module):
    """A convolution with BatchNorm (numbers that only ride along) and two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)
        self.fc1, self.fc2 = nn.Linear(5, 4), nn.Linear(4, 2, bias=False)


LAYERS = Layers.of(Mixed(), "block")
DOUBLE = Layers.of(Mixed().double(), "block")
MANY = Layers.of(nn.Sequential(*[nn.Linear(1, 1) for _ in range(11)]))  # a mask of two bytes
STATE = {"mu": torch.rand(3, dtype=torch.float64), "previous": torch.rand(2, 2)}


def over_the_wire(content: RecordDict) -> RecordDict:
    """As it is serialised and read again."""
    return recorddict_from_proto(
        type(recorddict_to_proto(content)).FromString(recorddict_to_proto(content).SerializeToString())
    )


def same(left: Any, right: Any) -> None:
    """Two messages with the same bits everywhere."""
    assert vars(left).keys() == vars(right).keys()
    for name, ours in vars(left).items():
        theirs = getattr(right, name)
        if isinstance(ours, torch.Tensor):
            assert ours.dtype == theirs.dtype, name
            assert ours.shape == theirs.shape, name
            assert ours.numpy().tobytes() == theirs.numpy().tobytes(), name
        elif isinstance(ours, dict) and any(isinstance(value, torch.Tensor) for value in ours.values()):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        else:
            assert ours == theirs or (name == "metrics" and repr(ours) == repr(theirs)), name


def vector(layers: Layers, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=layers.numel)).to(layers.dtype)


def masks(layers: Layers) -> st.SearchStrategy[torch.Tensor]:
    return st.lists(st.booleans(), min_size=len(layers), max_size=len(layers)).map(torch.tensor)


numbers = st.integers(0, 2**40)
layouts = st.sampled_from([LAYERS, DOUBLE, MANY])


@settings(max_examples=60, deadline=None)
@given(st.data(), layouts, numbers, numbers, numbers)
def test_orders_arrive_as_they_were_sent(
    data: st.DataObject, layers: Layers, round: int, client: int, seed: int
) -> None:
    kind: Any = data.draw(st.sampled_from(["train", "upload", "evaluate"]))
    order = Order(
        kind,
        round,
        data.draw(st.integers(0, 5)),
        client,
        model=None if kind == "upload" else vector(layers, seed),
        objective_state=data.draw(st.sampled_from([{}, STATE])),
        answer=data.draw(st.sampled_from(["layers", "scores", "units"])),
        mask=data.draw(st.none() | masks(layers)),
        work=data.draw(st.integers(1, 100)),
        metric=data.draw(st.text(max_size=8)),
    )
    same(order, decode_order(over_the_wire(encode_order(order, layers)), layers))


@settings(max_examples=100, deadline=None)
@given(st.data(), layouts, numbers)
def test_replies_arrive_as_they_were_sent(data: st.DataObject, layers: Layers, seed: int) -> None:
    """Whole layers, units of the client's choice, or scores; with what nobody sent as zeros."""
    what = data.draw(st.sampled_from(["layers", "units", "scores", "nothing"]))
    update, sent, units, scores = None, None, None, None
    if what == "layers":
        update, sent = vector(layers, seed), data.draw(masks(layers))
        for layer, is_sent in zip(layers.layers, sent.tolist(), strict=True):
            if not is_sent:
                update[layer.start : layer.stop] = 0
    elif what == "units":
        update = vector(layers, seed)
        units = torch.from_numpy(np.random.default_rng(seed).random(layers.units) < data.draw(st.floats(0, 1)))
        sent = layers_with_units(units, layers)
        for entry in (entry for layer in layers.layers for entry in layer.entries):
            rows = update[entry.start : entry.stop].view(entry.units, -1)
            rows[~units[entry.first_unit : entry.first_unit + entry.units]] = 0
    elif what == "scores":
        scores = torch.rand(len(layers))
    order = Order("train", 3, 1, data.draw(numbers))
    reply = Reply(
        size=data.draw(numbers),
        metrics=data.draw(st.dictionaries(st.text(min_size=1, max_size=8), st.floats(), max_size=4)),
        sent=sent,
        units=units,
        update=update,
        scores=scores,
        stiffness=data.draw(st.none() | st.just(torch.rand(len(layers), dtype=torch.float64))),
    )
    same(reply, decode_reply(over_the_wire(encode_reply(reply, order, layers)), order, layers))


@pytest.mark.parametrize("layers", [LAYERS, DOUBLE, MANY])
@pytest.mark.parametrize("share", [0.3, 1.0, None])
def test_a_reply_weighs_what_the_ledger_says_and_little_more(layers: Layers, share: float | None) -> None:
    """At most 256 bytes an array and 2 kB a message, envelope, losses and stiffness included."""
    sent = torch.ones(len(layers), dtype=torch.bool)
    units = None
    if share is not None:
        units = torch.arange(layers.units) % 10 < 10 * share
        sent = layers_with_units(units, layers)
    reply = Reply(
        500, {"loss": 0.5}, sent, units, torch.ones(layers.numel, dtype=layers.dtype),
        stiffness=torch.ones(len(layers), dtype=torch.float64),
    )  # fmt: skip
    content = encode_reply(reply, Order("train", 7, 0, 12), layers)
    ledger = int(reply.upload_bytes(layers, layers.bytes_per_layer()).sum())
    arrays = sum(len(record) for record in content.array_records.values())
    data = sum(
        len(array.data) for name in ("layers", "units") for array in content.array_records.get(name, {}).values()
    )
    assert data == ledger
    assert ledger <= recorddict_to_proto(content).ByteSize() <= ledger + 256 * arrays + 2048


def test_the_bytes_of_units_by_hand() -> None:
    """fc1 has 4 units of 5 weights and a bias. Two of them are 2 · 6 floats and two indices."""
    units = torch.zeros(LAYERS.units, dtype=torch.bool)
    fc1 = LAYERS.layers[LAYERS.names.index("fc1")]
    units[[fc1.first_unit + 1, fc1.first_unit + 3]] = True
    reply = Reply(1, sent=layers_with_units(units, LAYERS), units=units, update=vector(LAYERS, 0))
    content = encode_reply(reply, Order("train", 1, 0, 0), LAYERS)
    assert list(content["layers"]) == list(content["units"]) == ["fc1"]
    assert len(content["layers"]["fc1"].data) == 2 * 6 * 4
    assert np.frombuffer(content["units"]["fc1"].data, np.int32).tolist() == [1, 3]
    assert np.dtype(np.int32).itemsize == INDEX_BYTES


# --- what is refused -------------------------------------------------------------------------------------------------

ORDER = Order("train", 4, 1, 7, model=vector(LAYERS, 1), mask=torch.ones(len(LAYERS), dtype=torch.bool))
REPLY = Reply(10, {"loss": 1.0}, torch.ones(len(LAYERS), dtype=torch.bool), update=vector(LAYERS, 2))
UNITS = torch.arange(LAYERS.units) % 2 == 0
PICKED = Reply(10, sent=layers_with_units(UNITS, LAYERS), units=UNITS, update=vector(LAYERS, 2))


def changed(content: RecordDict, record: str, **values: Any) -> RecordDict:
    """With other values in a record; None takes one out."""
    for name, value in values.items():
        content[record].pop(name, None)
        if value is not None:
            content[record][name] = value
    return content


def raw(count: int, dtype: str = "float32", *, data: int | None = None, stype: str = RAW) -> Array:
    return Array(dtype, (count,), stype, bytes(np.dtype(dtype).itemsize * count if data is None else data))


def indices(*rows: int) -> Array:
    return Array("int32", (len(rows),), RAW, np.array(rows, np.int32).tobytes())


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"schema": 1}, "schema = 1; this version of fedstrata speaks 2"),
        ({"schema": None}, "schema = None"),
        ({"kind": "destroy"}, "kind = 'destroy', asked for 'train'"),
        ({"kind": "upload"}, "kind = 'upload', asked for 'train'"),
        ({"round": 3}, "round = 3, asked for 4"),
        ({"attempt": 0}, "attempt = 0, asked for 1"),
        ({"client": 8}, "client = 8, asked for 7"),
        ({"round": None}, "round is missing"),
        ({"round": 1.0}, "round is a float, not a int"),
        ({"attempt": True}, "attempt is a bool, not a int"),
        ({"client": "7"}, "client is a str"),
        ({"size": -1}, "size = -1"),
        ({"more": 1}, "'more' is not expected"),
        ({"error": "anything"}, "'error' is not expected"),
    ],
)
def test_a_reply_with_another_control_record_is_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(MessageError, match=problem):
        decode_reply(changed(encode_reply(REPLY, ORDER, LAYERS), "reply", **values), ORDER, LAYERS)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"fc3": raw(3)}, r"layers \['fc3'\] are not in the model"),
        ({"fc1": raw(23)}, r"fc1 has shape \[23\], expected \[24\]"),
        ({"fc1": raw(24, "float64")}, "fc1 has dtype float64, expected float32"),
        ({"fc1": raw(24, data=95)}, "fc1 has 95 bytes for 24 numbers"),
        ({"fc1": raw(24, stype="pickle")}, "fc1 is stored as 'pickle', expected 'raw'"),
        ({"fc1": Array(np.zeros(24, np.float32))}, "fc1 is stored as 'numpy.ndarray'"),
        ({"fc1": Array("float32", (10**12,), RAW, b"")}, "fc1 has shape"),
        ({"fc1": Array("float32", (2, 12), RAW, bytes(96))}, r"fc1 has shape \[2, 12\]"),
    ],
)
def test_a_reply_with_other_layers_is_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(MessageError, match=problem):
        decode_reply(changed(encode_reply(REPLY, ORDER, LAYERS), "layers", **values), ORDER, LAYERS)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"fc1": indices(0, 0)}, "units of fc1 are not increasing"),
        ({"fc1": indices(2, 1)}, "units of fc1 are not increasing"),
        ({"fc1": indices(-1, 2)}, "units of fc1 are not increasing"),
        ({"fc1": indices(1, 4)}, "units of fc1 are not increasing indices below 4"),
        ({"fc1": indices()}, "units of fc1: shape"),
        ({"fc1": indices(*range(5))}, "units of fc1: shape"),
        ({"fc1": indices(1)}, r"fc1 has shape \[12\], expected \[6\]"),
        ({"fc1": None}, "layer fc1 has units but no numbers, or numbers but no units"),
        ({"fc9": indices(1)}, "units of 'fc9', which is not in the model"),
    ],
)
def test_a_reply_with_impossible_units_is_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(MessageError, match=problem):
        decode_reply(changed(encode_reply(PICKED, ORDER, LAYERS), "units", **values), ORDER, LAYERS)


@pytest.mark.parametrize(
    ("record", "value", "problem"),
    [
        ("reply", MetricRecord({"size": 1}), "record reply is a MetricRecord"),
        ("layers", ConfigRecord({"fc1": 1}), "record layers is a ConfigRecord"),
        ("other", ConfigRecord({"a": 1}), "record 'other' is not expected"),
        ("metrics", MetricRecord({"loss": [1.0, 2.0]}), "metric 'loss' is not a number"),
        ("metrics", MetricRecord({f"m{k}": 1.0 for k in range(101)}), "101 metrics"),
        ("figures", ArrayRecord({"secrets": raw(3)}), "secrets"),
        ("figures", ArrayRecord({"scores": raw(2)}), "scores has shape"),
        ("figures", ArrayRecord({"stiffness": raw(len(LAYERS))}), "stiffness has dtype float32"),
    ],
)  # fmt: skip
def test_a_reply_with_other_records_is_refused(record: str, value: Any, problem: str) -> None:
    content = encode_reply(REPLY, ORDER, LAYERS)
    content[record] = value
    with pytest.raises(MessageError, match=problem):
        decode_reply(content, ORDER, LAYERS)


def test_units_without_layers_and_nothing_at_all_are_refused() -> None:
    content = encode_reply(PICKED, ORDER, LAYERS)
    del content["layers"]
    with pytest.raises(MessageError, match="units without layers"):
        decode_reply(content, ORDER, LAYERS)
    with pytest.raises(MessageError, match="record reply is missing"):
        decode_reply(RecordDict(), ORDER, LAYERS)


@pytest.mark.parametrize(
    ("record", "values", "problem"),
    [
        ("order", {"schema": 99}, "schema = 99"),
        ("order", {"work": 0}, "work = 0"),
        ("order", {"answer": "everything"}, "answer = 'everything'"),
        ("order", {"kind": "upload"}, "model is not expected"),
        ("order", {"mask": b"\x00\x00"}, "mask has 2 bytes for 3 layers"),
        ("order", {"function": "os:system"}, "'function' is not expected"),
        ("model", {"fc1": None}, "model has other layers"),
        ("model", {"fc1": raw(23)}, "fc1 has shape"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(record: str, values: dict[str, Any], problem: str) -> None:
    with pytest.raises(MessageError, match=problem):
        decode_order(changed(encode_order(ORDER, LAYERS), record, **values), LAYERS)


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (raw(3, "complex64"), "mu has dtype complex64"),
        (Array("object", (1,), RAW, bytes(8)), "mu has dtype object"),
        (raw(3, data=11), "mu has 11 bytes for 3 numbers"),
        (Array("float32", (-2, -2), RAW, bytes(16)), r"mu has shape \[-2, -2\]"),
        (Array("float32", (10**9, 10**9), RAW, bytes(16)), "mu has 16 bytes"),
        (raw(3, stype="numpy.ndarray"), "mu is stored as"),
    ],
)
def test_an_order_with_impossible_objective_state_is_refused(array: Array, problem: str) -> None:
    content = encode_order(ORDER, LAYERS)
    content["state"] = ArrayRecord({"mu": array})
    with pytest.raises(MessageError, match=problem):
        decode_order(content, LAYERS)


@pytest.mark.parametrize(
    "change",
    [{"client": -1}, {"size": -1}, {"size": 2**60}, {"held_out": "3"}, {"schema": 0}, {"agreement": None}],
)
def test_an_introduction_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    hello = Hello(client=3, size=10, held_out=2, agreement="ab12")
    assert decode_hello(over_the_wire(encode_hello(hello))) == hello
    with pytest.raises(MessageError, match=next(iter(change))):
        decode_hello(changed(encode_hello(hello), "hello", **change))
