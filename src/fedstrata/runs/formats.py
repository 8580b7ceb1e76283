"""What the files of runs and comparisons say: each format is read here, and checked once (docs/run-directory.md).

Whoever holds one of these objects need not look into it again: every field is there, of its type, and a number that can
be one. What is damaged is one line that names the file, the field and the value.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypeVar, get_args

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    InstanceOf,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    model_validator,
    with_config,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from fedstrata.core.errors import RunDirectoryError, printable
from fedstrata.core.status import Status, StatusKind

RUN_FORMAT = 2
"""Version of the run directory's format."""

NAMELESS = 1
"""The format whose files do not say which run they are of: it is read, and not written any more."""

COMPARISON_FORMAT = 1
"""Version of a comparison's."""

_CHECKED = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

Count = Annotated[int, Field(ge=0, le=1 << 53)]
"""What is counted: whole, and not more than a float holds exactly."""

Positive = Annotated[int, Field(ge=1, le=1 << 53)]
"""What is at least one: the number of a round, how many clients there are."""

Text = InstanceOf[str]
"""Any text: a class may be called by a file name that is not UTF-8."""

T = TypeVar("T")


def damaged(path: Path, problem: str, verdict: str = "is damaged") -> RunDirectoryError:
    """A file that does not say what it must, in one line."""
    return RunDirectoryError(f"{path} {verdict}: {printable(problem)}")


def _checked(read: Callable[[], T], path: Path, verdict: str = "is damaged") -> T:
    """What `read` makes of a file, or the first of its problems: the field, its value, and what it should be."""
    try:
        return read()
    except ValidationError as error:
        problem = min(error.errors(include_url=False), key=lambda found: found["type"] == "missing")
    field, text = ".".join(map(str, problem["loc"])), problem["msg"][:1].lower() + problem["msg"][1:]
    if problem["type"] == "missing":
        text = f"{field}: missing"
    elif field:
        text = f"{field} = {_SHORT.repr(problem['input'])}: {text}"
    raise damaged(path, text, verdict)


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 2, 60, 60, 60


# --- run.json --------------------------------------------------------------------------------------------------------


class Environment(BaseModel):
    """The versions that computed a run from a round on."""

    model_config = _CHECKED

    round: Positive
    versions: dict[str, str]


class MetricEntry(BaseModel):
    """What a run is measured by."""

    model_config = _CHECKED

    name: str
    direction: Literal["max", "min"]


class LayerEntry(BaseModel):
    """A layer and its sizes."""

    model_config = _CHECKED

    name: Text
    tensors: list[Text]
    trainable: Count
    numbers: Count
    units: Count
    bytes: Count


def _label(name: Any) -> str:
    if type(name) not in (str, int):
        raise PydanticCustomError("label", "must be a name or a number")
    return str(name)


class DataEntry(BaseModel):
    """The task's notes on its data, of which each may be missing."""

    model_config = _CHECKED

    dataset: Text = "its own"
    source: Text | None = None
    class_names: list[Annotated[str, PlainValidator(_label)]] = []
    client_names: list[Text] = []
    """What clients are called, if they are more than numbers."""
    table: list[list[Count]] | None = Field(None, min_length=1)
    """Samples by client and class."""

    @model_validator(mode="after")
    def _check(self) -> DataEntry:
        if self.table is not None and len({len(self.class_names), *map(len, self.table)}) > 1:
            raise PydanticCustomError("table", "table must have a count for each of class_names in every row")
        return self


class About(BaseModel):
    """run.json: what was resolved when the run began."""

    model_config = _CHECKED

    format: Literal[1, 2]
    id: str | None = None
    recipe_sha256: str | None = None
    recipe_sha256_before: str | None = None
    """While a run is being extended: that of the recipe before."""
    arithmetic: Positive = 1
    versions: dict[str, str] = {}
    later: list[Environment] = []
    created: str
    metric: MetricEntry
    clients: Positive
    """How many there are."""
    layers: list[LayerEntry]
    private: list[Text] = []
    """The tensors that stay with the clients."""
    data: DataEntry

    @model_validator(mode="after")
    def _check(self) -> About:
        if (self.id is None) != (self.format == NAMELESS):
            raise PydanticCustomError("id", "there is an id in every format but the first")
        return self


def read_about(found: Any, path: Path, verdict: str = "is damaged") -> About:
    """What a run.json says, which was parsed already."""
    return _checked(lambda: About.model_validate(found), path, verdict)


# --- history.jsonl ---------------------------------------------------------------------------------------------------


class Lost(TypedDict):
    """A client of which there is no usable reply, and why."""

    client: int
    attempt: NotRequired[int]
    kind: StatusKind
    reason: str
    why: str
    """Both, for people."""


@with_config(_CHECKED)
class _StoredLost(TypedDict):
    """As it is stored: `why`, a sentence, or `kind` and `reason`."""

    client: Count
    attempt: NotRequired[Count]
    why: NotRequired[str]
    kind: NotRequired[StatusKind]
    reason: NotRequired[str]


def _told(stored: _StoredLost) -> Lost:
    if "kind" in stored:
        status = Status(stored["kind"], stored.get("reason", ""))
    elif "why" in stored:
        status = _of_sentence(stored["why"])
    else:
        raise PydanticCustomError("lost", "there must be why, or a kind")
    told = Lost(client=stored["client"], kind=status.kind, reason=status.reason, why=str(status))
    if "attempt" in stored:
        told["attempt"] = stored["attempt"]
    return told


def _of_sentence(why: str) -> Status:
    """What an older line says: `failed: ValueError …` is of the kind `failed`."""
    if why.startswith("straggler"):
        return Status("straggler dropped")
    kind, _, reason = why.partition(": ")
    known = next((one for one in get_args(StatusKind) if one == kind), None)
    return Status("failed", why) if known is None else Status(known, reason)


_Lost = Annotated[_StoredLost, AfterValidator(_told)]

Metrics = dict[str, dict[str, float | None]]
"""What was measured, by evaluation set and name; None is what was not finite."""


@with_config(_CHECKED)
class LineBytes(TypedDict):
    """What travelled in a round."""

    up: list[Count]
    down: list[Count]
    feedback: Count
    feedback_numbers: Count
    control: Count
    evaluation: Count


class Line(TypedDict):
    """A line of the history: a round."""

    run: NotRequired[str]
    round: int
    attempt: int
    clients: int
    replies: int
    lost: list[Lost]
    earlier: list[Lost]
    train_loss: float | None
    logged: NotRequired[dict[str, float | None]]
    metrics: Metrics
    unmeasured: list[Lost]
    bytes: LineBytes
    upload: int
    download: int
    upload_total: int
    seconds: float


@with_config(_CHECKED)
class _StoredLine(TypedDict):
    run: NotRequired[str]
    round: Positive
    attempt: Count
    clients: Count
    replies: Count
    lost: list[_Lost]
    earlier: NotRequired[list[_Lost]]
    train_loss: float | None
    logged: NotRequired[dict[str, float | None]]
    metrics: Metrics
    unmeasured: NotRequired[list[_Lost]]
    bytes: LineBytes
    upload: Count
    download: Count
    upload_total: Count
    seconds: Annotated[float, Field(ge=0)]


_LINE: TypeAdapter[Any] = TypeAdapter(_StoredLine)


def read_history(content: bytes, about: About, path: Path) -> list[Line]:
    """The whole lines of a history.jsonl: one for each round, all of them of this run."""
    lines = content.split(b"\n")[:-1]  # what follows the last newline was torn
    return [read_line(line, number, about, path) for number, line in enumerate(lines, start=1)]


def read_failures(content: bytes, about: About, path: Path) -> list[Line]:
    """The whole lines of a failed.jsonl: rounds without a next model, in the order in which they were tried."""
    return [_read_line(line, number, about, path) for number, line in enumerate(content.split(b"\n")[:-1], start=1)]


def read_line(content: bytes, number: int, about: About, path: Path) -> Line:
    """A line of the history, which must be that of the round with this number."""
    line = _read_line(content, number, about, path)
    if line["round"] != number:
        problem = f"round = {line['round']}, and lines are in the order of rounds"
        raise damaged(path, problem, f"is damaged in line {number}")
    return line


def _read_line(content: bytes, number: int, about: About, path: Path) -> Line:
    verdict = f"is damaged in line {number}"
    line: Line = _checked(lambda: _LINE.validate_json(content), path, verdict)
    if line.pop("run", None) != about.id:
        raise RunDirectoryError(f"{path}: line {number} is of another run")
    line.setdefault("earlier", [])
    line.setdefault("unmeasured", [])
    for name in ("up", "down"):
        if (count := len(line["bytes"][name])) != len(about.layers):
            raise damaged(path, f"bytes.{name} has {count} numbers, for {len(about.layers)} layers", verdict)
    for place, values in line["metrics"].items():
        for name in (about.metric.name, "loss"):
            if name not in values:
                raise damaged(path, f"metrics.{place}.{name}: missing", verdict)
    return line


# --- layers/*.safetensors --------------------------------------------------------------------------------------------

LayerRecord = dict[str, np.ndarray]
"""What is known of a round's clients and layers, by name."""

_WHOLE, _REAL = np.dtype(np.int64), np.dtype(np.float64)

_OF_CLIENTS = {"clients": _WHOLE, "sizes": _WHOLE, "work": _WHOLE, "loss": _REAL, "model_angle": _REAL}
_OF_LAYERS = ("angle", "smoothed_angle", "divergence", "norm", "weight", "mask", "mu")
_KINDS = {**_OF_CLIENTS, **dict.fromkeys(_OF_LAYERS, _REAL)}


def read_layers(arrays: Mapping[str, np.ndarray], about: About, path: Path) -> LayerRecord:
    """The arrays of a file in layers/, and no others: [K] or [K, L], of the types they are written with."""
    rows = arrays["clients"].size if "clients" in arrays else 0
    shapes = {1: (rows,), 2: (rows, len(about.layers))}
    record = {}
    for name, kind in _KINDS.items():
        if name not in arrays:
            raise damaged(path, f"{name}: missing")
        found, shape = arrays[name], shapes[1 if name in _OF_CLIENTS else 2]
        if found.shape != shape or found.dtype != kind:
            raise damaged(path, f"{name} is {found.dtype} {list(found.shape)}, expected {kind} {list(shape)}")
        record[name] = found
    clients = record["clients"].tolist()
    if clients and (clients[0] < 0 or clients[-1] >= about.clients or clients != sorted(set(clients))):
        raise damaged(path, f"clients = {_SHORT.repr(clients)}: not in order, or not from 0 to {about.clients - 1}")
    for name in ("sizes", "work"):
        if min(counts := record[name].tolist(), default=0) < 0:
            raise damaged(path, f"{name} = {_SHORT.repr(counts)}: not counts")
    return record


# --- clients/*.safetensors -------------------------------------------------------------------------------------------

_OF_RESULTS = {"client": _WHOLE, "samples": _WHOLE, "loss": _REAL, "metric": _REAL, "taken_part": np.dtype(bool)}


def read_clients(arrays: Mapping[str, np.ndarray], path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file in clients/, and no others: one number for every client that was measured."""
    for name, kind in _OF_RESULTS.items():
        if name not in arrays:
            raise damaged(path, f"{name}: missing")
        found, shape = arrays[name], arrays["client"].shape
        if found.ndim != 1 or found.shape != shape or found.dtype != kind:
            raise damaged(path, f"{name} is {found.dtype} {list(found.shape)}, expected {kind} {list(shape)}")
    return {name: arrays[name] for name in _OF_RESULTS}


# --- compare.json ----------------------------------------------------------------------------------------------------


def _unlike(values: list[Any]) -> list[Any]:
    if len(set(values)) < len(values):
        raise PydanticCustomError("twice", "names the same one twice")
    return values


class Request(BaseModel):
    """compare.json: which algorithms are compared, and over which seeds."""

    model_config = _CHECKED

    recipe: str
    request: str
    """A digest of all recipes without the seed."""
    algorithms: Annotated[list[str], Field(min_length=1), AfterValidator(_unlike)]
    seeds: Annotated[list[Count], Field(min_length=1), AfterValidator(_unlike)]


def read_request(found: Any, path: Path) -> Request:
    """What a compare.json says, which was parsed already."""
    return _checked(lambda: Request.model_validate(found), path)
