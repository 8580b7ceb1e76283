"""Who called: what Flower knows and does not pass on.

Flower hands a strategy neither the timeout that `start` was given nor the strategy that is wrapped around it, and a mod
not the mods around it. At that moment all of them are on the stack, in variables of Flower's own functions, and nowhere
else. A wrapper calls our `configure_train` from its own, and that is called from Flower's `start`, which has the
timeout. A mod is called by a function that `make_ffn` made for it, and that holds it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FrameType
from typing import Any

from flwr.serverapp.strategy import Strategy

DEFAULT_TIMEOUT = 3600.0
"""Flower's own."""


def strategies_around() -> list[Strategy]:
    """The strategies whose methods are being called, the innermost first."""
    found = (frame.f_locals.get("self") for frame in _callers())
    return [owner for owner in found if isinstance(owner, Strategy)]


def timeout_of_start() -> float | None:
    """The timeout that was given to the `start` of the outermost strategy; Flower's default, where nobody called it."""
    start = Strategy.start.__code__
    return next((frame.f_locals["timeout"] for frame in _callers() if frame.f_code is start), DEFAULT_TIMEOUT)


def mods_around() -> list[Any]:
    """The mods of a ClientApp that are being called, the innermost first."""
    return [frame.f_locals["_mod"] for frame in _callers() if "_mod" in frame.f_code.co_freevars]


def _callers() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
