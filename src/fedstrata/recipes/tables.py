"""Tables as recipes have them: read from TOML, changed by dotted keys, and refused if they hold what no recipe can."""

from __future__ import annotations

import math
import os
import sys
import tomllib
from collections.abc import Mapping
from typing import Any

from fedstrata.core.errors import MISSING, RecipeError, printable

DEEPEST = 32
"""How deep tables and lists may lie in one another."""

_LEAST, _MOST = -(2**63), 2**63 - 1
"""TOML's whole numbers have 64 bits, as those of NumPy and torch."""


def parse_toml(text: str) -> dict[str, Any]:
    """What TOML says. Otherwise a ValueError has the reason, in a line: a TOMLDecodeError if it is no TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError:  # Python converts no longer ones
        raise ValueError(f"has a number of more than {sys.get_int_max_str_digits()} digits") from None


def check_values(value: object, field: str = "", depth: int = 0) -> None:
    """Refuse what a recipe cannot hold, anywhere in its table; the schema knows what may be where."""
    if depth > DEEPEST:
        raise RecipeError(field, MISSING, f"is nested more than {DEEPEST} deep")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            within = f"{field}.{key}".lstrip(".")
            if not isinstance(key, str):
                raise RecipeError(within, key, "keys should be strings")
            check_values(inner, within, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            check_values(inner, field, depth + 1)
    elif isinstance(value, int):
        if not _LEAST <= value <= _MOST:
            raise RecipeError(field, _Long(value), "input should be a whole number of 64 bits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise RecipeError(field, value, "input should be a finite number")
    elif isinstance(value, str):
        if not value.isascii() and value.encode(errors="ignore").decode() != value:
            raise RecipeError(field, value, "input should be text that UTF-8 can say")
    elif value is not None and not isinstance(value, os.PathLike):
        raise RecipeError(field, value, f"a recipe holds no {type(value).__name__}; is it text, in quotation marks?")


class _Long(int):
    """A number that is shown in full only if it has a line's length."""

    def __repr__(self) -> str:
        size = abs(int(self))
        return super().__repr__() if size < 10**40 else f"about {'-' * (self < 0)}10**{math.log10(size):.0f}"


def parse_algorithm(text: str) -> dict[str, Any]:
    """`name`, or `name:option=value:option=value`; `module:function` stays together, as a name and as a value."""
    parts: list[str] = []
    for part in text.split(":"):
        if parts and "=" not in part:
            parts[-1] += f":{part}"
        else:
            parts.append(part)
    table: dict[str, Any] = {"name": parts[0]}
    for key, value in (parse_setting(part, "--algorithm") for part in parts[1:]):
        set_key(table, key, value)
    return table


def parse_setting(text: str, option: str = "--set") -> tuple[str, Any]:
    """`key=value`, the value as TOML, or else as a plain string."""
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip()
    if not equals or not key:
        example = "training.rounds=50" if option == "--set" else "fedldf:n=4"
        raise RecipeError(option, text, f"must look like {example}")
    try:
        parsed = parse_toml(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return key, value
    except ValueError as error:
        raise RecipeError(key, printable(value), str(error)) from None
    return key, parsed["value"] if len(parsed) == 1 else value


def set_key(table: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key, making tables on the way; tables of the original are not changed in place."""
    *path, last = key.split(".")
    for part in path:
        inner = table.get(part, {})
        if not isinstance(inner, Mapping):
            raise RecipeError(key, value, f"{part} is a value, not a table")
        table[part] = dict(inner)
        table = table[part]
    table[last] = value
