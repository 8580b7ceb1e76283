"""What imports what: `python tests/test_architecture.py` prints it, lowest level first.

Every import counts: at the top of a module, in a function, for type checking only. A module that needs another one only
to name a type, or only later, still cannot be understood without it.

What does not count: `fedstrata/__init__.py`, which gathers the public names and which nothing in the package imports,
and that Python runs a package's `__init__` before any module in it. An `__init__` that is imported itself does count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = SOURCE / "fedstrata"

Graph = Mapping[str, Iterable[str]]

RULES = ("objectives", "selections", "weightings", "servers", "combinations")

BY_NAME = {"flower/__init__.py", "core/lazy.py", "registry.py"}
"""Who imports what only a string names: public names when they are first used, torch, and what a recipe names."""


def name_of(file: Path) -> str:
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def imports(source: str) -> set[str]:
    """Everything that is imported at any depth; `from a import b` is a.b, whether that is a module or a name in a."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "the package has no relative imports"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module_of(name: str) -> str | None:
    """Which of our modules has this: itself, or a name in it."""
    while name not in MODULES and "." in name:
        name = name.rpartition(".")[0]
    return name if name in MODULES else None


IMPORTS = {module: imports(file.read_text(encoding="utf-8")) for module, file in MODULES.items()}
GRAPH = {
    module: {known for name in names if (known := module_of(name)) is not None} - {module}
    for module, names in IMPORTS.items()
    if module != "fedstrata"
}


def packages(module: str) -> set[str]:
    """The outermost packages that it imports."""
    return {name.split(".")[0] for name in IMPORTS[module]}


def room(module: str) -> str:
    """The folder of `fedstrata/` that a module is in, or the module itself."""
    return module.split(".")[1]


ROOMS: Graph = {
    name: {room(other) for module in GRAPH if room(module) == name for other in GRAPH[module]} - {name}
    for name in sorted(set(map(room, GRAPH)))
}


def reached(graph: Graph, start: Iterable[str]) -> set[str]:
    """These, all that they import, and so on."""
    found, waiting = set(start), list(start)
    while waiting:
        new = set(graph[waiting.pop()]) - found
        found |= new
        waiting += new
    return found


def way_back(graph: Graph, start: str) -> list[str] | None:
    """A shortest way from a name back to it, if there is one."""
    ways, seen = [[start]], {start}
    for way in ways:
        if start in graph[way[-1]]:
            return [*way, start]
        new = sorted(set(graph[way[-1]]) - seen)
        seen |= set(new)
        ways += [[*way, name] for name in new]
    return None


def cycle(graph: Graph) -> list[str] | None:
    """A shortest cycle, if there is one."""
    return min(filter(None, (way_back(graph, start) for start in graph)), key=len, default=None)


def levels(graph: Graph) -> list[list[str]]:
    """Lowest first: each imports of lower ones only."""
    left, done, found = set(graph), set[str](), []
    while left:
        found.append(sorted(name for name in left if set(graph[name]) <= done))
        assert found[-1], cycle(graph)
        done |= set(found[-1])
        left -= done
    return found


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ({"a": ["b", "c"], "b": ["c"], "c": []}, None),
        ({"a": ["b"], "b": ["c"], "c": ["d", "b"], "d": []}, ["b", "c", "b"]),
        ({"a": ["b"], "b": ["c"], "c": ["a"]}, ["a", "b", "c", "a"]),
        ({"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": ["c"]}, ["c", "d", "c"]),
    ],
)
def test_a_cycle_is_found_by_its_shortest_way(graph: Graph, expected: list[str] | None) -> None:
    assert cycle(graph) == expected


def test_every_import_is_seen() -> None:
    """At the top, in a function, for types only; a name, a module in a package, a whole module."""
    assert imports(
        "import a.b as x\n"
        "from c import d, e\n"
        "def f():\n    from g.h import i\n"
        "if TYPE_CHECKING:\n    import j\n"
    ) == {"a.b", "c.d", "c.e", "g.h.i", "j"}  # fmt: skip
    assert module_of("fedstrata.core.rng") == "fedstrata.core.rng"
    assert module_of("fedstrata.core.rng.generator") == "fedstrata.core.rng"
    assert module_of("fedstrata.objectives.Plain") == "fedstrata.objectives"
    assert module_of("numpy.random") is None
    assert len(GRAPH) > 100


def test_no_module_needs_itself() -> None:
    assert cycle(GRAPH) is None


def test_no_room_needs_itself() -> None:
    assert cycle(ROOMS) is None


def test_nothing_in_the_package_needs_its_public_names() -> None:
    assert [module for module in GRAPH if "fedstrata" in GRAPH[module]] == []


def test_nothing_else_is_imported_by_a_string() -> None:
    """So nothing that is imported can escape these tests."""
    named = {"importlib.import_module", "importlib"}
    found = {MODULES[module].relative_to(PACKAGE).as_posix() for module, names in IMPORTS.items() if names & named}
    assert found == BY_NAME


def test_the_core_reads_no_files_and_knows_no_command_line() -> None:
    unknown = {"pydantic", "typer", "rich", "tomllib", "tomli_w", "json"}
    for module in GRAPH:
        if room(module) == "core":
            assert not unknown & packages(module), module
    assert ROOMS["core"] == set()


def test_what_computes_knows_no_recipes() -> None:
    """They work with dataclasses, which check themselves; pydantic reads tables, for whoever writes one."""
    computing = [module for module in GRAPH if room(module) in ("core", *RULES, "clients", "engines")]
    needed = reached(GRAPH, computing)
    assert {"core", *RULES, "clients", "engines", "tasks"} <= set(map(room, needed))
    assert [module for module in needed if room(module) == "recipes"] == []
    assert [module for module in needed if "pydantic" in packages(module)] == []


def test_who_reads_runs_needs_nothing_that_runs_them() -> None:
    """A trained model is built as its recipe says; what builds it is the one way from reading to computing."""
    readers = ["fedstrata.runs.reader", "fedstrata.runs.comparison", "fedstrata.report"]
    without = {module: set(names) - {"fedstrata.runs.trained"} for module, names in GRAPH.items()}
    needed = reached(without, readers)
    assert {"fedstrata.runs.formats", "fedstrata.recipes.schema"} <= needed
    assert {room(module) for module in needed} & {"cli", "clients", "engines", "nodes", "deployment", "server"} == set()
    runs = {f"fedstrata.runs.{name}" for name in ("writer", "runner", "compare", "engine")}
    others = {"fedstrata.recipes.experiment", "fedstrata.core.fit", "fedstrata.core.round", "fedstrata.core.record"}
    assert needed & (runs | others) == set()
    assert reached(GRAPH, ["fedstrata.runs.runner"]) >= runs - {"fedstrata.runs.compare"} | others


def test_few_modules_lie_flat() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 8


def test_the_tree_in_contributing_is_this_one() -> None:
    """It has every folder and all that is beside them, each below what it imports, and no file that is not there."""
    text = (SOURCE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = re.search(r"^src/fedstrata/ .*\n((?:  .*\n)+)", text, re.MULTILINE)
    assert tree is not None
    seen: list[str] = []
    for line in tree[1].splitlines():
        if begins := re.match(r"  (\w+)(/|\.py) ", line):
            seen.append(begins[1])
            assert ROOMS[begins[1]] - {"_version"} <= set(seen), begins[1]
        within = PACKAGE if (PACKAGE / f"{seen[-1]}.py").exists() else PACKAGE / seen[-1]
        missing = [name for name in re.findall(r"\w+\.py|(?<=    )\w+/", line) if not (within / name).exists()]
        assert not missing, line
    assert sorted(seen) == sorted(set(ROOMS) - {"__main__", "_version"})


if __name__ == "__main__":
    for number, names in enumerate(levels(ROOMS)):
        for name in names:
            print(f"{number:2}  {name:12} {', '.join(sorted(ROOMS[name]))}".rstrip())
