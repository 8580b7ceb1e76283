"""Three SuperNodes with TLS and keys of their own: the local engine's bits, and nodes and servers that are killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from deployment import Deployment, free_port, make_key

import fedstrata
from fedstrata.runs import Run

pytestmark = pytest.mark.deployment

CLIENTS = 3
Recipe = Callable[..., Path]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    running = Deployment(tmp_path_factory.mktemp("flower"))
    try:
        for client in range(CLIENTS):
            running.register(client)
        yield running
    finally:
        running.stop()


@pytest.fixture
def nodes(deployment: Deployment) -> Iterator[Callable[[Path], None]]:
    """Start all SuperNodes with a recipe; at the end they are gone."""
    started: list[str] = []

    def start(path: Path) -> None:
        for client in range(CLIENTS):
            deployment.node(client, path)
            started.append(f"node{client}")

    yield start
    for name in started:
        if name in deployment.processes:
            deployment.dismiss(name)


def local(path: Path, out: Path) -> Run:
    return fedstrata.run(path, settings={"engine.trainer": "client"}, out=out)


@pytest.mark.parametrize("algorithm", [{"name": "fedldf", "n": 2}, {"name": "fedlap"}, {"name": "fedlayerwise"}])
def test_three_nodes_end_in_the_local_engines_run(
    algorithm: dict[str, object], deployment: Deployment, nodes: Callable[[Path], None], recipe: Recipe, tmp_path: Path,
    same_run: Callable[..., None],
) -> None:  # fmt: skip
    path = recipe(
        {
            "algorithm": algorithm,
            "task.partition.clients": CLIENTS,
            "evaluation.on": ["test", "clients"],
            "evaluation.every": 2,
        }
    )
    nodes(path)
    run = deployment.submit(path, tmp_path / "flower")
    assert deployment.finish(run) == "finished:completed", deployment.log("superlink")[-3000:]
    same_run(tmp_path / "flower", local(path, tmp_path / "local").path, recipe=False)


def test_a_node_that_is_killed_costs_its_rounds_and_takes_part_again(
    deployment: Deployment, nodes: Callable[[Path], None], recipe: Recipe, tmp_path: Path
) -> None:
    """SIGKILL during a round, and a restart at once: Flower lets the node in when its old session has lapsed."""
    path, out = (
        recipe({"task.partition.clients": CLIENTS, "training.rounds": 40, "engine.timeout": 15.0}),
        tmp_path / "run",
    )
    nodes(path)
    run = deployment.submit(path, out)
    deployment.wait_until(lambda: lines(out), "no round ends")
    deployment.kill("node2")
    deployment.node(2, path)
    deployment.wait_until(lambda: any(line["lost"] for line in lines(out)), "nobody is missed")

    def is_back() -> bool:
        if deployment.processes["node2"].poll() is not None:  # its key was still in use
            deployment.kill("node2")
            deployment.node(2, path)
        return lines(out)[-1]["lost"] == []

    deployment.wait_until(is_back, "the node does not come back", every=3)
    deployment.flwr("stop", run, "here")
    history = lines(out)
    lost = [line["round"] for line in history if line["lost"]]
    assert lost == list(range(lost[0], lost[-1] + 1))
    assert all([who["client"] for who in line["lost"]] == [2] for line in history if line["lost"])
    assert all(who["why"].startswith("no reply: ") for line in history for who in line["lost"])


def test_a_server_that_is_killed_goes_on_and_ends_the_same(
    deployment: Deployment, nodes: Callable[[Path], None], recipe: Recipe, tmp_path: Path,
    same_run: Callable[..., None],
) -> None:  # fmt: skip
    path, out = recipe({"task.partition.clients": CLIENTS, "algorithm": {"name": "fedadp"}}), tmp_path / "flower"
    nodes(path)
    first = deployment.submit(path, out)
    deployment.wait_until(lambda: lines(out), "no round ends")
    deployment.kill_server_app()
    assert deployment.finish(first) == "finished:failed"
    assert 1 <= len(lines(out)) < 3
    assert deployment.finish(deployment.submit(path, out)) == "finished:completed"
    same_run(out, local(path, tmp_path / "local").path, recipe=False)


FORGER = """
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.supercore.primitives.asymmetric import sign_message
from flwr.supernode import node_auth_http_interceptor
from flwr.supernode.cli import flower_supernode

wrong = ec.generate_private_key(ec.SECP384R1())
node_auth_http_interceptor.sign_message = lambda key, message: sign_message(wrong, message)
flower_supernode()
"""


@pytest.mark.parametrize(
    ("program", "options", "refusal"),
    [
        (["flower-supernode"], ["--auth-supernode-private-key", "stranger"], "[code: 2004]"),
        (["python", "-c", FORGER], ["--auth-supernode-private-key", "node0"], 'HTTP/1.1" 401'),
        (["flower-supernode"], [], "[code: 2001]"),
        (["flower-supernode"], ["--insecure"], "Server disconnected without sending a response"),
    ],
    ids=["unregistered", "wrong key", "no key", "plain text"],
)
def test_who_has_no_business_here_is_refused(
    program: list[str], options: list[str], refusal: str, deployment: Deployment, recipe: Recipe
) -> None:
    """Somebody with a key of their own, somebody who says to be node 0, somebody without a key or without TLS."""
    make_key(deployment.folder / "stranger")
    path, name = recipe({"task.partition.clients": CLIENTS}), f"intruder{free_port()}"
    options = [*options, *(() if "--insecure" in options else ("--root-certificates", "ca.crt"))]
    address = ["--superlink", f"127.0.0.1:{deployment.port}", "--host", "127.0.0.1", "--port", str(free_port())]
    config = ["--node-config", f'partition-id=0 recipe="{path}"', "--max-retries", "2"]
    process = deployment.start(name, *program, *address, *options, *config)
    deployment.wait_until(lambda: process.poll() is not None, "still trying")
    deployment.kill(name)
    assert "SuperNode ID" not in deployment.log(name)  # what a node that is let in says
    assert refusal in deployment.log(name) + deployment.log("superlink"), deployment.log(name)


def lines(out: Path) -> list[dict[str, Any]]:
    """The history, as far as it goes."""
    return Run(out).history() if (out / "history.jsonl").exists() else []
