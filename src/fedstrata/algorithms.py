"""The named algorithms, one line each, and how an `[algorithm]` table becomes one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from fedstrata.core.axes import Adopt, Algorithm
from fedstrata.core.errors import RecipeError
from fedstrata.objectives import OBJECTIVES
from fedstrata.registry import build, did_you_mean, find, parameters
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


def __getattr__(name: str) -> partial[Algorithm]:
    """`fedldf(n=4)` is `named("fedldf", n=4)`, and so for all of them."""
    if name not in NAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(named, name)


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
    rules = {axis: find(f"algorithm.{axis}.name", params["name"], AXES[axis]) for axis, params in axes.items()}
    for key, value in options.items():
        owners = [axis for axis, rule in rules.items() if key in parameters(rule)]
        if not owners:
            known = [parameter for rule in rules.values() for parameter in parameters(rule)]
            owner = name or "this algorithm"
            raise RecipeError(f"algorithm.{key}", value, f"{owner} has no such option{did_you_mean(key, known)}")
        for axis in owners:
            axes[axis].setdefault(key, value)
    built = {axis: _build(axis, rule, axes[axis]) for axis, rule in rules.items()}
    return Algorithm(**built, grouping=grouping)


def to_table(algorithm: Algorithm) -> dict[str, Any]:
    """The `[algorithm]` table that gives an algorithm again, so that one made in Python can be stored and resumed."""
    if algorithm.server != Adopt():
        raise RecipeError("algorithm.server", algorithm.server, "a server step has no place in a recipe; use fit()")
    table: dict[str, Any] = {}
    for axis, rules in AXES.items():
        rule = getattr(algorithm, axis)
        cls = type(rule)
        own = next((name for name, known in rules.items() if known is cls), f"{cls.__module__}:{cls.__qualname__}")
        options = {key: getattr(rule, key) for key in parameters(cls)}
        table[axis] = {"name": own, **{key: value for key, value in options.items() if value is not None}}
    return table


def _foreign_algorithm(name: object, options: dict[str, Any], axes: dict[str, dict[str, Any]]) -> Algorithm:
    """A user's own algorithm: a function that returns an `Algorithm`."""
    function = find("algorithm.name", name, NAMED)
    if any(axes.values()):
        raise RecipeError("algorithm.name", name, "a function gives all three axes; remove the axis tables")
    try:
        algorithm = function(**options)
    except (TypeError, ValueError) as error:
        raise RecipeError("algorithm.name", name, str(error)) from None
    if not isinstance(algorithm, Algorithm):
        raise RecipeError("algorithm.name", name, f"gave a {type(algorithm).__name__}, not an Algorithm")
    return algorithm


def _build(axis: str, rule: Any, params: dict[str, Any]) -> Any:
    field = f"algorithm.{axis}"
    built = build(rule, {key: value for key, value in params.items() if key != "name"}, field)
    _check_protocol(axis, built, field)
    return built


_NEEDED: dict[str, tuple[str, ...]] = {
    "objective": ("init", "stiffness", "after_round", "refresh", "differentiable"),
    "weighting": ("init", "weigh"),
}
_NEEDED_OF_SELECTION: dict[object, tuple[str, ...]] = {
    "before": ("draw",),
    "after_scores": ("score", "choose"),
    "on_client": ("pick",),
}


def _check_protocol(axis: str, rule: Any, field: str) -> None:
    """A user's rule that lacks a method is refused here, not in the middle of a round."""
    if axis == "selection":
        decides = getattr(rule, "decides", None)
        if decides not in _NEEDED_OF_SELECTION:
            known = ", ".join(map(str, _NEEDED_OF_SELECTION))
            problem = "it lacks decides" if decides is None else f"decides = {decides!r} is none of {known}"
            raise RecipeError(f"{field}.name", type(rule).__name__, f"is no selection: {problem}")
        needed = _NEEDED_OF_SELECTION[decides]
    else:
        needed = _NEEDED[axis]
    missing = [name for name in needed if not hasattr(rule, name)]
    if missing:
        raise RecipeError(f"{field}.name", type(rule).__name__, f"is no {axis}: it lacks {', '.join(missing)}")
