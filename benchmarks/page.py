"""docs/performance.md, from stored results and the template page.md.in; needs nothing but the standard library.

python -m benchmarks.page
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.turns import QUIET

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
COSINE, NORM, POINTS = 0.9, 0.1, 0.03
"""How well a peer must agree with fedstrata: the direction in which the weights moved and how far, and accuracy."""
OURS, ONE, LOOP = "fedstrata", "fedstrata (1 worker)", "loop (1 thread)"
ABSENT = "Not part of this run."


def newest(folder: Path = HERE / "results") -> Path:
    """The newest full result, or else the newest quick one."""
    found = [(json.loads(path.read_text(encoding="utf-8")), path) for path in folder.glob("*.json")]
    if not found:
        raise SystemExit(f"no results in {folder}: run `make bench` first")
    return max(found, key=lambda pair: (not pair[0]["quick"], pair[0]["made"]))[1]


# --- figures ----------------------------------------------------------------------------------------------------------


def wall(workload: dict[str, Any], system: str) -> float | None:
    """The median seconds of a whole run, or of all timed rounds; None if the system did not run."""
    turns = workload["systems"].get(system, {}).get("turns", [])
    return _median(value for turn in turns for value in turn.get("seconds", [turn.get("wall")])[_warm_up(workload) :])


def cpu(workload: dict[str, Any], system: str) -> float | None:
    """The median of the processor's seconds of a whole run, or per timed round of a turn."""
    return _median(turn["cpu"] for turn in workload["systems"].get(system, {}).get("turns", []))


def _warm_up(workload: dict[str, Any]) -> int:
    warm_up: int = workload.get("warm_up", 0)
    return warm_up


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def quotient(first: float | None, second: float | None) -> float | None:
    """None where one is missing."""
    return None if first is None or second is None else first / second


def share_of_peak(workload: dict[str, Any], system: str, peak_gflops: float) -> float | None:
    """The training arithmetic of a round over what the machine could have done in that time."""
    return quotient(workload["flops_per_round"] / (peak_gflops * 1e9), wall(workload, system))


def all_turns(found: Any) -> Iterator[dict[str, Any]]:
    """Every measured process below."""
    if isinstance(found, dict):
        if "marked" in found:
            yield found
        for key, value in found.items():
            if key != "variants":  # of which the fastest is among the turns
                yield from all_turns(value)
    elif isinstance(found, list):
        for value in found:
            yield from all_turns(value)


def marked(found: Any) -> str:
    """How many turns were disturbed, and of how many."""
    turns = list(all_turns(found))
    return f"{sum(turn['marked'] for turn in turns)} of {len(turns)}"


# --- whether all did the same work ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Accuracies:
    """Every system's accuracy in each of its turns; fedstrata's turns are all the same run, so they count as one."""

    turns: dict[str, list[float]]

    @classmethod
    def of(cls, systems: dict[str, Any]) -> Accuracies:
        """Of all systems that ran."""
        return cls({name: [turn["accuracy"] for turn in s["turns"]] for name, s in systems.items() if "error" not in s})

    @property
    def ours(self) -> float | None:
        """Fedstrata's."""
        return next((values[0] for name, values in self.turns.items() if name.startswith(OURS)), None)

    @property
    def peers(self) -> dict[str, list[float]]:
        """All others'."""
        return {name: values for name, values in self.turns.items() if not name.startswith(OURS)}

    @property
    def variance(self) -> float:
        """Between turns of the same peer: with few classes per client, the order of batches alone moves accuracy."""
        repeated = [statistics.variance(values) for values in self.peers.values() if len(values) > 1]
        return statistics.fmean(repeated) if repeated else math.inf

    def off(self, name: str) -> float:
        """A system's mean less fedstrata's."""
        return 0.0 if self.ours is None else statistics.fmean(self.turns[name]) - self.ours

    def allowed(self, name: str) -> float:
        """How far a peer's mean may be from fedstrata's one run; without limit, if no peer had a second turn."""
        freedom = max(1, sum(len(values) - 1 for values in self.peers.values()))
        deviations = 3 + 7.5 / freedom + 17.25 / freedom**2  # what three are in Student's distribution (first terms)
        return max(POINTS, deviations * math.sqrt(self.variance * (1 + 1 / len(self.turns[name]))))


def disagreements(systems: dict[str, Any]) -> list[str]:
    """Which systems did not do the same work as fedstrata, and why."""
    good = {name: s for name, s in systems.items() if "error" not in s}
    accuracies = Accuracies.of(systems)
    # How much the order of batches alone changes the weights: the loop against itself with another seed.
    noise = good.get(LOOP, {}).get("self_similarity", {"cosine": 1.0, "length": 1.0})
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


def problems(results: dict[str, Any]) -> list[str]:
    """What did not run, and what did other work."""
    found = []
    for part in ("whole", "rounds", "layers"):
        for name, workload in results.get(part, {}).items():
            errors = [f"{label}: {s['error']}" for label, s in workload["systems"].items() if "error" in s]
            found += [f"{part}, {name}: {text}" for text in [*errors, *disagreements(workload["systems"])]]
    for part in ("overheads", "growth"):
        for turn in all_turns(results.get(part, {})):
            found += [f"{part}: {turn['error']}"] if "error" in turn else []
    return found


# --- tables -----------------------------------------------------------------------------------------------------------


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


def times(value: float | None) -> str:
    """A quotient."""
    return number(value, 2 if value is None or value < 10 else 3, "×")


def whole(results: dict[str, Any]) -> str:
    """Seconds of whole runs."""
    found = results.get("whole")
    if not found:
        return ABSENT
    programs = list(dict.fromkeys(label for workload in found.values() for label in workload["systems"]))
    head = ["workload, rounds", *programs, f"{LOOP} ÷ {ONE}, CPU", f"{LOOP} ÷ {OURS}, wall", "marked turns"]
    rows = []
    for name, workload in found.items():
        pairs = [f"{number(cpu(workload, label))} / {number(wall(workload, label))}" for label in programs]
        processor = quotient(cpu(workload, LOOP), cpu(workload, ONE))
        clock = quotient(wall(workload, LOOP), wall(workload, OURS))
        rows.append([f"{name}, {workload['rounds']}", *pairs, times(processor), times(clock), marked(workload)])
    return table(head, rows)


def rounds(results: dict[str, Any]) -> str:
    """Seconds of a round, and those of others over fedstrata's."""
    found = results.get("rounds")
    if not found:
        return ABSENT
    labels = dict.fromkeys(label for workload in found.values() for label in workload["systems"])
    others = [label for label in labels if label not in (OURS, ONE)]
    head = ["workload", OURS, "of peak", "two workers' speed-up", f"{LOOP} ÷ {ONE}, CPU"]
    head += [*(f"{label} ÷" for label in others), "marked turns"]
    rows = []
    for name, workload in found.items():
        share = share_of_peak(workload, OURS, results["peak_gflops"])
        row = [name, f"{number(cpu(workload, OURS))} / {number(wall(workload, OURS))}"]
        row += ["–" if share is None else f"{share:.0%}", times(quotient(wall(workload, ONE), wall(workload, OURS)))]
        row += [times(quotient(cpu(workload, LOOP), cpu(workload, ONE)))]
        for label in others:
            ratios = (quotient(seconds(workload, label), seconds(workload, OURS)) for seconds in (cpu, wall))
            row.append(" / ".join(map(times, ratios)))
        rows.append([*row, marked(workload)])
    return table(head, rows).replace("– / –", "–")


def layers(results: dict[str, Any]) -> str:
    """What fedstrata adds where a model has many layers: a row for each number of steps."""
    found = results.get("layers")
    if not found:
        return ABSENT
    kinds = {name: (int(name.split("-")[1]), int(name.split("-")[3])) for name in found}
    head = ["steps", *(f"{count:,} layers" for count in sorted({count for count, _ in kinds.values()})), "marked turns"]
    rows = []
    for steps in sorted({steps for _, steps in kinds.values()}):
        row = [found[name] for name in sorted(found, key=kinds.__getitem__) if kinds[name][1] == steps]
        seconds = [(cpu(workload, ONE), cpu(workload, LOOP)) for workload in row]
        cells = [f"{times(quotient(*pair))} ({' / '.join(map(number, pair))})" for pair in seconds]
        rows.append([str(steps), *cells, marked(row)])
    return table(head, rows)


def growth(results: dict[str, Any]) -> str:
    """How fedstrata's cost grows: a table for each axis, with a column for each point."""
    found = results.get("growth")
    if not found:
        return ABSENT
    parts = []
    for axis, title in (("cohort", "clients a round, of 100,000"), ("clients", "clients, 10 a round")):
        points = [point for point in found.get(axis, {}).values() if "error" not in point]
        cells = [f"{number(point['median'])} s, {number(point['peak_mb'])} MB" for point in points]
        parts.append(table([title, *(f"{point['point']:,}" for point in points)], [["a round, peak memory", *cells]]))
    points = [point for point in found.get("parameters", {}).values() if "error" not in point]
    rows = [
        [name, *(f"{number(p['median'][key])} s ({number(p['median'][key] / p['floor'], 2)}×)" for p in points)]
        for name, key in (("FedAvg", "fedavg"), ("FedLayerWise", "fedlayerwise"))
    ]
    parts.append(table(["parameters", *(f"{point['numbers']:,}" for point in points)], rows))
    return "\n\n".join(parts)


def overheads(results: dict[str, Any]) -> str:
    """What the algorithms cost beyond FedAvg: the median over rounds of the ratio to FedAvg's same round."""
    found = {workload: turn["seconds"] for workload, turn in results.get("overheads", {}).items() if "seconds" in turn}
    if not found:
        return ABSENT
    algorithms = [name for name in dict.fromkeys(name for each in found.values() for name in each) if name != "fedavg"]
    rows = []
    for workload, seconds in found.items():
        cells = [_over(seconds[name], seconds["fedavg"]) if name in seconds else "–" for name in algorithms]
        rows.append([workload, *cells])
    return table(["", *algorithms], rows)


def _over(seconds: Sequence[float], basis: Sequence[float]) -> str:
    """By how much, and the middle half of the rounds."""
    paired = [a / b - 1 for a, b in zip(seconds, basis, strict=True)]
    first, median, third = statistics.quantiles(paired, n=4, method="inclusive") if len(paired) > 1 else paired * 3
    return f"{median:+.0%} ({first:+.0%} … {third:+.0%})"


def machine(results: dict[str, Any]) -> str:
    """Where and with what."""
    about = results["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items() if number)
    text = (
        f"{results['made'][:10]}: {about['cpu']}, {about['cores']} cores, {about['memory_gb']:g} GB, "
        f"{results['peak_gflops']:.0f} GFLOP/s in a matrix product, {results['copy_gbs']:.0f} GB/s in a copy; Python "
        f"{about['python']}, {versions}. {turns_each(results)} of each program."
    )
    text += f" {results['note']}" if results.get("note") else ""
    return f"{text} {marked(results)} turns are marked: others had more than {QUIET:.0%} of the machine meanwhile."


def turns_each(results: dict[str, Any]) -> str:
    """How many turns those programs had that ran."""
    workloads = [workload for part in ("whole", "rounds", "layers") for workload in results.get(part, {}).values()]
    systems = [system for workload in workloads for system in workload["systems"].values()]
    counts = {len(system["turns"]) for system in systems if "error" not in system} or {0}
    count = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{min(counts)}"
    return f"{count} turn{'' if counts == {1} else 's'}"


def agreement(results: dict[str, Any]) -> str:
    """What did not run, or did other work."""
    found = problems(results)
    return f"**Not so: {'; '.join(found)}.**" if found else "All did."


def workloads(results: dict[str, Any]) -> str:
    """What they are."""
    found = results.get("whole", {}) | results.get("rounds", {})
    return "; ".join(f"**{name}**: {workload['description']}" for name, workload in found.items()) + "."


def tables(results: dict[str, Any]) -> str:
    """Everything, for the terminal."""
    parts = {"whole runs": whole, "rounds": rounds, "layers": layers, "overheads": overheads, "growth": growth}
    shown = {title: part(results) for title, part in parts.items()}
    texts = [f"{title}:\n\n{text}" for title, text in shown.items() if text != ABSENT]
    return "\n\n".join([machine(results), *texts, *problems(results)])


def build(results: dict[str, Any], template: str, stem: str) -> str:
    """The page: each `{{name}}` of the template replaced."""
    parts = (machine, whole, rounds, layers, growth, overheads, agreement, workloads)
    values = {part.__name__: part(results) for part in parts}
    for key, value in (values | {"results": f"benchmarks/results/{stem}.json"}).items():
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
