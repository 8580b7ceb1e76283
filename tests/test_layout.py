"""How sources are laid out: files of a readable length, tests where one looks for them, none built on another."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

TESTS, PACKAGE = ROOT / "tests", ROOT / "src" / "fedstrata"
LONGEST = 700
"""Lines of a file."""
BESIDE_THE_PACKAGE = {"benchmarks", "reproductions", "rules", "support"}
"""Folders of tests that are none of the package."""


def sources(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def test_files_are_short_enough_to_be_read() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_bytes().splitlines()) for path in sources(PACKAGE, TESTS)}
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST} == {}


def test_folders_of_tests_are_those_of_the_package() -> None:
    folders = {path.parent.relative_to(TESTS) for path in sources(TESTS) if path.name.startswith("test_")}
    ours = {folder for folder in folders if folder.parts and folder.parts[0] not in BESIDE_THE_PACKAGE}
    assert len(ours) >= 10
    assert [str(folder) for folder in sorted(ours) if not (PACKAGE / folder).is_dir()] == []


def imported_tests(tree: ast.AST) -> Iterator[str]:
    """Modules of tests, or of fixtures, that a module imports."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if any(part.startswith("test_") or part == "conftest" for part in name.split(".")):
                yield name


def test_no_test_is_built_on_another() -> None:
    """What several tests use is in tests/support, where it can be found and read on its own."""
    found = {str(path.relative_to(ROOT)): list(imported_tests(ast.parse(path.read_text()))) for path in sources(TESTS)}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import tests.runs.test_kill",
        "from tests.runs import test_kill",
        "from tests.runs.test_kill import fork",
        "from test_kill import fork",
        "from . import test_kill",
        "from tests.conftest import tiny",
    ],
)
def test_one_that_is_would_be_found(line: str) -> None:
    assert list(imported_tests(ast.parse(line)))
