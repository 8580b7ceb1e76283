"""The harness: whole runs, rounds, layers, growth and overheads, each a part. Writes JSON.

python -m benchmarks.run --quick
python -m benchmarks.run --parts rounds --workloads cnn-10 --systems fedstrata,Flower --repetitions 2
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks import growth, measure, overheads, page, rounds, whole
from benchmarks.turns import Turn, say
from benchmarks.workloads import LAYERS, QUICK, WORKLOADS

RESULTS = Path(__file__).parent / "results"
PARTS = ("whole", "rounds", "layers", "overheads", "growth")


def child(*command: str) -> Any:
    """The JSON that another of our scripts prints in a process of its own, and what the process used."""
    turn, lines = Turn([sys.executable, "-m", *command]), [""]
    problem = turn.follow(lines.append)
    found = turn.used() | ({"error": problem} if problem else json.loads(lines[-1]))
    say(command[0].rpartition(".")[2], " ".join(command[1:3]), found, lines[-1].strip())
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="whole runs and rounds, both short, on three workloads")
    parser.add_argument("--parts", help=f"of {','.join(PARTS)}")
    parser.add_argument("--workloads", help="of whole runs, rounds and layers: names, with commas between")
    parser.add_argument("--systems", help="of whole runs and rounds: names, with commas between")
    parser.add_argument("--repetitions", type=int, help="turns of each system (default: 5, quick: 1)")
    parser.add_argument("--data", help="where the data sets are; default: FEDSTRATA_DATA")
    parser.add_argument("--out", type=Path, help="the JSON file")
    parser.add_argument("--update", type=Path, help="a stored result, in which what is measured now replaces what was")
    parser.add_argument("--note", help="what a reader of the results should know")
    options = parser.parse_args()
    workloads = _chosen(options.workloads, [*(QUICK if options.quick else WORKLOADS), *LAYERS], WORKLOADS | LAYERS)
    systems = _chosen(options.systems, rounds.QUICK if options.quick else rounds.SYSTEMS, rounds.SYSTEMS)
    parts = _chosen(options.parts, PARTS[:2] if options.quick else PARTS, PARTS)
    repetitions = options.repetitions or (1 if options.quick else 5)
    data = ["--data", str(Path(options.data).resolve())] if options.data else []
    now = datetime.now()
    results: dict[str, Any] = {
        "made": now.isoformat(timespec="seconds"),
        "quick": options.quick,
        "machine": measure.machine(),
        "peak_gflops": measure.peak_gflops(),
        "copy_gbs": measure.copy_gbs(),
    }
    stem = f"{now:%Y-%m-%d}-{measure.slug(results['machine']['cpu'])}{'-quick' if options.quick else ''}"
    out = options.update or options.out or RESULTS / f"{stem}.json"
    if options.update:
        results = json.loads(out.read_text(encoding="utf-8"))
    if options.note:
        results["note"] = options.note
    out.parent.mkdir(parents=True, exist_ok=True)
    before = results.get("minutes", 0)

    def store(part: str, name: str, found: dict[str, Any]) -> None:
        results.setdefault(part, {})[name] = found
        results["minutes"] = round(before + (datetime.now() - now).total_seconds() / 60, 1)
        out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    how = (repetitions, options.quick, data)
    for name in workloads:
        if "whole" in parts and name in WORKLOADS and WORKLOADS[name].whole:
            store("whole", name, whole.compare(name, systems, *how))
    for name in workloads:
        if "rounds" in parts and name in WORKLOADS:
            store("rounds", name, rounds.compare(name, rounds.able(name, systems), *how))
    for name in workloads:
        if "layers" in parts and name in LAYERS:
            store("layers", name, rounds.compare(name, rounds.LAYERED, *how))
    for name in overheads.ALGORITHMS if "overheads" in parts else ():
        store("overheads", name, child("benchmarks.overheads", name, *data))
    for axis, points in growth.AXES.items() if "growth" in parts else ():
        store("growth", axis, {str(point): child("benchmarks.growth", axis, str(point), *data) for point in points})
    print("\n" + page.tables(results))
    print(f"\n{out}; `python -m benchmarks.page` makes docs/performance.md of it")
    if page.problems(results):
        sys.exit("some did not run, or did not do the same work; see above")


def _chosen(text: str | None, default: Iterable[str], known: Iterable[str]) -> list[str]:
    chosen = text.split(",") if text else list(default)
    unknown = [name for name in chosen if name not in list(known)]
    if unknown:
        sys.exit(f"{unknown[0]!r} is none of: {', '.join(known)}")
    return chosen


if __name__ == "__main__":
    main()
