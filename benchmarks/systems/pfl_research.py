"""Apple's pfl-research: its SimulatedBackend and FederatedAveraging, weighted by data points.

`--threads N`: one process with N torch threads. Under torchrun: one thread in each process.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

from benchmarks.workloads import Work, arguments, finish, report

RANK = int(os.environ.get("RANK", 0))
PROCESSES = int(os.environ.get("WORLD_SIZE", 1))


class Module(torch.nn.Module):
    """Our network with the two methods pfl asks for; evaluation is not timed, so `metrics` does nothing."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The network."""
        outputs: torch.Tensor = self.net(inputs)
        return outputs

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross-entropy."""
        self.train()
        return torch.nn.functional.cross_entropy(self(inputs), targets)

    def metrics(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
        """Nothing, at no cost."""
        return {"nothing": Weighted(0, 1)}


class Clock(TrainingProcessCallback):
    """Seconds from the end of one central iteration to the end of the next."""

    def on_train_begin(self, *, model: Any) -> Metrics:
        """Start."""
        self.last = time.perf_counter()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Report."""
        now = time.perf_counter()
        if RANK == 0:
            report(round=central_iteration + 1, seconds=now - self.last)
        self.last = time.perf_counter()
        return False, Metrics()


class Shuffled(PyTorchTensorDataset):
    """Another order in each epoch, as everybody else has; pfl by itself goes through a user's data in a fixed one."""

    def iter(self, batch_size: int | None) -> Iterator[list[torch.Tensor]]:
        """One epoch."""
        order = torch.randperm(len(self))
        shuffled = [tensor[order] for tensor in self.raw_data]
        for start in range(0, len(order), batch_size or len(order)):
            yield [tensor[start : start + (batch_size or len(order))] for tensor in shuffled]


def main() -> None:
    """Run the workload."""
    options = arguments("--threads")
    torch.set_num_threads(options.threads or 1)
    torch.manual_seed(options.seed)
    work = Work.load(options.workload, options.rounds, options.data)
    training = work.training

    tensors = cache(work.client)
    users = itertools.cycle(client for cohort in work.cohorts for client in cohort)
    dataset = FederatedDataset(
        make_dataset_fn=lambda client: Shuffled(tensors(client), user_id=str(client)),
        user_sampler=lambda: next(users),
        # balances the load of several processes
        user_id_to_weight=dict(enumerate(work.sizes.tolist())) if PROCESSES > 1 else None,
    )
    module = Module(work.model())
    model = PyTorchModel(
        model=module,
        local_optimizer_create=partial(torch.optim.SGD, momentum=training.momentum),
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=training.rounds,
            evaluation_frequency=training.rounds + 1,
            train_cohort_size=len(work.cohorts[0]),
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=dataset, val_data=dataset, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=training.epochs,
            local_learning_rate=training.lr,
            local_batch_size=training.batch_size,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )
    if RANK == 0:
        finish(work, module.net, options)


if __name__ == "__main__":
    main()
