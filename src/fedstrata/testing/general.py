"""Checks for rules on every axis: what makes one repeatable, and one that a recipe can name."""

from __future__ import annotations

import dataclasses
import random
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tomli_w
import torch
from torch import Tensor

from fedstrata.algorithms import from_table, to_table
from fedstrata.core.errors import UserError
from fedstrata.testing.cases import all_layers
from fedstrata.testing.report import RULES, Unmet, check, expect
from fedstrata.testing.subject import Subject, same


@check(*RULES)
def protocol(subject: Subject) -> None:
    """The rule has all methods and attributes of its axis."""
    try:
        subject.algorithm()
    except UserError as error:
        raise Unmet(str(error)) from None


@check(*RULES)
def frozen(subject: Subject) -> None:
    """The rule is a frozen dataclass of hyperparameters, hashable and equal to another one with the same."""
    rule = subject.rule
    name = type(rule).__name__
    expect(dataclasses.is_dataclass(rule), f"{name} is no dataclass: put @dataclass(frozen=True) above it")
    expect(type(rule).__dataclass_params__.frozen, f"{name} can be changed: write @dataclass(frozen=True)")
    try:
        hash(rule)
    except TypeError as error:
        raise Unmet(f"hash({name}(…)) raises TypeError: {error}; a tuple is hashable, a list is not") from None
    other = dataclasses.replace(rule)
    expect(rule == other, f"{other!r} is not equal to {rule!r}")


@check(*RULES)
def named_in_a_recipe(subject: Subject) -> None:
    """The rule's name and hyperparameters, written into a recipe's table as TOML, give the same rule again."""
    table = to_table(subject.algorithm())
    try:
        again = getattr(from_table(tomllib.loads(tomli_w.dumps(table))), subject.axis)
    except (UserError, TypeError) as error:
        raise Unmet(f"{error} (written as {table.get(subject.axis)})") from None
    expect(again == subject.rule, f"{again!r} instead of {subject.rule!r}")


@check(*RULES)
def arguments_stay(subject: Subject) -> None:
    """Nothing that the rule is handed is changed in place: state, model, updates, scores."""
    for what, layers in all_layers().items():
        _, given = subject.answers(layers)
        expect(not given.changed(), f"{', '.join(given.changed())} changed in place ({what})")


@check(*RULES)
def same_twice(subject: Subject) -> None:
    """The same questions have the same answers, bit for bit: asked again, and of another object like it."""
    for what, layers in all_layers().items():
        first, _ = subject.answers(layers)
        for whose, rule in (("asked again", None), ("from a copy of the rule", subject.fresh())):
            second, _ = subject.answers(layers, rule)
            expect(first.keys() == second.keys(), f"other names {whose}: {sorted(first.keys() ^ second.keys())}")
            different = [name for name, answer in first.items() if not same(answer, second[name])]
            expect(not different, f"{', '.join(different[:3])} different {whose} ({what})")


@check(*RULES)
def no_global_generator(subject: Subject) -> None:
    """The rule draws from the generator that it is handed, and not from torch's, NumPy's or Python's global one."""
    watched: dict[str, Callable[[], Any]] = {
        "torch's": lambda: torch.get_rng_state().numpy().tobytes(),
        "NumPy's": lambda: _bytes(np.random.get_state(legacy=True)),  # noqa: NPY002
        "Python's": random.getstate,
    }
    before = {whose: state() for whose, state in watched.items()}
    for layers in all_layers().values():
        subject.answers(layers)
    drawn = [whose for whose, state in watched.items() if state() != before[whose]]
    expect(not drawn, f"numbers were drawn from {' and '.join(drawn)} global generator")


def _bytes(state: Any) -> tuple[Any, ...]:
    return tuple(part.tobytes() if isinstance(part, np.ndarray) else part for part in state)


@check(*RULES)
def keeps_nothing(subject: Subject) -> None:
    """The object is the same after every call: what lasts is in the state."""
    layers = next(iter(all_layers().values()))
    before = subject.attributes()
    seen = []
    for _ in range(2):
        subject.answers(layers)
        seen.append(subject.attributes())
    once, twice = seen
    first = once | before  # what is computed once and kept is no memory
    changed = [name for name, value in twice.items() if name not in first or not _alike(value, first[name])]
    expect(not changed, f"{', '.join(changed)} changed on the object")


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_alike(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(np.all(one == other))
