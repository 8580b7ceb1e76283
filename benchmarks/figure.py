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
    """Bars in groups, one group per workload; a number above a bar is its ratio to fedstrata's."""
    workloads = results["workloads"]
    systems = page.system_names(results)
    width = 0.84 / len(systems)
    figure, axes = plt.subplots(figsize=(2.0 + 1.9 * len(workloads), 5))
    for at, system in enumerate(systems):
        for group, workload in enumerate(workloads.values()):
            median = page.median_seconds(workload, system)
            if median is None:
                continue
            x = group + (at - (len(systems) - 1) / 2) * width
            label = system if group == 0 else None
            axes.bar(x, median, width * 0.94, color=COLOURS[at % len(COLOURS)], label=label)
            ratio = page.ratio(workload, system)
            if system != "fedstrata" and ratio is not None:
                axes.annotate(f"{ratio:.1f}×", (x, median), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.margins(y=0.12)
    axes.set_xticks(range(len(workloads)), list(workloads))
    axes.set_ylabel("seconds per round (log scale)")
    axes.set_title("One round of the same work; above the bars: times fedstrata's", fontsize=11)
    axes.legend(ncols=len(systems), loc="upper center", bbox_to_anchor=(0.5, -0.1), frameon=False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _growth(growth: dict[str, Any]) -> Any:
    figure, panels = plt.subplots(1, 3, figsize=(14, 4.2))
    titles = {"cohort": "clients per round", "clients": "existing clients", "parameters": "parameters"}
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
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(title)
        axes.set_ylabel("seconds per round" if axis != "parameters" else "seconds on the server per round")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[1].set_ylim(bottom=min([panels[1].get_ylim()[0], 1e-3]))
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
