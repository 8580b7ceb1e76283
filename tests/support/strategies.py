"""Five nodes with little data, strategies of all kinds, and runs of them on a grid in this process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from flwr.app import ArrayRecord

from fedstrata import algorithms
from fedstrata.clients.training import build_model
from fedstrata.flower import Strategy
from fedstrata.objectives import FedLap
from fedstrata.weightings import FedLayerWise
from tests.support.flower import FakeGrid, helped_app, stock_app
from tests.support.math import image_task

SIZES = [5, 9, 6, 8, 12]
NODES = [7001, 90, 2**63 + 5, 12, 400]  # node ids are 64 bits long and in no order
TASK = image_task(SIZES)
LR, EPOCHS, ROUNDS = 0.3, 3, 3

ALGORITHMS = {
    "fedavg": algorithms.fedavg(),
    "fedadp": algorithms.fedadp(),
    "fedlayerwise": algorithms.fedlayerwise(),
    "hdfl": algorithms.hdfl(n=2),
    "random_layers": algorithms.random_layers(n=2),
    "fedldf": algorithms.fedldf(n=2),
    "fedprox": algorithms.fedprox(mu=0.5),
    "adaptive_mu": algorithms.adaptive_mu(mu0=0.5),
    "fedlap": algorithms.fedlap(),
    "fedlap through λ": algorithms.fedlap(through=True),
    "fedyogi": algorithms.fedyogi(),
    "fedexp": algorithms.fedexp(),
    "ida": algorithms.ida(),
    "multi_krum": algorithms.multi_krum(),
    "trimmed_mean": algorithms.trimmed_mean(),
    "norm_bounding": algorithms.norm_bounding(),
    "all three axes": replace(algorithms.fedldf(n=3), objective=FedLap(q=0.9), weighting=FedLayerWise()),
}


def start(strategy: Strategy, apps: Any, rounds: int = ROUNDS, **options: Any) -> tuple[Any, FakeGrid]:
    grid = apps if isinstance(apps, FakeGrid) else FakeGrid(dict(zip(NODES, apps, strict=False)))
    arrays = ArrayRecord(build_model(TASK, 0, torch.float64).state_dict())
    options = {"timeout": 0.2} | options  # for those that never answer; all others do at once
    return strategy.start(grid, arrays, num_rounds=rounds, **options), grid


def helped() -> list[Any]:
    return [helped_app(TASK, lr=LR, epochs=EPOCHS)] * len(NODES)


def stock() -> list[Any]:
    return [stock_app(TASK, lr=LR, epochs=EPOCHS)] * len(NODES)
