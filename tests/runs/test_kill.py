"""Killed at any instant, a run goes on and ends with exactly what an undisturbed one ends with.

The boundaries are found by counting: every call that touches a file or folder is a place to die at. Each death is a
forked child, so that torch is loaded once. `make faults` tries all of them; otherwise it is every fourth one.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata
from fedstrata.recipes.schema import load
from fedstrata.runs.reader import Run
from fedstrata.runs.runner import create_run, run_rounds
from fedstrata.tasks.task import Task
from tests.support.processes import assert_no_orphans, end_of, fork, wait_for_rounds
from tests.support.runs import arrays_of, run_content

TOUCHING = ("open", "write", "pwrite", "fsync", "close", "replace", "rename", "unlink", "mkdir", "rmdir", "ftruncate")


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed process wrote is there for the next one without it; it costs most of the time."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(params=[pytest.param(4, id="some"), pytest.param(1, id="all", marks=pytest.mark.campaign)])
def every(request: pytest.FixtureRequest) -> int:
    """Of how many deaths one is tried."""
    return int(request.param)


# --- children --------------------------------------------------------------------------------------------------------


class Reaper:
    """Counts calls that touch files, and dies at one of them: before it, after it, or with half of it written."""

    def __init__(self, at: int | None = None, when: str = "before") -> None:
        self.at, self.when = at, when
        self.calls: list[str] = []

    def install(self) -> None:
        for name in TOUCHING:
            setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        write, kill, me = os.write, os.kill, os.getpid()

        def call(*args: Any, **options: Any) -> Any:
            number = len(self.calls)
            self.calls.append(name)
            if number != self.at:
                return original(*args, **options)
            if self.when == "after":
                original(*args, **options)
            elif self.when == "torn":
                handle, content = args[:2]
                if name == "pwrite":
                    original(handle, bytes(content)[: len(content) // 2], *args[2:])
                else:
                    write(handle, bytes(content)[: len(content) // 2])
            kill(me, signal.SIGKILL)
            return None

        return call


def calls_of(work: Callable[[], object], folder: Path) -> list[str]:
    """Every call of an undisturbed piece of work, in order."""

    def counted() -> None:
        reaper, write = Reaper(), Path.write_text
        reaper.install()
        work()
        calls = list(reaper.calls)
        write(folder / "calls.json", json.dumps(calls))

    assert end_of(fork(counted, folder / "log")) == 0, (folder / "log").read_text()
    return list(json.loads((folder / "calls.json").read_text()))


def kill_at(work: Callable[[], object], at: int, when: str, log: Path) -> None:
    def doomed() -> None:
        Reaper(at, when).install()
        work()

    assert end_of(fork(doomed, log)) == -signal.SIGKILL, f"call {at} was not reached: {log.read_text()}"


def deaths(calls: list[str]) -> list[tuple[int, str]]:
    """Before every call, torn in the middle of those that write, and after the last one.

    After a call and before the next one the disk is the same: nothing else touches it.
    """
    cases = [(at, "before") for at in range(len(calls))]
    cases += [(at, "torn") for at, name in enumerate(calls) if name in ("write", "pwrite")]
    return [*cases, (len(calls) - 1, "after")]


# --- a run that has everything worth losing --------------------------------------------------------------------------


def points(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, count)
    return torch.from_numpy(generator.normal(size=(count, 2)) + labels[:, None]).float(), torch.from_numpy(labels)


def small_task(samples: int = 6) -> Task:
    return Task(
        model=lambda: nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)),
        clients=[points(samples, k) for k in range(3)],
        held_out=[points(4, 10 + k) for k in range(3)],
        evaluation={"test": points(10, 99)},
    )


TASK = small_task()


ON_THE_SERVER: dict[str, Any] = {
    "objective": {"name": "adaptive_mu", "mu0": 0.1},
    "selection": {"name": "fedldf", "n": 2},
    "weighting": {"name": "fedlayerwise"},
}
ON_CLIENTS: dict[str, Any] = {"name": "scaffold", "private": ["2.bias"], "selection": {"name": "fedldf", "n": 1}}
"""Control variates and a private tensor, which clients remember; of some rounds nobody sends a layer, or only one."""

RETRIED = {"clients_per_round": 2, "dropouts": 0.4, "min_replies": 1.0, "attempts": 30}
"""Of three clients, so that versions of several rounds and attempts are in use."""


def table(algorithm: dict[str, Any] = ON_THE_SERVER, **settings: Any) -> dict[str, Any]:
    on = ["test", "clients"] if algorithm is ON_THE_SERVER else ["clients"]
    return {
        "name": "killed",
        "algorithm": algorithm,
        "training": {"rounds": 3, "batch_size": 4, "lr": 0.2} | settings.get("training", {}),
        "evaluation": {"on": on},
        "engine": {"workers": settings.get("workers", 1)},
        "record": {"checkpoint_every": settings.get("checkpoint_every", 1)},
    }


def whole(path: Path) -> dict[str, Any]:
    """All that must be the same, and the name of every file."""
    files = sorted(str(file.relative_to(path)) for file in path.rglob("*"))
    packs = arrays_of(path / "memory") if (path / "memory").exists() else {}
    beside = sorted(file.name for file in path.parent.glob(".*"))
    return run_content(path) | {"packs": packs, "every file": files, "beside": beside}


def check_same(path: Path, expected: dict[str, Any], case: object) -> None:
    found = whole(path)
    for part in expected:
        assert found[part] == expected[part], (part, case)


def go_on(path: Path, recipe: dict[str, Any]) -> None:
    """What a user does after a kill: resume, or, if the run never came to be, start it with the same --out."""
    if path.exists():
        fedstrata.resume(path, task=TASK)
    else:
        fedstrata.run(recipe, task=TASK, out=path)


@pytest.mark.parametrize("checkpoint_every", [1, 2])
def test_killed_at_every_boundary(tmp_path: Path, checkpoint_every: int, every: int) -> None:
    recipe = table(checkpoint_every=checkpoint_every)
    fedstrata.run(recipe, task=TASK, out=tmp_path / "whole" / "run")
    expected = whole(tmp_path / "whole" / "run")
    (tmp_path / "count").mkdir()
    calls = calls_of(lambda: fedstrata.run(recipe, task=TASK, out=tmp_path / "count" / "run"), tmp_path / "count")
    assert calls.count("replace") == 4 + 2 * 3 + (3 if checkpoint_every == 1 else 2)
    assert calls.count("rename") == 1
    assert calls.count("unlink") == (2 if checkpoint_every == 1 else 1)
    never_born = 0
    for at, when in deaths(calls)[::every]:
        path = tmp_path / f"{at}-{when}" / "run"
        path.parent.mkdir()
        kill_at(partial(fedstrata.run, recipe, task=TASK, out=path), at, when, path.parent / "log")
        never_born += not path.exists()
        go_on(path, recipe)
        check_same(path, expected, (at, when, calls[at]))
        shutil.rmtree(path.parent)
    assert 0 < never_born < len(calls) // 2


@pytest.mark.parametrize("checkpoint_every", [1, 3])
def test_killed_where_clients_remember(tmp_path: Path, checkpoint_every: int, every: int) -> None:
    """What is lost and made again is the same, although the first time has left versions of the same names behind."""
    rounds = 4 if every > 1 else 7
    recipe = table(ON_CLIENTS, checkpoint_every=checkpoint_every, training={"rounds": rounds} | RETRIED)
    fedstrata.run(recipe, task=TASK, out=tmp_path / "whole" / "run")
    expected = whole(tmp_path / "whole" / "run")
    assert any(line["attempt"] > 0 for line in Run(tmp_path / "whole" / "run").history())
    assert expected["packs"]
    (tmp_path / "count").mkdir()
    calls = calls_of(lambda: fedstrata.run(recipe, task=TASK, out=tmp_path / "count" / "run"), tmp_path / "count")
    for at, when in deaths(calls)[:: 2 * every if every > 1 else 1]:
        path = tmp_path / f"{at}-{when}" / "run"
        path.parent.mkdir()
        kill_at(partial(fedstrata.run, recipe, task=TASK, out=path), at, when, path.parent / "log")
        go_on(path, recipe)
        check_same(path, expected, (at, when, calls[at]))
        shutil.rmtree(path.parent)


@pytest.mark.parametrize("first", ["torn line", "no checkpoint", "no figures"])
def test_killed_while_it_resumes(tmp_path: Path, first: str, every: int) -> None:
    """Killed, resumed and killed again at every boundary of that, and resumed."""
    recipe = table(checkpoint_every=2 if first == "no checkpoint" else 1)
    fedstrata.run(recipe, task=TASK, out=tmp_path / "whole" / "run")
    expected = whole(tmp_path / "whole" / "run")
    (tmp_path / "count").mkdir()
    calls = calls_of(lambda: fedstrata.run(recipe, task=TASK, out=tmp_path / "count" / "run"), tmp_path / "count")
    replaces = [at for at, name in enumerate(calls) if name == "replace"]
    if first == "torn line":  # of round 2: its figures are the replaces after those of creation and of round 1
        at, when = next(at for at in range(replaces[4 + 3 + 1], len(calls)) if calls[at] == "write"), "torn"
    elif first == "no checkpoint":  # of round 3, with a history line and figures that must go
        at, when = replaces[-1], "before"
    else:
        at, when = replaces[4 + 3], "before"
    broken = tmp_path / "broken" / "run"
    broken.parent.mkdir()
    kill_at(lambda: fedstrata.run(recipe, task=TASK, out=broken), at, when, tmp_path / "log")
    assert len(Run(broken).history()) == (2 if first == "no checkpoint" else 1) + (first == "no checkpoint")

    shutil.copytree(broken, tmp_path / "count" / "again")
    calls = calls_of(lambda: fedstrata.resume(tmp_path / "count" / "again", task=TASK), tmp_path / "count")
    assert "unlink" in calls
    for at, when in deaths(calls)[::every]:
        path = tmp_path / f"{at}-{when}" / "run"
        shutil.copytree(broken, path)
        kill_at(partial(fedstrata.resume, path, task=TASK), at, when, path.parent / "log")
        fedstrata.resume(path, task=TASK)
        check_same(path, expected, (at, when, calls[at]))
        shutil.rmtree(path.parent)


def test_killed_while_it_is_extended(tmp_path: Path, every: int) -> None:
    fedstrata.run(table(training={"rounds": 3}), task=TASK, out=tmp_path / "whole" / "run")
    expected = whole(tmp_path / "whole" / "run")
    short = tmp_path / "short" / "run"
    fedstrata.run(table(training={"rounds": 2}), task=TASK, out=short)

    def extend(path: Path) -> None:
        fedstrata.resume(path, task=TASK, settings={"training.rounds": 3})

    shutil.copytree(short, tmp_path / "count" / "run")
    calls = calls_of(lambda: extend(tmp_path / "count" / "run"), tmp_path / "count")
    for at, when in deaths(calls)[::every]:
        path = tmp_path / f"{at}-{when}" / "run"
        shutil.copytree(short, path)
        kill_at(partial(extend, path), at, when, path.parent / "log")
        assert len(Run(path).history()) >= 2  # nothing of what was done is lost
        extend(path)
        check_same(path, expected, (at, when, calls[at]))
        shutil.rmtree(path.parent)


def full_disk() -> None:
    """No file of this process may grow beyond a kilobyte."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))


def test_an_export_to_a_full_disk_leaves_no_torn_file(tmp_path: Path) -> None:
    """A file of the name asked for is whole or not there, so that the same command works again."""
    task = replace(TASK, model=lambda: nn.Linear(2, 2000), clients=TASK.clients[:1], held_out=TASK.held_out[:1])
    run = fedstrata.run(table(training={"rounds": 1}) | {"algorithm": {}}, task=task, out=tmp_path / "run")

    def export() -> None:
        full_disk()
        run.export(tmp_path / "model.safetensors", task=task)

    assert end_of(fork(export, tmp_path / "log")) == 1
    assert not (tmp_path / "model.safetensors").exists()
    run.export(tmp_path / "model.safetensors", task=task)


def test_a_full_disk_costs_nothing_that_was_done(tmp_path: Path) -> None:
    recipe = table()
    fedstrata.run(recipe, task=TASK, out=tmp_path / "whole" / "run")
    path = tmp_path / "full" / "run"
    run, experiment = create_run(load(recipe), path, task=TASK)

    def work() -> None:
        lines = run_rounds(run, experiment)
        next(lines)
        full_disk()
        list(lines)

    assert end_of(fork(work, tmp_path / "log")) == 1
    assert [line["round"] for line in Run(path).history()] == [1]
    fedstrata.resume(path, task=TASK)
    check_same(path, whole(tmp_path / "whole" / "run"), "full")


# --- random instants -------------------------------------------------------------------------------------------------


LONGER = {"rounds": 8, "epochs": 12, "batch_size": 2}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], float]:
    """What a longer run with two workers comes to, and how long it takes."""
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    started = time.perf_counter()
    pid = fork(lambda: fedstrata.run(table(training=LONGER, workers=2), task=TASK, out=path), path.with_name("log"))
    assert end_of(pid) == 0, path.with_name("log").read_text()
    seconds = time.perf_counter() - started
    path.with_name("log").unlink()
    return whole(path), seconds


@pytest.mark.parametrize("batch", range(4))
def test_killed_at_random_instants(undisturbed: tuple[dict[str, Any], float], tmp_path: Path, batch: int) -> None:
    """Twenty of them, with two workers each, which must not stay behind."""
    expected, seconds = undisturbed
    recipe = table(training=LONGER, workers=2)
    delays = random.Random(batch)
    for number in range(5):
        path = tmp_path / str(number) / "run"
        path.parent.mkdir()
        pid = fork(partial(fedstrata.run, recipe, task=TASK, out=path), path.parent / "log")
        time.sleep(delays.uniform(0, seconds))
        os.kill(pid, signal.SIGKILL)
        assert end_of(pid) in (0, -signal.SIGKILL), (path.parent / "log").read_text()
        assert_no_orphans(pid)
        go_on(path, recipe)
        check_same(path, expected, number)


def test_interrupted_at_random_instants(undisturbed: tuple[dict[str, Any], float], tmp_path: Path) -> None:
    """Ctrl-C, also twice in a row, reaches the process and its workers, as from a terminal."""
    expected, seconds = undisturbed
    recipe = table(training=LONGER, workers=2)
    delays = random.Random(99)
    for number in range(8):
        path = tmp_path / str(number) / "run"
        path.parent.mkdir()
        pid = fork(partial(fedstrata.run, recipe, task=TASK, out=path), path.parent / "log")
        time.sleep(0.02 + delays.uniform(0, seconds))
        for _ in range(1 + number % 2):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                os.killpg(pid, signal.SIGINT)
        assert end_of(pid) in (0, 130), (path.parent / "log").read_text()
        assert_no_orphans(pid)
        go_on(path, recipe)
        check_same(path, expected, number)


# --- the real command ------------------------------------------------------------------------------------------------


MANY = {"training.rounds": 60, "training.epochs": 3, "algorithm": {"name": "fedlayerwise"}}


@pytest.fixture
def many(tiny: Any, tmp_path: Path) -> Path:
    fedstrata.run(load(tiny(MANY)), out=tmp_path / "whole")
    return tmp_path / "whole"


def test_the_real_command_interrupted_killed_and_resumed(
    many: Path, recipe: Any, spawn: Any, cli: Any, tmp_path: Path, same_run: Any
) -> None:
    path = tmp_path / "out"
    process = spawn("run", recipe(MANY), "--out", path, "--workers", "2", start_new_session=True)
    wait_for_rounds(path, process, 2)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, (out, err)
    done = len(Run(path).history())
    assert 2 <= done < 60
    assert f"stopped after round {done}; go on with: fedstrata run --resume {path}" in out
    assert err == ""
    assert_no_orphans(process.pid)

    process = spawn("run", "--resume", path, start_new_session=True)
    wait_for_rounds(path, process, done + 2)
    locked = cli("run", "--resume", path)
    assert locked.code == 2
    assert locked.err == f"error: {path} is in use by process {process.pid}\n"
    changed = cli("run", "--resume", path, "--set", "training.rounds=70")
    assert (changed.code, changed.err) == (2, locked.err)
    assert cli("show", path).code == 0  # looking is allowed meanwhile
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert_no_orphans(process.pid)
    assert cli("run", "--resume", path, "--workers", "1").code == 0
    same_run(path, many, recipe=False)
