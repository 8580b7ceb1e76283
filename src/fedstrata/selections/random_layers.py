"""Random layers: for each layer, n clients drawn at random upload it (FedLDF's "random" baseline)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedstrata.layers import Layers
from fedstrata.selections._share import check_n, resolve_n


@dataclass(frozen=True)
class RandomLayers:
    """`n` clients per layer; by default a fifth of the round's."""

    n: int | None = None

    decides: ClassVar[Literal["before"]] = "before"

    def __post_init__(self) -> None:
        check_n(self.n)

    def draw(self, clients: int, layers: Layers, generator: np.random.Generator) -> Tensor:
        """Each column has its own n clients."""
        n = resolve_n(self.n, clients)
        columns = [generator.permutation(clients) < n for _ in layers.layers]
        return torch.from_numpy(np.stack(columns, axis=1))
