"""fedstrata for apps that are written in Flower: a strategy for the server, and a little help for clients.

`Strategy` takes the place of Flower's own; `Local` and `selection_mod` are for clients, where an algorithm asks for
more than the server can do alone. The names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fedstrata.core.errors import MissingExtra

if TYPE_CHECKING:
    from fedstrata.flower.client import Local as Local
    from fedstrata.flower.client import selection_mod as selection_mod
    from fedstrata.flower.strategy import Strategy as Strategy

_MODULE_OF = {"Local": "client", "Strategy": "strategy", "selection_mod": "client"}
__all__ = sorted(_MODULE_OF)

if find_spec("flwr") is None:
    raise MissingExtra("flwr", "flower", "fedstrata.flower")


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fedstrata.flower' has no attribute {name!r}")
    return getattr(import_module(f"fedstrata.flower.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
