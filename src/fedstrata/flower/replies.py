"""Reading what clients reply: nothing in it is trusted, and what is refused says why."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, RecordDict
from torch import Tensor

from fedstrata.core.errors import NotFinite, ReplyError, tail
from fedstrata.core.messages import MOST_SAMPLES
from fedstrata.core.packing import Packing
from fedstrata.core.status import Status, StatusKind
from fedstrata.engines.flower.grid import UNREADABLE
from fedstrata.flower.wire import FIRST_MOD, RECEIPT, SCORES, Ask, decoded, names

Read = TypeVar("Read")

_KINDS: dict[int, StatusKind] = {1: "failed", 2: "failed", 6: "failed", 7: "failed", UNREADABLE: "refused"}
"""By error code: the ClientApp cannot be loaded, raised, has a mod that refuses, or cannot be installed. By all others
Flower says that there is no answer: time is up, the node is gone, the process died.
"""


def read_reply(reply: Message, read: Callable[[RecordDict], Read]) -> Read | Status:
    """What is read of a reply, or why there is nothing. It cannot do worse than that."""
    try:
        if reply.has_error():
            return Status(_KINDS.get(reply.error.code, "no reply"), tail(reply.error.reason or ""))
        return read(reply.content)
    except NotFinite as problem:
        return Status("not finite", problem.what)
    except ReplyError as problem:
        return Status("refused", str(problem))
    except Exception as error:  # whatever it does to the reader, it is the reply that is wrong
        return Status("refused", f"cannot be read: {type(error).__name__}: {error}")


def read_size(content: RecordDict, key: str) -> float:
    """By how many examples a client counts; its other metrics must be numbers, as they are averaged."""
    if len(content.metric_records) != 1:
        raise ReplyError(f"{len(content.metric_records)} MetricRecords, expected 1")
    ((_, metrics),) = content.metric_records.items()
    size = metrics.get(key)
    if not isinstance(size, int | float) or not 0 < size <= MOST_SAMPLES:
        raise ReplyError(f"{key} = {size!r}, must be a positive number, at most {MOST_SAMPLES}")
    for name, value in metrics.items():
        for number in value if isinstance(value, list) else [value]:
            if not isinstance(number, int | float) or (isinstance(number, int) and abs(number) >= _MOST):
                raise ReplyError(f"{name} is not a number that can be averaged")
    return size


_MOST = 2**1023
"""No float is much larger."""


def read_receipt(content: RecordDict, ask: Ask, layers: int) -> Tensor:
    """How stiff the client was held in each layer, [L]; that there is a receipt says that it had the proximal term."""
    lacking = f"the client did not apply {json.loads(ask.objective)['name']}"
    receipt = content.config_records.get(RECEIPT)
    if receipt is None:
        raise ReplyError(f"{lacking}: use fedstrata.flower.Local in its training loop, and call acknowledge(content)")
    if receipt.get("objective") != ask.objective:
        raise ReplyError(f"{lacking}: it acknowledged {receipt.get('objective')!r}")
    if receipt.get("round") != ask.round:
        raise ReplyError(f"{lacking}: it acknowledged round {receipt.get('round')!r}, not {ask.round}")
    pulls, stiffness = receipt.get("pulls"), receipt.get("stiffness")
    if not isinstance(pulls, int) or pulls < 1:
        raise ReplyError(f"{lacking}: call local.pull() between backward and the optimiser's step")
    if not isinstance(stiffness, list) or len(stiffness) != layers:
        raise ReplyError(f"stiffness = {stiffness!r}, expected {layers} numbers")
    numbers = [value if isinstance(value, int | float) else math.nan for value in stiffness]
    return torch.tensor(numbers, dtype=torch.float64)


def read_scores(content: RecordDict, ask: Ask, layers: int) -> Tensor:
    """One number per layer, float32 [L]."""
    record = content.array_records.get(SCORES)
    if record is None or "scores" not in record:
        name = json.loads(ask.selection)["name"]
        raise ReplyError(f"no scores for {name}: {FIRST_MOD}")
    if len(content.array_records) > 1:
        raise ReplyError("arrays were sent along with the scores")
    scores = decoded("scores", record["scores"])
    if scores.dtype != np.float32 or scores.shape != (layers,):
        raise ReplyError(f"scores are {scores.dtype} {list(scores.shape)}, expected float32 [{layers}]")
    if not np.isfinite(scores).all():
        raise NotFinite("scores")
    return torch.from_numpy(scores.copy())


def read_arrays(content: RecordDict, wanted: Sequence[str], packing: Packing) -> ArrayRecord:
    """The one record of arrays, with exactly the names that were asked for; their numbers are not looked at yet."""
    if len(content.array_records) != 1:
        raise ReplyError(f"{len(content.array_records)} ArrayRecords, expected 1")
    record = next(iter(content.array_records.values()))
    missing = [name for name in wanted if name not in record]
    if missing:
        raise ReplyError(f"arrays {names(missing)} are missing")
    extra = set(record).difference(wanted)
    if extra:
        hint = "" if len(wanted) == len(packing.order) else f"; {FIRST_MOD}"
        raise ReplyError(f"arrays {names(sorted(extra))} were not asked for{hint}")
    return record
