"""fedstrata itself, as a recipe runs it, with the settings that `--set` gives."""

from __future__ import annotations

import time

import torch

from benchmarks.workloads import Work, arguments, finish, report
from fedstrata.rounds import fit


def main() -> None:
    """Run the workload."""
    options = arguments("--threads")
    torch.set_num_threads(options.threads or torch.get_num_threads())
    work = Work.load(options.workload, options.rounds, options.data, tuple(options.set))
    prepared = work.prepared
    state = prepared.first_state()
    with prepared.engine() as engine:
        rounds = fit(state, prepared.algorithm, engine, prepared.plan)
        for number in range(1, options.rounds + 1):
            start = time.perf_counter()
            state, _ = next(rounds)
            report(round=number, seconds=time.perf_counter() - start)
    model = work.model()
    model.load_state_dict(prepared.layers.views(state.model), strict=False)
    finish(work, model, options)


if __name__ == "__main__":
    main()
