"""A run directory: everything about a run, for live tables, reports and resume (docs/run-directory.md).

    run.json                 format, the run's id, the recipe's digest, arithmetic, versions, layers, the data, …
    recipe.toml              the exact recipe
    history.jsonl            one line per round, written when the round is whole
    layers/000001.safetensors    the round's figures per client and layer
    checkpoints/000001.safetensors  the server's state after the round; the last two are kept

A round is stored in this order: figures, history line, checkpoint. So a checkpoint has all of its past beside it, and
resuming drops what is younger than it. Every file says which run and which round it belongs to, and is refused anywhere
else. The directory is locked while a process works in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save

from fedstrata.core.determinism import ARITHMETIC
from fedstrata.core.errors import RunDirectoryError
from fedstrata.core.lazy import torch
from fedstrata.recipes.schema import Recipe
from fedstrata.runs.files import TEMPORARY, WHILE_WRITING, Folder, locked, sync_folder

if TYPE_CHECKING:
    from fedstrata.core.layers import Layers
    from fedstrata.core.rounds import RoundRecord, ServerState

FORMAT = 2
"""Version of the run directory's format."""

_NAMELESS = 1
"""The format whose files do not say which run they are of: it is read, and not written any more."""

_KEPT_CHECKPOINTS = 2

Versions = dict[str, str]

_DECIDE_BITS = ("torch", "numpy", "cpu", "processor")
"""The versions with which the last bits of a result may change."""


def versions() -> Versions:
    """What the run's figures may depend on."""
    from fedstrata._version import __version__

    return {
        "fedstrata": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "processor": processor(),
    }


def processor() -> str:
    """What the kernel calls it, or "unknown"."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _differences(before: Versions, after: Versions) -> list[str]:
    """What bits may depend on, where it is another: "torch 2.12.0 → 2.13.0"."""
    pairs = [(name, before.get(name, "unknown"), after.get(name, "unknown")) for name in _DECIDE_BITS]
    return [f"{name} {old} → {new}" for name, old, new in pairs if old != new]


def _is_environment(entry: Any) -> bool:
    found = entry.get("versions") if isinstance(entry, dict) and type(entry.get("round")) is int else None
    return isinstance(found, dict) and all(isinstance(text, str) for text in found.values())


@dataclass(frozen=True)
class Checkpoint:
    """The server's state after a round, as it lies in the file: `model`, `objective/…`, `weighting/…`, `server/…`."""

    round: int
    arrays: Mapping[str, np.ndarray]

    @property
    def weights_sha256(self) -> str:
        """SHA-256 of the flat model."""
        return hashlib.sha256(self.arrays["model"].data).hexdigest()


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        """Open an existing run directory."""
        self.path, self._files = path, Folder(path)
        if not path.is_dir():
            raise RunDirectoryError(f"{path} does not exist or is no directory")
        if not self._files.has("run.json"):
            raise RunDirectoryError(f"{path} is no run directory: it has no run.json")
        self.reread()

    def reread(self) -> None:
        """Read what the run is: its run.json and its recipe."""
        self.info = self._files.read_versioned("run.json", (_NAMELESS, FORMAT))
        self.id: str | None = self.info.get("id")
        if (self.id is None) != (self.info["format"] == _NAMELESS):
            raise RunDirectoryError(f"{self.path}/run.json is damaged: id = {self.id!r}")
        self.arithmetic: int = self.info.get("arithmetic", 1)
        if type(self.arithmetic) is not int or self.arithmetic < 1:
            raise RunDirectoryError(f"{self.path}/run.json is damaged: arithmetic = {self.arithmetic!r}")
        self._read_environments()
        self.recipe = self._read_recipe()

    def _read_environments(self) -> None:
        first = {"round": 1, "versions": self.info.get("versions", {})}
        later = self.info.get("later", [])
        for entry in [first, *(later if isinstance(later, list) else [later])]:
            if not _is_environment(entry):
                raise RunDirectoryError(f"{self.path}/run.json is damaged: {entry!r} is no round and its versions")
        self.environments: list[tuple[int, Versions]] = [(one["round"], one["versions"]) for one in [first, *later]]
        """The versions it was computed with, each with the first round that was."""

    @classmethod
    def create(cls, path: Path, recipe: Recipe, info: Mapping[str, Any], state: ServerState) -> RunDirectory:
        """Make a new run directory; it appears complete or not at all."""
        if path.resolve() == Path.cwd():  # it is moved into place whole, which would pull the ground away
            raise RunDirectoryError(f"{path} is the folder you are in; choose another --out")
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent, WHILE_WRITING):  # another process may be about to make one of the same name
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise RunDirectoryError(f"{path} exists and is not empty; use --resume to go on, or another --out")
            fresh = path.with_name(f".{path.name}{TEMPORARY}")
            shutil.rmtree(fresh, ignore_errors=True)
            for folder in (fresh, fresh / "layers", fresh / "checkpoints"):
                folder.mkdir()
            files, text, run = Folder(fresh), recipe.to_toml().encode(), secrets.token_hex(8)
            about = {"format": FORMAT, "id": run, "recipe_sha256": _sha256(text), "arithmetic": ARITHMETIC}
            files.write("run.json", _json(about | {"versions": versions(), **info}))
            files.write("recipe.toml", text)
            files.write("history.jsonl", b"")
            _write_checkpoint(files, state, run)
            os.rename(fresh, path)
            sync_folder(path.parent)
        return cls(path)

    def _read_recipe(self) -> Recipe:
        path = self.path / "recipe.toml"
        try:
            content = self._files.read("recipe.toml")
            table = tomllib.loads(content.decode())
        except (OSError, ValueError, RecursionError) as error:
            raise RunDirectoryError(f"{path} is damaged: {error}") from None
        known = (self.info.get("recipe_sha256"), self.info.get("recipe_sha256_before"))
        if self.id is not None and _sha256(content) not in known:
            raise RunDirectoryError(f"{path} was edited after the run began; put it back, or begin a new run with it")
        return Recipe.read(table)  # someone else may have written it

    def require_resumable(self, strict: bool = False) -> None:
        """Refuse to go on where files do not say that they belong together, or where bits would not.

        Another torch, NumPy or CPU is refused only if that is asked for.
        """
        problem = ""
        if self.id is None:
            problem = f"has format {_NAMELESS}, of which no file says what run it is of"
        elif self.arithmetic != ARITHMETIC:
            theirs = f"{self.arithmetic} (fedstrata {self.environments[0][1].get('fedstrata', '0.1')})"
            problem = f"was computed with arithmetic {theirs} and this version has {ARITHMETIC}, with other bits"
        if problem:
            raise RunDirectoryError(f"{self.path} {problem}: it can be shown and not resumed; begin a new run")
        changes = _differences(self._environments_until(self._done())[-1][1], versions()) if strict else []
        if changes:
            what = ", ".join(changes)
            raise RunDirectoryError(f"{self.path} would go on with {what}: bits may differ; not resumed (strict)")

    def note_environment(self) -> list[str]:
        """Write down with what the next rounds are computed; returns what of it is not as it was in the last one."""
        self.info = self._files.read_versioned("run.json", (FORMAT,))  # another process may have gone on meanwhile
        self._read_environments()
        now, done = versions(), self._done()
        environments = self._environments_until(done)
        changes = _differences(environments[-1][1], now)
        if changes:
            environments.append((done + 1, now))
        if environments != self.environments:
            self.environments = environments
            self.info["later"] = [{"round": first, "versions": found} for first, found in environments[1:]]
            self._files.write("run.json", _json(self.info))
        return changes

    def changes(self, done: int) -> list[tuple[int, list[str]]]:
        """From which of the rounds that are done there was another torch, NumPy or CPU, and what was another."""
        known = pairwise(self._environments_until(done))
        return [(later[0], _differences(before[1], later[1])) for before, later in known]

    def _environments_until(self, done: int) -> list[tuple[int, Versions]]:
        """Those that computed something that is kept; the first one computed the initial weights at least."""
        return [self.environments[0], *(later for later in self.environments[1:] if later[0] <= done)]

    def _done(self) -> int:
        return max(self._rounds("checkpoints"), default=0)

    def rewrite_recipe(self, recipe: Recipe) -> None:
        """Store a changed recipe (a run that is extended). Killed in between, it is the one before."""
        text = recipe.to_toml().encode()
        info = {**self.info, "recipe_sha256": _sha256(text)}
        info["recipe_sha256_before"] = _sha256(self._files.read("recipe.toml"))
        self._files.write("run.json", _json(info))
        self._files.write("recipe.toml", text)
        self.info, self.recipe = info, recipe
        self._settle_recipe()

    def _settle_recipe(self) -> None:
        """Of two recipes that may be there while one replaces the other, keep the one that is."""
        if self.info.pop("recipe_sha256_before", None) is not None:
            self.info["recipe_sha256"] = _sha256(self._files.read("recipe.toml"))
            self._files.write("run.json", _json(self.info))

    # --- while it runs ------------------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory for this process alone, and work in this very one, should another take its place."""
        with locked(self.path) as handle:
            before, self._files = self._files, Folder(self.path, handle)
            try:
                yield
            finally:
                self._files = before

    def store_figures(self, record: RoundRecord) -> None:
        """Write the round's per-layer figures."""
        arrays = {name: values.astype(np.float64) for name, values in record.layers.items()}
        arrays |= {"clients": record.clients, "sizes": record.sizes, "work": record.work, "loss": record.losses}
        arrays = {name: np.ascontiguousarray(values) for name, values in sorted(arrays.items())}
        metadata = {"run": str(self.id), "round": str(record.round)}
        self._files.write(_file("layers", record.round), save(arrays, metadata))

    def append_history(self, line: dict[str, Any]) -> None:
        """Add the round's line."""
        self._files.append_line("history.jsonl", {"run": self.id, **line})

    def store_checkpoint(self, state: ServerState) -> None:
        """Write the server's state, and forget all but the last ones."""
        _write_checkpoint(self._files, state, str(self.id))
        self._forget_old_checkpoints()

    def _forget_old_checkpoints(self) -> None:
        for round in self._rounds("checkpoints")[:-_KEPT_CHECKPOINTS]:
            self._files.remove(_file("checkpoints", round))

    def _rounds(self, folder: str) -> list[int]:
        """The rounds of which a folder has a file. One with a name of another kind is somebody's copy, and not ours."""
        return sorted(int(found[1]) for name in self._files.names(folder) if (found := _ROUND.fullmatch(name)))

    def rewind(self, round: int) -> None:
        """Drop everything younger than a round: what an interrupted process left of the next one.

        A round that was evaluated only for being the last one loses its figures when the run is extended, so that the
        history is that of a run that was never shorter.
        """
        self._settle_recipe()
        kept = self.history()[:round]
        rounds, every = self.recipe.training.rounds, self.recipe.evaluation.every
        if kept and round < rounds and round % every:
            kept[-1]["metrics"], kept[-1]["unmeasured"] = {}, []
            kept[-1]["bytes"]["evaluation"] = 0
        if len(kept) < round:
            path = self.path / "history.jsonl"
            raise RunDirectoryError(f"{path} is damaged: it ends before round {round}, which has a checkpoint")
        lines = [json.dumps({"run": self.id, **line}, separators=(",", ":"), allow_nan=False) + "\n" for line in kept]
        content = "".join(lines).encode()
        if not self._files.has("history.jsonl") or self._files.read("history.jsonl") != content:
            self._files.write("history.jsonl", content)
        for folder in ("", "layers", "checkpoints"):
            for name in self._files.names(folder):
                if name.endswith(TEMPORARY):
                    self._files.remove(f"{folder}/{name}" if folder else name)
        for known in self._rounds("layers"):
            if known > round:
                self._files.remove(_file("layers", known))
            else:
                self._files.has(_file("layers", known))  # a link is refused now, and not when it is first read
        self._forget_old_checkpoints()

    # --- afterwards ---------------------------------------------------------------------------------------------

    def history(self) -> list[dict[str, Any]]:
        """One record per whole round."""
        path = self.path / "history.jsonl"
        lines = self._files.read_lines("history.jsonl") if self._files.has("history.jsonl") else []
        for number, line in enumerate(lines, start=1):
            if not isinstance(line, dict) or line.get("round") != number:
                raise RunDirectoryError(f"{path} is damaged: line {number} is not that of round {number}")
            if line.pop("run", None) != self.id:
                raise RunDirectoryError(f"{path}: line {number} is of another run")
        return lines

    def figures(self, round: int) -> dict[str, np.ndarray]:
        """The per-layer figures of a round."""
        name = _file("layers", round)
        try:
            arrays, metadata = self._files.read_arrays(name)
        except FileNotFoundError:
            raise RunDirectoryError(f"{self.path} has no per-layer figures of round {round}") from None
        except OSError as error:
            raise RunDirectoryError(f"{self.path / name} is damaged: {error}") from None
        if self.id is not None:
            self._require_ours(name, metadata, round)
        return arrays

    def latest(self, layers: Layers | None = None) -> ServerState:
        """The state after the last checkpoint, checked, if they are given, against the model's layers."""
        from fedstrata.core.rounds import ServerState

        last = self.last_checkpoint()
        parts: dict[str, dict[str, torch.Tensor]] = {"objective": {}, "weighting": {}, "server": {}}
        for key, array in last.arrays.items():
            part, _, rest = key.partition("/")
            if part in parts:
                parts[part][rest] = torch.from_numpy(array)
        state = ServerState(last.round, torch.from_numpy(last.arrays["model"]), **parts)
        if layers is not None and (len(state.model) != layers.numel or state.model.dtype != layers.dtype):
            raise RunDirectoryError(
                f"{self.path / _file('checkpoints', state.round)} has {len(state.model)} numbers of "
                f"{state.model.dtype}, the recipe's model {layers.numel} of {layers.dtype}"
            )
        if layers is not None:
            self._require_tensors(list(layers.entries))
        return state

    def _require_tensors(self, found: list[str]) -> None:
        """Refuse a model with other tensors, or in another order: equal numbers would go to the wrong ones."""
        try:
            stored = [str(name) for layer in self.info["layers"] for name in layer["tensors"]]
        except (KeyError, TypeError):
            raise RunDirectoryError(f"{self.path}/run.json is damaged: layers do not say their tensors") from None
        if stored != found:
            pairs = zip_longest(stored, found, fillvalue="nothing")
            old, new = next(pair for pair in pairs if pair[0] != pair[1])
            raise RunDirectoryError(f"{self.path}: the recipe's model has {new} where the run had {old}")

    def last_checkpoint(self) -> Checkpoint:
        """The last checkpoint, checked against its digest."""
        rounds = self._rounds("checkpoints")
        if not rounds:
            raise RunDirectoryError(f"{self.path}/checkpoints is empty")
        round = rounds[-1]
        name = _file("checkpoints", round)
        remedy = "delete it to go on from the checkpoint before it"
        try:
            arrays, metadata = self._files.read_arrays(name)
        except (OSError, RunDirectoryError) as error:
            raise RunDirectoryError(f"checkpoint {error}; {remedy}") from None
        path = self.path / name
        if metadata.get("format") != str(self.info["format"]):
            problem = f"format = {metadata.get('format')!r}, expected {str(self.info['format'])!r}"
            raise RunDirectoryError(f"checkpoint {path}: {problem}")
        if "model" not in arrays or metadata.get("sha256") != _digest(arrays, metadata):
            raise RunDirectoryError(f"checkpoint {path} is damaged: its digest does not match; {remedy}")
        self._require_ours(name, metadata, round)
        return Checkpoint(round, arrays)

    def _require_ours(self, name: str, metadata: Mapping[str, str], round: int) -> None:
        """Refuse a file of another run, or one that was renamed."""
        if metadata.get("run") != self.id:
            raise RunDirectoryError(f"{self.path / name} is of another run; delete it")
        if metadata.get("round") != str(round):
            raise RunDirectoryError(f"{self.path / name} is of round {metadata.get('round')}; delete it")


_ROUND = re.compile(r"([0-9]{6}|[1-9][0-9]{6,14})\.safetensors")
"""What `_file` calls the file of a round."""


def _file(folder: str, round: int) -> str:
    return f"{folder}/{round:06d}.safetensors"


def _write_checkpoint(files: Folder, state: ServerState, run: str) -> None:
    tensors = {"model": state.model}
    for part in ("objective", "weighting", "server"):
        tensors |= {f"{part}/{name}": tensor for name, tensor in getattr(state, part).items()}
    arrays = {name: tensors[name].detach().cpu().contiguous().numpy() for name in sorted(tensors)}
    metadata = {"format": str(FORMAT), "run": run, "round": str(state.round)}
    metadata["sha256"] = _digest(arrays, metadata)
    files.write(_file("checkpoints", state.round), save(arrays, metadata))


def _digest(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    """Of all that a checkpoint says, the run and the round included; types go by the names that torch has for them."""
    whose = f"run {metadata['run']};" if "run" in metadata else ""
    digest = hashlib.sha256(f"{whose}round {metadata.get('round')};".encode())
    for name in sorted(arrays):
        digest.update(f"{name}:{arrays[name].shape}:torch.{arrays[name].dtype};".encode())
        digest.update(arrays[name].data)
    return digest.hexdigest()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()
