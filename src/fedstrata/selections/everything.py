"""Every client of the round uploads every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from fedstrata.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.layers import Layers


@dataclass(frozen=True)
class Everything:
    """Everyone sends everything."""

    decides: ClassVar[Literal["before"]] = "before"

    def draw(self, clients: int, layers: Layers, generator: np.random.Generator) -> Tensor:
        """All of it."""
        return torch.ones(clients, len(layers), dtype=torch.bool)
