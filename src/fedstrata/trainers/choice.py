"""Which trainer computes a run: by a rule on the model and its shapes, never by timing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from fedstrata.algorithm import Objective
from fedstrata.layers import Layers
from fedstrata.tasks.task import Task
from fedstrata.trainers.mlp import as_perceptron
from fedstrata.trainers.stack import obstacle, stack_size

TrainerName = Literal["client", "stack"]


@dataclass(frozen=True)
class Choice:
    """A trainer, how many clients it takes together, and why it was chosen."""

    trainer: TrainerName
    stack_size: int
    why: str


def choose(
    asked: Literal["auto", "client", "stack"],
    size: int | None,
    *,
    task: Task,
    model: nn.Module,
    layers: Layers,
    objective: Objective,
    device: str,
) -> Choice:
    """`auto` stacks plain perceptrons and leaves everything else to `client`; what cannot be stacked falls back."""
    if asked == "client":
        return Choice("client", 1, "as asked")
    problem = obstacle(model, objective, device)
    if problem is not None:
        return Choice("client", 1, f"clients cannot be stacked: {problem}")
    if asked == "stack":
        return Choice("stack", size or stack_size(layers), "as asked")
    if as_perceptron(model, layers, task.loss) is None:
        return Choice("client", 1, "only plain perceptrons gain from being stacked")
    return Choice("stack", size or stack_size(layers), "a plain perceptron under cross-entropy")
