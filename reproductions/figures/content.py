"""What is on a study's pictures, worked out from stored results as plain numbers and words."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import numpy as np

from fedstrata.runs.statistics import ENOUGH_SEEDS, Estimate, estimate
from reproductions.measures import Series, cumulative_upload, read
from reproductions.results import Results
from reproductions.study import Plot, Study, StudyCell


@dataclass(frozen=True)
class Curve:
    """Something measured over rounds (or over clients): each seed's points as (position, x, y)."""

    label: str
    seeds: dict[int, list[tuple[int, float, float]]]

    def over_seeds(self) -> tuple[list[float], list[Estimate]]:
        """x, and the estimate of y over seeds, at each position that all seeds have."""
        by_seed = [{position: (x, y) for position, x, y in points} for points in self.seeds.values()]
        common = sorted(set.intersection(*map(set, by_seed)))
        x = [float(np.median([points[position][0] for points in by_seed])) for position in common]
        return x, [estimate([points[position][1] for points in by_seed]) for position in common]

    def ends_apart(self) -> bool:
        """Whether some seeds go on longer than others, as they do where runs stop at their target."""
        return len({points[-1][0] for points in self.seeds.values()}) > 1


@dataclass(frozen=True)
class Dots:
    """A measure of one arm: each seed's value, infinite where a target was not reached, and what the paper reports."""

    label: str
    values: list[float]
    reported: float | None


@dataclass(frozen=True)
class Reference:
    """A line (or a point, where there is an x) to compare with: a target, or an arm's value in the paper."""

    text: str
    y: float
    x: float | None = None
    arm: str | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    curves: list[Curve] = field(default_factory=list)
    dots: list[Dots] = field(default_factory=list)
    references: list[Reference] = field(default_factory=list)
    limit: float = 0.0
    """Of dots: values beyond it were not observed."""
    log_x: bool = False
    log_y: bool = False
    log_below: float | None = None
    """Of a logarithmic ordinate: the most there is, the distance from which is what is logarithmic."""


@dataclass(frozen=True)
class Picture:
    """Panels under one title, so many in a row; `ticks` name clients."""

    kind: Literal["curves", "clients", "dots"]
    name: str
    title: str
    arms: list[str]
    panels: list[Panel]
    columns: int
    styled: list[str]
    """All arms of the study: one looks the same in each of its pictures, whatever else is on it."""
    ticks: list[str] = field(default_factory=list)

    @property
    def compares(self) -> bool:
        """Whether there is as yet something to compare with, where arms are to be compared."""
        labels = {curve.label for panel in self.panels for curve in panel.curves}
        labels |= {dots.label for panel in self.panels for dots in panel.dots}
        return self.kind == "clients" or len(self.arms) == 1 or len(labels) > 1

    def digest(self) -> str:
        """What tells one picture from another."""
        text = json.dumps(asdict(self), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_MOST_COLUMNS = 3

_AXES = {
    "accuracy": ("accuracy (%)", 100.0),
    "error": ("error (%)", 100.0),
    "loss": ("loss (cross-entropy)", 1.0),
    "round": ("communication round", 1.0),
    "upload": ("uploaded so far, all clients (MB)", 1e-6),
    "gradient_divergence": ("divergence of gradients\nmean of ‖∇F − ∇F$_k$‖", 1.0),
    "angle": ("smoothed angle to the mean update (°)", 180 / math.pi),
}
"""How an axis is labelled, and what a stored value is multiplied by."""

_MOST = {"accuracy": 100.0}
"""On the same axis, the most that can be reached; what matters of such a quantity is how much is missing."""


def pictures(results: Results) -> list[Picture]:
    """Every plot of the study of which something is stored."""
    found = [_picture(results, plot) for plot in results.study.plots if not plot.layers]
    return [picture for picture in found if picture is not None]


def _picture(results: Results, plot: Plot) -> Picture | None:
    study = results.study
    arms = [arm for arm in study.arms if plot.arms is None or arm in plot.arms]
    runs = {cell: {arm: seeds for arm, seeds in of.items() if arm in arms} for cell, of in results.runs.items()}
    shown = replace(results, runs=runs)
    cells = [cell for cell in study.cells if cell.name in (plot.cells or runs) and runs.get(cell.name)]
    if not cells:
        return None
    titles = _titles(shown, cells)
    columns = _columns(len(cells))
    kind: Literal["curves", "clients", "dots"] = "curves"
    if plot.measure is not None:
        kind = "dots"
        panels = [_dots_panel(results, cell, titles[cell.name], plot.measure, runs[cell.name]) for cell in cells]
    elif plot.rounds:
        kind, columns = "clients", len(arms)
        panels = [
            _clients_panel(seeds, ", ".join(filter(None, [titles[cell.name], arm])), plot)
            for cell in cells
            for arm, seeds in runs[cell.name].items()
        ]
    else:
        panels = [_curves_panel(shown, cell, titles[cell.name], name, plot) for name in plot.names for cell in cells]
        if len(plot.names) > 1:  # a row for each series
            columns = len(cells) if len(cells) > 1 else _columns(len(plot.names))
    what = f"{study.name} ({study.paper}, {study.shows})" + (f", {cells[0].title}" if len(cells) == 1 else "")
    seeds = _about_seeds(kind, _counts(shown, cells), [curve for panel in panels for curve in panel.curves])
    return Picture(
        kind, plot.name, f"{study.title}\n{what}: {seeds}", arms, panels, columns, [*study.arms], [*plot.clients]
    )


def _columns(panels: int) -> int:
    return 2 if panels == 4 else min(_MOST_COLUMNS, panels)


def _titles(results: Results, cells: Sequence[StudyCell]) -> dict[str, str]:
    """Of the cells' panels, with the number of seeds where it is not the same everywhere; one alone needs none."""
    if len(cells) == 1:
        return {cells[0].name: ""}
    if len(set(_counts(results, cells))) == 1:
        return {cell.name: cell.title for cell in cells}
    return {cell.name: f"{cell.title}; {_range(_counts(results, [cell]))}" for cell in cells}


def _counts(results: Results, cells: Iterable[StudyCell]) -> list[int]:
    return [len(runs) for cell in cells for runs in results.runs[cell.name].values()]


def _range(counts: Sequence[int]) -> str:
    fewest, most = min(counts), max(counts)
    return f"{most} seed{'s' * (most > 1)}" if fewest == most else f"{fewest} to {most} seeds"


def _about_seeds(kind: str, counts: Sequence[int], curves: Sequence[Curve]) -> str:
    """How many there are and how they are shown."""
    if max(counts) == 1:
        return "1 seed"
    text = f"medians of {_range(counts)}"
    if kind == "dots":
        text = f"every one of {_range(counts)}"
    if max(counts) >= ENOUGH_SEEDS:
        text += " with 95 % bootstrap intervals"
        text += " of the median" if kind == "dots" else ""
    if kind != "dots" and (min(counts) < ENOUGH_SEEDS or any(curve.ends_apart() for curve in curves)):
        text += "; thin: every seed"
    return text


def _axis(name: str) -> tuple[str, float]:
    place, _, quantity = name.rpartition(".")
    label, factor = _AXES.get(quantity, (name, 1.0))
    return f"{'training' if place == 'train' else place} {label}".strip(), factor


def _curves_panel(results: Results, cell: StudyCell, title: str, name: str, plot: Plot) -> Panel:
    (x_label, x_factor), (y_label, y_factor) = _axis(plot.against), _axis(name)
    log_below = _MOST.get(name.rpartition(".")[2]) if name in plot.logarithmic else None

    def points(series: Series) -> list[tuple[int, float, float]]:
        x = _abscissa(series, plot.against)
        return [(round, x_factor * x[round], y_factor * value) for round, value in read(series, name) if round in x]

    curves = [
        Curve(arm, {seed: found for seed, series in seeds.items() if (found := points(series))})
        for arm, seeds in results.runs[cell.name].items()
    ]
    return Panel(
        title,
        x_label,
        y_label if log_below is None else f"{y_label},\nwhat is missing: logarithmic",
        [curve for curve in curves if curve.seeds],  # a run may have failed before its first evaluation
        references=[
            reference
            for reference in _references(results.study, cell, name, plot.against)
            if plot.arms is None or reference.arm in (None, *plot.arms)
        ],
        log_x=plot.against in plot.logarithmic,
        log_y=name in plot.logarithmic,
        log_below=log_below,
    )


def _abscissa(series: Series, against: str) -> Mapping[int, float]:
    if against == "round":
        return {round: float(round) for round, _ in read(series, "upload")}
    if against == "upload":
        return dict(enumerate(cumulative_upload(series), start=1))
    return dict(read(series, against))


def _references(study: Study, cell: StudyCell, name: str, against: str) -> Iterator[Reference]:
    """The targets on this series, and what the paper reports of it."""
    label, factor = _axis(name)
    unit = " %" if label.endswith("(%)") else ""
    targets = set()
    for measure, what in study.measures.items():
        if what.names != [name]:
            continue
        reported = {arm: v for arm, v in cell.reported.get(measure, {}).items() if math.isfinite(v)}
        if what.kind in ("final", "best"):
            for arm, value in reported.items():
                yield Reference(f"paper, {arm}: {factor * value:.4g}{unit}", factor * value, arm=arm)
        if what.kind not in ("rounds_to", "upload_to"):
            continue
        target = what.target or study.recipe_of(cell, next(iter(study.arms)), 0).evaluation.target
        if target is not None and target not in targets:
            targets.add(target)
            yield Reference(f"target: {factor * target:g}{unit}", factor * target)
        if target is not None and (what.kind, against) in (("rounds_to", "round"), ("upload_to", "upload")):
            for arm, value in reported.items():
                yield Reference(f"paper, {arm}", factor * target, _axis(against)[1] * value, arm)


def _clients_panel(runs: Mapping[int, Series], title: str, plot: Plot) -> Panel:
    y_label, factor = _axis(plot.names[0])

    def points(series: Series, round: int) -> list[tuple[int, float, float]]:
        clients = sorted(int(key.rpartition(".")[2]) for key in series if key.startswith(f"{plot.names[0]}."))
        values = {client: dict(read(series, f"{plot.names[0]}.{client}")) for client in clients}
        return [(c, float(c), factor * of[round]) for c, of in values.items() if round in of]

    curves = [Curve(f"round {r}", {seed: points(series, r) for seed, series in runs.items()}) for r in plot.rounds]
    return Panel(title, "client, by what it holds" if plot.clients else "client", y_label, curves)


def _dots_panel(results: Results, cell: StudyCell, title: str, measure: str, arms: Iterable[str]) -> Panel:
    what = results.study.measures[measure]
    unit = "MB" if what.kind == "upload_to" else what.unit
    factor = {"%": 100.0, "points": 100.0, "°": 180 / math.pi, "MB": 1e-6}.get(unit, 1.0)
    reported = {arm: factor * value for arm, value in cell.reported.get(measure, {}).items()}
    dots = []
    for arm in arms:
        found = results.values(measure, cell.name, arm, results.seeds(cell.name, arm))
        values = [factor * value for value in found if not math.isnan(value)]
        if values:
            dots.append(Dots(arm, values, reported.get(arm)))
    label = f"{what.title} ({unit})" if unit else what.title
    limit = results.study.rounds(cell) if what.kind == "rounds_to" else 0
    return Panel(title, label, "", dots=dots, limit=float(limit))
