"""`Local`: what a training loop is told of an order, and what it tells of itself. There is one for every loop.

Our own loop (training.py), somebody's `train(model, data, local)`, a Trainer's callbacks, and a Flower app written
without us all ask it for batches, let it add the proximal term, and log to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstrata.core import rng
from fedstrata.core.axes import MovesSome, Objective, Remembers, State, Tensors
from fedstrata.core.layers import Layers
from fedstrata.core.messages import Order
from fedstrata.core.training import LocalTraining
from fedstrata.tasks.task import Data


@dataclass(frozen=True)
class Schedule:
    """A client's batches: positions among its samples, int64 [steps, B], with −1 where a batch is shorter than B."""

    positions: np.ndarray
    steps_per_epoch: int

    def __len__(self) -> int:
        return len(self.positions)

    def batch(self, step: int) -> np.ndarray:
        """The positions of one step's samples."""
        row: np.ndarray = self.positions[step]
        return row[row >= 0]

    def first(self, steps: int) -> Schedule:
        """Its beginning."""
        return replace(self, positions=self.positions[:steps])

    def opens_epoch(self, step: int) -> bool:
        """Whether an epoch begins with this step."""
        return step % self.steps_per_epoch == 0


def draw_schedule(samples: int, order: Order, training: LocalTraining, seed: int) -> Schedule:
    """`work` epochs, each in an order of its own, or as many of them as hold `work` steps."""
    generator = rng.generator(seed, "batches", round=order.round, attempt=order.attempt, client=order.client)
    size = min(training.batch_size, max(1, samples))
    per_epoch = -(-samples // size)
    steps = order.work * per_epoch if training.steps is None else order.work
    epochs = np.full((-(-steps // max(1, per_epoch)), per_epoch * size), -1, dtype=np.int64)
    for epoch in epochs:
        epoch[:samples] = generator.permutation(samples)
    return Schedule(epochs.reshape(-1, size)[:steps], max(1, per_epoch))


def is_due(objective: Objective, first_of_epoch: bool, *, first_of_round: bool) -> bool:
    """Whether the stiffness is to be computed anew before this step."""
    return objective.refresh == "step" or first_of_round or (objective.refresh == "epoch" and first_of_epoch)


def _adds_to_gradients(objective: Objective) -> bool:
    """Whether there is more to a step than the task loss: a proximal term, or a force."""
    kind = type(objective)
    has_force = isinstance(objective, Remembers) and getattr(kind, "force", None) is not Remembers.force
    return has_force or getattr(kind, "stiffness", None) is not Objective.stiffness


class ProximalTerm:
    """The proximal term of one client's round. Tensors whose names are in `free` are looked at, and not pulled."""

    def __init__(
        self,
        objective: Objective,
        state: State,
        layers: Layers,
        local: Mapping[str, Tensor],
        anchor: Tensors,
        free: Collection[str] = (),
        force: Tensor | None = None,
    ) -> None:
        self.objective, self.state, self.layers, self.local, self.anchor = objective, state, layers, local, anchor
        self.stiffness: Tensors = {}
        self._free, self.force = free, force

    def refresh(self) -> None:
        """Compute the stiffness; unless it is differentiable, it is a constant for the gradient."""
        through = self.objective.differentiable
        local = self.local if through else {name: w.detach() for name, w in self.local.items()}
        self.stiffness = self.objective.stiffness(local, self.anchor, self.state, self.layers)
        if self._free:
            self.stiffness = {name: c for name, c in self.stiffness.items() if name not in self._free}

    def follow(self) -> None:
        """Put the anchor where the weights are: a Trainer may have moved them."""
        self.anchor = {**self.anchor, **{name: self.anchor[name].to(w) for name, w in self.local.items()}}

    def energy(self) -> Tensor | float:
        """The value, for an objective whose gradient flows through c."""
        return sum(
            ((c * (self.local[name] - self.anchor[name]).square()).sum() / 2 for name, c in self.stiffness.items()), 0.0
        )

    @torch.no_grad()
    def pull(self) -> None:
        """Add c (w − a) to the gradients; a tensor without stiffness is left alone, so no term *is* plain."""
        for name, c in self.stiffness.items():
            w = self.local[name]
            if not w.requires_grad:
                continue  # frozen by the model itself while it trains
            force = c * (w - self.anchor[name])
            w.grad = force if w.grad is None else w.grad.add_(force)

    @torch.no_grad()
    def push(self) -> None:
        """Add the constant force b to the gradients."""
        for name, b in self._forces().items():
            w = self.local[name]
            if w.requires_grad:
                w.grad = b.clone() if w.grad is None else w.grad.add_(b)

    def work(self) -> Tensor | float:
        """⟨b, w⟩, whose gradient is the force."""
        return sum(((b * self.local[name]).sum() for name, b in self._forces().items()), 0.0)

    def _forces(self) -> Tensors:
        return {} if self.force is None else self.layers.views(self.force, trainable_only=True)


def mean_per_layer(stiffness: Tensors, layers: Layers) -> Tensor:
    """The mean of c over each layer's trainable numbers, float64 [L]."""
    means = torch.zeros(len(layers), dtype=torch.float64)
    if not stiffness:
        return means
    for at, layer in enumerate(layers.layers):
        for entry in layer.entries:
            if entry.name in stiffness:
                means[at] += float(stiffness[entry.name].detach().double().mean()) * (entry.stop - entry.start)
        means[at] /= max(1, layer.trainable_stop - layer.start)
    return means


class Local:
    """One client's round, as a training loop sees it: what it is told, and how it tells what it did.

    def train(model, data, local):
        optimizer = torch.optim.AdamW(model.parameters(), lr=local.lr)
        for x, y in local.batches():
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            local.pull()
            optimizer.step()
            local.log(loss=loss)

    `lr` is the learning rate of this `round`. `epochs` or `steps` is how much to do, the other one None; a straggler is
    asked for less. `batch_size` and `device` are the recipe's.
    """

    def __init__(
        self,
        order: Order,
        training: LocalTraining,
        term: ProximalTerm,
        weights: Mapping[str, Tensor] | None = None,
        *,
        seed: int = 0,
        device: str | torch.device = "cpu",
        data: Data | None = None,
        schedule: Schedule | None = None,
        place: Callable[[tuple[Any, Any]], tuple[Any, Any]] = lambda batch: batch,
    ) -> None:
        """`schedule` has the batches of `data`, and `place` puts them where the model is."""
        self.round, self.lr, self.batch_size = order.round, training.learning_rate(order.round), training.batch_size
        self.device = torch.device(device)
        work = order.work
        if schedule is not None:  # a rehearsal has only the beginning of one
            work = -(-len(schedule) // schedule.steps_per_epoch) if training.steps is None else len(schedule)
        self.epochs = work if training.steps is None else None
        self.steps = work if training.steps is not None else None
        self.term, self._weights = term, term.local if weights is None else weights
        self._order, self._seed, self._data, self._schedule, self._place = order, seed, data, schedule, place
        self._logged: dict[str, tuple[float, float]] = {}  # sums, and what they are divided by
        self._weight = 1  # of what is logged: the samples of the batch at hand
        self._batches = self._pulls = self._epochs = 0
        self._epoch_begins = self._is_open = self._has_begun = self._in_loss = False

    @cached_property
    def generator(self) -> torch.Generator:
        """Seeded for this client and round, for a DataLoader that shuffles."""
        order = self._order
        draw = rng.generator(self._seed, "loop", round=order.round, attempt=order.attempt, client=order.client)
        return torch.Generator().manual_seed(int(draw.integers(2**63)))

    @property
    def steps_taken(self) -> int:
        """How many steps the loop has told of: by `pull`, or `penalty`, or else by the batches that it took."""
        return self._pulls or self._batches

    @property
    def pulls(self) -> int:
        """In how many steps the proximal term was there."""
        return self._pulls

    @property
    def metrics(self) -> dict[str, float]:
        """What was logged, by name: the means, in which a batch counts by its samples."""
        return {name: total / max(1, seen) for name, (total, seen) in self._logged.items()}

    # --- what a loop calls ------------------------------------------------------------------------------------------

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """All batches of the order, epoch after epoch: the same ones as in the recipe's own training."""
        if self._schedule is None or self._data is None:
            raise RuntimeError("local.batches(): no data was given")
        if self._batches:
            raise RuntimeError("local.batches() has all epochs in it: loop over it once")
        return self._each_batch(self._schedule, self._data)

    def epoch(self) -> None:
        """An epoch begins: for loops that are not over `batches()`."""
        if self.term.layers.trains_private and isinstance(self.term.objective, MovesSome):
            moving = self.term.objective.moves(self._epochs)
            for name, weight in self._weights.items():  # what has no gradient does not move
                weight.requires_grad_(moving == "all" or (moving == "shared") == (name in self.term.layers.entries))
        self._epoch_begins = True
        self._epochs += 1

    def pull(self) -> None:
        """Add the gradient of the proximal term to the gradients: after `backward()`, before the optimizer's step.

        Gradients that are scaled (mixed precision) are to be unscaled first. Without a proximal term nothing is added.
        """
        self._must_not_be_twice(in_loss=False)
        with torch.enable_grad():  # a Trainer's callback may be called without
            self._open_step()
            if not self.term.objective.differentiable:
                self.term.pull()
            elif isinstance(energy := self.term.energy(), Tensor):
                energy.backward()  # type: ignore[no-untyped-call]
        self.term.push()
        self._is_open = False
        self._pulls += 1

    def penalty(self) -> Tensor | float:
        """The proximal term itself, to add to the loss before `backward()`, instead of `pull()`."""
        self._must_not_be_twice(in_loss=True)
        self._open_step()
        self._is_open = False
        self._pulls += 1
        return self.term.energy() + self.term.work()

    def log(self, **metrics: Any) -> None:
        """Numbers to report, for this batch or at the end; `loss` becomes the client's training loss."""
        for name, value in metrics.items():
            try:
                number = float(value.detach() if isinstance(value, Tensor) else value)
            except (TypeError, ValueError, RuntimeError):
                raise TypeError(f"local.log({name}={value!r}): is not a number") from None
            total, seen = self._logged.get(name, (0.0, 0))
            self._logged[name] = (total + number * self._weight, seen + self._weight)

    # --- what whoever runs a loop calls -----------------------------------------------------------------------------

    def each_step(self) -> Iterator[int]:
        """The steps of the schedule, each with its stiffness, for a loop that reads its data and pulls by itself."""
        assert self._schedule is not None
        for step in range(len(self._schedule)):
            if self._schedule.opens_epoch(step):
                self.epoch()
            self._is_open = False
            self._open_step()
            yield step

    def require_pulled(self) -> None:
        """Refuse a loop that has left the proximal term out."""
        objective = self.term.objective
        if isinstance(objective, MovesSome):
            self._require_epochs()
        if _adds_to_gradients(objective) and not self._pulls:
            what = f"the training loop never called local.pull(), and {type(objective).__name__} has a proximal term"
            raise RuntimeError(f"{what}; call it between loss.backward() and optimizer.step()")

    def stiffness(self) -> Tensor:
        """The mean stiffness of each layer in the end, float64 [L]."""
        return mean_per_layer(self.term.stiffness, self.term.layers)

    # --- a step -----------------------------------------------------------------------------------------------------

    def _each_batch(self, schedule: Schedule, data: Data) -> Iterator[tuple[Any, Any]]:
        for step in self.each_step():
            indices = schedule.batch(step)
            self._weight = len(indices)
            self._batches += 1
            yield self._place(data.batch(indices))

    def _open_step(self) -> None:
        """Compute the stiffness anew where that is due: once for a step, before a forward that may change weights."""
        if self._is_open:
            return
        objective, first = self.term.objective, not self._has_begun
        if objective.refresh == "epoch":
            self._require_epochs()
        if first:
            self.term.follow()
        if is_due(objective, self._epoch_begins, first_of_round=first):
            self.term.refresh()
        self._epoch_begins, self._is_open, self._has_begun = False, True, True

    def _require_epochs(self) -> None:
        if not self._epochs:
            name = type(self.term.objective).__name__
            raise RuntimeError(f"{name} has to know when an epoch begins: call local.epoch(), or use local.batches()")

    def _must_not_be_twice(self, in_loss: bool) -> None:
        if self._pulls and self._in_loss is not in_loss:
            raise RuntimeError("local.pull() and local.penalty() are the same term: call one of them")
        self._in_loss = in_loss
