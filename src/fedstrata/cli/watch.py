"""`fedstrata watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedstrata.cli.terminal import say


def watch_command(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[DIR]...", help="Folders with runs in them; else runs/.")
    ] = None,
    port: Annotated[int, typer.Option("--port", help="Where to listen; 0 is any that is free.")] = 8757,
    host: Annotated[
        str, typer.Option("--host", help="Another than this machine's own asks for a token.")
    ] = "127.0.0.1",
    show: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Follow runs in the browser while they go: rounds, layers, clients, bytes, as they are written.

    It only reads the run directories, of runs on every engine, and disturbs none. Ctrl-C ends it, and no run.

    Examples:

    fedstrata watch

    fedstrata watch runs reproductions/runs --open
    """
    from fedstrata.plots import definitions
    from fedstrata.plots.saving import library
    from fedstrata.watch.server import Server

    definitions()  # a missing extra is told now, and not in the browser
    library()
    server = Server(folders or [Path("runs")], host, port)
    say(f"watching {', '.join(map(str, server.following.roots))}")
    say(f"open {server.address}")
    if show:
        import webbrowser

        webbrowser.open(server.address)
    try:
        server.serve_forever()
    finally:
        server.server_close()
