"""Several algorithms on one recipe, over several seeds, run to be compared as pairs.

Every run has its own directory, so an interrupted comparison goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstrata.core.errors import RecipeError, RunDirectoryError
from fedstrata.recipes.experiment import build_experiment
from fedstrata.recipes.schema import load
from fedstrata.runs.comparison import Comparison, Job, job_folder, read_request
from fedstrata.runs.files import WHILE_WRITING, Folder, locked
from fedstrata.runs.formats import COMPARISON_FORMAT, Line
from fedstrata.runs.reader import Run
from fedstrata.runs.runner import run_rounds, start_run


def begin_comparison(
    recipe: str | Path | Mapping[str, Any],
    algorithms: Sequence[str],
    seeds: Sequence[int],
    *,
    settings: Sequence[str] = (),
    out: Path | None = None,
    data: Path | None = None,
) -> Comparison:
    """Check every run before the first one begins. The same request finds the same directory again."""
    for name, values in (("--algorithms", algorithms), ("--seeds", seeds)):
        if not values:
            raise RecipeError(name, list(values), "names nothing to run")
        if len(set(values)) < len(values):
            raise RecipeError(name, list(values), "names the same one twice")
    recipes = {(a, s): load(recipe, algorithm=a, settings=settings, seed=s) for a in algorithms for s in seeds}
    first = recipes[algorithms[0], seeds[0]]
    request = {a: recipes[a, seeds[0]].essence() for a in algorithms}
    digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
    path = out or Path("runs") / f"compare-{first.name}-{digest[:8]}"
    jobs = tuple(Job(a, s, recipes[a, s], job_folder(path, a, s)) for s in seeds for a in algorithms)
    task = build_experiment(first, data=data).task
    for algorithm in algorithms:
        build_experiment(recipes[algorithm, seeds[0]], task).warn()
    _claim(path, first.name, digest, list(algorithms), list(seeds))
    return Comparison(tuple(algorithms), tuple(seeds), jobs, path)


def _claim(path: Path, recipe: str, request: str, algorithms: list[str], seeds: list[int]) -> None:
    """Remember what the directory is for, or add seeds to it; refuse one that is for something else."""
    if path.exists() and not path.is_dir():
        raise RunDirectoryError(f"{path} is no directory; choose another --out")
    path.mkdir(parents=True, exist_ok=True)
    files = Folder(path)
    with locked(path, WHILE_WRITING):  # another comparison may be adding seeds of its own
        if files.has("compare.json"):
            found = read_request(path)
            if found.request != request:
                raise RunDirectoryError(f"{path} holds another comparison; choose another --out")
            seeds = sorted({*found.seeds, *seeds})
        elif any(path.iterdir()):
            raise RunDirectoryError(f"{path} exists and holds no comparison; choose another --out")
        content = {
            "format": COMPARISON_FORMAT,
            "recipe": recipe,
            "request": request,
            "algorithms": algorithms,
            "seeds": seeds,
        }
        files.write("compare.json", (json.dumps(content) + "\n").encode())


def run_job(job: Job, data: Path | None = None) -> Generator[Line, None, None]:
    """Do what is left of a job, and yield its rounds; a finished one yields nothing."""
    Folder(job.path.parents[1]).folder("/".join(job.path.parts[-2:]))  # no link has come in between
    if (job.path / "run.json").exists():
        run = Run(job.path)
        found, asked = run.recipe, job.recipe
        if (found.seed, found.essence()) != (asked.seed, asked.essence()):
            raise RunDirectoryError(f"{job.path} was run with another recipe; choose another --out")
        if not run.finished():
            yield from run_rounds(run, data=data)
        return
    experiment = build_experiment(job.recipe, data=data)
    experiment.require_data()
    yield from run_rounds(start_run(experiment, job.path), experiment)
