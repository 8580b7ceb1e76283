"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Algorithm = Annotated[
    str | None,
    typer.Option("--algorithm", "-a", help="Replace the recipe's algorithm: a name, or name:option=value."),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Everything random follows from it.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the recipe, as often as needed."),
]
Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Where data sets are; else $FEDSTRATA_DATA, else the user's."),
]
Engine = Annotated[
    str | None, typer.Option("--engine", help="local, or flower (a simulation): changes who computes, not the result.")
]
Workers = Annotated[int | None, typer.Option("--workers", help="Processes to use; changes the speed, not the result.")]
