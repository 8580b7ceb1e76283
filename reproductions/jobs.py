"""Runs side by side: each in a process of its own with one core, which loses nothing to waiting for the slowest client.

The number of workers changes no result, so how runs are put on cores is free to choose. Every run keeps its own run
directory; a job that was killed goes on with what is left.
"""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch

from fedstrata.core.errors import FedstrataError, UserError
from fedstrata.core.record import RoundFailed
from fedstrata.engines.local import available_workers
from fedstrata.processes import held_back, leave_to_parent
from fedstrata.runs.compare import run_job
from fedstrata.runs.reader import Run
from reproductions.outdated import is_outdated
from reproductions.study import StudyRun, recipe_hash


@dataclass(frozen=True)
class Event:
    """What happened to a run: a round is stored, or it is over, or it failed for good."""

    run: StudyRun
    kind: Literal["round", "finished", "failed"]
    round: int = 0
    line: dict[str, Any] | None = None
    problem: str = ""


def rounds_done(run: StudyRun) -> int:
    """How far a run has got."""
    path = run.job.path
    return len(Run(path).history()) if (path / "run.json").exists() else 0


def is_finished(run: StudyRun) -> bool:
    """Whether nothing is left of it. A run of another recipe in its place is a mistake."""
    path = run.job.path
    if not (path / "run.json").exists():
        return False
    found = Run(path)
    if recipe_hash(found.recipe) != recipe_hash(run.job.recipe):
        raise UserError(f"{path} was run with another recipe; choose other --runs, or remove it")
    if is_outdated(found.recipe, found.about.arithmetic):
        raise UserError(f"{path} was run with an older arithmetic; choose other --runs, or remove it")
    return found.finished()


def run_all(runs: Sequence[StudyRun], data: Path | None = None, cores: int | None = None) -> Iterator[Event]:
    """Run what is left, as many side by side as there are cores. Leaving the generator stops them, and stores."""
    waiting = list(runs)
    cores = cores or available_workers()
    active: dict[Any, tuple[StudyRun, Any]] = {}
    try:
        while waiting or active:
            while waiting and len(active) < cores:
                # The last runs, if they are fewer than the cores, share them.
                workers = max(1, cores // (len(waiting) + len(active)))
                pipe, process, run = _start(waiting.pop(0), data, workers)
                active[pipe] = (run, process)
            for ready in wait(list(active)):
                run, process = active[ready]
                event = _receive(ready, run, process)
                if event.kind != "round":
                    process.join()
                    del active[ready]
                yield event
    finally:
        for _, process in active.values():
            process.terminate()
        for _, process in active.values():
            process.join(_PATIENCE)
            process.kill()  # one that is stopped does not hear; what it has stored is whole
            process.join()


def _start(run: StudyRun, data: Path | None, workers: int) -> tuple[Connection, Any, StudyRun]:
    ours, theirs = mp.Pipe(duplex=False)
    process = mp.get_context("fork").Process(target=_work, args=(run, data, workers, theirs))
    with held_back():  # until the child can answer in its own way
        process.start()
    theirs.close()
    return ours, process, run


def _receive(pipe: Any, run: StudyRun, process: Any) -> Event:
    try:
        kind, content = pipe.recv()
    except EOFError:
        process.join()
        raise FedstrataError(f"{run.job.path}: its process ended with exit code {process.exitcode}") from None
    if kind == "error":
        raise UserError(content)
    if kind == "round":
        return Event(run, "round", content["round"], content)
    return Event(run, kind, problem=content)


def _work(run: StudyRun, data: Path | None, workers: int, pipe: Connection) -> None:
    """A child's life: one run. Being asked to stop is like Ctrl-C: whole rounds are stored first."""
    try:
        signal.signal(signal.SIGTERM, _stop_once)
        leave_to_parent(signal.SIGINT, signal.SIGHUP)
        _end_with_parent()
        torch.set_num_threads(1)
        _tell(run, data, workers, pipe)
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(130)
    os._exit(0)  # what the parent had not yet printed is not ours to print


def _tell(run: StudyRun, data: Path | None, workers: int, pipe: Connection) -> None:
    """Run it, and say how it goes."""
    engine = run.job.recipe.engine.model_copy(update={"workers": workers})
    job = replace(run.job, recipe=run.job.recipe.model_copy(update={"engine": engine}))
    try:
        for line in run_job(job, data):
            pipe.send(("round", {key: line[key] for key in ("round", "metrics", "seconds", "upload_total")}))
        pipe.send(("finished", ""))
    except RoundFailed as error:  # weights that are no numbers any more are a result; anything else is a mishap
        pipe.send(("failed" if error.diverged else "error", str(error)))
    except FedstrataError as error:
        pipe.send(("error", str(error)))


def _stop_once(*_: object) -> None:
    """Whoever asks twice must not interrupt the storing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end_with_parent() -> None:
    """Linux tells us when the parent is gone, however it went."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


_PR_SET_PDEATHSIG = 1

_PATIENCE = 30.0
"""Seconds in which a run must have stored its last whole round."""
