"""What is seen of a job while it runs: how far each run is, and how long the rest may take."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from fedstrata.cli.terminal import Console
from fedstrata.formatting import duration, number
from reproductions.jobs import Event, rounds_done
from reproductions.study import Study, StudyRun


class Watch:
    """Progress and time left over the whole job; a live table, or plain lines where there is no terminal."""

    def __init__(self, console: Console, study: Study, runs: list[StudyRun], left: list[StudyRun]) -> None:
        self._console, self._stops = console, study.stops_early()
        self._rounds = {run.job.path: run.job.recipe.training.rounds for run in runs}
        self._at = {run.job.path: rounds_done(run) for run in left}
        self._finished, self._all = len(runs) - len(left), len(runs)
        costs = {cell.name: cell.seconds_per_round or study.seconds_per_round for cell in study.cells}
        self._cost = {run.job.path: costs[run.cell] for run in runs}
        self._done, self._started, self._said = 0.0, time.monotonic(), 0.0
        self._latest: dict[Path, Event] = {}
        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console)
        self._bar = self._progress.add_task("runs", total=self._all, completed=self._finished)
        # Drawn when something happens: a thread for it would be alive whenever a run is forked.
        self._live = Live(self._progress, console=console, auto_refresh=False)

    def __enter__(self) -> Watch:
        if self._console.is_terminal:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def add(self, event: Event) -> None:
        """Take note of a round, or of a run's end."""
        path = event.run.job.path
        if event.kind == "round":
            self._done += self._cost[path]
            self._at[path] = event.round
            self._latest[path] = event
        else:
            self._at[path] = self._rounds[path]
            last = self._latest.pop(path, None)
            self._finished += 1
            self._progress.update(self._bar, completed=self._finished)
            how = f"failed: {event.problem}" if event.kind == "failed" else self._now(last)
            self._say(f"{self._finished}/{self._all} {self._label(event)}: {how}; {self._time_left()}")
        if self._console.is_terminal:
            self._live.update(Group(self._table(), self._progress), refresh=True)
        elif event.kind == "round" and time.monotonic() - self._said > 30:
            self._say(f"  {self._label(event)}: {self._now(event)}; {self._time_left()}")

    def _left(self, path: Path) -> float:
        return (self._rounds[path] - self._at[path]) * self._cost[path]

    def _time_left(self) -> str:
        """From the rounds run so far, weighed by what each kind is expected to cost."""
        if not self._done:
            return "time left unknown"
        ahead = sum(self._left(path) for path in self._at)
        seconds = (time.monotonic() - self._started) / self._done * ahead
        return f"{'at most ' if self._stops else ''}{duration(seconds)} left"

    def _say(self, text: str) -> None:
        self._said = time.monotonic()
        self._console.print(text, soft_wrap=True)

    def _label(self, event: Event) -> str:
        return f"{event.run.cell}, {event.run.arm}, seed {event.run.seed}"

    def _now(self, event: Event | None) -> str:
        if event is None or event.line is None:
            return "done before"
        measured: dict[str, float] = next(iter(event.line["metrics"].values()), {})
        shown = "  ".join(f"{name} {number(value)}" for name, value in list(measured.items())[:2])
        return f"round {event.round}/{self._rounds[event.run.job.path]}  {shown}"

    def _table(self) -> Table:
        table = Table("run", "now", caption=self._time_left(), title_justify="left")
        for event in self._latest.values():
            table.add_row(self._label(event), self._now(event))
        return table
