"""The loop that whole runs are compared with, by the round: one process, one client after the other."""

from __future__ import annotations

import time

import torch

from benchmarks.loop import Federation
from benchmarks.workloads import Work, arguments, finish, report


def main() -> None:
    """Run the workload."""
    options = arguments("--threads")
    torch.set_num_threads(options.threads or torch.get_num_threads())
    torch.manual_seed(options.seed)
    work = Work.load(options.workload, options.rounds, options.data)
    clients = {client: work.client(client) for cohort in work.cohorts for client in cohort}
    federation = Federation(work.model(), work.loss, work.local)
    for number, cohort in enumerate(work.cohorts, start=1):
        start = time.perf_counter()
        federation.round([clients[client] for client in cohort])
        report(round=number, seconds=time.perf_counter() - start)
    federation.load()
    finish(work, federation.model, options)


if __name__ == "__main__":
    main()
