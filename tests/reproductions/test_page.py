"""The pages made of stored results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from reproductions.claims import check
from reproductions.page import PAPERS, Paper, _index, _Told, _why, pages
from reproductions.results import Results
from reproductions.study import load_study, studies
from tests.support import ROOT
from tests.support.small_study import SMALL, results_of


def test_seeds_that_contradict_each_other_are_told_from_seeds_that_do_not_decide() -> None:
    claims = [{**SMALL["claims"][0], "measure": "rounds", "relation": "lower", "cells": ["a"]}]
    slow, fast, never = [0.1, 0.1, 0.99], [0.99], [0.1] * 3

    def why(ours: list[list[float]], theirs: list[list[float]]) -> str:
        found = {"a": {"fedavg": dict(enumerate(theirs)), "fedldf": dict(enumerate(ours))}}
        results = results_of(found, claims=claims)
        return _why(check(results.study.claims[0], results), results.study)

    assert why([slow, fast], [fast, slow]) == "with seeds that contradict each other"
    assert why([fast, fast], [slow, fast]) == "with seeds that do not decide"
    assert why([fast, never, never], [slow, never, never]) == "with neither at the target in most seeds"
    assert why([fast, fast], [slow, slow]) == "decided in its favour"


def test_what_was_not_run_says_how_long_it_takes_and_what_was_run_instead() -> None:
    nothing = results_of({})
    why = _why(check(nothing.study.claims[0], nothing), nothing.study)
    assert why == f"not run, or not enough of it: two cores need {nothing.study.expected_time(2)}"
    full = Results(load_study("fedldf"), {})
    assert "(#fedldf-reduced) was run instead" in _why(check(full.study.claims[0], full), full.study)


def row(told: dict[Paper, list[_Told]]) -> dict[str, str]:
    """The index's only row, by heading."""
    head, _, cells = (line for line in _index(told).splitlines() if line.startswith("|"))
    names, values = ([cell.strip() for cell in line.split("|")[1:-1]] for line in (head, cells))
    return dict(zip(names, values, strict=True))


def test_the_index_counts_settings_verdicts_and_seeds() -> None:
    """FedLDF is 20 points above FedAvg in a, over the two seeds that both have; in b it has none."""
    base = {**SMALL["claims"][0], "cells": ["a"]}
    claims = [
        base,  # holds
        {**base, "margin": 0.1},  # holds
        {**base, "margin": 0.3},  # is higher, but not by so much
        {**base, "relation": "lower"},  # does not hold at all
        {**base, "cells": ["b"]},  # not tested
        {**base, "text": "Where is it higher?"},
    ]
    curves = {
        "a": {"fedavg": {0: [0.5], 1: [0.6], 2: [0.6]}, "fedldf": {0: [0.7], 1: [0.8]}},
        "b": {"fedavg": {0: [0.5]}},
    }
    results = results_of(curves, claims=claims)
    told = _Told.of(results)
    paper = Paper("None", "none.md", "Why?")
    assert row({paper: [told]}) == {
        "paper": "[None](reproductions/none.md)",
        "what was asked": "Why?",
        "settings": "1 of 2",
        "claims": "holds 2, does not hold 2 (smaller 1), not tested 1, questions of ours 1",
        "seeds": "2",
    }
    reduced = _Told.of(replace(results, study=results.study.model_copy(update={"reduced": "everything"})))
    assert row({paper: [told, reduced]})["settings"] == "1 of 2, 1 reduced"
    assert "10 of 10 tested" in _index({paper: [told, reduced]})  # with two seeds all verdicts are hints
    one_more = results_of({"a": {"fedavg": {0: [0.5]}, "fedldf": {0: [0.7]}}}, claims=claims[:1])
    assert row({paper: [told, _Told.of(one_more)]})["seeds"] == "1–2"
    assert row({paper: [_Told.of(one_more)]})["claims"] == "holds 1"


def test_every_study_has_its_place_on_a_page() -> None:
    assert {load_study(name).paper for name in studies()} == {paper.name for paper in PAPERS}


def test_pages_show_the_pictures_wherever_they_are(reproduce: Any, tmp_path: Path) -> None:
    picture = tmp_path / "elsewhere" / "adaptive-mu" / "accuracy.png"
    picture.parent.mkdir(parents=True)
    picture.touch()
    places = ("--results", ROOT / "reproductions" / "results", "--figures", tmp_path / "elsewhere")
    answer = reproduce("page", "--docs", tmp_path / "docs", *places)
    assert answer.code == 0
    page = (tmp_path / "docs" / "reproductions" / "adaptive-mu.md").read_text(encoding="utf-8")
    assert "](../../elsewhere/adaptive-mu/accuracy.png)" in page
    assert page.count("![") == 1


def test_the_pages_are_what_the_stored_results_give() -> None:
    """`make page` puts it right."""
    docs = ROOT / "docs"
    made = pages(ROOT / "reproductions" / "results", docs, docs / "figures")
    assert set(made) == {docs / "reproductions.md", *(docs / "reproductions").iterdir()}
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, path


def test_the_index_is_one_screen() -> None:
    """A row for each paper, and few lines around them."""
    lines = (ROOT / "docs" / "reproductions.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| [")]
    assert [line.split("](reproductions/")[1].split(")")[0] for line in rows] == [paper.page for paper in PAPERS]
    assert len(rows) <= 12
    assert len(lines) <= 24
