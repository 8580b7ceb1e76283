"""Stored runs made again, beside what is stored of them.

On the processor and torch that a run was stored with, every round has to be the same. Another processor adds numbers up
in another order, so the last digits of the first round differ, and what follows may differ by more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from fedstrata.runs.reader import Run
from reproductions.measures import Series
from reproductions.report import TextTable, write
from reproductions.results import Results, machine, same_machine, series_of
from reproductions.study import StudyRun


@dataclass(frozen=True)
class Repeats:
    """What is stored of a study, and the same with some of its runs made again."""

    stored: Results
    again: Results
    runs: Sequence[StudyRun]
    """Those that were made again."""

    @classmethod
    def of(cls, stored: Results, runs: Sequence[StudyRun], failed: Sequence[StudyRun]) -> Repeats:
        """Read the run directories; `failed` are the runs that could not go on."""
        found = {cell: {arm: dict(seeds) for arm, seeds in arms.items()} for cell, arms in stored.runs.items()}
        for run in runs:
            found[run.cell][run.arm][run.seed] = series_of(Run(run.job.path), list(stored.study.figures))
        kept = stored.failed - {run.place for run in runs}
        return cls(stored, replace(stored, runs=found, failed=kept | {run.place for run in failed}), runs)

    def first_difference(self, run: StudyRun) -> int | None:
        """The first round that came out otherwise, or None."""
        before, after = (_rounds(results.runs[run.cell][run.arm][run.seed]) for results in (self.stored, self.again))
        pairs = enumerate(zip_longest(before, after), start=1)
        return next((round for round, (one, other) in pairs if one != other), None)

    def contradictions(self) -> list[StudyRun]:
        """Runs that differ from those that the same kind of machine stored."""
        here = machine()
        return [
            run
            for run in self.runs
            if self.first_difference(run) is not None and same_machine(self.stored.made[run.place], here)
        ]

    def table(self) -> TextTable:
        """Every measure as it is stored and as it is now."""
        rows = [row for run in self.runs for row in self._rows(run)]
        return TextTable("stored, and run again", ["run", "measure", "stored", "again"], rows)

    def _rows(self, run: StudyRun) -> list[list[str]]:
        rounds, difference = run.job.recipe.training.rounds, self.first_difference(run)
        rows = []
        for name, what in self.stored.study.measures.items():
            values = (
                write(what, results.values(name, run.cell, run.arm, [run.seed])[0], rounds)
                for results in (self.stored, self.again)
            )
            rows.append(["", what.heading, *values])
        rows[0][0] = f"{run.cell}, {run.arm}, seed {run.seed}"
        return [*rows, ["", "digits", "", "the same" if difference is None else f"others from round {difference} on"]]

    def conclusion(self) -> str:
        """In a sentence or two."""
        same = sum(self.first_difference(run) is None for run in self.runs)
        text = f"{same} of {len(self.runs)} runs came out as stored, in every round."
        contradictions = self.contradictions()
        others = len(self.runs) - same - len(contradictions)
        if contradictions:
            names = ", ".join(f"{run.cell}/{run.arm}/seed-{run.seed}" for run in contradictions)
            text += f" Stored with this processor and torch, and yet different: {names}."
        if others:
            here = machine()
            text += (
                f" {others} {'were' if others > 1 else 'was'} stored with another processor or torch than this one "
                f"({here['processor']}, {here['cpu']}, torch {here['torch']}), where sums have other last digits."
            )
        return text


def _rounds(series: Series) -> list[dict[str, float | None]]:
    """Round by round what was recorded."""
    return [dict(zip(series, values, strict=True)) for values in zip(*series.values(), strict=True)]
