"""What comes out in plain PyTorch: FedAvg with a new module for every order.

Before every order a client's model is exactly what the factory builds plus the values that travel; after it, those are
read from the module by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import default_collate

from fedstrata.clients.local import draw_schedule
from fedstrata.core import rng
from fedstrata.core.messages import Order
from fedstrata.recipes.schema import Training
from tests.support.zoo.animals import Animal

SEED = 5
ROUNDS = 2
TRAINING = {"rounds": ROUNDS, "batch_size": 4, "lr": 0.1, "momentum": 0.5, "weight_decay": 0.01}
Values = dict[str, Tensor]


@dataclass
class Expected:
    """After the last round: what travels, the mean loss while training, and the loss on the test set."""

    first: Values
    values: Values
    train_loss: float
    test_loss: float


def plain(animal: Animal) -> Expected:
    """FedAvg, as slowly as one likes."""
    training = Training(**TRAINING | dict(animal.training))
    clients, dtype = animal.clients(), getattr(torch, animal.dtype)
    sizes = [len(data[1] if isinstance(data, tuple) else data) for data in clients]
    built = build(animal, dtype)
    names = [name for name, parameter in built.named_parameters() if parameter.requires_grad]
    kept = built.state_dict()
    names += [name for name, buffer in built.named_buffers() if buffer.is_floating_point() and name in kept]
    first = values = read(built, names)
    for number in range(1, training.rounds + 1):
        trained: list[Values] = []
        losses = []
        for client, data in enumerate(clients):
            model = load_values(build(animal, dtype), values)
            order = Order("train", number, 0, client, work=training.local.full_work)
            with rng.global_scope(SEED, "train", round=number, client=client):
                plan = draw_schedule(sizes[client], order, training.local, SEED)
                losses.append(train(animal, model, data, [plan.batch(at) for at in range(len(plan))], training, dtype))
            trained.append(read(model, names))
        shares = [size / sum(sizes) for size in sizes]
        values = {name: sum(s * v[name] for s, v in zip(shares, trained, strict=True)) for name in names}  # type: ignore[misc]
    model = load_values(build(animal, dtype), values).eval()
    with torch.no_grad(), rng.global_scope(SEED, "evaluate", round=training.rounds):
        inputs, targets = gather(clients[-1], np.arange(sizes[-1]), dtype)
        test_loss = float(animal.loss(model(inputs), targets))
    train_loss = sum(share * loss for share, loss in zip(shares, losses, strict=True))
    return Expected(first, values, train_loss, test_loss)


def build(animal: Animal, dtype: torch.dtype) -> nn.Module:
    with rng.global_scope(SEED, "model"):
        model = animal.model()
    return model if dtype == torch.float32 else model.to(dtype)  # float32 is what torch builds, if not told otherwise


def train(
    animal: Animal, model: nn.Module, data: Any, batches: list[np.ndarray], training: Training, dtype: torch.dtype
) -> float:
    """One client's round; the mean loss over its samples."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if training.optimizer == "adam":
        optimizer: Any = torch.optim.Adam(parameters, lr=training.lr, weight_decay=training.weight_decay)
    else:
        optimizer = torch.optim.SGD(
            parameters, lr=training.lr, momentum=training.momentum, weight_decay=training.weight_decay
        )
    model.train()
    total = 0.0
    for indices in batches:
        inputs, targets = gather(data, indices, dtype)
        optimizer.zero_grad()
        loss = animal.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += float(loss.detach()) * len(indices)
    return total / sum(map(len, batches))


def gather(data: Any, indices: np.ndarray, dtype: torch.dtype) -> tuple[Any, Any]:
    """Inputs and targets at some positions, floating-point numbers in the run's dtype."""
    if isinstance(data, tuple):
        at, (inputs, targets) = torch.from_numpy(indices), data
        inputs = {key: part[at] for key, part in inputs.items()} if isinstance(inputs, dict) else inputs[at]
        targets = targets[at]
    elif hasattr(data, "batch"):
        inputs, targets = data.batch(indices)
    else:
        inputs, targets = default_collate([data[i] for i in indices.tolist()])
    return cast(inputs, dtype), cast(targets, dtype)


def cast(part: Any, dtype: torch.dtype) -> Any:
    if isinstance(part, Tensor):
        return part.to(dtype) if part.is_floating_point() else part
    if isinstance(part, PackedSequence):
        return part.to(dtype)
    if isinstance(part, dict):
        return {key: cast(inner, dtype) for key, inner in part.items()}
    return type(part)(*(cast(inner, dtype) for inner in part))  # a namedtuple


def read(model: nn.Module, names: Sequence[str]) -> Values:
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: found[name].detach().clone() for name in names}


def load_values(model: nn.Module, values: Values) -> nn.Module:
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, value in values.items():
            found[name].copy_(value)
    return model
