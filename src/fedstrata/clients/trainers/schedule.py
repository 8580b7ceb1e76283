"""Which samples a client sees in which step: the same for every trainer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedstrata.core import rng
from fedstrata.core.messages import Order
from fedstrata.core.training import LocalTraining


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
