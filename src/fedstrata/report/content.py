"""From run directories to what a report shows, small enough for one page.

Runs that differ in nothing but the seed are one series: one colour, one row of the table, one interval. What the page
holds of every client and layer is bounded; beyond the bound it is summarised over clients, then also thinned over
rounds, and the page says so.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedstrata._version import __version__
from fedstrata.core.errors import FedstrataError, RunDirectoryError
from fedstrata.report.packing import pack, rounded
from fedstrata.runs.comparison import begun_runs
from fedstrata.runs.formats import DataEntry, LayerRecord, Line
from fedstrata.runs.reader import Run
from fedstrata.runs.statistics import ENOUGH_SEEDS, estimate

QUANTITIES = ("angle", "smoothed_angle", "relative", "divergence", "norm", "weight", "mu", "mask")
"""Per client and layer, as in the run directory; `relative` is divergence / norm."""

SUMMARY = ("max", "75 %", "median", "25 %", "min", "mean")
"""What stands for a round's clients when there are too many numbers."""

BUDGET = 1_700_000
"""Characters for the numbers per layer: leaves room below 2 MB for everything else."""

MOST_CLIENTS = 200
"""Rows of the partition's table that a page shows."""

MOST_TROUBLED = 50
"""Clients with lost replies that a page lists."""

_CHARACTERS = 4  # of a packed number
_MOST_TOLD = 2  # settings in the name of a series


@dataclass(frozen=True)
class Source:
    """A run that was read, and what its series is called if it stands alone."""

    run: Run
    name: str
    history: list[Line]
    finished: bool
    summary: Mapping[str, Any]

    @classmethod
    def of(cls, path: Path, name: str | None = None) -> Source:
        """Read a run; its name is that of its algorithm if there is no other."""
        run = Run(path)
        history = run.history()
        return cls(run, name or run.recipe.label, history, run.finished(history), run.summary(history))

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self.run.layer_names)


@dataclass(frozen=True)
class Detail:
    """How much of the numbers per layer fits: clients one by one or summarised, and every how many rounds."""

    summarised: bool
    every: int

    def rounds(self, count: int) -> list[int]:
        """The rounds that are shown; the last one always is."""
        shown = list(range(self.every, count + 1, self.every))
        return shown if not count or shown[-1:] == [count] else [*shown, count]


T = TypeVar("T")


class _Reading:
    """Reads runs one by one. One that was asked for by name must be whole; of others, what is wrong is kept."""

    def __init__(self) -> None:
        self.left_out: list[str] = []
        self.required: set[Path] = set()

    def attempt(self, path: Path, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except (FedstrataError, OSError) as error:
            if path in self.required:
                raise
            self.left_out.append(str(error))
            return None

    def sources(self, path: Path) -> Iterator[Source]:
        """The runs of a directory: itself, a comparison's, or all that it holds, such as those of a study."""
        if (path / "compare.json").exists():
            begun: list[tuple[Path, str | None]] = [(at, algorithm) for algorithm, _, at in begun_runs(path)]
            if not begun:
                raise RunDirectoryError(f"{path}: no run of this comparison has begun yet")
        else:
            inside = [] if (path / "run.json").exists() else [found.parent for found in path.rglob("run.json")]
            begun = [(at, None) for at in sorted(inside, key=_number_by_number)]
        if not begun:
            begun = [(path, None)]
            self.required.add(path)
        for at, name in begun:
            source = self.attempt(at, partial(Source.of, at, name))
            if source is not None:
                yield source


def collect(paths: Sequence[Path]) -> dict[str, Any]:
    """Everything that a report on these run and comparison directories shows, ready to be written as JSON."""
    reading = _Reading()
    found = {source.run.path.resolve(): source for path in paths for source in reading.sources(path)}
    detail = _choose_detail(list(found.values()))
    pages: dict[Path, dict[str, Any]] = {}
    with np.errstate(all="ignore"):  # whatever a file may hold
        for place, source in found.items():
            page = reading.attempt(source.run.path, partial(_run, source, detail))
            if page is not None:
                pages[place] = page
        sources = [found[place] for place in pages]
        if not sources:
            raise RunDirectoryError(reading.left_out[0])
        groups = _group(sources)
        partitions: list[dict[str, Any]] = []
        series = []
        for name, group in zip(_names(groups), groups, strict=True):
            runs = [
                {**pages[one.run.path.resolve()], "partition": _partition(one.run.about.data, partitions)}
                for one in group
            ]
            series.append(_series(name, group, runs))
    return {
        "version": __version__,
        "title": ", ".join(dict.fromkeys(source.run.recipe.name for source in sources)),
        "enoughSeeds": ENOUGH_SEEDS,
        "every": detail.every,
        "summary": list(SUMMARY) if detail.summarised else None,
        "leftOut": reading.left_out,
        "series": series,
        "partitions": partitions,
    }


def _number_by_number(path: Path) -> list[tuple[int, str]]:
    """What sorts seed-10 behind seed-9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def _choose_detail(sources: Sequence[Source]) -> Detail:
    """Everything if it fits into the budget, else a summary over clients of as many rounds as fit."""
    price = _CHARACTERS * len(QUANTITIES)
    one_by_one = sum(price * source.layers * line["clients"] for source in sources for line in source.history)
    summarised = sum(price * source.layers * len(SUMMARY) * len(source.history) for source in sources)
    if one_by_one <= BUDGET:
        return Detail(summarised=False, every=1)
    return Detail(summarised=True, every=max(1, math.ceil(summarised / BUDGET)))


# --- series ----------------------------------------------------------------------------------------------------------


def _group(sources: Sequence[Source]) -> list[list[Source]]:
    """Runs of one experiment with different seeds; the same seed a second time begins another series."""
    groups: dict[tuple[str, str, int], list[Source]] = {}
    seen: Counter[tuple[str, str, int]] = Counter()
    for source in sources:
        model = f"{source.run.about.clients} {source.run.about.layers}"
        key = (json.dumps(source.run.recipe.essence()), model)
        again = seen[*key, source.run.recipe.seed]
        seen[*key, source.run.recipe.seed] += 1
        groups.setdefault((*key, again), []).append(source)
    return list(groups.values())


def _names(groups: Sequence[Sequence[Source]]) -> list[str]:
    """The algorithm, on its recipe if there are several; if not enough, with settings that differ, or the directory."""
    runs = [group[0].run for group in groups]
    tables = [_flat(run.recipe.essence()) for run in runs]
    several = len({run.recipe.name for run in runs}) > 1
    names = [f"{g[0].name} on {r.recipe.name}" if several else g[0].name for g, r in zip(groups, runs, strict=True)]
    for name in [name for name, count in Counter(names).items() if count > 1]:
        same = [at for at, other in enumerate(names) if other == name]
        keys = dict.fromkeys(key for at in same for key in tables[at])
        told_apart = [key for key in keys if len({tables[at].get(key) for at in same}) > 1]
        for at, place in zip(same, _where_they_differ([runs[at].path for at in same]), strict=True):
            if len(told_apart) <= _MOST_TOLD:
                names[at] = ", ".join([name, *(f"{key} = {tables[at].get(key, '–')}" for key in told_apart)])
            else:
                names[at] = f"{name} in {place}"
    taken: Counter[str] = Counter()
    for at, name in enumerate(names):
        taken[name] += 1
        names[at] = f"{name} ({taken[name]})" if taken[name] > 1 else name
    return names


def _where_they_differ(paths: Sequence[Path]) -> list[str]:
    """The parts of paths between what all begin and what all end with: of a/fedavg/0 and a/fedldf/0 the middle."""
    parts = [path.resolve().parts for path in paths]

    def common(rows: Iterable[tuple[str, ...]]) -> int:
        return len(list(takewhile(lambda row: len(set(row)) == 1, rows)))

    first, last = common(zip(*parts, strict=False)), common(zip(*map(reversed, parts), strict=False))
    return ["/".join(of[first : len(of) - last]) or of[-1] for of in parts]


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """With dotted keys."""
    flat: dict[str, str] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: str(value)}
    return flat


def _settings(run: Run) -> dict[str, str]:
    """The recipe as dotted keys, without what changes from seed to seed or changes nothing."""
    flat = _flat(run.recipe.to_table())
    return {key: value for key, value in flat.items() if key not in ("seed", "format", "engine.workers")}


def _series(name: str, group: Sequence[Source], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = group[0].run
    return {
        "name": name,
        "recipe": first.recipe.name,
        "clients": first.about.clients,
        "layers": [{"name": layer.name, "numbers": layer.numbers} for layer in first.about.layers],
        "settings": _settings(first),
        "outcome": _outcome(group),
        "curves": _curves(group),
        "runs": runs,
    }


def _outcome(group: Sequence[Source]) -> dict[str, Any]:
    """The row of the table: of the finished runs, or of all as far as they are if none is finished."""
    begun = [source for source in group if source.history]
    counted = [source for source in begun if source.finished] or begun
    summaries = [source.summary for source in counted]
    run = group[0].run
    metric, target = run.metric, run.recipe.evaluation.target
    columns = {"final": (metric.name, metric.worst), "best": ("best", metric.worst), "upload": ("upload", math.inf)}
    if target is not None:
        columns |= {
            "roundsToTarget": ("rounds_to_target", math.inf),
            "uploadToTarget": ("upload_to_target", math.inf),
        }
    estimates = {
        key: _estimate([_or_worst(summary[name], missing) for summary in summaries])
        for key, (name, missing) in columns.items()
        if summaries
    }
    return {
        "metric": metric.name,
        "target": target,
        "within": min((summary["rounds"] for summary in summaries), default=0),
        "counted": [source.run.recipe.seed for source in counted],
        "seconds": rounded(sum(line["seconds"] for source in counted for line in source.history)),
        **estimates,
    }


def _or_worst(value: float | None, worst: float) -> float:
    """What was not reached, or is not finite, counts as the worst there is instead of being left out."""
    return worst if value is None or math.isnan(value) else value


def _estimate(values: Sequence[float]) -> dict[str, Any]:
    """Median and interval over seeds (compare.estimate); null is what was not reached, or is not finite."""
    result = estimate(values)
    interval = None if result.interval is None else [rounded(end) for end in result.interval]
    return {
        "values": [rounded(value) for value in result.values],
        "median": rounded(result.median),
        "interval": interval,
    }


def _curves(group: Sequence[Source]) -> list[dict[str, Any]]:
    """What was measured over rounds, the deciding metric first: medians over seeds with intervals, or every seed."""
    measured = [_measurements(source) for source in group if source.history]
    labels = dict.fromkeys(label for curves in measured for label in curves)
    curves = []
    for label in labels:
        ours = [curves[label] for curves in measured if label in curves]
        common = sorted(set.intersection(*(set(curve.points) for curve in ours)))
        points = [_estimate([curve.points[round][1] for curve in ours]) for round in common]
        uploads = [np.median([curve.points[round][0] for curve in ours]) for round in common]
        enough = len(ours) >= ENOUGH_SEEDS
        curves.append(
            {
                "label": label,
                "better": ours[0].better,
                "rounds": common,
                "upload": [rounded(float(upload)) for upload in uploads],
                "median": [point["median"] for point in points],
                "low": [point["interval"][0] for point in points] if enough else None,
                "high": [point["interval"][1] for point in points] if enough else None,
                "seeds": [curve.as_json() for curve in ours] if 1 < len(ours) < ENOUGH_SEEDS else [],
            }
        )
    return curves


@dataclass(frozen=True)
class Curve:
    """What a run measured over rounds: upload so far and value, the worst there is where it was not finite."""

    seed: int
    better: str
    points: dict[int, tuple[float, float]]

    def as_json(self) -> dict[str, Any]:
        """For the page."""
        return {
            "seed": self.seed,
            "rounds": list(self.points),
            "upload": [rounded(upload) for upload, _ in self.points.values()],
            "values": [rounded(value) for _, value in self.points.values()],
        }


def _measurements(source: Source) -> dict[str, Curve]:
    run, metric = source.run, source.run.metric
    sets = dict.fromkeys([*run.recipe.evaluation.on, *(name for line in source.history for name in line["metrics"])])
    wanted = [(f"{metric.name} on {name}", name, metric.name, metric.direction) for name in sets]
    wanted += [(f"loss on {name}", name, "loss", "min") for name in sets if metric.name != "loss"]
    curves = {}
    for label, name, quantity, better in [*wanted, ("training loss", "", "train_loss", "min")]:
        worst = -math.inf if better == "max" else math.inf
        points = {}
        for line in source.history:
            values = line["metrics"].get(name, {}) if name else {quantity: line["train_loss"]}
            if quantity in values:
                points[line["round"]] = (float(line["upload_total"]), _or_worst(values[quantity], worst))
        if points:
            curves[label] = Curve(run.recipe.seed, better, points)
    return curves


# --- one run ---------------------------------------------------------------------------------------------------------


def _run(source: Source, detail: Detail) -> dict[str, Any]:
    run, history, data = source.run, source.history, source.run.about.data
    recorded = run.recipe.record.layers
    records = {line["round"]: run.layers(line["round"]) for line in history} if recorded else {}
    return {
        "seed": run.recipe.seed,
        "path": str(run.path),
        "created": run.about.created,
        "data": f"{data.dataset} ({data.source})" if data.source is not None else None,
        "finished": source.finished,
        "rounds": len(history),
        "planned": run.recipe.training.rounds,
        "shown": detail.rounds(len(history)),
        "record": _packed([records[round] for round in detail.rounds(len(history))], detail) if records else None,
        "bytes": _bytes(history, source.layers, detail),
        "trouble": _trouble(history, records),
    }


def _packed(shown: Sequence[LayerRecord], detail: Detail) -> dict[str, Any]:
    """Rounds × clients × layers, or rounds × SUMMARY × layers, of every quantity."""
    rows = _summarised if detail.summarised else np.asarray
    values = {
        name: np.concatenate([rows(_relative(record) if name == "relative" else record[name]) for record in shown])
        for name in QUANTITIES
    }
    if not np.nansum(np.abs(values["mu"])):
        del values["mu"]  # nobody is held back
    packed = {name: pack(block) for name, block in values.items()}
    return {
        "clients": None if detail.summarised else [record["clients"].tolist() for record in shown],
        **{name: block for name, block in packed.items() if block is not None},
    }


def _relative(record: LayerRecord) -> np.ndarray:
    divergence, norm = record["divergence"], record["norm"]
    relative: np.ndarray = np.divide(divergence, norm, out=np.full(norm.shape, np.nan), where=norm > 0)
    return relative


def _summarised(values: np.ndarray) -> np.ndarray:
    """SUMMARY over the clients that have a value."""
    summary = np.full((len(SUMMARY), values.shape[1]), np.nan)
    for layer, column in enumerate(values.T):
        known = column[np.isfinite(column)]
        if len(known):
            summary[:, layer] = [*np.quantile(known, [1.0, 0.75, 0.5, 0.25, 0.0]), known.mean()]
    return summary


def _bytes(history: Sequence[Line], layers: int, detail: Detail) -> dict[str, Any]:
    """What travelled, per layer, up to each shown round since the shown round before it."""
    ends = np.array(detail.rounds(len(history)), dtype=np.int64)

    def sums(values: list[Any], width: int) -> str | float | None:
        table = np.array(values, dtype=np.float64).reshape(len(history), width)
        starts = np.concatenate([[0], ends[:-1]])
        return pack(np.add.reduceat(table, starts, axis=0) if len(ends) else table)

    lines = [line["bytes"] for line in history]
    return {
        "up": sums([line["up"] for line in lines], layers),
        "down": sums([line["down"] for line in lines], layers),
        "feedback": sums([line["feedback"] for line in lines], 1),
        "control": sums([line["control"] for line in lines], 1),
    }


def _trouble(history: Sequence[Line], records: Mapping[int, LayerRecord]) -> dict[str, Any]:
    """Whose replies were lost, why, who could not be evaluated, and who did only a part of the work."""
    sampled: Counter[int] = Counter()
    partial: Counter[int] = Counter()
    full = max((int(record["work"].max(initial=0)) for record in records.values()), default=0)
    for record in records.values():
        sampled.update(record["clients"].tolist())
        partial.update(record["clients"][(record["work"] > 0) & (record["work"] < full)].tolist())
    lost: dict[int, list[tuple[str, str]]] = {}
    for line in history:
        when = f"round {line['round']}"
        for who in line["lost"]:
            lost.setdefault(who["client"], []).append((who["kind"], f"{when}: {who['why']}"))
        for who in line["unmeasured"]:
            lost.setdefault(who["client"], []).append(("not evaluated", f"{when}: not evaluated: {who['why']}"))
    troubled = sorted({*lost, *partial}, key=lambda client: (-len(lost.get(client, ())), -partial[client], client))
    return {
        "asked": sum(line["clients"] for line in history),
        "lost": sum(len(line["lost"]) for line in history),
        "again": sum(line["attempt"] for line in history),
        "troubled": len(troubled),
        "clients": [
            {
                "client": client,
                "sampled": sampled[client] if records else None,
                "partial": partial[client],
                "lost": Counter(kind for kind, _ in lost.get(client, ())),
                "last": lost[client][-1][1][:300] if client in lost else None,
            }
            for client in troubled[:MOST_TROUBLED]
        ],
    }


def _partition(data: DataEntry, partitions: list[dict[str, Any]]) -> int | None:
    """The number of the run's clients × classes table; runs with the same seed share one."""
    if data.table is None:
        return None
    table = np.array(data.table, dtype=np.int64)
    held = (table > 0).sum(1)
    partition = {
        "classes": data.class_names,
        "clients": len(table),
        "counts": table[:MOST_CLIENTS].tolist(),
        "samples": _spread(table.sum(1)),
        "classesHeld": _spread(held),
    }
    if partition not in partitions:
        partitions.append(partition)
    return partitions.index(partition)


def _spread(values: np.ndarray) -> list[float]:
    return [float(values.min()), float(np.median(values)), float(values.max())]
