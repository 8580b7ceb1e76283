"""A run can be stopped, interrupted and extended, and is what it would have been."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import fedstrata
from fedstrata.clients import evaluation
from fedstrata.core.errors import RecipeError, RunDirectoryError
from fedstrata.recipes.schema import load
from fedstrata.runs.reader import Run
from fedstrata.runs.runner import create_run, reopen, run_rounds
from fedstrata.runs.writer import last_state
from tests.support.runs import ALGORITHMS, run_content


def stop_after(table: dict[str, Any], out: Path, rounds: int) -> Run:
    """Run some rounds and let go of the run, as Ctrl-C does."""
    run, experiment = create_run(load(table), out)
    lines = run_rounds(run, experiment)
    for _ in range(rounds):
        next(lines)
    lines.close()
    return run


@pytest.mark.parametrize("algorithm", ["fedavg", "combination", "fedlap+fedadp"])
@pytest.mark.parametrize("done", [1, 2])
def test_resume_a_stopped_run(tiny: Any, tmp_path: Path, same_run: Any, algorithm: str, done: int) -> None:
    table = tiny({"algorithm": ALGORITHMS[algorithm]})
    stopped = stop_after(table, tmp_path / "stopped", done)
    assert len(stopped.history()) == done
    assert not stopped.finished()
    lines: list[Any] = []
    resumed = fedstrata.resume(tmp_path / "stopped", on_round=lines.append)
    assert [line["round"] for line in lines] == list(range(done + 1, 4))
    assert resumed.finished()
    fedstrata.run(table, out=tmp_path / "whole")
    same_run(tmp_path / "stopped", tmp_path / "whole")


def test_resume_a_finished_run_runs_nothing(tiny: Any, tmp_path: Path) -> None:
    fedstrata.run(tiny(), out=tmp_path / "run")
    before = run_content(tmp_path / "run")
    lines: list[Any] = []
    fedstrata.resume(tmp_path / "run", on_round=lines.append)
    assert lines == []
    assert run_content(tmp_path / "run") == before


@pytest.mark.parametrize("checkpoint_every", [1, 2, 5])
def test_extending_equals_a_longer_run(tiny: Any, tmp_path: Path, same_run: Any, checkpoint_every: int) -> None:
    settings = {"algorithm": ALGORITHMS["combination"], "record.checkpoint_every": checkpoint_every}
    fedstrata.run(tiny(settings | {"training.rounds": 3}), out=tmp_path / "run")
    fedstrata.resume(tmp_path / "run", settings={"training.rounds": 5})
    fedstrata.run(tiny(settings | {"training.rounds": 5}), out=tmp_path / "whole")
    same_run(tmp_path / "run", tmp_path / "whole", checkpoints=checkpoint_every == 1)


def test_extending_leaves_no_trace_of_the_former_end(tiny: Any, tmp_path: Path, same_run: Any) -> None:
    """Round 3 was evaluated only because it was the last; in the longer run it is not."""
    settings = {"evaluation.every": 2}
    fedstrata.run(tiny(settings | {"training.rounds": 3}), out=tmp_path / "run")
    assert [round for round, _ in fedstrata.Run(tmp_path / "run").curve()] == [2, 3]
    fedstrata.resume(tmp_path / "run", settings={"training.rounds": 5})
    assert [round for round, _ in fedstrata.Run(tmp_path / "run").curve()] == [2, 4, 5]
    fedstrata.run(tiny(settings | {"training.rounds": 5}), out=tmp_path / "whole")
    same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("done", [1, 2, 3, 4])
def test_checkpoints_every_other_round(tiny: Any, tmp_path: Path, same_run: Any, done: int) -> None:
    """Stopped politely, nothing is lost; killed, everything after the last checkpoint is run again, the same."""
    table = tiny({"record.checkpoint_every": 2, "training.rounds": 5, "algorithm": ALGORITHMS["fedlap+fedadp"]})
    stopped = stop_after(table, tmp_path / "stopped", done)
    assert last_state(stopped.directory).round == done
    shutil.copytree(tmp_path / "stopped", tmp_path / "killed")
    if done % 2:  # a kill would not have left this one
        (tmp_path / "killed" / "checkpoints" / f"{done:06d}.safetensors").unlink()
    fedstrata.run(table, out=tmp_path / "whole")
    for name in ("stopped", "killed"):
        lines: list[Any] = []
        fedstrata.resume(tmp_path / name, on_round=lines.append)
        assert lines[0]["round"] == (done if name == "killed" and done % 2 else done + 1)
        same_run(tmp_path / name, tmp_path / "whole", checkpoints=False)
        last = sorted((tmp_path / name / "checkpoints").iterdir())[-1]
        assert last.name == "000005.safetensors"


def test_an_error_between_checkpoints_loses_nothing(tiny: Any, tmp_path: Path) -> None:
    run, experiment = create_run(load(tiny({"record.checkpoint_every": 10, "training.rounds": 9})), tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        for line in run_rounds(run, experiment):
            if line["round"] == 4:
                raise KeyboardInterrupt
    # the generator may only now be let go of
    run = Run(tmp_path / "run")
    assert [line["round"] for line in run.history()] == [1, 2, 3, 4]


def test_only_a_few_settings_may_change_on_resume(tiny: Any, tmp_path: Path) -> None:
    stop_after(tiny(), tmp_path / "run", 2)
    before = run_content(tmp_path / "run")
    for key, value in (
        ("training.lr", 0.5),
        ("seed", 1),
        ("algorithm.name", "fedldf"),
        ("task.model.hidden", 5),
        ("evaluation.on", ["train"]),
        ("evaluation.every", 2),
        ("record.layers", False),
        ("engine.dtype", "float64"),
        ("training", {"rounds": 5}),
        ("nonsense", 1),
    ):
        with pytest.raises(RecipeError, match="cannot change when a run is resumed") as caught:
            fedstrata.resume(tmp_path / "run", settings={key: value})
        assert caught.value.field == key
    with pytest.raises(RecipeError, match=r"training.rounds = 1: 2 rounds are already done"):
        fedstrata.resume(tmp_path / "run", settings={"training.rounds": 1})
    with pytest.raises(RecipeError, match=r"engine.workers = 0"):
        fedstrata.resume(tmp_path / "run", settings={"engine.workers": 0})
    with pytest.raises(RecipeError, match=r"evaluation.target = 95"):
        fedstrata.resume(tmp_path / "run", settings={"evaluation.target": 95.0})
    assert run_content(tmp_path / "run") == before


def test_workers_may_change_on_resume(tiny: Any, tmp_path: Path, same_run: Any) -> None:
    stop_after(tiny(), tmp_path / "run", 1)
    assert fedstrata.resume(tmp_path / "run", settings=["engine.workers=2"]).recipe.engine.workers == 2
    fedstrata.run(tiny(), out=tmp_path / "whole")
    same_run(tmp_path / "run", tmp_path / "whole", recipe=False)


def test_shortening_to_what_is_done_finishes_a_run(tiny: Any, tmp_path: Path, same_run: Any) -> None:
    stop_after(tiny(), tmp_path / "run", 2)
    assert fedstrata.resume(tmp_path / "run", settings={"training.rounds": 2}).finished()
    fedstrata.run(tiny({"training.rounds": 2}), out=tmp_path / "whole")
    same_run(tmp_path / "run", tmp_path / "whole")


def test_a_record_of_a_round_that_never_was_are_dropped(tiny: Any, tmp_path: Path, same_run: Any) -> None:
    """Killed after the layers of round 3 and before its line, then shortened to two rounds."""
    stop_after(tiny(), tmp_path / "run", 2)
    shutil.copy(tmp_path / "run/layers/000002.safetensors", tmp_path / "run/layers/000003.safetensors")
    fedstrata.resume(tmp_path / "run", settings={"training.rounds": 2})
    fedstrata.run(tiny({"training.rounds": 2}), out=tmp_path / "whole")
    same_run(tmp_path / "run", tmp_path / "whole")


def test_stop_at_target(tiny: Any, tmp_path: Path, same_run: Any) -> None:
    settings = {"training.rounds": 8, "training.epochs": 4}
    curve = fedstrata.run(tiny(settings), out=tmp_path / "free").curve()
    best_round, target = next((r, v) for r, v in curve if r >= 3 and v == max(w for q, w in curve if q <= r))
    assert best_round < 8, "the tiny run no longer improves after its first rounds; choose another one"
    reaching = next(r for r, v in curve if v >= target)
    goal = {"evaluation.target": target, "evaluation.stop_at_target": True}
    run = fedstrata.run(tiny(settings | goal), out=tmp_path / "run")
    assert len(run.history()) == reaching
    assert run.finished()
    assert run.summary()["rounds_to_target"] == reaching
    assert run.summary()["upload_to_target"] == run.history()[-1]["upload_total"]
    assert last_state(run.directory).round == reaching
    assert fedstrata.resume(run.path).history() == run.history()
    # letting go of the target goes on to the end
    fedstrata.resume(run.path, settings={"evaluation.stop_at_target": False})
    same_run(run.path, tmp_path / "free", recipe=False)


def test_evaluating_every_other_round(tiny: Any, tmp_path: Path) -> None:
    settings = {"training.rounds": 5}
    often = fedstrata.run(tiny(settings), out=tmp_path / "often")
    seldom = fedstrata.run(tiny(settings | {"evaluation.every": 2}), out=tmp_path / "seldom")
    assert [round for round, _ in seldom.curve()] == [2, 4, 5]
    assert dict(seldom.curve()).items() <= dict(often.curve()).items()
    assert [line["metrics"] == {} for line in seldom.history()] == [True, False, True, False, False]
    assert often.summary()["weights_sha256"] == seldom.summary()["weights_sha256"]


def test_a_missed_target(tiny: Any, tmp_path: Path) -> None:
    run = fedstrata.run(tiny({"evaluation.target": 1.0}), out=tmp_path / "run")
    summary = run.summary()
    assert summary["rounds_to_target"] is None
    assert summary["upload_to_target"] is None
    assert summary["best"] == max(value for _, value in run.curve())
    assert summary["accuracy"] == run.curve()[-1][1]


def test_nothing_is_overwritten(tiny: Any, tmp_path: Path) -> None:
    fedstrata.run(tiny(), out=tmp_path / "run")
    before = run_content(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="exists and is not empty"):
        fedstrata.run(tiny({"seed": 9}), out=tmp_path / "run")
    assert run_content(tmp_path / "run") == before
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    (tmp_path / "empty").mkdir()
    assert fedstrata.run(tiny({"training.rounds": 1}), out=tmp_path / "empty").finished()


def test_a_run_without_out_gets_a_directory_of_its_own(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {fedstrata.run(tiny({"training.rounds": 1}), algorithm="fedldf").path for _ in range(3)}
    assert len(paths) == 3
    assert all(path.parent == Path("runs") and path.name.startswith("tiny-fedldf-s0-") for path in paths)


def test_opening_does_not_change_a_run(tiny: Any, tmp_path: Path) -> None:
    run = stop_after(tiny(), tmp_path / "run", 2)
    stamps = {p: p.stat().st_mtime_ns for p in run.path.rglob("*") if p.is_file()}
    again = reopen(run.path)
    again.summary()
    again.finished()
    assert {p: p.stat().st_mtime_ns for p in run.path.rglob("*") if p.is_file()} == stamps


def test_interrupted_while_evaluating_keeps_all_whole_rounds(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds 1 to 3 are whole when round 4 is interrupted between training and evaluation."""
    measure = evaluation.evaluate

    def interrupted(*arguments: Any) -> Any:
        if arguments[4] == 4:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(evaluation, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fedstrata.run(tiny({"training.rounds": 6, "record.checkpoint_every": 5}), out=tmp_path / "run")
    run = fedstrata.Run(tmp_path / "run")
    assert len(run.history()) == 3
    assert last_state(run.directory).round == 3


@pytest.mark.parametrize("call", ["fsync", "close"])
def test_interrupted_once_a_line_is_written_keeps_its_round(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The signal comes when round 4's line is in the file and before anything else could be noted of it."""
    history, real = tmp_path / "run" / "history.jsonl", getattr(os, call)
    sent: list[str] = []

    def interrupted(handle: int) -> None:
        real(handle)
        if not sent and history.exists() and history.read_bytes().count(b"\n") == 4:
            sent.append(call)
            raise KeyboardInterrupt

    monkeypatch.setattr(os, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        fedstrata.run(tiny({"training.rounds": 6, "record.checkpoint_every": 5}), out=tmp_path / "run")
    run = fedstrata.Run(tmp_path / "run")
    assert len(run.history()) == last_state(run.directory).round == 4


def test_a_run_goes_on_from_its_checkpoint_not_from_its_initial_weights(
    tiny: Any, tmp_path: Path, same_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fedstrata.run(tiny({"training.rounds": 1}), out="start").export("w.safetensors")
    table = tiny({"training.initial_weights": "w.safetensors"})  # relative: a run may be resumed from elsewhere
    fedstrata.run(table, out="whole")
    stop_after(table, tmp_path / "stopped", 1)
    monkeypatch.chdir("/")
    fedstrata.resume(tmp_path / "stopped")
    same_run(tmp_path / "stopped", tmp_path / "whole")
