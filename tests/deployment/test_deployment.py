"""SuperNodes with TLS and keys of their own, by the scripts of `fedstrata flower init` and nothing else.

They end in the local engine's run; what is killed goes on; and who has no business there is refused.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import ssl
from collections.abc import Callable, Iterator
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import pyarrow
import tomli_w
from pyarrow import parquet

import fedstrata
from fedstrata.core.status import Status
from fedstrata.deployment import credentials
from fedstrata.runs.reader import Run
from tests.support import node_data, own_data, secretive
from tests.support.federation import BIN, LET_IN, Federation, history, ports, wait_until
from tests.support.math import missing
from tests.support.runs import TINY
from tests.support.searching import SECRET, is_in

pytestmark = pytest.mark.deployment

NODES = 3
FEDLDF = "fedldf:n=2"
TABLE = TINY | {"training": TINY["training"] | {"rounds": 2}, "evaluation": {"on": ["test", "clients"], "every": 2}}
"""Few rounds: Flower starts a process, which imports torch, for each order."""


def rehearse(folder: Path) -> Federation:
    """The tiny recipe on three nodes, in a folder whose name has a space."""
    path = folder / "tiny.toml"
    path.write_text(tomli_w.dumps(TABLE))
    return Federation.init(folder / "three nodes", path, "--nodes", NODES, "--algorithm", FEDLDF)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Three nodes that run FedLDF, whose round has two exchanges."""
    made = rehearse(tmp_path_factory.mktemp("flower"))
    try:
        made.start()
        yield made
    finally:
        codes = made.stop()
    assert [codes[f"node-{client}"] for client in range(NODES)] == [0] * NODES  # all have signed off


def local(out: Path, algorithm: str, **settings: Any) -> Path:
    """The same on the local engine."""
    settings = {"task.partition.clients": NODES, **settings}
    return fedstrata.run(TABLE, algorithm=algorithm, settings=settings, out=out).path


def test_fedldf_on_three_nodes_ends_in_the_local_engines_run(
    federation: Federation, tmp_path: Path, same_run: Callable[..., None]
) -> None:
    out = federation.run("first")
    same_run(out, local(tmp_path / "local", FEDLDF), recipe=False)
    assert [line["replies"] for line in history(out)] == [NODES] * 2
    assert all(LET_IN in federation.log(f"node-{client}") for client in range(NODES))


def test_fedlap_on_three_nodes_ends_in_the_local_engines_run(
    federation: Federation, tmp_path: Path, same_run: Callable[..., None]
) -> None:
    """Server and nodes read their recipes when a run begins, so that another one needs no other federation."""
    places = ["server", *(f"node-{client}" for client in range(NODES))]
    before = {path: path.read_text() for path in (federation.folder / place / "recipe.toml" for place in places)}
    for place in places:
        federation.change(place, {"algorithm": {"name": "fedlap"}})
    try:
        out = federation.run("fedlap")
    finally:
        for path, text in before.items():
            path.write_text(text)
    same_run(out, local(tmp_path / "local", "fedlap"), recipe=False)


# --- what is killed --------------------------------------------------------------------------------------------------


def test_a_server_app_that_is_killed_goes_on_and_ends_the_same(
    federation: Federation, tmp_path: Path, same_run: Callable[..., None]
) -> None:
    rounds = {"training.rounds": 4}
    federation.change("server", rounds)
    out = federation.submit("killed")
    wait_until(lambda: history(out), lambda: federation.log("run-killed"))
    federation.kill_server_app()
    assert federation.finish("killed") != 0
    assert "finished:failed" in federation.log("run-killed")
    assert 1 <= len(history(out)) < 4
    federation.run("killed")
    same_run(out, local(tmp_path / "local", FEDLDF, **rounds), recipe=False)


def test_a_node_that_is_killed_costs_its_rounds_and_takes_part_again(federation: Federation) -> None:
    """SIGKILL during a round: its node.sh, started anew, tries until Flower lets it in, when the session has lapsed."""
    federation.change("server", {"training.rounds": 60, "engine.timeout": 25.0})

    def misses_it(line: dict[str, Any]) -> bool:
        return 2 in [who["client"] for who in line["lost"]]  # on a busy machine others may be late, too

    out = federation.submit("long")
    wait_until(lambda: history(out), lambda: federation.log("run-long"))
    federation.kill("node-2")
    federation.join("node-2")
    wait_until(lambda: any(map(misses_it, history(out))), "nobody is missed")
    wait_until(lambda: not misses_it(history(out)[-1]), lambda: federation.log("node-2"), every=1)
    federation.kill_server_app()
    federation.finish("long")
    lines = history(out)
    lost = [line["round"] for line in lines if misses_it(line)]
    assert lost == list(range(lost[0], lost[-1] + 1))
    assert all(status.kind == "no reply" for line in lines for _, status in missing(line["lost"]))


# --- who is refused --------------------------------------------------------------------------------------------------

FORGER = """#!{python}
# Says to be the node whose key this is, and signs with another one.
import sys

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.supercore.primitives.asymmetric import sign_message
from flwr.supernode import node_auth_http_interceptor
from flwr.supernode.cli import flower_supernode

wrong = ec.generate_private_key(ec.SECP384R1())
node_auth_http_interceptor.sign_message = lambda key, message: sign_message(wrong, message)
sys.argv += ["--max-retries", "1"]
flower_supernode()
"""

NO_KEY = '#!/bin/sh\nexec {bin}/flower-supernode "$1" "$2" "$3" "$4" "$7" "$8" "$9" "${{10}}"\n'
PLAIN_TEXT = '#!/bin/sh\nexec {bin}/flower-supernode "$1" "$2" --insecure "$7" "$8" "$9" "${{10}}" --max-retries 1\n'
"""What stands in for `flower-supernode` in node.sh, and leaves out some of its options."""


def intruder(federation: Federation, name: str, program: str | None) -> Path:
    """A copy of node 0's folder, whose node.sh may call another program."""
    folder = federation.folder / name
    shutil.copytree(federation.folder / "node-0", folder, ignore=shutil.ignore_patterns("state"))
    settings = (folder / "node.env").read_text()
    (folder / "node.env").write_text(re.sub(r"PORT=.*", f"PORT={ports(1)}", settings))
    if program is not None:
        path = federation.folder / f"bin-{name}" / "flower-supernode"
        path.parent.mkdir()
        path.write_text(program.format(python=BIN / "python", bin=BIN))
        path.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("name", "program", "refusal"),
    [
        ("stranger", None, "[code: 2004]"),
        ("forger", FORGER, 'HTTP/1.1" 401'),
        ("no-key", NO_KEY, "[code: 2001]"),
        ("plain-text", PLAIN_TEXT, "Server disconnected without sending a response"),
    ],
)
def test_who_has_no_business_here_is_refused(
    name: str, program: str | None, refusal: str, federation: Federation
) -> None:
    """An unregistered key, a wrong signature, no key, no TLS: node.sh tries more than once, and is never let in."""
    folder = intruder(federation, name, program)
    if name == "stranger":
        (folder / "key").write_bytes(credentials.node_key()[0])
    before = len(federation.log("server"))
    path = f"{federation.folder / f'bin-{name}'}:{federation.environment['PATH']}"
    federation.launch(name, folder / "node.sh", PATH=path)
    wait_until(lambda: federation.log(name).count("started again") >= 2, lambda: federation.log(name))
    federation.dismiss(name)
    assert LET_IN not in federation.log(name)
    assert refusal in federation.log(name) + federation.log("server")[before:], federation.log(name)


def test_only_the_servers_own_machine_may_start_runs(federation: Federation) -> None:
    """Another machine, played by another address of this one, reaches the part for nodes, which asks it for a key."""
    settings = (federation.folder / "server" / "server.env").read_text()
    port = int(re.findall(r"PORT=(\d+)", settings)[0])
    trust = ssl.create_default_context(cafile=federation.folder / "server" / "certificates" / "ca.crt")

    def status(source: str, path: str) -> int:
        connection = HTTPSConnection("127.0.0.1", port, context=trust, source_address=(source, 0), timeout=30)
        with contextlib.closing(connection):
            connection.request("POST", path, b"", {"Content-Type": "application/protobuf"})
            return connection.getresponse().status

    assert status("127.0.0.2", "/v1/control/list-runs") == 403
    assert status("127.0.0.1", "/v1/control/list-runs") == 200
    assert status("127.0.0.2", "/v1/fleet/pull-messages") == 401


# --- data of their own -----------------------------------------------------------------------------------------------


def test_nodes_train_and_are_evaluated_on_their_own_data(tmp_path: Path, same_run: Callable[..., None]) -> None:
    """idx, CSV, image folders and parquet, each on its own node; the server has nothing.

    A server that is started again knows the nodes' keys, and the nodes find back to it: a finished run begins when all
    four are there, and has nothing left to do.
    """
    path = tmp_path / "hospitals.toml"
    path.write_text(tomli_w.dumps(own_data.RECIPE))
    samples = own_data.write_all(tmp_path / "own data")
    made = Federation.init(tmp_path / "made", path)
    for client, kind in enumerate(node_data.WRITERS):
        say_where(made.folder / f"node-{client}" / "node.toml", tmp_path / "own data" / kind)
    try:
        made.start()
        out = made.run("first")
        same_run(out, own_data.run_locally(samples, tmp_path / "local").path, recipe=False)
        held_out = sum(round(own_data.HELD_OUT * len(labels)) for _, labels in samples)
        assert [line["metrics"]["clients"]["samples"] for line in Run(out).history()] == [held_out] * 3
        before = (out / "history.jsonl").read_bytes()
        made.dismiss("server")
        made.serve()
        made.run("first")
        assert (out / "history.jsonl").read_bytes() == before
    finally:
        made.stop()


def bad_folders(folder: Path) -> dict[str, Path]:
    """By kind: a folder of data with a secret where it is wrong."""
    contents = {
        "csv label": ("rows.csv", f"label,a,b,c,d\nLabel{SECRET},0,0,0,0\n".encode()),
        "csv cell": ("rows.csv", f"label,a,b,c,d\nill,0,Cell{SECRET},0,0\n".encode()),
        "csv infinite": ("rows.csv", f"label,a,b,Column{SECRET},d\nill,0,0,inf,0\n".encode()),
        "image class": (f"Class{SECRET}/1.png", b""),
        "idx damaged": (f"Scan{SECRET}-images-idx3-ubyte", b"\x00\x00\x08\x03"),
    }
    for kind, (name, content) in contents.items():
        (folder / kind / name).parent.mkdir(parents=True)
        (folder / kind / name).write_bytes(content)
    (folder / "idx damaged" / f"Scan{SECRET}-labels-idx1-ubyte").write_bytes(b"\x00\x00\x08\x01")
    rows = {"label": [f"Name{SECRET}"], **{name: [0.0] for name in "abcd"}}
    (folder / "parquet label").mkdir()
    parquet.write_table(pyarrow.table(rows), folder / "parquet label" / "rows.parquet")
    return {kind: folder / kind for kind in (*contents, "parquet label")}


def test_nothing_of_what_goes_wrong_on_nodes_reaches_the_server(tmp_path: Path) -> None:
    """Two nodes whose data is bad in another way every time that it is read, with a secret in each (secretive.py).

    Their own logs have every one of them. The server's logs, state, and run directory have none, nor a path of a node.
    """
    table = own_data.RECIPE | {"task": own_data.RECIPE["task"] | {"nodes": secretive.NODES}}
    table["training"] = table["training"] | {"rounds": 2}
    path = tmp_path / "ward.toml"
    path.write_text(tomli_w.dumps(table))
    bad = {kind: f"folder {where}" for kind, where in bad_folders(tmp_path / f"records of {SECRET}").items()}
    made = Federation.init(tmp_path / "made", path)
    fine = "good"
    while_reading = {
        "node-0": [bad["csv label"], bad["csv infinite"], bad["image class"], f"read-class Made{SECRET}"],
        "node-1": [bad["csv cell"], bad["parquet label"], bad["idx damaged"], f"read-exit Exit{SECRET}"],
    }
    while_working = {  # trained, evaluated, and the same again
        "node-0": [f"use-key Key{SECRET}", fine, fine, f"use-file /data/File{SECRET}"],
        "node-1": [fine, f"use-value Value{SECRET}", f"use-class Type{SECRET}", fine],
    }
    for node in while_reading:
        folder = made.folder / node
        shutil.copy(Path(secretive.__file__), folder / f"ward_{SECRET}.py")
        lines = [fine, *while_reading[node], fine, *while_working[node]]  # the first is for `fedstrata flower check`
        (folder / "faults").write_text("\n".join(lines))
        text = (folder / "node.toml").read_text()
        (folder / "node.toml").write_text(text.replace('data = ""', f'data = "ward_{SECRET}:data"'))
    try:
        made.start()
        rounds = history(made.run("first"))
    finally:
        made.stop()
    more = "; its own log says more"
    assert [missing(line["lost"]) for line in rounds] == [
        [(0, Status("failed", f"it cannot train (KeyError){more}"))],
        [(1, Status("failed", f"it cannot train (LookupError){more}"))],
    ]
    assert [missing(line["unmeasured"]) for line in rounds] == [
        [(1, Status("failed", f"it cannot evaluate the model (ValueError){more}"))],
        [(0, Status("failed", f"it cannot evaluate the model (FileNotFoundError){more}"))],
    ]
    for kind in ("DataError", "RecipeError", "SystemExit"):
        assert f": it cannot read its data ({kind}){more}" in made.log("run-first")
    for node, secrets in {
        "node-0": ["Label", "Column", "Class", "Made", "Key", "/data/File"],
        "node-1": ["Cell", "Name", "Scan", "Exit", "Value", "Type"],
    }.items():
        assert (made.folder / node / "faults").read_text() == fine
        for secret in secrets:
            assert f"{secret}{SECRET}" in made.log(node)
        client = node.removeprefix("node-")
        assert f"client {client}, asked who it is: it cannot read its data. The server is told" in made.log(node)
        assert re.search(rf"client {client}, round \d: it cannot train\. The server is told", made.log(node))
        assert f"{SECRET} is printed, too" in made.log(node)
    files = [path for path in (made.folder / "server").rglob("*") if path.is_file()]
    assert any(path.name == "superlink.db" for path in files)
    for path in (*files, made.folder / "server.log", made.folder / "run-first.log"):
        assert not is_in(SECRET, path.read_bytes()), path
        assert not is_in(SECRET, str(path).encode()), path


def say_where(config: Path, data: Path) -> None:
    text, changes = re.subn(r'data = ""', f'data = "{data}"', config.read_text())
    assert changes == 1
    config.write_text(text)
