"""Being asked to stop: by Ctrl-C, `kill` or a closed terminal, once or twice, with workers that do not hear."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fedstrata.runs.reader import Run
from fedstrata.runs.writer import last_state
from tests.support.processes import assert_no_orphans, living, wait_for_rounds

LONG = {"training.rounds": 2000, "training.epochs": 20}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_every_request_to_stop_stores_and_says_how_to_go_on(
    number: signal.Signals, recipe: Any, spawn: Any, tmp_path: Path
) -> None:
    """To the whole group, workers included, as a terminal sends it."""
    path = tmp_path / "run"
    file = recipe(LONG | {"record.checkpoint_every": 1000})
    process = spawn("run", file, "--out", path, "--workers", "2", start_new_session=True)
    wait_for_rounds(path, process, 3)
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    done = len(Run(path).history())
    assert f"stopped after round {done}; go on with: fedstrata run --resume {path}" in out
    assert last_state(Run(path).directory).round == done >= 3
    assert_no_orphans(process.pid)


def test_nohup_is_heeded(recipe: Any, spawn: Any, tmp_path: Path) -> None:
    path = tmp_path / "run"

    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    process = spawn("run", recipe(LONG), "--out", path, start_new_session=True, preexec_fn=ignore)
    wait_for_rounds(path, process, 2)
    os.killpg(process.pid, signal.SIGHUP)
    wait_for_rounds(path, process, len(Run(path).history()) + 3)


def test_a_stopped_worker_does_not_keep_us(recipe: Any, spawn: Any, tmp_path: Path) -> None:
    """SIGSTOP cannot be answered; a worker that has it hears neither a pipe that closes nor SIGTERM."""
    path = tmp_path / "run"
    process = spawn("run", recipe(LONG), "--out", path, "--workers", "2", start_new_session=True)
    wait_for_rounds(path, process, 2)
    workers = [pid for pid in living(process.pid) if pid != process.pid]
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGINT)
    try:
        out, err = process.communicate(timeout=30)
    finally:
        for worker in living(process.pid):
            os.kill(worker, signal.SIGKILL)
    assert (process.returncode, err) == (130, "")
    assert "go on with: fedstrata run --resume" in out


@pytest.mark.parametrize("batch", range(2))
def test_a_second_request_ends_it_at_once_and_prints_no_traceback(
    batch: int, recipe: Any, spawn: Any, tmp_path: Path
) -> None:
    """The second one a moment after the first, which is somewhere in the storing and stopping."""
    moments = random.Random(batch)
    file = recipe(LONG)
    for number in range(6):
        path = tmp_path / str(number)
        process = spawn("run", file, "--out", path, "--workers", "2", start_new_session=True)
        wait_for_rounds(path, process, 1)
        time.sleep(moments.uniform(0, 0.05))
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(moments.choice([0, 0.0005, 0.002, 0.01]))
        os.killpg(process.pid, moments.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
        _, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (130, "")
        assert_no_orphans(process.pid)
        assert len(Run(path).history()) >= 1


def test_stopped_while_it_starts(recipe: Any, spawn: Any, tmp_path: Path) -> None:
    """From the first import to the first round: no traceback, whenever it comes."""
    file = recipe(LONG)
    moments = random.Random(7)
    for number in range(6):
        process = spawn("run", file, "--out", tmp_path / str(number), "--workers", "2", start_new_session=True)
        time.sleep(moments.uniform(0.6, 2.5))
        os.killpg(process.pid, signal.SIGHUP)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert process.returncode in (130, -signal.SIGHUP, -signal.SIGINT), err
        assert "Error" not in err
        assert_no_orphans(process.pid)
