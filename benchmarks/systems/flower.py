"""Flower's simulation with its own FedAvg: Ray, one core per client, as many actors as cores."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.workloads import Work, arguments, finish, report

ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": str(Path(__file__).parents[2]),  # for Ray's actors
}


def main() -> None:
    """Run the workload."""
    options = arguments()
    with tempfile.TemporaryDirectory() as home:
        os.environ.update(ENVIRONMENT, FLWR_HOME=home)
        _simulate(options)


def _simulate(options: Any) -> None:
    from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from benchmarks.systems.flower_app import app

    work = Work.load(options.workload, options.rounds, options.data)

    class Timed(FedAvg):
        """FedAvg with our cohorts. Any node can be any client: the message says whose data to use."""

        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            self.began = time.perf_counter()
            nodes = list(grid.get_node_ids())
            messages = []
            for client in work.cohorts[server_round - 1]:
                own: dict[str, Any] = {"workload": options.workload, "data": options.data or "", "client": client}
                content = RecordDict({"arrays": arrays, "config": ConfigRecord(own)})
                messages.append(Message(content, dst_node_id=nodes[client], message_type=MessageType.TRAIN))
            return messages

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            replies = list(replies)
            failed = [reply.error for reply in replies if reply.has_error()]
            if failed or len(replies) != len(work.cohorts[server_round - 1]):
                print(f"round {server_round}: {len(replies)} replies, {failed[:1]}", file=sys.stderr)
                os._exit(1)
            result = super().aggregate_train(server_round, replies)
            report(round=server_round, seconds=time.perf_counter() - self.began)
            return result

    server = ServerApp()

    @server.main()
    def run(grid: Any, context: Any) -> None:
        while len(list(grid.get_node_ids())) < len(work.sizes):
            time.sleep(0.05)
        model = work.model()
        strategy = Timed(fraction_evaluate=0.0)
        result = strategy.start(
            grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=options.rounds, timeout=600
        )
        model.load_state_dict(result.arrays.to_torch_state_dict())
        finish(work, model, options)

    resources: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0.0}
    cores = len(os.sched_getaffinity(0))
    run_simulation(
        server_app=server,
        client_app=app,
        num_supernodes=len(work.sizes),
        backend_config={"client_resources": resources, "init_args": {"num_cpus": cores, "include_dashboard": False}},
    )


if __name__ == "__main__":
    main()
