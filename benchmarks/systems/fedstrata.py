"""fedstrata itself, as a recipe runs it, with the settings that `--set` gives."""

from __future__ import annotations

import time

import torch

from benchmarks.workloads import Work, arguments, finish, report
from fedstrata.core.fit import fit
from fedstrata.runs.engine import open_engine


def main() -> None:
    """Run the workload."""
    options = arguments("--threads")
    torch.set_num_threads(options.threads or torch.get_num_threads())
    work = Work.load(options.workload, options.rounds, options.data, tuple(options.set))
    experiment = work.experiment
    state = experiment.first_state()
    with open_engine(experiment) as engine:
        rounds = fit(state, experiment.algorithm, engine, experiment.plan)
        for number in range(1, options.rounds + 1):
            start = time.perf_counter()
            state, _ = next(rounds)
            report(round=number, seconds=time.perf_counter() - start)
    model = work.model()
    model.load_state_dict(experiment.layers.views(state.model), strict=False)
    finish(work, model, options)


if __name__ == "__main__":
    main()
