"""Runs below some folders, looked at again and again: which there are, how far they are, and which have changed.

Only directories are read. Whether a run is running is told by the lock of its directory, at a glance.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedstrata.core.errors import FedstrataError
from fedstrata.plots.arms import Source
from fedstrata.plots.tables import rounded
from fedstrata.runs.files import TEMPORARY, in_use
from fedstrata.runs.reader import Run

State = Literal["running", "finished", "stopped", "failed", "dead", "damaged"]

EVERY = 0.25
"""Seconds between two looks at the runs that are known."""

SCAN_EVERY = 1.0
"""Seconds between two looks for new ones."""

_RECENT = 20
_WATCHED = ("", "history.jsonl", "failed.jsonl", "recipe.toml", "run.json", "checkpoints", "probe")

Signature = tuple[Any, ...]


@dataclass
class Followed:
    """A run that is followed."""

    path: Path
    signature: Signature = ()
    version: int = 0
    """Raised whenever something in it has changed."""
    about: Mapping[str, Any] | None = None
    """What the list says of it."""


class Following:
    """The runs below some folders, by keys that are no paths: nothing else can be asked for."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [root.resolve() for root in roots]
        self.runs: dict[str, Followed] = {}
        self.groups: dict[str, str] = {}
        """Comparisons, and folders with several runs: what they are called, by key."""
        self.changed = threading.Condition()
        self._scanned = -SCAN_EVERY

    # --- looking ------------------------------------------------------------------------------------------------

    def look(self, everywhere: bool = False) -> bool:
        """Look at all runs, and now and then, or `everywhere`, for new ones; whether anything has changed."""
        found = self._scan(everywhere)
        for one in list(self.runs.values()):
            signature = _signature(one.path, one.about)
            if signature != one.signature:
                one.signature, one.about, found = signature, _about(one.path), True
                one.version += 1
        if found:
            with self.changed:
                self.changed.notify_all()
        return found

    def keep_looking(self, ended: threading.Event) -> None:
        """Until that."""
        while not ended.wait(EVERY):
            self.look()
        with self.changed:
            self.changed.notify_all()

    def _scan(self, now: bool) -> bool:
        if not now and time.monotonic() - self._scanned < SCAN_EVERY:
            return False
        paths: dict[str, Path] = {}
        groups: dict[str, str] = {}
        for number, root in enumerate(self.roots):
            below = dict(_runs_below(root))
            paths |= {f"{number}/{name}": path for name, path in below.items()}
            groups |= {f"{number}/{name}": title for name, title in _groups(root, list(below)).items()}
        gone, new = set(self.runs) - set(paths), set(paths) - set(self.runs)
        self.runs = {key: self.runs.get(key) or Followed(path) for key, path in paths.items()}
        self.groups = groups
        self._scanned = time.monotonic()
        return bool(gone or new)

    # --- what was found -----------------------------------------------------------------------------------------

    def members(self, key: str) -> list[Followed]:
        """The runs of a key: a run's, or a group's; perhaps it has begun just now."""
        if key not in self.runs and key not in self.groups:
            self.look(everywhere=True)
        if key in self.runs:
            return [self.runs[key]]
        if key in self.groups:
            inside = key if key.endswith("/") else f"{key}/"
            return [one for name, one in self.runs.items() if name.startswith(inside)]
        return []

    def version(self, key: str) -> tuple[tuple[str, int], ...]:
        """What changes when a run of this key changes, or there is another one."""
        return tuple((str(one.path), one.version) for one in self.members(key))

    def state(self) -> tuple[Any, ...]:
        """What changes when anything does."""
        return tuple((key, one.version) for key, one in self.runs.items())

    def listed(self) -> dict[str, Any]:
        """The list of runs, those that run and the newest first; and what else can be looked at."""
        rows = [
            {"key": key, "name": key.split("/", 1)[1] or one.path.name, **(one.about or {})}
            for key, one in self.runs.items()
        ]
        rows.sort(key=lambda row: str(row.get("created", "")), reverse=True)
        rows.sort(key=lambda row: row.get("state") != "running")
        groups = [
            {"key": key, "name": title, "runs": len(self.members(key)), "running": self._running(key)}
            for key, title in self.groups.items()
        ]
        return {"runs": rows, "groups": groups, "folders": [str(root) for root in self.roots]}

    def _running(self, key: str) -> int:
        return sum((one.about or {}).get("state") == "running" for one in self.members(key))


def _runs_below(root: Path) -> Iterator[tuple[str, Path]]:
    """Names relative to the root and directories of all runs; what a run holds is not looked through."""
    for place, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if "run.json" in files:
            folders.clear()
            path = Path(place)
            name = path.relative_to(root).as_posix()
            yield ("" if name == "." else name), path


def _groups(root: Path, names: Sequence[str]) -> dict[str, str]:
    """Folders with several runs below them, outermost first, such as comparisons and studies."""
    counts: dict[str, int] = {}
    for name in names:
        parts = name.split("/")
        for depth in range(len(parts)):
            folder = "/".join(parts[:depth])
            counts[folder] = counts.get(folder, 0) + 1
    several = {folder for folder, count in counts.items() if count > 1}
    return {folder: folder or f"all of {root.name}" for folder in sorted(several)}


def _signature(path: Path, about: Mapping[str, Any] | None) -> Signature:
    """What changes when a run does: sizes and times of its files, and whether a process works in it."""
    found: list[Any] = []
    for name in _WATCHED:
        try:
            known = os.stat(path / name, follow_symlinks=False)
        except OSError:
            found.append(None)
        else:
            found.append((known.st_size, known.st_mtime_ns, known.st_ino) if name else known.st_ino)
    finished = about is not None and about.get("state") == "finished"
    return (*found, False if finished else in_use(path))


def _about(path: Path) -> dict[str, Any]:
    """What the list says of a run."""
    try:
        source = Source.of(Run(path))
        history, recipe, summary = source.history, source.run.recipe, source.summary
        state = _state(source)
        seconds = [line["seconds"] for line in history[-_RECENT:]]
        left = recipe.training.rounds - len(history)
        return {
            "what": f"{recipe.name}: {source.name}, seed {source.seed}",
            "state": state,
            "round": len(history),
            "rounds": recipe.training.rounds,
            "metric": source.run.metric.name,
            "best": None if summary["best"] is None else rounded(summary["best"]),
            "upload": summary["upload"],
            "left": rounded(statistics.median(seconds) * left) if seconds and state == "running" else None,
            "lost": sum(len(line["lost"]) for line in history),
            "created": source.run.about.created,
        }
    except (FedstrataError, OSError) as error:
        return {"what": "", "state": "damaged", "why": str(error)}


def _state(source: Source) -> State:
    """Running, at its end, ended by a round that failed, stopped in order, or dead: killed in the middle of one."""
    run, done = source.run, len(source.history)
    if in_use(run.path):
        return "running"
    if source.finished:
        return "finished"
    failures = run.failures()
    if failures and failures[-1]["round"] > done:
        return "failed"
    directory = run.directory
    left = any(
        name.endswith(TEMPORARY) for folder in ("layers", "checkpoints") for name in directory.files.names(folder)
    )
    torn = not directory.history_content().endswith(b"\n") and bool(directory.history_content())
    ahead = max(directory.rounds("layers"), default=0) > done or directory.done() < done
    return "dead" if left or torn or ahead else "stopped"
