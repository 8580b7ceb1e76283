"""What a notebook shows while runs go on: one table, which changes in its place. Anywhere else nothing is shown."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from fedstrata.core.display import Table
from fedstrata.formatting import number, size
from fedstrata.runs.formats import Line
from fedstrata.runs.reader import Run

_EVERY = 0.2
"""Seconds between two changes of the table; the last round of a run is always shown."""


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    ipython: Any = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


class Progress:
    """One row for each run, in the order in which they began."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[str, ...]] = {}
        self._handle: Any = None
        self._shown = 0.0

    def of(self, run: Run) -> Callable[[Line], None]:
        """What to call with each round of a run; outside of notebooks it does nothing."""
        return (lambda line: self._add(run, line)) if in_notebook() else _nothing

    def _add(self, run: Run, line: Line) -> None:
        recipe, name = run.recipe, run.metric.name
        measured = line["metrics"].get(recipe.evaluation.on[0], {})
        last = self._rows.get(str(run.path), ("",) * 5)
        self._rows[str(run.path)] = (
            f"{recipe.name}: {recipe.label}, seed {recipe.seed}",
            f"{line['round']}/{recipe.training.rounds}",
            f"{name} {number(measured[name])}" if name in measured else last[2],
            f"{size(line['upload_total'])}",
            str(run.path),
        )
        now = time.monotonic()
        if now - self._shown >= _EVERY or run.is_over([line]):
            self._shown = now
            self._display(Table("", ("run", "round", "measured", "uploaded", "directory"), tuple(self._rows.values())))

    def _display(self, table: Table) -> None:
        if self._handle is None:
            self._handle = import_module("IPython.display").display(table, display_id=True)
        else:
            self._handle.update(table)


def _nothing(line: Line) -> None:
    """Nobody looks."""
