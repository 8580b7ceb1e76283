"""Everything fedstrata raises on purpose.

FedstrataError
├── UserError               something the user can put right: one line, exit code 2
│   ├── BadValue            an argument that cannot be, and its value; it is a ValueError, too
│   ├── RecipeError         a field of a recipe, and its value
│   ├── DataError           a data set that is missing, corrupt or of the wrong shape
│   ├── RunDirectoryError   a run directory that is in use, damaged, of another version, or has links in it
│   ├── DiskFull            no room to write a file: which disk it is
│   ├── RuleError           a user's rule that answers nonsense
│   │   └── CheckFailed     one that failed checks of `check_rule`; it is in testing/report.py, with its report
│   ├── ModelError          a model, or data, that does not repeat, or that no order can find as it was built
│   ├── ClientAppError      a Flower ClientApp whose answers cannot be used, by anyone and from the beginning
│   └── MissingExtra        an optional dependency that is not installed
├── MessageError            a message that cannot be read; it costs the round one client only
│   └── ReplyError          a reply that the server can read, and refuses
│       └── NotFinite       one whose numbers are none
├── MemoryLost              a client does not have the version of its memory that it is to start from
└── RoundFailed             a round without a next model; it is in record.py, as it carries the round's record
"""

from __future__ import annotations

from collections.abc import Iterable


class FedstrataError(Exception):
    """Base of all deliberate errors."""


class UserError(FedstrataError):
    """Something the user can put right."""


class BadValue(UserError, ValueError):
    """An argument that cannot be: which, its value, and what is wrong."""

    def __init__(self, field: str, value: object, problem: str) -> None:
        self.field, self.value, self.problem = field, value, problem
        super().__init__(f"{field}: {problem}" if value is MISSING else f"{field} {problem}, got {value!r}")


class RecipeError(UserError):
    """A bad field; the message names the field and its value."""

    def __init__(self, field: str, value: object, problem: str) -> None:
        self.field, self.value, self.problem = field, value, problem
        super().__init__(f"{field} = {value!r}: {problem}" if value is not MISSING else f"{field}: {problem}")


class DataError(UserError):
    """A data set that cannot be used."""


class RunDirectoryError(UserError):
    """A run directory that cannot be used."""


class DiskFull(UserError):
    """No room to write a file."""


class RuleError(UserError):
    """A rule whose answer cannot be used."""


class ModelError(UserError):
    """A model that cannot be trained reproducibly; the message names the tensor."""


class ClientAppError(UserError):
    """A Flower ClientApp that does not do what the algorithm asks of it; the message says what to change."""


class MissingExtra(UserError):
    """An optional dependency that is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}: pip install 'fedstrata[{extra}]'")


class MessageError(FedstrataError):
    """A message that is not what it should be. The reason may quote it, and is made fit for logs and terminals."""

    def __init__(self, reason: str) -> None:
        super().__init__(printable(reason))


class ReplyError(MessageError):
    """A reply the server refuses, with the reason."""


class NotFinite(ReplyError):
    """A reply whose numbers are NaN, infinite, or so large that their squares are."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is not finite")
        self.what = what


class MemoryLost(FedstrataError):
    """A client's memory is not where it should be; the message says what there is instead."""

    def __init__(self, client: int, tag: tuple[int, int], there: Iterable[tuple[int, int]]) -> None:
        self.client, self.tag, self.there = client, tag, sorted(there)
        known = ", ".join(f"round {round}, attempt {attempt}" for round, attempt in self.there)
        what = f"client {client} has no memory of round {tag[0]}, attempt {tag[1]}"
        super().__init__(f"{what}; it has {f'that of {known}' if known else 'none at all'}")


_MOST_LETTERS = 1000
_END_OF_REASON = 300


def visible(text: str) -> str:
    """Text in which whatever would steer a terminal is written out, as in Python: controls, newlines, half pairs."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def tail(reason: str) -> str:
    """The end of a long reason: what was raised is the last line of a traceback."""
    return reason if len(reason) <= _END_OF_REASON else f"…{reason[-_END_OF_REASON:]}"


def printable(text: str) -> str:
    """Somebody else's words in one line that a terminal shows as they are: no control characters, and not for ever."""
    shown = visible(" ".join(text[: 2 * _MOST_LETTERS].split()))
    return shown if len(shown) <= _MOST_LETTERS else f"{shown[: _MOST_LETTERS - 1]}…"


class _Missing:
    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()
"""Stands for "no value" in a RecipeError."""


def require(condition: bool, field: str, value: object, problem: str) -> None:
    """Raise `BadValue` unless the condition holds (NaN never does)."""
    if not condition:
        raise BadValue(field, value, problem)
