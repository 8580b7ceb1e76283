"""The axes of an algorithm, and FedAvg's choice on each.

Layer-aware federated learning has three independent questions: what does a client minimise (`Objective`), who uploads
which layer (`Selection`), and how much does each upload count (`Weighting`)? A mask m and weights w answer the last
two, and an aggregate is made of them, by default with the one equation in `aggregation.py`:

    θ_u ← θ_u + Σ_k m_ku w_kl Δ_ku / Σ_j m_ju w_jl

What the server does with it is one more question (`ServerStep`); another is what takes the equation's place in rules
that are no mean (`Combination`).

Rules are frozen and hold hyperparameters only; what changes from round to round is a `State` that goes in and out. A
rule may inherit from these classes, and needs to write only what is different.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np

from fedstrata.core.aggregation import aggregate
from fedstrata.core.errors import BadValue, require
from fedstrata.core.grouping import Grouping
from fedstrata.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.cohort import Cohort
    from fedstrata.core.layers import Layers

State = Mapping[str, "Tensor"]
"""What a rule remembers from round to round: small named tensors, checkpointed with the model."""

Tensors = Mapping[str, "Tensor"]
"""Trainable tensors by name."""


class Objective(Protocol):
    """Axis 1: the task loss, and a proximal term ½ Σ c (w − a)² between the local weights w and the global weights a.

    By default there is no such term.
    """

    @property
    def refresh(self) -> Literal["round", "epoch", "step"]:
        """When a client computes the stiffness c anew."""
        return "round"

    @property
    def differentiable(self) -> bool:
        """Whether the gradient also flows through c; otherwise c is a constant for the gradient."""
        return False

    def init(self, layers: Layers) -> State:
        """The state before the first round; it is sent along with the model."""
        return {}

    def stiffness(self, local: Tensors, anchor: Tensors, state: State, layers: Layers) -> Tensors:
        """The stiffness c, broadcastable to each tensor; a tensor that is left out is free."""
        return {}

    def after_round(self, new: Tensor, old: Tensor, state: State, layers: Layers) -> State:
        """The state after an aggregation took the global model from `old` to `new`, on the server."""
        return state


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
        return {}

    def weigh(self, cohort: Cohort, state: State) -> tuple[Tensor, State]:
        """Weights w ≥ 0, float64 [K, L], on any scale: the equation normalises them over a layer's senders."""
        ...


@runtime_checkable
class WithGain(Weighting, Protocol):
    """A weighting for which the way along the mean has a length of its own, as FedNova's has."""

    def gain(self, cohort: Cohort) -> Tensor:
        """How far each layer goes along its mean, float64 [L]; others go 1. Buffers are averaged as they are."""
        ...


class ServerStep(Protocol):
    """What the server does with the aggregate before it becomes the global model (momentum, Adam, …).

    The cohort has the updates, each client's local steps and their reach, and how many clients there are. A step moves
    the trainable numbers; buffers are for the aggregate to say (`cohort.is_trainable`).
    """

    def init(self, layers: Layers) -> State:
        """The state before the first round."""
        return {}

    def step(self, old: Tensor, aggregate: Tensor, state: State, cohort: Cohort) -> tuple[Tensor, State]:
        """The new global model."""
        ...


class Combination(Protocol):
    """How the updates become one: the equation, or what takes its place in rules that are no mean."""

    def combine(self, model: Tensor, cohort: Cohort, weights: Tensor) -> Tensor:
        """The aggregate; what nobody sent stays as it is in the model."""
        ...


# --- FedAvg (McMahan et al., AISTATS 2017): its choice on each axis --------------------------------------------------


@dataclass(frozen=True)
class Plain(Objective):
    """The task loss alone; nothing holds the weights back."""


@dataclass(frozen=True)
class Everything:
    """Everyone sends everything."""

    decides: ClassVar[Literal["before"]] = "before"

    def draw(self, clients: int, layers: Layers, generator: np.random.Generator) -> Tensor:
        """All of it."""
        return torch.ones(clients, len(layers), dtype=torch.bool)


@dataclass(frozen=True)
class SampleSize(Weighting):
    """Each upload counts by its client's samples: w_kl = n_k."""

    def weigh(self, cohort: Cohort, state: State) -> tuple[Tensor, State]:
        """The same for every layer."""
        return cohort.sizes[:, None].expand(-1, len(cohort.layers)), state


@dataclass(frozen=True)
class Adopt(ServerStep):
    """The aggregate is the new global model."""

    def step(self, old: Tensor, aggregate: Tensor, state: State, cohort: Cohort) -> tuple[Tensor, State]:
        """Adopt the aggregate."""
        return aggregate, state


@dataclass(frozen=True)
class Mean(Combination):
    """The equation: each unit moves by its senders' weighted mean."""

    def combine(self, model: Tensor, cohort: Cohort, weights: Tensor) -> Tensor:
        """The one equation."""
        return aggregate(model, cohort, weights)


@dataclass(frozen=True)
class Algorithm:
    """One choice on each axis; FedAvg's are the defaults.

    `private` has patterns of the layers that stay on the clients; `grouping` is the paper's idea of a layer, for
    recipes without their own.
    """

    objective: Objective = field(default_factory=Plain)
    selection: Selection = field(default_factory=Everything)
    weighting: Weighting = field(default_factory=SampleSize)
    grouping: Grouping = "module"
    server: ServerStep = field(default_factory=Adopt)
    combine: Combination = field(default_factory=Mean)
    private: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for axis, needed in _NEEDED.items():
            _check(axis, getattr(self, axis), needed)
        if isinstance(self.private, str) or not all(isinstance(pattern, str) for pattern in self.private):
            raise BadValue("private", self.private, "must be a list of patterns, or of the words norm, bias, …")
        object.__setattr__(self, "private", tuple(self.private))


_NEEDED: Mapping[str, tuple[str, ...]] = {
    "objective": ("init", "stiffness", "after_round", "refresh", "differentiable"),
    "selection": ("decides",),
    "weighting": ("init", "weigh"),
    "server": ("init", "step"),
    "combine": ("combine",),
}
_NEEDED_OF_SELECTION: Mapping[object, tuple[str, ...]] = {
    "before": ("draw",),
    "after_scores": ("score", "choose"),
    "on_client": ("pick",),
}


def _check(axis: str, rule: object, needed: tuple[str, ...]) -> None:
    """A rule that lacks a method is refused here, not in the middle of a round."""
    kind = {"server": "server step", "combine": "combination"}.get(axis, axis)
    if isinstance(rule, type):
        raise BadValue(axis, rule.__name__, f"is a class: write {rule.__name__}(…)")
    name = type(rule).__name__
    missing = [method for method in needed if not hasattr(rule, method)]
    require(not missing, axis, name, f"is no {kind}: it lacks {', '.join(missing)}")
    if axis == "selection":
        decides = rule.decides  # type: ignore[attr-defined]
        problem = f"is no selection: decides = {decides!r} is none of {', '.join(map(str, _NEEDED_OF_SELECTION))}"
        require(decides in _NEEDED_OF_SELECTION, axis, name, problem)
        missing = [method for method in _NEEDED_OF_SELECTION[decides] if not hasattr(rule, method)]
        require(not missing, axis, name, f"is no selection: it lacks {', '.join(missing)}")
