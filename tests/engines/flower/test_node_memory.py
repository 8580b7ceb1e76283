"""What a node remembers: files by run and client, and which of them it may forget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from fedstrata.core.errors import MemoryLost, MessageError
from fedstrata.core.messages import Order
from fedstrata.core.record import RoundFailed
from fedstrata.deployment.server import serve
from fedstrata.nodes.memory import NodeMemory
from fedstrata.runs.reader import Run
from tests.support.fake_grid import FakeGrid

RecipeFile = Callable[..., Path]
CLIENTS = 4

RUN = "0123abcd"


def order(round: int, attempt: int = 0, base: tuple[int, int] | None = None, since: int = 0) -> Order:
    return Order("train", round, attempt, 3, base=base, since=since)


def version(value: float) -> dict[str, torch.Tensor]:
    return {"c": torch.full((2,), value), "private": torch.tensor([value], dtype=torch.float64)}


def test_a_version_is_there_for_another_process(tmp_path: Path) -> None:
    NodeMemory(tmp_path, RUN, 3).put(order(1), version(1.5))
    found = NodeMemory(tmp_path, RUN, 3).of(order(2, base=(1, 0)))
    assert {name: value.tolist() for name, value in found.items()} == {"c": [1.5, 1.5], "private": [1.5]}
    assert [file.name for file in tmp_path.rglob("*.safetensors")] == ["1.0.safetensors"]


def test_what_is_missing_says_what_is_there(tmp_path: Path) -> None:
    memory = NodeMemory(tmp_path, RUN, 3)
    with pytest.raises(MemoryLost, match="client 3 has no memory of round 4, attempt 1; it has none at all"):
        memory.of(order(5, base=(4, 1)))
    memory.put(order(2), version(1))
    memory.put(order(4, base=(2, 0)), version(2))
    said = "client 3 has no memory of round 4, attempt 1; it has that of round 2, attempt 0, round 4, attempt 0"
    with pytest.raises(MemoryLost, match=said):
        memory.of(order(5, base=(4, 1)))
    with pytest.raises(MemoryLost):
        NodeMemory(tmp_path, "ffff", 3).of(order(5, base=(4, 0)))


@pytest.mark.parametrize("run", ["", "../up", "a/b", "ABC", "a" * 65])
def test_a_run_is_no_path(tmp_path: Path, run: str) -> None:
    with pytest.raises(MessageError, match="which run"):
        NodeMemory(tmp_path, run, 3)
    assert not list(tmp_path.iterdir())


def test_what_the_server_may_come_back_to_is_kept(tmp_path: Path) -> None:
    """Accepted in rounds 1, 3 and 5, tried in vain in 2 and 4; checkpoints of rounds 2, 4 and 6, of which two are kept.

    In round 7 the server may come back to round 4, in which it named 3; so 3 and 5 are needed, and 1 is not.
    """
    memory = NodeMemory(tmp_path, RUN, 3)
    memory.put(order(1), version(1))
    memory.put(order(2, base=(1, 0)), version(2))
    memory.put(order(3, 0, base=(1, 0)), version(3))
    memory.put(order(3, 1, base=(1, 0)), version(3))
    memory.put(order(4, base=(3, 1), since=0), version(4))
    assert memory.tags() == [(1, 0), (3, 1), (4, 0)]
    memory.put(order(5, base=(3, 1), since=2), version(5))
    assert memory.tags() == [(1, 0), (3, 1), (5, 0)]
    memory.put(order(7, base=(5, 0), since=4), version(7))
    assert memory.tags() == [(3, 1), (5, 0), (7, 0)]


def test_a_server_that_came_back_finds_what_it_names(tmp_path: Path) -> None:
    """Killed in round 6, it goes on from round 4's checkpoint and names 3; later ones stay meanwhile."""
    memory = NodeMemory(tmp_path, RUN, 3)
    memory.put(order(3), version(3))
    memory.put(order(5, base=(3, 0), since=2), version(5))
    memory.put(order(6, base=(5, 0), since=2), version(6))
    assert memory.of(order(5, base=(3, 0)))["c"].tolist() == [3, 3]
    memory.put(order(5, base=(3, 0), since=2), version(50))
    assert memory.of(order(6, base=(5, 0)))["c"].tolist() == [50, 50]


def test_a_torn_file_is_none(tmp_path: Path) -> None:
    memory = NodeMemory(tmp_path, RUN, 3)
    memory.put(order(1), version(1))
    (tmp_path / RUN / "3" / "2.0.safetensors.partial").write_bytes(b"half")
    assert memory.tags() == [(1, 0)]


# --- in a federation -------------------------------------------------------------------------------------------------


def forgetful(
    recipe: RecipeFile, tmp_path: Path, algorithm: str, settings: dict[str, Any] | None = None
) -> tuple[list[Any], Path]:
    """After round 2 client 1's node comes back without its memory."""
    training = {"training.rounds": 4, "training.min_replies": 0.5}
    path, out = recipe({"algorithm": {"name": algorithm}, **training, **(settings or {})}), tmp_path / "run"
    grid = FakeGrid(path, CLIENTS)
    lines: Any = serve(grid, {"recipe": str(path), "out": str(out), "wait": 10})
    done = [next(lines), next(lines)]
    grid.join(1001, 1, memory=str(tmp_path / "new disk"))
    return [*done, *lines], out


def test_a_node_that_lost_its_memory_says_what_it_has(recipe: RecipeFile, tmp_path: Path) -> None:
    lines, _ = forgetful(recipe, tmp_path, "scaffold")
    why = "it does not have what its client is to remember (MemoryLost); it has none; its own log says more"
    assert [[(who["client"], who["reason"]) for who in line["lost"]] for line in lines] == [
        [],
        [],
        [(1, why)],
        [(1, why)],
    ]


def test_a_node_that_lost_its_memory_can_start_afresh(
    recipe: RecipeFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines, out = forgetful(recipe, tmp_path, "fedper", {"engine.lost_memory": "afresh"})
    assert [line["lost"] for line in lines] == [[], [], [], []]
    said = "client 1 has no memory of round 2, attempt 0; it has none at all; it starts afresh, as the server wants it"
    assert caplog.messages.count(said) == 1
    kept = sorted(file.name for file in (tmp_path / "new disk").rglob("*.safetensors"))
    assert kept == ["3.0.safetensors", "4.0.safetensors"]
    assert Run(out).clients(4)["taken_part"].all()


def test_a_node_without_a_place_for_memory_says_so(recipe: RecipeFile, tmp_path: Path) -> None:
    path = recipe({"algorithm": {"name": "fedper"}, "training.attempts": 1})
    grid = FakeGrid(path, CLIENTS)
    for context in grid.nodes.values():
        context.node_config["memory"] = ""
    with pytest.raises(RoundFailed, match=r"it does not have what its client is to remember \(RecipeError\)"):
        list(serve(grid, {"recipe": str(path), "out": str(tmp_path / "run"), "wait": 10}))


def test_no_memory_is_in_any_message(recipe: RecipeFile, tmp_path: Path) -> None:
    """Of FedPer's messages none has the private layer, by name or as so many numbers, either way."""
    path = recipe({"algorithm": {"name": "fedper"}})
    grid = FakeGrid(path, CLIENTS)
    list(serve(grid, {"recipe": str(path), "out": str(tmp_path / "run"), "wait": 10}))
    run = Run(tmp_path / "run")
    private = run.about.private[0].rpartition(".")[0]
    arrays = [
        (name, key, array.shape)
        for content in [*(message.content for message in grid.sent), *(reply for _, reply, _ in grid.wire)]
        for name, record in content.array_records.items()
        for key, array in record.items()
    ]
    assert {key for name, key, _ in arrays if name in ("model", "layers")} == set(run.layer_names)
    assert all(key != private and shape != (50,) for _, key, shape in arrays)
