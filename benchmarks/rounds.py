"""Rounds of the same work in fedstrata, in loops and in other simulators, in turns."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np

from benchmarks import measure
from benchmarks.turns import Turn, say
from benchmarks.workloads import LAYERS, PEERLESS, WARM_UP, WORKLOADS, Work


@dataclass(frozen=True)
class System:
    """How a system is started. The first repetition tries all its variants, the others keep the fastest."""

    module: str
    settings: str
    variants: dict[str, list[str]] = field(default_factory=lambda: {"": []})
    launcher: tuple[str, ...] = ()
    """What stands between `python` and the script."""
    is_peer: bool = False

    def command(self, variant: str) -> list[str]:
        """Without workload and its options."""
        start = [sys.executable, *self.launcher]
        return [*start, "-m", f"benchmarks.systems.{self.module}", *self.variants[variant]]


UNRECORDED = ("--set", "record.layers=false")
ONE_WORKER = ("--set", "engine.workers=1", "--threads", "1")
EITHER = {"1 thread": ["--threads", "1"], "2 threads": ["--threads", "2"]}
SYSTEMS = {
    "fedstrata": System("fedstrata", "all cores, per-layer record off, as peers keep none", {"": [*UNRECORDED]}),
    "fedstrata (1 worker)": System(
        "fedstrata", "the same with one worker and one thread", {"": [*UNRECORDED, *ONE_WORKER]}
    ),
    "loop (1 thread)": System(
        "loop", "plain PyTorch: one module, fused torch.optim.SGD, batches by index", {"": ["--threads", "1"]}
    ),
    "loop": System("loop", "the same with PyTorch's default threads"),
    "Flower": System(
        "flower",
        "simulation on Ray, stock FedAvg, `num_cpus = 1` per client and as many actors as cores, the client app in a "
        "module of its own that keeps data and model in each actor, no evaluation",
        is_peer=True,
    ),
    "pfl": System(
        "pfl_research",
        "SimulatedBackend, FederatedAveraging, WeightByDatapoints; the faster of one thread and two",
        EITHER,
        is_peer=True,
    ),
    "pfl (torchrun)": System(
        "pfl_research",
        "the same under torchrun: two processes of one thread each with balanced load, as its distributed simulations",
        {"": ["--threads", "1"]},
        ("-m", "torch.distributed.run", "--nproc-per-node=2"),
        is_peer=True,
    ),
    "FedLab": System(
        "fedlab",
        "StandalonePipeline with its serial SGD trainer, fed with index batches instead of a DataLoader (which is "
        "slower); the faster of one thread and two",
        EITHER,
        is_peer=True,
    ),
}
QUICK = ("fedstrata", "fedstrata (1 worker)", "loop (1 thread)", "Flower", "pfl (torchrun)")
LAYERED = {
    "fedstrata (1 worker)": System("fedstrata", "one worker, one thread, per-layer record on", {"": [*ONE_WORKER]}),
    "loop (1 thread)": SYSTEMS["loop (1 thread)"],
}


def able(workload: str, chosen: Iterable[str]) -> dict[str, System]:
    """Those among the chosen that do this workload."""
    return {label: SYSTEMS[label] for label in chosen if not (workload in PEERLESS and SYSTEMS[label].is_peer)}


def take_turn(command: list[str], rounds: int) -> dict[str, Any]:
    """One process: seconds to the first round's end and of each round, the processor's per timed round, accuracy."""
    turn = Turn([*command, "--rounds", str(rounds)])
    result: dict[str, Any] = {"startup": None, "seconds": [], "cpu": None, "accuracy": None}
    readings: list[dict[str, Any]] = []

    def note(text: str) -> None:
        if not text.startswith("{"):
            return
        line = json.loads(text)
        if "round" in line:
            result["seconds"].append(line["seconds"])
            if line["round"] in (1, WARM_UP, rounds):
                readings.append(turn.used())
        result["accuracy"] = line.get("accuracy", result["accuracy"])
        turn.go_on()

    problem = turn.follow(note)
    if problem or result["accuracy"] is None:
        return {**result, "error": problem or "no accuracy"}
    first, warm, last = readings
    result |= {key: last[key] for key in ("neighbours", "marked")}
    return {**result, "startup": first["wall"], "cpu": (last["cpu"] - warm["cpu"]) / len(timed(result))}


def timed(turn: dict[str, Any]) -> list[float]:
    """The rounds of a turn that count."""
    seconds: list[float] = turn["seconds"][WARM_UP:]
    return seconds


def fastest(turns: dict[str, dict[str, Any]]) -> str:
    """The variant with the smallest median; one that failed is last."""
    return min(turns, key=lambda v: float("inf") if "error" in turns[v] else statistics.median(timed(turns[v])))


def similarity(moved: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Whether two runs moved the weights alike: cosine, and ratio of lengths."""
    lengths = float(np.linalg.norm(moved)), float(np.linalg.norm(reference))
    return {"cosine": float(moved @ reference) / (lengths[0] * lengths[1]), "length": lengths[0] / lengths[1]}


def compare(name: str, systems: dict[str, System], repetitions: int, quick: bool, data: list[str]) -> dict[str, Any]:
    """All systems on one workload, in turns."""
    workload = (WORKLOADS | LAYERS)[name]
    rounds = WARM_UP + (max(3, workload.rounds // 2) if quick else workload.rounds)
    work = Work.load(name, rounds, data[-1] if data else None)
    found: dict[str, Any] = {label: {"turns": [], "settings": system.settings} for label, system in systems.items()}
    moved: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for repetition in range(repetitions):
            for label, result in found.items():
                if "error" in result:
                    continue
                tried: dict[str, Any] = {}
                for variant in [result["variant"]] if repetition else systems[label].variants:
                    what = [name, "--seed", str(repetition), "--weights", f"{scratch}/{label}-{variant}.npy", *data]
                    tried[variant] = take_turn([*systems[label].command(variant), *what], rounds)
                    say(name, f"{label} {variant}", tried[variant], _in_words(tried[variant]))
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
    ours = next((vector for label, vector in moved.items() if systems[label].module == "fedstrata"), None)
    for label, vector in moved.items():
        if ours is not None:
            found[label]["similarity"] = similarity(vector, ours)
    return {
        "made": datetime.now().isoformat(timespec="seconds"),
        "description": workload.description,
        "rounds": rounds,
        "warm_up": WARM_UP,
        "parameters": int(sum(p.numel() for p in work.model().parameters())),
        "flops_per_round": measure.flops_per_round(work, work.cohorts[WARM_UP:]),
        "systems": found,
    }


def _in_words(turn: dict[str, Any]) -> str:
    if "error" in turn:
        return ""
    seconds = f"{statistics.median(timed(turn)):.3f} s a round, {turn['cpu']:.3f} s of the processor"
    return f"{seconds}, start-up {turn['startup']:.1f} s, accuracy {turn['accuracy']:.4f}"
