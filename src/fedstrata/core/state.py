"""What the server knows between rounds, and how a round changes it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedstrata.core.axes import Algorithm, State, WithGain
from fedstrata.core.cohort import Cohort
from fedstrata.core.errors import RuleError
from fedstrata.core.layers import Layers
from fedstrata.core.memory import empty_table, remembers


@dataclass(frozen=True)
class ServerState:
    """Everything that a later round depends on."""

    round: int
    model: Tensor
    objective: State = field(default_factory=dict)
    weighting: State = field(default_factory=dict)
    server: State = field(default_factory=dict)
    memory: State = field(default_factory=dict)
    """Which version of its memory each client has (`core/memory.py`); nothing, if clients remember nothing."""


def initial_state(model: Tensor, algorithm: Algorithm, clients: int, layers: Layers) -> ServerState:
    """The server before its first round."""
    return ServerState(
        round=0,
        model=model,
        objective=algorithm.objective.init(layers),
        weighting=algorithm.weighting.init(clients, layers),
        server=algorithm.server.init(layers),
        memory=empty_table() if remembers(algorithm, layers) else {},
    )


def conclude(state: ServerState, algorithm: Algorithm, cohort: Cohort) -> tuple[ServerState, Tensor]:
    """The server's end of a round: weigh the accepted updates, aggregate, step. The next state, and the weights."""
    weights, weighting = algorithm.weighting.weigh(cohort, state.weighting)
    _check_weights(weights, cohort, algorithm)
    combined = algorithm.combine.combine(state.model, cohort, weights)
    _stretch(combined, state.model, cohort, algorithm)
    new, server = algorithm.server.step(state.model, combined, state.server, cohort)
    objective = algorithm.objective.after_round(new, state.model, state.objective, cohort.layers)
    if after_cohort := getattr(algorithm.objective, "after_cohort", None):
        objective = after_cohort(cohort, objective)
    return ServerState(cohort.round, new, objective, weighting, server, state.memory), weights


def _check_weights(weights: Tensor, cohort: Cohort, algorithm: Algorithm) -> None:
    """A rule that answers nonsense is stopped here, and not by a model that silently stands still."""
    name, shape = type(algorithm.weighting).__name__, (len(cohort), len(cohort.layers))
    if tuple(weights.shape) != shape:
        raise RuleError(f"weighting {name} gave weights of shape {list(weights.shape)}, expected {list(shape)}")
    if not bool((torch.isfinite(weights) & (weights >= 0)).all()):
        raise RuleError(f"weighting {name} gave a weight that is negative or not finite in round {cohort.round}")


def _stretch(combined: Tensor, model: Tensor, cohort: Cohort, algorithm: Algorithm) -> None:
    """θ_u ← θ_u + g_l (mean_u − θ_u) in place, where a weighting has a gain g."""
    if not isinstance(algorithm.weighting, WithGain):
        return
    gain = algorithm.weighting.gain(cohort)
    name, layers = type(algorithm.weighting).__name__, cohort.layers.layers
    if tuple(gain.shape) != (len(layers),) or not bool((torch.isfinite(gain) & (gain >= 0)).all()):
        problem = f"expected {len(layers)} numbers ≥ 0"
        raise RuleError(f"weighting {name} gave a gain of {gain.tolist()} in round {cohort.round}, {problem}")
    for layer, factor in zip(layers, gain.tolist(), strict=True):
        if factor != 1:
            old, new = (flat[layer.start : layer.trainable_stop] for flat in (model, combined))
            new.sub_(old).mul_(factor).add_(old)


def grown(state: State, fresh: State) -> State:
    """A rule's state with room for more clients: what was known lies in the leading corner of what a new one has."""

    def grow(old: Tensor, new: Tensor) -> Tensor:
        if old.shape == new.shape:
            return old
        larger = new.clone()
        larger[tuple(slice(0, size) for size in old.shape)] = old
        return larger

    return {name: grow(old, fresh[name]) for name, old in state.items()}


def stays_finite(new: Tensor, old: Tensor) -> bool:
    """Whether a step made no number infinite or NaN that was not so before, as −∞ in a causal mask is."""
    return bool(new.sum().isfinite()) or not bool((~new.isfinite() & old.isfinite()).any())
