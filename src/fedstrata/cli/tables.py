"""What a terminal shows: the live table of a run, and of a partition."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.styled import Styled
from rich.table import Table

from fedstrata.cli.terminal import Console
from fedstrata.formatting import duration, number, size

if TYPE_CHECKING:
    from fedstrata.runs.formats import Line

SHOWN = 12
"""Rounds in the live table."""


def partition_table(
    table: Sequence[Sequence[int]], class_names: Sequence[str], rows: int = 40, client_names: Sequence[str] = ()
) -> Table:
    """Clients × classes with the clients' sizes; the first `rows` clients when there are more."""
    left_out = len(table) - rows
    view = Table(title="samples by client and class", caption=f"and {left_out} more clients" if left_out > 0 else None)
    for heading in ("client", *map(str, class_names), "all"):
        view.add_column(heading, justify="right")
    for client, counts in enumerate(table[:rows]):
        name = f"{client} {client_names[client]}" if client < len(client_names) else str(client)
        view.add_row(name, *(str(count) if count else "·" for count in counts), str(sum(counts)))
    return view


class LiveTable:
    """The last rounds, the upload so far and the time left; plain lines where there is no terminal."""

    def __init__(self, console: Console, title: str, metric: str, decisive: str, rounds: int) -> None:
        self._console, self._title, self._metric, self._decisive, self._rounds = (
            console,
            title,
            metric,
            decisive,
            rounds,
        )
        self._lines: deque[Line] = deque(maxlen=SHOWN)
        self._seconds: deque[float] = deque(maxlen=20)
        self._live = Live(self._render(), console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveTable:
        if self._console.is_terminal:
            self._live.start(refresh=True)
        else:
            self._console.print(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
            self._console.print(self._render())

    def add(self, line: Line) -> None:
        """Show one more round."""
        self._lines.append(line)
        self._seconds.append(line["seconds"])
        if self._console.is_terminal:
            self._live.update(self._render(), refresh=True)
        else:
            names = ("round", "loss", self._metric, "uploaded", "left")
            cells = "  ".join(f"{name} {cell}" for name, cell in zip(names, self._cells(line), strict=True))
            self._console.print(f"  {cells}{self._lost(line)}", soft_wrap=True)

    def _cells(self, line: Line) -> tuple[str, ...]:
        measured = line["metrics"].get(self._decisive, {})
        recent = list(self._seconds)[1 if len(self._seconds) > 1 else 0 :]  # the first round also warms up
        left = statistics.median(recent) * (self._rounds - line["round"])
        return (
            f"{line['round']}/{self._rounds}",
            number(measured.get("loss")),
            number(measured.get(self._metric)),
            size(line["upload_total"]),
            duration(left),
        )

    def _lost(self, line: Line) -> str:
        texts = (
            f"  ({len(entries)} {what}; client {entries[0]['client']}: {entries[0]['why']})"
            for what, entries in (("lost", line["lost"]), ("not evaluated", line["unmeasured"]))
            if entries
        )
        return "".join(texts)

    def _render(self) -> Group:
        table = Table(title=self._title, title_justify="left")
        for name in ("round", "loss", self._metric, "uploaded", "time left"):
            table.add_column(name, justify="right")
        for line in self._lines:
            table.add_row(*self._cells(line))
        lost = self._lost(self._lines[-1]).strip() if self._lines else ""
        return Group(table, *([Styled(lost, "yellow")] if lost else []))
