"""Run directories with numbers that a test chooses, without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstrata.core.record import Ledger, RoundRecord
from fedstrata.core.state import ServerState
from fedstrata.core.status import OK
from fedstrata.recipes.schema import load
from fedstrata.runs.writer import RunWriter, make_directory

QUANTITIES = ("angle", "smoothed_angle", "divergence", "norm", "weight", "mu", "mask")


def make_run(
    path: Path,
    *,
    layers: Sequence[str] = ("first", "second"),
    clients: int = 4,
    sampled: int | None = None,
    rounds: int = 3,
    accuracy: Sequence[float | None] | None = None,
    algorithm: str = "fedavg",
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    done: int | None = None,
    lost: Mapping[int, Sequence[tuple[int, str]]] | None = None,
    data: Mapping[str, Any] | None = None,
    name: str = "made",
) -> RunWriter:
    """Random numbers, a tenth of them missing; `done` rounds of `rounds`; `lost` replies by round."""
    settings = {"training.rounds": rounds, **(settings or {})}
    recipe = load({"name": name}, algorithm=algorithm, settings=settings, seed=seed)
    width, draw = len(layers), np.random.default_rng([seed, clients, rounds])
    info = {
        "created": "2026-01-02T03:04:05+00:00",
        "resolved": {"threads": 1, "dtype": "float32"},
        "metric": {"name": "accuracy", "direction": "max"},
        "clients": clients,
        "layers": [
            {"name": n, "tensors": [n], "trainable": 10, "numbers": 10, "units": 1, "bytes": 40} for n in layers
        ],
        "data": dict(data or {}),
    }
    make_directory(path, recipe, info, ServerState(0, torch.zeros(1), {}, {}, {}))
    directory = RunWriter(path)
    upload = 0
    for round in range(1, (rounds if done is None else done) + 1):
        cohort = np.sort(draw.choice(clients, sampled or clients, replace=False)).astype(np.int64)
        shape = (len(cohort), width)
        record = {name: draw.uniform(0, 1, shape) * 10.0 ** draw.integers(-3, 2, shape) for name in QUANTITIES}
        for values in record.values():
            values[draw.uniform(size=shape) < 0.1] = np.nan
        whole = RoundRecord(
            round=round,
            attempt=0,
            clients=cohort,
            status=(OK,) * len(cohort),
            sizes=np.full(len(cohort), 10),
            work=np.full(len(cohort), 2),
            losses=np.full(len(cohort), 0.5),
            ledger=Ledger(up=torch.zeros(width), down=torch.zeros(width)),
            seconds=0.5,
            layers={**record, "model_angle": np.zeros(len(cohort))},
        )
        directory.store_layers(whole)
        up = [100 * round + at for at in range(width)]
        upload += sum(up) + 8
        value = round / (rounds + 1) if accuracy is None else accuracy[round - 1]
        missing = [{"client": client, "why": why} for client, why in (lost or {}).get(round, ())]
        directory.append_history(
            {
                "round": round,
                "attempt": 0,
                "clients": len(cohort),
                "replies": len(cohort) - len(missing),
                "lost": missing,
                "train_loss": 1 / round,
                "metrics": {"test": {"loss": 2 / round, "accuracy": value, "samples": 100.0}},
                "bytes": {
                    "up": up,
                    "down": [7] * width,
                    "feedback": 8,
                    "feedback_numbers": 2,
                    "control": 0,
                    "evaluation": 0,
                },
                "upload": sum(up) + 8,
                "download": 7 * width,
                "upload_total": upload,
                "seconds": 0.5,
            }
        )
        directory.store_checkpoint(ServerState(round, torch.zeros(1), {}, {}, {}))
    return directory
