"""SCAFFOLD (Karimireddy et al., ICML 2020), option II: each step is corrected by control variates.

    g ← ∇F_k + c − c_k,      c_k⁺ = c_k − c + (x − y_k) / (a_k η),      c ← c + (1/N) Σ_{k in S} (c_k⁺ − c_k)

x − y_k = −Δ_k is what the server gets anyway, and c it has: so upload is FedAvg's. All control variates start at zero.
The paper's 1/τ is 1/a_k, which differs with momentum. What was not sent leaves c_k as it was, on both sides; so c is
the mean of all c_k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedstrata.core.axes import Remembers, State, Work
from fedstrata.core.errors import RuleError
from fedstrata.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.cohort import Cohort
    from fedstrata.core.layers import Layers

NO_REACH = "needs to know how far a client's local steps reach: plain SGD, with or without momentum"


@dataclass(frozen=True)
class Scaffold(Remembers):
    """The gradient is corrected by c − c_k: what all clients' gradients are beyond this one's."""

    needs_reach: ClassVar[bool] = True

    def init(self, layers: Layers) -> State:
        """c = 0; it is sent along with the model."""
        return {"c": torch.zeros(layers.numel, dtype=layers.dtype)}

    def memory(self, layers: Layers, initial: Tensor) -> State:
        """c_k = 0."""
        return {"c": torch.zeros(layers.numel, dtype=layers.dtype)}

    def force(self, memory: State, state: State, layers: Layers) -> Tensor:
        """c − c_k (eq 3)."""
        return state["c"] - memory["c"]

    def remember(self, memory: State, work: Work) -> State:
        """c_k⁺ = c_k − c − Δ_k / (a_k η) (eq 4, option II)."""
        if work.reach is None:
            raise RuleError(f"scaffold {NO_REACH}")
        return {"c": memory["c"] - work.state["c"] - work.moved / (work.reach * work.lr)}

    def after_cohort(self, cohort: Cohort, state: State) -> State:
        """c + (1/N) Σ m_k (−c − Δ_k / (a_k η)), from the updates alone (eq 5)."""
        if cohort.reach is None:
            raise RuleError(f"scaffold {NO_REACH}")
        ones = torch.ones(len(cohort), len(cohort.layers), dtype=torch.float64)
        changes = cohort.sum(-ones / (cohort.reach * cohort.lr)[:, None]) - state["c"] * cohort.mass(ones)
        return {"c": state["c"] + changes / cohort.population}
