"""Pictures on paper: curves over rounds, angles of clients, dots of measures."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedstrata.runs.statistics import estimate
from reproductions.figures.content import Panel, Picture
from reproductions.figures.style import GREY, PALETTE, STYLE, library, styles, titled_figure, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(picture: Picture) -> Figure:
    """A picture on paper."""
    with library().rc_context(STYLE):
        columns = picture.columns
        rows = math.ceil(len(picture.panels) / columns)
        width, height = _panel_size(picture)
        figure = titled_figure(picture.title, max(5.5, width * columns), height * rows + 1.1)
        axes = figure.subplots(rows, columns, sharex=True, sharey=_shared(picture), squeeze=False)
        for at, ax in enumerate(axes.flat):
            if at >= len(picture.panels):
                ax.remove()
                continue
            panel = picture.panels[at]
            {"curves": _draw_curves, "clients": _draw_clients, "dots": _draw_dots}[picture.kind](ax, panel, picture)
            ax.set_title(wrapped(panel.title, 40))
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


def _legend(figure: Figure) -> None:
    """One for all panels, below them; each entry once."""
    entries: dict[str, Any] = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if entries:
        widest = 0.65 + 0.075 * max(map(len, entries))  # inches: the line, and a letter each
        columns = max(1, min(len(entries), int(figure.get_figwidth() / widest)))
        figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=columns)


def _draw_curves(ax: Axes, panel: Panel, picture: Picture) -> None:
    look = styles(picture.styled)
    if panel.log_x:
        _make_logarithmic(ax, "x")
    if panel.log_y:
        _make_logarithmic(ax, "y", panel.log_below)
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
    lines = [reference.y for reference in panel.references if reference.x is None and reference.arm is not None]
    lowest = min(lines) if len(lines) > 1 else None
    for reference in panel.references:
        colour, _, marker = look[reference.arm] if reference.arm else (GREY, "-", "o")
        if reference.x is None:
            ax.axhline(reference.y, color=colour, linewidth=0.9, linestyle=(0, (1, 2)))
            ours = reference.arm is not None
            _note(ax, reference.text, reference.y, left=ours, below=ours and reference.y == lowest)
        else:
            hollow: dict[str, Any] = {
                "markerfacecolor": "white",
                "markeredgecolor": colour,
                "markeredgewidth": 1.5,
                "markersize": 7.5,
            }
            ax.plot([reference.x], [reference.y], marker, **hollow, zorder=4, label=reference.text)


def _make_logarithmic(ax: Axes, which: Literal["x", "y"], below: float | None = None) -> None:
    """With 1, 2 and 5 of every power of ten written out, of the distance from `below` where there is one."""
    ticker = library().ticker
    axis = ax.xaxis if which == "x" else ax.yaxis
    if below is None:
        ax.set(**{f"{which}scale": "log"})
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    else:
        scale = library().scale.FuncScale(axis, (partial(_closeness, below), partial(_value_at, below)))
        ax.set(**{f"{which}scale": scale})
        missing = [90.0, *(step * 10.0**power for power in (1, 0, -1) for step in (5, 2, 1))]  # the first: chance
        axis.set_major_locator(ticker.FixedLocator([below - distance for distance in missing]))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(ticker.NullLocator())


def _closeness(most: float, values: Any) -> Any:
    """How many powers of ten are missing to the most there is, downwards; what is closer than 0.01 is drawn there."""
    return -np.log10(np.maximum(most - np.asarray(values), 0.01))


def _value_at(most: float, closeness: Any) -> Any:
    return most - 10.0 ** -np.asarray(closeness)


def _note(ax: Axes, text: str, y: float, left: bool = False, below: bool = False) -> None:
    """A word at an end of a horizontal line, above it, or below where the next line is close."""
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5}
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    x, align = (0.01, "left") if left else (1.0, "right")
    offset, side = ((0, -2), "top") if below else ((0, 2), "bottom")
    ax.annotate(text, (x, y), xytext=offset, ha=align, va=side, fontsize=6.5, color="#333333", bbox=box, **place)


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
        fill = GREY if last else "white"
        ax.plot([], [], marker, color=GREY, markersize=8, markerfacecolor=fill, label=curve.label)  # for the legend
    ax.axhline(90, color=GREY, linewidth=0.9, linestyle=(0, (1, 2)))
    _note(ax, "orthogonal", 90)
    if picture.ticks:
        ax.set_xticks(range(len(picture.ticks)), picture.ticks, rotation=45, ha="right", rotation_mode="anchor")


def _draw_dots(ax: Axes, panel: Panel, picture: Picture) -> None:
    look, edge = styles(picture.styled), _edge(picture)
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
        ax.axvline(edge, color=GREY, linewidth=0.9, linestyle=(0, (1, 2)))
        ax.text(edge, -0.62, "not reached", ha="right", va="center", fontsize=6.5, color="#333333")
    ax.set_yticks(range(len(picture.arms)), picture.arms)
    ax.set_ylim(len(picture.arms) - 0.4, -0.9)


def _edge(picture: Picture) -> float:
    """Where values that are larger than any number are drawn: right of all that could have been observed."""
    values = [v for panel in picture.panels for dots in panel.dots for v in (*dots.values, dots.reported or 0.0)]
    return 1.06 * max(value for value in (*values, *(panel.limit for panel in picture.panels)) if math.isfinite(value))
