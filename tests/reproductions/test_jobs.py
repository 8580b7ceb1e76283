"""Runs side by side: the same bits as alone, however a job was stopped, and one line where it cannot go on."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedstrata.core.errors import UserError
from fedstrata.runs.reader import Run
from reproductions.jobs import is_finished, run_all
from reproductions.study import Study, plan
from tests.support.small_study import SMALL, small


def test_runs_side_by_side_and_alone_have_the_same_bits(tmp_path: Path) -> None:
    study = Study.parse(small(cells=[SMALL["cells"][0]], quick={"rounds": 2}))
    for name, cores in (("one", 1), ("two", 2)):
        for _ in run_all(plan(study, [0], tmp_path / name), cores=cores):
            pass
    for arm in study.arms:
        one, two = (Run(tmp_path / name / "a" / arm / "seed-0") for name in ("one", "two"))
        assert one.summary()["weights_sha256"] == two.summary()["weights_sha256"]


def test_a_finished_run_of_another_recipe_is_refused(tmp_path: Path) -> None:
    study = Study.parse(small())
    assert len(list(run_all(plan(study, [0], tmp_path)[:1]))) == 4
    other = Study.parse(small(settings={**SMALL["settings"], "training.lr": 0.5}))
    with pytest.raises(UserError, match="another recipe"):
        is_finished(plan(other, [0], tmp_path)[0])


def test_data_that_is_not_there_is_one_line(spawn: Any) -> None:
    """All runs fail at once, each in its own process, and are asked to stop while they do."""
    for _ in range(3):
        process = spawn("run", "adaptive-mu", "--quick", "--data", "nowhere", module="reproductions")
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2
        assert err.startswith("error: mnist is not in nowhere/mnist")
        assert len(err.splitlines()) == 1


def test_a_client_that_cannot_compute_is_a_mishap_and_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: Any, **__: Any) -> Any:
        raise MemoryError("none left")

    monkeypatch.setattr("fedstrata.clients.client.Client.answer", out_of_memory)
    with pytest.raises(UserError, match=r"0 of \d+ replies usable"):
        list(run_all(plan(Study.parse(small()), [0], tmp_path / "out")[:1]))


def test_a_mistake_stops_the_job_in_one_line(tmp_path: Path) -> None:
    study = Study.parse(small(settings={**SMALL["settings"], "task.dataset": "mnist"}))
    with pytest.raises(UserError, match="mnist"):
        list(run_all(plan(study, [0], tmp_path / "out"), data=tmp_path))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, "Ctrl-C"])
def test_a_killed_job_goes_on_and_ends_with_the_same_bits(
    spawn: Any, tmp_path: Path, how: signal.Signals | str
) -> None:
    table = small(settings={**SMALL["settings"], "training.rounds": 60}, quick={"rounds": 2})
    table["cells"] = table["cells"][:1]
    file = tmp_path / "small.toml"
    file.write_text(tomli_w.dumps(table), encoding="utf-8")
    command = ["run", file, "--seeds", "0", "--runs", tmp_path / "out", "--results", tmp_path / "results"]
    process = spawn(*command, module="reproductions", start_new_session=True)
    history = tmp_path / "out" / "a" / "fedavg" / "seed-0" / "history.jsonl"
    deadline = time.monotonic() + 60
    while not (history.exists() and history.read_bytes().count(b"\n") > 2) and time.monotonic() < deadline:
        time.sleep(0.01)
    if isinstance(how, str):
        for _ in range(20):  # as a terminal does: to the children as well, as long as a key is held down
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.001)
    else:
        process.send_signal(how)
    process.communicate()
    if how != signal.SIGKILL:  # nothing is lost
        rounds = history.read_bytes().count(b"\n")
        assert (history.parent / "checkpoints" / f"{rounds:06}.safetensors").exists()
    second = spawn(*command, module="reproductions")
    out, err = second.communicate(timeout=120)
    assert second.returncode == 0, err
    assert "FedLDF is higher" in out
    places = ("--runs", tmp_path / "o2", "--results", tmp_path / "r2")
    whole = spawn("run", file, "--seeds", "0", *places, module="reproductions")
    whole.communicate(timeout=120)
    first, other = (json.loads((tmp_path / r / "small" / "a.json").read_text()) for r in ("results", "r2"))
    assert first == other
