"""What became of a client in a round. Without torch: whoever only reads runs needs it, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedstrata.core.errors import printable

StatusKind = Literal[
    "ok",
    "nothing chosen",
    "not selected",
    "dropped out",
    "straggler dropped",
    "no reply",
    "failed",
    "refused",
    "not finite",
]


@dataclass(frozen=True)
class Status:
    """What became of a client in a round; the reason is for people, and decides nothing.

    `ok`: its update counts. `nothing chosen`: it did its part, and the selection wanted no layer of it. `not selected`:
    so it was decided before training, and nothing was sent to it. `dropped out`, `straggler dropped`: as the experiment
    wants it. `no reply`, `failed`: the engine says so. `refused`, `not finite`: its reply cannot be used.
    """

    kind: StatusKind
    reason: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable(self.reason))

    @property
    def counts(self) -> bool:
        """Whether the client did what it was asked for."""
        return self.kind in ("ok", "nothing chosen")

    @property
    def is_lost(self) -> bool:
        """Whether the client was asked, and there is nothing of it."""
        return not self.counts and self.kind != "not selected"

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}" if self.reason else self.kind


OK = Status("ok")
SILENT = Status("no reply")
