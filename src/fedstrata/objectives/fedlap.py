"""FedLap (Charteros and Koutsopoulos): each neuron's weights are held back by how far they turned.

The penalty (eq 10) is ½ Σ_l ⟨λ_l, d_l⟩ with one entry per neuron j,

    λ_{l,j} = 1 − cos(w_{l,j}, a_{l,j}),      d_{l,j} = ‖w_{l,j} − a_{l,j}‖²,

where w_{l,j} are the weights *leaving* neuron j: column j of a Linear weight, input channel j of a convolution. Biases
are not regularised. λ is computed once per local epoch (algorithm 1, line 16), so it is zero in the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedstrata.algorithm import State, Tensors
from fedstrata.checks import require
from fedstrata.layers import Layers


@dataclass(frozen=True)
class FedLap:
    """`q` multiplies the penalty, or, as `form="exponent"`, makes it λ^((1−q)/q): FedProx at 1, eq 10 at ½."""

    q: float = 0.5
    form: Literal["factor", "exponent"] = "factor"
    units: Literal["input", "output"] = "input"
    refresh: Literal["epoch", "step"] = "epoch"
    through: bool = False  # line 18 read literally: the gradient flows through λ, which implies refresh="step"

    def __post_init__(self) -> None:
        require(0 <= self.q <= 1, "q", self.q, "must lie in [0, 1]")
        if self.through:
            object.__setattr__(self, "refresh", "step")

    @property
    def differentiable(self) -> bool:
        """Whether the gradient flows through λ."""
        return self.through

    def init(self, layers: Layers) -> State:
        """Nothing to remember."""
        return {}

    def stiffness(self, local: Tensors, anchor: Tensors, state: State, layers: Layers) -> Tensors:
        """c = q λ_{l,j}, or λ_{l,j}^((1−q)/q); a weight none of whose neurons turned is free."""
        unit = 1 if self.units == "input" else 0
        weights = {name: w for name, w in local.items() if w.ndim >= 2 and self.q > 0}
        turned = {name: _one_minus_cosine(w, anchor[name], unit) for name, w in weights.items()}
        if self.form == "exponent":
            power = (1 - self.q) / self.q if self.q else 0.0
            return {name: turn**power for name, turn in turned.items() if power == 0 or turn.any()}
        return {name: self.q * turn for name, turn in turned.items() if turn.any()}

    def after_round(self, new: Tensor, old: Tensor, state: State, layers: Layers) -> State:
        """λ lives within a round."""
        return state


def _one_minus_cosine(w: Tensor, a: Tensor, unit: int) -> Tensor:
    """λ per unit, shaped to broadcast; 0 where nothing changed or both are zero, 1 where one is."""
    dims = [d for d in range(w.ndim) if d != unit]
    moved = (w != a).any(dim=dims, keepdim=True)
    dot = (w * a).sum(dims, keepdim=True)
    lengths = w.square().sum(dims, keepdim=True) * a.square().sum(dims, keepdim=True)
    cosine = torch.where(lengths > 0, dot / lengths.clamp_min(torch.finfo(w.dtype).tiny).sqrt(), 0.0)
    return torch.where(moved, (1 - cosine).clamp(0, 2), 0.0)
