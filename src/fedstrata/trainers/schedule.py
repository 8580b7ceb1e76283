"""Which samples a client sees in which step: the same for every trainer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedstrata import rng
from fedstrata.messages import Order
from fedstrata.training import Training


def batches(samples: int, order: Order, training: Training, seed: int) -> Iterator[tuple[bool, np.ndarray]]:
    """Batches of positions, with whether each opens an epoch: `work` epochs, or `work` steps."""
    generator = rng.generator(seed, "batches", round=order.round, attempt=order.attempt, client=order.client)
    size, counts_steps = training.batch_size, training.steps is not None
    epochs = steps = 0
    while steps < order.work if counts_steps else epochs < order.work:
        shuffled = generator.permutation(samples)
        for start in range(0, samples, size):
            if counts_steps and steps == order.work:
                return
            yield start == 0, shuffled[start : start + size]
            steps += 1
        epochs += 1
