"""A study's tables, and claims in a line."""

from __future__ import annotations

from pathlib import Path

from reproductions.claims import check
from reproductions.repeats import Repeats
from reproductions.report import claims_table, measured_tables, summary
from reproductions.study import plan
from tests.support.small_study import SMALL, results_of


def test_many_comparisons_in_a_line() -> None:
    """The most common outcome is told by its number, the others with their places."""
    cells = [{"name": name, "title": f"cell {name}, as it is"} for name in "abc"]
    claims = [{**SMALL["claims"][0], "measure": "final"}]
    curves = {
        "a": {"fedavg": {0: [0.5], 1: [0.5], 2: [0.5]}, "fedldf": {0: [0.7], 1: [0.6], 2: [0.8]}},
        "b": {"fedavg": {0: [0.5], 1: [0.5], 2: [0.5]}, "fedldf": {0: [0.4], 1: [0.3], 2: [0.2]}},
        "c": {"fedavg": {0: [0.5], 1: [0.5], 2: [0.5]}, "fedldf": {0: [0.6], 1: [0.7], 2: [0.9]}},
    }
    results = results_of(curves, cells=cells, claims=claims, quick={"rounds": 2})
    ruling = check(results.study.claims[0], results)
    assert summary(results.study, ruling) == (
        "2 of 3 hold, 1 fails (cell b, as it is); medians −20.00 to +20.00 points"
    )
    assert not ruling.hint


def test_tables_show_every_seed_below_five_and_an_interval_from_five_on() -> None:
    few = results_of({"a": {"fedavg": {0: [0.5], 1: [1.0]}, "fedldf": {0: [0.25], 1: [0.75]}}, "b": {}})
    final, rounds = measured_tables(few)
    assert final.head == ["", "fedavg, paper", "fedavg", "fedldf"]
    assert final.rows == [["as it is", "50.00", "50.00, 100.00", "25.00, 75.00"], ["larger steps", "–", "–", "–"]]
    assert rounds.rows[0] == ["as it is", ">3, 1", ">3, >3"]
    assert claims_table(few).rows == [
        [
            "FedLDF is higher",
            "both",
            "fedldf − fedavg: −25.00, −25.00 points; 1 of 2 comparisons not run",
            "2",
            "does not hold (a hint: 2 seeds)",
        ]
    ]
    many = {seed: [0.1 * (seed + 1)] for seed in range(5)}
    five = results_of({"a": {"fedavg": many, "fedldf": many}, "b": {}})
    assert measured_tables(five)[0].rows[0] == ["as it is", "50.00", "30.00 [10.00, 50.00]", "30.00 [10.00, 50.00]"]


def test_more_arms_than_cells_turn_the_table() -> None:
    results = results_of({"a": {"fedavg": {0: [0.5]}, "fedldf": {0: [0.25]}}}, cells=[SMALL["cells"][0]])
    table = measured_tables(results)[0]
    assert table.head == ["", "as it is"]
    assert table.rows == [["fedavg, paper", "50.00"], ["fedavg", "50.00"], ["fedldf", "25.00"]]


def test_a_repeat_shows_measures_side_by_side(tmp_path: Path) -> None:
    """Round 2 had 0.4 and now has 1, above the target of 0.99: final 40 → 100, rounds >3 → 2, by hand."""
    stored = results_of({"a": {"fedavg": {0: [0.1, 0.4]}}, "b": {}})
    again = results_of({"a": {"fedavg": {0: [0.1, 1.0]}}, "b": {}})
    run = next(run for run in plan(stored.study, [0], tmp_path) if run.place == ("a", "fedavg", 0))
    repeats = Repeats(stored, again, [run])
    assert repeats.first_difference(run) == 2
    assert [row[1:] for row in repeats.table().rows] == [
        ["final accuracy (%)", "40.00", "100.00"],
        ["rounds", ">3", "2"],
        ["digits", "", "others from round 2 on"],
    ]
    shorter = results_of({"a": {"fedavg": {0: [0.1]}}, "b": {}})
    assert Repeats(stored, shorter, [run]).first_difference(run) == 2
    assert Repeats(stored, stored, [run]).first_difference(run) is None
