"""Several algorithms on one recipe, over several seeds, compared as pairs.

Every run has its own directory, so an interrupted comparison goes on where it was. Runs with the same seed share
partition, initial weights and client sampling, so differences are taken seed by seed. A target that was not reached
within T rounds is censored: it counts as "more than T", and is never dropped.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import comb
from pathlib import Path
from typing import Any

from fedstrata.core.errors import RecipeError, RunDirectoryError
from fedstrata.recipes.schema import Recipe, load
from fedstrata.runs.files import WHILE_WRITING, Folder, locked
from fedstrata.runs.runner import Line, Run

FORMAT = 1
ENOUGH_SEEDS = 5
"""From this many seeds on an interval is given; below it, every value."""


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    algorithm: str
    seed: int
    recipe: Recipe
    path: Path


@dataclass(frozen=True)
class Comparison:
    """What to run, and where."""

    algorithms: tuple[str, ...]
    seeds: tuple[int, ...]
    cells: tuple[Cell, ...]
    path: Path


def plan(
    recipe: str | Path | Mapping[str, Any],
    algorithms: Sequence[str],
    seeds: Sequence[int],
    *,
    settings: Sequence[str] = (),
    out: Path | None = None,
    data: Path | None = None,
) -> Comparison:
    """Check every cell before the first one runs. The same request finds the same directory again."""
    from fedstrata.recipes.experiment import build_experiment

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
    cells = tuple(Cell(a, s, recipes[a, s], _folder(path, a, s)) for s in seeds for a in algorithms)
    task = build_experiment(first, data=data).task
    for algorithm in algorithms:
        build_experiment(recipes[algorithm, seeds[0]], task).warn()
    _claim(path, first.name, digest, list(algorithms), list(seeds))
    return Comparison(tuple(algorithms), tuple(seeds), cells, path)


def begun_cells(path: Path) -> list[Cell]:
    """Every run of a comparison that was begun, whether it is finished or not."""
    content = Folder(path).read_versioned("compare.json", (FORMAT,))
    folders = [(a, seed, _folder(path, a, seed)) for seed in content["seeds"] for a in content["algorithms"]]
    return [Cell(a, seed, Run(at).recipe, at) for a, seed, at in folders if (at / "run.json").exists()]


def reopen_comparison(path: Path) -> Comparison:
    """A comparison that was run before, as far as it got."""
    content = Folder(path).read_versioned("compare.json", (FORMAT,))
    cells = [cell for cell in begun_cells(path) if Run(cell.path).finished()]
    complete = {seed for seed in content["seeds"] if sum(c.seed == seed for c in cells) == len(content["algorithms"])}
    if not complete:
        raise RunDirectoryError(f"{path}: no seed has been run to its end with every algorithm yet")
    return Comparison(
        tuple(content["algorithms"]),
        tuple(seed for seed in content["seeds"] if seed in complete),
        tuple(cell for cell in cells if cell.seed in complete),
        path,
    )


def _folder(path: Path, algorithm: str, seed: int) -> Path:
    """A cell's run directory; a link must not lead elsewhere, whoever made the comparison's directory."""
    arm = algorithm.replace(":", "-").replace("/", "-")
    return Folder(path).folder(f"{arm}/seed-{seed}").path


def _claim(path: Path, recipe: str, request: str, algorithms: list[str], seeds: list[int]) -> None:
    """Remember what the directory is for, or add seeds to it; refuse one that is for something else."""
    if path.exists() and not path.is_dir():
        raise RunDirectoryError(f"{path} is no directory; choose another --out")
    path.mkdir(parents=True, exist_ok=True)
    files = Folder(path)
    with locked(path, WHILE_WRITING):  # another comparison may be adding seeds of its own
        if files.has("compare.json"):
            found = files.read_versioned("compare.json", (FORMAT,))
            if found["request"] != request:
                raise RunDirectoryError(f"{path} holds another comparison; choose another --out")
            seeds = sorted({*found["seeds"], *seeds})
        elif any(path.iterdir()):
            raise RunDirectoryError(f"{path} exists and holds no comparison; choose another --out")
        content = {"format": FORMAT, "recipe": recipe, "request": request, "algorithms": algorithms, "seeds": seeds}
        files.write("compare.json", (json.dumps(content) + "\n").encode())


def run_cell(cell: Cell, data: Path | None = None) -> Iterator[Line]:
    """Run one cell, or what is left of it, and yield its rounds; a finished one yields nothing."""
    from fedstrata.recipes.experiment import build_experiment

    Folder(cell.path.parents[1]).folder("/".join(cell.path.parts[-2:]))  # no link has come in between
    if (cell.path / "run.json").exists():
        run = Run(cell.path)
        found, asked = run.recipe, cell.recipe
        if (found.seed, found.essence()) != (asked.seed, asked.essence()):
            raise RunDirectoryError(f"{cell.path} was run with another recipe; choose another --out")
        if not run.finished():
            yield from run.rounds(data=data)
        return
    experiment = build_experiment(cell.recipe, data=data)
    experiment.require_data()
    yield from Run.start(experiment, cell.path).rounds(experiment)


def write_results(comparison: Comparison) -> Path:
    """Every run's outcome as a table for other programs: results.csv."""
    rows = ["algorithm,seed,metric,value,best,rounds,rounds_to_target,upload,upload_to_target"]
    for cell in comparison.cells:
        run = Run(cell.path)
        summary = run.summary()
        values = [
            cell.algorithm,
            cell.seed,
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


# --- statistics ----------------------------------------------------------------------------------------------------


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
    """The figures of a finished run."""
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


@dataclass(frozen=True)
class Estimate:
    """A median over seeds; with enough of them, a 95 % bootstrap interval of it."""

    values: tuple[float, ...]
    median: float
    interval: tuple[float, float] | None

    def written(self, write: Callable[[float], str]) -> str:
        """Every seed's value, or from enough seeds on the median and its interval."""
        if self.interval is None:
            return ", ".join(map(write, self.values))
        low, high = self.interval
        return f"{write(self.median)} [{write(low)}, {write(high)}]"


def estimate(values: Sequence[float]) -> Estimate:
    """Median and percentile bootstrap; infinite (censored) values take part as what they are, larger than any other.

    What is no number is larger still.
    """

    def in_order(value: float) -> tuple[bool, float]:
        return math.isnan(value), value

    ordered = sorted(map(float, values), key=in_order)
    count = len(ordered)
    interval = None
    if count >= ENOUGH_SEEDS:
        medians = [(_between(ordered[i], ordered[j]), chance) for i, j, chance in _middles_of_resamples(count)]
        medians.sort(key=lambda found: in_order(found[0]))
        interval = (_beyond_the_tail(medians), _beyond_the_tail(medians[::-1]))
    median = _between(ordered[(count - 1) // 2], ordered[count // 2])
    return Estimate(tuple(map(float, values)), median, interval)


def _between(low: float, high: float) -> float:
    """The mean of the middle two, which is infinite if one of them is; between −∞ and ∞ it is 0."""
    return low if low == high else 0.0 if (low, high) == (-math.inf, math.inf) else (low + high) / 2


@lru_cache(maxsize=64)
def _middles_of_resamples(count: int) -> list[tuple[int, int, float]]:
    """How likely the middle two of `count` draws with replacement are the i-th and the j-th smallest value (from 0).

    Counted instead of drawn, out of count^count resamples. The lower middle, the h-th of the draws, is among the i
    smallest values if at least h draws are. With an even count it is the i-th and the upper middle a later one, the
    j-th, if the largest of h draws is the i-th and the smallest of the other h is the j-th.
    """
    half = (count + 1) // 2

    def lower_middle_within(i: int) -> int:
        return sum(comb(count, n) * i**n * (count - i) ** (count - n) for n in range(half, count + 1))

    found = []
    for i in range(count):
        ways = lower_middle_within(i + 1) - lower_middle_within(i)
        for j in range(i + 1, count) if count % 2 == 0 else ():
            largest, smallest = (i + 1) ** half - i**half, (count - j) ** half - (count - j - 1) ** half
            apart = comb(count, half) * largest * smallest
            ways -= apart
            found.append((i, j, apart / count**count))
        found.append((i, i, ways / count**count))
    return found


def _beyond_the_tail(medians: Sequence[tuple[float, float]]) -> float:
    """The first value, from the outside, at or before which 2.5 % of all resamples are."""
    so_far = accumulate(chance for _, chance in medians)
    return next(value for (value, _), chance in zip(medians, so_far, strict=True) if chance >= 0.025)


def paired_differences(ours: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Ours minus the baseline, seed by seed; NaN where both are censored, infinite where one is."""
    return [float("nan") if math.isinf(a) and math.isinf(b) else a - b for a, b in zip(ours, baseline, strict=True)]


def written_differences(
    differences: Sequence[float], write: Callable[[float], str], ours: str, theirs: str, rises: bool = False
) -> str:
    """Paired differences over seeds; where only one side has a number, its name is all that can be said.

    The other one has not reached the target, or its metric became no number; of one that `rises` the worst is −∞.
    """

    def written(value: float) -> str:
        if math.isnan(value):
            return "neither"
        if math.isinf(value):
            return f"{theirs if (value > 0) != rises else ours} only"
        return write(value)

    has_no_middle = any(map(math.isnan, differences)) or {math.inf, -math.inf} <= set(differences)
    return ", ".join(map(written, differences)) if has_no_middle else estimate(differences).written(written)
