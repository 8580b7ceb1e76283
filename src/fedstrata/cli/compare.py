"""`fedstrata compare`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fedstrata.cli.options import Data, Settings, Workers
from fedstrata.cli.terminal import Console
from fedstrata.core.errors import UserError
from fedstrata.formatting import number, size

if TYPE_CHECKING:
    from fedstrata.runs.comparison import Comparison, Job, Outcome
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
                    live.update(Group(_live_table(comparison, latest), progress), refresh=True)
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


def _live_table(comparison: Comparison, latest: dict[tuple[str, int], Line]) -> Table:
    table = Table("algorithm", "seed", "round", "now", "uploaded")
    for job in [job for job in comparison.jobs if (job.algorithm, job.seed) in latest][-30:]:
        line = latest[job.algorithm, job.seed]
        measured = line["metrics"].get(job.recipe.evaluation.on[0], {})
        now = "  ".join(f"{name} {number(value)}" for name, value in list(measured.items())[:2])
        table.add_row(job.algorithm, str(job.seed), str(line["round"]), now, size(line["upload_total"]))
    return table


def result_tables(comparison: Comparison) -> list[Table]:
    """One row per algorithm, then each algorithm's differences from the first, seed by seed."""
    from fedstrata.runs.comparison import outcome
    from fedstrata.runs.reader import Run
    from fedstrata.runs.statistics import estimate, paired_differences, written_differences

    runs = {(job.algorithm, job.seed): Run(job.path) for job in comparison.jobs}
    results = {key: outcome(run) for key, run in runs.items()}
    first = next(iter(runs.values()))
    target, metric, limit = first.recipe.evaluation.target, first.metric.name, results[next(iter(results))].limit
    rises = first.metric.direction == "max"
    columns = [_Column(metric, lambda o: o.metric, "{:.4f}".format, "no number", rises)]
    if target is not None:
        columns.append(_Column(f"rounds to {target:g}", lambda o: o.rounds_to_target, "{:g}".format, f">{limit}"))
        columns.append(_Column("upload to target", lambda o: o.upload_to_target, size))
    columns.append(_Column("upload", lambda o: o.upload, size))

    seeds = f"{len(comparison.seeds)} seed{'s' if len(comparison.seeds) > 1 else ''}"
    table = Table("algorithm", *(column.name for column in columns), title=f"{first.recipe.name}, {seeds}")
    values = {
        (algorithm, column.name): [float(column.get(results[algorithm, seed]) or 0.0) for seed in comparison.seeds]
        for algorithm in comparison.algorithms
        for column in columns
    }
    for algorithm in comparison.algorithms:
        cells = (estimate(values[algorithm, column.name]).written(column.value) for column in columns)
        table.add_row(algorithm, *cells)
    tables = [table]
    if len(comparison.algorithms) > 1:
        baseline = comparison.algorithms[0]
        paired = Table("algorithm", *(column.name for column in columns), title=f"minus {baseline}, paired by seed")
        for algorithm in comparison.algorithms[1:]:
            found = {c.name: paired_differences(values[algorithm, c.name], values[baseline, c.name]) for c in columns}
            cells = (written_differences(found[c.name], c.difference, algorithm, baseline, c.rises) for c in columns)
            paired.add_row(algorithm, *cells)
        tables.append(paired)
    return tables


@dataclass(frozen=True)
class _Column:
    """One figure of every run: how it is got, and how it is written."""

    name: str
    get: Callable[[Outcome], float | None]
    write: Callable[[float], str]
    missed: str = "not reached"
    rises: bool = False

    def value(self, value: float) -> str:
        return self.missed if math.isinf(value) else self.write(value)

    def difference(self, value: float) -> str:
        return ("−" if value < 0 else "+") + self.write(abs(value))
