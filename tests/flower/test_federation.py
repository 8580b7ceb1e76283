"""Three nodes with TLS and keys, and four with data of their own, by the scripts of `fedstrata flower init` alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import node_data
import own_data
import tomli_w
from federation import Federation

import fedstrata
from fedstrata.runs import Run

pytestmark = pytest.mark.deployment


@pytest.fixture
def federation() -> Iterator[Callable[..., Federation]]:
    made: list[Federation] = []

    def init(folder: Path, *arguments: object) -> Federation:
        made.append(Federation.init(folder, *arguments))
        return made[-1]

    yield init
    for one in made:
        one.stop()


@pytest.mark.parametrize("algorithm", ["fedldf:n=2", "fedlap"])
def test_three_nodes_end_in_the_local_engines_run(
    algorithm: str, federation: Callable[..., Federation], recipe: Callable[..., Path], tmp_path: Path,
    same_run: Callable[..., None],
) -> None:  # fmt: skip
    path = recipe({"evaluation.on": ["test", "clients"], "evaluation.every": 3})
    made = federation(tmp_path / "made", path, "--nodes", 3, "--algorithm", algorithm)
    made.start()
    out = made.run("first")
    fedstrata.run(
        path,
        algorithm=algorithm,
        settings={"engine.trainer": "client", "task.partition.clients": 3},
        out=tmp_path / "local",
    )
    same_run(out, tmp_path / "local", recipe=False)
    assert [line["replies"] for line in Run(out).history()] == [3, 3, 3]
    codes = made.stop()
    assert codes[:3] == [0, 0, 0], codes
    assert all("SuperNode ID" in made.log(f"node-{client}") for client in range(3))


def test_nodes_train_and_are_evaluated_on_their_own_data(
    federation: Callable[..., Federation], tmp_path: Path, same_run: Callable[..., None]
) -> None:
    """idx, CSV, image folders and parquet, each on its own node; the server has nothing.

    A server that is started again knows the nodes' keys, and the nodes find back to it: a finished run begins when all
    four are there, and has nothing left to do.
    """
    path = tmp_path / "hospitals.toml"
    path.write_text(tomli_w.dumps(own_data.RECIPE))
    samples = own_data.write_all(tmp_path / "data")
    made = federation(tmp_path / "made", path)
    for client, kind in enumerate(node_data.WRITERS):
        config = made.folder / f"node-{client}" / "node.toml"
        text, changes = re.subn(r'data = ""', f'data = "{tmp_path / "data" / kind}"', config.read_text())
        assert changes == 1
        config.write_text(text)
    made.start()
    out = made.run("first")
    same_run(out, own_data.run_locally(samples, tmp_path / "local").path, recipe=False)
    held_out = sum(round(own_data.HELD_OUT * len(labels)) for _, labels in samples)
    assert [line["metrics"]["clients"]["samples"] for line in Run(out).history()] == [held_out] * 3
    before = (out / "history.jsonl").read_bytes()
    made.restart_server()
    assert made.log("server").count("Created node_id=") == 4
    made.run("first")
    assert (out / "history.jsonl").read_bytes() == before
