"""What server and clients say to each other, and what it weighs on the wire.

An `Order` goes to one client, a `Reply` comes back. The ledger counts what an algorithm makes travel: layers, unit
indices, scores, objective state and masks; not the envelope (round, client, size, losses), which is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fedstrata.core.errors import MessageError, NotFinite, ReplyError
from fedstrata.core.layers import Layers
from fedstrata.core.memory import Tag, Version
from fedstrata.core.status import OK, Status

SCHEMA = 2
"""Version of orders and replies; an engine that puts them on a wire sends it along."""

Kind = Literal["train", "upload", "evaluate"]
Wanted = Literal["layers", "scores", "units"]
INDEX_BYTES = 4
SCORE_DTYPE = torch.float32
MOST_SAMPLES = 2**53
"""No client has more samples: so far a float64 counts, and the sum of many such numbers is finite."""


@dataclass(frozen=True, eq=False)
class Order:
    """What a client is asked to do. Two orders are never the same one, whatever they say.

    `train`: train, then send the layers in `mask`, or report `scores` and keep the update, or send `units` of its own
    choice, as `answer` says. `upload`: send the layers in `mask` of the kept update. `evaluate`: measure the model on
    the held-out data, or, for the server (`client = SERVER`), on one `part` of a named data set.
    """

    kind: Kind
    round: int
    attempt: int
    client: int
    model: Tensor | None = None
    objective_state: Mapping[str, Tensor] = field(default_factory=dict)
    answer: Wanted = "layers"
    mask: Tensor | None = None
    work: int = 1
    """How many local epochs (or steps, if the plan counts steps) to do: fewer for a straggler."""
    dataset: str = ""
    part: tuple[int, int] = (0, 1)
    metric: str = ""
    """What the server calls the metric of an evaluation; a node whose metric has another name keeps it to itself."""
    base: Tag | None = None
    """The version of its memory that the client starts from; None, if it has not taken part yet."""
    since: int = 0
    """The first round that the server may still come back to: versions that only earlier ones need can be forgotten."""
    run: str = ""
    """Which run the memory belongs to, where it lies with those of others."""
    afresh: bool = False
    """Whether a client that does not have this version is to start with none."""
    memory: Version | None = None
    """That version itself: whoever keeps it puts it here. It is never sent."""
    fine_tune: int = 0
    """For an evaluation: how many epochs a copy of the model is trained before, on the client's training data."""

    def control_bytes(self) -> int:
        """What goes down besides the model: the objective's state, and a bit per layer for a mask."""
        state = sum(tensor.numel() * tensor.itemsize for tensor in self.objective_state.values())
        return state + (0 if self.mask is None else -(-self.mask.numel() // 8))


@dataclass(frozen=True, eq=False)
class Reply:
    """What a client answers to an order. `update` has zeros where nothing was sent.

    Whose answer it is, and to which order, is for whoever carries it to say.
    """

    size: float | None = None
    """Training samples, or held-out ones in an evaluation; None only in an upload, where the first reply's counts."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    sent: Tensor | None = None
    units: Tensor | None = None
    update: Tensor | None = None
    scores: Tensor | None = None
    stiffness: Tensor | None = None
    """The mean stiffness of each layer's spring when training ended, for the record only."""
    memory: Version | None = None
    """The new version of the client's memory, for whoever keeps it. It is never sent."""
    candidate: Version | None = None
    """What that would be if all layers were sent: kept with the update until it is known which are."""

    def upload_bytes(self, layers: Layers, whole: Tensor) -> Tensor:
        """What came up of each layer, int64 [L]: `whole` ones, or units and their indices."""
        if self.update is None or self.sent is None:
            return torch.zeros(len(layers), dtype=torch.int64)
        if self.units is None:
            return whole * self.sent
        per_layer = []
        for layer in layers.layers:
            numbers = sum(
                int(self.units[e.first_unit : e.first_unit + e.units].sum()) * ((e.stop - e.start) // e.units)
                for e in layer.entries
            )
            indices = int(self.units[layer.first_unit : layer.last_unit].sum())
            per_layer.append(numbers * layers.itemsize + indices * INDEX_BYTES)
        return torch.tensor(per_layer, dtype=torch.int64)

    def feedback_numbers(self) -> int:
        """How many scores came up."""
        return 0 if self.scores is None else self.scores.numel()


Answer = Reply | Status
"""What comes of an order: a reply, or why there is none."""


def judge(answer: Answer, check: Callable[[Reply], None]) -> tuple[Status, Reply | None]:
    """What became of an order, and the reply, if it can be used. Nonsense is a status, never an exception."""
    if isinstance(answer, Status):
        return answer, None
    try:
        check(answer)
    except NotFinite as problem:
        return Status("not finite", problem.what), None
    except MessageError as problem:
        return Status("refused", str(problem)), None
    return OK, answer


def check_reply(reply: Reply, order: Order, layers: Layers, samples: float | None) -> None:
    """Refuse a reply that is not what was asked for; the server trusts nothing that a client says.

    `samples` is how many the client has, by its own account at the beginning; None, if nobody has asked it yet.
    """
    check_size(reply.size, samples, order)
    if reply.stiffness is not None:
        _check_tensor("stiffness", reply.stiffness, (len(layers),), torch.float64)
    if order.answer == "scores":
        if reply.update is not None:
            raise ReplyError("layers were sent along with the scores")
        _check_tensor("scores", reply.scores, (len(layers),), SCORE_DTYPE)
        assert reply.scores is not None
        if not is_finite(reply.scores):
            raise NotFinite("scores")
        return
    if reply.scores is not None:
        raise ReplyError("scores were sent instead of an update")
    _check_tensor("update", reply.update, (layers.numel,), layers.dtype)
    _check_tensor("sent", reply.sent, (len(layers),), torch.bool)
    assert reply.update is not None
    assert reply.sent is not None
    asked_for = torch.ones(len(layers), dtype=torch.bool) if order.mask is None else order.mask
    if order.answer == "units":
        _check_tensor("units", reply.units, (layers.units,), torch.bool)
        assert reply.units is not None
        asked_for = layers_with_units(reply.units, layers)
        for entry in (entry for layer in layers.layers for entry in layer.entries):
            unsent = ~reply.units[entry.first_unit : entry.first_unit + entry.units]
            rows = reply.update[entry.start : entry.stop].view(entry.units, -1)
            if torch.linalg.vector_norm(rows, torch.inf, dim=1)[unsent].any():  # the largest number of each unit
                raise ReplyError(f"{entry.name} has numbers in units that were not sent")
    elif reply.units is not None:
        raise ReplyError("units were sent instead of whole layers")
    if not torch.equal(reply.sent, asked_for):
        wrong = zip(layers.names, reply.sent.tolist(), asked_for.tolist(), strict=True)
        names = ", ".join(name for name, sent, asked in wrong if sent != asked)
        raise ReplyError(f"layers {names}: sent without being asked for, or asked for and not sent")
    if not is_finite(reply.update):
        raise NotFinite("update")
    if layers.dtype == torch.float64 and not torch.linalg.vector_norm(reply.update).square().isfinite():
        raise NotFinite("the squared norm of the update")  # float32 cannot be so large


def check_size(size: object, samples: float | None, order: Order) -> None:
    """Refuse a number of samples that is none, or another one than the client had at the beginning."""
    if size is None and order.kind == "upload":
        return
    if not isinstance(size, int | float) or not size > 0:
        raise ReplyError(f"size = {size!r}, must be a positive number of samples")
    if samples is not None and size != samples:
        raise ReplyError(f"size = {size}, at the beginning it was {samples}")
    if size > MOST_SAMPLES:
        raise ReplyError(f"size = {size}, must be at most {MOST_SAMPLES}")


def layers_with_units(units: Tensor, layers: Layers) -> Tensor:
    """Which layers a set of units touches, bool [L]."""
    return torch.stack([units[layer.first_unit : layer.last_unit].any() for layer in layers.layers])


def keep_layers(update: Tensor, mask: Tensor, layers: Layers) -> None:
    """Zero what is not sent."""
    for layer, keep in zip(layers.layers, mask.tolist(), strict=True):
        if not keep:
            update[layer.start : layer.stop].zero_()


def keep_units(update: Tensor, units: Tensor, layers: Layers) -> None:
    """Zero the units that are not sent."""
    for layer in layers.layers:
        for entry in layer.entries:
            rows = update[entry.start : entry.stop].view(entry.units, -1)
            rows.masked_fill_(~units[entry.first_unit : entry.first_unit + entry.units, None], 0)


def _check_tensor(name: str, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor is None:
        raise ReplyError(f"{name} is missing")
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
        raise ReplyError(f"{name} has shape {list(getattr(tensor, 'shape', []))}, expected {list(shape)}")
    if tensor.dtype != dtype:
        raise ReplyError(f"{name} has dtype {tensor.dtype}, expected {dtype}")


def is_finite(tensor: Tensor) -> bool:
    """Whether every number is finite, without a mask as large as the tensor.

    A finite sum says yes and is fastest. One that is not may have overflowed: then the extremes tell, as NaN is both.
    """
    return bool(tensor.sum().isfinite()) or all(bool(extreme.isfinite()) for extreme in tensor.aminmax())
