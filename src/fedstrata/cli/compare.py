"""`fedstrata compare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from fedstrata.cli.options import Data, Settings, Workers
from fedstrata.cli.terminal import Console
from fedstrata.core.errors import UserError
from fedstrata.formatting import number, size

if TYPE_CHECKING:
    from fedstrata.runs.comparison import Comparison, Job
    from fedstrata.runs.formats import Line


def compare_command(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE|NAME", help="A .toml file, or a name from `fedstrata list`.")
    ],
    algorithms: Annotated[
        list[str],
        typer.Option("--algorithms", "-a", metavar="NAME,...", help="fedavg,fedldf:n=4; or -a fedavg -a fedldf:n=4."),
    ],
    seeds: Annotated[str, typer.Option("--seeds", help="0..4, or 0,1,7")] = "0",
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where the runs go.")] = None,
    data: Data = None,
    workers: Workers = None,
) -> None:
    """Run several algorithms over several seeds and compare them, paired by seed.

    Below five seeds every seed's value is shown, from five on the median with a 95 % bootstrap interval.

    A target that was not reached stays in as "more than T". Interrupted, the same command goes on where it was.

    Examples:

    fedstrata compare quickstart --algorithms fedavg,fedadp,fedlayerwise --seeds 0..4

    fedstrata compare quickstart -a fedavg -a fedldf:n=4 --set training.rounds=50
    """
    from fedstrata.runs.compare import begin_comparison
    from fedstrata.runs.comparison import write_results

    changes = [*(settings or []), *([f"engine.workers={workers}"] if workers is not None else [])]
    names = [name.strip() for given in algorithms for name in given.split(",") if name.strip()]
    comparison = begin_comparison(recipe, names, parse_seeds(seeds), settings=changes, out=out, data=data)
    console = Console()
    try:
        _run_all(console, comparison, data)
    except KeyboardInterrupt:
        console.print(f"stopped; the same command with --out {comparison.path} goes on from here", soft_wrap=True)
        raise typer.Exit(130) from None
    show_comparison(console, comparison.path)  # with the seeds that it had before
    console.print(f"as numbers: {write_results(comparison.path)}", soft_wrap=True)
    console.print(f"run directories: {comparison.path}", soft_wrap=True)


def show_comparison(console: Console, path: Path) -> None:
    """The tables of all that a comparison's directory has."""
    from fedstrata.runs.comparison import read_comparison

    comparison, problems = read_comparison(path)
    for table in result_tables(comparison):
        console.print(table)
    for problem in problems:
        console.print(f"left out: {problem}", soft_wrap=True)


def parse_seeds(text: str) -> list[int]:
    """`0..4`, `0,1,7`, or both mixed."""
    seeds: list[int] = []
    for part in text.split(","):
        first, dots, last = part.strip().partition("..")
        try:
            seeds += range(int(first), int(last) + 1) if dots else [int(first)]
        except ValueError:
            raise UserError(f"--seeds = {text!r}: must look like 0..4 or 0,1,7") from None
    if not seeds or len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds = {text!r}: names {'the same one twice' if seeds else 'nothing to run'}")
    return seeds


def _run_all(console: Console, comparison: Comparison, data: Path | None) -> None:
    from fedstrata.runs.compare import run_job
    from fedstrata.runs.reader import Run

    progress = Progress(
        "{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    total = sum(job.recipe.training.rounds for job in comparison.jobs)
    bar = progress.add_task("rounds", total=total)
    latest: dict[tuple[str, int], Line] = {}
    live = Live(Group(progress), console=console, auto_refresh=False)  # no thread is alive when workers are forked
    if console.is_terminal:
        live.start(refresh=True)
    try:
        for job in comparison.jobs:
            if not console.is_terminal:
                console.print(f"{job.algorithm}, seed {job.seed}")
            done = len(Run(job.path).history()) if (job.path / "run.json").exists() else 0
            progress.advance(bar, done)
            for line in run_job(job, data):
                latest[job.algorithm, job.seed] = line
                progress.advance(bar)
                done += 1
                if console.is_terminal:
                    live.update(Group(_live_table(console, comparison, latest), progress), refresh=True)
                elif line["round"] % max(1, job.recipe.training.rounds // 5) == 0:
                    console.print(f"  {_progress_line(job, line)}")
            progress.advance(bar, job.recipe.training.rounds - done)  # stopped early at its target
    finally:
        if console.is_terminal:
            live.stop()


def _progress_line(job: Job, line: Line) -> str:
    measured = line["metrics"].get(job.recipe.evaluation.on[0], {})
    shown = "  ".join(f"{name} {number(value)}" for name, value in list(measured.items())[:2])
    return f"round {line['round']}/{job.recipe.training.rounds}  {shown}  uploaded {size(line['upload_total'])}"


def _live_table(console: Console, comparison: Comparison, latest: dict[tuple[str, int], Line]) -> Table:
    """The newest runs, as many as there are lines for; a table that is too high would not scroll."""
    begun = [job for job in comparison.jobs if (job.algorithm, job.seed) in latest]
    room = console.size.height - 3  # the bar, and where the cursor is
    for first in range(max(0, len(begun) - room), len(begun)):
        table = _table_of(begun[first:], latest, first)
        if len(console.render_lines(table)) <= room:
            return table
    return _table_of(begun[-1:], latest, len(begun) - 1)


def _table_of(jobs: Sequence[Job], latest: dict[tuple[str, int], Line], before: int) -> Table:
    caption = f"below {before} earlier runs" if before > 0 else None
    table = Table(Column("algorithm", overflow="fold"), "seed", "round", "now", "uploaded", caption=caption)
    for job in jobs:
        line = latest[job.algorithm, job.seed]
        measured = line["metrics"].get(job.recipe.evaluation.on[0], {})
        now = "  ".join(f"{name} {number(value)}" for name, value in list(measured.items())[:2])
        table.add_row(job.algorithm, str(job.seed), str(line["round"]), now, size(line["upload_total"]))
    return table


def result_tables(comparison: Comparison) -> list[Table]:
    """One row per algorithm, then each algorithm's differences from the first, seed by seed."""
    shown = []
    for table in comparison.tables():
        name, *others = table.columns
        view = Table(Column(name, overflow="fold"), *others, title=table.title)
        for row in table.rows:
            view.add_row(*row)
        shown.append(view)
    return shown
