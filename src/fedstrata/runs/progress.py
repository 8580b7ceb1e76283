"""How far runs have got: a bar in a terminal, a table that changes in a notebook, nothing where nobody looks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedstrata.core.display import Table
from fedstrata.core.errors import visible
from fedstrata.formatting import number, size
from fedstrata.runs.formats import Line


class Bar(Protocol):
    """How far a number of runs have got, of so many rounds each."""

    def begins(self, run: int, name: str) -> None:
        """A run begins; those before it are over."""
        ...

    def reaches(self, line: Line) -> None:
        """A round of it is whole."""
        ...


@contextmanager
def progress(rounds: Sequence[int]) -> Iterator[Bar]:
    """A bar on standard error, or a table in the notebook's cell."""
    if _in_notebook():
        yield _Cell(rounds)
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Nothing()  # not rich's disabled bar, which ends in an empty line
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
    times = TimeElapsedColumn(), TimeRemainingColumn()
    bar = Progress(*columns, *times, console=console, auto_refresh=False, transient=True)
    with bar:  # no thread is alive when workers are forked
        yield _Line(rounds, bar)


class _Nothing:
    """Nobody looks."""

    def begins(self, run: int, name: str) -> None:
        pass

    def reaches(self, line: Line) -> None:
        pass


class _Line:
    """One line of a terminal."""

    def __init__(self, rounds: Sequence[int], progress: Progress) -> None:
        self._before, self._progress = [0, *accumulate(rounds)], progress
        self._task = progress.add_task("", total=self._before[-1])
        self._run = 0

    def begins(self, run: int, name: str) -> None:
        self._run = run
        self._progress.update(self._task, completed=self._before[run], description=visible(name), refresh=True)

    def reaches(self, line: Line) -> None:
        self._progress.update(self._task, completed=self._before[self._run] + line["round"], refresh=True)


class _Cell:
    """One output of a notebook's cell, with a row for each run that has begun. (rich would ask for ipywidgets.)"""

    def __init__(self, rounds: Sequence[int]) -> None:
        self._rounds, self._run = rounds, 0
        self._rows: dict[int, tuple[str, ...]] = {}
        self._handle: Any = None

    def begins(self, run: int, name: str) -> None:
        self._run, self._rows[run] = run, (name, "", "", "")

    def reaches(self, line: Line) -> None:
        values = [f"{name} {number(value)}" for found in line["metrics"].values() for name, value in found.items()]
        name, _, measured, _ = self._rows[self._run]
        done = f"{line['round']}/{self._rounds[self._run]}"
        self._rows[self._run] = (name, done, "  ".join(values[:2]) or measured, size(line["upload_total"]))
        table = Table("", ("run", "round", "measured", "uploaded"), tuple(self._rows.values()))
        if self._handle is None:
            from IPython.display import display

            self._handle = display(table, display_id=True)
        else:
            self._handle.update(table)


def _in_notebook() -> bool:
    ipython: Any = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None
