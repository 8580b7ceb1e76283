"""Neuron pruning: each client uploads, of each layer, the output units that changed most.

FedLDF compares itself with a method ("FedADP", not FedAdp) of which it says only that pruning is adaptive and the
neuron its smallest unit. This is our stand-in at the same upload: a unit is an index of a weight's first dimension,
with the aligned entries of bias and BatchNorm; indices count as upload; a unit nobody sent stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from fedstrata.core.errors import require
from fedstrata.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.layers import Layers


@dataclass(frozen=True)
class NeuronPruning:
    """Each client sends the `share` of each layer's units that changed most, rounded down, at least one."""

    share: float = 0.2

    decides: ClassVar[Literal["on_client"]] = "on_client"

    def __post_init__(self) -> None:
        require(0 < self.share <= 1, "share", self.share, "must lie in (0, 1]")

    def pick(self, update: Tensor, layers: Layers) -> Tensor:
        """The units with the largest change ‖Δ_u‖ in their layer; the lower index wins a tie."""
        picked = torch.zeros(layers.units, dtype=torch.bool)
        for layer in layers.layers:
            change = torch.zeros(layer.units, dtype=torch.float64)
            for entry in layer.entries:
                if entry.trainable:
                    rows = update[entry.start : entry.stop].view(entry.units, -1).double()
                    first = entry.first_unit - layer.first_unit
                    change[first : first + entry.units] += rows.square().sum(1).cpu()
            kept = max(1, int(self.share * layer.units + 1e-9))  # 0.29 · 100 is 28.999…
            order = torch.sort(change, descending=True, stable=True).indices
            picked[layer.first_unit + order[:kept]] = True
        return picked
