"""The loop anybody would write: one process, PyTorch's default threads, one client after the other."""

from __future__ import annotations

import time

import torch

from benchmarks.workloads import Work, arguments, finish, report, train_locally


def main() -> None:
    """Run the workload."""
    options = arguments()
    torch.manual_seed(options.seed)
    work = Work.load(options.workload, options.rounds, options.data)
    model = work.model()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    for number, cohort in enumerate(work.cohorts, start=1):
        start = time.perf_counter()
        total = sum(work.sizes[client] for client in cohort)
        mean = {name: torch.zeros_like(value) for name, value in weights.items() if value.is_floating_point()}
        for client in cohort:
            model.load_state_dict(weights)
            train_locally(model, *work.client(client), work.training)
            state = model.state_dict()
            for name, value in mean.items():
                value.add_(state[name], alpha=float(work.sizes[client] / total))
        weights.update(mean)
        report(round=number, seconds=time.perf_counter() - start)
    model.load_state_dict(weights)
    finish(work, model, options)


if __name__ == "__main__":
    main()
