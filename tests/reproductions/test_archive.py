"""What the repository holds: stored results belong to the studies, and are had again."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from fedstrata.core.determinism import ARITHMETIC
from fedstrata.core.errors import UserError
from fedstrata.recipes.schema import load
from fedstrata.runs.runner import create_run, run_rounds
from fedstrata.tasks import datasets
from reproductions import outdated
from reproductions.results import Results, machine, same_machine, series_of
from reproductions.study import load_study, studies
from tests.support import ROOT, SOURCE


def test_the_library_imports_nothing_of_the_reproductions() -> None:
    imported = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    assert {"fedstrata", "torch"} <= imported
    assert "reproductions" not in imported


def test_stored_results_belong_to_studies_as_they_are() -> None:
    folders = {path.name for path in (ROOT / "reproductions" / "results").glob("*") if path.is_dir()}
    assert folders <= set(studies())
    for name in folders:
        notes = Results.stored(load_study(name), ROOT / "reproductions" / "results").notes
        assert not [note for note in notes if "left out" in note]


CHECKED = {  # the cheapest cell of each paper: study, cell, arm, rounds; and by how much rounding may move an accuracy
    "FedAdp": ("fedadp-figure3", "mnist-5iid-5x1", "fedadp", 5, 0.01),
    "FedLayerWise": ("fedlayerwise-table1", "5iid-5", "fedlayerwise", 1, 0.01),
    # With BatchNorm, so early: weights changed by a millionth give 0.22 to 0.27 on one processor, another one has 0.32.
    "FedLDF": ("fedldf-reduced", "iid", "fedldf", 5, 0.15),
    "Adaptive μ": ("adaptive-mu", "holders", "adaptive_mu", 3, 0.01),
    "FedLap": ("fedlap-mnist", "most", "fedlap", 2, 0.01),
}


@pytest.mark.slow
@pytest.mark.parametrize("paper", CHECKED)
def test_a_cell_of_each_paper_gives_the_stored_numbers_again(
    paper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly with the same arithmetic, processor and torch; else the bytes, and accuracies near the stored seeds'."""
    name, cell, arm, rounds, tolerance = CHECKED[paper]
    study = load_study(name)
    assert study.paper == paper
    path = ROOT / "reproductions" / "results" / name / f"{cell}.json"
    if not path.exists():
        pytest.skip(f"no results of {name} are stored")
    stored = json.loads(path.read_text(encoding="utf-8"))["arms"][arm]["runs"]
    recipe = study.recipe_of(next(c for c in study.cells if c.name == cell), arm, 0)
    try:
        datasets.load(recipe.task.dataset)
    except UserError as error:
        pytest.skip(str(error))
    shorter = load(recipe.to_table(), settings={"training.rounds": rounds})
    run, experiment = create_run(shorter, tmp_path / "run")
    list(run_rounds(run, experiment))
    again = series_of(run, [])
    known = stored["0"]
    monkeypatch.setattr(outdated, "COUNTED", ARITHMETIC)
    same_arithmetic = not outdated.is_outdated(recipe, known.get("arithmetic", 1))
    if same_arithmetic and same_machine(known["made"], machine()):
        for name_of, values in again.items():
            assert values == known["series"][name_of][:rounds], name_of
    else:
        at = [run["series"]["test.accuracy"][rounds - 1] for run in stored.values()]
        assert again["upload"] == known["series"]["upload"][:rounds]
        assert min(at) - tolerance <= again["test.accuracy"][rounds - 1] <= max(at) + tolerance
