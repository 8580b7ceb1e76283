"""Whatever is in the files of a run or of a comparison, commands and functions say in one line what is wrong."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import fedstrata
from fedstrata.core.errors import RunDirectoryError
from fedstrata.core.status import Status, StatusKind
from fedstrata.report import View
from fedstrata.runs import formats
from fedstrata.runs.reader import Run
from fedstrata.tasks.task import Task
from tests import damage
from tests.support.make_runs import make_run

SAMPLE = 40
"""Of the damages to each of the two; `python tests/damage.py` tries all."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return damage.make(tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize("which", [0, 1], ids=["a run", "a comparison"])
def test_damage_is_said_in_one_line(which: int, good: tuple[Path, Path]) -> None:
    every = list(damage.damages(good[which]))
    assert len(every) > 1000
    for one in random.Random(which).sample(every, SAMPLE):
        assert damage.tried(good[which], one) == [], one.name


def test_what_is_whole_is_read(good: tuple[Path, Path]) -> None:
    """The campaign would find nothing where nothing is read at all."""
    for whole in good:
        assert damage.tried(whole, damage.Damage("none", lambda folder: None)) == []
    assert Run(good[0]).finished()
    assert any(line["lost"] or line["earlier"] for line in Run(good[0]).history())


def test_what_nobody_could_read_is_not_written(blobs: Any, tmp_path: Path) -> None:
    """A task may note what it likes of its data, but its source is shown."""
    notes = {"source": 5, "mine": [{"a": None}]}
    task = Task(lambda: nn.Linear(2, 2), [blobs(8)], {"test": blobs(8)}, notes=notes)
    with pytest.raises(RunDirectoryError, match=r"run/run\.json cannot be written: data\.source = 5: "):
        fedstrata.run({"training": {"rounds": 1}}, task=task, out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    run = make_run(tmp_path / "run", done=1)
    before = (run.path / "history.jsonl").read_bytes()
    line = json.loads(before)
    absurd: list[dict[str, Any]] = [{"train_loss": math.inf}, {"clients": -1}, {"bytes": {}}]
    for changes in absurd:
        with pytest.raises((RunDirectoryError, ValueError)):
            run.append_history({**line, "round": 2, **changes})
    assert (run.path / "history.jsonl").read_bytes() == before


# --- which line it is ------------------------------------------------------------------------------------------------


def edit(path: Path, change: Any, line: int = 0) -> None:
    """Change an object in a file that has one in each line, or only one."""
    whole = path.suffix == ".json"
    objects = [json.loads(path.read_text())] if whole else [json.loads(text) for text in path.read_text().splitlines()]
    change(objects[line])
    path.write_text("".join(json.dumps(one) + "\n" for one in objects))


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        (
            "run.json",
            lambda a: a.update(clients="4"),
            "run.json is damaged: clients = '4': input should be a valid int",
        ),
        ("run.json", lambda a: a["layers"][1].update(numbers=-3), "run.json is damaged: layers.1.numbers = -3: "),
        ("run.json", lambda a: a["metric"].pop("direction"), "run.json is damaged: metric.direction: missing"),
        ("run.json", lambda a: a.update(id=None), "run.json is damaged: there is an id in every format but the first"),
        ("run.json", lambda a: a.update(data={"table": [[1, 2], [3]]}), "run.json is damaged: data = {"),
        ("history.jsonl", lambda a: a.update(upload=1.5), "history.jsonl is damaged in line 1: upload = 1.5: "),
        ("history.jsonl", lambda a: a.update(round=2), "history.jsonl is damaged in line 1: round = 2, and lines"),
        ("history.jsonl", lambda a: a["bytes"]["up"].pop(), "bytes.up has 1 numbers, for 2 layers"),
        ("history.jsonl", lambda a: a["metrics"]["test"].pop("accuracy"), "line 1: metrics.test.accuracy: missing"),
        ("history.jsonl", lambda a: a.update(lost=[{"client": 1}]), "there must be why, or a kind"),
        (
            "history.jsonl",
            lambda a: a.update(lost=[{"client": 1, "kind": "odd"}]),
            "lost.0.kind = 'odd': input should be",
        ),
    ],
)
def test_the_line_names_file_field_and_value(file: str, change: Any, words: str, tmp_path: Path, cli: Any) -> None:
    make_run(tmp_path / "run")
    edit(tmp_path / "run" / file, change)
    answer = cli("show", tmp_path / "run")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert f"{tmp_path / 'run' / file} is damaged" in answer.err
    assert words in answer.err


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("angle", np.zeros((4, 2), np.float32), "angle is float32 [4, 2], expected float64 [4, 2]"),
        ("mask", np.zeros((4, 1)), "mask is float64 [4, 1], expected float64 [4, 2]"),
        ("clients", np.array([0, 2, 1, 3]), "clients = [0, 2, 1, 3]: not in order, or not from 0 to 3"),
        ("clients", np.array([1, 2, 3, 4]), "clients = [1, 2, 3, 4]: not in order, or not from 0 to 3"),
        ("work", np.array([1, 2, -3, 4]), "work = [1, 2, -3, 4]: not counts"),
        ("norm", None, "norm: missing"),
    ],
)
def test_a_record_of_layers_is_what_it_must_be(name: str, array: Any, words: str, tmp_path: Path) -> None:
    run = Run(make_run(tmp_path / "run").path)
    good = run.layers(1)
    changed = {key: values for key, values in (good | {name: array}).items() if values is not None}
    with pytest.raises(RunDirectoryError) as caught:
        formats.read_layers(changed, run.about, tmp_path / "file")
    assert str(caught.value) == f"{tmp_path / 'file'} is damaged: {words}"
    assert formats.read_layers({**good, "more": np.zeros(3)}, run.about, tmp_path / "file").keys() == good.keys()


# --- lost clients, as they are and will be stored --------------------------------------------------------------------


def told(tmp_path: Path, *entries: dict[str, Any]) -> list[Any]:
    if not (tmp_path / "run").exists():
        make_run(tmp_path / "run", rounds=1)
    edit(tmp_path / "run" / "history.jsonl", lambda line: line.update(lost=list(entries)))
    return list(Run(tmp_path / "run").history()[0]["lost"])


@pytest.mark.parametrize(
    ("why", "kind", "reason"),
    [
        ("dropped out", "dropped out", ""),
        ("straggler, not waited for", "straggler dropped", ""),
        ("no reply", "no reply", ""),
        ("refused: update is not finite", "refused", "update is not finite"),
        ("failed: ValueError: a: b (mine.py:3)", "failed", "ValueError: a: b (mine.py:3)"),
    ],
)
def test_why_a_client_was_lost(why: str, kind: str, reason: str, tmp_path: Path) -> None:
    """Lines of before have a sentence, those of now kind and reason; whoever reads them gets all three."""
    expected = {"client": 3, "kind": kind, "reason": reason, "why": str(Status(kind, reason))}  # type: ignore[arg-type]
    assert told(tmp_path, {"client": 3, "why": why}) == [expected]
    assert told(tmp_path, {"client": 3, "kind": kind, "reason": reason}) == [expected]


@pytest.mark.parametrize("kind", get_args(StatusKind))
def test_the_kind_and_the_reason_that_a_client_was_lost(kind: str, tmp_path: Path) -> None:
    found = told(
        tmp_path, {"client": 3, "kind": kind, "reason": ""}, {"client": 4, "kind": kind, "reason": "a", "attempt": 2}
    )
    assert found == [
        {"client": 3, "kind": kind, "reason": "", "why": kind},
        {"client": 4, "attempt": 2, "kind": kind, "reason": "a", "why": f"{kind}: a"},
    ]


# --- one of many -----------------------------------------------------------------------------------------------------


def test_one_damaged_run_is_left_out_of_a_report_and_said(tmp_path: Path, cli: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in range(3):
        make_run(tmp_path / "runs" / str(seed), seed=seed)
    edit(tmp_path / "runs" / "1" / "history.jsonl", lambda line: line.update(clients=-1))
    (tmp_path / "runs" / "2" / "layers" / "000003.safetensors").write_bytes(b"none")
    answer = cli("report", "runs")
    assert answer.code == 0
    first, second, _ = answer.out.splitlines()
    assert first.startswith("left out: runs/1/history.jsonl is damaged in line 1: clients = -1: ")
    assert second.startswith("left out: runs/2/layers/000003.safetensors is damaged: ")
    assert "Left out" in Path("report.html").read_text()
    assert [source.seed for source in View.of([Path("runs")]).runs] == [0]
    assert cli("report", "runs/0", "runs/1").code == 2  # what was asked for by name
    shutil.rmtree(tmp_path / "runs" / "0")
    answer = cli("report", "runs")
    assert (answer.code, answer.err.count("\n")) == (2, 1)


def test_one_damaged_run_costs_a_comparison_its_seed(tmp_path: Path, cli: Any, recipe: Any) -> None:
    out = tmp_path / "compared"
    path = recipe({"training.rounds": 1})
    assert cli("compare", path, "-a", "fedavg,fedprox", "--seeds", "0,1", "--out", out).code == 0
    assert "2 seeds" in cli("show", out).out
    edit(out / "fedprox" / "seed-1" / "run.json", lambda about: about.update(metric=[]))
    answer = cli("show", out)
    assert answer.code == 0
    assert "1 seed" in answer.out
    said = f"left out: {out / 'fedprox' / 'seed-1' / 'run.json'} is damaged: metric = []: "
    assert said in answer.out
    edit(out / "fedprox" / "seed-0" / "run.json", lambda about: about.update(metric=[]))
    answer = cli("show", out)
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "no seed has been run to its end with every algorithm yet; " in answer.err


# --- any JSON at all -------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=JSON)
def test_any_other_json_is_refused_in_one_line(value: Any, tmp_path: Path) -> None:
    if not (tmp_path / "run").exists():
        make_run(tmp_path / "run", rounds=1)
    about = Run(tmp_path / "run").about
    with pytest.raises(RunDirectoryError, match=r"^[^\n]+$"):
        formats.read_line(json.dumps(value).encode(), 1, about, tmp_path)
    with pytest.raises(RunDirectoryError, match=r"^[^\n]+$"):
        formats.read_about(value, tmp_path)
