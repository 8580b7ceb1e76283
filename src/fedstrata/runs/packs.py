"""What clients remember, beside a run's checkpoints: a file for each checkpoint, with what is new in it.

A pack is written before the checkpoint that names what is in it. A version stays in its pack for as long as a kept
checkpoint names it; a pack of which less than half is still needed is written again into the next one. So the disk
holds a few times what is remembered.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from safetensors.numpy import save

from fedstrata.core.axes import State
from fedstrata.core.errors import RunDirectoryError
from fedstrata.core.memory import Tag, tags
from fedstrata.core.versions import Versions
from fedstrata.runs.directory import digest, round_file, rounds_in
from fedstrata.runs.files import Folder
from fedstrata.runs.formats import damaged

MEMORY = "memory"
"""The folder of packs."""

_Key = tuple[int, Tag]
"""A client, and the version of its memory."""


class Packs:
    """The packs of a run."""

    def __init__(self, files: Folder, run: str) -> None:
        self._files, self._run = files, run
        self._held = {
            round: set(map(self._key, files.array_names(round_file(MEMORY, round))))
            for round in (rounds_in(files, MEMORY) if files.has(MEMORY) else ())
        }

    def store(self, round: int, table: State, versions: Versions) -> None:
        """Write what a checkpoint will name and no pack has yet."""
        needed = set(tags(table).items())
        homes = {key: home for home, held in sorted(self._held.items()) for key in held & needed if home < round}
        sparse = {home for home in homes.values() if 2 * len(self._held[home] & needed) < len(self._held[home])}
        new = {key for key in needed if homes.get(key, round) in {*sparse, round}}
        if not new:
            return
        arrays = {
            f"{client}/{tag[0]}.{tag[1]}/{name}": value.detach().cpu().contiguous().numpy()
            for client, tag in sorted(new)
            for name, value in sorted(versions.of(client, tag).items())
        }
        metadata = {"run": self._run, "round": str(round)}
        metadata["sha256"] = digest(arrays, metadata)
        self._files.make_folder(MEMORY)
        self._files.write(round_file(MEMORY, round), save(arrays, metadata))
        self._held[round] = new

    def load(self, round: int, table: State, versions: Versions) -> None:
        """Read what a checkpoint names."""
        homes: dict[int, set[_Key]] = {}
        for key, home in self._homes(round, table).items():
            homes.setdefault(home, set()).add(key)
        for home, keys in homes.items():
            found: dict[_Key, dict[str, torch.Tensor]] = {key: {} for key in keys}
            for name, array in self._read(home).items():
                if (key := self._key(name)) in found:
                    found[key][name.split("/", 2)[2]] = torch.from_numpy(array)
            for (client, tag), version in found.items():
                versions.put(client, tag, version)

    def forget(self, tables: Mapping[int, State]) -> None:
        """Remove the packs that none of the kept checkpoints needs."""
        needed = {home for round, table in tables.items() for home in self._homes(round, table).values()}
        for round in sorted(set(self._held) - needed):
            if round <= max(tables, default=0):
                self._files.remove(round_file(MEMORY, round))
                del self._held[round]

    def _homes(self, round: int, table: State) -> dict[_Key, int]:
        """Where each version that a checkpoint names is: in the last pack that is no younger than the checkpoint."""
        needed = set(tags(table).items())
        homes = {k: home for home, held in sorted(self._held.items()) if home <= round for k in held & needed}
        if missing := sorted(needed - homes.keys()):
            client, tag = missing[0]
            what = f"it lacks what client {client} remembers of round {tag[0]}, attempt {tag[1]}"
            raise damaged(self._files.path / MEMORY, what)
        return homes

    def _read(self, round: int) -> dict[str, np.ndarray]:
        name = round_file(MEMORY, round)
        arrays, metadata = self._files.read_arrays(name)
        if metadata.get("run") != self._run or metadata.get("round") != str(round):
            raise RunDirectoryError(f"{self._files.path / name} is of another run or round")
        if metadata.get("sha256") != digest(arrays, metadata):
            raise RunDirectoryError(f"{self._files.path / name} is damaged: its digest does not match")
        return arrays

    def _key(self, name: str) -> _Key:
        try:
            client, tag, _ = name.split("/", 2)
            round, attempt = tag.split(".")
            return int(client), (int(round), int(attempt))
        except ValueError:
            raise damaged(self._files.path / MEMORY, f"it has an array {name!r}") from None
