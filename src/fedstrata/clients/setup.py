"""What a client knows before its first order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedstrata.clients.modules import is_writable
from fedstrata.core import rng
from fedstrata.core.axes import Objective, Selection
from fedstrata.core.layers import Layers
from fedstrata.core.training import LocalTraining
from fedstrata.tasks.nests import moved
from fedstrata.tasks.task import Task


@dataclass(frozen=True)
class Setup:
    """It is configured on the client's own side and never sent."""

    task: Task
    layers: Layers
    objective: Objective
    selection: Selection
    training: LocalTraining
    seed: int
    build: Callable[[], nn.Module]
    """Builds a model; its frozen parameters and all else that does not travel are part of the setup."""
    device: str = "cpu"
    record: bool = True
    evaluation_batch: int | None = None

    def to_device(self, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        """Inputs and targets where the model is, floating-point ones in its dtype."""
        dtype, device = self.layers.dtype, torch.device(self.device)
        return moved(batch[0], device, dtype), moved(batch[1], device, dtype)


def build_model(task: Task, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A fresh model, the same for everyone with this seed; single and double precision become `dtype`."""
    with rng.global_scope(seed, "model"):
        model = task.model()
    for tensor in (*model.parameters(), *model.buffers()):
        if is_lazy(tensor):
            continue
        if tensor.dtype in (torch.float32, torch.float64):
            tensor.data = tensor.data.to(dtype)
        if not is_writable(tensor):
            tensor.data = tensor.data.contiguous()
    return model
