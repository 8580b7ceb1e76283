"""docs/performance.md, from stored results and the template page.md.in; needs nothing but the standard library.

python -m benchmarks.page
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
QUIET = 0.1
"""Above this share of the machine in others' hands, a turn's seconds are doubtful."""
COSINE, NORM, POINTS = 0.9, 0.1, 0.03
"""How well a peer must agree with fedstrata: the direction in which the weights moved and how far, and accuracy."""
MLP_STEPS = 6_000
"""Of a round of mlp-100: ten clients with 600 samples in batches of ten, ten epochs."""


def newest(folder: Path = HERE / "results") -> Path:
    """The newest full result, or else the newest quick one."""
    found = [(json.loads(path.read_text(encoding="utf-8")), path) for path in folder.glob("*.json")]
    if not found:
        raise SystemExit(f"no results in {folder}: run `make bench` first")
    return max(found, key=lambda pair: (not pair[0]["quick"], pair[0]["made"]))[1]


def system_names(results: dict[str, Any]) -> list[str]:
    """Every system in the order of the first workload."""
    return list(dict.fromkeys(name for workload in results["workloads"].values() for name in workload["systems"]))


def seconds(workload: dict[str, Any], system: str) -> list[float]:
    """All timed rounds of a system, over its turns."""
    turns = workload["systems"].get(system, {}).get("turns", [])
    return [value for turn in turns for value in turn["seconds"][workload["warm_up"] :]]


def median_seconds(workload: dict[str, Any], system: str) -> float | None:
    """Of all timed rounds; None if the system did not run."""
    values = seconds(workload, system)
    return statistics.median(values) if values else None


def ratio(workload: dict[str, Any], system: str) -> float | None:
    """A system's seconds over fedstrata's."""
    theirs, ours = median_seconds(workload, system), median_seconds(workload, "fedstrata")
    return None if theirs is None or ours is None else theirs / ours


def share_of_peak(workload: dict[str, Any], system: str, peak_gflops: float) -> float | None:
    """The training arithmetic of a round over what the machine could have done in that time."""
    median = median_seconds(workload, system)
    return None if median is None else workload["flops_per_round"] / median / (peak_gflops * 1e9)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None, digits: int = 3, suffix: str = "") -> str:
    """So many significant digits."""
    if value is None:
        return "–"
    text = f"{value:.{digits}g}"
    return (f"{value:,.0f}" if "e" in text and abs(value) >= 1 else text) + suffix


def ratios(results: dict[str, Any]) -> str:
    """Peers' seconds over fedstrata's."""
    names = system_names(results)
    head = ["workload", "fedstrata, s per round", "share of peak", *(f"{n} ÷" for n in names if n != "fedstrata")]
    rows = []
    for label, workload in results["workloads"].items():
        peak = share_of_peak(workload, "fedstrata", results["peak_gflops"])
        others = [number(ratio(workload, name), suffix="×") for name in names if name != "fedstrata"]
        share = "–" if peak is None else f"{peak:.1%}"
        rows.append(
            [label, number(median_seconds(workload, "fedstrata")), share, *(o.replace("–×", "–") for o in others)]
        )
    return table(head, rows)


@dataclass(frozen=True)
class Accuracies:
    """Every system's accuracy in each of its turns; fedstrata's turns are all the same run, so it counts as one."""

    turns: dict[str, list[float]]

    @classmethod
    def of(cls, systems: dict[str, Any]) -> Accuracies:
        """Of all systems that ran."""
        return cls({name: [turn["accuracy"] for turn in s["turns"]] for name, s in systems.items() if "error" not in s})

    @property
    def peers(self) -> dict[str, list[float]]:
        """All but fedstrata's."""
        return {name: values for name, values in self.turns.items() if name != "fedstrata"}

    @property
    def variance(self) -> float:
        """Between turns of the same peer: with few classes per client, the order of batches alone moves accuracy."""
        repeated = [statistics.variance(values) for values in self.peers.values() if len(values) > 1]
        return statistics.fmean(repeated) if repeated else 0.0

    def off(self, name: str) -> float:
        """A peer's mean less fedstrata's."""
        return statistics.mean(self.turns[name]) - statistics.mean(self.turns.get("fedstrata", self.turns[name]))

    def allowed(self, name: str) -> float:
        """How far a peer's mean may be from fedstrata's one run."""
        freedom = sum(len(values) - 1 for values in self.peers.values()) or 1
        deviations = 3 + 7.5 / freedom + 17.25 / freedom**2  # what three are in Student's distribution (first terms)
        return max(POINTS, deviations * math.sqrt(self.variance * (1 + 1 / len(self.turns[name]))))

    @property
    def side(self) -> str | None:
        """Whether fedstrata's is below or above those of all turns of peers; None if among them, or if they are few."""
        ours, theirs = self.turns.get("fedstrata", []), [value for values in self.peers.values() for value in values]
        if not ours or not any(len(values) > 1 for values in self.peers.values()):
            return None
        return "below" if max(ours) < min(theirs) else "above" if min(ours) > max(theirs) else None


def disagreements(systems: dict[str, Any]) -> list[str]:
    """Which systems did not do the same work as fedstrata, and why."""
    good = {name: s for name, s in systems.items() if "error" not in s}
    accuracies = Accuracies.of(systems)
    # How much the order of batches alone changes the weights: the plain loop against itself with another seed.
    noise = good.get("plain loop", {}).get("self_similarity", {"cosine": 1.0, "length": 1.0})
    cosine, norm = min(COSINE, noise["cosine"] - 0.1), max(NORM, 2 * abs(noise["length"] - 1))
    found = []
    for name, system in good.items():
        off, allowed = accuracies.off(name), accuracies.allowed(name)
        if abs(off) > allowed:
            found.append(f"{name}: accuracy differs by {off:+.3f} (allowed: {allowed:.3f})")
        like = system.get("similarity")
        if like and (like["cosine"] < cosine or abs(like["length"] - 1) > norm):
            found.append(f"{name}: weights moved with cosine {like['cosine']:.3f}, length {like['length']:.3f}")
    return found


def outside(systems: dict[str, Any]) -> str | None:
    """What the results say where fedstrata's accuracy is not among those of its peers."""
    accuracies = Accuracies.of(systems)
    if accuracies.side is None:
        return None
    theirs = [value for values in accuracies.peers.values() for value in values]
    furthest = max(accuracies.peers, key=lambda name: abs(accuracies.off(name)))
    text = (
        f"fedstrata's accuracy is {accuracies.side} those of all {len(theirs)} turns of peers ({min(theirs):.3f} … "
        f"{max(theirs):.3f}). Furthest off is the mean of {furthest}, by {100 * abs(accuracies.off(furthest)):.1f} "
        f"points; {100 * accuracies.allowed(furthest):.1f} are allowed. The standard deviation between a peer's turns "
        f"is {100 * math.sqrt(accuracies.variance):.2g} points."
    )
    loop = systems.get("plain loop", {})
    if "similarity" in loop and "self_similarity" in loop:
        text += (
            f" The plain loop's weights have the cosine {loop['similarity']['cosine']:.3f} with fedstrata's, and "
            f"{loop['self_similarity']['cosine']:.3f} with its own from another seed."
        )
    return text


def sides(results: dict[str, Any]) -> str:
    """On which workloads fedstrata's accuracy is below, above or within the range of its peers'."""
    found: dict[str, list[str]] = {"below": [], "above": [], "within": []}
    for label, workload in results["workloads"].items():
        found[Accuracies.of(workload["systems"]).side or "within"].append(label)
    return listed([f"{side} it on {listed(labels)}" for side, labels in found.items() if labels])


def listed(names: Sequence[str]) -> str:
    """As words of a sentence."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def details(results: dict[str, Any]) -> str:
    """Every system on every workload."""
    head = ["system", "s per round", "fastest … slowest", "÷ fedstrata", "share of peak", "start-up, s", "accuracy"]
    head += ["cosine, length"]
    parts = []
    for label, workload in results["workloads"].items():
        rows = []
        for name, system in workload["systems"].items():
            shown = f"{name} ({system['variant']})" if system.get("variant") else name
            values = seconds(workload, name)
            if "error" in system or not values:
                rows.append([shown, f"did not run: {system.get('error', 'no rounds')}", *[""] * (len(head) - 2)])
                continue
            accuracies = [turn["accuracy"] for turn in system["turns"]]
            like = system.get("similarity")
            rows.append(
                [
                    shown,
                    number(statistics.median(values)),
                    f"{number(min(values))} … {number(max(values))}",
                    number(ratio(workload, name)),
                    f"{share_of_peak(workload, name, results['peak_gflops']) or 0:.1%}",
                    f"{statistics.median(turn['startup'] for turn in system['turns']):.1f}",
                    f"{statistics.median(accuracies):.3f} ({min(accuracies):.3f} … {max(accuracies):.3f})",
                    f"{like['cosine']:.3f}, {like['length']:.3f}" if like else "–",
                ]
            )
        facts = (
            f"{workload['description']}. {workload['parameters']:,} parameters, "
            f"{workload['flops_per_round'] / 1e9:,.2f} GFLOP of training a round; accuracy after "
            f"{workload['rounds']} rounds."
        )
        remarks = [f"**Not the same work:** {problem}" for problem in disagreements(workload["systems"])]
        remarks += filter(None, [outside(workload["systems"])])
        parts.append("\n\n".join([f"### {label}", facts, table(head, rows), *remarks]))
    return "\n\n".join(parts)


def growth(results: dict[str, Any]) -> str:
    """How fedstrata's cost grows."""
    found = results.get("growth")
    if not found:
        return "Not part of this run."
    measured = [point for axis in found.values() for point in axis if "error" not in point]
    # Older results have `memory_mb` instead, which was at least the peak of the process that started the measured one.
    has_peaks = all("peak_mb" in point for point in measured)
    parts = []
    if not has_peaks:
        parts.append(
            "Peak memory is shown for workers only: what these results have for the whole process is never below the "
            "peak of the process that started it."
        )
    titles = {
        "cohort": ("clients per round", "Logistic regression on MNIST, 60 samples per client, out of 100,000 clients:"),
        "clients": ("existing clients", "The same with 10 clients per round, out of more and more:"),
    }
    for axis, (title, text) in titles.items():
        points = [point for point in found.get(axis, []) if "error" not in point]
        rows = [
            [
                f"{point['point']:,}",
                number(point["median"]),
                number(point["load"]),
                *([megabytes(point["peak_mb"])] if has_peaks else []),
                megabytes(point["worker_memory_mb"]),
            ]
            for point in points
        ]
        head = [title, "s per round", "s to load", *(["peak memory, MB"] if has_peaks else [])]
        head += ["peak memory of a worker (mostly shared), MB"]
        parts.append(f"{text}\n\n{table(head, rows)}")
    rows = []
    for point in found.get("parameters", []):
        if "error" not in point:
            medians = [point["median"][name] for name in ("fedavg", "fedlayerwise")]
            over = [f"{number(value)} ({number(value / point['floor'], 2)}×)" for value in medians]
            steps = [number(point["steps"][name]) for name in ("check", "angles", "aggregate", "read")]
            memory = [f"{megabytes(point['peak_mb'])} ({megabytes(point['held_mb'])})"] if has_peaks else []
            rows.append([f"{point['numbers']:,}", *over, number(point["floor"]), *steps, *memory])
    head = ["parameters", "FedAvg, s", "FedLayerWise, s", "copying as many bytes, s"]
    head += ["check", "angles", "equation", "reading all updates", *(["peak memory, MB"] if has_peaks else [])]
    text = (
        "The server's share of a round with ten clients and ten layers: replies checked, weighed and aggregated. In "
        "brackets: times what copying as many bytes takes at the bandwidth of a plain copy. Then its steps one by one, "
        "beside the sum of every update on all cores: checking that all is finite, angles, the equation."
    )
    if has_peaks:
        text += " In brackets behind the memory: the updates, the model and the new model alone."
    parts.append(f"{text}\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def megabytes(value: int | None) -> str:
    """Whole ones; None where the kernel did not say."""
    return "–" if value is None else f"{value:,}"


def overheads(results: dict[str, Any]) -> str:
    """What the algorithms cost beyond FedAvg: the median over rounds of the ratio to FedAvg's same round."""
    found = results.get("overheads")
    if not found:
        return "Not part of this run."
    rows = []
    for workload, algorithms in found.items():
        for name, values in algorithms.items():
            if name in ("fedavg", "error"):
                continue
            paired = [a / b - 1 for a, b in zip(values, algorithms["fedavg"], strict=True)]
            quarters = statistics.quantiles(paired, n=4, method="inclusive") if len(paired) > 1 else paired * 3
            medians = [number(statistics.median(seconds)) for seconds in (values, algorithms["fedavg"])]
            first, median, third = (re.sub(r"^[+-](0\.0%)$", r"\1", f"{quarter:+.1%}") for quarter in quarters)
            rows.append([f"{name} on {workload}", *medians, median, f"{first} … {third}"])
    head = ["algorithm", "s per round", "FedAvg's s per round", "over FedAvg, same rounds", "middle half of the rounds"]
    return table(head, rows)


def machine(results: dict[str, Any]) -> str:
    """Where and with what."""
    about = results["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items() if number)
    turns = [
        turn
        for workload in results["workloads"].values()
        for system in workload["systems"].values()
        for turn in system["turns"]
    ]
    disturbed = sum(turn["busy"] > QUIET for turn in turns)
    text = (
        f"Measured on {results['made'][:10]}: {about['cpu']}, {about['cores']} cores, {about['memory_gb']:g} GB; "
        f"Python {about['python']}; {versions}. Peak: {results['peak_gflops']:.0f} GFLOP/s (float32 matrix product of "
        f"size 2048 on two threads); memory bandwidth of a copy: {results['copy_gbs']:.1f} GB/s. "
        f"{turns_each(results)} of each system."
    )
    if results.get("note"):
        text += f" {results['note']}"
    if disturbed:
        text += (
            f"\n\n**The machine was not quiet**: before {disturbed} of {len(turns)} turns, other processes used more "
            f"than {QUIET:.0%} of it. These numbers are rough."
        )
    return text


def turns_each(results: dict[str, Any]) -> str:
    """How many turns the systems had that ran."""
    systems = [system for workload in results["workloads"].values() for system in workload["systems"].values()]
    counts = {len(system["turns"]) for system in systems if "error" not in system} or {results["repetitions"]}
    count = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{min(counts)}"
    return f"{count} turn{'' if counts == {1} else 's'}"


def pfl_order(results: dict[str, Any]) -> str:
    """In which workloads pfl did not shuffle as all others do."""
    # A workload's results have a date of their own since pfl's script shuffles; older ones were measured without.
    old = [label for label, workload in results["workloads"].items() if "made" not in workload]
    if not old:
        return ""
    return (
        f"The results of {listed(old)} are from before that: each turn drew one order for every user and kept it in "
        "all rounds, each of which is one epoch there."
    )


def mlp_step(results: dict[str, Any]) -> str:
    """What the comparison's round of mlp-100 is per step."""
    median = median_seconds(results["workloads"].get("mlp-100", {"systems": {}}), "fedstrata")
    if median is None:
        return "mlp-100 is not among these results."
    cores = results["machine"]["cores"]
    step = median * cores / MLP_STEPS
    return f"There, {number(median)} s for a round's {MLP_STEPS:,} steps on {cores} cores are {step * 1e6:.0f} µs each."


def settings(results: dict[str, Any]) -> str:
    """How each system was set up."""
    found = {name: s["settings"] for w in results["workloads"].values() for name, s in w["systems"].items()}
    return "\n".join(f"- **{name}**: {text}." for name, text in found.items())


def tables(results: dict[str, Any]) -> str:
    """Everything, for the terminal."""
    parts = [machine(results)]
    if results["workloads"]:
        parts += [ratios(results), details(results)]
    parts += [part(results) for key, part in (("growth", growth), ("overheads", overheads)) if results.get(key)]
    return "\n\n".join(parts)


def build(results: dict[str, Any], template: str, stem: str) -> str:
    """The page: each `{{name}}` of the template replaced."""
    values = {
        "machine": machine(results),
        "ratios": ratios(results),
        "details": details(results),
        "settings": settings(results),
        "turns": turns_each(results),
        "sides": sides(results),
        "pfl_order": pfl_order(results),
        "mlp_step": mlp_step(results),
        "growth": growth(results),
        "overheads": overheads(results),
        "results": f"benchmarks/results/{stem}.json",
        "figure": f"![Seconds per round of every system](../benchmarks/results/{stem}.svg)",
        "growth_figure": "",
    }
    if results.get("growth"):
        values["growth_figure"] = f"![How cost grows](../benchmarks/results/{stem}-growth.svg)\n"
    for key, value in values.items():
        template = template.replace(f"{{{{{key}}}}}", value)
    return template


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", help="default: the newest full result")
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args()
    path = options.results or newest()
    results = json.loads(path.read_text(encoding="utf-8"))
    template = (HERE / "page.md.in").read_text(encoding="utf-8")
    options.out.write_text(build(results, template, path.stem), encoding="utf-8")
    print(f"{options.out} from {path}")


if __name__ == "__main__":
    main()
