"""The pages made of stored results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conftest import ROOT
from small_study import SMALL, results_of

from reproductions.claims import check
from reproductions.page import _why, build
from reproductions.results import Results
from reproductions.study import load_study


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


def test_a_page_shows_the_pictures_wherever_they_are(reproduce: Any, tmp_path: Path) -> None:
    picture = tmp_path / "elsewhere" / "adaptive-mu" / "accuracy.png"
    picture.parent.mkdir(parents=True)
    picture.touch()
    places = ("--results", ROOT / "reproductions" / "results", "--figures", tmp_path / "elsewhere")
    assert reproduce("page", "--docs", tmp_path / "docs", *places).code == 0
    page = (tmp_path / "docs" / "reproductions.md").read_text()
    assert "](../elsewhere/adaptive-mu/accuracy.png)" in page


def test_the_page_is_what_the_stored_results_give() -> None:
    """`make page` puts it right."""
    page = (ROOT / "docs" / "reproductions.md").read_text(encoding="utf-8")
    assert page == build(ROOT / "reproductions" / "results", ROOT / "docs" / "figures")
