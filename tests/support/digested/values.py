"""From what a run leaves behind to lines of text that are digested.

Run directories are read as files, without fedstrata; only the tensors' names come from its export.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

import fedstrata

KINDS = ("weights", "history", "layers", "ledger", "status", "state")

Values = dict[str, list[str]]
"""What is digested, by kind of thing: a line for each number or array."""

Case = Callable[[Path], Values]
"""Runs something in an empty folder."""

MEASURED = ("attempt", "clients", "replies", "train_loss", "metrics", "upload", "download", "upload_total")
"""Of a line of the history; its bytes are the ledger, and who was lost is the status."""

ENDINGS = ("RoundFailed", "FedstrataError", "ClientAppError")
"""What a case may end with; every other error is a mistake in the case."""


def no_values() -> Values:
    return {kind: [] for kind in KINDS}


def ending(run: Callable[[], object]) -> str:
    """How a run ended."""
    try:
        run()
    except Exception as error:
        name = type(error).__name__
        if name not in ENDINGS:
            raise
        return f"{name}, diverged: {getattr(error, 'diverged', False)}"
    return "finished"


def values_of_run(path: Path, end: str, task: fedstrata.Task | None = None) -> Values:
    """What a run directory holds."""
    values = no_values()
    text = (path / "history.jsonl").read_text(encoding="utf-8")
    for line in map(json.loads, text.splitlines()):
        where = f"round {line['round']}"
        file = path / "layers" / f"{line['round']:06d}.safetensors"
        arrays = read_arrays(file) if file.exists() else {}
        values["history"] += leaves({name: line[name] for name in MEASURED}, where)
        values["layers"] += contents(arrays, where)
        values["ledger"] += leaves(line["bytes"], where)
        values["status"] += statuses(line, arrays, where)
    values["status"].append(end)
    checkpoint = read_arrays(max((path / "checkpoints").glob("*.safetensors")))
    del checkpoint["model"]  # the same numbers in an order of ours
    values["state"] += contents(checkpoint, "at the end")
    exported = path / "exported.safetensors"
    fedstrata.Run(path).export(exported, task=task)
    values["weights"] += contents(read_arrays(exported), "at the end")
    return values


Array = tuple[str, list[int], bytes]
"""Dtype, shape, content."""


def read_arrays(path: Path) -> dict[str, Array]:
    found = safetensors.deserialize(path.read_bytes())
    return {name: (about["dtype"], about["shape"], bytes(about["data"])) for name, about in found}


def as_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, Array]:
    return {name: (array.dtype.str, list(array.shape), array.tobytes()) for name, array in arrays.items()}


def contents(arrays: Mapping[str, Array], where: str) -> Iterator[str]:
    """In the order of names."""
    for name, (dtype, shape, content) in sorted(arrays.items()):
        yield f"{where}: {name} {dtype} {shape} {hashlib.sha256(content).hexdigest()[:16]}"


def leaves(value: Any, where: str) -> Iterator[str]:
    """Every number of a nest, with the way to it."""
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield from leaves(value[key], f"{where} {key}")
    elif isinstance(value, list):
        yield f"{where} has {len(value)}"
        for at, item in enumerate(value):
            yield from leaves(item, f"{where} {at}")
    else:
        yield f"{where} = {value!r}"


def statuses(line: Mapping[str, Any], arrays: Mapping[str, Array], where: str) -> Iterator[str]:
    """What became of the clients. Of those that are not lost, the record tells what they were asked for and sent."""
    lost = {who["client"]: who["kind"] for who in line["lost"]}
    if arrays:
        clients, work = (np.frombuffer(arrays[name][2], np.int64) for name in ("clients", "work"))
        masks = np.frombuffer(arrays["mask"][2]).reshape(arrays["mask"][1])
        for client, worked, mask in zip(clients.tolist(), work, masks, strict=True):
            rest = "not selected" if worked == 0 else "ok" if mask.any() else "nothing chosen"
            yield f"{where}: client {client} {lost.pop(client, rest)}"
    yield from (f"{where}: client {client} {kind}" for client, kind in lost.items())
    yield from (f"{where}.{who['attempt']}: client {who['client']} {who['kind']}" for who in line["earlier"])
    yield from (f"{where}: not measured on {who['client']}, {who['kind']}" for who in line["unmeasured"])
