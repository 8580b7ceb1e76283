"""A comparison that is looked at: several algorithms on one recipe over several seeds, each run in its own directory.

Runs with the same seed share partition, initial weights and client sampling, so differences are taken seed by seed.
"""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedstrata.core.errors import BadValue, FedstrataError, RunDirectoryError
from fedstrata.recipes.schema import Recipe
from fedstrata.runs import formats
from fedstrata.runs.files import Folder
from fedstrata.runs.formats import COMPARISON_FORMAT, Request
from fedstrata.runs.reader import Run
from fedstrata.runs.statistics import paired_differences


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
