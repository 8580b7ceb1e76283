"""The data of a node that goes wrong in every way: `faults` in its folder says how, a line for each time it is read.

All it says has a secret in it, and so have the name of its module and the paths of its files, which the test sets up.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch

from fedstrata.tasks.config import NodesConfig
from fedstrata.tasks.nodes import read_own_folder

NODES = {"clients": 2, "shape": [1, 2, 2], "classes": ["ill", "well"]}


class Patients(torch.utils.data.Dataset[Any]):
    """Data that can be read, and raises when it is used: the first sample is looked at by the one who reads it."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error, self.reads = error, 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.reads += 1
        if self.error is not None and self.reads > 1:
            raise self.error
        return torch.full((1, 2, 2), float(index)), index % 2


def data() -> Any:
    """What the next line of `faults` says: `good`, a folder of bad files, or a fault and the secret that is in it."""
    path = Path("faults")
    fault, *others = path.read_text().splitlines()
    path.write_text("\n".join(others or ["good"]))
    what, _, secret = fault.partition(" ")
    if what == "good":
        return Patients()
    for say in (print, warnings.warn, logging.getLogger("flwr").error, logging.getLogger().error):
        say(f"{secret} is printed, too")
    if what == "folder":
        return read_own_folder(Path(secret), NodesConfig.model_validate(NODES))
    errors = {
        "value": ValueError(secret),
        "key": KeyError(secret),
        "class": type(secret, (LookupError,), {"__module__": "builtins"})(secret),
        "exit": SystemExit(secret),
        "file": FileNotFoundError(2, "No such file", secret),
    }
    where, _, kind = what.partition("-")
    if where == "use":
        return Patients(errors[kind])
    raise errors[kind]
