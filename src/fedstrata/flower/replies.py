"""Reading what clients reply: nothing in it is trusted, and what is refused says why."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor

from fedstrata.errors import ReplyError
from fedstrata.flower.wire import RECEIPT, SCORES, Ask, Packing, decoded, names
from fedstrata.messages import MOST_SAMPLES


def read_size(content: RecordDict, key: str) -> float:
    """By how many examples a client counts."""
    if len(content.metric_records) != 1:
        raise ReplyError(f"{len(content.metric_records)} MetricRecords, expected 1")
    size = next(iter(content.metric_records.values())).get(key)
    if not isinstance(size, int | float) or not 0 < size <= MOST_SAMPLES:
        raise ReplyError(f"{key} = {size!r}, must be a positive number, at most {MOST_SAMPLES}")
    return size


def read_receipt(content: RecordDict, ask: Ask, layers: int) -> Tensor:
    """How stiff the client's spring was in each layer, [L]; that there is a receipt says that it had the spring."""
    lacking = f"the client did not apply {json.loads(ask.objective)['name']}"
    receipt = content.config_records.get(RECEIPT)
    if receipt is None:
        raise ReplyError(f"{lacking}: no acknowledgement by fedstrata.flower.Spring")
    if receipt.get("objective") != ask.objective:
        raise ReplyError(f"{lacking}: it acknowledged {receipt.get('objective')!r}")
    if receipt.get("round") != ask.round:
        raise ReplyError(f"{lacking}: it acknowledged round {receipt.get('round')!r}, not {ask.round}")
    pulls, stiffness = receipt.get("pulls"), receipt.get("stiffness")
    if not isinstance(pulls, int) or pulls < 1:
        raise ReplyError(f"{lacking}: Spring.pull was not called")
    if not isinstance(stiffness, list) or len(stiffness) != layers:
        raise ReplyError(f"stiffness = {stiffness!r}, expected {layers} numbers")
    numbers = [value if isinstance(value, int | float) else math.nan for value in stiffness]
    return torch.tensor(numbers, dtype=torch.float64)


def read_scores(content: RecordDict, ask: Ask, layers: int) -> Tensor:
    """One number per layer, float32 [L]."""
    record = content.array_records.get(SCORES)
    if record is None or "scores" not in record:
        name = json.loads(ask.selection)["name"]
        raise ReplyError(f"no scores for {name}: the client lacks fedstrata.flower.selection_mod")
    if len(content.array_records) > 1:
        raise ReplyError("arrays were sent along with the scores")
    scores = decoded("scores", record["scores"])
    if scores.dtype != np.float32 or scores.shape != (layers,):
        raise ReplyError(f"scores are {scores.dtype} {list(scores.shape)}, expected float32 [{layers}]")
    if not np.isfinite(scores).all():
        raise ReplyError("scores are not finite")
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
        hint = "" if len(wanted) == len(packing.order) else "; the client lacks fedstrata.flower.selection_mod"
        raise ReplyError(f"arrays {names(sorted(extra))} were not asked for{hint}")
    return record
