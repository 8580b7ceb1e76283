"""A comparison that is looked at: several algorithms on one recipe over several seeds, each run in its own directory.

Runs with the same seed share partition, initial weights and client sampling, so differences are taken seed by seed.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedstrata.core.display import Table, html
from fedstrata.core.errors import BadValue, FedstrataError, RunDirectoryError, visible
from fedstrata.core.lazy import plots
from fedstrata.formatting import size
from fedstrata.recipes.schema import Recipe
from fedstrata.runs import formats
from fedstrata.runs.files import Folder
from fedstrata.runs.formats import COMPARISON_FORMAT, Request
from fedstrata.runs.reader import Run, to_pandas
from fedstrata.runs.statistics import estimate, paired_differences, written_differences

if TYPE_CHECKING:
    from altair import TopLevelMixin as Chart
    from pandas import DataFrame


@dataclass(frozen=True)
class Job:
    """One run, to be made or made already."""

    algorithm: str
    seed: int
    recipe: Recipe
    path: Path


@dataclass(frozen=True, repr=False)
class Comparison:
    """What is compared, and where it is."""

    algorithms: tuple[str, ...]
    seeds: tuple[int, ...]
    jobs: tuple[Job, ...]
    path: Path

    @property
    def runs(self) -> dict[tuple[str, int], Run]:
        """Every run, by algorithm and seed."""
        return {(job.algorithm, job.seed): Run(job.path) for job in self.jobs}

    def outcomes(self) -> dict[tuple[str, int], Outcome]:
        """What every run came to, by algorithm and seed."""
        return {key: outcome(run) for key, run in self.runs.items()}

    def differences(
        self,
        what: Literal["metric", "rounds_to_target", "upload", "upload_to_target"] = "metric",
        baseline: str | None = None,
    ) -> dict[str, list[float]]:
        """Each algorithm's outcome minus the baseline's, seed by seed; the baseline is the first one if not given.

        Infinite where only one of the two reached the target, NaN where neither did.
        """
        first = self.algorithms[0] if baseline is None else baseline
        if first not in self.algorithms:
            raise BadValue("baseline", baseline, f"is none of {', '.join(self.algorithms)}")
        found = self.outcomes()
        values = {a: [float(getattr(found[a, s], what) or 0.0) for s in self.seeds] for a in self.algorithms}
        return {a: paired_differences(values[a], values[first]) for a in self.algorithms if a != first}

    def tables(self) -> list[Table]:
        """A row for each algorithm; then each algorithm's differences from the first, seed by seed."""
        return _tables(self)

    def frame(self) -> DataFrame:
        """A pandas DataFrame with a row for each run: what results.csv has.

        `pandas.concat({key: run.frame() for key, run in comparison.runs.items()})` has every round of each.
        """
        return to_pandas("Comparison.frame()", [result(job) for job in self.jobs])

    def __repr__(self) -> str:
        seeds = ", ".join(map(str, self.seeds))
        return visible(f"<Comparison {self.path}: {', '.join(self.algorithms)}; seeds {seeds}>")

    def _repr_html_(self) -> str:
        try:
            return html(self.tables())
        except (FedstrataError, OSError) as error:  # a run that is not finished, or not there any more
            return html([Table(str(error), (), ((repr(self),),))])

    @classmethod
    def at(cls, path: str | Path) -> Comparison:
        """One that was run before: the seeds that every algorithm has run to their end."""
        return read_comparison(Path(path))[0]

    def plot(self, kind: str = "curves", **options: Any) -> Chart:
        """A picture of the comparison as an Altair chart; see `fedstrata.plots`."""
        chart: Chart = plots.draw(kind, self, **options)
        return chart


def read_request(path: Path) -> Request:
    """What a comparison's directory is for."""
    found = Folder(path).read_versioned("compare.json", (COMPARISON_FORMAT,))
    return formats.read_request(found, path / "compare.json")


def job_folder(path: Path, algorithm: str, seed: int) -> Path:
    """A run's directory; a link must not lead elsewhere, whoever made the comparison's directory."""
    arm = algorithm.replace(":", "-").replace("/", "-")
    return Folder(path).folder(f"{arm}/seed-{seed}").path


def begun_runs(path: Path) -> list[tuple[str, int, Path]]:
    """Every run of a comparison that was begun, whether it is finished or not: algorithm, seed and where it is."""
    request = read_request(path)
    folders = [(a, seed, job_folder(path, a, seed)) for seed in request.seeds for a in request.algorithms]
    return [run for run in folders if (run[-1] / "run.json").exists()]


def read_comparison(path: Path) -> tuple[Comparison, list[str]]:
    """A comparison that was run before, as far as it got; and of each run that cannot be read, what is wrong."""
    request = read_request(path)
    finished, problems = _finished(path)
    wanted = set(request.algorithms)
    complete = {seed for seed in request.seeds if {job.algorithm for job in finished if job.seed == seed} == wanted}
    if not complete:
        more = f"; {problems[0]}" if problems else ""
        raise RunDirectoryError(f"{path}: no seed has been run to its end with every algorithm yet{more}")
    seeds = tuple(seed for seed in request.seeds if seed in complete)
    jobs = tuple(job for job in finished if job.seed in complete)
    return Comparison(tuple(request.algorithms), seeds, jobs, path), problems


def _finished(path: Path) -> tuple[list[Job], list[str]]:
    """Every run of a comparison that is finished; and of each that cannot be read, what is wrong."""
    finished, problems = list[Job](), list[str]()
    for algorithm, seed, at in begun_runs(path):
        try:
            run = Run(at)
            if run.finished():
                finished.append(Job(algorithm, seed, run.recipe, at))
        except (FedstrataError, OSError) as error:
            problems.append(str(error))
    return finished, problems


# --- what came out ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What one run came to; a metric that is no number is the worst there is.

    `rounds_to_target` is None where there is no target, and infinite where it was missed.
    """

    metric: float
    rounds_to_target: float | None
    upload: float
    upload_to_target: float | None
    limit: int


def outcome(run: Run) -> Outcome:
    """What a finished run came to."""
    summary = run.summary()
    final = summary[run.metric.name]
    has_target = run.recipe.evaluation.target is not None
    reached, upload = summary["rounds_to_target"], summary["upload_to_target"]
    return Outcome(
        metric=run.metric.worst if final is None or math.isnan(final) else final,
        rounds_to_target=(reached if reached is not None else math.inf) if has_target else None,
        upload=summary["upload"],
        upload_to_target=(upload if upload is not None else math.inf) if has_target else None,
        limit=run.recipe.training.rounds,
    )


def _tables(comparison: Comparison) -> list[Table]:
    """One row per algorithm, then each algorithm's differences from the first, seed by seed."""
    results, first = comparison.outcomes(), next(iter(comparison.runs.values()))
    target, metric, limit = first.recipe.evaluation.target, first.metric.name, results[next(iter(results))].limit
    rises = first.metric.direction == "max"
    columns = [_Column(metric, lambda o: o.metric, "{:.4f}".format, "no number", rises)]
    if target is not None:
        columns.append(_Column(f"rounds to {target:g}", lambda o: o.rounds_to_target, "{:g}".format, f">{limit}"))
        columns.append(_Column("upload to target", lambda o: o.upload_to_target, size))
    columns.append(_Column("upload", lambda o: o.upload, size))
    values = {
        (algorithm, column.name): [float(column.get(results[algorithm, seed]) or 0.0) for seed in comparison.seeds]
        for algorithm in comparison.algorithms
        for column in columns
    }

    seeds = f"{len(comparison.seeds)} seed{'s' if len(comparison.seeds) > 1 else ''}"
    headings, baseline = ("algorithm", *(column.name for column in columns)), comparison.algorithms[0]
    rows, differences = list[tuple[str, ...]](), list[tuple[str, ...]]()
    for algorithm in comparison.algorithms:
        rows.append((algorithm, *(estimate(values[algorithm, c.name]).written(c.value) for c in columns)))
        found = {c.name: paired_differences(values[algorithm, c.name], values[baseline, c.name]) for c in columns}
        cells = (written_differences(found[c.name], c.difference, algorithm, baseline, c.rises) for c in columns)
        differences.append((algorithm, *cells))
    shown = [Table(f"{first.recipe.name}, {seeds}", headings, tuple(rows))]
    if len(rows) > 1:
        shown.append(Table(f"minus {baseline}, paired by seed", headings, tuple(differences[1:])))
    return shown


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


def result(job: Job) -> dict[str, Any]:
    """What one run came to, as a line of results.csv."""
    run = Run(job.path)
    summary = run.summary()
    return {
        "algorithm": job.algorithm,
        "seed": job.seed,
        "metric": run.metric.name,
        "value": summary[run.metric.name],
        **{name: summary[name] for name in ("best", "rounds", "rounds_to_target", "upload", "upload_to_target")},
    }


def write_results(path: Path) -> Path:
    """The outcome of every finished run of a comparison as a table for other programs: results.csv."""
    rows = [result(job) for job in _finished(path)[0]]
    content = io.StringIO()
    writer = csv.DictWriter(content, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    Folder(path).write("results.csv", content.getvalue().encode())
    return path / "results.csv"
