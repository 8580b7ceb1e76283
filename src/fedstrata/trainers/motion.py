"""How the rows of a stack, one client's weights each, move: by SGD or Adam, and under springs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from fedstrata.algorithm import Objective
from fedstrata.layers import Entry, Layers
from fedstrata.messages import Order

if TYPE_CHECKING:
    from fedstrata.client import Setup


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

    def buffers(self, step: int) -> tuple[Tensor, Tensor]:
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
        self.rows = start.expand(len(springs.orders), -1).clone()
        self.gradients = torch.zeros_like(self.rows)
        self.keep, self.lr, self.decay = training.momentum, training.learning_rate(round), training.weight_decay
        self.adam = training.optimizer == "adam"
        if self.adam:
            self.first, self.second, self.count = torch.zeros_like(self.rows), torch.zeros_like(self.rows), 0
        self.active: dict[int, tuple[Tensor, Tensor]] = {}

    def buffers(self, step: int) -> tuple[Tensor, Tensor]:
        """Always the same ones."""
        return self.rows, self.gradients

    def refresh(self, step: int, which: Iterable[int]) -> None:
        """Compute some clients' stiffness."""
        for row in which:
            self.springs.refresh(row, self.rows[row])

    def step(self, step: int, active: int) -> None:
        """Pull, and follow the gradients."""
        if active not in self.active:
            self.active[active] = self.rows[:active], self.gradients[:active]
        rows, gradients = self.active[active]
        if self.springs.stiffness:
            self._pull(rows, gradients)
        if self.decay:
            gradients.add_(rows, alpha=self.decay)
        if not self.adam:
            rows.add_(gradients, alpha=-self.lr)
            return
        self.count += 1
        first, second = self.first[:active], self.second[:active]
        first.lerp_(gradients, 1 - 0.9)
        second.mul_(0.999).addcmul_(gradients, gradients, value=1 - 0.999)
        scale = (second / (1 - 0.999**self.count)).sqrt_().add_(1e-8)
        rows.addcdiv_(first, scale, value=-self.lr / (1 - 0.9**self.count))

    def _pull(self, rows: Tensor, gradients: Tensor) -> None:
        for entry in self.springs.entries:
            if entry.name in self.springs.stiffness:
                moved = entry.of(rows) - self.springs.anchors[entry.name]
                entry.of(gradients).addcmul_(moved, self.springs.shaped(entry, len(rows)))

    def update(self, row: int, steps: int) -> Tensor:
        """How far a client has come."""
        return self.rows[row] - self.start


class OnDisplacements:
    """SGD under springs, in as many passes over memory as without them.

    With the velocity V = (D⁻ − D)/η written as the difference of two positions, V ← β V + g + c D and D ← D − η V are

        D⁺ = (1 + β − ηc) D − β D⁻ − ηg,

    and D⁺ takes the place of D⁻, with which the gradient is merged.
    """

    def __init__(self, setup: Setup, round: int, springs: Springs) -> None:
        training = setup.training
        self.springs, self.anchor = springs, springs.anchor
        self.positions = springs.anchor.new_zeros(2, len(springs.orders), len(springs.anchor))
        # Rounded so that 1 + β is a number of this type, too: (1 + β) − β must be 1, or there would be a spring.
        beta = float(springs.anchor.new_tensor(1 + training.momentum)) - 1
        self.lr, self.decay = training.learning_rate(round), training.weight_decay
        self.carry, self.keep, self.share = 1 + beta, -beta, -self.lr
        self.moves: dict[tuple[int, int], list[tuple[Tensor, Tensor, float | Tensor]]] = {}

    def buffers(self, step: int) -> tuple[Tensor, Tensor]:
        """D, and the place of D⁻."""
        return self.positions[step % 2], self.positions[1 - step % 2]

    def refresh(self, step: int, which: Iterable[int]) -> None:
        """Compute some clients' stiffness."""
        self.moves.clear()
        for row in which:
            self.springs.refresh(row, self.anchor + self.positions[step % 2, row])

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
            self.positions[1 - step % 2, :active].add_(self.anchor, alpha=-self.lr * self.decay)

    def _moves(self, step: int, active: int) -> list[tuple[Tensor, Tensor, float | Tensor]]:
        """D⁺, D and 1 + β − ηc: for each tensor, or for neighbours together whose stiffness is the same number."""
        now, new = (rows[:active] for rows in self.buffers(step))
        moves: list[tuple[Tensor, Tensor, float | Tensor]] = []
        for c, group in groupby(self.springs.entries, key=lambda entry: self.springs.number(entry, active)):
            entries = list(group)
            if c is not None:
                stretch = np.s_[:, entries[0].start : entries[-1].stop]
                moves.append((new[stretch], now[stretch], self.carry - self.lr * (c + self.decay)))
                continue
            for entry in entries:
                factor = self.carry - self.lr * (self.springs.shaped(entry, active) + self.decay)
                moves.append((entry.of(new), entry.of(now), factor))
        return moves

    def update(self, row: int, steps: int) -> Tensor:
        """D after that many steps."""
        return self.positions[steps % 2, row]
