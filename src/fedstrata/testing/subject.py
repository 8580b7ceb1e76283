"""What is checked: a rule, the algorithm that it makes with FedAvg's other choices, and all that it answers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstrata.clients.local import ProximalTerm
from fedstrata.core import rng
from fedstrata.core.axes import Algorithm, MovesSome, SelectsAfterScores, SelectsBefore, State, Tensors
from fedstrata.core.cohort import Cohort
from fedstrata.core.errors import BadValue, UserError
from fedstrata.core.layers import Layers
from fedstrata.core.messages import SCORE_DTYPE
from fedstrata.core.round import check_cohort
from fedstrata.core.state import ServerState, conclude, initial_state
from fedstrata.testing.cases import CLIENTS, UPLOADS, history, sends, situations

KINDS = {
    "objective": "an objective",
    "selection": "a selection",
    "weighting": "a weighting",
    "server": "a server step",
    "combine": "a combination",
}
_TOLD_BY = {
    "objective": ("stiffness", "after_round"),
    "selection": ("decides", "draw", "score", "choose", "pick"),
    "weighting": ("weigh",),
    "server": ("step",),
    "combine": ("combine",),
}
"""A rule with one of these is on that axis."""


def axis_of(rule: object) -> str:
    """The axis that a rule is on, by the methods that it has."""
    if isinstance(rule, type):
        raise BadValue("rule", rule.__name__, f"is a class: write check_rule({rule.__name__}(…))")
    found = [axis for axis, methods in _TOLD_BY.items() if any(hasattr(rule, method) for method in methods)]
    if len(found) != 1:
        known = "; ".join(f"{KINDS[axis]} has {' or '.join(methods)}" for axis, methods in _TOLD_BY.items())
        what = "is on no axis" if not found else f"is {' and '.join(KINDS[axis] for axis in found)} in one"
        raise BadValue("rule", rule, f"{what} ({known})")
    return found[0]


@dataclass
class Given:
    """Tensors that a rule was handed, as they were then."""

    seen: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)

    def note(self, **tensors: Tensor | Sequence[Tensor] | Mapping[str, Tensor]) -> None:
        """Remember what these are now."""
        for name, found in tensors.items():
            named = {name: found} if isinstance(found, Tensor) else as_items(name, found)
            self.seen += [(key, tensor, tensor.detach().clone()) for key, tensor in named.items()]

    def changed(self) -> list[str]:
        """The names of those that are different now."""
        return sorted({name for name, now, before in self.seen if not same(now.detach(), before)})


@dataclass(eq=False)
class Subject:
    """A rule that is checked."""

    rule: Any
    axis: str

    def __post_init__(self) -> None:
        self._untouched = copy.deepcopy(self.rule)

    def fresh(self) -> Any:
        """The rule as it was handed over, as another machine would have it."""
        return copy.deepcopy(self._untouched)

    def algorithm(self, rule: Any = None) -> Algorithm:
        """FedAvg with this rule in it; with private layers, if epochs move these or the others."""
        private = ("head.*",) if isinstance(self.rule, MovesSome) else ()
        return Algorithm(**{self.axis: self.rule if rule is None else rule}, private=private)

    def takes(self, cohort: Cohort) -> bool:
        """Whether the rule can do with what these clients sent: a weighting says what it `compares`."""
        compares = getattr(self.rule, "compares", UPLOADS[-1])
        return UPLOADS.index(sends(cohort)) <= UPLOADS.index(compares)

    def situations(self, layers: Layers) -> dict[str, Cohort]:
        """Cohorts in situations that the rule must have an answer for."""
        return {name: one for name, one in situations(layers).items() if self.takes(one)}

    def history(self, layers: Layers) -> list[Cohort]:
        """Several rounds, with partial uploads if the rule can do with them."""
        return history(layers, partial=getattr(self.rule, "compares", UPLOADS[-1]) != UPLOADS[0])

    def attributes(self) -> dict[str, Any]:
        """What the object holds."""
        held = (
            {item.name: getattr(self.rule, item.name) for item in fields(self.rule)} if is_dataclass(self.rule) else {}
        )
        return copy.deepcopy({**held, **getattr(self.rule, "__dict__", {})})

    # --- rounds on the server ---------------------------------------------------------------------------------------

    def begin(self, layers: Layers, rule: Any = None) -> ServerState:
        """The server before the first round."""
        return initial_state(cohort_model(layers), self.algorithm(rule), CLIENTS, layers)

    def conclude(self, state: ServerState, cohort: Cohort, given: Given | None = None) -> tuple[ServerState, Tensor]:
        """One round on the server: the next state, and the weights."""
        cohort = replace(  # copies: what a rule changes in place is changed once
            cohort,
            model=state.model,
            clients=cohort.clients.clone(),
            sizes=cohort.sizes.clone(),
            sent=cohort.sent.clone(),
            updates=tuple(update.clone() for update in cohort.updates),
        )
        if given is not None:
            given.note(model=state.model, updates=cohort.updates, sizes=cohort.sizes, sent=cohort.sent)
            given.note(clients=cohort.clients, state=getattr(state, self.axis, {}))
            given.note(**{name: found for name in ("steps", "reach") if (found := getattr(cohort, name)) is not None})
        return conclude(state, self.algorithm(), cohort)

    def first_round(self, cohort: Cohort) -> tuple[Tensor, Tensor, Tensor]:
        """The model before and after a first round, and the weights."""
        state = self.begin(cohort.layers)
        after, weights = self.conclude(state, cohort)
        return state.model, after.model, weights

    def rounds(self, cohorts: Sequence[Cohort], given: Given | None = None) -> list[tuple[ServerState, Tensor]]:
        """Several rounds on the server, from the first; the weights of the state before them are none."""
        found = [(self.begin(cohorts[0].layers), torch.zeros(0))]
        for cohort in cohorts:
            found.append(self.conclude(found[-1][0], cohort, given))
        return found

    # --- everything that a rule answers -----------------------------------------------------------------------------

    def answers(self, layers: Layers, rule: Any = None) -> tuple[dict[str, Tensor], Given]:
        """What the rule answers to questions of every kind, and what it was handed."""
        subject = self if rule is None else Subject(rule, self.axis)
        given = Given()
        asked = {"objective": subject._pulls, "selection": subject._choices}.get(self.axis)
        found = dict(asked(layers, given)) if asked else {}
        if self.axis != "selection":
            for number, (state, weights) in enumerate(subject.rounds(subject.history(layers), given)):
                found |= {f"model {number}": state.model, f"weights {number}": weights}
                found |= as_items(f"state {number}", getattr(state, self.axis, {}))
        return found, given

    def terms(self, layers: Layers) -> Iterator[tuple[str, ProximalTerm]]:
        """The objective's proximal term where training begins, and where the weights have moved."""
        state = self.begin(layers)
        later = self.rounds(self.history(layers)[:1])[-1][0]
        away = torch.from_numpy(rng.generator(0, "away").normal(size=layers.numel)).to(layers.dtype)
        for when, server, moved in (
            ("where training begins", state, torch.zeros_like(away)),
            ("after some steps", state, 0.1 * away),
            ("in the second round", later, 0.1 * away),
        ):
            anchor = layers.views(server.model, trainable_only=True)
            there = layers.views(server.model + moved, trainable_only=True)
            local = {name: tensor.detach().requires_grad_() for name, tensor in there.items()}
            yield when, ProximalTerm(self.rule, server.objective, layers, local, anchor)

    def _pulls(self, layers: Layers, given: Given) -> Iterator[tuple[str, Tensor]]:
        for when, term in self.terms(layers):
            given.note(state=term.state, local=term.local, anchor=term.anchor)
            term.refresh()
            yield from as_items(when, term.stiffness).items()

    def selection(self, count: int) -> Any:
        """The selection for a round of so many clients; None if that many are refused."""
        algorithm = self.algorithm()
        try:
            check_cohort(algorithm, count)
        except UserError:
            return None
        rule = algorithm.selection
        for_cohort = getattr(rule, "for_cohort", None)
        return rule if for_cohort is None else for_cohort(count)

    def _choices(self, layers: Layers, given: Given) -> Iterator[tuple[str, Tensor]]:
        updates = [row.clone() for row in history(layers)[0].updates] + [torch.zeros(layers.numel, dtype=layers.dtype)]
        given.note(update=updates)
        if isinstance(self.rule, SelectsBefore):
            for count, selection in self.for_counts():
                yield f"draw of {count}", selection.draw(count, layers, np.random.default_rng(count))
        elif isinstance(self.rule, SelectsAfterScores):
            for number, update in enumerate(updates):
                yield f"score {number}", self.rule.score(update, layers)
            for count, selection in self.for_counts():
                scores = random_scores(count, layers)
                given.note(scores=scores)
                yield f"choice of {count}", selection.choose(scores)
        else:
            for number, update in enumerate(updates):
                yield f"pick {number}", self.rule.pick(update, layers)

    def for_counts(self) -> Iterator[tuple[int, Any]]:
        """Cohort sizes that the selection accepts, with the selection for each."""
        accepted = ((count, self.selection(count)) for count in (1, 2, 5, 8, 20))
        yield from ((count, selection) for count, selection in accepted if selection is not None)


class Whole(Subject):
    """A whole algorithm."""

    def __init__(self, rule: Algorithm) -> None:
        super().__init__(rule, "algorithm")

    def algorithm(self, rule: Any = None) -> Algorithm:
        """Itself."""
        whole: Algorithm = self.rule if rule is None else rule
        return whole


def cohort_model(layers: Layers) -> Tensor:
    """A first model."""
    return torch.from_numpy(rng.generator(0, "first model").normal(size=layers.numel)).to(layers.dtype)


def random_scores(count: int, layers: Layers) -> Tensor:
    """Scores of so many clients, none equal to another."""
    draw = rng.generator(0, "scores", client=count)
    ranks = np.stack([draw.permutation(count) for _ in range(len(layers))], axis=1)
    return torch.from_numpy((1 + ranks) / count).to(SCORE_DTYPE)


def as_items(name: str, tensors: State | Tensors | Sequence[Tensor]) -> dict[str, Tensor]:
    """Tensors under names that say whose they are."""
    pairs = tensors.items() if isinstance(tensors, Mapping) else enumerate(tensors)
    return {f"{name} {key!r}" if isinstance(key, str) else f"{name}[{key}]": tensor for key, tensor in pairs}


def kind_of(tensor: Tensor) -> str:
    """Dtype and shape."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; NaN is NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.equal(one, other) or ((one == other) | ((one != one) & (other != other))).all())


def apart(one: Tensor, other: Tensor) -> float:
    """How far two tensors are apart, relative to the larger numbers of the second; infinite where one has NaN."""
    size = other.double().abs().max().clamp_min(1e-300)
    away = ((one.double() - other.double()).abs().max() / size).nan_to_num(torch.inf)
    return float(away)


NEAR = 1e-4
"""Relative; float32 has seven digits, and a rule may lose some in an arccos."""
