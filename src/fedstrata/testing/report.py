"""A check is a function that calls a rule and says what it expects; a report is what came of all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedstrata.core.errors import RuleError


@dataclass(frozen=True)
class Failure:
    """A check that failed."""

    check: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.check}\n    expected: {self.expected}\n    found:    {self.found}"


@dataclass(frozen=True)
class Report:
    """What `check_rule` found."""

    rule: str
    kind: str
    passed: tuple[str, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)
    """What could not be tried here, and why."""
    failures: tuple[Failure, ...] = ()
    untried: tuple[str, ...] = ()
    """What could not be tried as others had failed."""

    def __str__(self) -> str:
        tried = len(self.passed) + len(self.failures)
        came = f"{len(self.failures)} of {tried} checks failed" if self.failures else f"{tried} checks passed"
        lines = [f"{self.rule} is {self.kind}: {came}", *(f"  {failure}" for failure in self.failures)]
        lines += [f"  {check} was skipped: {why}" for check, why in self.skipped.items()]
        return "\n".join(lines + ([f"  not tried after that: {', '.join(self.untried)}"] if self.untried else []))

    __repr__ = __str__


class CheckFailed(RuleError):
    """A rule that failed checks; `report` has all of them, `failures` those that failed."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report, self.failures = report, report.failures


class Unmet(Exception):
    """An expectation that was not met, and what was found instead."""


class Skipped(Exception):
    """A check that cannot be tried here, and why."""


def expect(condition: object, found: str) -> None:
    """End a check unless the condition holds; what the check expects is in its docstring."""
    if not condition:
        raise Unmet(found)


RULES = ("objective", "selection", "weighting", "server", "combine")
"""The axes."""


@dataclass(frozen=True)
class Check:
    """A function that calls a rule on one of these axes; without any, one that lets whole algorithms run."""

    function: Callable[[Any], None]
    axes: tuple[str, ...]

    @property
    def name(self) -> str:
        """As a report has it."""
        return self.function.__name__

    @property
    def expected(self) -> str:
        """What it expects: its docstring's first paragraph, in one line."""
        return " ".join((inspect.getdoc(self.function) or "").partition("\n\n")[0].split()).rstrip(".")


def check(*axes: str) -> Callable[[Callable[[Any], None]], Check]:
    """Make a check of a function of a `Subject`."""
    return lambda function: Check(function, axes)
