"""What goes over Flower's wire besides what its own strategies send.

A stock ClientApp never sees any of it: an algorithm that the server decides alone adds nothing to Flower's messages.
Otherwise the `ConfigRecord` that Flower sends anyway has an `Ask` and the objective's state in it. A message gets no
record more, as Flower's own mods count them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from fedstrata.algorithms import AXES
from fedstrata.core.errors import RecipeError, ReplyError
from fedstrata.core.grouping import Grouping
from fedstrata.core.packing import Packing
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
        return packing_of(model, json.loads(self.layers), json.loads(self.buffers))


def objective_state(content: RecordDict) -> dict[str, Tensor]:
    """The state of the objective that a message asks for."""
    data = _configured(content, STATE)
    return {} if data is None else dict(tensors_from_bytes(data))


def _configured(content: RecordDict, key: str) -> Any:
    """What a message's configuration says under a key; how the record is called, the server has chosen."""
    return next((record[key] for record in content.config_records.values() if key in record), None)


def round_of(content: RecordDict) -> int:
    """The round of a message, as Flower's strategies number them; 1 where nobody says."""
    number = _configured(content, "server-round")
    return number if isinstance(number, int) and number > 0 else 1


def rule_to_json(axis: str, rule: Any) -> str:
    """A rule by its plain name and its hyperparameters."""
    name = installed_name(f"algorithm.{axis}.name", rule, AXES[axis])
    return json.dumps({"name": name, **{key: getattr(rule, key) for key in parameters(type(rule))}})


def rule_from_json(axis: str, text: str) -> Any:
    """The rule again, on the client: one of ours or of an installed package; nothing else is imported."""
    table = json.loads(text)
    rule = find_installed(f"algorithm.{axis}.name", table.pop("name"), AXES[axis])
    return build_dataclass(rule, table, f"algorithm.{axis}")


class Decoded(Mapping[str, np.ndarray]):
    """The arrays of a record by name, read when they are asked for."""

    def __init__(self, record: ArrayRecord) -> None:
        self._record = record

    def __getitem__(self, name: str) -> np.ndarray:
        return decoded(name, self._record[name])

    def __contains__(self, name: object) -> bool:
        return name in self._record

    def __iter__(self) -> Iterator[str]:
        return iter(self._record)

    def __len__(self) -> int:
        return len(self._record)


def encoded(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Named arrays as Flower's record."""
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def packing_of(model: ArrayRecord, grouping: Grouping, buffers: list[str] | None) -> Packing:
    """How a model's arrays lie in the flat vector; their numbers do not matter."""
    kinds = {name: (_dtype(name, array.dtype), tuple(array.shape)) for name, array in model.items()}
    return Packing.of(kinds, grouping, buffers)


def _dtype(name: str, text: str) -> np.dtype[Any]:
    try:
        return np.dtype(text)
    except TypeError:
        raise RecipeError(f"arrays.{name}", text, "is no dtype that NumPy has") from None


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
