"""The figures, from a result: seconds per round of every system, and how fedstrata's cost grows."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from benchmarks import page

mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "fedstrata", "font.size": 11})
COLOURS = ("#0072b2", "#999999", "#e69f00", "#009e73", "#cc79a7", "#56b4e9")


def draw(results: dict[str, Any], out: Path) -> None:
    """As SVG and PNG beside the JSON."""
    if results["workloads"]:
        _save(_systems(results), out.with_suffix(""))
    if results.get("growth"):
        _save(_growth(results["growth"]), out.with_name(f"{out.stem}-growth"))


def _save(figure: Any, stem: Path) -> None:
    for suffix, metadata in (("svg", {"Date": None}), ("png", {})):
        figure.savefig(f"{stem}.{suffix}", dpi=150, bbox_inches="tight", metadata=metadata)
    plt.close(figure)


def _systems(results: dict[str, Any]) -> Any:
    """A panel for each workload, a bar for each system; behind it seconds, and how many times fedstrata's."""
    workloads, systems = results["workloads"], page.system_names(results)
    columns = min(3, len(workloads))
    rows = -(-len(workloads) // columns)
    figure, panels = plt.subplots(
        rows, columns, figsize=(4.2 * columns, (0.9 + 0.28 * len(systems)) * rows + 0.3), sharey=True, squeeze=False
    )
    for axes in panels.flat[len(workloads) :]:
        axes.remove()
    for axes, (name, workload) in zip(panels.flat, workloads.items(), strict=False):
        for at, system in enumerate(systems):
            median, ratio = page.median_seconds(workload, system), page.ratio(workload, system)
            if median is None:
                axes.annotate("did not run", (0, at), (4, 0), textcoords="offset points", va="center", fontsize=9)
                continue
            axes.barh(at, median, 0.72, color=COLOURS[at % len(COLOURS)])
            text = f"{page.number(median)} s" + (f"  ({ratio:.1f}×)" if ratio and system != "fedstrata" else "")
            axes.annotate(text, (median, at), (4, 0), textcoords="offset points", va="center", fontsize=9)
        axes.set_title(name, fontsize=11)
        axes.set_yticks(range(len(systems)), systems)
        axes.tick_params(axis="y", length=0)
        axes.margins(x=0.42)
        axes.locator_params(axis="x", nbins=4)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].invert_yaxis()
    figure.supxlabel("seconds per round; in brackets: times fedstrata's", fontsize=11)
    figure.tight_layout()
    return figure


def _growth(growth: dict[str, Any]) -> Any:
    figure, panels = plt.subplots(1, 3, figsize=(14, 4.2))
    panels[0].sharey(panels[1])
    titles = {"cohort": "clients per round", "clients": "existing clients, 10 per round", "parameters": "parameters"}
    for axes, (axis, title) in zip(panels, titles.items(), strict=True):
        points = [point for point in growth.get(axis, []) if "error" not in point]
        x = [point["point"] for point in points]
        if axis == "parameters":
            for name, colour in (("fedavg", COLOURS[0]), ("fedlayerwise", COLOURS[2])):
                axes.plot(x, [point["median"][name] for point in points], "o-", color=colour, label=name)
            axes.plot(x, [point["floor"] for point in points], "--", color=COLOURS[1], label="copying as many bytes")
            axes.legend(frameon=False)
        else:
            axes.plot(x, [point["median"] for point in points], "o-", color=COLOURS[0])
        for which, scale in (("x", axes.xaxis), ("y", axes.yaxis)):
            axes.set(**{f"{which}scale": "log"})
            if (axis, which) != ("parameters", "x"):  # where powers of ten are shorter
                scale.set_major_formatter("{x:,.10g}")
            scale.set_minor_formatter("")
        axes.set_xlabel(title)
        axes.set_ylabel("seconds per round" if axis != "parameters" else "seconds on the server per round")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[1].set_ylim(0.001, 1)
    figure.tight_layout()
    return figure


def main() -> None:
    """Draw again from stored results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", help="default: the newest")
    path = parser.parse_args().results or page.newest()
    draw(json.loads(path.read_text(encoding="utf-8")), path)


if __name__ == "__main__":
    main()
