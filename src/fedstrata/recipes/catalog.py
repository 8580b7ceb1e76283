"""TOML files that are asked for by a path, or by the name of one in a folder of ours."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from fedstrata.core.errors import RecipeError
from fedstrata.recipes.tables import parse_toml


@dataclass(frozen=True)
class Library:
    """A folder of ours with such files."""

    kind: str
    folder: Traversable
    listing: str
    """The command that lists them."""

    def names(self) -> dict[str, Any]:
        """Ours, by name."""
        found = (entry for entry in self.folder.iterdir() if entry.name.endswith(".toml"))
        return {entry.name.removesuffix(".toml"): entry for entry in sorted(found, key=lambda entry: entry.name)}

    def read(self, name: str | Path) -> dict[str, Any]:
        """A file's table; it has the name of a .toml file, if it gives itself none."""
        path, ours = Path(name), self.names()
        if str(name) in ours:
            source = ours[str(name)]
        elif path.suffix == ".toml" or path.is_file():
            source = path
        else:
            close = difflib.get_close_matches(str(name), ours, n=1)
            hint = f"did you mean {close[0]}?" if close else f"see `{self.listing}`"
            raise RecipeError(self.kind, str(name), f"neither a .toml file nor the name of a {self.kind}; {hint}")
        try:
            text = source.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise RecipeError(self.kind, str(name), f"cannot be read: {reason}") from None
        try:
            table = parse_toml(text)
        except tomllib.TOMLDecodeError as error:
            raise RecipeError(self.kind, str(name), f"is not valid TOML: {error}") from None
        except ValueError as error:
            raise RecipeError(self.kind, str(name), str(error)) from None
        named = source.name.endswith(".toml")
        return {"name": source.name.removesuffix(".toml"), **table} if named else table


RECIPES = Library("recipe", files("fedstrata").joinpath("recipes"), "fedstrata list")
