"""`fedstrata flower init`: a folder for the server and one for each node, with everything that it needs and no more;
and `fedstrata flower check`, which looks at a node's once it is where it belongs.

The files are in template/. Those that end in .in have names to be filled in, the others are taken as they are.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template
from typing import Any

import tomli_w

from fedstrata._version import __version__
from fedstrata.core.errors import MISSING, RecipeError, UserError
from fedstrata.deployment import credentials
from fedstrata.engines.flower.failures import Failed
from fedstrata.nodes.node import own_client
from fedstrata.recipes.experiment import build_experiment
from fedstrata.recipes.schema import Recipe
from fedstrata.recipes.tables import parse_toml
from fedstrata.tasks import datasets
from fedstrata.tasks.builtin import channel_statistics
from fedstrata.tasks.config import NODES

LOOPBACK = ("localhost", "127.0.0.1")
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")


@dataclass(frozen=True)
class Address:
    """Where the server is, for its nodes."""

    host: str = "127.0.0.1"
    port: int = 8000

    def __post_init__(self) -> None:
        if ":" in self.host:
            raise RecipeError("--server-address", self.host, "must be a host name or an IPv4 address, without a port")
        if not _HOST.fullmatch(self.host) or (re.fullmatch(r"[0-9.]+", self.host) and not self.is_ip):
            raise RecipeError("--server-address", self.host, "must be a host name or an IPv4 address")
        if not 1 <= self.port <= 65535:
            raise RecipeError("--port", self.port, "must be from 1 to 65535")

    @property
    def is_ip(self) -> bool:
        """Whether it is a number."""
        return credentials.is_ip_address(self.host)


# --- what is deployed ------------------------------------------------------------------------------------------------


def for_nodes(recipe: Recipe, nodes: int | None, data: Path | None = None) -> tuple[Recipe, int]:
    """The recipe with a client for each node, and how many; its data set and partition decide who has what."""
    table = recipe.to_table()
    partition = table["task"]["partition"]
    if nodes is not None and recipe.task.function is None and hasattr(recipe.task.built_partition, "clients"):
        partition["clients"] = nodes
    changed = Recipe.parse(table)
    clients = len(build_experiment(changed, data=data).task.clients)
    if nodes not in (None, clients):
        raise RecipeError("--nodes", nodes, f"the recipe has {clients} clients; change its partition with --set")
    return changed, clients


def with_own_data(
    recipe: Recipe,
    nodes: int | None,
    shape: list[int] | None = None,
    classes: int | list[str] | None = None,
    data: Path | None = None,
) -> Recipe:
    """The recipe on data that is on the nodes; what is not said of it is as in the recipe's own data set."""
    table, task = recipe.to_table(), recipe.task
    if task.function is not None:
        raise RecipeError("task.function", task.function, "makes the whole Task; let it read the node's data itself")
    if task.nodes is not None:
        own = task.nodes.model_dump(exclude_none=True)
    elif shape is not None and classes is not None:
        own, table["task"]["inputs"] = {}, "unit"
    else:
        own = _looks_like(task.dataset, task.inputs, data)
    given = {"clients": nodes, "shape": shape, "classes": classes}
    own |= {name: value for name, value in given.items() if value is not None}
    if "clients" not in own:
        raise RecipeError("--nodes", MISSING, "how many nodes are there?")
    table["task"].pop("files", None)
    table["task"] |= {"dataset": NODES, "nodes": own, "validation": 0}
    table["evaluation"]["on"] = ["clients"]
    changed = Recipe.parse(table)
    build_experiment(changed)
    return changed


def _looks_like(dataset: str, inputs: str, data: Path | None) -> dict[str, Any]:
    """A [task.nodes] table for data that looks like a set of ours."""
    if dataset not in datasets.NAMES:
        raise RecipeError("--shape", MISSING, f"with --classes, it says what replaces the data set {dataset!r}")
    loaded = datasets.load(dataset, data)
    table = {"shape": list(loaded.train_images.shape[1:]), "classes": list(loaded.class_names)}
    if inputs == "normalised":
        mean, std = channel_statistics(loaded.train_images)
        table |= {"mean": [round(value / 255, 4) for value in mean.tolist()]}
        table |= {"std": [round(value / 255, 4) for value in std.tolist()]}
    return table


# --- its files -------------------------------------------------------------------------------------------------------


def write(folder: Path, recipe: Recipe, nodes: int, address: Address, days: int = 365) -> None:
    """Write the deployment of a recipe with so many nodes. A folder that has something in it is left alone."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()) or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"DIR = {str(folder)!r}: exists and is not an empty folder; nothing is overwritten")
    if address.port + nodes > 65535:
        raise RecipeError("--port", address.port, f"the nodes' own ports follow it, and there are {nodes} nodes")
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent.absolute()))  # mode 0700
    try:
        _fill(staging, recipe, nodes, address, days)
        staging.rename(folder.absolute())
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _fill(folder: Path, recipe: Recipe, nodes: int, address: Address, days: int) -> None:
    names = list(dict.fromkeys([address.host, *LOOPBACK]))
    made = credentials.certificates(names, days)
    own_data, alone = recipe.task.nodes is not None, address.host in LOOPBACK
    values = {
        "name": recipe.name,
        "nodes": str(nodes),
        "address": address.host,
        "port": str(address.port),
        "host": "127.0.0.1" if alone else "0.0.0.0",
        "names": ", ".join(names),
        "expires": made.expires.strftime("%d %B %Y"),
        "version": __version__,
        "data_is": _OWN_DATA if own_data else _DATA_SETS,
        "node_step": " Say in its `node.toml` where its data is." if own_data else "",
        "who_may": _THIS_MACHINE if alone else Template(_FIREWALL).substitute(port=address.port),
        "rows": "\n".join(
            f"| `node-{client}/` | the machine of client {client} | the recipe, the server's authority, the node's own "
            "key and configuration, a script |"
            for client in range(nodes)
        ),
    }
    template = files("fedstrata.deployment").joinpath("template")
    _write(
        folder / "README.md",
        Template(template.joinpath("README.md.in").read_text(encoding="utf-8")).substitute(values).encode(),
    )
    content = _node_recipe(recipe)
    server = folder / "server"
    _copy(template.joinpath("server"), server, values)
    _write(server / "recipe.toml", content)
    _write(server / "certificates" / "ca.crt", made.authority)
    _write(server / "certificates" / "server.crt", made.server)
    _write(server / "certificates" / "server.key", made.server_key, secret=True)
    for client in range(nodes):
        node = folder / f"node-{client}"
        private, public = credentials.node_key()
        _copy(
            template.joinpath("node"),
            node,
            values | {"client": str(client), "node_port": str(address.port + 1 + client)},
        )
        _write(node / "recipe.toml", content)
        _write(node / "ca.crt", made.authority)
        _write(node / "key", private, secret=True)
        _write(server / "nodes" / f"node-{client}.pub", public)


_OWN_DATA = (
    "Its data: a folder with idx, parquet, CSV or <class>/*.png files, or module:function that is installed here."
)
_DATA_SETS = "Where its data sets are, if not in the usual place."
_THIS_MACHINE = "It listens on 127.0.0.1, for this machine only (`server/server.env`)."
_FIREWALL = (
    "Open that port in the firewall for the nodes, for instance with\n"
    "`sudo ufw allow from ADDRESS to any port $port proto tcp`. Other machines reach only what is for nodes, who must\n"
    "show a key; runs are started on this machine, and **everybody who can log in here can start one**."
)


def _node_recipe(recipe: Recipe) -> bytes:
    table = recipe.to_table()
    if recipe.task.nodes is not None:
        del table["task"]["partition"]  # who has what is not ours to say
    return tomli_w.dumps(table).encode()


def _copy(source: Traversable, target: Path, values: Mapping[str, str]) -> None:
    for entry in source.iterdir():
        if entry.is_dir():
            _copy(entry, target / entry.name, values)
        elif entry.name.endswith(".in"):
            _write(
                target / entry.name.removesuffix(".in"),
                Template(entry.read_text(encoding="utf-8")).substitute(values).encode(),
            )
        else:
            _write(target / entry.name, entry.read_bytes())


def _write(path: Path, content: bytes, secret: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = 0o600 if secret else 0o755 if path.suffix == ".sh" else 0o644
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)


# --- a node's own part -----------------------------------------------------------------------------------------------


def check_node(folder: Path) -> str:
    """Read a node's configuration and data as its SuperNode will, and say in a line what they come to."""
    folder = folder.absolute()
    config = _node_config(folder / "node.toml")
    with contextlib.chdir(folder):  # where node.sh goes, too: paths and modules are looked for from there
        try:
            node = own_client({"recipe": str(folder / "recipe.toml"), **config})
        except Failed as failed:  # its owner may know all of it
            raise failed.error from None
    parts = f"{node.size:,} samples to train on" + (f", {node.held_out:,} to be evaluated on" * (node.held_out > 0))
    return f"client {node.client} of {node.clients}, counted from 0: {parts}"


def _node_config(path: Path) -> dict[str, Any]:
    try:
        config = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or not TOML
        raise UserError(f"{path}: is not valid TOML: {error}") from None
    for key, value in config.items():
        if key not in _NODE_KEYS:
            raise RecipeError(key, value, f"unknown key in {path}; there are: {', '.join(_NODE_KEYS)}")
    return config


_NODE_KEYS = ("partition-id", "data", "recipe")
