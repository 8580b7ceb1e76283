"""What a node says when something goes wrong: the kind of failure and an exception's type, of fixed vocabularies.

The text of an exception may quote a node's data or its paths, so it stays in the node's own log; the server makes its
sentence from kind and type. Only a simulation, whose nodes are all on the machine of whoever runs it, sends the text.

This module imports nothing heavy: it must work on a node where torch cannot be loaded.
"""

from __future__ import annotations

import builtins
import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal, get_args

from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedstrata.core import errors
from fedstrata.core.errors import FedstrataError, MemoryLost, MessageError, printable

FAILURE = "failure"
"""The record of a node that failed; there is no other in its message."""

_MOST_TAGS = 10
"""Of how many versions of its memory a node tells."""

Kind = Literal[
    "installation",
    "configuration",
    "data",
    "order",
    "another client",
    "late",
    "work",
    "metric",
    "memory",
    "training",
    "upload",
    "evaluation",
    "reply",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

_SENTENCES: dict[Kind, str] = {
    "installation": "it cannot load fedstrata",
    "configuration": "its configuration or recipe cannot be used",
    "data": "it cannot read its data",
    "order": "it cannot read the order",
    "another client": "the order is for another client than it has",
    "late": "a later round or attempt has begun there",
    "work": "the order is for more work than its recipe has",
    "metric": "its metric has another name than the server's",
    "memory": "it does not have what its client is to remember",
    "training": "it cannot train",
    "upload": "it has no such update, or cannot upload it",
    "evaluation": "it cannot evaluate the model",
    "reply": "it cannot send what it was asked for",
}


def _exceptions(module: object) -> list[str]:
    return [
        name for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, BaseException)
    ]


_HOMES = {
    "builtins": _exceptions(builtins),
    "fedstrata.core.errors": _exceptions(errors),
    "torch": ["AcceleratorError", "OutOfMemoryError"],
    "torch.linalg": ["LinAlgError"],
    "numpy.linalg": ["LinAlgError"],
    "numpy.exceptions": ["AxisError", "DTypePromotionError", "TooHardError"],
}
TYPES = frozenset(name for names in _HOMES.values() for name in names)
"""The exceptions that a node may name. A class of a user's own, or made at run time, could have data in its name."""

_log = logging.getLogger("fedstrata")


# --- on the node -----------------------------------------------------------------------------------------------------


class Failed(Exception):
    """A node could not do something. It never leaves the node."""

    def __init__(self, kind: Kind, error: BaseException) -> None:
        super().__init__(kind)
        self.kind, self.error = kind, error


@contextmanager
def during(kind: Kind, of: type[BaseException] = BaseException) -> Iterator[None]:
    """Whatever is raised in this block is a failure of this kind, unless a block within it has said so already."""
    try:
        yield
    except Failed:
        raise
    except of as error:
        raise Failed(kind, error) from error


def ends_this_process(error: BaseException) -> bool:
    """Whether Flower or Ray ends the process: their signal handlers raise SystemExit wherever they interrupt."""
    if not isinstance(error, SystemExit):
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).partition(".")[0] in ("flwr", "ray")


def tell(failed: Failed, message: Message, context: Context, in_full: bool) -> RecordDict:
    """The failure as it leaves the node. What happened goes along `in_full`, or else to the node's own log."""
    record = ConfigRecord({"kind": failed.kind, "type": type_name(failed.error)})
    if isinstance(failed.error, MemoryLost):
        record["there"] = [number for tag in failed.error.there[-_MOST_TAGS:] for number in tag]
    with suppress(Exception):  # an exception of a user's own may raise another one when it is printed
        if in_full:
            from fedstrata.clients.client import reason

            record["text"] = reason(failed.error)
        else:
            _log.error(
                "client %s, %s: %s. The server is told '%s' and '%s', and nothing of this:",
                context.node_config.get("partition-id"),
                _occasion(message),
                _SENTENCES[failed.kind],
                record["kind"],
                record["type"],
                exc_info=failed.error,
            )
    return RecordDict({FAILURE: record})


def _occasion(message: Message) -> str:
    order = message.content.config_records.get("order")
    return "asked who it is" if order is None else f"round {order.get('round')!r}"


def type_name(error: BaseException) -> str:
    """The nearest class of an exception that has a name in the vocabulary."""
    for cls in type(error).__mro__:
        for module, names in _HOMES.items():
            for name in names:
                if getattr(sys.modules.get(module), name, None) is cls:
                    return name
    return BaseException.__name__


# --- on the server ---------------------------------------------------------------------------------------------------


class NodeFailed(FedstrataError):
    """A node says that it failed."""


def read(content: RecordDict, simulated: bool = False) -> None:
    """Raise `NodeFailed` if that is what a message says, in our words; text is taken from simulated nodes only."""
    if FAILURE not in content:
        return
    record = content[FAILURE]
    said = dict(record) if isinstance(record, ConfigRecord) else {}
    text = said.pop("text", "") if simulated else ""
    kind, type_, there = said.get("kind"), said.get("type"), said.pop("there", None)
    has = _told(there) if kind == "memory" and there is not None else ""
    if len(content) > 1 or len(said) != 2 or kind not in KINDS or not isinstance(type_, str) or type_ not in TYPES:
        raise MessageError("says that it failed, in words that are not fedstrata's")
    raise NodeFailed(printable(str(text)) or f"{_SENTENCES[kind]} ({type_}){has}; its own log says more")


def _told(there: object) -> str:
    """Which versions a node has."""
    numbers = there if isinstance(there, list) and all(type(number) is int for number in there) else []
    pairs = zip(numbers[0::2], numbers[1::2], strict=False)
    known = ", ".join(f"round {round}, attempt {attempt}" for round, attempt in pairs)
    return f"; it has {f'that of {known[:500]}' if known else 'none'}"
