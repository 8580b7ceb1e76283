"""Nodes that read their own data: the local engine's bits, a server without any data, errors that name the node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from tests.support import node_data, own_data

pytest.importorskip("flwr")


from fedstrata.core.errors import FedstrataError
from fedstrata.deployment.server import serve
from fedstrata.runs.reader import Run
from tests.support.fake_grid import FakeGrid

CLIENTS = 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps(own_data.RECIPE))
    return recipe


def nodes(path: Path, data: list[str]) -> FakeGrid:
    grid = FakeGrid(path, 0)
    for client, own in enumerate(data):
        grid.join(1000 + client, client, data=own)
    return grid


def on_flower(grid: FakeGrid, out: Path, wait: float = 10) -> list[Any]:
    return list(serve(grid, {"recipe": str(grid.recipe), "out": str(out), "wait": wait}))


@pytest.mark.parametrize("algorithm", ["fedldf", "fedlap", "fedlayerwise"])
def test_nodes_with_their_own_data_end_in_the_local_engines_run(
    algorithm: str, tmp_path: Path, same_run: Callable[..., None]
) -> None:
    """idx, CSV, image folders and parquet on four nodes, against the same samples as tensors in one process."""
    path = tmp_path / "recipe.toml"
    path.write_text(tomli_w.dumps(own_data.RECIPE | {"algorithm": {"name": algorithm}}))
    samples = own_data.write_all(tmp_path)
    grid = nodes(path, [str(tmp_path / kind) for kind in node_data.WRITERS])
    lines = on_flower(grid, tmp_path / "flower")
    own_data.run_locally(samples, tmp_path / "local", algorithm={"name": algorithm})
    same_run(tmp_path / "flower", tmp_path / "local", recipe=False)
    held_out = sum(round(own_data.HELD_OUT * len(labels)) for _, labels in samples)
    assert lines[-1]["metrics"]["clients"]["samples"] == held_out
    assert Run(tmp_path / "flower").about.data.source == "the nodes' own data"


def test_no_message_has_a_sample_of_a_nodes_data(path: Path, tmp_path: Path) -> None:
    """Every row of pixels, as bytes and as the floats that are trained on, is looked for in all that nodes send."""
    samples = own_data.write_all(tmp_path)
    grid = nodes(path, [str(tmp_path / kind) for kind in node_data.WRITERS])
    on_flower(grid, tmp_path / "run")
    from flwr.common.serde import recorddict_to_proto

    sent = b"".join(recorddict_to_proto(content).SerializeToString() for _, content, _ in grid.wire)
    for images, _ in samples:
        for row in images.reshape(-1, 28):
            assert row.tobytes() not in sent
            assert (row.astype(np.float32) / 255).tobytes() not in sent


def test_a_node_never_imports_what_the_run_config_names(
    path: Path, tmp_path: Path, user_module: Callable[[str, str], str]
) -> None:
    """Its data is what its own config says, whatever comes with a run."""
    user_module("trap", f"open({str(tmp_path / 'sprung')!r}, 'w').close()\ndef data(): raise SystemExit\n")
    own_data.write_all(tmp_path)
    grid = nodes(path, [str(tmp_path / kind) for kind in node_data.WRITERS])
    for context in grid.nodes.values():
        context.run_config.update({"data": "trap:data", "recipe": "trap:data", "task.dataset": "trap:data"})
    assert len(on_flower(grid, tmp_path / "run")) == 3
    assert not (tmp_path / "sprung").exists()


def test_a_node_whose_data_is_bad_is_named_and_its_own_log_has_the_reason(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own_data.write_all(tmp_path)
    folders = [str(tmp_path / kind) for kind in node_data.WRITERS]
    (tmp_path / "csv" / "samples.csv").write_text("label,x\n0,1\n")
    with pytest.raises(
        FedstrataError, match=r"3 are here; node 1001: it cannot read its data \(DataError\); its own log says more$"
    ):
        on_flower(nodes(path, folders), tmp_path / "run", wait=0.5)
    assert "samples.csv: 1 columns of inputs, expected 784" in caplog.text
    assert not (tmp_path / "run").exists()


def test_a_named_data_sets_table_stays_only_while_it_is_true(recipe: Callable[..., Path], tmp_path: Path) -> None:
    """Nodes with other samples than the recipe's partition gives them: run.json has no table."""
    path = recipe()
    on_flower(FakeGrid(path, CLIENTS), tmp_path / "same")
    assert Run(tmp_path / "same").about.data.table is not None
    grid = FakeGrid(path, CLIENTS)
    other = recipe({"task.partition.samples": 9}, "other.toml")
    grid.leave(1003)
    grid.join(1003, 3, recipe=str(other))
    on_flower(grid, tmp_path / "other")
    assert Run(tmp_path / "other").about.data.table is None
