"""A data set in one place, of which clients have parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedstrata.tasks.task import Data


@dataclass(frozen=True)
class Whole:
    """Training samples, and what is known of them; `test` is the server's evaluation set, if there is one."""

    train: Data
    labels: np.ndarray
    """Of the training samples, as partitions see them."""
    shape: tuple[int, ...]
    """Of one input, as models are built for it."""
    class_names: Sequence[str]
    source: str
    test: Data | None = None
    owners: np.ndarray | None = None
    """Whose each training sample is, int64 [N], where that is not drawn."""
    client_names: Sequence[str] = ()
    """What the owners are called."""
