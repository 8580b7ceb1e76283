"""HDFL: n clients drawn at random upload all their layers, the others nothing (FedLDF's baseline)."""

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
class RandomClients(SomeClients):
    """Everything comes from `n` random clients; by default a fifth of the round's."""

    decides: ClassVar[Literal["before"]] = "before"
    sends: ClassVar[Literal["models"]] = "models"

    def draw(self, clients: int, layers: Layers, generator: np.random.Generator) -> Tensor:
        """The same n clients in every column."""
        chosen = torch.from_numpy(generator.permutation(clients) < self.count(clients))
        return chosen[:, None].expand(clients, len(layers)).contiguous()
