"""Stored results: one small JSON file per cell of a study, with every round's figures of every run.

    results/<study>/<cell>.json
    { "format", "study", "cell",
      "arms": { arm: { "recipe": hash, "settings": {…},
                       "runs": { seed: { "made", "arithmetic", "data", "weights_sha256", "series" } } } } }

A run belongs to a recipe by its hash. Runs of another recipe than the study's present one are not shown, nor are those
whose bits a later arithmetic has changed (a run that does not say its own has the first). A run that another study has
stored, of the same recipe and seed, is read there and not stored twice. A number that is infinite, or none at all, is
the word "inf"; null is a round without evaluation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.core.errors import RunDirectoryError, UserError
from fedstrata.recipes.schema import Recipe
from fedstrata.runs.environment import versions
from fedstrata.runs.files import WHILE_WRITING, Folder, locked, write_whole
from fedstrata.runs.reader import Run
from reproductions.measures import Series, cumulative_upload, measure
from reproductions.outdated import is_outdated
from reproductions.study import Study, StudyRun, recipe_hash

FORMAT = 1

_MACHINE = ("fedstrata", "torch", "cpu", "processor")


def machine(run: Run | None = None) -> dict[str, str]:
    """What the last bits of a run's result depend on; or of those made here and now."""
    here = versions()
    found = [here | one for _, one in run.directory.environments] if run else [here]
    return {key: ", then ".join(dict.fromkeys(one[key] for one in found)) for key in _MACHINE}


def same_machine(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether the same recipe must have given the same bits on both."""
    return all(one[key] == other[key] for key in ("torch", "cpu", "processor"))


# --- from a run directory --------------------------------------------------------------------------------------------


def series_of(run: Run, figures: list[str]) -> dict[str, list[float | None]]:
    """Every round's upload and metrics, and what a study asks for beyond them."""
    history = run.history()
    series: dict[str, list[float | None]] = {"upload": [line["upload"] for line in history]}
    names = {(place, key) for line in history for place, found in line["metrics"].items() for key in found}
    for place, key in sorted(names):
        if key in ("loss", run.metric.name):
            series[f"{place}.{key}"] = [_short(_metric(line, place, key)) for line in history]
    if "gradient_divergence" in figures:
        series["gradient_divergence"] = [_short(_gradient_divergence(run, line["round"])) for line in history]
    if "angles" in figures:
        angles = np.array([run.layers(line["round"])["model_angle"] for line in history])
        smoothed = np.cumsum(angles, axis=0) / np.arange(1, len(angles) + 1)[:, None]  # everyone takes part in all
        series |= {f"angle.{client}": [_short(v) for v in column] for client, column in enumerate(smoothed.T)}
    return series


def _metric(line: Mapping[str, Any], place: str, key: str) -> float | None:
    """None without an evaluation. The history has null for what is no number: nothing could be worse."""
    found = line["metrics"].get(place)
    if found is None:
        return None
    return math.inf if found.get(key) is None else float(found[key])


def _short(value: float | None) -> float | None:
    """Six digits are plenty of a loss, and all of an accuracy on ten thousand samples."""
    if value is None:
        return None
    return float(f"{value:.6g}") if math.isfinite(value) else math.inf


def _gradient_divergence(run: Run, round: int) -> float:
    """FedAdp's figure 7: the mean of ‖∇F − ∇F_k‖ over clients, with −Δ/η(t) for the gradients.

    The record has ‖Δ_k‖ and the angle to G = Σ p_k Δ_k, and ‖G‖² = Σ p_k ⟨Δ_k, G⟩ gives ‖G‖ = Σ p_k ‖Δ_k‖ cos θ_k.
    """
    record = run.layers(round)
    norms = np.sqrt((record["divergence"] ** 2).sum(axis=1))
    cosines = np.cos(record["model_angle"])
    share = record["sizes"] / record["sizes"].sum()
    mean = float((share * norms * cosines).sum())
    squared = mean**2 + norms**2 - 2 * mean * norms * cosines
    return float(np.sqrt(np.maximum(squared, 0)).mean() / run.recipe.training.local.learning_rate(round))


# --- on disk ---------------------------------------------------------------------------------------------------------


def store(study: Study, cell: str, runs: list[StudyRun], folder: Path, failed: Mapping[Path, str]) -> Path:
    """Write a cell's finished runs (and those that failed for good), beside stored ones of the same recipe."""
    path = folder / study.name / f"{cell}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent, WHILE_WRITING):  # another job may have other seeds of this study
        return _store(study, cell, runs, path, failed)


def _store(study: Study, cell: str, runs: list[StudyRun], path: Path, failed: Mapping[Path, str]) -> Path:
    stored = _read(path) if path.exists() else {}
    arms = {arm: entry for arm, entry in stored.items() if arm not in study.arms}  # renamed, perhaps: not ours to drop
    for arm in study.arms:
        recipe = study.recipe_of(next(c for c in study.cells if c.name == cell), arm, 0)
        old = stored.get(arm, {})
        found = _current(old, recipe) if old and belongs(old, recipe) else {}
        for one in runs:
            if (one.cell, one.arm) != (cell, arm) or not (one.job.path / "run.json").exists():
                continue
            run = Run(one.job.path)
            if run.finished() or one.job.path in failed:
                found[str(one.seed)] = _describe(run, study, failed.get(one.job.path))
        if found:
            ordered = dict(sorted(found.items(), key=lambda item: int(item[0])))
            arms[arm] = {"recipe": recipe_hash(recipe), "settings": recipe.essence(), "runs": ordered}
    if arms:
        write_whole(path, _as_text({"format": FORMAT, "study": study.name, "cell": cell, "arms": arms}).encode())
    return path


def refuse_contradictions(study: Study, runs: list[StudyRun], folder: Path) -> None:
    """A run directory that is finished must not displace other numbers of the same run without a word."""
    for cell in study.cells:
        path = folder / study.name / f"{cell.name}.json"
        stored = _read(path) if path.exists() else {}
        for one in runs:
            known = stored.get(one.arm, {}).get("runs", {}).get(str(one.seed))
            if one.cell != cell.name or known is None or not belongs(stored[one.arm], one.job.recipe):
                continue
            run = Run(one.job.path)
            if known.get("arithmetic", 1) < run.about.arithmetic:
                continue  # what is stored is out of date
            if run.summary()["weights_sha256"] != known["weights_sha256"]:
                raise UserError(
                    f"{one.job.path} ended with other weights than {path} has of {one.arm}, seed {one.seed}: another "
                    "version or machine made it; remove the one that is out of date"
                )


def belongs(entry: Mapping[str, Any], recipe: Recipe) -> bool:
    """Whether an arm's stored runs are of this recipe, with defaults that were the same where there were any."""

    def differs(then: Any, now: Any) -> bool:
        if isinstance(then, Mapping) and isinstance(now, Mapping):
            return any(differs(then[key], now[key]) for key in then.keys() & now.keys())
        return bool(then != now)

    same = entry["recipe"] == recipe_hash(recipe)
    return same and not differs(entry["settings"], recipe.essence())


def _current(entry: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """An arm's stored runs, without those that are out of date."""
    runs = entry["runs"].items()
    return {seed: one for seed, one in runs if not is_outdated(recipe, one.get("arithmetic", 1))}


@dataclass(frozen=True)
class Elsewhere:
    """What other studies have stored of a study's seeds, by recipe and seed."""

    runs: Mapping[tuple[str, int], tuple[str, Mapping[str, Any]]]
    """The study, and its arm."""

    @classmethod
    def stored(cls, study: Study, folder: Path) -> Elsewhere:
        """Nothing if this one needs more than is usually kept."""
        paths = [] if study.figures else [p for p in sorted(folder.glob("*/*.json")) if p.parent.name != study.name]
        return cls(
            {
                (entry["recipe"], int(seed)): (path.parent.name, entry)
                for path in paths
                for entry in _read(path).values()
                for seed, one in entry["runs"].items()
                if int(seed) < study.seeds and "failed" not in one
            }
        )

    def find(self, recipe: Recipe, seeds: Iterable[int]) -> dict[int, tuple[str, Mapping[str, Any]]]:
        """Which study has this run, and the run, seed by seed."""
        digest = recipe_hash(recipe)
        known = {seed: self.runs[digest, seed] for seed in seeds if (digest, seed) in self.runs}
        return {
            seed: (study, entry["runs"][str(seed)])
            for seed, (study, entry) in known.items()
            if belongs(entry, recipe) and str(seed) in _current(entry, recipe)
        }


def _describe(run: Run, study: Study, failure: str | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"made": machine(run), "arithmetic": run.about.arithmetic}
    entry["data"] = run.about.data.source or ""
    if failure is not None:
        entry["failed"] = failure
    entry["weights_sha256"] = run.summary()["weights_sha256"]
    entry["series"] = {
        name: ["inf" if value == math.inf else value for value in values]
        for name, values in series_of(run, list(study.figures)).items()
    }
    return entry


def _numbers(series: Mapping[str, list[Any]]) -> dict[str, list[float | None]]:
    return {name: [math.inf if value == "inf" else value for value in values] for name, values in series.items()}


def _as_text(content: dict[str, Any]) -> str:
    """JSON with a line for each series and for the settings: small, and differences can be read."""

    def write(value: Any, depth: int) -> str:
        if not isinstance(value, dict) or not value:
            return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        inner = (
            f"{' ' * (depth + 1)}{json.dumps(key)}: "
            + (json.dumps(item, ensure_ascii=False) if key in ("settings", "made") else write(item, depth + 1))
            for key, item in value.items()
        )
        return "{\n" + ",\n".join(inner) + "\n" + " " * depth + "}"

    return write(content, 0) + "\n"


def _read(path: Path) -> dict[str, Any]:
    """The arms in a file."""
    found = path.stat()
    return _read_once(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=256)
def _read_once(path: Path, *_: int) -> dict[str, Any]:
    """A file that is as it was is not read again: a page of all studies looks into each of them many times."""
    content = Folder(path.parent).read_versioned(path.name, (FORMAT,))
    arms = content.get("arms")
    if not isinstance(arms, dict):
        raise RunDirectoryError(f"{path} is damaged: it has no arms")
    return arms


# --- as numbers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """What is known of a study: cell → arm → seed → series."""

    study: Study
    runs: dict[str, dict[str, dict[int, Series]]]
    notes: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    """Where the data came from; some copies of a data set are not the original pixels."""
    failed: frozenset[tuple[str, str, int]] = frozenset()
    """Cell, arm and seed of the runs whose weights became no numbers."""
    made: Mapping[tuple[str, str, int], Mapping[str, str]] = field(default_factory=dict)
    """What each run was made with."""

    @classmethod
    def stored(cls, study: Study, folder: Path) -> Results:
        """What is in the folder, as far as it belongs to the study as it is now."""
        runs: dict[str, dict[str, dict[int, Series]]] = {}
        notes, sources, failed, made = [], set(), set(), {}
        others = Elsewhere.stored(study, folder)
        for cell in study.cells:
            path = folder / study.name / f"{cell.name}.json"
            arms = _read(path) if path.exists() else {}
            runs[cell.name] = {}
            unknown = [arm for arm in arms if arm not in study.arms]
            notes += [f"{cell.name}, {arm}: stored, but no arm of the study, left out" for arm in unknown]
            twins = study.twins(cell)
            notes += [f"{cell.name}, {arm}: the same runs as {other}" for arm, other in twins.items() if other in arms]
            for arm in study.arms:
                recipe, known = study.recipe_of(cell, arm, 0), arms.get(twins.get(arm, arm))
                found: dict[str, Any] = {}
                if known is not None and belongs(known, recipe):
                    found = _current(known, recipe)
                    older = len(known["runs"]) - len(found)
                    if older:
                        notes.append(f"{cell.name}, {arm}: {older} stored with an older arithmetic, left out")
                elif known is not None:
                    notes.append(f"{cell.name}, {arm}: stored under another recipe, left out")
                lent = others.find(recipe, (seed for seed in range(study.seeds) if str(seed) not in found))
                found = found | {str(seed): run for seed, (_, run) in lent.items()}
                lenders = sorted({lender for lender, _ in lent.values()})
                notes += [f"{cell.name}, {arm}: runs of {lender}, which are the same" for lender in lenders]
                for seed, one in found.items():
                    runs[cell.name].setdefault(arm, {})[int(seed)] = _numbers(one["series"])
                    made[cell.name, arm, int(seed)] = one["made"]
                    sources.add(f"{recipe.task.dataset}: {one['data']}")
                    if "failed" in one:
                        failed.add((cell.name, arm, int(seed)))
                        reason = f"stopped, {one['failed']}; what it had not reached, it missed"
                        notes.append(f"{cell.name}, {arm}, seed {seed}: {reason}")
            notes += _mixed(cell.name, made)
        return cls(study, runs, notes, sorted(sources), frozenset(failed), made)

    def seeds(self, cell: str, *arms: str) -> list[int]:
        """The seeds that all of these arms have in a cell."""
        found = [set(self.runs.get(cell, {}).get(arm, {})) for arm in arms]
        return sorted(set.intersection(*found)) if found else []

    def values(self, name: str, cell: str, arm: str, seeds: list[int]) -> list[float]:
        """A measure of an arm, seed by seed."""
        what = self.study.measures[name]
        cell_of = next(c for c in self.study.cells if c.name == cell)
        target = self.study.recipe_of(cell_of, arm, 0).evaluation.target
        return [
            measure(
                what,
                self.runs[cell][arm][seed],
                target,
                self._budget(cell, seed) if what.kind == "at_equal_upload" else math.inf,
                (cell, arm, seed) in self.failed,
            )
            for seed in seeds
        ]

    def ends(self, name: str, cell: str, arm: str, seeds: list[int]) -> list[float]:
        """How far each run went, in what a measure of the way to a target counts; one that failed never gets there."""
        kind = self.study.measures[name].kind
        runs = self.runs[cell][arm] if seeds else {}

        def end(seed: int) -> float:
            if kind not in ("rounds_to", "upload_to") or (cell, arm, seed) in self.failed:
                return math.inf
            totals = cumulative_upload(runs[seed])
            return len(totals) if kind == "rounds_to" else totals[-1]

        return [end(seed) for seed in seeds]

    def _budget(self, cell: str, seed: int) -> float:
        """The upload that every arm had with this seed: the smallest of their totals."""
        totals = [
            cumulative_upload(runs[seed])[-1]
            for arm, runs in self.runs[cell].items()
            if seed in runs and (cell, arm, seed) not in self.failed
        ]
        return min(totals, default=math.inf)

    def all_seeds(self) -> list[int]:
        """How many seeds each arm has in each cell, of all that there should be."""
        return [len(self.runs.get(cell.name, {}).get(arm, {})) for cell in self.study.cells for arm in self.study.arms]


def _mixed(cell: str, made: Mapping[tuple[str, str, int], Mapping[str, str]]) -> list[str]:
    """Of which seeds the arms are compared although they were not run on the same machine."""
    first: dict[int, Mapping[str, str]] = {}
    here = [(seed, one) for (of, _, seed), one in made.items() if of == cell]
    seeds = sorted({seed for seed, one in here if not same_machine(first.setdefault(seed, one), one)})
    if not seeds:
        return []
    which = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    return [f"{cell}, {which}: arms were run on different processors, so that a small difference may be rounding"]


def made_on(studies: list[Study], folder: Path) -> list[str]:
    """With which versions and on which processors stored results were made."""
    found = set()
    for study in studies:
        for path in sorted((folder / study.name).glob("*.json")):
            for arm in _read(path).values():
                for one in arm["runs"].values():
                    made = one["made"]
                    found.add(
                        f"fedstrata {made['fedstrata']}, torch {made['torch']}, {made['processor']} ({made['cpu']})"
                    )
    return sorted(found)
