"""A bar for what takes long, in a terminal and in a notebook; nothing where nobody looks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Bar:
    """How far a number of runs have got, of so many rounds each."""

    def __init__(self, rounds: Sequence[int], progress: Progress) -> None:
        self._before, self._progress = [0, *accumulate(rounds)], progress
        self._task = progress.add_task("", total=self._before[-1])
        self._run = 0

    def begins(self, run: int, name: str) -> None:
        """A run begins; those before it are over."""
        self._run = run
        self._progress.update(self._task, completed=self._before[run], description=name, refresh=True)

    def reaches(self, round: int) -> None:
        """A round of it is whole."""
        self._progress.update(self._task, completed=self._before[self._run] + round, refresh=True)


@contextmanager
def progress(rounds: Sequence[int]) -> Iterator[Bar]:
    """A bar on standard error, or in the notebook's cell, until it is left."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
    times = TimeElapsedColumn(), TimeRemainingColumn()
    shown = console.is_terminal or console.is_jupyter
    bar = Progress(*columns, *times, console=console, auto_refresh=False, transient=True, disable=not shown)
    with bar:  # no thread is alive when workers are forked
        yield Bar(rounds, bar)
