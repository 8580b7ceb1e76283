"""FedNova (Wang et al., NeurIPS 2020): updates are divided by how far their clients' local steps reach.

A client whose gradient stays g moves by −η a_k g. FedNova averages the normalised updates, and goes as far as the
clients went in the mean:

    θ ← θ + (Σ_k p_k a_k) Σ_k p_k Δ_k / a_k

As a weighted mean with a gain this is w_k = n_k / a_k and g = (Σ_k p_k a_k) (Σ_k p_k / a_k), p_k being the shares of
the data among a layer's senders. Only ratios of the a_k count. For SGD a_k is the number of local steps, with momentum
another one, and for Adam there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from fedstrata.core.axes import State, Weighting
from fedstrata.core.errors import RuleError
from fedstrata.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.cohort import Cohort


@dataclass(frozen=True)
class FedNova(Weighting):
    """Whoever does more local steps than others counts no more for it."""

    compares: ClassVar[Literal["layers"]] = "layers"
    needs_reach: ClassVar[bool] = True

    def weigh(self, cohort: Cohort, state: State) -> tuple[Tensor, State]:
        """n_k / a_k, the same for every layer."""
        return (cohort.sizes / _reach(cohort))[:, None].expand(-1, len(cohort.layers)), state

    def gain(self, cohort: Cohort) -> Tensor:
        """(Σ_k n_k a_k) (Σ_k n_k / a_k) / (Σ_k n_k)² over each layer's senders; exactly 1 if the a_k are equal."""
        sizes, reach = cohort.sizes[:, None] * cohort.sent, _reach(cohort)[:, None]
        total = sizes.sum(0)
        product = (sizes * reach).sum(0) * (sizes / reach).sum(0)
        return torch.where(total > 0, product / (total * total).where(total > 0, 1.0), 1.0)


def _reach(cohort: Cohort) -> Tensor:
    """a_k, as shares of the largest."""
    if cohort.reach is None:
        raise RuleError(f"weighting FedNova needs the reach of local steps, which nobody knows in round {cohort.round}")
    return cohort.reach / cohort.reach.max()
