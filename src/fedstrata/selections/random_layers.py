"""Random layers: for each layer, n clients drawn at random upload it (FedLDF's "random" baseline)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from fedstrata.core.lazy import torch
from fedstrata.selections._share import SomeClients

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.layers import Layers


@dataclass(frozen=True)
class RandomLayers(SomeClients):
    """Each layer comes from `n` random clients; by default a fifth of the round's."""

    decides: ClassVar[Literal["before"]] = "before"

    def draw(self, clients: int, layers: Layers, generator: np.random.Generator) -> Tensor:
        """Each column has its own n clients."""
        n = self.count(clients)
        columns = [generator.permutation(clients) < n for _ in layers.layers]
        return torch.from_numpy(np.stack(columns, axis=1))
