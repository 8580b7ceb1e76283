"""The commands `fedstrata flower …`: a recipe on machines of their own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fedstrata.cli.options import Algorithm, Data, Seed, Settings
from fedstrata.cli.terminal import say
from fedstrata.core.errors import MissingExtra, RecipeError

app = typer.Typer(no_args_is_help=True, help="Run on many machines with Flower, over TLS and with a key for each node.")


@app.command("init")
def init_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to make.", show_default=False)],
    recipe: Annotated[
        str, typer.Argument(metavar="[RECIPE|NAME]", help="A .toml file, or a name from `fedstrata list`.")
    ] = "quickstart",
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="How many; else the recipe's clients.")] = None,
    address: Annotated[
        str, typer.Option("--server-address", metavar="HOST", help="The server's name or IP address, for the nodes.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="The server's port.")] = 8000,
    local_data: Annotated[
        bool, typer.Option("--local-data", help="Each node reads its own data, which its own config names.")
    ] = False,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape", metavar="N,...", help="Of an input, for --local-data; of images channels,height,width."
        ),
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option("--classes", metavar="N|NAME,...", help="For --local-data; else those of the recipe's set."),
    ] = None,
    algorithm: Algorithm = None,
    settings: Settings = None,
    seed: Seed = None,
    days: Annotated[int, typer.Option("--days", min=1, max=36500, help="How long the certificates are valid.")] = 365,
    data: Data = None,
) -> None:
    """Write everything that a server and its nodes need: recipe, certificates, keys, scripts and a README.

    Examples:

    fedstrata flower init rehearsal quickstart --algorithm fedldf:n=4

    fedstrata flower init hospitals quickstart --local-data --nodes 2 --server-address 192.168.1.10

    fedstrata flower init sensors quickstart --local-data --nodes 5 --shape 16 --classes ok,broken
    """
    _require_flower("fedstrata flower init")
    from fedstrata.deployment import init
    from fedstrata.recipes.schema import load

    if not local_data:
        for option, value in (("--shape", shape), ("--classes", classes)):
            if value is not None:
                raise RecipeError(option, value, "goes with --local-data")
    chosen = load(recipe, algorithm=algorithm, settings=[*(settings or []), "engine.name=flower"], seed=seed)
    if local_data or chosen.task.nodes is not None:
        chosen = init.with_own_data(chosen, nodes, _shape(shape), _classes(classes), data)
        assert chosen.task.nodes is not None
        count = chosen.task.nodes.clients
    else:
        chosen, count = init.for_nodes(chosen, nodes, data)
    init.write(folder, chosen, count, init.Address(address, port), days)
    say(f"{folder}: {chosen.name}, {chosen.label}, for a server at {address}:{port} and {count} nodes")
    say(f"  {folder}/README.md says what goes where, and what each machine needs")
    last = count - 1
    say(f"  on the server:  {folder}/server/server.sh")
    say(f"  on the nodes:   {folder}/node-0/node.sh{f' … node-{last}/node.sh' if last else ''}")
    if local_data or chosen.task.nodes is not None:
        say("                  after saying in each node.toml where its data is")
    say(f"  then a run:     {folder}/server/start-run.sh first")


@app.command("check")
def check_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The node's folder.")] = Path("."),
) -> None:
    """Read a node's configuration and its data as its SuperNode will, and say what they come to or what is wrong.

    node.sh does it before it starts.

    Example:

    fedstrata flower check hospitals/node-0
    """
    _require_flower("fedstrata flower check")
    from fedstrata.deployment import init

    say(f"{folder.absolute().name}: {init.check_node(folder)}")


def _require_flower(command: str) -> None:
    if find_spec("flwr") is None:
        raise MissingExtra("flwr", "flower", command)


def _shape(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise RecipeError("--shape", text, "must be whole numbers with commas between them") from None


def _classes(text: str | None) -> int | list[str] | None:
    if text is None:
        return None
    return int(text) if text.isdecimal() else [name.strip() for name in text.split(",")]
