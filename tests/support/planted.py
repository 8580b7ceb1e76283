"""Rules with a mistake each, such as one makes, beside the check of `check_rule` that must name it."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from fedstrata import Combination, FedLDF, FedProx, Objective, SampleSize, ServerStep, Weighting
from fedstrata.objectives import Scaffold

# What is wrong in these rules is often their types, too: a method's arguments and results are `Any`.


def by_size(cohort: Any) -> Any:
    return cohort.sizes[:, None].expand(-1, len(cohort.layers))


# --- on every axis ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HalfAnObjective:
    refresh: ClassVar[str] = "round"
    differentiable: ClassVar[bool] = False

    def stiffness(self, local: Any, anchor: Any, state: Any, layers: Any) -> Any:
        return {}


@dataclass
class CanBeChanged(Weighting):
    power: float = 1.0

    def weigh(self, cohort: Any, state: Any) -> Any:
        return by_size(cohort) ** self.power, state


@dataclass(frozen=True)
class HasAList(Weighting):
    powers: list[float] = field(default_factory=lambda: [1.0])

    def weigh(self, cohort: Any, state: Any) -> Any:
        return by_size(cohort), state


@dataclass(frozen=True)
class HasATuple(Weighting):
    """TOML has arrays only, which come back as lists."""

    powers: tuple[float, ...] = (1.0, 2.0)

    def weigh(self, cohort: Any, state: Any) -> Any:
        return by_size(cohort), state


@dataclass(frozen=True)
class ForgetsAnOption(Objective):
    mu: float = 0.1
    limit: float | None = 1.0
    """TOML has no None: an option that is left out is 1.0 again."""

    def stiffness(self, local: Any, anchor: Any, state: Any, layers: Any) -> Any:
        return {name: torch.tensor(self.mu, dtype=w.dtype) for name, w in local.items()}


@dataclass(frozen=True)
class Counts(ServerStep):
    """Remembers on the object how often it was asked."""

    def step(self, old: Any, aggregate: Any, state: Any, cohort: Any) -> Any:
        object.__setattr__(self, "asked", getattr(self, "asked", 0) + 1)
        return old + (aggregate - old) / self.asked, state  # type: ignore[attr-defined]


# --- objectives ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GraphIsGone(FedProx):
    differentiable: ClassVar[bool] = True


@dataclass(frozen=True)
class HoldsBuffers(FedProx):
    def stiffness(self, local: Any, anchor: Any, state: Any, layers: Any) -> Any:
        return {name: torch.tensor(self.mu) for name in layers.entries}


@dataclass(frozen=True)
class PushesAway(FedProx):
    def stiffness(self, local: Any, anchor: Any, state: Any, layers: Any) -> Any:
        return {name: (anchor[name] - w).sign() for name, w in local.items()}


@dataclass(frozen=True)
class OnePerLayer(FedProx):
    def stiffness(self, local: Any, anchor: Any, state: Any, layers: Any) -> Any:
        return {name: torch.ones(len(layers) + 1, dtype=w.dtype) for name, w in local.items()}


@dataclass(frozen=True)
class InDoublePrecision(FedProx):
    def stiffness(self, local: Any, anchor: Any, state: Any, layers: Any) -> Any:
        return {name: torch.full(w.shape, self.mu, dtype=torch.float64) for name, w in local.items()}


@dataclass(frozen=True)
class NoSlopeAtZero(FedProx):
    """The derivative of a root is infinite at 0, where training begins."""

    refresh: ClassVar[Literal["step"]] = "step"
    differentiable: ClassVar[bool] = True

    def stiffness(self, local: Any, anchor: Any, state: Any, layers: Any) -> Any:
        return {name: (w - anchor[name]).square().sum().sqrt() for name, w in local.items()}


@dataclass(frozen=True)
class MovesTheAnchor(FedProx):
    def stiffness(self, local: Any, anchor: Any, state: Any, layers: Any) -> Any:
        return {name: w.sub_(0.1).square().mean() for name, w in anchor.items()}


@dataclass(frozen=True)
class ByDriftWithoutDrift(FedProx):
    """0/0 where the global model did not move."""

    def init(self, layers: Any) -> Any:
        return {"mu": torch.full((len(layers),), self.mu, dtype=torch.float64)}

    def after_round(self, new: Any, old: Any, state: Any, layers: Any) -> Any:
        drift = layers.norms(new - old)
        return {"mu": self.mu * drift / drift.max()}


@dataclass(frozen=True)
class HalfPrecisionState(FedProx):
    """Half precision does not travel to clients."""

    def init(self, layers: Any) -> Any:
        return {"mu": torch.tensor([self.mu], dtype=torch.float16)}


@dataclass(frozen=True)
class ForgetsInPlace(Scaffold):
    def remember(self, memory: Any, work: Any) -> Any:
        memory["c"].add_(work.update)
        return memory


@dataclass(frozen=True)
class MemoryThatGrows(Scaffold):
    def remember(self, memory: Any, work: Any) -> Any:
        return {"c": torch.cat([memory["c"], work.update])}


# --- selections ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DrawsForItself:
    decides: ClassVar[str] = "before"

    def draw(self, clients: Any, layers: Any, generator: Any) -> Any:
        return torch.from_numpy(np.random.default_rng().random((clients, len(layers))) < 0.5)


@dataclass(frozen=True)
class DrawsGlobally:
    decides: ClassVar[str] = "before"

    def draw(self, clients: Any, layers: Any, generator: Any) -> Any:
        return torch.from_numpy(np.random.rand(clients, len(layers)) < 0.5)


@dataclass(frozen=True)
class Floats:
    decides: ClassVar[str] = "before"

    def draw(self, clients: Any, layers: Any, generator: Any) -> Any:
        return torch.ones(clients, len(layers))


@dataclass(frozen=True)
class Nobody:
    decides: ClassVar[str] = "before"

    def draw(self, clients: Any, layers: Any, generator: Any) -> Any:
        return torch.zeros(clients, len(layers), dtype=torch.bool)


@dataclass(frozen=True)
class AlwaysFour(FedLDF):
    """Does not think of rounds with fewer clients."""

    def choose(self, scores: Any) -> Any:
        best = scores.topk(4, dim=0).indices
        return torch.zeros(scores.shape, dtype=torch.bool).scatter_(0, best, True)


@dataclass(frozen=True)
class InTurns(FedLDF):
    def choose(self, scores: Any) -> Any:
        return (torch.arange(len(scores)) % 2 == 0)[:, None].expand(scores.shape)


@dataclass(frozen=True)
class ByDirection(FedLDF):
    """0/0 for a layer that did not move."""

    def score(self, update: Any, layers: Any) -> Any:
        return layers.norms(update) / layers.norms(update).max()


@dataclass(frozen=True)
class SortsTheUpdate(FedLDF):
    def score(self, update: Any, layers: Any) -> Any:
        return layers.norms(update.abs_())


@dataclass(frozen=True)
class ByProcess:
    decides: ClassVar[str] = "on_client"

    def pick(self, update: Any, layers: Any) -> Any:
        return torch.arange(layers.units) % 2 == os.getpid() % 2


@dataclass(frozen=True)
class LayersForUnits:
    decides: ClassVar[str] = "on_client"

    def pick(self, update: Any, layers: Any) -> Any:
        return torch.ones(len(layers), dtype=torch.bool)


# --- weightings ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoEpsilon(Weighting):
    """1/0 for an update of zeros."""

    def weigh(self, cohort: Any, state: Any) -> Any:
        return 1 / cohort.update_squared, state


@dataclass(frozen=True)
class Cosines(Weighting):
    """A cosine may be negative."""

    def weigh(self, cohort: Any, state: Any) -> Any:
        return cohort.layer_angles.cos(), state


@dataclass(frozen=True)
class OneForEachClient(Weighting):
    def weigh(self, cohort: Any, state: Any) -> Any:
        return cohort.sizes, state


@dataclass(frozen=True)
class Noisy(Weighting):
    def weigh(self, cohort: Any, state: Any) -> Any:
        return by_size(cohort) * torch.rand(len(cohort), 1, dtype=torch.float64), state


@dataclass(frozen=True)
class DrawsInPython(Weighting):
    def weigh(self, cohort: Any, state: Any) -> Any:
        return by_size(cohort) * (1 + random.random()), state


@dataclass(frozen=True)
class ByPosition(Weighting):
    def weigh(self, cohort: Any, state: Any) -> Any:
        return by_size(cohort) / torch.arange(1, len(cohort) + 1)[:, None], state


@dataclass(frozen=True)
class Tables(Weighting):
    """How far a client has gone so far; this one is right."""

    def init(self, clients: Any, layers: Any) -> Any:
        return {"gone": torch.zeros(clients, len(layers), dtype=torch.float64)}

    def weigh(self, cohort: Any, state: Any) -> Any:
        gone = state["gone"][cohort.clients] + cohort.update_squared
        return cohort.sizes[:, None] / (1 + gone), {"gone": state["gone"].index_put((cohort.clients,), gone)}


@dataclass(frozen=True)
class TablesByPosition(Tables):
    def weigh(self, cohort: Any, state: Any) -> Any:
        return super().weigh(replace(cohort, clients=torch.arange(len(cohort))), state)


@dataclass(frozen=True)
class TablesInPlace(Tables):
    def weigh(self, cohort: Any, state: Any) -> Any:
        weights, after = super().weigh(cohort, state)
        state["gone"].copy_(after["gone"])
        return weights, state


@dataclass(frozen=True)
class SharesOfAll(Tables):
    """1/N at the beginning, where N may grow."""

    def init(self, clients: Any, layers: Any) -> Any:
        return {"gone": torch.full((clients, len(layers)), 1 / max(1, clients), dtype=torch.float64)}


@dataclass(frozen=True)
class AStateOfFloats(SampleSize):
    def init(self, clients: Any, layers: Any) -> Any:
        return {"rounds": 0.0}


@dataclass(frozen=True)
class AStateThatGrows(SampleSize):
    def init(self, clients: Any, layers: Any) -> Any:
        return {"seen": torch.zeros(0)}

    def weigh(self, cohort: Any, state: Any) -> Any:
        return by_size(cohort), {"seen": torch.cat([state["seen"], cohort.sizes.float()])}


@dataclass(frozen=True)
class BrainFloats(SampleSize):
    """NumPy has no bfloat16."""

    def init(self, clients: Any, layers: Any) -> Any:
        return {"mean": torch.zeros(2, dtype=torch.bfloat16)}


MEMORY: dict[str, float] = {}


@dataclass(frozen=True)
class RemembersElsewhere(Weighting):
    """The largest size that was ever seen, in a module's own table."""

    def weigh(self, cohort: Any, state: Any) -> Any:
        MEMORY["weight"] = MEMORY.get("weight", 0.0) + float(cohort.sizes.max())
        return MEMORY["weight"] + by_size(cohort), state


@dataclass(frozen=True)
class NearTheMeanOfAll(Weighting):
    """A mean over all clients of the round, in which who sent nothing is a zero."""

    def weigh(self, cohort: Any, state: Any) -> Any:
        updates = torch.stack(cohort.updates).double()
        away = (updates - updates.mean(0)).abs().sum(1, keepdim=True)
        return (1 / (away + 1e-6)).expand(-1, len(cohort.layers)), state


@dataclass(frozen=True)
class OneGain(SampleSize):
    def gain(self, cohort: Any) -> Any:
        return cohort.steps.double().mean()


@dataclass(frozen=True)
class GainOfZeroUpdates(SampleSize):
    """0/0 where nothing moved."""

    def gain(self, cohort: Any) -> Any:
        return cohort.mean_squared / cohort.update_squared.mean(0)


# --- server steps ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rounded(ServerStep):
    def step(self, old: Any, aggregate: Any, state: Any, cohort: Any) -> Any:
        return aggregate.double(), state


@dataclass(frozen=True)
class UnitStep(ServerStep):
    """0/0 where nothing moved."""

    def step(self, old: Any, aggregate: Any, state: Any, cohort: Any) -> Any:
        return old + (aggregate - old) / (aggregate - old).norm(), state


@dataclass(frozen=True)
class MovesTheOldModel(ServerStep):
    def step(self, old: Any, aggregate: Any, state: Any, cohort: Any) -> Any:
        return old.add_(aggregate - old, alpha=0.5), state


@dataclass(frozen=True)
class Shrinks(ServerStep):
    def step(self, old: Any, aggregate: Any, state: Any, cohort: Any) -> Any:
        return 0.9 * aggregate, state


@dataclass(frozen=True)
class MomentumOfEverything(ServerStep):
    beta: float = 0.9

    def init(self, layers: Any) -> Any:
        return {"velocity": torch.zeros(layers.numel, dtype=layers.dtype)}

    def step(self, old: Any, aggregate: Any, state: Any, cohort: Any) -> Any:
        velocity = self.beta * state["velocity"] + aggregate - old
        return old + velocity, {"velocity": velocity}


# --- combinations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sum(Combination):
    def combine(self, model: Any, cohort: Any, weights: Any) -> Any:
        return model + torch.stack(cohort.updates).sum(0)


@dataclass(frozen=True)
class MeanOfModels(Combination):
    """Of local models, where nobody's is zero."""

    def combine(self, model: Any, cohort: Any, weights: Any) -> Any:
        new = torch.zeros_like(model)
        for at, layer in enumerate(cohort.layers.layers):
            part, mass = slice(layer.start, layer.stop), (weights * cohort.sent)[:, at]
            for share, update in zip((mass / mass.sum().clamp_min(1e-9)).tolist(), cohort.updates, strict=True):
                new[part] += share * (model + update)[part]
        return new


@dataclass(frozen=True)
class SmallSteps(Combination):
    """Takes the scale of the weights for a size."""

    def combine(self, model: Any, cohort: Any, weights: Any) -> Any:
        shares = weights / weights.sum(0).clamp_min(100)
        step = torch.zeros_like(model)
        for at, layer in enumerate(cohort.layers.layers):
            for share, update in zip(shares[:, at].tolist(), cohort.updates, strict=True):
                step[layer.start : layer.stop] += share * update[layer.start : layer.stop]
        return model + step


@dataclass(frozen=True)
class TheLast(Combination):
    def combine(self, model: Any, cohort: Any, weights: Any) -> Any:
        return model + cohort.updates[-1]


PLANTED: list[tuple[Any, str]] = [
    (HalfAnObjective(), "protocol"),
    (CanBeChanged(), "frozen"),
    (HasAList(), "frozen"),
    (HasATuple(), "named_in_a_recipe"),
    (HasATuple(), "recipe"),
    (ForgetsAnOption(limit=None), "named_in_a_recipe"),
    (Counts(), "keeps_nothing"),
    (Counts(), "resuming"),
    (GraphIsGone(), "refresh"),
    (HoldsBuffers(), "stiffness"),
    (PushesAway(), "stiffness"),
    (OnePerLayer(), "stiffness"),
    (InDoublePrecision(), "stiffness"),
    (NoSlopeAtZero(), "pull"),
    (MovesTheAnchor(), "arguments_stay"),
    (ByDriftWithoutDrift(), "state_has_one_form"),
    (HalfPrecisionState(), "flower"),
    (ForgetsInPlace(), "memory"),
    (MemoryThatGrows(), "memory"),
    (DrawsForItself(), "same_twice"),
    (DrawsGlobally(), "no_global_generator"),
    (Floats(), "mask"),
    (Nobody(), "clients_train"),
    (AlwaysFour(), "mask"),
    (InTurns(), "order_of_scores"),
    (ByDirection(), "scores"),
    (SortsTheUpdate(), "arguments_stay"),
    (ByProcess(), "workers"),
    (LayersForUnits(), "mask"),
    (NoEpsilon(), "weights"),
    (Cosines(), "weights"),
    (OneForEachClient(), "weights"),
    (OneGain(), "gain"),
    (GainOfZeroUpdates(), "gain"),
    (Noisy(), "no_global_generator"),
    (DrawsInPython(), "no_global_generator"),
    (ByPosition(), "order_of_clients"),
    (TablesByPosition(), "order_of_clients"),
    (TablesInPlace(), "arguments_stay"),
    (SharesOfAll(), "state_has_room_for_more_clients"),
    (AStateOfFloats(), "state_has_one_form"),
    (AStateThatGrows(), "state_has_one_form"),
    (BrainFloats(), "state_can_be_saved"),
    (RemembersElsewhere(), "resuming"),
    (NearTheMeanOfAll(), "who_sent_nothing_does_not_count"),
    (Rounded(), "model_has_its_form"),
    (UnitStep(), "model_has_its_form"),
    (MovesTheOldModel(), "arguments_stay"),
    (Shrinks(), "no_update_no_step"),
    (MomentumOfEverything(), "buffers_are_adopted"),
    (Sum(), "equal_updates"),
    (MeanOfModels(), "what_nobody_sent_stays"),
    (SmallSteps(), "weights_on_any_scale"),
    (TheLast(), "order_of_clients"),
]
"""A rule, and the check that finds its mistake."""
