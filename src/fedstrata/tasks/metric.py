"""What a model is measured by."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Metric:
    """What is better, and how it is measured.

    `function(outputs, targets)` gives the mean over a batch of samples; with `whole=True` it needs all samples of a
    data set at once (an AUC, an F1 score).
    """

    name: str
    function: Callable[[Any, Any], Tensor | float]
    direction: Literal["max", "min"] = "max"
    whole: bool = False

    @property
    def worst(self) -> float:
        """What a value that is no number counts as."""
        return -math.inf if self.direction == "max" else math.inf

    def reached(self, value: float, target: float) -> bool:
        """Whether a value is at least as good as the target."""
        return value >= target if self.direction == "max" else value <= target


def _accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).double().mean()


ACCURACY = Metric("accuracy", _accuracy)
