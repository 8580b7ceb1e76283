"""The named algorithms, one line each, and how rules are found: ours, an installed package's, or `module:name`."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from importlib.metadata import entry_points
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from fedstrata.algorithm import Algorithm, SelectsAfterScores, SelectsBefore, SelectsOnClient
from fedstrata.checks import BadValue
from fedstrata.errors import MISSING, RecipeError
from fedstrata.objectives import OBJECTIVES
from fedstrata.selections import SELECTIONS
from fedstrata.weightings import WEIGHTINGS

AXES: dict[str, Mapping[str, Any]] = {
    "objective": OBJECTIVES,
    "selection": SELECTIONS,
    "weighting": WEIGHTINGS,
}

NAMED = {  # name: (objective, selection, weighting, what the paper calls a layer)
    "fedavg": ("plain", "all", "sample_size", "module"),
    "fedprox": ("fedprox", "all", "sample_size", "module"),
    "fedadp": ("plain", "all", "fedadp", "module"),
    "fedlayerwise": ("plain", "all", "fedlayerwise", "module"),
    "fedldf": ("plain", "fedldf", "sample_size", "block"),
    "random_layers": ("plain", "random_layers", "sample_size", "block"),
    "hdfl": ("plain", "random_clients", "sample_size", "block"),
    "neuron_pruning": ("plain", "neuron_pruning", "sample_size", "block"),
    "adaptive_mu": ("adaptive_mu", "all", "sample_size", "tensor"),
    "fedlap": ("fedlap", "all", "uniform", "module"),
}


def named(name: str, **options: Any) -> Algorithm:
    """An algorithm by its name; every option goes to the rule that has it: `named("fedldf", n=4)`."""
    return from_table({"name": name, **options})


fedavg = partial(named, "fedavg")
fedprox = partial(named, "fedprox")
fedadp = partial(named, "fedadp")
fedlayerwise = partial(named, "fedlayerwise")
fedldf = partial(named, "fedldf")
random_layers = partial(named, "random_layers")
hdfl = partial(named, "hdfl")
neuron_pruning = partial(named, "neuron_pruning")
adaptive_mu = partial(named, "adaptive_mu")
fedlap = partial(named, "fedlap")


def from_table(table: Mapping[str, Any]) -> Algorithm:
    """Build what a recipe's `[algorithm]` says: a name with options, three axes, or a name with some axes replaced."""
    axes: dict[str, dict[str, Any]] = {}
    for axis in AXES:
        given = table.get(axis, {})
        if not isinstance(given, Mapping):
            raise RecipeError(f"algorithm.{axis}", given, 'must be a table with a name, like { name = "…" }')
        axes[axis] = dict(given)
    options = {key: value for key, value in table.items() if key not in AXES and key != "name"}
    name = table.get("name")
    if name is not None and (not isinstance(name, str) or name not in NAMED):
        return _foreign_algorithm(name, options, axes)

    grouping = "module"
    if name is not None:
        *defaults, grouping = NAMED[name]
        for axis, default in zip(AXES, defaults, strict=True):
            axes[axis].setdefault("name", default)
    for axis, default in zip(AXES, NAMED["fedavg"], strict=False):
        axes[axis].setdefault("name", default)
    rules = {axis: _rule_class(axis, params) for axis, params in axes.items()}
    for key, value in options.items():
        owners = [axis for axis, rule in rules.items() if key in _parameters(rule)]
        if not owners:
            known = [parameter for rule in rules.values() for parameter in _parameters(rule)]
            owner = name or "this algorithm"
            raise RecipeError(f"algorithm.{key}", value, f"{owner} has no such option{_hint(key, known)}")
        for axis in owners:
            axes[axis].setdefault(key, value)
    built = {axis: _build(axis, rule, axes[axis]) for axis, rule in rules.items()}
    return Algorithm(**built, grouping=grouping)


def _foreign_algorithm(name: object, options: dict[str, Any], axes: dict[str, dict[str, Any]]) -> Algorithm:
    """A user's own algorithm: a function that returns an `Algorithm`."""
    function = find("algorithm", name, NAMED)
    if any(axes.values()):
        raise RecipeError("algorithm.name", name, "a function gives all three axes; remove the axis tables")
    try:
        algorithm = function(**options)
    except (TypeError, ValueError) as error:
        raise RecipeError("algorithm.name", name, str(error)) from None
    if not isinstance(algorithm, Algorithm):
        raise RecipeError("algorithm.name", name, f"gave a {type(algorithm).__name__}, not an Algorithm")
    return algorithm


def _rule_class(axis: str, params: dict[str, Any]) -> Any:
    return find(axis, params["name"], AXES[axis])


def _parameters(rule: Any) -> dict[str, Any]:
    """A rule's hyperparameters and their types."""
    if not dataclasses.is_dataclass(rule):
        return {}
    hints = get_type_hints(rule)
    return {item.name: hints[item.name] for item in dataclasses.fields(rule) if item.init}


def _build(axis: str, rule: Any, params: dict[str, Any]) -> Any:
    field = f"algorithm.{axis}"
    params = {key: value for key, value in params.items() if key != "name"}
    if dataclasses.is_dataclass(rule):
        built = build_dataclass(rule, params, field)
    else:
        try:
            built = rule(**params)
        except (TypeError, ValueError) as error:
            raise RecipeError(field, params, str(error)) from None
    _check_protocol(axis, built, field)
    return built


def build_dataclass(cls: Any, params: Mapping[str, Any], field: str) -> Any:
    """An instance from a table, with every key, type and value checked; errors name `field.key`."""
    types = _parameters(cls)
    for key, value in params.items():
        if key not in types:
            raise RecipeError(f"{field}.{key}", value, f"{cls.__name__} has no such option{_hint(key, types)}")
        try:
            TypeAdapter(types[key], config=ConfigDict(allow_inf_nan=False)).validate_python(value, strict=True)
        except ValidationError as error:
            raise RecipeError(f"{field}.{key}", value, _lower_first(error.errors()[0]["msg"])) from None
    missing = [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and f.name not in params
    ]
    if missing:
        raise RecipeError(f"{field}.{missing[0]}", MISSING, f"{cls.__name__} needs it")
    try:
        return cls(**params)
    except BadValue as error:
        raise RecipeError(f"{field}.{error.field}", error.value, error.problem) from None
    except ValueError as error:
        raise RecipeError(field, dict(params), str(error)) from None


_NEEDED: dict[str, tuple[str, ...]] = {
    "objective": ("init", "stiffness", "after_round", "refresh", "differentiable"),
    "weighting": ("init", "weigh"),
}


def _check_protocol(axis: str, rule: Any, field: str) -> None:
    """A user's rule that lacks a method is refused here, not in the middle of a round."""
    if axis == "selection":
        fits = isinstance(rule, SelectsBefore | SelectsAfterScores | SelectsOnClient)
        missing = [] if fits else ["decides with draw, with score and choose, or with pick"]
    else:
        missing = [name for name in _NEEDED[axis] if not hasattr(rule, name)]
    if missing:
        raise RecipeError(f"{field}.name", type(rule).__name__, f"is no {axis}: it lacks {', '.join(missing)}")


def find(kind: str, name: object, builtin: Mapping[str, Any]) -> Any:
    """Something by name: ours, an entry point of the group `fedstrata.<kind>s`, or `module:name`."""
    if not isinstance(name, str):
        raise RecipeError(f"{kind}.name", name, "must be a string")
    if name in builtin:
        return builtin[name]
    for entry in entry_points(group=f"fedstrata.{kind}s"):
        if entry.name == name:
            return entry.load()
    if ":" in name:
        return import_object(name, f"{kind}.name")
    raise RecipeError(f"{kind}.name", name, f"unknown{_hint(name, builtin)}; there are: {', '.join(builtin)}")


def import_object(name: str, field: str) -> Any:
    """Import `module:name`, also from the current directory."""
    module_name, _, attribute = name.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise RecipeError(field, name, f"cannot be imported: {error}") from None
    return found


def _hint(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
