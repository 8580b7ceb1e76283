"""The three axes, and the algorithms that are points on them.

Layer-aware federated learning has three independent questions: what does a client minimise (`Objective`), who uploads
which layer (`Selection`), and how much does each upload count (`Weighting`)? A mask m and weights w answer the last
two, and every algorithm aggregates by the one equation in `aggregation.py`:

    θ_u ← θ_u + Σ_k m_ku w_kl Δ_ku / Σ_j m_ju w_jl

Rules are frozen and hold hyperparameters only; what changes from round to round is a `State` that goes in and out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.cohort import Cohort
    from fedstrata.core.layers import Layers

State = Mapping[str, "Tensor"]
"""What a rule remembers from round to round: small named tensors, checkpointed with the model."""

Tensors = Mapping[str, "Tensor"]
"""Trainable tensors by name."""


class Objective(Protocol):
    """Axis 1: a spring ½ Σ c (w − a)² between the local weights w and the global weights a, added to the task loss."""

    @property
    def refresh(self) -> Literal["round", "epoch", "step"]:
        """When a client computes the stiffness c anew."""
        ...

    @property
    def differentiable(self) -> bool:
        """Whether the gradient also flows through c; otherwise c is a constant for the gradient."""
        ...

    def init(self, layers: Layers) -> State:
        """The state before the first round; it is sent along with the model."""
        ...

    def stiffness(self, local: Tensors, anchor: Tensors, state: State, layers: Layers) -> Tensors:
        """The stiffness c, broadcastable to each tensor; a tensor that is left out is free."""
        ...

    def after_round(self, new: Tensor, old: Tensor, state: State, layers: Layers) -> State:
        """The state after an aggregation took the global model from `old` to `new`, on the server."""
        ...


@runtime_checkable
class SelectsBefore(Protocol):
    """Axis 2, decided by the server before training."""

    decides: ClassVar[Literal["before"]]

    def draw(self, clients: int, layers: Layers, generator: np.random.Generator) -> Tensor:
        """Which client sends which layer, bool [K, L]."""
        ...


@runtime_checkable
class SelectsAfterScores(Protocol):
    """Axis 2, decided by the server from one score per client and layer; this takes a second exchange."""

    decides: ClassVar[Literal["after_scores"]]

    def score(self, update: Tensor, layers: Layers) -> Tensor:
        """What a client reports of its update, [L]."""
        ...

    def choose(self, scores: Tensor) -> Tensor:
        """Which client sends which layer, bool [K, L], from scores [K, L]."""
        ...


@runtime_checkable
class SelectsOnClient(Protocol):
    """Axis 2, decided by each client after training, unit by unit."""

    decides: ClassVar[Literal["on_client"]]

    def pick(self, update: Tensor, layers: Layers) -> Tensor:
        """Which of its output units a client sends, bool [U]."""
        ...


Selection = SelectsBefore | SelectsAfterScores | SelectsOnClient


class Weighting(Protocol):
    """Axis 3: how much each upload counts."""

    def init(self, clients: int, layers: Layers) -> State:
        """The state before the first round, for all clients that exist."""
        ...

    def weigh(self, cohort: Cohort, state: State) -> tuple[Tensor, State]:
        """Weights w ≥ 0, float64 [K, L], on any scale: the equation normalises them over a layer's senders."""
        ...


class ServerStep(Protocol):
    """What the server does with the aggregate before it becomes the global model (momentum, Adam, …)."""

    def init(self, layers: Layers) -> State:
        """The state before the first round."""
        ...

    def step(self, old: Tensor, aggregate: Tensor, state: State, layers: Layers) -> tuple[Tensor, State]:
        """The new global model."""
        ...


@dataclass(frozen=True)
class Adopt:
    """The server step of all five papers: the aggregate is the new global model."""

    def init(self, layers: Layers) -> State:
        """Nothing to remember."""
        return {}

    def step(self, old: Tensor, aggregate: Tensor, state: State, layers: Layers) -> tuple[Tensor, State]:
        """Adopt the aggregate."""
        return aggregate, state


@dataclass(frozen=True)
class Algorithm:
    """One choice on each axis; `grouping` is the paper's idea of a layer, for recipes without their own."""

    objective: Objective
    selection: Selection
    weighting: Weighting
    grouping: str = "module"
    server: ServerStep = field(default_factory=Adopt)
