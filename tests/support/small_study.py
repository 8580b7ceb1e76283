"""A study of two cells and two arms that runs in a second, and results as if it had been run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from reproductions.jobs import is_finished, run_all
from reproductions.results import Results
from reproductions.study import Study, plan

SMALL: dict[str, Any] = {
    "name": "small",
    "title": "A small study",
    "paper": "None",
    "shows": "nothing",
    "recipe": "quickstart",
    "settings": {
        "task.partition": {"name": "iid", "clients": 4, "samples": 12},
        "task.model.hidden": 4,
        "training.rounds": 3,
        "training.epochs": 1,
        "training.batch_size": 6,
        "evaluation.target": 0.99,
    },
    "seeds": 2,
    "seconds_per_round": 0.5,
    "arms": {"fedavg": "fedavg", "fedldf": "fedldf:n=2"},
    "measures": {
        "final": {"title": "final accuracy", "kind": "final"},
        "rounds": {"title": "rounds", "kind": "rounds_to"},
    },
    "cells": [
        {"name": "a", "title": "as it is", "reported": {"final": {"fedavg": 0.5}}},
        {"name": "b", "title": "larger steps", "settings": {"training.lr": 0.2}},
    ],
    "claims": [
        {
            "text": "FedLDF is higher",
            "paper": "both",
            "measure": "final",
            "arm": "fedldf",
            "relation": "higher",
            "than": "fedavg",
        }
    ],
    "quick": {"rounds": 2, "cells": ["a"]},
}


def small(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy(SMALL) | changes


def results_of(values: dict[str, dict[str, dict[int, list[float]]]], **changes: Any) -> Results:
    """Results from curves of accuracy; every round uploads one byte."""
    runs: Any = {
        cell: {
            arm: {seed: {"upload": [1] * len(curve), "test.accuracy": curve} for seed, curve in seeds.items()}
            for arm, seeds in arms.items()
        }
        for cell, arms in values.items()
    }
    return Results(Study.parse(small(**changes)), runs)


def run_study(study: Study, out: Path, seeds: list[int]) -> list[Any]:
    runs = plan(study, seeds, out)
    return list(run_all([run for run in runs if not is_finished(run)], cores=2))
