"""The harness: every system on the same work, in turns; then growth and overheads. Writes JSON and figures.

python -m benchmarks.run --quick
python -m benchmarks.run --workloads cnn-10 --systems fedstrata,flower --repetitions 2 --parts compare
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure, page
from benchmarks.workloads import QUICK, WARM_UP, WORKLOADS, Work

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
TIMEOUT = 900
PARTS = ("compare", "growth", "overheads")


@dataclass(frozen=True)
class System:
    """How a system is started. The first repetition tries all its variants, the others keep the fastest."""

    module: str
    settings: str
    variants: dict[str, list[str]] = field(default_factory=lambda: {"": []})
    launcher: dict[str, list[str]] = field(default_factory=dict)
    """What stands between `python` and the script, for variants that need it."""

    def command(self, variant: str) -> list[str]:
        """Without workload and options."""
        start = [sys.executable, *self.launcher.get(variant, [])]
        return [*start, "-m", f"benchmarks.systems.{self.module}"]


SYSTEMS = {
    "fedstrata": System("fedstrata", "as installed: all cores, per-layer record off"),
    "plain loop": System("loop", "one process, PyTorch's default threads, torch.optim.SGD, nn.Module"),
    "Flower": System(
        "flower",
        "simulation on Ray, stock FedAvg, `num_cpus = 1` per client and as many actors as cores, the client app in a "
        "module of its own that keeps data and model in each actor, no evaluation",
    ),
    "pfl": System(
        "pfl_research",
        "SimulatedBackend, FederatedAveraging, WeightByDatapoints; the faster of one thread and two",
        {"1 thread": ["--threads", "1"], "2 threads": ["--threads", "2"]},
    ),
    "pfl (torchrun)": System(
        "pfl_research",
        "the same under torchrun: two processes of one thread each with balanced load, as its distributed simulations",
        {"": ["--threads", "1"]},
        {"": ["-m", "torch.distributed.run", "--nproc-per-node=2"]},
    ),
    "FedLab": System(
        "fedlab",
        "StandalonePipeline with its serial SGD trainer, fed with index batches instead of a DataLoader (which is "
        "slower); the faster of one thread and two",
        {"1 thread": ["--threads", "1"], "2 threads": ["--threads", "2"]},
    ),
}

QUICK_SYSTEMS = ("fedstrata", "plain loop", "Flower", "pfl")


def turn(command: list[str], weights: str) -> dict[str, Any]:
    """One process from start to end: seconds to the first round's end, seconds of each round, accuracy."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    result: dict[str, Any] = {"busy": measure.busy(), "startup": None, "seconds": [], "accuracy": None}
    with tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            [*command, "--weights", weights],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        timer = threading.Timer(TIMEOUT, os.killpg, (process.pid, signal.SIGTERM))
        timer.start()
        assert process.stdout is not None
        for text in process.stdout:
            if not text.startswith("{"):
                continue
            line = json.loads(text)
            if "round" in line:
                result["startup"] = result["startup"] or time.perf_counter() - start
                result["seconds"].append(line["seconds"])
            result["accuracy"] = line.get("accuracy", result["accuracy"])
        code = process.wait()
        timer.cancel()
        if code or result["accuracy"] is None:
            errors.seek(0)
            lines = [line.strip() for line in errors.read().splitlines() if line.strip()]
            result["error"] = f"exit code {code}: {lines[-1] if lines else 'no message'}"
    return result


def timed(one: dict[str, Any]) -> list[float]:
    """The rounds of a turn that count."""
    seconds: list[float] = one["seconds"]
    return seconds[WARM_UP:]


def fastest(turns: dict[str, dict[str, Any]]) -> str:
    """The variant with the smallest median; one that failed is last."""
    return min(turns, key=lambda v: float("inf") if "error" in turns[v] else statistics.median(timed(turns[v])))


def similarity(moved: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Whether two runs moved the weights alike: cosine, and ratio of lengths."""
    lengths = float(np.linalg.norm(moved)), float(np.linalg.norm(reference))
    return {"cosine": float(moved @ reference) / (lengths[0] * lengths[1]), "length": lengths[0] / lengths[1]}


def compare(name: str, systems: Iterable[str], repetitions: int, options: argparse.Namespace) -> dict[str, Any]:
    """All systems on one workload, in turns."""
    workload = WORKLOADS[name]
    rounds = WARM_UP + (max(3, workload.rounds // 2) if options.quick else workload.rounds)
    work = Work.load(name, rounds, options.data)
    found: dict[str, Any] = {system: {"turns": [], "settings": SYSTEMS[system].settings} for system in systems}
    moved: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for repetition in range(repetitions):
            for label, result in found.items():
                if "error" in result:
                    continue
                variants = SYSTEMS[label].variants
                tried: dict[str, Any] = {}
                for variant in [result["variant"]] if repetition else variants:
                    weights = f"{scratch}/{label}-{variant}.npy"
                    what = [name, "--rounds", str(rounds), "--seed", str(repetition), *variants[variant]]
                    what += ["--data", options.data] if options.data else []
                    tried[variant] = turn([*SYSTEMS[label].command(variant), *what], weights)
                    _say(name, f"{label} {variant}", tried[variant])
                best = fastest(tried)
                result["variant"] = best
                if "error" in tried[best]:
                    result["error"] = tried[best]["error"]
                    continue
                result["turns"].append(tried[best])
                if len(tried) > 1:
                    result["variants"] = tried
                vector = np.load(f"{scratch}/{label}-{best}.npy")
                if repetition == 0:
                    moved[label] = vector
                elif repetition == 1:
                    result["self_similarity"] = similarity(vector, moved[label])
    for label, vector in moved.items():
        if "fedstrata" in moved:
            found[label]["similarity"] = similarity(vector, moved["fedstrata"])
    return {
        "made": datetime.now().isoformat(timespec="seconds"),
        "description": workload.description,
        "rounds": rounds,
        "warm_up": WARM_UP,
        "parameters": int(sum(p.numel() for p in work.model().parameters())),
        "flops_per_round": measure.flops_per_round(work, work.cohorts[WARM_UP:]),
        "systems": found,
    }


def _say(workload: str, system: str, one: dict[str, Any]) -> None:
    if "error" in one:
        text = one["error"]
    else:
        median = statistics.median(timed(one))
        text = f"{median:.3f} s a round, start-up {one['startup']:.1f} s, accuracy {one['accuracy']:.4f}"
    if one["busy"] > page.QUIET:
        text += f" (not quiet: others used {one['busy']:.0%} of the machine)"
    print(f"{workload:16s} {system.strip():18s} {text}", flush=True)


def child(*command: str) -> Any:
    """The JSON that another of our scripts prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, text=True, stdout=subprocess.PIPE, timeout=TIMEOUT, check=False
    )
    if done.returncode:
        return {"error": f"exit code {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def growth(data: list[str]) -> dict[str, Any]:
    """How cost grows, a process for each point."""
    from benchmarks.growth import AXES

    found: dict[str, Any] = {}
    for axis, points in AXES.items():
        found[axis] = []
        for point in points:
            found[axis].append(child("benchmarks.growth", axis, str(point), *data))
            print(f"growth: {axis} {point:,}: {json.dumps(found[axis][-1])}", flush=True)
    return found


def overheads(data: list[str]) -> dict[str, Any]:
    """What the algorithms cost beyond FedAvg."""
    from benchmarks.overheads import ALGORITHMS

    found = {workload: child("benchmarks.overheads", workload, *data) for workload in ALGORITHMS}
    print(f"overheads: {json.dumps(found)}", flush=True)
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)} on {', '.join(QUICK_SYSTEMS)}")
    parser.add_argument("--workloads", help="names, with commas between")
    parser.add_argument("--systems", help="names, with commas between")
    parser.add_argument("--repetitions", type=int, help="turns of each system (default: 5, quick: 2)")
    parser.add_argument("--parts", help=f"of {','.join(PARTS)}")
    parser.add_argument("--data", help="where the data sets are; default: FEDSTRATA_DATA")
    parser.add_argument("--out", type=Path, help="the JSON file")
    parser.add_argument("--update", type=Path, help="a stored result, in which what is measured now replaces what was")
    parser.add_argument("--note", help="what a reader of the results should know")
    options = parser.parse_args()
    workloads = _chosen(options.workloads, QUICK if options.quick else WORKLOADS, WORKLOADS)
    systems = _chosen(options.systems, QUICK_SYSTEMS if options.quick else SYSTEMS, SYSTEMS)
    parts = _chosen(options.parts, PARTS[:1] if options.quick else PARTS, PARTS)
    repetitions = options.repetitions or (2 if options.quick else 5)
    data = ["--data", options.data] if options.data else []
    now = datetime.now()
    results: dict[str, Any] = {
        "made": now.isoformat(timespec="seconds"),
        "quick": options.quick,
        "repetitions": repetitions,
        "machine": measure.machine(),
        "peak_gflops": measure.peak_gflops(),
        "copy_gbs": measure.copy_gbs(),
        "workloads": {},
    }
    stem = f"{now:%Y-%m-%d}-{measure.slug(results['machine']['cpu'])}{'-quick' if options.quick else ''}"
    out = options.update or options.out or RESULTS / f"{stem}.json"
    if options.update:
        results = json.loads(out.read_text(encoding="utf-8"))
    if options.note:
        results["note"] = options.note
    out.parent.mkdir(parents=True, exist_ok=True)

    def store() -> None:
        out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    if "overheads" in parts:
        results["overheads"] = overheads(data)
        store()
    if "growth" in parts:
        results["growth"] = growth(data)
        store()
    for name in workloads if "compare" in parts else ():
        results["workloads"][name] = compare(name, systems, repetitions, options)
        store()
    results["minutes"] = round(results.get("minutes", 0) + (datetime.now() - now).total_seconds() / 60, 1)
    store()
    print("\n" + page.tables(results))
    from benchmarks import figure

    figure.draw(results, out)
    print(f"\n{out}; `python -m benchmarks.page` makes docs/performance.md of it")
    if any(page.disagreements(workload["systems"]) for workload in results["workloads"].values()):
        sys.exit("some systems did not do the same work; see above")


def _chosen(text: str | None, default: Iterable[str], known: Iterable[str]) -> list[str]:
    chosen = text.split(",") if text else list(default)
    unknown = [name for name in chosen if name not in list(known)]
    if unknown:
        sys.exit(f"{unknown[0]!r} is none of: {', '.join(known)}")
    return chosen


if __name__ == "__main__":
    main()
