"""Hyperparameters are checked where they are born."""

from __future__ import annotations


class BadValue(ValueError):
    """A hyperparameter that cannot be: which, its value, and what is wrong."""

    def __init__(self, field: str, value: object, problem: str) -> None:
        self.field, self.value, self.problem = field, value, problem
        super().__init__(f"{field} {problem}, got {value!r}")


def require(condition: bool, field: str, value: object, problem: str) -> None:
    """Raise `BadValue` unless the condition holds (NaN never does)."""
    if not condition:
        raise BadValue(field, value, problem)
