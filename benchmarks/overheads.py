"""What an algorithm costs beyond FedAvg: one round of each in turn, in one process, in seconds of the processor.

python -m benchmarks.overheads cnn-10
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import ExitStack
from pathlib import Path

from benchmarks.turns import family_seconds
from benchmarks.workloads import WARM_UP, WORKLOADS
from fedstrata.core.fit import fit
from fedstrata.recipes.experiment import build_experiment
from fedstrata.runs.engine import open_engine

RECORDED = "fedavg, layers recorded"
ALGORITHMS = {
    "cnn-10": ("fedavg", RECORDED, "fedadp", "fedlayerwise", "fedldf"),
    "mlp-100": ("fedavg", RECORDED, "adaptive_mu", "fedlap"),
}
ROUNDS = 12


def main() -> None:
    """Print every algorithm's seconds per round as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=ALGORITHMS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--data", type=Path)
    options = parser.parse_args()
    names = ALGORITHMS[options.workload]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        runs = {}
        for name in names:
            settings = (f"algorithm.name={name.split(',')[0]}", f"record.layers={str(name == RECORDED).lower()}")
            recipe = WORKLOADS[options.workload].as_recipe(options.workload, options.rounds, settings)
            experiment = build_experiment(recipe, data=options.data)
            engine = stack.enter_context(open_engine(experiment))
            runs[name] = fit(experiment.first_state(), experiment.algorithm, engine, experiment.plan)
        for number in range(options.rounds):
            for name in names if number % 2 else names[::-1]:
                before = family_seconds(os.getpid())
                next(runs[name])
                seconds[name].append(family_seconds(os.getpid()) - before)
    print(json.dumps({"seconds": {name: values[WARM_UP:] for name, values in seconds.items()}}))


if __name__ == "__main__":
    main()
