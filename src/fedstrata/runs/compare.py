"""Several algorithms on one recipe, over several seeds, run to be compared as pairs.

Every run has its own directory, so an interrupted comparison goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from fedstrata.algorithms import AXES, to_table
from fedstrata.core.axes import Algorithm
from fedstrata.core.errors import BadValue, RecipeError, RunDirectoryError
from fedstrata.recipes.experiment import build_experiment
from fedstrata.recipes.settings import Settings, What, resolved, task_without_recipe
from fedstrata.runs.comparison import Comparison, Job, job_folder, read_request, write_results
from fedstrata.runs.files import WHILE_WRITING, Folder, locked
from fedstrata.runs.formats import COMPARISON_FORMAT, Line
from fedstrata.runs.progress import progress
from fedstrata.runs.reader import Run
from fedstrata.runs.runner import as_changes, run_rounds, start_run
from fedstrata.tasks.seeded import AnyTask

Arm = str | Mapping[str, Any] | Algorithm
"""An algorithm, as an object, by its name with options, or as a recipe's table."""


def compare(
    what: What,
    algorithms: Sequence[str | Algorithm] | Mapping[str, Arm],
    seeds: Iterable[int] = (0,),
    *,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    data: str | Path | None = None,
    on_round: Callable[[Job, Line], None] | None = None,
    **more: Unpack[Settings],
) -> Comparison:
    """Run several algorithms over several seeds, each run in its own directory, and return the `Comparison`.

    Runs with the same seed share data, first weights and clients, so they can be compared seed by seed. Interrupted,
    the same call goes on where it was.

    `what`: a task, or a recipe by name, path, table or as a `Recipe`. `algorithms`: `Algorithm`s, or names with options
    ("fedldf:n=4"); in a mapping, by names of your own. The first one is what the others are compared with. `out`: the
    directory, below `runs/` if not given. `on_round` is called with every round's job and history line. All else is a
    setting by its name (`rounds=20, lr=0.1`), or by its place in a recipe (`settings={"evaluation.clients": 5}`).

    >>> found = fedstrata.compare("quickstart", [fedavg(), fedadp()], seeds=range(5))  # doctest: +SKIP
    >>> found.differences()  # doctest: +SKIP
    """
    arms = dict(algorithms) if isinstance(algorithms, Mapping) else _by_label(algorithms)
    changes, where = (settings or {}), Path(data) if data is not None else None
    comparison = begin_comparison(
        what, arms, list(seeds), settings=changes, out=Path(out) if out is not None else None, data=where, **more
    )
    task = task_without_recipe(what)
    with progress([job.recipe.training.rounds for job in comparison.jobs]) as bar:
        for number, job in enumerate(comparison.jobs):
            bar.begins(number, f"{job.algorithm}, seed {job.seed}")
            for line in run_job(job, where, task):
                bar.reaches(line)
                if on_round is not None:
                    on_round(job, line)
    write_results(comparison.path)
    return comparison


def _by_label(algorithms: Sequence[str | Algorithm]) -> dict[str, Arm]:
    labels = [given if isinstance(given, str) else label(given) for given in algorithms]
    if twice := next((name for name in labels if labels.count(name) > 1), None):
        raise BadValue("algorithms", twice, "is there twice; give them as a mapping, with names of your own")
    return dict(zip(labels, algorithms, strict=True))


def label(algorithm: Algorithm) -> str:
    """As the command line writes it: `fedldf:n=4`; of one without a name, its rules."""
    table = to_table(algorithm)
    if "name" in table:
        return ":".join([table["name"], *(f"{key}={value}" for key, value in table.items() if key != "name")])
    return "+".join(str(rule["name"]) for axis, rule in table.items() if axis in AXES)


def begin_comparison(
    what: What,
    algorithms: Sequence[str] | Mapping[str, Arm],
    seeds: Sequence[int],
    *,
    settings: Iterable[str] | Mapping[str, Any] = (),
    out: Path | None = None,
    data: Path | None = None,
    **more: Unpack[Settings],
) -> Comparison:
    """Check every run before the first one begins. The same request finds the same directory again."""
    for name, values in (("--algorithms", algorithms), ("--seeds", seeds)):
        if not values:
            raise RecipeError(name, list(values), "names nothing to run")
        if len(set(values)) < len(values):
            raise RecipeError(name, list(values), "names the same one twice")
    arms = algorithms if isinstance(algorithms, Mapping) else {name: name for name in algorithms}
    algorithms, changes = list(arms), as_changes(settings)
    recipes = {(a, s): resolved(what, arm, more, changes, s)[0] for a, arm in arms.items() for s in seeds}
    if any(recipe.built_algorithm.private for recipe in recipes.values()):  # all arms are measured on the same data
        recipes = {key: recipe.evaluated_on_clients() for key, recipe in recipes.items()}
    first = recipes[algorithms[0], seeds[0]]
    request = {a: recipes[a, seeds[0]].essence() for a in algorithms}
    digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
    path = out or Path("runs") / f"compare-{first.name}-{digest[:8]}"
    jobs = tuple(Job(a, s, recipes[a, s], job_folder(path, a, s)) for s in seeds for a in algorithms)
    task = build_experiment(first, task_without_recipe(what), data).task
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


def run_job(job: Job, data: Path | None = None, task: AnyTask | None = None) -> Generator[Line, None, None]:
    """Do what is left of a job, and yield its rounds; a finished one yields nothing. `task`: one built in Python."""
    Folder(job.path.parents[1]).folder("/".join(job.path.parts[-2:]))  # no link has come in between
    if (job.path / "run.json").exists():
        run = Run(job.path)
        found, asked = run.recipe, job.recipe
        if (found.seed, found.essence()) != (asked.seed, asked.essence()):
            raise RunDirectoryError(f"{job.path} was run with another recipe; choose another --out")
        if not run.finished():
            yield from run_rounds(run, data=data, task=task)
        return
    experiment = build_experiment(job.recipe, task, data)
    experiment.require_data()
    yield from run_rounds(start_run(experiment, job.path), experiment)
