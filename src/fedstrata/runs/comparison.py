"""A comparison that is looked at: several algorithms on one recipe over several seeds, each run in its own directory.

Runs with the same seed share partition, initial weights and client sampling, so differences are taken seed by seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.core.errors import FedstrataError, RunDirectoryError
from fedstrata.core.lazy import plots
from fedstrata.recipes.schema import Recipe
from fedstrata.runs import formats
from fedstrata.runs.files import Folder
from fedstrata.runs.formats import COMPARISON_FORMAT, Request
from fedstrata.runs.reader import Run

if TYPE_CHECKING:
    from altair import TopLevelMixin as Chart


@dataclass(frozen=True)
class Job:
    """One run, to be made or made already."""

    algorithm: str
    seed: int
    recipe: Recipe
    path: Path


@dataclass(frozen=True)
class Comparison:
    """What is compared, and where it is."""

    algorithms: tuple[str, ...]
    seeds: tuple[int, ...]
    jobs: tuple[Job, ...]
    path: Path

    @classmethod
    def at(cls, path: str | Path) -> Comparison:
        """One that was run before: the seeds that every algorithm has run to their end."""
        return read_comparison(Path(path))[0]

    def runs(self) -> list[Run]:
        """Its runs."""
        return [Run(job.path) for job in self.jobs]

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
    request, problems = read_request(path), []
    finished: list[Job] = []
    for algorithm, seed, at in begun_runs(path):
        try:
            run = Run(at)
            if run.finished():
                finished.append(Job(algorithm, seed, run.recipe, at))
        except (FedstrataError, OSError) as error:
            problems.append(str(error))
    wanted = set(request.algorithms)
    complete = {seed for seed in request.seeds if {job.algorithm for job in finished if job.seed == seed} == wanted}
    if not complete:
        more = f"; {problems[0]}" if problems else ""
        raise RunDirectoryError(f"{path}: no seed has been run to its end with every algorithm yet{more}")
    seeds = tuple(seed for seed in request.seeds if seed in complete)
    jobs = tuple(job for job in finished if job.seed in complete)
    return Comparison(tuple(request.algorithms), seeds, jobs, path), problems


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


def write_results(comparison: Comparison) -> Path:
    """Every run's outcome as a table for other programs: results.csv."""
    rows = ["algorithm,seed,metric,value,best,rounds,rounds_to_target,upload,upload_to_target"]
    for job in comparison.jobs:
        run = Run(job.path)
        summary = run.summary()
        values = [
            job.algorithm,
            job.seed,
            run.metric.name,
            summary[run.metric.name],
            summary["best"],
            summary["rounds"],
            summary["rounds_to_target"],
            summary["upload"],
            summary["upload_to_target"],
        ]
        rows.append(",".join("" if value is None else str(value) for value in values))
    Folder(comparison.path).write("results.csv", ("\n".join(rows) + "\n").encode())
    return comparison.path / "results.csv"
