"""A run directory, written: made whole, gone on with, and set back to its last whole round.

A round is stored in this order: layers, history line, checkpoint. So a checkpoint has all of its past beside it, and
resuming drops what is younger than it. The directory is locked while a process works in it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save

from fedstrata.core import determinism
from fedstrata.core.errors import RunDirectoryError
from fedstrata.core.layers import Layers
from fedstrata.core.record import RoundRecord
from fedstrata.core.state import ServerState
from fedstrata.core.versions import Versions
from fedstrata.recipes.schema import Recipe
from fedstrata.runs import environment, formats
from fedstrata.runs.directory import Checkpoint, RunDirectory, digest, round_file, sha256
from fedstrata.runs.environment import differences
from fedstrata.runs.files import TEMPORARY, WHILE_WRITING, Folder, locked, sync_folder
from fedstrata.runs.formats import RUN_FORMAT, Line, damaged
from fedstrata.runs.packs import MEMORY, Packs

_PARTS = ("objective", "weighting", "server", "memory")


def make_directory(path: Path, recipe: Recipe, about: Mapping[str, Any], state: ServerState) -> None:
    """Make a new run directory; it appears complete or not at all."""
    if path.resolve() == Path.cwd():  # it is moved into place whole, which would pull the ground away
        raise RunDirectoryError(f"{path} is the folder you are in; choose another --out")
    content, run = recipe.to_toml().encode(), secrets.token_hex(8)
    identity = {"format": RUN_FORMAT, "id": run, "recipe_sha256": sha256(content), "arithmetic": determinism.ARITHMETIC}
    info = _json(identity | {"versions": environment.versions(), **about})
    formats.read_about(json.loads(info), path / "run.json", "cannot be written")  # what nobody could read
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent, WHILE_WRITING):  # another process may be about to make one of the same name
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunDirectoryError(f"{path} exists and is not empty; use --resume to go on, or another --out")
        fresh = path.with_name(f".{path.name}{TEMPORARY}")
        shutil.rmtree(fresh, ignore_errors=True)
        for folder in (fresh, fresh / "layers", fresh / "checkpoints"):
            folder.mkdir()
        files = Folder(fresh)
        files.write("run.json", info)
        files.write("recipe.toml", content)
        files.write("history.jsonl", b"")
        _write_checkpoint(files, state, run)
        os.rename(fresh, path)
        sync_folder(path.parent)


@contextmanager
def open_for_writing(path: Path) -> Iterator[RunWriter]:
    """Hold a run directory for this process alone, and work in this very one, should another take its place."""
    with locked(path) as handle:
        yield RunWriter(path, handle)


class RunWriter(RunDirectory):
    """The files of a run that this process alone may change."""

    def _change_about(self, **fields: Any) -> None:
        """Replace fields of run.json; None takes one away. What else is there stays."""
        content = self.files.read_versioned("run.json", (RUN_FORMAT,)) | fields
        self.files.write("run.json", _json({name: value for name, value in content.items() if value is not None}))
        self.about = formats.read_about(content, self.path / "run.json")

    def note_environment(self) -> list[str]:
        """Write down with what the next rounds are computed; returns what of it is not as it was in the last one."""
        now, done = environment.versions(), self.done()
        environments = self.environments_until(done)
        changes = differences(environments[-1][1], now)
        if changes:
            environments.append((done + 1, now))
        if environments != self.environments:
            self._change_about(later=[{"round": first, "versions": found} for first, found in environments[1:]])
        return changes

    def rewrite_recipe(self, recipe: Recipe) -> None:
        """Store a changed recipe (a run that is extended). Killed in between, it is the one before."""
        content = recipe.to_toml().encode()
        self._change_about(recipe_sha256=sha256(content), recipe_sha256_before=sha256(self.files.read("recipe.toml")))
        self.files.write("recipe.toml", content)
        self.recipe = recipe
        self._settle_recipe()

    def _settle_recipe(self) -> None:
        """Of two recipes that may be there while one replaces the other, keep the one that is."""
        if self.about.recipe_sha256_before is not None:
            self._change_about(recipe_sha256=sha256(self.files.read("recipe.toml")), recipe_sha256_before=None)

    # --- while it runs ------------------------------------------------------------------------------------------

    def store_layers(self, record: RoundRecord) -> None:
        """Write what the round was for each client and layer."""
        arrays = {name: values.astype(np.float64) for name, values in record.layers.items()}
        arrays |= {"clients": record.clients, "sizes": record.sizes, "work": record.work, "loss": record.losses}
        arrays = {name: np.ascontiguousarray(values) for name, values in sorted(arrays.items())}
        metadata = {"run": str(self.id), "round": str(record.round)}
        self.files.write(round_file("layers", record.round), save(arrays, metadata))

    def append_history(self, line: Mapping[str, Any]) -> Line:
        """Add the round's line, and return it as whoever reads it will; one that nobody could read is not written."""
        content = _line(self.id, line)
        read = formats.read_line(content, line["round"], self.about, self.path / "history.jsonl")
        self.files.append_line("history.jsonl", content)
        return read

    def append_failure(self, line: Mapping[str, Any]) -> None:
        """Add the line of a round that failed: the history has whole rounds only."""
        before = self.files.read("failed.jsonl") if self.files.has("failed.jsonl") else b""
        self.files.write("failed.jsonl", before + _line(self.id, line))

    def store_clients(self, round: int, results: Mapping[str, np.ndarray]) -> None:
        """Write what every client was measured to."""
        metadata = {"run": str(self.id), "round": str(round)}
        self.files.make_folder("clients")
        self.files.write(round_file("clients", round), save(dict(sorted(results.items())), metadata))

    def store_checkpoint(self, state: ServerState, versions: Versions | None = None) -> None:
        """Write the server's state, and forget all but the last ones. What it names of clients' memory comes first."""
        if state.memory and versions is not None:
            self.packs.store(state.round, state.memory, versions)
        _write_checkpoint(self.files, state, str(self.id))
        self._forget_old_checkpoints()

    def load_memory(self, state: ServerState, versions: Versions) -> None:
        """Take what the state names of clients' memory out of its packs."""
        if state.memory:
            self.packs.load(state.round, state.memory, versions)

    @cached_property
    def packs(self) -> Packs:
        """The clients' memory."""
        return Packs(self.files, str(self.id))

    def _forget_old_checkpoints(self) -> None:
        rounds, keep = self.rounds("checkpoints"), self.recipe.record.keep_checkpoints
        for round in rounds[:-keep]:
            self.files.remove(round_file("checkpoints", round))
        if self.files.has(MEMORY):
            self.packs.forget({round: self._table(round) for round in rounds[-keep:]})

    def _table(self, round: int) -> dict[str, torch.Tensor]:
        """The table of clients' memory that a checkpoint has; none, if it cannot be read."""
        try:
            arrays, _ = self.files.read_arrays(round_file("checkpoints", round), "memory/")
        except (OSError, RunDirectoryError):
            return {}
        return {name.removeprefix("memory/"): torch.from_numpy(array) for name, array in arrays.items()}

    def rewind(self, round: int) -> list[Line]:
        """Drop everything younger than a round: what an interrupted process left of the next one. What is kept.

        A round that was evaluated only for being the last one loses what was measured when the run is extended, so
        that the history is that of a run that was never shorter.
        """
        self._settle_recipe()
        if len(self.history()) < round:
            problem = f"it ends before round {round}, which has a checkpoint"
            raise damaged(self.path / "history.jsonl", problem)
        before = self.history_content()
        lines = [line + b"\n" for line in before.split(b"\n")[:round]]
        only_as_last = bool(round < self.recipe.training.rounds and round % self.recipe.evaluation.every)
        if round and only_as_last:
            last = json.loads(lines[-1])
            last["metrics"], last["unmeasured"], last["bytes"]["evaluation"] = {}, [], 0
            lines[-1] = _line(self.id, last)
        if before != b"".join(lines) or not self.files.has("history.jsonl"):
            self.files.write("history.jsonl", b"".join(lines))
        for folder in ("", "layers", "checkpoints", "clients", MEMORY):
            for name in self.files.names(folder) if not folder or self.files.has(folder) else ():
                if name.endswith(TEMPORARY):
                    self.files.remove(f"{folder}/{name}" if folder else name)
        for folder in ("layers", "clients", MEMORY):
            for known in self.rounds(folder) if self.files.has(folder) else ():
                if known > round or (known == round and folder == "clients" and only_as_last):
                    self.files.remove(round_file(folder, known))
                else:
                    self.files.has(round_file(folder, known))  # a link is refused now, and not when it is first read
        self._forget_old_checkpoints()
        return self.history()


def last_state(directory: RunDirectory, layers: Layers | None = None) -> ServerState:
    """The state after the last checkpoint, checked, if they are given, against the model's layers."""
    return _state(directory, directory.last_checkpoint(), layers)


def state_after(directory: RunDirectory, layers: Layers, round: int) -> ServerState:
    """The same after a round whose checkpoint is kept."""
    return _state(directory, directory.checkpoint(round), layers)


def _state(directory: RunDirectory, last: Checkpoint, layers: Layers | None) -> ServerState:
    path = directory.path / round_file("checkpoints", last.round)
    parts: dict[str, dict[str, torch.Tensor]] = {part: {} for part in _PARTS}
    try:
        tensors = {name: torch.from_numpy(array) for name, array in last.arrays.items()}
    except TypeError as error:
        raise damaged(path, str(error)) from None
    for key, tensor in tensors.items():
        part, _, rest = key.partition("/")
        if part in parts:
            parts[part][rest] = tensor
    state = ServerState(last.round, tensors["model"], **parts)
    if layers is not None:
        if state.model.shape != (layers.numel,) or state.model.dtype != layers.dtype:
            raise RunDirectoryError(
                f"{path} has {state.model.numel()} numbers of {state.model.dtype}, "
                f"the recipe's model {layers.numel} of {layers.dtype}"
            )
        _require_tensors(directory, list(layers.entries))
    return state


def _require_tensors(directory: RunDirectory, found: list[str]) -> None:
    """Refuse a model with other tensors, or in another order: equal numbers would go to the wrong ones."""
    stored = [name for layer in directory.about.layers for name in layer.tensors]
    if stored != found:
        pairs = zip_longest(stored, found, fillvalue="nothing")
        old, new = next(pair for pair in pairs if pair[0] != pair[1])
        raise RunDirectoryError(f"{directory.path}: the recipe's model has {new} where the run had {old}")


def _write_checkpoint(files: Folder, state: ServerState, run: str) -> None:
    tensors = {"model": state.model}
    for part in _PARTS:
        tensors |= {f"{part}/{name}": tensor for name, tensor in getattr(state, part).items()}
    arrays = {name: tensors[name].detach().cpu().contiguous().numpy() for name in sorted(tensors)}
    metadata = {"format": str(RUN_FORMAT), "run": run, "round": str(state.round)}
    metadata["sha256"] = digest(arrays, metadata)
    files.write(round_file("checkpoints", state.round), save(arrays, metadata))


def _line(run: str | None, line: Mapping[str, Any]) -> bytes:
    return (json.dumps({"run": run, **line}, separators=(",", ":"), allow_nan=False) + "\n").encode()


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()
