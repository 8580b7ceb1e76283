"""Numbers out of series, worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedstrata.core.errors import RecipeError
from reproductions.measures import measure, read
from reproductions.study import Measure

INF = math.inf

SERIES: dict[str, list[float | None]] = {
    "upload": [10, 20, 30, 40],
    "test.accuracy": [0.2, None, 0.6, 0.5],
    "test.loss": [2.0, None, 1.0, 1.5],
    "angle.0": [0.5, 0.6, 0.7, 0.8],
    "angle.1": [1.5, 1.6, 1.7, 1.8],
}


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"kind": "final"}, 0.5),
        ({"kind": "best"}, 0.6),
        ({"kind": "best", "series": "test.loss"}, 1.0),
        ({"kind": "best", "series": "test.error"}, 0.4),
        ({"kind": "rounds_to", "target": 0.6}, 3),
        ({"kind": "rounds_to"}, 3),  # to the recipe's target
        ({"kind": "rounds_to", "target": 0.7}, INF),
        ({"kind": "rounds_to", "target": 0.4, "series": "test.error"}, 3),
        ({"kind": "rounds_to", "target": 0.0, "series": "test.loss"}, INF),  # not the recipe's
        ({"kind": "upload_to", "target": 0.6}, 60),  # 10 + 20 + 30
        ({"kind": "upload_to", "target": 0.4}, 30),  # in round 2, between 0.2 and 0.6
        ({"kind": "upload_to", "target": 0.7}, INF),
        ({"kind": "mean"}, (0.2 + 0.6 + 0.5) / 3),
        ({"kind": "mean", "first": 2, "last": 3}, 0.6),
        ({"kind": "deviation", "last": 2}, 0.05),  # of 0.6 and 0.5
        ({"kind": "at", "round": 3, "series": ["angle.0", "angle.1"]}, 1.2),
        ({"kind": "at", "round": 2}, math.nan),  # not evaluated
        ({"kind": "at_equal_upload"}, 0.5025),  # of 0.6 at 60 and 0.5 at 100, at 99
        ({"kind": "upload"}, 100),
    ],
    ids=str,
)
def test_measures_by_hand(options: dict[str, Any], value: float) -> None:
    what = Measure(title="x", **options)
    assert measure(what, SERIES, target=0.55, budget=99.0) == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"kind": "final"}, 0.0),
        ({"kind": "mean"}, 0.0),
        ({"kind": "deviation", "last": 20, "series": "test.loss"}, INF),
        ({"kind": "deviation", "last": 20}, INF),  # and not 0, the least there is
        ({"kind": "upload"}, 100),
        ({"kind": "final", "series": "test.error"}, 1.0),
        ({"kind": "final", "series": "train.loss"}, INF),  # it failed before it was evaluated
        ({"kind": "best"}, 0.6),  # what it had reached
        ({"kind": "best", "series": "train.accuracy"}, 0.0),
        ({"kind": "rounds_to", "target": 0.6}, 3),
        ({"kind": "rounds_to", "target": 0.7}, INF),
        ({"kind": "upload_to", "target": 0.5, "series": "train.error"}, INF),
    ],
    ids=str,
)
def test_a_run_that_failed_has_the_worst_of_what_it_did_not_reach(options: dict[str, Any], value: float) -> None:
    assert measure(Measure(title="x", **options), SERIES, failed=True) == value


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"kind": "best", "better": "higher"}, 0.9),
        ({"kind": "best"}, 0.5),
        ({"kind": "rounds_to", "target": 0.85, "better": "higher"}, 3),
        ({"kind": "final", "better": "higher"}, -INF),  # no number: as bad as can be
        ({"kind": "final"}, INF),
        ({"kind": "final", "series": "test.accuracy"}, 0.0),
        ({"kind": "final", "series": "test.error"}, 1.0),
        ({"kind": "rounds_to", "target": 0.9, "series": "test.accuracy"}, INF),
        ({"kind": "deviation", "last": 2}, INF),
        ({"kind": "deviation", "last": 2, "series": "test.accuracy"}, 0.4),  # of 0.8 and 0
    ],
    ids=str,
)
def test_a_measure_says_which_way_a_metric_improves(options: dict[str, Any], value: float) -> None:
    series: Any = {"upload": [1] * 4, "test.auc": [0.5, 0.8, 0.9, INF], "test.accuracy": [0.5, 0.8, 0.8, INF]}
    assert measure(Measure(**{"title": "x", "series": "test.auc", **options}), series) == value


def test_a_run_that_failed_at_once_has_uploaded_nothing() -> None:
    assert measure(Measure(title="x", kind="upload"), {"upload": []}, failed=True) == 0


def test_curves_take_what_is_no_number_as_the_worst() -> None:
    series: Any = {"upload": [1, 1], "test.accuracy": [0.5, INF], "test.loss": [1.0, INF]}
    assert read(series, "test.accuracy") == [(1, 0.5), (2, 0.0)]
    assert read(series, "test.error") == [(1, 0.5), (2, 1.0)]
    assert read(series, "test.loss") == [(1, 1.0), (2, INF)]


@pytest.mark.parametrize("kind", ["rounds_to", "upload_to"])
def test_the_way_to_a_target_is_that_of_one_series(kind: Any) -> None:
    with pytest.raises(ValueError, match=f"{kind} is of one"):
        Measure(title="x", kind=kind, target=0.5, series=["train.accuracy", "test.accuracy"])


def test_errors_between_evaluations_are_interpolated_at_equal_upload() -> None:
    """Equal curves, but one arm uploads a little more: it must not lose a whole interval of evaluations."""
    what = Measure(title="x", kind="at_equal_upload")
    curve: list[float | None] = [0.1, None, None, None, 0.5, None, None, None, 0.9]
    dear: Any = {"upload": [101] * 9, "test.accuracy": curve}
    cheap: Any = {"upload": [100] * 9, "test.accuracy": curve}
    assert measure(what, cheap, budget=900) == pytest.approx(0.9)
    assert measure(what, dear, budget=900) == pytest.approx(0.9 - 0.4 * 9 / 404)  # 9 bytes before the last one
    assert math.isnan(measure(what, dear, budget=100))


def test_a_series_that_was_not_recorded() -> None:
    with pytest.raises(RecipeError, match=r"train\.loss"):
        measure(Measure(title="x", kind="final", series="train.loss"), SERIES)
