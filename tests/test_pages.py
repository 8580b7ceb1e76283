"""README and docs, done as they say: every Python block is run, and every command that needs no more than this machine.

A page is gone through from top to bottom in a folder of its own. `quickstart` has one step in each of two rounds here;
nothing else is shorter than it is printed.
"""

from __future__ import annotations

import re
import runpy
import shlex
import string
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import fedstrata
import fedstrata.cli
from fedstrata.recipes.catalog import RECIPES, Library
from tests.support import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# ([\w-]+\.(py|toml))\n")
"""A block that begins so is a file of this name."""

ELSEWHERE = {
    r"fedstrata data get": "a network",
    r"\S*pip install|python3 -m venv|source ": "a network; scripts/check_wheel.py installs",
    r"scp ": "another machine",
    r"\S* --engine flower|fedstrata run .*--engine flower": "Flower's own processes; tests/engines/flower has them",
    r"make ": "minutes to hours",
    r"fedstrata \w+ runs/hospitals": "a run of examples/hospitals.py, which takes minutes",
    r"python -m (reproductions|benchmarks)": "hours, or results of them",
    r"fedstrata report reproductions/": "results of hours",
    r"fedstrata watch": "it goes on until it is ended; tests/watch has it",
}
"""Commands that are parsed and not run, and what they need."""

BEFORE = {
    "findings.md": ["run quickstart --out runs/hospitals"],
    "run-directory.md": ["run quickstart --out runs/example --set training.rounds=5"],
    "report.md": [
        "run quickstart --out runs/example --set training.rounds=5",
        "run quickstart -a fedlayerwise",
        "run quickstart --out runs/one",
        "run quickstart --out runs/two",
        "compare quickstart -a fedavg,fedprox",
        "compare quickstart -a fedavg,fedprox --out runs/compare-three",
    ],
}
"""What a page takes for granted."""

RULES = {"extending.md": "rules.py"}
"""The file in which a page's Python blocks are saved, but those that import it."""


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def commands(block: str) -> list[list[str]]:
    """The words of every command; variables of the shell are put in."""
    found, variables = [], dict[str, str]()
    for line in block.splitlines():
        if not line.startswith("$ "):
            continue  # what it prints
        if setting := re.fullmatch(r'([A-Z]+)="(.*)"', line[2:]):
            variables[setting[1]] = setting[2]
            continue
        for part in line[2:].split(" && "):
            words = shlex.split(string.Template(part).safe_substitute(variables), comments=True)
            assert words, line
            found.append(words)
    return found


def parse(words: list[str]) -> None:
    """Whether there is such a command, with such options."""
    program, *rest = words
    if program == "fedstrata":
        from fedstrata.cli import app

        parse_options(app, rest)
    elif words[:3] == ["python", "-m", "reproductions"]:
        from reproductions.cli import app as studies

        parse_options(studies, words[3:])
    elif words[:2] == ["python", "-m"]:
        assert (ROOT / words[2].replace(".", "/")).with_suffix(".py").exists(), words
    elif program == "python":
        assert (ROOT / "examples" / words[1]).exists(), words
    elif program == "make":
        assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for target in rest), words
    elif program.endswith("pip"):
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = [extra for word in rest for found in re.findall(r"\[(.*)\]", word) for extra in found.split(",")]
        assert set(named) <= set(extras), words
        assert all((ROOT / file).exists() for option, file in pairwise(rest) if option == "-c"), words
    else:
        assert program in ("python3", "source", ".", "cd", "scp", "rm"), words


def parse_options(app: typer.Typer, words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    context = command.make_context("program", list(words))
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)


def needs_more(words: list[str]) -> bool:
    return any(re.match(pattern, " ".join(words)) for pattern in ELSEWHERE) or words[0] != "fedstrata"


# --- parsed ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_one(page: Path) -> None:
    for language, block in blocks(page):
        assert language in ("", "python", "console", "toml", "diff", "sh"), "what runs it?"
        if language == "console":
            for words in commands(block):
                parse(words)


def test_a_command_that_is_none_is_found() -> None:
    for words in (["fedstrata", "rum"], ["fedstrata", "run", "--nope"], ["fedstrata", "compare", "x", "--seeds"]):
        with pytest.raises(Exception, match=r"No such|requires an argument"):
            parse(words)
    for words in (["make", "nothing"], ["pip", "install", "fedstrata[nothing]"], ["curl", "x"]):
        with pytest.raises(AssertionError):
            parse(words)


def every_command(command: Any, path: tuple[str, ...] = ()) -> list[Any]:
    inner = getattr(command, "commands", {})
    found = [every_command(one, (*path, name)) for name, one in inner.items()]
    return [one for part in found for one in part] if inner else [pytest.param(command, id=" ".join(path))]


@pytest.mark.parametrize("command", every_command(typer.main.get_command(fedstrata.cli.app)))
def test_every_help_has_an_example_that_is_one(command: Any) -> None:
    examples = [line.strip() for line in command.help.splitlines() if line.strip().startswith("fedstrata ")]
    assert examples or command.name == "reproduce"
    for example in examples:
        parse(shlex.split(example))
        named = re.match(r"fedstrata (?:run|compare|partition|flower init \S+) ([a-z]\S*)", example)
        assert named is None or named[1].endswith(".toml") or named[1] in RECIPES.names(), example


def test_wheels_have_this_version() -> None:
    named = [name for page in PAGES for name in re.findall(r"fedstrata-([\w.]+)-py3-none-any\.whl", page.read_text())]
    assert named
    assert set(named) == {fedstrata.__version__}


# --- run -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A folder of its own, a small quickstart, no browser; modules of the page are forgotten at the end."""
    read = Library.read

    def smaller(library: Library, name: str | Path) -> dict[str, Any]:
        table = read(library, name)
        if name == "quickstart":
            table["training"] |= {"rounds": 2, "steps": 1}
            table["engine"] = {"workers": 1}
        return table

    monkeypatch.setattr(Library, "read", smaller)
    monkeypatch.setattr("webbrowser.open", lambda url: True)
    monkeypatch.setenv("FEDSTRATA_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[name]


def supplied(page: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Names that a page's Python has from the app around it."""
    if page.name == "README.md":
        north, east, west = ({"body": np.full(4, at), "head": np.full(2, at)} for at in (1.0, 2.0, 4.0))
        return {"model": {"body": np.zeros(4), "head": np.zeros(2)}, "north": north, "east": east, "west": west}
    if page.name != "flower-strategy.md":
        return {}
    from flwr.app import ArrayRecord
    from flwr.supercore.task_identity import TaskIdentity

    from fedstrata.clients.training import build_model
    from tests.support import strategies

    for name in ("run_id", "node_id", "task_id"):  # this process is the ServerApp of a run
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)
    arrays = ArrayRecord(build_model(strategies.TASK, 0).state_dict())
    grid = strategies.FakeGrid(dict(zip(strategies.NODES, strategies.stock(), strict=True)))
    return {"Strategy": fedstrata.flower.Strategy, **vars(fedstrata.algorithms), "grid": grid, "arrays": arrays}


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if "```python" in page.read_text() or "```console" in page.read_text()],
    ids=lambda page: page.name,
)
def test_a_page_does_what_it_shows(page: Path, place: Path, cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = supplied(page, monkeypatch) | {"__name__": "page"}
    for command in BEFORE.get(page.name, []):
        assert cli(*shlex.split(command)).code == 0, command
    for language, block in blocks(page):
        named, rules = NAMED.match(block), RULES.get(page.name, "")
        if language == "python" and named:
            (place / named[1]).write_text(block, encoding="utf-8")
            runpy.run_path(named[1], run_name="__main__")
        elif language == "python" and rules and f"from {rules[:-3]} import" not in block:
            with (place / rules).open("a", encoding="utf-8") as file:
                file.write(block)
            forget(rules[:-3])
            runpy.run_path(rules, run_name="rules")
        elif language == "python":
            exec(block, names)
        elif language == "toml":
            table = tomllib.loads(block)
            name = named[1] if named else f"{table['name']}.toml" if "name" in table else None
            if name is not None:
                (place / name).write_text(block, encoding="utf-8")
        elif language == "console":
            for words in commands(block):
                if not needs_more(words):
                    answer = cli(*map(found, words[1:]))
                    assert answer.code == 0, f"{shlex.join(words)}\n{answer.err}"


def found(word: str) -> str:
    """`runs/quickstart-…` is what begins so."""
    return str(min(Path().glob(word.replace("…", "*")))) if "…" in word else word


def forget(module: str) -> None:
    sys.modules.pop(module, None)
