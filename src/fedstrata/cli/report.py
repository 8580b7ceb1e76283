"""`fedstrata report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedstrata.cli.terminal import say
from fedstrata.formatting import size


def report_command(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run directories, comparisons, or what holds some of them.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page to write.")] = Path("report.html"),
    show: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Write one HTML page on runs and comparisons: curves, every layer, bytes, data. It opens without a network.

    Runs that differ only in the seed are shown as one, with an interval over seeds.

    Examples:

    fedstrata report runs/quickstart-fedavg-s0-...

    fedstrata report runs/compare-quickstart-... --out quickstart.html --open
    """
    from fedstrata.report import write

    count, left_out = write(directories, out)
    for problem in left_out:
        say(f"left out: {problem}")
    say(f"wrote {out} ({size(count)})")
    if show:
        import webbrowser

        webbrowser.open(out.resolve().as_uri())
