"""Orders and replies as Flower's records, and back.

An order is a ConfigRecord `order` and ArrayRecords `model` (an array per layer) and `state` (the objective's). A reply
is a ConfigRecord `reply`, a MetricRecord `metrics`, and ArrayRecords: `layers`, an array per layer that is sent; with
a selection of units also `units`, the indices, and then `layers` has these units' numbers only; `figures`, scores and
stiffness. An array is its numbers' bytes, little-endian, and nothing else. A node that failed says so in another way,
which is in failures.py.

Both sides know the layers from their own configuration, and every size follows from them, so nothing that arrives
decides how much memory is taken or what is imported. What does not fit is a `MessageError`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedstrata.core.errors import MessageError
from fedstrata.core.layers import Layer, Layers
from fedstrata.core.messages import MOST_SAMPLES, SCHEMA, SCORE_DTYPE, Kind, Order, Reply, Wanted, layers_with_units
from fedstrata.engines.flower import failures

RAW = "raw"
"""How an array's numbers are written: as they lie in memory, with no header."""

_INDEX_DTYPE = torch.int32
_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "bool": torch.bool,
}
_MOST_METRICS = 100

_HEADER: dict[str, type] = {"schema": int, "kind": str, "round": int, "attempt": int, "client": int}

_OPTIONAL: dict[str, type] = {
    "mask": bytes,
    "base_round": int,
    "base_attempt": int,
    "since": int,
    "run": str,
    "afresh": bool,
    "fine_tune": int,
}


@dataclass(frozen=True)
class Hello:
    """What a node says of itself when it is asked: which client it is, and how many samples it has."""

    client: int
    size: int
    held_out: int
    agreement: str
    """What it must have in common with its server, in a digest."""


def encode_hello(hello: Hello) -> RecordDict:
    """A node's introduction."""
    return RecordDict({"hello": ConfigRecord({"schema": SCHEMA, **vars(hello)})})


def decode_hello(content: RecordDict, simulated: bool = False) -> Hello:
    """A node's introduction, as far as it makes sense; `NodeFailed`, if it has none."""
    failures.read(content, simulated)
    fields: dict[str, type] = {"schema": int, "client": int, "size": int, "held_out": int, "agreement": str}
    values = _values(_records(content, {"hello": ConfigRecord}, {})["hello"], fields, {})
    del values["schema"]
    for name in ("client", "size", "held_out"):
        _require(values[name] >= 0, f"{name} = {values[name]}, must not be negative")
        _require(values[name] <= MOST_SAMPLES, f"{name} = {values[name]}, is too many")
    return Hello(**values)


# --- orders --------------------------------------------------------------------------------------------------------


def encode_model(model: Tensor, layers: Layers) -> ArrayRecord:
    """A model as an array per layer; the orders of an exchange share it."""
    return ArrayRecord({layer.name: encode_array(model[layer.start : layer.stop]) for layer in layers.layers})


def encode_order(order: Order, layers: Layers, model: ArrayRecord | None = None) -> RecordDict:
    """An order to a client; `model`, if given, is `encode_model` of the order's."""
    control = _header(order) | {"answer": order.answer, "work": order.work, "metric": order.metric}
    if order.base is not None:
        control |= {"base_round": order.base[0], "base_attempt": order.base[1]}
    optional = {"since": order.since, "run": order.run, "afresh": order.afresh, "fine_tune": order.fine_tune}
    control |= {name: value for name, value in optional.items() if value}
    if order.mask is not None:
        control["mask"] = np.packbits(order.mask.numpy()).tobytes()
    records: dict[str, Any] = {"order": ConfigRecord(control)}
    if order.model is not None:
        records["model"] = model or encode_model(order.model, layers)
    if order.objective_state:
        records["state"] = ArrayRecord({name: encode_array(value) for name, value in order.objective_state.items()})
    return RecordDict(records)


def decode_order(content: RecordDict, layers: Layers) -> Order:
    """An order from the server."""
    records = _records(content, {"order": ConfigRecord}, {"model": ArrayRecord, "state": ArrayRecord})
    control = _values(records["order"], _HEADER | {"answer": str, "work": int, "metric": str}, _OPTIONAL)
    kind, answer = control["kind"], control["answer"]
    _require(kind in get_args(Kind), f"kind = {kind[:50]!r} is none of {', '.join(get_args(Kind))}")
    _require(answer in get_args(Wanted), f"answer = {answer[:50]!r} is none of {', '.join(get_args(Wanted))}")
    _require(control["work"] >= 1, f"work = {control['work']}, must be at least 1")
    model = None
    if "model" in records:
        _require(set(records["model"]) == set(layers.names), "model has other layers than this client's")
        model = _layers(records["model"], layers)
    _require((model is None) == (kind == "upload"), f"model is {'missing' if model is None else 'not expected'}")
    _require(("base_round" in control) == ("base_attempt" in control), "base has only one of round and attempt")
    for name in ("base_round", "base_attempt", "since", "fine_tune"):
        _require(control.get(name, 0) >= 0, f"{name} = {control.get(name)}, must not be negative")
    mask = _unpacked(control["mask"], len(layers)) if "mask" in control else None
    return Order(
        kind,
        control["round"],
        control["attempt"],
        control["client"],
        model=model,
        objective_state={name: decode_array(name, array) for name, array in records.get("state", {}).items()},
        answer=answer,
        mask=mask,
        work=control["work"],
        metric=control["metric"],
        base=(control["base_round"], control["base_attempt"]) if "base_round" in control else None,
        since=control.get("since", 0),
        run=control.get("run", ""),
        afresh=control.get("afresh", False),
        fine_tune=control.get("fine_tune", 0),
    )


# --- replies -------------------------------------------------------------------------------------------------------


def encode_reply(reply: Reply, order: Order, layers: Layers) -> RecordDict:
    """A client's reply to an order, with the layers or units that it sends and no others."""
    control = _header(order) | {"size": int(reply.size or 0)}
    records: dict[str, Any] = {"reply": ConfigRecord(control)}
    if reply.metrics:
        records["metrics"] = MetricRecord(dict(reply.metrics))
    figures = {"scores": reply.scores, "stiffness": reply.stiffness}
    if any(tensor is not None for tensor in figures.values()):
        records["figures"] = ArrayRecord({name: encode_array(t) for name, t in figures.items() if t is not None})
    if reply.update is not None and reply.sent is not None:
        sent = [layer for layer, is_sent in zip(layers.layers, reply.sent.tolist(), strict=True) if is_sent]
        if reply.units is None:
            numbers = {layer.name: reply.update[layer.start : layer.stop] for layer in sent}
        else:
            units = reply.units
            numbers = {la.name: torch.cat([v[rows] for v, rows in _rows(reply.update, units, la)]) for la in sent}
            indices = {la.name: units[la.first_unit : la.last_unit].nonzero()[:, 0] for la in sent}
            records["units"] = ArrayRecord(
                {name: encode_array(rows.to(_INDEX_DTYPE)) for name, rows in indices.items()}
            )
        records["layers"] = ArrayRecord({name: encode_array(values) for name, values in numbers.items()})
    return RecordDict(records)


def decode_reply(content: RecordDict, order: Order, layers: Layers, simulated: bool = False) -> Reply:
    """A client's reply to an order; `NodeFailed`, if it has none. What is in it is for `check_reply` to judge."""
    failures.read(content, simulated)
    optional = {"metrics": MetricRecord, "figures": ArrayRecord, "layers": ArrayRecord, "units": ArrayRecord}
    records = _records(content, {"reply": ConfigRecord}, optional)
    control = _values(records["reply"], _HEADER | {"size": int}, {})
    for name in ("kind", "round", "attempt", "client"):
        asked, got = getattr(order, name), control[name]
        _require(got == asked, f"{name} = {got!r}, asked for {asked!r}")
    _require(control["size"] >= 0, f"size = {control['size']}, must not be negative")
    figures = dict(records.get("figures", {}))
    scores, stiffness = figures.pop("scores", None), figures.pop("stiffness", None)
    _require(not figures, f"figures has {sorted(figures)}, which nobody knows")
    shape = (len(layers),)
    update = units = sent = None
    if "layers" in records:
        names = set(records["layers"])
        _require(names <= set(layers.names), f"layers {sorted(names - set(layers.names))} are not in the model")
        if "units" in records:
            units = _units(records["units"], layers)
            update, sent = _scattered(records["layers"], units, layers), layers_with_units(units, layers)
        else:
            update, sent = _layers(records["layers"], layers), torch.tensor([name in names for name in layers.names])
    _require("units" not in records or "layers" in records, "units without layers")
    return Reply(
        size=control["size"],
        metrics=_metrics(records.get("metrics", {})),
        sent=sent,
        units=units,
        update=update,
        scores=None if scores is None else _tensor("scores", scores, shape, SCORE_DTYPE),
        stiffness=None if stiffness is None else _tensor("stiffness", stiffness, shape, torch.float64),
    )


def _metrics(record: Mapping[str, Any]) -> dict[str, float]:
    _require(len(record) <= _MOST_METRICS, f"{len(record)} metrics, at most {_MOST_METRICS} are taken")
    for name, value in record.items():
        _require(type(value) in (int, float), f"metric {name[:50]!r} is not a number")
    return {name: float(value) for name, value in record.items()}


# --- layers and units ----------------------------------------------------------------------------------------------


def _layers(record: Mapping[str, Array], layers: Layers) -> Tensor:
    """The flat vector, with zeros for layers that the record does not have."""
    flat = torch.zeros(layers.numel, dtype=layers.dtype)
    for layer in layers.layers:
        if layer.name in record:
            flat[layer.start : layer.stop] = _tensor(layer.name, record[layer.name], (layer.numel,), layers.dtype)
    return flat


def _rows(flat: Tensor, units: Tensor, layer: Layer) -> list[tuple[Tensor, Tensor]]:
    """A layer's tensors as (units × numbers per unit), flattened, and which of these numbers belong to chosen units."""
    pairs = []
    for entry in layer.entries:
        chosen = units[entry.first_unit : entry.first_unit + entry.units]
        values = flat[entry.start : entry.stop]
        pairs.append((values, chosen.repeat_interleave(len(values) // entry.units)))
    return pairs


def _units(record: Mapping[str, Array], layers: Layers) -> Tensor:
    units = torch.zeros(layers.units, dtype=torch.bool)
    by_name = {layer.name: layer for layer in layers.layers}
    for name, array in record.items():
        _require(name in by_name, f"units of {name!r}, which is not in the model")
        layer = by_name[name]
        count = array.shape[0] if len(array.shape) == 1 else -1
        _require(0 < count <= layer.units, f"units of {name}: shape {list(array.shape)}, there are {layer.units} units")
        rows = _tensor(f"units of {name}", array, (count,), _INDEX_DTYPE).long()
        ordered = bool((rows.diff() > 0).all()) and int(rows[0]) >= 0 and int(rows[-1]) < layer.units
        _require(ordered, f"units of {name} are not increasing indices below {layer.units}")
        units[layer.first_unit + rows] = True
    return units


def _scattered(record: Mapping[str, Array], units: Tensor, layers: Layers) -> Tensor:
    """The flat vector, with zeros for units that were not sent."""
    flat = torch.zeros(layers.numel, dtype=layers.dtype)
    for layer in layers.layers:
        has_units = bool(units[layer.first_unit : layer.last_unit].any())
        _require(
            has_units == (layer.name in record), f"layer {layer.name} has units but no numbers, or numbers but no units"
        )
        if not has_units:
            continue
        pairs = _rows(flat, units, layer)
        lengths = [int(rows.sum()) for _, rows in pairs]
        numbers = _tensor(layer.name, record[layer.name], (sum(lengths),), layers.dtype)
        for (values, rows), part in zip(pairs, torch.split(numbers, lengths), strict=True):
            values[rows] = part
    return flat


# --- what records are made of ----------------------------------------------------------------------------------------


def encode_array(tensor: Tensor) -> Array:
    """A tensor's numbers, and what is needed to read them."""
    return Array(
        str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), RAW, tensor.contiguous().numpy().tobytes()
    )


def decode_array(name: str, array: Array) -> Tensor:
    """An array of any shape, of numbers that we know."""
    _require(all(length >= 0 for length in array.shape), f"{name[:50]} has shape {list(array.shape)[:8]}")
    _require(array.dtype in _DTYPES, f"{name[:50]} has dtype {array.dtype[:50]}, none of {', '.join(_DTYPES)}")
    return _tensor(name[:50], array, tuple(array.shape), _DTYPES[array.dtype])


def _tensor(name: str, array: Array, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The numbers of an array that must have this shape and dtype."""
    expected = str(dtype).removeprefix("torch.")
    _require(array.stype == RAW, f"{name} is stored as {array.stype[:50]!r}, expected {RAW!r}")
    _require(array.dtype == expected, f"{name} has dtype {array.dtype[:50]}, expected {expected}")
    _require(tuple(array.shape) == shape, f"{name} has shape {list(array.shape)[:8]}, expected {list(shape)}")
    numbers = math.prod(shape)
    _require(len(array.data) == numbers * dtype.itemsize, f"{name} has {len(array.data)} bytes for {numbers} numbers")
    if numbers == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.data), dtype=dtype).view(shape)


def _unpacked(bits: bytes, count: int) -> Tensor:
    _require(len(bits) == -(-count // 8), f"mask has {len(bits)} bytes for {count} layers")
    return torch.from_numpy(np.unpackbits(np.frombuffer(bits, np.uint8), count=count).astype(bool))


def _header(order: Order) -> dict[str, Any]:
    """Which order it is; a reply says to which it is one."""
    names = ("kind", "round", "attempt", "client")
    return {"schema": SCHEMA, **{name: getattr(order, name) for name in names}}


def _records(content: RecordDict, required: Mapping[str, type], optional: Mapping[str, type]) -> dict[str, Any]:
    kinds = {**required, **optional}
    for name, record in content.items():
        _require(name in kinds, f"record {name[:50]!r} is not expected")
        _require(type(record) is kinds[name], f"record {name} is a {type(record).__name__}")
    for name in required:
        _require(name in content, f"record {name} is missing")
    return cast("dict[str, Any]", dict(content.items()))


def _values(record: ConfigRecord, required: Mapping[str, type], optional: Mapping[str, type]) -> dict[str, Any]:
    """The fields of a control record. The version comes first: in another one the rest may mean something else."""
    version = record.get("schema")
    _require(version == SCHEMA, f"schema = {version!r}; this version of fedstrata speaks {SCHEMA}")
    kinds = {**required, **optional}
    for name, value in record.items():
        _require(name in kinds, f"{name[:50]!r} is not expected")
        _require(type(value) is kinds[name], f"{name} is a {type(value).__name__}, not a {kinds[name].__name__}")
    for name in required:
        _require(name in record, f"{name} is missing")
    return dict(record.items())


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise MessageError(problem)
