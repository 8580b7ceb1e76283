"""A study's pictures, drawn from stored results: what the papers show, with intervals over seeds, and every layer.

What is on a picture is worked out first, as plain numbers and words, and drawn afterwards. The digest of the former is
kept in the PNG file: it tells whether a picture is still that of the stored results. Only drawing needs matplotlib.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedstrata.compare import ENOUGH_SEEDS, Estimate, estimate
from fedstrata.errors import MissingExtra, RunDirectoryError
from fedstrata.reproductions.measures import Series, cumulative_upload, read
from fedstrata.reproductions.report import unit_of
from fedstrata.reproductions.results import Results
from fedstrata.reproductions.study import Plot, Study, StudyCell
from fedstrata.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# --- what is drawn ---------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Picture:
    """Panels under one title, so many in a row; `ticks` name clients."""

    kind: Literal["curves", "clients", "dots"]
    name: str
    title: str
    arms: list[str]
    panels: list[Panel]
    columns: int
    ticks: list[str] = field(default_factory=list)

    def digest(self) -> str:
        """What tells one picture from another."""
        text = json.dumps(asdict(self), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_DIGEST = "Source"
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


def pictures(results: Results) -> list[Picture]:
    """Every plot of the study of which something is stored."""
    stored = {cell for cell, arms in results.runs.items() if arms}
    return [
        _picture(results, plot)
        for plot in results.study.plots
        if not plot.layers and stored & {*(plot.cells or stored)}
    ]


def _picture(results: Results, plot: Plot) -> Picture:
    study = results.study
    chosen = plot.cells or [cell.name for cell in study.cells]
    cells = [cell for cell in study.cells if cell.name in chosen and results.runs.get(cell.name)]
    titles = _titles(results, cells)
    columns = _columns(len(cells))
    kind: Literal["curves", "clients", "dots"] = "curves"
    if plot.measure is not None:
        kind, panels = "dots", [_dots_panel(results, cell, titles[cell.name], plot.measure) for cell in cells]
    elif plot.rounds:
        kind, columns = "clients", len(study.arms)
        panels = [
            _clients_panel(runs, ", ".join(filter(None, [titles[cell.name], arm])), plot)
            for cell in cells
            for arm, runs in results.runs[cell.name].items()
        ]
    else:
        panels = [_curves_panel(results, cell, titles[cell.name], name, plot) for name in plot.names for cell in cells]
        if len(plot.names) > 1:  # a row for each series
            columns = len(cells) if len(cells) > 1 else _columns(len(plot.names))
    what = f"{study.name} ({study.paper}, {study.shows})" + (f", {cells[0].title}" if len(cells) == 1 else "")
    seeds = _about_seeds(kind, _counts(results, cells), [curve for panel in panels for curve in panel.curves])
    return Picture(
        kind, plot.name, f"{study.title}\n{what}: {seeds}", list(study.arms), panels, columns, list(plot.clients)
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
        y_label,
        [curve for curve in curves if curve.seeds],  # a run may have failed before its first evaluation
        references=list(_references(results.study, cell, name, plot.against)),
        log_x=plot.against in plot.logarithmic,
        log_y=name in plot.logarithmic,
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
        target = what.target or study.experiment(cell, next(iter(study.arms)), 0).evaluation.target
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


def _dots_panel(results: Results, cell: StudyCell, title: str, measure: str) -> Panel:
    what = results.study.measures[measure]
    unit = "MB" if what.kind == "upload_to" else unit_of(what)
    factor = {"%": 100.0, "°": 180 / math.pi, "MB": 1e-6}.get(unit, 1.0)
    reported = {arm: factor * value for arm, value in cell.reported.get(measure, {}).items()}
    dots = []
    for arm in results.runs[cell.name]:
        found = results.values(measure, cell.name, arm, results.seeds(cell.name, arm))
        values = [factor * value for value in found if not math.isnan(value)]
        if values:
            dots.append(Dots(arm, values, reported.get(arm)))
    label = f"{what.title} ({unit})" if unit else what.title
    limit = results.study.rounds(cell) if what.kind == "rounds_to" else 0
    return Panel(title, label, "", dots=dots, limit=float(limit))


# --- style -----------------------------------------------------------------------------------------------------------

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "savefig.dpi": 110,
    "pdf.fonttype": 42,  # text stays text
    "svg.hashsalt": "fedstrata",  # the same picture is the same file
}

PALETTE: list[tuple[str, Any, str]] = [  # colour (after Okabe and Ito), dashes, marker: each tells arms apart alone
    ("#000000", "-", "o"),
    ("#0072B2", (0, (5, 1.5)), "s"),
    ("#D55E00", (0, (7, 1.5, 1.5, 1.5)), "^"),
    ("#009E73", (0, (2, 1)), "D"),
    ("#CC79A7", (0, (9, 2)), "v"),
    ("#E69F00", (0, (4, 1, 1, 1, 1, 1)), "P"),
    ("#56B4E9", (0, (1, 1)), "X"),
    ("#777777", (0, (3, 1.2, 1, 1.2)), "*"),
]

_OWN = ["fedavg", "fedadp", "fedlayerwise", "fedldf", "fedlap", "adaptive_mu", "random_layers", "hdfl"]
"""Whose style is whose, in every study; other arms take what is left."""

_GREY = "#555555"
_NOTHING = "#d8d8d8"


def styles(arms: Sequence[str]) -> dict[str, tuple[str, Any, str]]:
    """A colour, dashes and a marker for each arm; more arms than there are begin again."""
    found = {arm: PALETTE[_OWN.index(arm)] for arm in arms if arm in _OWN}
    left = [style for style in PALETTE if style not in found.values()] or PALETTE
    others = [arm for arm in arms if arm not in found]
    return found | {arm: left[at % len(left)] for at, arm in enumerate(others)}


# --- drawing ---------------------------------------------------------------------------------------------------------


def _library() -> Any:
    try:
        import matplotlib.figure
        import matplotlib.ticker
    except ImportError as error:
        raise MissingExtra("matplotlib", "figures", "drawing figures") from error
    return matplotlib


def draw(picture: Picture) -> Figure:
    """A picture on paper."""
    with _library().rc_context(STYLE):
        columns = picture.columns
        rows = math.ceil(len(picture.panels) / columns)
        width, height = _panel_size(picture)
        figure = _figure(picture.title, max(5.5, width * columns), height * rows + 1.1)
        axes = figure.subplots(rows, columns, sharex=True, sharey=_shared(picture), squeeze=False)
        for at, ax in enumerate(axes.flat):
            if at >= len(picture.panels):
                ax.remove()
                continue
            panel = picture.panels[at]
            {"curves": _draw_curves, "clients": _draw_clients, "dots": _draw_dots}[picture.kind](ax, panel, picture)
            ax.set_title(textwrap.fill(panel.title, 40))
            if at % columns == 0 or panel.y_label != picture.panels[at - 1].y_label:
                ax.set_ylabel(panel.y_label)
            if at + columns >= len(picture.panels):  # nothing below it
                ax.set_xlabel(panel.x_label)
                ax.tick_params(labelbottom=True)
        _legend(figure)
    return figure


def _shared(picture: Picture) -> Literal["all", "row", "none"]:
    """Which panels have the same ordinate."""
    labels = [panel.y_label for panel in picture.panels]
    rows = [set(labels[at : at + picture.columns]) for at in range(0, len(labels), picture.columns)]
    return "all" if len(set(labels)) == 1 else "row" if max(map(len, rows)) == 1 else "none"


def _panel_size(picture: Picture) -> tuple[float, float]:
    if picture.kind == "dots":
        return 3.2, 0.55 + 0.21 * len(picture.arms)
    if picture.kind == "clients":
        return 4.2, 2.8
    return (3.2, 2.3) if len(picture.panels) > 1 else (6.0, 3.4)


def _figure(title: str, width: float, height: float) -> Figure:
    figure: Figure = _library().figure.Figure(figsize=(width, height), layout="constrained")
    letters = int(width * 16)
    figure.suptitle("\n".join(textwrap.fill(line, letters) for line in title.splitlines()), fontsize=8.5)
    return figure


def _legend(figure: Figure) -> None:
    """One for all panels, below them; each entry once."""
    entries: dict[str, Any] = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if entries:
        columns = min(len(entries), int(figure.get_figwidth() / 1.25))
        figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=columns)


def _draw_curves(ax: Axes, panel: Panel, picture: Picture) -> None:
    look = styles(picture.arms)
    for curve in panel.curves:
        colour, dashes, marker = look[curve.label]
        x, known = curve.over_seeds()
        ends = [estimate.interval for estimate in known if estimate.interval is not None]
        if ends:
            low, high = zip(*ends, strict=True)
            ax.fill_between(x, low, high, facecolor=(colour, 0.15), edgecolor=(colour, 0.4), linewidth=0.4)
        if len(curve.seeds) > 1 and (not ends or curve.ends_apart()):
            for points in curve.seeds.values():
                _, xs, ys = zip(*points, strict=True)
                ax.plot(xs, ys, color=colour, linewidth=0.6, alpha=0.5)
        step = max(1, len(x) // 8)
        first = picture.arms.index(curve.label) * step // len(picture.arms)  # markers of different arms side by side
        line: dict[str, Any] = {"color": colour, "linestyle": dashes, "marker": marker, "markevery": (first, step)}
        ax.plot(x, [estimate.median for estimate in known], **line, label=curve.label)
    if panel.log_x:
        _make_logarithmic(ax, "x")
    if panel.log_y:
        _make_logarithmic(ax, "y")
    for reference in panel.references:
        colour, _, marker = look[reference.arm] if reference.arm else (_GREY, "-", "o")
        if reference.x is None:
            ax.axhline(reference.y, color=colour, linewidth=0.9, linestyle=(0, (1, 2)))
            _note(ax, reference.text, reference.y, left=reference.arm is not None)
        else:
            hollow: dict[str, Any] = {
                "markerfacecolor": "white",
                "markeredgecolor": colour,
                "markeredgewidth": 1.5,
                "markersize": 7.5,
            }
            ax.plot([reference.x], [reference.y], marker, **hollow, zorder=4, label=reference.text)


def _make_logarithmic(ax: Axes, which: Literal["x", "y"]) -> None:
    """With 1, 2 and 5 of every power of ten written out."""
    ticker = _library().ticker
    ax.set(**{f"{which}scale": "log"})
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(ticker.NullLocator())


def _note(ax: Axes, text: str, y: float, left: bool = False) -> None:
    """A word above an end of a horizontal line."""
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5}
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "xytext": (0, 2), "textcoords": "offset points"}
    x, align = (0.01, "left") if left else (1.0, "right")
    ax.annotate(text, (x, y), ha=align, va="bottom", fontsize=6.5, color="#333333", bbox=box, **place)


def _draw_clients(ax: Axes, panel: Panel, picture: Picture) -> None:
    """Clients side by side, coloured by what they hold; the last of the rounds is filled."""
    groups = list(dict.fromkeys(picture.ticks))
    for at, curve in enumerate(panel.curves):
        last, marker = at == len(panel.curves) - 1, "*phDd"[at % 5]
        for client, known in zip(*curve.over_seeds(), strict=True):
            group = groups.index(picture.ticks[int(client)]) if picture.ticks else 0
            colour = PALETTE[group % len(PALETTE)][0]
            place = client + 0.3 * (at - (len(panel.curves) - 1) / 2)
            if known.interval is not None:
                ax.plot([place, place], known.interval, color=colour, linewidth=1.1)
            else:
                ax.plot([place] * len(known.values), known.values, "_", color=colour, alpha=0.6)
            fill = colour if last else "white"
            ax.plot([place], [known.median], marker, color=colour, markersize=8, markerfacecolor=fill, zorder=3)
        fill = _GREY if last else "white"
        ax.plot([], [], marker, color=_GREY, markersize=8, markerfacecolor=fill, label=curve.label)  # for the legend
    ax.axhline(90, color=_GREY, linewidth=0.9, linestyle=(0, (1, 2)))
    _note(ax, "orthogonal", 90)
    if picture.ticks:
        ax.set_xticks(range(len(picture.ticks)), picture.ticks, rotation=45, ha="right", rotation_mode="anchor")


def _draw_dots(ax: Axes, panel: Panel, picture: Picture) -> None:
    look, edge = styles(picture.arms), _edge(picture)
    not_reached = False
    for dots in panel.dots:
        colour, _, marker = look[dots.label]
        row = picture.arms.index(dots.label)
        values = [min(value, edge) for value in dots.values]
        known = estimate(dots.values)
        if known.interval is not None:
            ax.plot([min(end, edge) for end in known.interval], [row, row], color=colour, linewidth=1.6)
            ax.plot(values, [row] * len(values), "|", color=colour, markersize=6, alpha=0.6)
            ax.plot(min(known.median, edge), row, marker, color=colour, markersize=5.5)
        else:
            beside = [row + 0.14 * (at - (len(values) - 1) / 2) for at in range(len(values))]  # equal ones stay apart
            ax.plot(values, beside, marker, color=colour, markersize=5, markerfacecolor="none")
        if dots.reported is not None:
            ax.plot(
                min(dots.reported, edge),
                row,
                "x",
                color="black",
                markersize=6.5,
                markeredgewidth=1.5,
                label="paper",
                zorder=4,
            )
        not_reached |= any(math.isinf(value) for value in (*dots.values, dots.reported or 0.0))
    if not_reached:
        ax.axvline(edge, color=_GREY, linewidth=0.9, linestyle=(0, (1, 2)))
        ax.text(edge, -0.62, "not reached", ha="right", va="center", fontsize=6.5, color="#333333")
    ax.set_yticks(range(len(picture.arms)), picture.arms)
    ax.set_ylim(len(picture.arms) - 0.4, -0.9)


def _edge(picture: Picture) -> float:
    """Where values that are larger than any number are drawn: right of all that could have been observed."""
    values = [v for panel in picture.panels for dots in panel.dots for v in (*dots.values, dots.reported or 0.0)]
    return 1.06 * max(value for value in (*values, *(panel.limit for panel in picture.panels)) if math.isfinite(value))


# --- every layer -----------------------------------------------------------------------------------------------------

QUANTITIES = {
    "angle": ("angle to the\nmean update (°)", 180 / math.pi),
    "weight": ("share in the\naverage (%)", 100.0),
    "divergence": ("divergence\n‖Δ‖", 1.0),
    "mu": ("μ", 1.0),
}
"""Of a run's figures per client and layer, those that are drawn: how they are labelled and multiplied."""

_MOST_CLIENTS = 60  # that have a row each
_MOST_NAMED = 20


@dataclass(frozen=True)
class LayerMaps:
    """A run's figures as layers × rows × rounds; NaN where there is nothing. A row is a client, or a rank from 1."""

    title: str
    layers: list[str]
    ranked: bool
    ticks: list[str]
    maps: dict[str, np.ndarray]


def layer_maps(run: Run, title: str) -> LayerMaps:
    """Every round's figures of a run; what is the same everywhere is left out.

    Of very many clients, most of which are in no given round, each round's are put in the order of their values.
    """
    try:
        return _layer_maps(run, title, [run.figures(line["round"]) for line in run.history()])
    except (LookupError, TypeError, ValueError) as error:  # a file that was tampered with
        raise RunDirectoryError(f"{run.path}: damaged; {type(error).__name__}: {error}") from None


def _layer_maps(run: Run, title: str, records: list[dict[str, np.ndarray]]) -> LayerMaps:
    clients = int(run.directory.info["clients"])
    ranked = clients > _MOST_CLIENTS
    rows = max(len(record["clients"]) for record in records) if ranked else clients
    maps = {}
    for name, (_, factor) in QUANTITIES.items():
        values = np.full((len(run.layer_names), rows, len(records)), np.nan)
        for at, record in enumerate(records):
            found = factor * record[name]
            if found.shape != (len(record["clients"]), len(run.layer_names)):
                raise ValueError(f"{name} of round {at + 1} has the shape {list(found.shape)}")
            if ranked:
                values[:, : len(found), at] = -np.sort(-found, axis=0).T
            else:
                values[:, record["clients"], at] = found.T
        finite = values[np.isfinite(values)]
        if finite.size and np.ptp(finite) > 1e-9 * np.abs(finite).max():
            maps[name] = values
    table = run.directory.info["data"].get("table")
    held = [sum(count > 0 for count in counts) for counts in table] if table and clients <= _MOST_NAMED else []
    return LayerMaps(title, run.layer_names, ranked, [f"{client} ({n})" for client, n in enumerate(held)], maps)


def draw_layers(maps: LayerMaps) -> Figure:
    """Heat maps, rounds × clients: a row for each quantity, a column for each layer, one scale in a row."""
    library = _library()
    with library.rc_context({**STYLE, "axes.grid": False}):
        rows, columns = len(maps.maps), len(maps.layers)
        height = min(2.2, 0.6 + 0.13 * next(iter(maps.maps.values())).shape[1])
        figure = _figure(maps.title, 1.3 + columns * max(1.2, 2.8 - 0.2 * columns), height * rows + 0.9)
        axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        first = 1 if maps.ranked else 0
        colours = library.colormaps["cividis"].with_extremes(bad=_NOTHING)
        for row, (name, values) in zip(axes, maps.maps.items(), strict=True):
            scale = _scale(values, linear=name == "angle")
            for layer, ax in enumerate(row):
                image = ax.imshow(
                    values[layer],
                    aspect="auto",
                    interpolation="nearest",
                    cmap=colours,
                    norm=scale,
                    extent=(0.5, values.shape[2] + 0.5, first + values.shape[1] - 0.5, first - 0.5),
                )
            row[0].set_ylabel(
                "the round's clients,\nlargest first" if maps.ranked else "client (classes)" if maps.ticks else "client"
            )
            row[0].yaxis.set_major_locator(library.ticker.MaxNLocator(integer=True))
            if maps.ticks:
                row[0].set_yticks(range(len(maps.ticks)), maps.ticks, fontsize=6.5)
            ticks = library.ticker.LogLocator(subs=(1, 2, 5)) if isinstance(scale, library.colors.LogNorm) else None
            bar = figure.colorbar(image, ax=list(row), label=QUANTITIES[name][0], pad=0.01, format="{x:g}", ticks=ticks)
            bar.minorticks_off()
        for title, ax in zip(maps.layers, axes[0], strict=True):
            ax.set_title(title)
        for ax in axes[-1]:
            ax.set_xlabel("communication round")
    return figure


def _scale(values: np.ndarray, linear: bool) -> Any:
    """Logarithmic where values span more than a power of ten and are no angles."""
    colors = _library().colors
    finite = values[np.isfinite(values)]
    low, high = float(finite.min()), float(finite.max())
    return (colors.Normalize if linear or low <= 0 or high <= 10 * low else colors.LogNorm)(low, high)


# --- files -----------------------------------------------------------------------------------------------------------


def write_all(results: Results, folder: Path, runs: Path, every_layer: bool = False) -> list[Path]:
    """Draw a study into `folder`: its plots, and those of layers whose run directories are below `runs`.

    `every_layer` draws the layers of all arms, not only of those that the study chose.
    """
    study, written = results.study, []
    for picture in pictures(results):
        written.append(_write(draw(picture), folder / study.name / picture.name, picture.digest()))
    chosen = {(plot.layers.cell, plot.layers.arm): plot.name for plot in study.plots if plot.layers}
    for cell in study.cells:
        for arm in study.arms:
            stem = chosen.get((cell.name, arm)) or (f"layers-{cell.name}-{arm}" if every_layer else None)
            run = _recorded(runs / cell.name / arm) if stem else None
            if stem and run:
                where = f"{study.name} ({study.paper}, {study.shows}), {cell.title}"
                title = f"{arm}: every layer over rounds and clients\n{where}: seed {run.experiment.seed}"
                written.append(_write(draw_layers(layer_maps(run, title)), folder / study.name / stem, colours=256))
    return written


def _recorded(folder: Path) -> Run | None:
    """The first seed's run whose figures per layer were kept from its first round to its last."""
    for path in sorted(folder.glob("seed-*"), key=lambda path: int(path.name.removeprefix("seed-"))):
        if (path / "run.json").exists() and (path / "layers" / "000001.safetensors").exists():
            return Run(path)
    return None


def _write(figure: Figure, path: Path, digest: str = "", colours: int = 64) -> Path:
    """As PNG, SVG and PDF; the PNG's path."""
    from PIL import Image, PngImagePlugin

    path.parent.mkdir(parents=True, exist_ok=True)
    with _library().rc_context(STYLE):
        figure.savefig(f"{path}.svg", metadata={"Date": None})  # without a date, the same picture is the same file
        figure.savefig(f"{path}.pdf", metadata={"CreationDate": None})
        pixels = io.BytesIO()
        figure.savefig(pixels, format="png")
    told = PngImagePlugin.PngInfo()
    told.add_text(_DIGEST, digest)
    # A palette is enough for lines and text, and a third of the size.
    Image.open(pixels).convert("RGB").quantize(colours).save(f"{path}.png", optimize=True, pnginfo=told)
    return path.with_name(f"{path.name}.png")


def digest_in(path: Path) -> str | None:
    """The digest of what a PNG file of ours shows; heat maps of layers have none."""
    from PIL import Image

    with Image.open(path) as image:
        return image.info.get(_DIGEST)
