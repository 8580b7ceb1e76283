"""A run directory: everything about a run, for live tables, reports and resume (docs/run-directory.md).

    run.json                 format, versions, what was resolved, the layers, the data
    recipe.toml              the exact recipe
    history.jsonl            one line per round, written when the round is whole
    layers/000001.safetensors    the round's figures per client and layer
    checkpoints/000001.safetensors  the server's state after the round; the last two are kept
    lock                     held while a process works here

A round is stored in this order: figures, history line, checkpoint. So a checkpoint has all of its past beside it, and
resuming drops what is younger than it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file
from safetensors.numpy import save as save_arrays
from safetensors.torch import save as save_tensors

from fedstrata.errors import RunDirectoryError
from fedstrata.experiment import Experiment
from fedstrata.layers import Layers
from fedstrata.rounds import RoundRecord, ServerState
from fedstrata.storage import TEMPORARY, alone, append_line, read_lines, read_versioned, write_whole

FORMAT = 1
"""Version of the run directory's format."""

_KEPT_CHECKPOINTS = 2


def versions() -> dict[str, str]:
    """What the run's figures may depend on."""
    from fedstrata import __version__

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


def weights_digest(model: torch.Tensor) -> str:
    """SHA-256 of the flat model."""
    return hashlib.sha256(model.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        """Open an existing run directory."""
        self.path = path
        if not path.is_dir():
            raise RunDirectoryError(f"{path} does not exist or is no directory")
        if not (path / "run.json").exists():
            raise RunDirectoryError(f"{path} is no run directory: it has no run.json")
        self.info = read_versioned(path / "run.json", FORMAT)
        self.experiment = self._read_recipe()

    @classmethod
    def create(cls, path: Path, experiment: Experiment, info: Mapping[str, Any], state: ServerState) -> RunDirectory:
        """Make a new run directory; it appears complete or not at all."""
        if path.resolve() == Path.cwd():  # it is moved into place whole, which would pull the ground away
            raise RunDirectoryError(f"{path} is the folder you are in; choose another --out")
        path.parent.mkdir(parents=True, exist_ok=True)
        with alone(path.parent):  # another process may be about to make one of the same name
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise RunDirectoryError(f"{path} exists and is not empty; use --resume to go on, or another --out")
            fresh = path.with_name(f".{path.name}{TEMPORARY}")
            shutil.rmtree(fresh, ignore_errors=True)
            for folder in (fresh, fresh / "layers", fresh / "checkpoints"):
                folder.mkdir()
            content = {"format": FORMAT, "versions": versions(), **info}
            write_whole(fresh / "run.json", (json.dumps(content, indent=1) + "\n").encode())
            write_whole(fresh / "recipe.toml", experiment.to_toml().encode())
            _write_checkpoint(fresh / "checkpoints", state)
            os.rename(fresh, path)
        return cls(path)

    def _read_recipe(self) -> Experiment:
        path = self.path / "recipe.toml"
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunDirectoryError(f"{path} is damaged: {error}") from None
        return Experiment.read(table)  # someone else may have written it

    def rewrite_recipe(self, experiment: Experiment) -> None:
        """Store a changed recipe (a run that is extended)."""
        write_whole(self.path / "recipe.toml", experiment.to_toml().encode())
        self.experiment = experiment

    # --- while it runs ------------------------------------------------------------------------------------------

    def store_figures(self, record: RoundRecord) -> None:
        """Write the round's per-layer figures."""
        arrays = {name: values.astype(np.float64) for name, values in record.layers.items()}
        arrays |= {"clients": record.clients, "sizes": record.sizes, "work": record.work, "loss": record.losses}
        arrays = {name: np.ascontiguousarray(values) for name, values in sorted(arrays.items())}
        write_whole(self._figures_path(record.round), save_arrays(arrays))

    def append_history(self, line: dict[str, Any]) -> None:
        """Add the round's line."""
        append_line(self.path / "history.jsonl", line)

    def store_checkpoint(self, state: ServerState) -> None:
        """Write the server's state, and forget all but the last ones."""
        _write_checkpoint(self.path / "checkpoints", state)
        self._forget_old_checkpoints()

    def _forget_old_checkpoints(self) -> None:
        for old in self._checkpoints()[:-_KEPT_CHECKPOINTS]:
            old.unlink()

    def _checkpoints(self) -> list[Path]:
        return sorted((self.path / "checkpoints").glob("*.safetensors"))

    def rewind(self, round: int) -> None:
        """Drop everything younger than a round: what an interrupted process left of the next one.

        A round that was evaluated only for being the last one loses its figures when the run is extended, so that the
        history is that of a run that was never shorter.
        """
        path = self.path / "history.jsonl"
        kept = self.history()[:round]
        rounds, every = self.experiment.training.rounds, self.experiment.evaluation.every
        if kept and round < rounds and round % every:
            kept[-1]["metrics"], kept[-1]["unmeasured"] = {}, []
            kept[-1]["bytes"]["evaluation"] = 0
        if len(kept) < round:
            raise RunDirectoryError(f"{path} is damaged: it ends before round {round}, which has a checkpoint")
        content = "".join(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n" for line in kept).encode()
        if path.exists() and path.read_bytes() != content:
            write_whole(path, content)
        for file in (*self.path.glob(f"*/*{TEMPORARY}"), *self.path.glob(f"*{TEMPORARY}")):
            file.unlink()
        for file in (self.path / "layers").glob("*.safetensors"):
            if _number(file) > round:
                file.unlink()
        self._forget_old_checkpoints()

    # --- afterwards ---------------------------------------------------------------------------------------------

    def history(self) -> list[dict[str, Any]]:
        """One record per whole round."""
        path = self.path / "history.jsonl"
        lines = read_lines(path)
        for number, line in enumerate(lines, start=1):
            if not isinstance(line, dict) or line.get("round") != number:
                raise RunDirectoryError(f"{path} is damaged: line {number} is not that of round {number}")
        return lines

    def figures(self, round: int) -> dict[str, np.ndarray]:
        """The per-layer figures of a round."""
        path = self._figures_path(round)
        try:
            return dict(load_file(path))
        except FileNotFoundError:
            raise RunDirectoryError(f"{self.path} has no per-layer figures of round {round}") from None
        except (OSError, SafetensorError) as error:
            raise RunDirectoryError(f"{path} is damaged: {error}") from None

    def latest(self, layers: Layers | None = None) -> ServerState:
        """The state after the last checkpoint, checked against its digest and, if given, the model's layout."""
        checkpoints = self._checkpoints()
        if not checkpoints:
            raise RunDirectoryError(f"{self.path}/checkpoints is empty")
        state = _read_checkpoint(checkpoints[-1])
        if layers is not None and (len(state.model) != layers.numel or state.model.dtype != layers.dtype):
            raise RunDirectoryError(
                f"{checkpoints[-1]} has {len(state.model)} numbers of {state.model.dtype}, "
                f"the recipe's model {layers.numel} of {layers.dtype}"
            )
        return state

    def _figures_path(self, round: int) -> Path:
        return self.path / "layers" / f"{round:06d}.safetensors"


def _number(path: Path) -> int:
    return int(path.name.split(".")[0])


def _write_checkpoint(folder: Path, state: ServerState) -> None:
    tensors = {"model": state.model}
    for part in ("objective", "weighting", "server"):
        tensors |= {f"{part}/{name}": tensor for name, tensor in getattr(state, part).items()}
    tensors = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    metadata = {"format": str(FORMAT), "round": str(state.round), "sha256": _digest(tensors, str(state.round))}
    write_whole(folder / f"{state.round:06d}.safetensors", save_tensors(tensors, metadata))


def _read_checkpoint(path: Path) -> ServerState:
    remedy = "delete it to go on from the checkpoint before it"
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise RunDirectoryError(f"checkpoint {path} is damaged: {error}; {remedy}") from None
    if metadata.get("format") != str(FORMAT):
        raise RunDirectoryError(f"checkpoint {path}: format = {metadata.get('format')!r}, expected {str(FORMAT)!r}")
    if "model" not in tensors or metadata.get("sha256") != _digest(tensors, metadata.get("round")):
        raise RunDirectoryError(f"checkpoint {path} is damaged: its digest does not match; {remedy}")
    parts: dict[str, dict[str, torch.Tensor]] = {"objective": {}, "weighting": {}, "server": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition("/")
        if part in parts:
            parts[part][rest] = tensor
    return ServerState(int(metadata["round"]), tensors["model"], **parts)


def _digest(tensors: Mapping[str, torch.Tensor], round: str | None) -> str:
    digest = hashlib.sha256(f"round {round};".encode())
    for name in sorted(tensors):
        digest.update(f"{name}:{tuple(tensors[name].shape)}:{tensors[name].dtype};".encode())
        digest.update(tensors[name].contiguous().numpy().data)
    return digest.hexdigest()
