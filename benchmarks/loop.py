"""Federated averaging as somebody writes it who knows PyTorch and wants this one result: no library, no files.

python -m benchmarks.loop PREPARED.npz --threads 1

It is what whole runs are compared with, and pays for what such a program pays for: Python and torch start, the data
set's files are read, every round trains its clients and is evaluated. What the clients hold and who takes part in which
round comes from a file made by `benchmarks.whole`, so that both programs do the same work.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import problems
from benchmarks.problems import Pair, Problem, accuracy

SHOWN = 1000
"""Test samples to evaluate at a time."""


def batches(inputs: Tensor, targets: Tensor, size: int) -> Iterator[Pair]:
    """One epoch in an order of its own; the last batch may be short."""
    for at in torch.randperm(len(inputs)).split(size):
        yield inputs[at], targets[at]


def train_locally(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
    *,
    lr: float,
    momentum: float,
    batch_size: int,
    epochs: int,
    steps: int | None = None,
) -> None:
    """One client's epochs, or so many steps, by SGD."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=momentum, fused=True)
    model.train()
    rounds = itertools.count() if steps else range(epochs)
    work = itertools.chain.from_iterable(batches(inputs, targets, batch_size) for _ in rounds)
    for x, y in itertools.islice(work, steps):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


class Federation:
    """One module for all clients, and the server's weights."""

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], training: Mapping[str, Any]) -> None:
        self.model, self.loss, self.training = model, loss, training
        moving: list[Tensor] = [tensor for tensor in model.parameters() if tensor.requires_grad]
        moving += [tensor for tensor in model.buffers() if tensor.is_floating_point()]
        self.tensors = [tensor.detach() for tensor in moving]
        self.weights = [tensor.clone() for tensor in self.tensors]

    def load(self) -> None:
        """Give the module the server's weights."""
        for tensor, weight in zip(self.tensors, self.weights, strict=True):
            tensor.copy_(weight)

    def round(self, cohort: Sequence[Pair]) -> None:
        """Train every client, and average by size."""
        total = sum(len(targets) for _, targets in cohort)
        means = [torch.zeros_like(weight) for weight in self.weights]
        for inputs, targets in cohort:
            self.load()
            train_locally(self.model, self.loss, inputs, targets, **self.training)
            for mean, tensor in zip(means, self.tensors, strict=True):
                mean.add_(tensor, alpha=len(targets) / total)
        self.weights = means

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
        """Loss and accuracy."""
        self.load()
        self.model.eval()
        loss = right = 0.0
        for x, y in zip(inputs.split(SHOWN), targets.split(SHOWN), strict=True):
            outputs = self.model(x)
            loss += float(self.loss(outputs, y)) * len(y)
            right += float(accuracy(outputs, y)) * len(y)
        return loss / len(targets), right / len(targets)


def unpacked(path: str) -> bytes:
    """An idx file's bytes."""
    found = Path(path).read_bytes()
    return gzip.decompress(found) if found[:2] == b"\x1f\x8b" else found


def images(prepared: Mapping[str, Any], spec: Mapping[str, Any]) -> Problem:
    """A data set of grey images, each client's samples beside each other."""
    from fedstrata.tasks.models import MODELS  # which needs torch only

    def inputs(path: str, rows: Any = slice(None)) -> Tensor:
        pixels = np.frombuffer(unpacked(path), np.uint8, offset=16).reshape(-1, *spec["shape"])[rows]
        return torch.tensor(pixels, dtype=torch.float32).sub_(spec["mean"]).div_(spec["std"])

    def targets(path: str, rows: Any = slice(None)) -> Tensor:
        return torch.tensor(np.frombuffer(unpacked(path), np.uint8, offset=8)[rows], dtype=torch.int64)

    rows, sizes, files = prepared["rows"], prepared["sizes"].tolist(), spec["files"]
    clients = zip(inputs(files[0], rows).split(sizes), targets(files[1], rows).split(sizes), strict=True)
    options = {key: value for key, value in spec["model"].items() if key != "name"}
    return Problem(
        lambda: MODELS[spec["model"]["name"]](tuple(spec["shape"]), spec["classes"], **options),
        list(clients),
        (inputs(files[2]), targets(files[3])),
    )


def main() -> None:
    """Train, evaluate and print every round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prepared", help="made by benchmarks.whole")
    parser.add_argument("--threads", type=int, help="default: PyTorch's")
    parser.add_argument("--seed", type=int, default=0, help="of the batches")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    with np.load(options.prepared) as prepared:
        spec, cohorts = json.loads(str(prepared["spec"])), prepared["cohorts"].tolist()
        own = spec.get("function")
        problem = getattr(problems, own)(**spec["options"]) if own else images(prepared, spec)
    torch.manual_seed(spec["model_seed"])
    federation = Federation(problem.model(), problem.loss, spec["training"])
    torch.manual_seed(options.seed)
    for number, cohort in enumerate(cohorts, start=1):
        federation.round([problem.clients[client] for client in cohort])
        loss, right = federation.evaluate(*problem.test)
        print(f"round {number}/{len(cohorts)}  loss {loss:.4f}  accuracy {right:.4f}", flush=True)


if __name__ == "__main__":
    main()
