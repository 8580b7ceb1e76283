"""How fedstrata's cost grows. One point per process, so that peak memory is its own.

python -m benchmarks.growth cohort 100       seconds per round with 100 of 100,000 clients
python -m benchmarks.growth clients 100000   seconds per round with 10 of 100,000 clients
python -m benchmarks.growth parameters 1000000   the server's share of a round: 10 ready replies of 10⁶ numbers
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import measure
from benchmarks.memory import peak_mb
from benchmarks.workloads import WARM_UP, WORKLOADS
from fedstrata.core.aggregation import aggregate
from fedstrata.core.cohort import Cohort
from fedstrata.core.determinism import steady
from fedstrata.core.fit import fit
from fedstrata.core.messages import Order, Reply, is_finite
from fedstrata.recipes.experiment import Experiment, build_experiment
from fedstrata.recipes.schema import load
from fedstrata.runs.engine import open_engine
from fedstrata.tasks.partitions import Partition
from fedstrata.tasks.task import Task

AXES = {
    "cohort": (10, 30, 100, 300, 1000),
    "clients": (100, 1000, 10_000, 100_000),
    "parameters": (10**4, 10**5, 10**6, 10**7, 10**8),
}
ROUNDS = 7
LAYERS = 10
COHORT = 10
EXIST = 100_000


def draws(labels: np.ndarray, generator: np.random.Generator, clients: int, samples: int) -> Partition:
    """Any number of clients, each with so many random samples; they may overlap."""
    rows = generator.integers(len(labels), size=clients * samples)
    return Partition(rows, np.arange(clients + 1) * samples)


def rounds(clients: int, cohort: int, data: Path | None) -> dict[str, Any]:
    """FLUTE's logistic regression with another number of clients or a larger cohort."""
    start = time.perf_counter()
    recipe = {**WORKLOADS["flute-lr"].recipe}
    partition = {"name": "benchmarks.growth:draws", "clients": clients, "samples": 60}
    settings = {"training.rounds": ROUNDS, "training.clients_per_round": cohort, "task.partition": partition}
    settings["record.layers"] = False
    experiment = build_experiment(load(recipe, settings=settings), data=data)
    loaded = time.perf_counter() - start
    seconds = []
    with open_engine(experiment) as engine:
        run = fit(experiment.first_state(), experiment.algorithm, engine, experiment.plan)
        for _ in range(ROUNDS):
            start = time.perf_counter()
            next(run)
            seconds.append(time.perf_counter() - start)
    # The largest worker's, of which most is shared with us. Workers are forks that never become another program, and
    # there are no other children, so that here `ru_maxrss` is right.
    workers = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    return {"seconds": seconds, "load": loaded, "peak_mb": peak_mb(), "worker_memory_mb": workers}


class Ready:
    """An engine whose clients have already answered: what is left is the server's work."""

    def __init__(self, experiment: Experiment, updates: Sequence[Tensor]) -> None:
        self.sizes = experiment.task.sizes()
        self._updates, self._layers = updates, len(experiment.layers)

    def exchange(self, orders: Sequence[Order]) -> Iterator[tuple[Order, Reply]]:
        """Every reply at once."""
        sent = torch.ones(self._layers, dtype=torch.bool)
        for order, update in zip(orders, self._updates, strict=True):
            yield order, Reply(size=1, update=update, sent=sent)


def server(parameters: int) -> dict[str, Any]:
    """Check, weigh and aggregate the replies of ten clients, against copying as many bytes."""
    side = max(1, round((parameters / LAYERS) ** 0.5))
    data = [(torch.zeros(1, side), torch.zeros(1, dtype=torch.long)) for _ in range(COHORT)]
    task = Task(
        model=lambda: nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(LAYERS))),
        clients=data,
        evaluation={"test": data[0]},
    )
    found: dict[str, Any] = {}
    updates: list[Tensor] = []
    for algorithm in ("fedavg", "fedlayerwise"):
        recipe = {"training": {"rounds": ROUNDS}, "record": {"layers": False}}
        experiment = build_experiment(load(recipe, algorithm=algorithm), task)
        updates = updates or [torch.randn(experiment.layers.numel) * 0.01 for _ in range(COHORT)]
        run = fit(experiment.first_state(), experiment.algorithm, Ready(experiment, updates), experiment.plan)
        found[algorithm] = [next(run)[1].seconds for _ in range(ROUNDS)]
    numbers, peak = updates[0].numel(), peak_mb()
    parts = steps(experiment, updates)
    updates.clear()
    moved = (COHORT + 2) * numbers * 4  # every update and the model are read once, the new model is written
    floor = moved / (measure.copy_gbs() * 1e9)
    held = round((COHORT + 2) * numbers * 4 / 2**20)
    return {
        "numbers": numbers,
        "seconds": found,
        "steps": parts,
        "floor": floor,
        "peak_mb": peak,
        "held_mb": held,
    }


def steps(experiment: Experiment, updates: Sequence[Tensor]) -> dict[str, float]:
    """The best seconds of the server's steps, and of reading every update once (their sums, on all cores)."""
    layers = experiment.layers
    cohort = Cohort(
        round=1,
        clients=torch.arange(COHORT),
        sizes=torch.ones(COHORT, dtype=torch.float64),
        layers=layers,
        updates=tuple(updates),
        sent=torch.ones(COHORT, len(layers), dtype=torch.bool),
        model=experiment.initial,
    )
    weights = torch.ones(COHORT, len(layers), dtype=torch.float64)
    found = {
        "read": measure.fastest(lambda: [update.sum() for update in updates]),
        "check": measure.fastest(lambda: [is_finite(update) for update in updates]),
    }
    with steady():
        found["angles"] = measure.fastest(lambda: replace(cohort).layer_angles)  # a copy has nothing cached
        found["aggregate"] = measure.fastest(lambda: aggregate(cohort.model, cohort, weights))
    return found


def main() -> None:
    """Print one point as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axis", choices=AXES)
    parser.add_argument("point", type=int)
    parser.add_argument("--data", type=Path)
    options = parser.parse_args()
    if options.axis == "parameters":
        found = server(options.point)
        found["median"] = {name: statistics.median(s[WARM_UP:]) for name, s in found["seconds"].items()}
    else:
        cohort = options.axis == "cohort"
        found = rounds(EXIST if cohort else options.point, options.point if cohort else COHORT, options.data)
        found["median"] = statistics.median(found["seconds"][WARM_UP:])
    print(json.dumps({"point": options.point, **found}))


if __name__ == "__main__":
    main()
