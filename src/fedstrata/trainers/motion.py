"""How the rows of a stack, one client's weights each, move: by SGD or Adam, and under springs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fedstrata.algorithm import Objective
from fedstrata.layers import Entry, Layers
from fedstrata.messages import Order

if TYPE_CHECKING:
    from fedstrata.client import Setup


class Rows:
    """S clients' weights, tensor after tensor: the first tensor of all clients, then the second, each as [S, …].

    So every tensor is contiguous for the first few clients, too, as batched products want it.
    """

    def __init__(self, layers: Layers, start: Tensor, clients: int) -> None:
        self.entries = [entry for layer in layers.layers for entry in layer.entries]
        self.clients, self.numbers = clients, start.new_empty(clients * len(start))
        for entry in self.entries:
            self.of(entry, clients).copy_(entry.of(start))

    def of(self, entry: Entry, active: int) -> Tensor:
        """A tensor of the first clients, [active, …]."""
        return entry.shaped(self.stretch([entry], active).view(active, -1))

    def stretch(self, entries: Sequence[Entry], active: int) -> Tensor:
        """The numbers of neighbouring tensors; of one tensor, if not all clients are active."""
        first = self.clients * entries[0].start
        return self.numbers[first : first + active * (entries[-1].stop - entries[0].start)]

    def stretches(self, active: int) -> list[Tensor]:
        """All numbers of the first clients, in as few pieces as possible."""
        if active == self.clients:
            return [self.numbers]
        return [self.stretch([entry], active) for entry in self.entries]

    def flat(self, row: int) -> Tensor:
        """One client's weights."""
        return torch.cat([entry.flatten(self.of(entry, self.clients)[row]) for entry in self.entries])


class Springs:
    """The stiffness of each tensor and client, as [S, …]."""

    def __init__(self, objective: Objective, orders: Sequence[Order], layers: Layers, anchor: Tensor) -> None:
        self.objective, self.orders, self.layers, self.anchor = objective, orders, layers, anchor
        self.entries = [entry for layer in layers.layers for entry in layer.entries]
        self.anchors = layers.views(anchor, trainable_only=True)
        self.stiffness: dict[str, Tensor] = {}

    def refresh(self, row: int, local: Tensor) -> None:
        """Compute one client's stiffness."""
        views = self.layers.views(local, trainable_only=True)
        fresh = self.objective.stiffness(views, self.anchors, self.orders[row].objective_state, self.layers)
        for name in self.stiffness.keys() - fresh.keys():
            self.stiffness[name][row] = 0
        for name, c in fresh.items():
            if name not in self.stiffness:
                self.stiffness[name] = c.new_zeros(len(self.orders), *c.shape)
            self.stiffness[name][row] = c

    def of(self, row: int) -> dict[str, Tensor]:
        """One client's stiffness."""
        return {name: c[row] for name, c in self.stiffness.items()}

    def number(self, entry: Entry, active: int) -> float | None:
        """A tensor's stiffness for the first clients, if that is one number."""
        c = self.stiffness.get(entry.name)
        if c is None:
            return 0.0
        return float(c[0]) if c.ndim == 1 and bool((c[:active] == c[0]).all()) else None

    def shaped(self, entry: Entry, active: int) -> Tensor:
        """A tensor's stiffness for the first clients, to broadcast."""
        c = self.stiffness[entry.name][:active]
        return c.view(active, *[1] * (len(entry.shape) - c.ndim + 1), *c.shape[1:])


class Motion(Protocol):
    """Where the rows are, and how they move; a step's gradients are merged with those before it."""

    @property
    def anchor(self) -> Tensor | None:
        """What the rows are displacements from; None, if they are weights."""
        ...

    @property
    def keep(self) -> float:
        """What the last step's gradients are multiplied by."""
        ...

    @property
    def share(self) -> float:
        """What this step's gradient is multiplied by."""
        ...

    def buffers(self, step: int) -> tuple[Rows, Rows]:
        """The rows before this step, and where its gradients are merged."""
        ...

    def refresh(self, step: int, which: Iterable[int]) -> None:
        """Compute some clients' stiffness."""
        ...

    def step(self, step: int, active: int) -> None:
        """Move the first rows."""
        ...

    def update(self, row: int, steps: int) -> Tensor:
        """How far a client has come in its steps."""
        ...


class OnWeights:
    """SGD or Adam as they are written, on weights; a spring's pull is added to the gradient."""

    anchor = None
    share = 1.0

    def __init__(self, setup: Setup, round: int, springs: Springs) -> None:
        training, start = setup.training, springs.anchor
        self.springs, self.start = springs, start

        def rows(value: Tensor) -> Rows:
            return Rows(setup.layers, value, len(springs.orders))

        self.rows, self.gradients = rows(start), rows(torch.zeros_like(start))
        self.keep, self.lr, self.decay = training.momentum, training.learning_rate(round), training.weight_decay
        self.moments: tuple[Rows, ...] = ()
        if training.optimizer == "adam":
            self.moments = rows(torch.zeros_like(start)), rows(torch.zeros_like(start))
        self.count = 0
        self.active: dict[int, list[tuple[Tensor, ...]]] = {}

    def buffers(self, step: int) -> tuple[Rows, Rows]:
        """Always the same ones."""
        return self.rows, self.gradients

    def refresh(self, step: int, which: Iterable[int]) -> None:
        """Compute some clients' stiffness."""
        for row in which:
            self.springs.refresh(row, self.rows.flat(row))

    def step(self, step: int, active: int) -> None:
        """Pull, and follow the gradients."""
        if active not in self.active:
            parts = (rows.stretches(active) for rows in (self.rows, self.gradients, *self.moments))
            self.active[active] = list(zip(*parts, strict=True))
        if self.springs.stiffness:
            self._pull(active)
        self.count += 1
        for weights, gradients, *moments in self.active[active]:
            if self.decay:
                gradients.add_(weights, alpha=self.decay)
            if not moments:
                weights.add_(gradients, alpha=-self.lr)
                continue
            first, second = moments
            first.lerp_(gradients, 1 - 0.9)
            second.mul_(0.999).addcmul_(gradients, gradients, value=1 - 0.999)
            scale = (second / (1 - 0.999**self.count)).sqrt_().add_(1e-8)
            weights.addcdiv_(first, scale, value=-self.lr / (1 - 0.9**self.count))

    def _pull(self, active: int) -> None:
        for entry in self.springs.entries:
            if entry.name in self.springs.stiffness:
                moved = self.rows.of(entry, active) - self.springs.anchors[entry.name]
                self.gradients.of(entry, active).addcmul_(moved, self.springs.shaped(entry, active))

    def update(self, row: int, steps: int) -> Tensor:
        """How far a client has come."""
        return self.rows.flat(row) - self.start


class OnDisplacements:
    """SGD under springs, in as many passes over memory as without them.

    With the velocity V = (D⁻ − D)/η written as the difference of two positions, V ← β V + g + c D and D ← D − η V are

        D⁺ = (1 + β − ηc) D − β D⁻ − ηg,

    and D⁺ takes the place of D⁻, with which the gradient is merged.
    """

    def __init__(self, setup: Setup, round: int, springs: Springs) -> None:
        training = setup.training
        self.springs, self.anchor = springs, springs.anchor
        nowhere = torch.zeros_like(springs.anchor)
        self.positions = [Rows(setup.layers, nowhere, len(springs.orders)) for _ in range(2)]
        # Rounded so that 1 + β is a number of this type, too: (1 + β) − β must be 1, or there would be a spring.
        beta = float(springs.anchor.new_tensor(1 + training.momentum)) - 1
        self.lr, self.decay = training.learning_rate(round), training.weight_decay
        self.carry, self.keep, self.share = 1 + beta, -beta, -self.lr
        self.moves: dict[tuple[int, int], list[tuple[Tensor, Tensor, float | Tensor]]] = {}

    def buffers(self, step: int) -> tuple[Rows, Rows]:
        """D, and the place of D⁻."""
        return self.positions[step % 2], self.positions[1 - step % 2]

    def refresh(self, step: int, which: Iterable[int]) -> None:
        """Compute some clients' stiffness."""
        self.moves.clear()
        for row in which:
            self.springs.refresh(row, self.anchor + self.positions[step % 2].flat(row))

    def step(self, step: int, active: int) -> None:
        """D⁺, of which the gradients' place has −β D⁻ − ηg already."""
        key = (step % 2, active)
        if key not in self.moves:
            self.moves[key] = self._moves(step, active)
        for new, now, factor in self.moves[key]:
            if isinstance(factor, float):
                new.add_(now, alpha=factor)
            else:
                new.addcmul_(now, factor)
        if self.decay:
            for entry in self.springs.entries:
                new = self.positions[1 - step % 2].of(entry, active)
                new.add_(self.springs.anchors[entry.name], alpha=-self.lr * self.decay)

    def _moves(self, step: int, active: int) -> list[tuple[Tensor, Tensor, float | Tensor]]:
        """D⁺, D and 1 + β − ηc: for each tensor, or for neighbours together whose stiffness is the same number."""
        now, new = self.buffers(step)
        moves: list[tuple[Tensor, Tensor, float | Tensor]] = []

        def stiffness(entry: Entry) -> float | str:
            c = self.springs.number(entry, active)
            return entry.name if c is None or active < new.clients else c

        for _, group in groupby(self.springs.entries, key=stiffness):
            entries = list(group)
            c = self.springs.number(entries[0], active)
            if c is not None:
                here, there = (rows.stretch(entries, active) for rows in (now, new))
                moves.append((there, here, self.carry - self.lr * (c + self.decay)))
            else:
                here, there = (rows.of(entries[0], active) for rows in (now, new))
                factor = self.carry - self.lr * (self.springs.shaped(entries[0], active) + self.decay)
                moves.append((there, here, factor))
        return moves

    def update(self, row: int, steps: int) -> Tensor:
        """D after that many steps."""
        return self.positions[steps % 2].flat(row)
