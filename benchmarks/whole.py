"""Whole runs, from the start of a process to its end: `fedstrata run` as a user starts it, and `benchmarks.loop`."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.turns import Turn, say
from benchmarks.workloads import WORKLOADS, Work
from fedstrata.core import rng
from fedstrata.tasks import datasets
from fedstrata.tasks.builtin import channel_statistics

LOOP = [sys.executable, "-m", "benchmarks.loop"]
FEDSTRATA = [str(Path(sys.executable).with_name("fedstrata")), "run"]
PROGRAMS = {
    "loop (1 thread)": [*LOOP, "--threads", "1"],
    "loop": LOOP,
    "fedstrata (1 worker)": [*FEDSTRATA, "--workers", "1"],
    "fedstrata": FEDSTRATA,
}
"""The loop's own default is as many threads as cores, and fedstrata's as many workers."""
WORDS = re.compile(r"round \d+/\d+ +loss ([\d.]+) +accuracy ([\d.]+)")
"""What both programs print of a round."""


def prepare_loop(path: Path, work: Work, data: Path | None) -> None:
    """Everything that the loop cannot know: what clients hold and who takes part, and where the data set lies."""
    recipe, task = work.experiment.recipe, work.experiment.task
    with rng.global_scope(recipe.seed, "model"):
        spec: dict[str, Any] = {"training": work.local, "model_seed": torch.initial_seed()}
    arrays = {"cohorts": np.array(work.cohorts)}
    config = recipe.task
    if config.function:
        spec |= {"function": config.function.rpartition(":")[2], "options": config.options}
    else:
        loaded = datasets.load(config.dataset, data)
        found = datasets.find_files(config.dataset, datasets.data_directory(data) / config.dataset)
        if found is None or found.kind != "idx" or len(loaded.train_images[0]) != 1:
            raise SystemExit(f"whole runs read idx files of grey images, which {config.dataset} is not here")
        mean, std = channel_statistics(loaded.train_images)
        files = [str(path) for part in ("train", "test") for path in sorted(found.parts[part].values())]
        spec |= {"files": files, "mean": float(mean), "std": float(std)}  # images come before labels
        spec |= {"shape": list(loaded.train_images.shape[1:]), "classes": loaded.classes, "model": config.model}
        arrays |= {"rows": task.clients.partition.indices, "sizes": work.sizes}  # type: ignore[attr-defined]
    np.savez(path, spec=np.array(json.dumps(spec)), **arrays)  # type: ignore[arg-type]  # not allow_pickle


def compare(name: str, chosen: Collection[str], repetitions: int, quick: bool, data: list[str]) -> dict[str, Any]:
    """The chosen programs on one workload, in turns."""
    workload = WORKLOADS[name]
    assert workload.whole
    rounds = max(2, workload.whole // 4) if quick else workload.whole
    folder = Path(data[-1]) if data else None
    work = Work.load(name, rounds, data[-1] if data else None)
    found: dict[str, Any] = {label: {"turns": []} for label in PROGRAMS if label in chosen}
    with tempfile.TemporaryDirectory() as scratch:
        recipe, prepared = Path(scratch, f"{name}.toml"), Path(scratch, f"{name}.npz")
        recipe.write_text(work.experiment.recipe.to_toml(), encoding="utf-8")
        prepare_loop(prepared, work, folder)
        for repetition in range(repetitions):
            for label, result in found.items():
                if "error" in result:
                    continue
                ours = [str(recipe), "--out", str(Path(scratch, f"{label}-{repetition}")), *data]
                theirs = [str(prepared), "--seed", str(repetition)]
                turn = take_turn([*PROGRAMS[label], *(ours if label.startswith("fedstrata") else theirs)])
                text = f"{turn['cpu']:.2f} s of the processor, {turn['wall']:.2f} s, accuracy {turn.get('accuracy')}"
                say(name, label, turn, text)
                if "error" in turn:
                    result["error"] = turn["error"]
                else:
                    result["turns"].append(turn)
    return {
        "made": datetime.now().isoformat(timespec="seconds"),
        "description": workload.description,
        "rounds": rounds,
        "systems": found,
    }


def take_turn(command: list[str]) -> dict[str, Any]:
    """One program from start to end."""
    turn = Turn(command)
    rounds: list[tuple[str, str]] = []
    problem = turn.follow(lambda line: rounds.extend(WORDS.findall(line)))
    used = turn.used()
    if problem or not rounds:
        return {**used, "error": problem or "no rounds"}
    return {**used, "loss": float(rounds[-1][0]), "accuracy": float(rounds[-1][1])}
