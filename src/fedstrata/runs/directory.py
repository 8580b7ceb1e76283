"""A run directory, read: everything about a run, for live tables, reports and resume (docs/run-directory.md).

    run.json                 format, the run's id, the recipe's digest, arithmetic, versions, layers, the data, …
    recipe.toml              the exact recipe
    history.jsonl            one line per round, written when the round is whole
    layers/000001.safetensors    what the round was for each client and layer
    clients/000001.safetensors   what every client was measured to, where models are evaluated on clients
    memory/000001.safetensors    what clients remember, as far as it was new at the checkpoint of this round
    checkpoints/000001.safetensors  the server's state after the round; the last two are kept

Every file says which run and which round it belongs to, and is refused anywhere else. `formats` has what the files say,
`writer` writes them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from fedstrata.core import determinism
from fedstrata.core.errors import RecipeError, RunDirectoryError
from fedstrata.recipes.schema import Recipe
from fedstrata.recipes.tables import parse_toml
from fedstrata.runs import environment, formats
from fedstrata.runs.environment import Versions, differences
from fedstrata.runs.files import Folder
from fedstrata.runs.formats import NAMELESS, RUN_FORMAT, About, LayerRecord, Line, damaged


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

    def __init__(self, path: Path, handle: int | None = None) -> None:
        """Open an existing run directory; `handle` is that of this very one, should another take its place."""
        self.path, self.files = path, Folder(path, handle)
        if not path.is_dir() and handle is None:
            raise RunDirectoryError(f"{path} does not exist or is no directory")
        if not self.files.has("run.json"):
            what = (
                "it is a comparison, which has its runs below it"
                if self.files.has("compare.json")
                else "it has no run.json"
            )
            raise RunDirectoryError(f"{path} is no run directory: {what}")
        self.reread()

    def reread(self) -> None:
        """Read what the run is: its run.json and its recipe."""
        found = self.files.read_versioned("run.json", (NAMELESS, RUN_FORMAT))
        self.about: About = formats.read_about(found, self.path / "run.json")
        self.recipe: Recipe = self._read_recipe()

    def _read_recipe(self) -> Recipe:
        path = self.path / "recipe.toml"
        try:
            content = self.files.read("recipe.toml")
            table = parse_toml(content.decode())
        except (OSError, ValueError) as error:
            raise damaged(path, str(error)) from None
        known = (self.about.recipe_sha256, self.about.recipe_sha256_before)
        if self.id is not None and sha256(content) not in known:
            raise RunDirectoryError(f"{path} was edited after the run began; put it back, or begin a new run with it")
        try:
            return Recipe.read(table)  # someone else may have written it
        except RecipeError as error:
            raise damaged(path, str(error)) from None

    @property
    def id(self) -> str | None:
        """What tells it from every other run; a run of format 1 has none."""
        return self.about.id

    @property
    def environments(self) -> list[tuple[int, Versions]]:
        """The versions it was computed with, each with the first round that was."""
        return [(1, self.about.versions), *((later.round, later.versions) for later in self.about.later)]

    def environments_until(self, done: int) -> list[tuple[int, Versions]]:
        """Those that computed something that is kept; the first one computed the initial weights at least."""
        first, *later = self.environments
        return [first, *(one for one in later if one[0] <= done)]

    def changes(self, done: int) -> list[tuple[int, list[str]]]:
        """From which of the rounds that are done there was another torch, NumPy or CPU, and what was another."""
        known = pairwise(self.environments_until(done))
        return [(later[0], differences(before[1], later[1])) for before, later in known]

    def require_resumable(self, strict: bool = False) -> None:
        """Refuse to go on where files do not say that they belong together, or where bits would not.

        Another torch, NumPy or CPU is refused only if that is asked for.
        """
        problem = ""
        if self.id is None:
            problem = f"has format {NAMELESS}, of which no file says what run it is of"
        elif self.about.arithmetic != determinism.ARITHMETIC:
            theirs = f"{self.about.arithmetic} (fedstrata {self.about.versions.get('fedstrata', '0.1')})"
            problem = (
                f"was computed with arithmetic {theirs} and this version has {determinism.ARITHMETIC}, with other bits"
            )
        if problem:
            raise RunDirectoryError(f"{self.path} {problem}: it can be shown and not resumed; begin a new run")
        changes = differences(self.environments_until(self.done())[-1][1], environment.versions()) if strict else []
        if changes:
            what = ", ".join(changes)
            raise RunDirectoryError(f"{self.path} would go on with {what}: bits may differ; not resumed (strict)")

    # --- rounds -------------------------------------------------------------------------------------------------

    def history(self) -> list[Line]:
        """A line for every whole round."""
        return formats.read_history(self.history_content(), self.about, self.path / "history.jsonl")

    def history_content(self) -> bytes:
        """The history as it lies in the file."""
        return self.files.read("history.jsonl", _LONGEST_HISTORY) if self.files.has("history.jsonl") else b""

    def failures(self) -> list[Line]:
        """A line for every round that ended the run, or this part of it, as too few replies could be used."""
        content = self.files.read("failed.jsonl", _LONGEST_HISTORY) if self.files.has("failed.jsonl") else b""
        return formats.read_failures(content, self.about, self.path / "failed.jsonl")

    def layers(self, round: int) -> LayerRecord:
        """What a round was for each client and layer, by name."""
        name = round_file("layers", round)
        try:
            arrays, metadata = self.files.read_arrays(name)
        except FileNotFoundError:
            raise RunDirectoryError(f"{self.path} has no record of the layers in round {round}") from None
        except OSError as error:
            raise damaged(self.path / name, str(error)) from None
        if self.id is not None:
            self.require_ours(name, metadata, round)
        return formats.read_layers(arrays, self.about, self.path / name)

    def clients(self, round: int) -> dict[str, np.ndarray]:
        """What every client was measured to after a round; `RunDirectoryError`, if none was."""
        name = round_file("clients", round)
        if not self.measured_clients(round):
            raise RunDirectoryError(f"{self.path / name}: no client was measured in round {round}")
        arrays, metadata = self.files.read_arrays(name)
        self.require_ours(name, metadata, round)
        return formats.read_clients(arrays, self.path / name)

    def measured_clients(self, round: int) -> bool:
        """Whether it is known what each client was measured to."""
        return self.files.has("clients") and self.files.has(round_file("clients", round))

    def rounds(self, folder: str) -> list[int]:
        """The rounds of which a folder has a file. One with a name of another kind is somebody's copy, and not ours."""
        return rounds_in(self.files, folder)

    def done(self) -> int:
        """The round of the last checkpoint."""
        return max(self.rounds("checkpoints"), default=0)

    def last_checkpoint(self) -> Checkpoint:
        """The last checkpoint, checked against its digest."""
        rounds = self.rounds("checkpoints")
        if not rounds:
            raise RunDirectoryError(f"{self.path}/checkpoints is empty")
        return self.checkpoint(rounds[-1])

    def checkpoint(self, round: int) -> Checkpoint:
        """The checkpoint of a round, checked against its digest."""
        name = round_file("checkpoints", round)
        remedy = "delete it to go on from the checkpoint before it"
        try:
            arrays, metadata = self.files.read_arrays(name)
        except (OSError, RunDirectoryError) as error:
            raise RunDirectoryError(f"checkpoint {error}; {remedy}") from None
        path = self.path / name
        if metadata.get("format") != str(self.about.format):
            problem = f"format = {metadata.get('format')!r}, expected {str(self.about.format)!r}"
            raise RunDirectoryError(f"checkpoint {path}: {problem}")
        if "model" not in arrays or metadata.get("sha256") != digest(arrays, metadata):
            raise RunDirectoryError(f"checkpoint {path} is damaged: its digest does not match; {remedy}")
        self.require_ours(name, metadata, round)
        return Checkpoint(round, arrays)

    def require_ours(self, name: str, metadata: Mapping[str, str], round: int) -> None:
        """Refuse a file of another run, or one that was renamed."""
        if metadata.get("run") != self.id:
            raise RunDirectoryError(f"{self.path / name} is of another run; delete it")
        if metadata.get("round") != str(round):
            raise RunDirectoryError(f"{self.path / name} is of round {metadata.get('round')}; delete it")


_LONGEST_HISTORY = 1 << 29
"""Bytes: some hundred thousand rounds."""

_ROUND = re.compile(r"([0-9]{6}|[1-9][0-9]{6,14})\.safetensors")
"""What `round_file` calls the file of a round."""


def rounds_in(files: Folder, folder: str) -> list[int]:
    """The rounds of which a folder has a file."""
    try:
        names = files.names(folder)
    except OSError as error:
        raise RunDirectoryError(f"{files.path / folder} cannot be read: {error.strerror}") from None
    return sorted(int(found[1]) for name in names if (found := _ROUND.fullmatch(name)))


def round_file(folder: str, round: int) -> str:
    """The name of a round's file."""
    return f"{folder}/{round:06d}.safetensors"


def digest(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    """Of all that a checkpoint says, the run and the round included; types go by the names that torch has for them."""
    whose = f"run {metadata['run']};" if "run" in metadata else ""
    digest = hashlib.sha256(f"{whose}round {metadata.get('round')};".encode())
    for name in sorted(arrays):
        digest.update(f"{name}:{arrays[name].shape}:torch.{arrays[name].dtype};".encode())
        digest.update(arrays[name].data)
    return digest.hexdigest()


def sha256(content: bytes) -> str:
    """The digest that run.json keeps of the recipe."""
    return hashlib.sha256(content).hexdigest()
