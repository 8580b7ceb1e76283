"""The spring ½ Σ c (w − a)²: an objective only says how stiff it is; value and pull are derived from that."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedstrata.core.axes import Objective, State, Tensors
from fedstrata.core.layers import Layers


def is_due(objective: Objective, first_of_epoch: bool, *, first_of_round: bool) -> bool:
    """Whether the stiffness is to be computed anew before this step."""
    return objective.refresh == "step" or first_of_round or (objective.refresh == "epoch" and first_of_epoch)


class Spring:
    """The spring of one client's round."""

    def __init__(
        self, objective: Objective, state: State, layers: Layers, local: Mapping[str, Tensor], anchor: Tensors
    ) -> None:
        self.objective, self.state, self.layers, self.local, self.anchor = objective, state, layers, local, anchor
        self.stiffness: Tensors = {}

    def refresh(self) -> None:
        """Compute the stiffness; unless it is differentiable, it is a constant for the gradient."""
        through = self.objective.differentiable
        local = self.local if through else {name: w.detach() for name, w in self.local.items()}
        self.stiffness = self.objective.stiffness(local, self.anchor, self.state, self.layers)

    def energy(self) -> Tensor | float:
        """The value, for an objective whose gradient flows through c."""
        return sum(
            ((c * (self.local[name] - self.anchor[name]).square()).sum() / 2 for name, c in self.stiffness.items()), 0.0
        )

    @torch.no_grad()
    def pull(self) -> None:
        """Add c (w − a) to the gradients; a tensor without stiffness is left alone, so no spring *is* plain."""
        for name, c in self.stiffness.items():
            w = self.local[name]
            if not w.requires_grad:
                continue  # frozen by the model itself while it trains
            force = c * (w - self.anchor[name])
            w.grad = force if w.grad is None else w.grad.add_(force)


def mean_per_layer(stiffness: Tensors, layers: Layers) -> Tensor:
    """The mean of c over each layer's trainable numbers, float64 [L]."""
    means = torch.zeros(len(layers), dtype=torch.float64)
    if not stiffness:
        return means
    for at, layer in enumerate(layers.layers):
        for entry in layer.entries:
            if entry.name in stiffness:
                means[at] += float(stiffness[entry.name].detach().double().mean()) * (entry.stop - entry.start)
        means[at] /= max(1, layer.trainable_stop - layer.start)
    return means
