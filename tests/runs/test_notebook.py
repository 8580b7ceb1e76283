"""What a notebook shows of runs, comparisons, algorithms and layers; frames; progress."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas
import pytest
import torch

import fedstrata
from fedstrata.algorithms import AXES, NAMED, fedldf, fedprox
from fedstrata.core.display import Table
from fedstrata.runs.compare import begin_comparison, run_job
from fedstrata.runs.comparison import read_comparison
from fedstrata.runs.runner import create_run, run_rounds
from tests.support.processes import process_environment

HOSTILE = "<script>alert(1)</script> & \x1b[2J"


class Cells(HTMLParser):
    """The text of a table's cells; any element that a table does not have is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag in ("table", "caption", "thead", "tbody", "tr", "th", "td"), tag
        assert attrs == []
        if tag in ("caption", "th", "td"):
            self.found.append("")

    def handle_data(self, data: str) -> None:
        self.found[-1] += data


def cells(shown: Any) -> list[str]:
    parser = Cells()
    parser.feed(shown._repr_html_())
    assert "\x1b" not in "".join(parser.found)
    return parser.found


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of two algorithms over two seeds."""
    from tests.support.runs import TINY

    out = tmp_path_factory.mktemp("place") / "compared"
    table = TINY | {"evaluation": {"every": 2, "target": 0.001}}
    for job in begin_comparison(table, ["fedavg", "fedldf:n=2"], [0, 1], out=out).jobs:
        list(run_job(job))
    return out


# --- repr and HTML ---------------------------------------------------------------------------------------------------


def test_a_table_is_text_and_html() -> None:
    table = Table("a title", ("name", "n"), (("x", "12"), (HOSTILE, "3")))
    shown = "<script>alert(1)</script> & \\x1b[2J"
    assert str(table).split("\n") == [
        "a title",
        f"name{' ' * (len(shown) - 2)}n",
        f"x{' ' * (len(shown) + 1)}12",
        f"{shown}  3",
    ]
    assert cells(table) == ["a title", "name", "n", "x", "12", shown, "3"]


def test_a_run(compared: Path) -> None:
    path = compared / "fedavg" / "seed-1"
    run = fedstrata.Run(path)
    value = f"{run.summary()['accuracy']:.4f}"
    assert repr(run) == f"<Run {path}: tiny, fedavg, seed 1; 3/3 rounds, accuracy {value}>"
    shown = cells(run)
    assert shown[0] == "tiny: fedavg, seed 1"
    assert "3 of 3, finished" in shown
    assert f"{value} (best {run.summary()['best']:.4f})" in shown
    assert "fc1, fc2" in shown


def test_a_run_that_goes_on_and_one_that_is_gone(tiny: Any, tmp_path: Path) -> None:
    run, experiment = create_run(fedstrata.load(tiny()), tmp_path / "run")
    assert "; 0/3 rounds>" in repr(run)
    assert "0 of 3, not finished" in cells(run)
    lines = run_rounds(run, experiment)
    next(lines)
    assert "; 1/3 rounds, accuracy " in repr(run)
    assert "1 of 3, running" in cells(run)
    lines.close()
    (run.path / "history.jsonl").write_text("{}\n{}\n")
    assert "history.jsonl is damaged" in repr(run)
    assert "history.jsonl is damaged" in "".join(cells(run))


def test_names_of_others_are_text(tiny: Any, tmp_path: Path) -> None:
    run = fedstrata.run(tiny({"training.rounds": 1}), out=tmp_path / HOSTILE.replace("/", ":"))
    assert "\x1b" not in repr(run)
    assert "<script>" in "".join(cells(run))
    layers = fedstrata.Layers.of_shapes({f"{HOSTILE}.weight": (2, 3)})
    assert "\x1b" not in repr(layers)
    assert "\\x1b[2J" in "".join(cells(layers))

    class Odd(fedstrata.Uniform):
        def __repr__(self) -> str:
            return HOSTILE

    assert "<script>" in "".join(cells(fedstrata.Algorithm(weighting=Odd())))


def test_a_comparison(compared: Path) -> None:
    comparison, _ = read_comparison(compared)
    assert repr(comparison) == f"<Comparison {compared}: fedavg, fedldf:n=2; seeds 0, 1>"
    values = [f"{run.summary()['accuracy']:.4f}" for run in comparison.runs.values()]
    outcomes, differences = comparison.tables()
    assert [row[:2] for row in outcomes.rows] == [
        ("fedavg", f"{values[0]}, {values[2]}"),
        ("fedldf:n=2", f"{values[1]}, {values[3]}"),
    ]
    assert [row[0] for row in differences.rows] == ["fedldf:n=2"]
    assert cells(comparison) == [
        text for table in (outcomes, differences) for text in (table.title, *table.columns, *sum(table.rows, ()))
    ]


def test_a_comparison_that_has_not_been_run(tiny: Any, tmp_path: Path) -> None:
    comparison = begin_comparison(tiny(), ["fedavg"], [0], out=tmp_path / "c")
    assert "does not exist" in "".join(cells(comparison))


@pytest.mark.parametrize("name", NAMED)
def test_an_algorithm_can_be_written_as_it_is_shown(name: str) -> None:
    algorithm = NAMED[name]()
    rules = {rule.__name__: rule for known in AXES.values() for rule in known.values()}
    assert eval(repr(algorithm), rules | {"Algorithm": fedstrata.Algorithm}) == algorithm


def test_an_algorithm_shows_what_is_not_fedavg() -> None:
    assert repr(fedstrata.fedavg()) == "Algorithm()"
    assert repr(fedprox(0.1)) == "Algorithm(objective=FedProx(mu=0.1))"
    assert repr(fedldf(4)) == f"Algorithm(selection={fedldf(4).selection!r}, grouping='block')"
    shown = cells(fedprox(0.1))
    assert shown[shown.index("objective") + 1] == "FedProx(mu=0.1)"
    assert shown[shown.index("weighting") + 1] == "SampleSize()"


def test_layers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    layers = fedstrata.Layers.of(model)
    assert repr(layers) == "<2 Layers (0: 8, 1: 8), 16 numbers of torch.float32>"
    assert cells(layers)[7:13] == ["0", "0.weight [2, 3], 0.bias [2]", "8", "0", "2", "32"]
    many = fedstrata.Layers.of_shapes({str(at): (1,) for at in range(50)})
    assert repr(many) == "<50 Layers (0: 1, 1: 1, 2: 1, …, 49: 1), 50 numbers of torch.float32>"


# --- frames ----------------------------------------------------------------------------------------------------------


def test_the_frame_of_a_run(compared: Path) -> None:
    """Evaluated in the second and in the last round only."""
    run = fedstrata.Run(compared / "fedavg" / "seed-0")
    frame, history = run.frame(), run.history()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.index.tolist() == [1, 2, 3]
    assert frame["train_loss"].tolist() == [line["train_loss"] for line in history]
    assert frame["test.accuracy"].isna().tolist() == [True, False, False]
    assert frame["test.accuracy"].tolist()[1:] == [line["metrics"]["test"]["accuracy"] for line in history[1:]]
    assert frame["upload"].cumsum().tolist() == frame["upload_total"].tolist() == [x["upload_total"] for x in history]
    assert frame["replies"].tolist() == [4, 4, 4]
    assert frame.dtypes["test.loss"].kind == "f"


def test_the_frame_of_a_run_without_rounds(tiny: Any, tmp_path: Path) -> None:
    run, _ = create_run(fedstrata.load(tiny()), tmp_path / "run")
    assert run.frame().empty


def test_the_frame_of_a_comparison(compared: Path) -> None:
    comparison, _ = read_comparison(compared)
    frame = comparison.frame()
    assert list(zip(frame["algorithm"], frame["seed"], strict=True)) == list(comparison.runs)
    assert frame["value"].tolist() == [run.summary()["accuracy"] for run in comparison.runs.values()]
    assert frame["rounds_to_target"].tolist() == [2.0] * 4
    every = pandas.concat({key: run.frame() for key, run in comparison.runs.items()})
    assert len(every) == 4 * 3
    assert every["replies"].tolist() == [4] * 12


def test_without_pandas(compared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    comparison, _ = read_comparison(compared)
    for shown, name in ((fedstrata.Run(compared / "fedavg" / "seed-0"), "Run"), (comparison, "Comparison")):
        with pytest.raises(
            fedstrata.MissingExtra, match=rf"{name}\.frame\(\) needs pandas: pip install .*\[notebook\]"
        ):
            shown.frame()


# --- progress --------------------------------------------------------------------------------------------------------


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """A kernel, as far as fedstrata can see; what it shows: which output, and what is in it."""
    shown: list[tuple[int, Any]] = []

    def display(thing: Any, display_id: bool) -> Any:
        assert display_id
        number = len({at for at, _ in shown})
        shown.append((number, thing))
        return SimpleNamespace(update=lambda again: shown.append((number, again)))

    ipython, module = ModuleType("IPython"), ModuleType("IPython.display")
    vars(ipython)["get_ipython"] = lambda: SimpleNamespace(kernel=object())
    vars(module)["display"] = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return shown


def test_a_notebook_shows_progress_once(notebook: Any, tiny: Any, tmp_path: Path, capfd: Any) -> None:
    """One output that changes, of which the last state is the run's; nothing is printed beside it."""
    run = fedstrata.run(tiny(), out=tmp_path / "run")
    assert {at for at, _ in notebook} == {0}
    assert [table.rows[0][1] for _, table in notebook] == ["1/3", "2/3", "3/3"]
    (row,) = notebook[-1][1].rows
    assert row[0] == "fedavg, seed 0"
    assert f"accuracy {run.summary()['accuracy']:.4f}" in row[2]
    assert cells(notebook[-1][1])
    fedstrata.resume(run.path, settings={"training.rounds": 4})
    assert {at for at, _ in notebook} == {0, 1}
    assert notebook[-1][1].rows[0][1] == "4/4"
    assert capfd.readouterr() == ("", "")


def test_a_notebook_shows_a_comparison_in_one_table(notebook: Any, tiny: Any, tmp_path: Path, capfd: Any) -> None:
    found = fedstrata.compare(tiny(), ["fedavg", "fedprox"], range(2), out=tmp_path / "c", rounds=1)
    assert {at for at, _ in notebook} == {0}
    names = [f"{algorithm}, seed {seed}" for algorithm, seed in found.runs]
    assert [row[:2] for row in notebook[-1][1].rows] == [(name, "1/1") for name in names]
    assert capfd.readouterr() == ("", "")


def test_a_script_prints_nothing(tiny: Any, tmp_path: Path, capfd: Any) -> None:
    fedstrata.run(tiny({"engine.workers": 2}), out=tmp_path / "run")
    assert capfd.readouterr() == ("", "")


# --- what is written -------------------------------------------------------------------------------------------------


def test_only_run_and_compare_write_and_only_below_out(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing appears in the current folder, the home or the temporary folder of somebody who only looks."""
    for name in ("here", "home", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))

    def files() -> set[str]:
        return {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}

    for _ in fedstrata.simulate(tiny(), fedprox(0.1), rounds=2):
        pass
    server = fedstrata.Server({"a": torch.zeros(2)}, fedstrata.fedavg())
    server.aggregate([{"a": torch.ones(2)}], sizes=[3])
    assert files() == set()
    run = fedstrata.run(tiny(), out="mine/run")
    found = fedstrata.compare(tiny(), ["fedavg"], out="mine/compared")
    written = files()
    assert {path.split("/")[:2] == ["here", "mine"] for path in written} == {True}
    for shown in (run, found):
        _ = repr(shown), shown._repr_html_(), shown.frame()
    run.model()
    assert files() == written


def test_a_script_at_a_terminal_has_a_bar(tmp_path: Path) -> None:
    """It is steered by rich alone, and gone at the end."""
    code = (
        "from fedstrata.runs.progress import progress\n"
        "with progress([2, 3]) as bar:\n"
        "    bar.begins(0, 'a\\x1b]0;owned\\x07'); bar.reaches({'round': 2})\n"
        "    bar.begins(1, '[b]c'); bar.reaches({'round': 1})\n"
    )
    ours, theirs = pty.openpty()
    environment = process_environment() | {"TERM": "xterm"}
    done = subprocess.Popen([sys.executable, "-c", code], stderr=theirs, env=environment)
    os.close(theirs)
    received = b""
    with contextlib.suppress(OSError):  # how Linux says that nobody has the other end any more
        while part := os.read(ours, 65536):
            received += part
    os.close(ours)
    text = received.decode()
    assert done.wait() == 0
    assert "\x1b]0;" not in text
    assert "a\\x1b]0;owned\\x07" in text
    assert "[b]c" in text
    assert "2/5" in text
    assert "3/5" in text
