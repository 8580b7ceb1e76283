"""What is printed: nothing that somebody else wrote steers a terminal, is taken for markup or cannot be encoded."""

from __future__ import annotations

import ast
import io
import json
import os
import pty
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import Progress
from rich.styled import Styled
from rich.table import Table
from rich.text import Text

import fedstrata
from fedstrata.cli import app, main
from fedstrata.cli.terminal import Console, say
from reproductions.cli import app as reproductions_app
from tests.support import ROOT, SOURCE
from tests.support.make_runs import make_run
from tests.support.processes import Answer, process_environment

STEERS = "\x1b]0;owned\x07"
"""Sets a terminal's title, and rings. rich never writes such a thing."""
HOSTILE = f"[bold]é{STEERS}\x9b2J\r\n\t\x7f\u202e\u2028…[/nothing]:bomb:"
SHOWN = r"[bold]é\x1b]0;owned\x07\x9b2J\r\n\t\x7f\u202e\u2028…[/nothing]:bomb:"
SHOWN_IN_ASCII = SHOWN.replace("é", r"\xe9").replace("…", "...")
ENCODINGS = ("utf-8", "ascii", "latin-1")

OF_RICH = re.compile(r"\x1b\[[\d;]*m|\x1b\[\?25[lh]|\x1b\[\d*[AK]|\r")
"""Styles, and what a live table moves the cursor with."""


def assert_clean(text: str, encoding: str = "utf-8") -> None:
    for line in text.split("\n"):
        assert line.isprintable(), ascii(line)
        assert encoding == "utf-8" or line.isascii(), ascii(line)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """The command line with real streams; each has its encoding, and like Python's own is strict."""
    monkeypatch.setenv("COLUMNS", "600")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def call(out: str, err: str, *argv: object, commands: typer.Typer = app) -> Answer:
        streams = [io.TextIOWrapper(io.BytesIO(), encoding=name, errors="strict") for name in (out, err)]
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["fedstrata", *map(str, argv)])
            patch.setattr(sys, "stdout", streams[0])
            patch.setattr(sys, "stderr", streams[1])
            with pytest.raises(SystemExit) as end:
                main(commands)
        for stream in streams:
            stream.flush()
        text = [stream.buffer.getvalue().decode(name) for stream, name in zip(streams, (out, err), strict=True)]
        return Answer(int(end.value.code or 0), *text)

    return call


def hostile_run(path: Path, done: int = 2, **options: Any) -> Path:
    """Somebody else's run directory, with all names and reasons hostile."""
    data = {"table": [[1, 2]] * 4, "class_names": [HOSTILE, "b"], "dataset": HOSTILE, "source": HOSTILE}
    lost = {2: [(0, HOSTILE), (1, "timeout")]}
    run = make_run(path, layers=(HOSTILE, "b"), rounds=2, done=done, lost=lost, data=data, **options)
    info = json.loads((path / "run.json").read_text())
    info["metric"]["name"] = HOSTILE
    info["versions"] |= {"fedstrata": HOSTILE, "torch": HOSTILE}
    info["later"] = [{"round": 2, "versions": {"numpy": HOSTILE}}]
    (path / "run.json").write_text(json.dumps(info))
    history = (path / "history.jsonl").read_text().replace('"accuracy"', json.dumps(HOSTILE))
    (path / "history.jsonl").write_text(history)
    return run.path


# --- commands --------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def show(place: Path) -> list[object]:
    return ["show", hostile_run(place / HOSTILE)]


def show_a_comparison(place: Path) -> list[object]:
    names = ["fedavg", f"fedavg{HOSTILE}"]
    for name in names:
        hostile_run(place / "all" / name.replace(":", "-").replace("/", "-") / "seed-0")
    content = {"format": 1, "recipe": HOSTILE, "request": HOSTILE, "algorithms": names, "seeds": [0]}
    (place / "all" / "compare.json").write_text(json.dumps(content))
    return ["show", "all"]


def list_runs(place: Path) -> list[object]:
    hostile_run(place / "runs" / HOSTILE)
    damaged = hostile_run(place / "runs" / "damaged")
    (damaged / "recipe.toml").write_text(f"name = {json.dumps(HOSTILE)}", encoding="utf-8")
    return ["list", "runs"]


def report(place: Path) -> list[object]:
    return ["report", hostile_run(place / "run"), "--out", place / f"{HOSTILE}.html"]


def resume_with_other_layers(place: Path) -> list[object]:
    return ["run", "--resume", hostile_run(place / HOSTILE, done=1)]


def export(place: Path) -> list[object]:
    fedstrata.run({"training": {"rounds": 1}, "engine": {"workers": 1}}, out="run")
    return ["export", "run", f"{HOSTILE}.safetensors"]


def run(place: Path) -> list[object]:
    return ["run", "quickstart", "--set", "training.rounds=1", "--workers", "1", "--out", place / HOSTILE]


def compare(place: Path) -> list[object]:
    few = ["--set", "training.rounds=1", "--workers", "1"]
    return ["compare", "quickstart", "--algorithms", "fedavg,fedldf:n=2", *few, "--out", place / HOSTILE]


def partition_of_a_task(place: Path) -> list[object]:
    """It names the classes."""
    (place / "hostile_task.py").write_text(
        f"""
import torch
from fedstrata import Task
data = (torch.ones(4, 2), torch.tensor([0, 1, 0, 1]))
def make():
    return Task(model=lambda: torch.nn.Linear(2, 2), clients=[data] * 2, evaluation={{"test": data}},
                notes={{"class_names": [{HOSTILE!r}, 7]}})
""",
        encoding="utf-8",
    )
    (place / "it.toml").write_text("[task]\nfunction = 'hostile_task:make'", encoding="utf-8")
    return ["partition", "it.toml"]


def data_list(place: Path) -> list[object]:
    (place / HOSTILE / "mnist").mkdir(parents=True)
    return ["data", "list", "--data", HOSTILE]


def no_such_command(place: Path) -> list[object]:
    return [HOSTILE]


def no_such_option(place: Path) -> list[object]:
    return ["run", f"--{HOSTILE}"]


def not_a_number(place: Path) -> list[object]:
    return ["run", "quickstart", "--seed", HOSTILE]


def no_such_recipe(place: Path) -> list[object]:
    return ["run", HOSTILE]


def no_such_run(place: Path) -> list[object]:
    return ["show", place / HOSTILE]


def bad_setting(place: Path) -> list[object]:
    return ["run", "quickstart", "--set", f"training.rounds={HOSTILE}"]


def a_file_in_the_way(place: Path) -> list[object]:
    (place / HOSTILE.replace("/", "")).write_text("")
    return ["run", "quickstart", "--out", place / HOSTILE.replace("/", "") / "run"]


COMMANDS = [
    *[(make, 0) for make in (show, show_a_comparison, list_runs, report, export, run, compare)],
    *[(make, 0) for make in (partition_of_a_task, data_list)],
    *[(make, 2) for make in (resume_with_other_layers, no_such_command, no_such_option, not_a_number)],
    *[(make, 2) for make in (no_such_recipe, no_such_run, bad_setting, a_file_in_the_way)],
]


@pytest.mark.parametrize(("make", "code"), COMMANDS, ids=[make.__name__ for make, _ in COMMANDS])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_commands_print_clean_text(on: Any, place: Path, user_module: Any, make: Any, code: int, encoding: str) -> None:
    argv = make(place)
    assert_said_cleanly(on(encoding, encoding, *argv), code, encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_stored_results_are_shown_as_clean_text(on: Any, place: Path, encoding: str) -> None:
    study = "fedadp-figure7"
    (stored,) = (ROOT / "reproductions" / "results" / study).glob("*.json")
    text = stored.read_text(encoding="utf-8").replace('"idx files, canonical digests"', json.dumps(HOSTILE))
    (place / HOSTILE / study).mkdir(parents=True)
    (place / HOSTILE / study / stored.name).write_text(text, encoding="utf-8")
    answer = on(encoding, encoding, "show", study, "--results", HOSTILE, commands=reproductions_app)
    assert_said_cleanly(answer, 0, encoding)


def assert_said_cleanly(answer: Answer, code: int, encoding: str) -> None:
    assert answer.code == code, answer
    for text in (answer.out, answer.err):
        assert_clean(text, encoding)
    assert r"\x1b]0;owned\x07" in answer.out + answer.err  # it was said, in letters
    assert "[bold]" in answer.out + answer.err
    assert "Traceback" not in answer.err
    assert answer.err.count("\n") == (1 if code else 0)


@pytest.mark.parametrize(("out", "err"), [("utf-8", "ascii"), ("ascii", "utf-8")])
def test_each_stream_is_asked_for_its_own_encoding(on: Any, place: Path, out: str, err: str) -> None:
    assert ("μ" in on(out, err, "list", "rules").out) == (out == "utf-8")
    assert ("é" in on(out, err, "show", place / "é").err) == (err == "utf-8")


@pytest.mark.parametrize("argv", [[], ["--help"], ["run", "--help"], ["flower", "init", "--help"], ["data"]], ids=str)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("width", ["200", "60"])
def test_help_in_every_encoding(
    on: Any, monkeypatch: pytest.MonkeyPatch, argv: list[str], encoding: str, width: str
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    answer = on(encoding, encoding, *argv)
    assert answer.code == (0 if "--help" in argv else 2)
    assert answer.err == ""
    assert_clean(answer.out, encoding)
    assert {len(line) for line in answer.out.splitlines() if line[:1] in "│|" and line} == {int(width)}


UNLIKE_UTF_8 = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "C": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""},
}


@pytest.mark.parametrize("kind", UNLIKE_UTF_8)
def test_a_process_that_may_not_write_utf_8(place: Path, kind: str) -> None:
    """With Python's own streams, whose handling of errors differs: stdout's is strict, or lets surrogates through."""
    hostile_run(place / "runs" / HOSTILE)

    def start(*argv: str | bytes) -> Answer:
        done = subprocess.run(
            [sys.executable, "-m", "fedstrata", *argv],
            env=process_environment() | UNLIKE_UTF_8[kind],
            capture_output=True,
        )
        return Answer(done.returncode, done.stdout.decode("latin-1"), done.stderr.decode("latin-1"))

    listed, helped, refused = start("list"), start("--help"), start("show", b"\xff\x9b2J")
    assert (listed.code, helped.code, refused.code) == (0, 0, 2), (listed, helped, refused)
    for answer in (listed, helped, refused):
        for text in (answer.out, answer.err):
            assert_clean(text, "ascii")
    assert r"\x1b]0;owned\x07" in listed.out
    assert "A mu per layer" in " ".join(listed.out.split())


def test_paths_that_are_no_text(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file name may be any bytes; those that are not UTF-8 are half surrogate pairs in Python."""
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(b"\xff\x9b2J")
    make_run(tmp_path / "run")
    (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / name / "run.json").write_text("{")
    for argv in (["list", "runs"], ["show", name], ["report", "run", "--out", name], ["data", "list", "--data", name]):
        answer = cli(*argv)
        assert answer.code == (2 if argv[0] == "show" else 0), answer
        assert_clean(answer.out + answer.err)
        assert r"\udcff\udc9b2J" in answer.out + answer.err


# --- a real terminal -------------------------------------------------------------------------------------------------


def on_a_terminal(place: Path, encoding: str, *argv: str) -> tuple[int, str]:
    """Run a command at a pseudo-terminal, which has stdout and stderr."""
    ours, theirs = pty.openpty()
    environment = process_environment() | {"TERM": "xterm-256color", "PYTHONIOENCODING": encoding, "COLUMNS": "300"}
    process = subprocess.Popen(
        [sys.executable, "-m", "fedstrata", *argv], stdout=theirs, stderr=theirs, cwd=place, env=environment
    )
    os.close(theirs)
    received = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # how Linux says that nobody has the other end any more
            part = b""
        if not part:
            break
        received += part
    os.close(ours)
    return process.wait(), received.decode()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_terminal_gets_only_what_rich_steers_it_with(place: Path, encoding: str) -> None:
    """With styles and a live table, in which the reason of a lost reply stands."""
    (place / "failing.py").write_text(
        f"""
import torch
from fedstrata import Task
class Bad(torch.utils.data.Dataset):
    def __len__(self): return 3
    def __getitem__(self, i): raise ValueError({HOSTILE!r})
data = (torch.ones(4, 2), torch.tensor([0, 1, 0, 1]))
def make():
    return Task(model=lambda: torch.nn.Linear(2, 2), clients=[data, Bad()], evaluation={{"test": data}})
""",
        encoding="utf-8",
    )
    recipe = "[task]\nfunction = 'failing:make'\n[training]\nrounds = 2\n[engine]\nworkers = 1"
    (place / "it.toml").write_text(recipe, encoding="utf-8")
    code, text = on_a_terminal(place, encoding, "run", "it.toml", "--out", HOSTILE)
    assert code == 0, text
    assert "\x1b[33m" in text  # the reason is yellow
    assert text.count(r"\x1b]0;owned\x07") > 2
    assert_clean(OF_RICH.sub("", text), encoding)
    for argv in (["compare", "it.toml", "-a", "fedavg,fedprox", "--out", f"{HOSTILE}2"], ["show", HOSTILE]):
        code, text = on_a_terminal(place, encoding, *argv)
        assert code == 0, text
        assert "\x1b[" in text
        assert r"\x1b]0;owned\x07" in text
        assert_clean(OF_RICH.sub("", text), encoding)


# --- the console -----------------------------------------------------------------------------------------------------


def printed(encoding: str, *things: Any, width: int = 60, **options: Any) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict", newline="")
    console = Console(file=stream, width=width, **options)
    for thing in things:
        console.print(thing)
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)


def test_a_string_is_shown_as_it_is() -> None:
    for encoding, expected in (("utf-8", SHOWN), ("ascii", SHOWN_IN_ASCII), ("latin-1", SHOWN_IN_ASCII)):
        assert printed(encoding, HOSTILE, width=200) == f"{expected}\n"
        assert printed(encoding, "12 'a' /b True :bomb: [b]c[/b]", force_terminal=True) == (
            "12 'a' /b True :bomb: [b]c[/b]\n"
        )


def everywhere(text: str) -> Iterator[Any]:
    """A text in all places that a text can have."""
    table = Table(text, "b", title=text, caption=text)
    table.add_row(text, "1")
    table.add_row(Text(text), Styled(text, "bold"))
    progress = Progress("{task.description}")
    progress.add_task(text)
    yield from (text, Text(text), Styled(text, "yellow"), table, Group(text, Panel(text)), Group(progress, table))
    yield from ([text], {text: 1}, Path(text), Live(text).renderable)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("force_terminal", [True, False])
@given(text=st.text(st.characters(exclude_categories=()), max_size=40))
@example(text=HOSTILE)
@example(text="\udc9b\x00\U000e0001ﷺ中\u0303")
@settings(max_examples=60, deadline=None)
def test_any_text_in_any_place_is_clean(text: str, encoding: str, force_terminal: bool) -> None:
    shown = printed(encoding, *everywhere(text), force_terminal=force_terminal)
    if force_terminal:
        shown = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert_clean(shown, encoding)


def test_what_is_longer_in_ascii_is_measured_as_such() -> None:
    table = Table("angle")
    table.add_row("45°")
    table.add_row("é")
    assert printed("ascii", table).splitlines()[3:] == [r"| 45deg |", r"| \xe9  |", "+-------+"]


@given(text=st.text(st.characters(exclude_categories=()), max_size=200))
@example(text=HOSTILE)
@settings(max_examples=60, deadline=None)
def test_tables_are_aligned_in_ascii(text: str) -> None:
    table = Table(text, "μ")
    table.add_row("45°", text)
    table.add_row(text, Text(text))
    assert len({len(line) for line in printed("ascii", table).splitlines()}) == 1


def test_an_ellipsis_of_richs_has_one_cell() -> None:
    table = Table("a")
    table.add_row("x" * 100)
    assert "…" in printed("utf-8", table, width=20)
    lines = printed("ascii", table, width=20).splitlines()
    assert {len(line) for line in lines} == {20}
    assert any("x~" in line for line in lines)


def test_what_is_not_ours_to_print_is_readable_as_well() -> None:
    """A traceback, and what other libraries write."""
    code = (
        "import sys; from fedstrata.cli import terminal; terminal.prepare()\n"
        "print('μ \\udcff é …'); print('μ \\udcff é', file=sys.stderr)\n"
        f"raise ValueError({STEERS!r})"
    )
    for encoding, plain in (("utf-8", r"μ \udcff é"), ("ascii", r"mu \udcff \xe9"), ("latin-1", r"mu \udcff \xe9")):
        environment = process_environment() | {"PYTHONIOENCODING": encoding}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, encoding=encoding)
        assert done.returncode == 1
        assert done.stdout == f"{plain} {'…' if encoding == 'utf-8' else '~'}\n"
        first, *rest = done.stderr.splitlines()
        assert first == plain
        assert rest[0] == "Traceback (most recent call last):"
        assert rest[-1] == r"ValueError: \x1b]0;owned\x07"
        assert_clean(done.stderr, encoding)


def test_one_line_however_long(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    say("a  b " * 50 + "end")
    say("c  d " * 50 + "end", stderr=True)
    assert capsys.readouterr() == ("a  b " * 50 + "end\n", "c  d " * 50 + "end\n")


# --- the source ------------------------------------------------------------------------------------------------------

FOLDERS = (SOURCE / "fedstrata", ROOT / "reproductions")
MODULES = sorted(path for folder in FOLDERS for path in folder.rglob("*.py"))
LAID_OUT_BY_THE_CONSOLE = {
    *(
        "rich.box",
        "rich.console.Group",
        "rich.live.Live",
        "rich.styled.Styled",
        "rich.table.Table",
        "rich.table.Column",
    ),
    *(f"rich.progress.{name}" for name in ("Progress", "BarColumn", "MofNCompleteColumn")),
    *(f"rich.progress.{name}" for name in ("TimeElapsedColumn", "TimeRemainingColumn")),
}
"""What commands may use of rich: it gives strings to the console, and reads no markup."""


def ways_around(tree: ast.AST) -> Iterator[str]:
    """Everything in a module that could print past the console, or make markup of a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in ("rich", "click"))
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from (n for n in names - LAID_OUT_BY_THE_CONSOLE if n.split(".")[0] in ("rich", "click"))
            yield from names & {"typer.echo", "typer.secho", "typer.style", "sys.stdout", "sys.stderr"}
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id == "print":
                yield "print"
            yield from (k.arg for k in node.keywords if k.arg in ("markup", "emoji", "highlight"))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            written = f"{node.value.id}.{node.attr}"
            if re.fullmatch(r"typer\.(echo|secho|style|prompt|confirm)|sys\.(__)?std(out|err)(__)?", written):
                yield written


def test_there_is_no_way_around_the_console() -> None:
    found = {str(path.relative_to(ROOT)): list(ways_around(ast.parse(path.read_text()))) for path in MODULES}
    assert found.pop("src/fedstrata/cli/terminal.py")
    assert found.pop("src/fedstrata/runs/progress.py")  # a script's bar, with names made visible; see below
    assert {path: ways for path, ways in found.items() if ways} == {}


@pytest.mark.parametrize(
    "line",
    [
        *(
            "print(1)",
            "import rich",
            "from rich import print",
            "from rich.console import Console",
            "import rich.console",
        ),
        *("from rich.markup import escape", "from rich.text import Text", "typer.echo(1)", "c.print(1, markup=True)"),
        *("sys.stderr.write(a)", "from typer import echo", "from rich.progress import TextColumn", "import click"),
    ],
)
def test_a_way_around_would_be_found(line: str) -> None:
    assert list(ways_around(ast.parse(line)))


def strings_of_ours() -> Iterator[str]:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value

    def strings(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from strings(inner)

    for path in (path for folder in FOLDERS for path in folder.rglob("*.toml")):
        yield from strings(tomllib.loads(path.read_text(encoding="utf-8")))


def test_all_our_own_letters_can_be_written_in_ascii() -> None:
    ours = {letter for text in strings_of_ours() for letter in text if not letter.isascii()}
    ours -= {"\xa0"}  # in pictures only
    assert "μ" in ours
    assert {letter for letter in ours if "\\" in printed("ascii", letter)} == set()


def test_help_is_ascii() -> None:
    """typer lays it out itself, before it is known what can be written."""

    def texts(command: Any) -> Iterator[str]:
        yield from filter(None, (command.name, command.help, command.short_help, command.epilog))
        for parameter in command.params:
            yield from filter(None, (*parameter.opts, getattr(parameter, "help", None), parameter.metavar))
        for inner in getattr(command, "commands", {}).values():
            yield from texts(inner)

    found = [text for commands in (app, reproductions_app) for text in texts(typer.main.get_command(commands))]
    assert len(found) > 100
    assert [text for text in found if not text.isascii()] == []


# --- what does not fit -----------------------------------------------------------------------------------------------


def test_names_stay_apart_at_eighty_columns(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs whose long names differ only at their ends are two names in the list, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"quickstart-of-a-hospital-with-a-long-name-fedlayerwise-s{seed}-20261119-101112" for seed in (11, 12)]
    for name in names:
        make_run(tmp_path / "runs" / name)
    lines = cli("list", "runs").out.splitlines()
    assert max(map(len, lines)) <= 80
    first = "".join(line.split("│")[1].strip() for line in lines if line.count("│") > 4)
    assert all(f"runs/{name}" in first for name in names)


@pytest.mark.parametrize("height", [12, 25])
def test_the_live_table_has_the_newest_runs_that_fit(height: int) -> None:
    from fedstrata.cli.compare import _live_table
    from fedstrata.runs.comparison import Comparison, Job

    recipe = fedstrata.load("quickstart")
    names = [f"fedldf:n={n}" for n in range(40)]
    jobs = tuple(Job(name, 0, recipe, Path(name)) for name in names)
    line: Any = {"round": 3, "metrics": {"test": {"accuracy": 0.5}}, "upload_total": 100}
    console = Console(file=io.StringIO(), width=80, height=height)
    table = _live_table(console, Comparison(tuple(names), (0,), jobs, Path()), {(name, 0): line for name in names})
    with console.capture() as shown:
        console.print(table)
    text = shown.get()
    assert len(text.splitlines()) <= height - 3
    assert len(text.splitlines()) >= height - 5
    assert "fedldf:n=39 " in text
    assert "fedldf:n=0 " not in text
    assert f"below {40 - table.row_count} earlier runs" in text
