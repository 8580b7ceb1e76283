"""FedLap (Charteros and Koutsopoulos): each neuron's weights are held back by how far they turned.

The penalty (eq 10) is ½ Σ_l ⟨λ_l, d_l⟩ with one entry per neuron j,

    λ_{l,j} = 1 − cos(w_{l,j}, a_{l,j}),      d_{l,j} = ‖w_{l,j} − a_{l,j}‖²,

where w_{l,j} are the weights *leaving* neuron j: column j of a Linear weight, row j of an Embedding, input channel j of
a convolution. Biases and normalisations are not regularised. λ is computed once per local epoch (algorithm 1, line 16),
so it is zero in the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fedstrata.core.axes import Objective, State, Tensors
from fedstrata.core.errors import require
from fedstrata.core.lazy import torch
from fedstrata.objectives._turning import one_minus_cosine

if TYPE_CHECKING:
    from fedstrata.core.layers import Layers


Form = Literal["factor", "exponent"]
Units = Literal["input", "output"]
Refresh = Literal["round", "epoch", "step"]


@dataclass(frozen=True)
class FedLap(Objective):
    """A spring per neuron that stiffens as the neuron turns.

    `q` multiplies the penalty, or, as `form="exponent"`, makes it λ^((1−q)/q): FedProx at 1, eq 10 at ½.
    """

    q: float = 0.5
    form: Form = "factor"
    units: Units = "input"
    refresh: Refresh = "epoch"
    through: bool = False  # line 18 read literally: the gradient flows through λ, which implies refresh="step"

    def __post_init__(self) -> None:
        require(0 <= self.q <= 1, "q", self.q, "must lie in [0, 1]")
        useless = self.refresh == "round" and self.q > 0
        require(not useless, "refresh", self.refresh, "must be epoch or step: when a round begins, nothing has turned")
        if self.through:
            object.__setattr__(self, "refresh", "step")
        if self.q == 0:  # nothing ever pulls
            object.__setattr__(self, "refresh", "round")

    @property
    def differentiable(self) -> bool:
        """Whether the gradient flows through λ."""
        return self.through

    def stiffness(self, local: Tensors, anchor: Tensors, state: State, layers: Layers) -> Tensors:
        """c = q λ_{l,j}, or λ_{l,j}^((1−q)/q); a weight none of whose neurons turned is free."""
        turns = {}
        for name, w in local.items():
            entry = layers.entries[name]
            if entry.inputs is not None and self.q > 0:
                unit = entry.inputs if self.units == "input" else 1 - entry.inputs
                turns[name] = one_minus_cosine(w, anchor[name], unit, entry.groups)
        if self.form == "factor":
            return {name: self.q * turn for name, turn in turns.items() if turn.any()}
        power = (1 - self.q) / self.q if self.q else 0.0
        if power == 0:
            return {name: torch.ones_like(turn) for name, turn in turns.items()}
        # Where λ = 0 the power has no finite slope for power < 1, and λ does not depend on w to first order anyway.
        return {n: torch.where(t > 0, t.where(t > 0, 1.0) ** power, 0.0) for n, t in turns.items() if t.any()}
