"""What the documentation shows is right: examples run, and every key is explained."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import fedstrata
from reproductions.study import Arm, Claim, Measure, Plot, Quick, Study, StudyCell
from tests.support import ROOT

DOCS = ROOT / "docs"


def blocks(document: str, language: str) -> list[str]:
    """The examples of a document."""
    text = (DOCS / document).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def prose(path: Path) -> str:
    """A document without its examples."""
    return re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(path: Path) -> set[str]:
    """What GitHub calls a document's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "path", [*ROOT.glob("*.md"), *DOCS.rglob("*.md")], ids=lambda path: str(path.relative_to(ROOT))
)
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", prose(path)):
        if link.startswith(("https://", "http://")):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_files_that_the_tour_names_exist() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/]+\.py", text))
    assert len(named) > 20
    for name in named:
        assert (ROOT / name).exists() or (ROOT / "src/fedstrata" / name).exists(), name


def test_the_example_of_a_study_is_one() -> None:
    (example,) = blocks("studies.md", "toml")
    study = Study.parse({"name": "example", **tomllib.loads(example)})
    assert study.quickened().claims


@pytest.mark.parametrize("part", [Study, Arm, StudyCell, Measure, Claim, Plot, Quick])
def test_every_key_of_a_study_is_explained(part: Any) -> None:
    text = (DOCS / "studies.md").read_text(encoding="utf-8")
    for key in part.model_fields:
        assert re.search(rf"`\[*{key}\b", text), key


@pytest.mark.parametrize(
    "settings",
    [{}, {"evaluation.every": 2}, {"record.layers": False}, {"evaluation.on": ["clients"]}],
    ids=str,
)
def test_a_run_directory_is_read_without_fedstrata(
    settings: dict[str, Any], tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Also while a line of it is being written."""
    monkeypatch.chdir(tmp_path)
    fedstrata.run(tiny(settings), out=tmp_path / "runs" / "example")
    with (tmp_path / "runs" / "example" / "history.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"round": 4, "att')
    example = blocks("run-directory.md", "python")[-1]
    assert "import fedstrata" not in example
    capsys.readouterr()
    exec(example, {})
    printed = capsys.readouterr().out.splitlines()
    rounds = [line.split() for line in printed if not line.startswith("{")]
    assert [line[0] for line in rounds] == ["1", "2", "3"]
    unknown = {"evaluation.every": [0], "evaluation.on": [0, 1, 2]}.get(next(iter(settings), ""), [])
    assert [at for at, line in enumerate(rounds) if line[1] == "None"] == unknown
    assert len(printed) - len(rounds) == (0 if "record.layers" in settings else 3)
