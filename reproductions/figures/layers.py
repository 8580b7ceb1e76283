"""Every layer of a run over rounds and clients, as heat maps: what no paper shows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.runs.reader import Run
from reproductions.figures.style import NOTHING, STYLE, library, titled_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUANTITIES = {
    "angle": ("angle to the\nmean update (°)", 180 / math.pi),
    "weight": ("share in the\naverage (%)", 100.0),
    "divergence": ("divergence\n‖Δ‖", 1.0),
    "mu": ("μ", 1.0),
}
"""Of what is known per client and layer, what is drawn: how it is labelled and multiplied."""

_MOST_CLIENTS = 60  # that have a row each
_MOST_NAMED = 20


@dataclass(frozen=True)
class LayerMaps:
    """A run as layers × rows × rounds; NaN where there is nothing. A row is a client, or a rank from 1."""

    title: str
    layers: list[str]
    ranked: bool
    ticks: list[str]
    maps: dict[str, np.ndarray]


def layer_maps(run: Run, title: str) -> LayerMaps:
    """Every round of a run; what is the same everywhere is left out.

    Of very many clients, most of which are in no given round, each round's are put in the order of their values.
    """
    records = [run.layers(line["round"]) for line in run.history()]
    clients = run.about.clients
    ranked = clients > _MOST_CLIENTS
    rows = max(len(record["clients"]) for record in records) if ranked else clients
    maps = {}
    for name, (_, factor) in QUANTITIES.items():
        values = np.full((len(run.layer_names), rows, len(records)), np.nan)
        for at, record in enumerate(records):
            found = factor * record[name]
            if ranked:
                values[:, : len(found), at] = -np.sort(-found, axis=0).T
            else:
                values[:, record["clients"], at] = found.T
        finite = values[np.isfinite(values)]
        if finite.size and np.ptp(finite) > 1e-9 * np.abs(finite).max():
            maps[name] = values
    table = run.about.data.table
    held = [sum(count > 0 for count in counts) for counts in table] if table and clients <= _MOST_NAMED else []
    return LayerMaps(title, run.layer_names, ranked, [f"{client} ({n})" for client, n in enumerate(held)], maps)


def draw_layers(maps: LayerMaps) -> Figure:
    """Heat maps, rounds × clients: a row for each quantity, a column for each layer, one scale in a row."""
    matplotlib = library()
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        rows, columns = len(maps.maps), len(maps.layers)
        height = min(2.2, 0.6 + 0.13 * next(iter(maps.maps.values())).shape[1])
        figure = titled_figure(maps.title, 1.3 + columns * max(1.2, 2.8 - 0.2 * columns), height * rows + 0.9)
        axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        first = 1 if maps.ranked else 0
        colours = matplotlib.colormaps["cividis"].with_extremes(bad=NOTHING)
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
            row[0].yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
            if maps.ticks:
                row[0].set_yticks(range(len(maps.ticks)), maps.ticks, fontsize=6.5)
            ticks = (
                matplotlib.ticker.LogLocator(subs=(1, 2, 5)) if isinstance(scale, matplotlib.colors.LogNorm) else None
            )
            bar = figure.colorbar(image, ax=list(row), label=QUANTITIES[name][0], pad=0.01, format="{x:g}", ticks=ticks)
            bar.minorticks_off()
        for title, ax in zip(maps.layers, axes[0], strict=True):
            ax.set_title(title)
        for ax in axes[-1]:
            ax.set_xlabel("round")
    return figure


def _scale(values: np.ndarray, linear: bool) -> Any:
    """Logarithmic where values span more than a power of ten and are no angles."""
    colors = library().colors
    finite = values[np.isfinite(values)]
    low, high = float(finite.min()), float(finite.max())
    return (colors.Normalize if linear or low <= 0 or high <= 10 * low else colors.LogNorm)(low, high)
