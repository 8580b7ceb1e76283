"""`fedstrata probe`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from fedstrata.cli.options import Data, Workers
from fedstrata.cli.terminal import Console
from fedstrata.formatting import number

if TYPE_CHECKING:
    from fedstrata.runs.probes import Probe

MOST_SHOWN = 12
"""Clients, and layers, of a table."""


def probe_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory.")],
    round: Annotated[
        int | None, typer.Option("--round", help="The round to take apart; the last one that can be, if not given.")
    ] = None,
    on: Annotated[str | None, typer.Option("--on", help="An evaluation set of the server's, such as test.")] = None,
    data: Data = None,
    workers: Workers = None,
) -> None:
    """Say who harms: what the model would be without each client, each layer, and each layer of each client.

    The round is computed again from the checkpoint before it, to the same bits, and concluded without one of its parts.

    Selection, weighting and server step are done anew, and each model is evaluated on the server's data.

    A run keeps its last two checkpoints; for earlier rounds, run it with --set record.keep_checkpoints=100.

    Example:

    fedstrata probe runs/example
    """
    from fedstrata.runs.probing import probe

    console = Console()
    columns = ("models evaluated", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        found = probe(
            directory,
            round,
            on=on,
            data=data,
            workers=workers,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    print_probe(console, found)


def print_probe(console: Console, probe: Probe) -> None:
    """Who harms, in sentences and as tables."""
    console.print(f"round {probe.round}, probed", style="bold")
    for sentence in probe.sentences():
        console.print(f"  {sentence}", soft_wrap=True)
    rows = sorted(range(len(probe.clients)), key=lambda at: -probe.harm[at])
    table = _table(probe, "without client", "harms most in")
    for at in rows[:MOST_SHOWN]:
        layer = max(range(len(probe.layers)), key=lambda layer: probe.cell_harm[at, layer])
        worst = probe.layers[layer] if probe.cell_harm[at, layer] > 0 else "–"
        values = (probe.loss.client[at], probe.harm[at], probe.score.client[at])
        table.add_row(str(probe.clients[at]), *_cells(*values), worst)
    if len(rows) > MOST_SHOWN:
        table.caption = f"and {len(rows) - MOST_SHOWN} more clients"
    console.print(table)
    table = _table(probe, "without layer", "harmful there")
    rows = sorted(range(len(probe.layers)), key=lambda at: -probe.layer_harm[at])
    for at in rows[:MOST_SHOWN]:
        harmful = sorted(range(len(probe.clients)), key=lambda client: -probe.cell_harm[client, at])[:3]
        who = ", ".join(str(probe.clients[client]) for client in harmful if probe.cell_harm[client, at] > 0)
        values = (probe.loss.layer[at], probe.layer_harm[at], probe.score.layer[at])
        table.add_row(probe.layers[at], *_cells(*values), who or "–")
    if len(rows) > MOST_SHOWN:
        table.caption = f"and {len(rows) - MOST_SHOWN} more layers"
    console.print(table)


def _table(probe: Probe, what: str, last: str) -> Table:
    table = Table(title=f"{probe.on}: loss {number(probe.loss.whole)}, {probe.metric} {number(probe.score.whole)}")
    table.add_column(what)
    for name in ("loss", "harm", probe.metric, last):
        table.add_column(name, justify="right")
    return table


def _cells(loss: float, harm: float, score: float) -> tuple[str, str, str]:
    return number(loss), f"{harm:+.4f}", number(score)
