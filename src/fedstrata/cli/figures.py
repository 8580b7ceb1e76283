"""`fedstrata figures`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedstrata.cli.terminal import say
from fedstrata.core.errors import UserError


def figures_command(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run directories, comparisons, or what holds some of them.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to write to.")] = Path("figures"),
    kinds: Annotated[
        str | None, typer.Option("--kinds", help="Which, with commas between: curves,layers,model")
    ] = None,
    formats: Annotated[str, typer.Option("--formats", help="Of each picture, with commas between.")] = "pdf,svg,png",
) -> None:
    """Write pictures for a paper, without titles, and the outcome as a LaTeX and a Markdown table.

    Examples:

    fedstrata figures runs/compare-quickstart-...

    fedstrata figures runs/quickstart-... --kinds curves,layers --formats pdf --out paper/figures
    """
    from fedstrata.plots import KINDS, OVER_SEEDS, draw, outcome_tables, save
    from fedstrata.plots.arms import arms_of, find

    wanted = [name.strip() for name in kinds.split(",")] if kinds is not None else None
    problems: list[str] = []
    sources = [source for path in directories for source in find(path, problems)]
    for problem in problems:
        say(f"left out: {problem}")
    if not sources:
        raise UserError(f"DIR = {', '.join(map(str, directories))}: no run could be read")
    arms = arms_of(sources)
    shown = [arm.first for arm in arms if arm.first.recorded]  # of layers and clients, the first seed
    out.mkdir(parents=True, exist_ok=True)
    for name, text in outcome_tables(sources).items():
        (out / name).write_text(text, encoding="utf-8")
        say(f"wrote {out / name}")
    for kind in wanted or KINDS:
        runs = sources if kind in OVER_SEEDS else shown
        if kind == "probe":
            runs = [source for source in runs if source.run.probes()]
        if wanted is None and (not runs or (kind == "differences" and len(arms) < 2)):
            continue
        chart = draw(kind, [source.run for source in runs])
        for form in formats.split(","):
            path = out / f"{kind}.{form.strip()}"
            save(chart, path)
            say(f"wrote {path}")
