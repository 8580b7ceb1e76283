"""What server and clients say to each other, and what it weighs on the wire.

An `Order` goes to one client, a `Reply` comes back. The ledger counts what an algorithm makes travel: layers, unit
indices, scores, objective state and masks; not the envelope (round, client, size, losses), which is the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fedstrata.core.errors import ReplyError
from fedstrata.core.layers import Layers

SCHEMA = 2
"""Version of orders and replies; an engine that puts them on a wire sends it along."""

Kind = Literal["train", "upload", "evaluate"]
Answer = Literal["layers", "scores", "units"]
Fault = Literal["failed", "refused", "no reply"]

NOT_FINITE = "not finite"
"""How the refusal of numbers that are none ends."""

INDEX_BYTES = 4
SCORE_DTYPE = torch.float32
MOST_SAMPLES = 2**53
"""No client has more samples: so far a float64 counts, and the sum of many such numbers is finite."""


@dataclass(frozen=True)
class Order:
    """What a client is asked to do.

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
    answer: Answer = "layers"
    mask: Tensor | None = None
    work: int = 1
    """How many local epochs (or steps, if the plan counts steps) to do: fewer for a straggler."""
    dataset: str = ""
    part: tuple[int, int] = (0, 1)
    metric: str = ""
    """What the server calls the metric of an evaluation; a node whose metric has another name keeps it to itself."""

    def control_bytes(self) -> int:
        """What goes down besides the model: the objective's state, and a bit per layer for a mask."""
        state = sum(tensor.numel() * tensor.itemsize for tensor in self.objective_state.values())
        return state + (0 if self.mask is None else -(-self.mask.numel() // 8))

    def failure(self, error: str, fault: Fault = "failed") -> Reply:
        """The reply of whoever could not carry it out."""
        return Reply(self.kind, self.round, self.attempt, self.client, part=self.part, error=error, fault=fault)


@dataclass(frozen=True)
class Reply:
    """What a client answers. `update` has zeros where nothing was sent; `error` says why there is nothing."""

    kind: Kind
    round: int
    attempt: int
    client: int
    size: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    sent: Tensor | None = None
    units: Tensor | None = None
    update: Tensor | None = None
    scores: Tensor | None = None
    stiffness: Tensor | None = None
    """The mean stiffness of each layer's spring when training ended, for the record only."""
    part: tuple[int, int] = (0, 1)
    error: str | None = None
    fault: Fault = "failed"
    """What an `error` is: the client failed, or the engine could not read its reply, or there was none."""

    def upload_bytes(self, layers: Layers) -> Tensor:
        """What came up of each layer, int64 [L]: whole layers, or units and their indices."""
        if self.update is None or self.sent is None:
            return torch.zeros(len(layers), dtype=torch.int64)
        if self.units is None:
            return layers.bytes_per_layer() * self.sent
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


def check_reply(reply: Reply, order: Order, layers: Layers, samples: int) -> None:
    """Refuse a reply that is not what was asked for; the server trusts nothing that a client says.

    `samples` is how many the client has, by its own account at the beginning.
    """
    check_answers(reply, order)
    check_size(reply.size, samples)
    if reply.stiffness is not None:
        _check_tensor("stiffness", reply.stiffness, (len(layers),), torch.float64)
    if order.answer == "scores":
        if reply.update is not None:
            raise ReplyError("layers were sent along with the scores")
        _check_tensor("scores", reply.scores, (len(layers),), SCORE_DTYPE)
        assert reply.scores is not None
        if not is_finite(reply.scores):
            raise ReplyError(f"scores are {NOT_FINITE}")
        return
    if reply.scores is not None:
        raise ReplyError("scores were sent instead of an update")
    _check_tensor("update", reply.update, (layers.numel,), layers.dtype)
    _check_tensor("sent", reply.sent, (len(layers),), torch.bool)
    assert reply.update is not None
    assert reply.sent is not None
    asked_for = order.mask
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
    if asked_for is None or not torch.equal(reply.sent, asked_for):
        wrong = zip(layers.names, reply.sent.tolist(), [] if asked_for is None else asked_for.tolist(), strict=False)
        names = ", ".join(name for name, sent, asked in wrong if sent != asked)
        raise ReplyError(f"layers {names}: sent without being asked for, or asked for and not sent")
    if not is_finite(reply.update):
        raise ReplyError(f"update is {NOT_FINITE}")
    if layers.dtype == torch.float64 and not torch.linalg.vector_norm(reply.update).isfinite():
        raise ReplyError(f"the norm of the update is {NOT_FINITE}")  # float32 cannot be so large


def check_answers(reply: Reply, order: Order) -> None:
    """Refuse a reply that reports a failure, or belongs to another order."""
    if reply.error is not None:
        raise ReplyError(reply.error)
    for name in ("kind", "round", "attempt", "client"):
        asked, got = getattr(order, name), getattr(reply, name)
        if asked != got:
            raise ReplyError(f"{name} = {got!r}, asked for {asked!r}")


def check_size(size: object, samples: int) -> None:
    """Refuse a number of samples that is none, or another one than the client had at the beginning."""
    if not isinstance(size, int) or size < 1:
        raise ReplyError(f"size = {size!r}, must be a positive number of samples")
    if size != samples:
        raise ReplyError(f"size = {size}, at the beginning it was {samples}")


def layers_with_units(units: Tensor, layers: Layers) -> Tensor:
    """Which layers a set of units touches, bool [L]."""
    return torch.stack([units[layer.first_unit : layer.last_unit].any() for layer in layers.layers])


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
