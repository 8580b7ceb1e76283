"""Augmentation: images that are changed at random whenever a client trains on them, and never in evaluation.

An operation takes a batch of images [B, C, H, W] and gives one like it. It draws from torch's global generator, which
is seeded by (seed, round, attempt, client) for every order; so whoever trains a client, and when, changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.core.errors import DataError
from fedstrata.core.lazy import torch
from fedstrata.registry import import_object

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.tasks.task import Data

Operation = Callable[["Tensor"], "Tensor"]


def crop(images: Tensor) -> Tensor:
    """Each image moved by up to an eighth of its side in both directions (4 pixels of 32); what comes in is zero."""
    count, channels, height, width = images.shape
    margin = max(1, height // 8), max(1, width // 8)
    padded = images.new_zeros(count, channels, height + 2 * margin[0], width + 2 * margin[1])
    padded[:, :, margin[0] : margin[0] + height, margin[1] : margin[1] + width] = images
    rows, columns = (
        torch.randint(2 * most + 1, (count, 1)) + torch.arange(side)
        for most, side in zip(margin, (height, width), strict=True)
    )
    of_image, of_channel = torch.arange(count).view(-1, 1, 1, 1), torch.arange(channels).view(1, -1, 1, 1)
    return padded[of_image, of_channel, rows.view(count, 1, height, 1), columns.view(count, 1, 1, width)]


def flip(images: Tensor) -> Tensor:
    """Each image mirrored from left to right, with probability 1/2."""
    return torch.where((torch.rand(len(images)) < 0.5).view(-1, 1, 1, 1), images.flip(3), images)


AUGMENTATIONS: dict[str, Operation] = {operation.__name__: operation for operation in (crop, flip)}
"""Every operation by name."""


@dataclass(frozen=True)
class Augmented:
    """A client's data with operations on its inputs, which are applied whenever a batch is asked for."""

    data: Data
    operations: tuple[Operation, ...]

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: np.ndarray) -> tuple[Any, Any]:
        """A batch of the data, changed."""
        inputs, targets = self.data.batch(indices)
        for operation in self.operations:
            inputs = operation(inputs)
        return inputs, targets


def augmented(data: Data, operations: Sequence[str | Operation] | None, shape: Sequence[int]) -> Data:
    """The data with these operations, if there are any: ours by name, `module:function`, or one's own.

    `shape` is that of an input.
    """
    if not operations:
        return data
    found = tuple(known if callable(known) else _operation(known) for known in operations)
    if len(shape) != 3 and any(operation in AUGMENTATIONS.values() for operation in found):
        raise DataError(f"task.augment = {list(operations)}: is for images, and inputs have shape {list(shape)}")
    return Augmented(data, found)


def _operation(name: str) -> Operation:
    return AUGMENTATIONS[name] if name in AUGMENTATIONS else import_object(name, "task.augment")
