"""What goes over Flower's wire besides what its own strategies send.

A stock ClientApp never sees any of it: an algorithm that the server decides alone adds nothing to Flower's messages.
Otherwise the `ConfigRecord` that Flower sends anyway has an `Ask` and the objective's state in it. A message gets no
record more, as Flower's own mods count them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from fedstrata.algorithms import AXES
from fedstrata.core.errors import RecipeError, ReplyError
from fedstrata.core.grouping import Grouping
from fedstrata.core.layers import Layers
from fedstrata.registry import build_dataclass, find_installed, installed_name, parameters

SCHEMA = 2
"""Version of everything in this file."""

ASK = "fedstrata"
RECEIPT = "fedstrata"
STATE = "fedstrata-state"
SCORES = "fedstrata-scores"

FIRST_MOD = "put selection_mod first in ClientApp(mods=[…])"
"""What to change where a client does not follow a selection."""


@dataclass(frozen=True)
class Ask:
    """What a client is asked for beyond plain training.

    `objective` and `selection` are tables in JSON, empty where there is nothing to do. `answer` is what to reply with:
    `all` arrays, those named in `arrays`, one score per layer (`scores`; the arrays are kept), or those named in
    `arrays` of what was `kept`. `model` is the key of the model in the message.
    """

    round: int
    model: str
    answer: str = "all"
    arrays: tuple[str, ...] = ()
    objective: str = ""
    selection: str = ""
    layers: str = ""
    buffers: str = ""

    def added_to(self, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> ConfigRecord:
        """A message's configuration with the ask and the objective's state in it.

        As one text and one lot of bytes: Flower cannot count the bytes of an empty list or string.
        """
        added: dict[str, Any] = {ASK: json.dumps(asdict(self) | {"schema": SCHEMA})}
        if state:
            added[STATE] = tensors_to_bytes({name: tensor.contiguous() for name, tensor in state.items()})
        return ConfigRecord({**config, **added})

    @classmethod
    def of(cls, content: RecordDict) -> Self | None:
        """What a message asks for, if anything."""
        text = _configured(content, ASK)
        if text is None:
            return None
        values: dict[str, Any] = json.loads(text)
        if values.get("schema") != SCHEMA:
            raise RecipeError("schema", values.get("schema"), f"this fedstrata speaks {SCHEMA}; install the server's")
        known = {field.name: values[field.name] for field in fields(cls)}
        return cls(**known | {"arrays": tuple(known["arrays"])})

    def packing(self, model: ArrayRecord) -> Packing:
        """The server's layers, from the arrays that it sent."""
        return Packing.of(model, json.loads(self.layers), json.loads(self.buffers))


def objective_state(content: RecordDict) -> dict[str, Tensor]:
    """The state of the objective that a message asks for."""
    data = _configured(content, STATE)
    return {} if data is None else dict(tensors_from_bytes(data))


def _configured(content: RecordDict, key: str) -> Any:
    """What a message's configuration says under a key; how the record is called, the server has chosen."""
    return next((record[key] for record in content.config_records.values() if key in record), None)


def rule_to_json(axis: str, rule: Any) -> str:
    """A rule by its plain name and its hyperparameters."""
    name = installed_name(f"algorithm.{axis}.name", rule, AXES[axis])
    return json.dumps({"name": name, **{key: getattr(rule, key) for key in parameters(type(rule))}})


def rule_from_json(axis: str, text: str) -> Any:
    """The rule again, on the client: one of ours or of an installed package; nothing else is imported."""
    table = json.loads(text)
    rule = find_installed(f"algorithm.{axis}.name", table.pop("name"), AXES[axis])
    return build_dataclass(rule, table, f"algorithm.{axis}")


Kind = tuple[np.dtype[Any], tuple[int, ...]]
"""Dtype and shape."""


@dataclass(frozen=True)
class Packing:
    """How a model's named arrays become one flat vector and arrays again.

    Floating-point arrays are grouped into layers; they lie in the flat vector in the widest of their dtypes, at least
    float32. All others (integers, booleans) only pass through.
    """

    layers: Layers
    dtypes: Mapping[str, np.dtype[Any]]
    passing: Mapping[str, Kind]
    order: tuple[str, ...]

    @classmethod
    def of(cls, model: ArrayRecord, grouping: Grouping, buffers: list[str] | None) -> Packing:
        """From the global model; values do not matter."""
        dtypes = {name: _dtype(name, array.dtype) for name, array in model.items()}
        floats = {name: dtype for name, dtype in dtypes.items() if dtype.kind == "f"}
        passing = {name: (dtype, tuple(model[name].shape)) for name, dtype in dtypes.items() if name not in floats}
        widest = np.result_type(np.float32, *floats.values())
        layers = Layers.of_shapes(
            {name: model[name].shape for name in floats},
            grouping,
            buffers=buffers,
            dtype=torch.float64 if widest == np.float64 else torch.float32,
        )
        return cls(layers, floats, passing, tuple(model))

    @cached_property
    def bytes_per_layer(self) -> Tensor:
        """What each layer weighs on the wire, int64 [L]."""
        sizes = [
            sum((entry.stop - entry.start) * self.dtypes[entry.name].itemsize for entry in layer.entries)
            for layer in self.layers.layers
        ]
        return torch.tensor(sizes, dtype=torch.int64)

    def arrays_of(self, mask: Tensor) -> tuple[str, ...]:
        """The names of the arrays in the layers of a mask, bool [L]."""
        chosen = zip(self.layers.layers, mask.tolist(), strict=True)
        return tuple(entry.name for layer, keep in chosen if keep for entry in layer.entries)

    def flatten(self, record: ArrayRecord) -> Tensor:
        """The floating-point arrays as one vector; zero where the record has none. Nothing in it is trusted."""
        flat = torch.zeros(self.layers.numel, dtype=self.layers.dtype)
        for name, view in self.layers.views(flat).items():
            if name not in record:
                continue
            array = decoded(name, record[name])
            if array.dtype.kind != "f":
                raise ReplyError(f"{name} has dtype {array.dtype}, expected {self.dtypes[name]}")
            if array.shape != tuple(view.shape):
                raise ReplyError(f"{name} has shape {list(array.shape)}, expected {list(view.shape)}")
            with np.errstate(over="ignore"):
                array = array.astype(self.dtypes[name])  # a copy, in the dtype that the model has
            if not np.isfinite(array).all():
                raise ReplyError(f"{name} is not finite")
            view.copy_(torch.from_numpy(array))
        return flat

    def passed(self, record: ArrayRecord) -> dict[str, Array]:
        """The arrays that only pass through, made anew: what was sent may call its numbers something else."""
        passed = {}
        for name, (dtype, shape) in self.passing.items():
            array = decoded(name, record[name])
            if (array.dtype, array.shape) != (dtype, shape):
                raise ReplyError(f"{name} is {array.dtype} {list(array.shape)}, expected {dtype} {list(shape)}")
            passed[name] = Array(array)
        return passed

    def unflatten(self, flat: Tensor, passed: Mapping[str, Array]) -> ArrayRecord:
        """The arrays of a flat vector, in the model's own dtypes and order."""
        views = self.layers.views(flat)
        arrays = {
            name: passed[name] if name in passed else Array(np.array(views[name].numpy(), self.dtypes[name], order="C"))
            for name in self.order
        }
        return ArrayRecord(arrays)


def _dtype(name: str, text: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(text)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "iub" and dtype not in (np.float16, np.float32, np.float64):
        raise RecipeError(f"arrays.{name}", text, "must be float16, float32, float64, an integer or a boolean")
    return dtype


def decoded(name: str, array: Array) -> np.ndarray:
    """The numbers of one array that somebody sent."""
    try:
        found = array.numpy()
    except Exception as error:  # whatever bytes they sent
        raise ReplyError(f"{name} cannot be read: {error}") from None
    if not isinstance(found, np.ndarray):
        raise ReplyError(f"{name} is not an array")
    return found


def names(items: Iterable[object], limit: int = 3) -> str:
    """A few of them, for a message."""
    listed = [str(item) for item in items]
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")
