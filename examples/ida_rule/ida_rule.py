"""IDA, inverse distance aggregation (Yeganeh et al., MICCAI workshops 2020): who is far from the mean counts less.

α_k = 1 / (‖ω_avg − ω_k‖₁ + ε), with the plain mean ω_avg of the clients' parameters. With partial uploads a layer's
mean is its senders', and a client's distance is taken over the layers that it sent. (fedstrata's own `ida` reads the
paper with Euclidean distances from FedAvg's mean.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedstrata import Cohort, State, Weighting, require


@dataclass(frozen=True)
class IDA(Weighting):
    """Each client counts the inverse of its distance from the mean."""

    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        require(self.epsilon > 0, "epsilon", self.epsilon, "must be > 0")

    def weigh(self, cohort: Cohort, state: State) -> tuple[Tensor, State]:
        """The same weight for all layers of a client."""
        shares = cohort.sent / cohort.sent.sum(0).clamp_min(1)
        distance = torch.zeros(len(cohort), dtype=torch.float64)
        for layer, _, _, updates in cohort.blocks(cohort.pieces()):
            mean = shares[:, layer].double() @ updates
            distance += (updates - mean).abs().sum(1) * cohort.sent[:, layer]
        return (1 / (distance + self.epsilon))[:, None].expand(-1, len(cohort.layers)), state
