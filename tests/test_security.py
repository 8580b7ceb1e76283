"""SECURITY.md: every promise has a test, and what it says of all code is true of all code."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support import ROOT


def names_of_tests() -> set[str]:
    files = (ROOT / "tests").rglob("test_*.py")
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in files)
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_promise_has_a_test() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "`test_" in line]
    promised = re.findall(r"`(test_\w+)`", text)
    assert len(rows) >= 15
    assert set(promised) <= names_of_tests()
    in_tables = [line for line in text.split("## Who is trusted")[1].splitlines() if line.startswith("| ")]
    of_promises = [line for line in in_tables if line.count("|") == 3 and not line.startswith("| promise")]
    assert all("`test_" in line for line in of_promises)


BETWEEN_OUR_OWN_PROCESSES = {"src/fedstrata/engines/local.py"}
"""What a parent and the workers that it forked say to each other, over pipes that nobody else has."""


def unpicklers(tree: ast.AST) -> list[str]:
    """What in a module may unpickle: the modules that do, torch.load, and NumPy's loading unless it says otherwise."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNPICKLING]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in UNPICKLING:
            found.append(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load", "numpy.load"):
            allowed = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if ast.unparse(node.func) == "torch.load" or allowed.get("allow_pickle") != "False":
                found.append(ast.unparse(node))
    return found


UNPICKLING = ("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal")


def test_nothing_is_unpickled() -> None:
    modules = {str(file.relative_to(ROOT)): file for file in (ROOT / "src").rglob("*.py")}
    found = {name for name, file in modules.items() if unpicklers(ast.parse(file.read_text(encoding="utf-8")))}
    assert found == BETWEEN_OUR_OWN_PROCESSES


@pytest.mark.parametrize(
    "code", ["import pickle", "from pickle import loads", "torch.load(f)", "np.load(f)", "np.load(f, allow_pickle=x)"]
)
def test_an_unpickler_would_be_found(code: str) -> None:
    assert unpicklers(ast.parse(code))
