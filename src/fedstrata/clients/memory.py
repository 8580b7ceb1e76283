"""What a client has before it takes part for the first time, and what it remembers after it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedstrata.clients.training import Setup
from fedstrata.core.axes import Remembers, Work
from fedstrata.core.errors import MessageError
from fedstrata.core.memory import PRIVATE, Version
from fedstrata.core.messages import Order


@dataclass(frozen=True)
class First:
    """The first version of every client's memory, and how the next ones come about."""

    setup: Setup
    memory: Version

    @classmethod
    def of(cls, setup: Setup, model: nn.Module) -> First:
        """From the weights that a model is built with."""
        layers, memory = setup.layers, dict[str, Tensor]()
        if layers.private or isinstance(setup.objective, Remembers):
            initial = layers.whole.flatten(model)
            if isinstance(setup.objective, Remembers):
                memory |= setup.objective.memory(layers, initial)
            if layers.private:
                memory[PRIVATE] = initial[layers.numel :].clone()
        return cls(setup, memory)

    def checked(self, order: Order) -> Version:
        """The memory that an order starts from; one that is not like the first is refused."""
        if order.memory is None:
            return self.memory
        if order.client >= 0:
            _require_alike(order.memory, self.memory)
        return {**self.memory, **order.memory}

    def whole(self, order: Order, memory: Version) -> Tensor:
        """The order's model, with the client's private layers behind it."""
        assert order.model is not None
        if not self.setup.layers.private:
            return order.model
        return torch.cat([order.model, memory.get(PRIVATE, self.memory[PRIVATE])])

    def after(
        self, order: Order, memory: Version, update: Tensor, tail: Tensor, second: Tensor | None, steps: int
    ) -> tuple[Version, Version]:
        """What is remembered if no layer is sent, and if all are."""
        setup, none, every = self.setup, dict[str, Tensor](memory), dict[str, Tensor](memory)
        if isinstance(setup.objective, Remembers):
            assert order.model is not None
            training = setup.training
            work = Work(
                model=order.model,
                update=update,
                state=order.objective_state,
                layers=setup.layers,
                lr=training.learning_rate(order.round),
                steps=steps,
                reach=training.reach(steps) if setup.task.train is None else None,
                tail=tail.cpu(),
                second=None if second is None else second.cpu(),
            )
            every |= setup.objective.remember({n: v for n, v in memory.items() if n != PRIVATE}, work)
            if setup.objective.keeps_unsent:
                none = dict(every)
        if setup.layers.private:
            none[PRIVATE] = every[PRIVATE] = tail.cpu().clone()
        return none, every


def _require_alike(found: Version, first: Mapping[str, Tensor]) -> None:
    for name, value in found.items():
        if name not in first or (value.dtype, value.shape) != (first[name].dtype, first[name].shape):
            raise MessageError(f"the client's memory has {name} of {list(value.shape)}, which does not fit")
