"""What the server knows between rounds, and how a round changes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from fedstrata.core.axes import Algorithm, State
from fedstrata.core.cohort import Cohort, cut
from fedstrata.core.determinism import in_threads
from fedstrata.core.errors import RuleError
from fedstrata.core.layers import Layers


@dataclass(frozen=True)
class ServerState:
    """Everything that a later round depends on."""

    round: int
    model: Tensor
    objective: State = field(default_factory=dict)
    weighting: State = field(default_factory=dict)
    server: State = field(default_factory=dict)


def initial_state(model: Tensor, algorithm: Algorithm, clients: int, layers: Layers) -> ServerState:
    """The server before its first round."""
    return ServerState(
        round=0,
        model=model,
        objective=algorithm.objective.init(layers),
        weighting=algorithm.weighting.init(clients, layers),
        server=algorithm.server.init(layers),
    )


def conclude(state: ServerState, algorithm: Algorithm, cohort: Cohort) -> tuple[ServerState, Tensor]:
    """The server's end of a round: weigh the accepted updates, aggregate, step. The next state, and the weights."""
    weights, weighting = algorithm.weighting.weigh(cohort, state.weighting)
    _check_weights(weights, cohort, algorithm)
    combined = aggregate(state.model, cohort, weights)
    new, server = algorithm.server.step(state.model, combined, state.server, cohort.layers)
    objective = algorithm.objective.after_round(new, state.model, state.objective, cohort.layers)
    return ServerState(cohort.round, new, objective, weighting, server), weights


def _check_weights(weights: Tensor, cohort: Cohort, algorithm: Algorithm) -> None:
    """A rule that answers nonsense is stopped here, and not by a model that silently stands still."""
    name, shape = type(algorithm.weighting).__name__, (len(cohort), len(cohort.layers))
    if tuple(weights.shape) != shape:
        raise RuleError(f"weighting {name} gave weights of shape {list(weights.shape)}, expected {list(shape)}")
    if not bool((torch.isfinite(weights) & (weights >= 0)).all()):
        raise RuleError(f"weighting {name} gave a weight that is negative or not finite in round {cohort.round}")


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


def aggregate(model: Tensor, cohort: Cohort, weights: Tensor) -> Tensor:
    """The one equation: θ_u ← θ_u + Σ_k m_ku w_kl Δ_ku / Σ_j m_ju w_jl; what nobody sent stays as it is.

    Every update is read once, and the new model is all the memory it takes. The sum over clients is taken in the
    model's own precision, to which the result is rounded anyway.
    """
    new = torch.empty_like(model)

    def combine(pieces: Sequence[_Piece]) -> None:
        for first, last, shares in pieces:
            step = torch.zeros(last - first, dtype=model.dtype)
            for share, update in zip(shares, cohort.updates, strict=True):
                if isinstance(share, Tensor):
                    step.view(len(share), -1).addcmul_(share, update[first:last].view(len(share), -1))
                elif share > 0:
                    step.add_(update[first:last], alpha=share)
            torch.add(model[first:last], step, out=new[first:last])

    in_threads(combine, list(_pieces(cohort, weights)), cohort.numbers)
    return new


_Piece = tuple[int, int, Sequence[float | Tensor]]
"""first:last of the flat vector, and each client's m w / Σ m w there: a number, or one for each unit [rows, 1]."""

_PIECE = 1 << 16
"""How many numbers are combined at a time: few enough for a core's cache, enough to make each call worth it."""


def _pieces(cohort: Cohort, weights: Tensor) -> Iterator[_Piece]:
    """The whole model in pieces, and who has which share in them."""
    tiny = torch.finfo(torch.float64).tiny
    layers, masses = cohort.layers.layers, [weights[:, at] * cohort.sent[:, at] for at in range(len(cohort.layers))]
    if cohort.units is None:
        shares = [(mass / mass.sum().clamp_min(tiny)).tolist() for mass in masses]
        for alike, neighbours in groupby(zip(layers, shares, strict=True), key=itemgetter(1)):
            run = [layer for layer, _ in neighbours]
            yield from ((first, last, alike) for first, last in cut(run[0].start, run[-1].stop, _PIECE))
        return
    for layer, mass in zip(layers, masses, strict=True):
        for entry in layer.entries:
            by_unit = mass[:, None] * cohort.units[:, entry.first_unit : entry.first_unit + entry.units]
            by_unit = (by_unit / by_unit.sum(0).clamp_min(tiny)).to(cohort.layers.dtype)
            length = (entry.stop - entry.start) // entry.units
            for top, bottom in cut(0, entry.units, max(1, _PIECE // length)):
                first, last = entry.start + top * length, entry.start + bottom * length
                yield first, last, list(by_unit[:, top:bottom, None])
