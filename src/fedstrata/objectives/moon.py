"""MOON (Li, He and Song, CVPR 2021): what the model makes of a sample stays near to what the global one makes of it.

With z the representation, and z_glob and z_prev those by the global model and by the client's last one (eq 3),

    ℓ = ℓ_task + μ ℓ_con,      ℓ_con = −log exp(cos(z, z_glob)/τ) / (exp(cos(z, z_glob)/τ) + exp(cos(z, z_prev)/τ)).

The representation is what enters the last module with parameters. The other two models are in evaluation mode. Before
its first round a client's last model is the first one of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedstrata.core.axes import Compares, State, Work
from fedstrata.core.errors import require
from fedstrata.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.layers import Layers


@dataclass(frozen=True)
class Moon(Compares):
    """A contrastive loss: nearer to the global model's representation than to the client's last one."""

    mu: float = 1.0
    temperature: float = 0.5

    def __post_init__(self) -> None:
        require(self.mu >= 0, "mu", self.mu, "must be ≥ 0")
        require(self.temperature > 0, "temperature", self.temperature, "must be > 0")

    @property
    def keeps_unsent(self) -> bool:
        """The client's last model has nothing to do with what it sends."""
        return True

    def memory(self, layers: Layers, initial: Tensor) -> State:
        """The first model of all."""
        return {"own": initial}

    def compare(self, live: Tensor, anchor: Tensor, before: Tensor) -> Tensor:
        """μ ℓ_con, the mean over the batch: log(1 + exp((cos(z, z_prev) − cos(z, z_glob))/τ))."""
        z, near, far = (one.flatten(1) for one in (live, anchor, before))
        cosine = torch.nn.functional.cosine_similarity
        exponent = (cosine(z, far) - cosine(z, near)) / self.temperature
        return self.mu * torch.nn.functional.softplus(exponent).mean()

    def remember(self, memory: State, work: Work) -> State:
        """Where training came."""
        return {"own": work.trained}
