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

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np

from fedstrata.core.aggregation import aggregate
from fedstrata.core.display import Table
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


@dataclass(frozen=True)
class Work:
    """What a client did in a round, for its memory."""

    model: Tensor  # the global model that it started from, [P]
    update: Tensor  # how far it went, [P]
    state: State  # the objective's, as the order had it
    layers: Layers
    lr: float  # η
    steps: int  # τ
    reach: float | None  # a: a constant gradient g moves it by −η a g; None, if that is no constant
    tail: Tensor  # where its private layers came
    second: Tensor | None = None  # where a second training came, with private layers behind

    @property
    def moved(self) -> Tensor:
        """How far its parameters went: `update` with zeros for buffers."""
        layers = self.layers
        return torch.where(layers.is_trainable, self.update, 0.0) if layers.has_buffers else self.update

    @property
    def trained(self) -> Tensor:
        """Where the client came, with private layers behind."""
        return torch.cat([self.model + self.update, self.tail])


class Remembers(Objective):
    """An objective whose clients remember something: the gradient becomes ∇F + c (w − a) + b, with a constant force b.

    Memory is named tensors, which never leave the client. One that has a number for each of the model's keeps that of
    a layer or unit that was not sent, unless `keeps_unsent` says that what was sent is of no concern.
    """

    @property
    def keeps_unsent(self) -> bool:
        """Whether memory is renewed of what was not sent, too."""
        return False

    @abstractmethod
    def memory(self, layers: Layers, initial: Tensor) -> State:
        """What a client has that never took part; `initial` are the first weights, with private layers behind."""
        ...

    def force(self, memory: State, state: State, layers: Layers) -> Tensor | None:
        """b, [P]: a round's constant addition to the gradient; buffers have none. None is no force."""
        return None

    @abstractmethod
    def remember(self, memory: State, work: Work) -> State:
        """The next memory, if all layers are sent."""
        ...

    def after_cohort(self, cohort: Cohort, state: State) -> State:
        """The server's state after a round, from all accepted updates."""
        return state


Moving = Literal["all", "shared", "private"]


class MovesSome(Objective):
    """An objective by which some local epochs move only private layers, or only the others."""

    @abstractmethod
    def moves(self, epoch: int) -> Moving:
        """What moves in a local epoch, counted from 0. Who got to no epoch that moves shared layers sends none."""
        ...


class TrainsTwice(Remembers):
    """An objective by which clients train a model of their own as well: memory's `own`, which they are evaluated on."""

    @abstractmethod
    def second(self) -> Objective:
        """What that is trained with, towards the global model."""
        ...


class Compares(Remembers):
    """An objective with another loss, on what the model makes of a batch before its last module with parameters."""

    @abstractmethod
    def compare(self, live: Tensor, anchor: Tensor, before: Tensor) -> Tensor:
        """What is added to the task loss, from representations [B, …]: now, by the global model, by memory's `own`."""
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
    """Axis 3: how much each upload counts.

    A rule that cannot do with all uploads says what it `compares`: whole "models", or "layers". One that `needs_reach`
    looks at `cohort.reach`.
    """

    def init(self, clients: int, layers: Layers) -> State:
        """The state before the first round, for all clients that exist."""
        return {}

    @abstractmethod
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

    @abstractmethod
    def step(self, old: Tensor, aggregate: Tensor, state: State, cohort: Cohort) -> tuple[Tensor, State]:
        """The new global model."""
        ...


class Combination(Protocol):
    """How the updates become one: the equation, or what takes its place in rules that are no mean."""

    @abstractmethod
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
    sends: ClassVar[Literal["models"]] = "models"

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
        _check_uploads(self.weighting, self.selection, self.combine)
        if isinstance(self.private, str) or not all(isinstance(pattern, str) for pattern in self.private):
            raise BadValue("private", self.private, "must be a list of patterns, or of the words norm, bias, …")
        object.__setattr__(self, "private", tuple(self.private))

    def __repr__(self) -> str:
        """What is not FedAvg's, as it can be written."""
        plain = vars(Algorithm())
        own = [f"{name}={value!r}" for name, value in vars(self).items() if value != plain[name]]
        return f"Algorithm({', '.join(own)})"

    def _repr_html_(self) -> str:
        rows = tuple((name, value if isinstance(value, str) else repr(value)) for name, value in vars(self).items())
        return Table("algorithm", ("axis", "choice"), rows)._repr_html_()


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


_UPLOADS = ("models", "layers", "units")
"""From the coarsest to the finest."""


def _check_uploads(weighting: Weighting, selection: Selection, combine: Combination) -> None:
    """Refuse a weighting that cannot be had of what the selection lets clients send, or has no mean to stretch."""
    name, compares = type(weighting).__name__, getattr(weighting, "compares", "units")
    sends = "units" if selection.decides == "on_client" else getattr(selection, "sends", "layers")
    if _UPLOADS.index(sends) > _UPLOADS.index(compares):
        what = "whole models" if compares == "models" else "whole layers"
        problem = f"needs {what}, and with {type(selection).__name__} clients send single {sends}"
        raise BadValue("weighting", name, problem)
    if isinstance(weighting, WithGain) and not isinstance(combine, Mean):
        problem = f"stretches the mean, which {type(combine).__name__} takes the place of"
        raise BadValue("weighting", name, problem)
