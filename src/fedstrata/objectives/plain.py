"""The task loss alone: FedAvg (McMahan et al., AISTATS 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from fedstrata.core.axes import State, Tensors

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.layers import Layers


@dataclass(frozen=True)
class Plain:
    """The task loss alone; nothing holds the weights back."""

    refresh: ClassVar[Literal["round"]] = "round"
    differentiable: ClassVar[bool] = False

    def init(self, layers: Layers) -> State:
        """Nothing to remember."""
        return {}

    def stiffness(self, local: Tensors, anchor: Tensors, state: State, layers: Layers) -> Tensors:
        """Every tensor is free."""
        return {}

    def after_round(self, new: Tensor, old: Tensor, state: State, layers: Layers) -> State:
        """Nothing to learn from the round."""
        return state
