"""Finding things by name (ours, an installed package's, or `module:name`) and building them from a recipe's table."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoints, entry_points
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from fedstrata.core.errors import MISSING, BadValue, RecipeError


def find(field: str, name: object, builtin: Mapping[str, Any]) -> Any:
    """Something by name: ours, an entry point of the group `fedstrata.<kind>s`, or `module:name`.

    `field` is where a recipe has the name; the last part of its table is the kind: objective, partition, model, …
    """
    if isinstance(name, str) and ":" in name and name not in builtin:
        return import_object(name, field)
    return find_installed(field, name, builtin)


def find_installed(field: str, name: object, builtin: Mapping[str, Any]) -> Any:
    """The same for a name that somebody else chose: only what this machine's owner installed is ever imported."""
    if not isinstance(name, str):
        raise RecipeError(field, name, "must be a string")
    if name in builtin:
        return builtin[name]
    for entry in _entry_points(field):
        if entry.name == name:
            return entry.load()
    raise RecipeError(field, name, f"unknown{did_you_mean(name, builtin)}; there are: {', '.join(builtin)}")


def installed_name(field: str, rule: Any, builtin: Mapping[str, Any]) -> str:
    """The inverse of `find_installed`: the plain name of a rule's class."""
    cls = type(rule)
    for name, known in builtin.items():
        if known is cls:
            return name
    for entry in _entry_points(field):
        if entry.name not in builtin and entry.load() is cls:
            return entry.name
    kind = field.split(".")[-2]
    raise RecipeError(field, cls.__name__, f"has no plain name: register it as an entry point of fedstrata.{kind}s")


def _entry_points(field: str) -> EntryPoints:
    return entry_points(group=f"fedstrata.{field.split('.')[-2]}s")


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
    except (ImportError, AttributeError) as error:
        raise RecipeError(field, name, f"cannot be imported: {error}") from None
    except Exception as error:  # whatever a user's module does when it is imported
        raise RecipeError(field, name, f"cannot be imported: {type(error).__name__}: {error}") from None
    return found


def parameters(rule: Any) -> Mapping[str, Any]:
    """A rule's hyperparameters and their types."""
    return _fields(rule) if isinstance(rule, type) and dataclasses.is_dataclass(rule) else {}


@lru_cache(maxsize=256)  # a page of all studies asks a thousand times
def _fields(cls: type) -> Mapping[str, Any]:
    hints = get_type_hints(cls)
    return {item.name: hints[item.name] for item in dataclasses.fields(cls) if item.init}


def build(rule: Any, params: Mapping[str, Any], field: str) -> Any:
    """What a table gives: of a dataclass, with everything checked; of another class or a function, what it returns."""
    if dataclasses.is_dataclass(rule):
        return build_dataclass(rule, params, field)
    try:
        return rule(**params)
    except (TypeError, ValueError) as error:
        raise RecipeError(field, dict(params), str(error)) from None


def build_dataclass(cls: Any, params: Mapping[str, Any], field: str) -> Any:
    """An instance from a table, with every key, type and value checked; errors name `field.key`."""
    types = parameters(cls)
    for key, value in params.items():
        if key not in types:
            raise RecipeError(f"{field}.{key}", value, f"{cls.__name__} has no such option{did_you_mean(key, types)}")
        check_type(f"{field}.{key}", value, types[key])
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
    except (TypeError, ValueError) as error:  # a TypeError: the class lacks a method that its base wants
        raise RecipeError(field, dict(params), str(error)) from None


def check_type(field: str, value: object, expected: Any) -> None:
    """Refuse a value of another type than a hyperparameter has; infinite and NaN are no values."""
    try:
        TypeAdapter(expected, config=ConfigDict(allow_inf_nan=False)).validate_python(value, strict=True)
    except ValidationError as error:
        raise RecipeError(field, value, _lower_first(error.errors()[0]["msg"])) from None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for the end of a message, empty if nothing is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
