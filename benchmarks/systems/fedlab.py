"""FedLab's standalone pipeline: one process, `--threads N`."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock

import torch

if find_spec("torchvision") is None:  # FedLab imports it for data sets of its own, which are not used here
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms"):
        sys.modules[name] = MagicMock()

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline
from fedlab.utils import Aggregators, SerializationTool

from benchmarks.loop import batches
from benchmarks.workloads import Work, arguments, finish, report


@dataclass(frozen=True)
class Batches:
    """One client's, in another order whenever they are gone through; quicker than a DataLoader."""

    inputs: torch.Tensor
    targets: torch.Tensor
    size: int

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return batches(self.inputs, self.targets, self.size)


class Data:
    """What FedLab asks of a data set."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def get_dataloader(self, client: int, batch_size: int) -> Batches:
        """A client's batches."""
        return Batches(*self.work.client(client), batch_size)


class Trainer(SGDSerialClientTrainer):
    """FedLab's trainer, with momentum, a fresh optimiser for each client, and the size as part of the upload."""

    def train(self, model_parameters: Any, train_loader: Batches) -> list[torch.Tensor]:
        """One client."""
        self.optimizer = torch.optim.SGD(self.model.parameters(), self.lr, momentum=self.momentum)
        upload = super().train(model_parameters, train_loader)
        return [*upload, torch.tensor(float(len(train_loader.inputs)))]


class Server(SyncServerHandler):
    """FedLab's server, with our cohorts and weighting by size."""

    cohorts: list[list[int]]

    @property
    def num_clients_per_round(self) -> int:
        """K."""
        return len(self.cohorts[0])

    def sample_clients(self) -> list[int]:
        """This round's clients."""
        return self.cohorts[self.round]

    def global_update(self, buffer: Any) -> None:
        """Average by size."""
        parameters, sizes = zip(*buffer, strict=True)
        mean = Aggregators.fedavg_aggregate(list(parameters), torch.stack(sizes))
        SerializationTool.deserialize_model(self._model, mean)


class Pipeline(StandalonePipeline):
    """FedLab's pipeline, with a clock where it would evaluate."""

    def main(self) -> None:
        """Run."""
        self.last = time.perf_counter()
        super().main()

    def evaluate(self) -> None:
        """Report."""
        report(round=self.handler.round, seconds=time.perf_counter() - self.last)
        self.last = time.perf_counter()


def main() -> None:
    """Run the workload."""
    options = arguments("--threads")
    logging.disable()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    torch.manual_seed(options.seed)
    work = Work.load(options.workload, options.rounds, options.data)
    training = work.training
    trainer = Trainer(work.model(), len(work.sizes))
    trainer.setup_dataset(Data(work))
    trainer.setup_optim(training.epochs, training.batch_size, training.lr)
    trainer.momentum = training.momentum
    server = Server(work.model(), training.rounds, sample_ratio=0.0)
    server.cohorts = work.cohorts
    Pipeline(server, trainer).main()
    finish(work, server.model, options)


if __name__ == "__main__":
    main()
