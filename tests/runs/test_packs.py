"""Packs of what clients remember: both kept checkpoints find all that they name, and the disk holds little more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedstrata
from fedstrata.core.errors import RunDirectoryError
from fedstrata.core.memory import Tag, empty_table, renewed, tags
from fedstrata.core.versions import Versions
from fedstrata.runs.directory import round_file
from fedstrata.runs.files import Folder
from fedstrata.runs.packs import MEMORY, Packs
from tests.support.runs import TINY, run_content


def version(client: int, tag: Tag) -> dict[str, torch.Tensor]:
    return {"c": torch.tensor([client, *tag], dtype=torch.float64), "count": torch.tensor([client])}


def check(packs: Packs, round: int, table: Any) -> None:
    """What a new process reads is what was made."""
    found = Versions()
    packs.load(round, table, found)
    for client, tag in tags(table).items():
        for name, value in version(client, tag).items():
            assert torch.equal(found.of(client, tag)[name], value)
            assert found.of(client, tag)[name].dtype == value.dtype


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), clients=st.integers(1, 12), every=st.integers(1, 3))
def test_kept_checkpoints_find_all_that_they_name(
    tmp_path_factory: pytest.TempPathFactory, seed: int, clients: int, every: int
) -> None:
    folder, draw = tmp_path_factory.mktemp("packs"), np.random.default_rng(seed)
    packs, versions, table = Packs(Folder(folder), "1f"), Versions(), empty_table()
    kept: dict[int, Any] = {0: table}
    for round in range(1, 25):
        who = np.flatnonzero(draw.random(clients) < 0.3).tolist()
        tag = (round, int(draw.integers(0, 2)))
        for client in who:
            versions.put(client, tag, version(client, tag))
        table = renewed(table, who, tag)
        if round % every == 0:
            packs.store(round, table, versions)
            kept = {**dict(list(kept.items())[-1:]), round: table}
            packs.forget(kept)
            for number, one in kept.items():
                check(packs, number, one)
                check(Packs(Folder(folder), "1f"), number, one)
            stored = sum(len(Folder(folder).array_names(f"{MEMORY}/{file}")) // 2 for file in files(folder))
            live = {pair for one in kept.values() for pair in tags(one).items()}
            assert stored <= 4 * max(1, len(live))


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in (folder / MEMORY).iterdir()) if (folder / MEMORY).exists() else []


def test_what_was_stored_is_not_stored_again(tmp_path: Path) -> None:
    """Three clients, of which one takes part again: the second pack has its version only, until the first is sparse."""
    packs, versions, table = Packs(Folder(tmp_path), "1f"), Versions(), empty_table()
    contents = []
    for round, who in enumerate(([0, 1, 2], [0], [1]), start=1):
        for client in who:
            versions.put(client, (round, 0), version(client, (round, 0)))
        table = renewed(table, who, (round, 0))
        packs.store(round, table, versions)
        contents.append({name.rpartition("/")[0] for name in Folder(tmp_path).array_names(round_file(MEMORY, round))})
    assert contents == [{"0/1.0", "1/1.0", "2/1.0"}, {"0/2.0"}, {"1/3.0", "2/1.0"}]


SCAFFOLD = {**TINY, "algorithm": {"name": "scaffold"}, "training": {**TINY["training"], "rounds": 4}}


def stopped(tmp_path: Path) -> Path:
    """A run that ends after two of its four rounds."""
    fedstrata.run(SCAFFOLD, settings={"training.rounds": 2}, out=tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("kind", ["gone", "cut", "of another run", "a number changed"])
def test_a_damaged_pack_is_refused(tmp_path: Path, kind: str) -> None:
    path = stopped(tmp_path)
    file = path / MEMORY / "000002.safetensors"
    content = file.read_bytes()
    if kind == "gone":
        file.unlink()
    elif kind == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif kind == "of another run":
        other = fedstrata.run(SCAFFOLD, settings={"training.rounds": 2}, out=tmp_path / "other")
        file.write_bytes((other.path / MEMORY / file.name).read_bytes())
    else:
        file.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    with pytest.raises(RunDirectoryError, match=MEMORY):
        fedstrata.resume(path, settings={"training.rounds": 4})


@pytest.mark.parametrize("workers", [1, 2])
def test_resuming_brings_memory_back_bit_for_bit(tmp_path: Path, workers: int) -> None:
    path = stopped(tmp_path)
    fedstrata.resume(path, settings={"training.rounds": 4, "engine.workers": workers})
    whole = fedstrata.run(SCAFFOLD, out=tmp_path / "whole")
    assert run_content(path, recipe=False) == run_content(whole.path, recipe=False)


def test_going_back_to_the_checkpoint_before(tmp_path: Path) -> None:
    """The last checkpoint is deleted, as an error may advise: the one before it still finds what it names."""
    path = stopped(tmp_path)
    (path / "checkpoints" / "000002.safetensors").unlink()
    fedstrata.resume(path, settings={"training.rounds": 4})
    whole = fedstrata.run(SCAFFOLD, out=tmp_path / "whole")
    assert run_content(path, recipe=False) == run_content(whole.path, recipe=False)
