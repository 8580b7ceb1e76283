"""Claims against numbers: how much a seed favours one, when a comparison is decided, and what becomes of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reproductions.claims import Finding, Known, Ruling, _best, check, decide, is_smaller, outcome, score
from reproductions.report import differences_table, summary, verdict
from reproductions.study import Claim
from tests.support.small_study import SMALL, results_of

INF = math.inf


def until(value: float, end: float = INF) -> Known:
    """A measure of a run that went on until `end`."""
    return Known(value, min(value, end), value)


def claim(relation: str = "lower", **options: Any) -> Claim:
    given = {"than": ["b"]} if "value" not in options else {}
    return Claim(**{"text": "t", "paper": "p", "measure": "m", "arm": "a", "relation": relation, **given, **options})


@pytest.mark.parametrize(
    ("claimed", "ours", "theirs", "expected"),
    [
        (claim("lower"), [60, 50], [100, 40], [40, -10]),
        (claim("lower"), [60, INF, INF], [INF, 60, INF], [INF, -INF, None]),  # censored ones stay in
        (claim("lower", factor=0.5), [60, 40], [100, 100], [-10, 10]),
        (claim("lower", factor=0.5), [60], [INF], [INF]),
        (claim("higher", margin=0.03), [0.9, 0.9], [0.8, 0.88], [0.07, -0.01]),
        (claim("higher", margin=-0.01), [0.79], [0.795], [0.005]),
        (claim("similar", margin=0.02), [0.9, 0.9, 0.9], [0.91, 0.95, 0.85], [0.01, -0.03, -0.03]),
        (claim("similar", margin=3), [INF, INF, 5], [INF, 5, INF], [None, -INF, -INF]),
        (claim("lower", value=20), [15, 25], [20, 20], [5, -5]),
    ],
    ids=str,
)
def test_how_much_a_seed_favours_a_claim(
    claimed: Claim, ours: list[float], theirs: list[float], expected: list[float | None]
) -> None:
    found = [score(claimed, until(a), until(b)) for a, b in zip(ours, theirs, strict=True)]
    assert [score is None for score in found] == [one is None for one in expected]
    assert [score or 0 for score in found] == pytest.approx([one or 0 for one in expected])


@pytest.mark.parametrize(
    ("values", "at_least", "outcome"),
    [
        ([1.0], False, "holds"),
        ([1.0, 2.0, 0.1], False, "holds"),
        ([1.0, -0.1, 3.0], False, "open"),
        ([1.0, 0.0], False, "open"),  # a tie favours nobody
        ([1.0, 0.0], True, "holds"),  # unless it is enough
        ([1.0, None], False, "open"),
        ([1.0, None], True, "open"),
        ([-1.0, None], False, "open"),
        ([None, None, None], True, "open"),
        ([None] * 5, True, "open"),
        ([-1.0, -INF], False, "fails"),
        # Five: the interval of the median reaches both ends (see test_compare), so one seed against is enough.
        ([1.0, 1.0, 1.0, 1.0, -1.0], False, "open"),
        ([1.0, 1.0, 1.0, 1.0, INF], False, "holds"),
        # Ten: the median is below 0 only where at least five draws are the one bad seed, which is rare.
        ([1.0] * 9 + [-1.0], False, "holds"),
        ([-1.0] * 9 + [1.0], False, "fails"),
        ([INF] * 8 + [-INF] * 2, False, "open"),
        ([-INF] * 8 + [INF] * 2, False, "open"),  # as its mirror image
    ],
    ids=str,
)
def test_when_a_comparison_is_decided(values: list[float | None], at_least: bool, outcome: str) -> None:
    assert decide(values, at_least) == outcome


@pytest.mark.parametrize(
    ("claimed", "ours", "theirs", "expected"),
    [
        (claim("similar", margin=3), [INF] * 3, [INF] * 3, "open"),  # nobody knows
        (claim("lower", margin=3), [INF] * 5, [INF] * 5, "open"),
        (claim("similar", margin=3), [18], [15], "holds"),  # within 3
        (claim("similar", margin=3), [19], [15], "fails"),
        (claim("similar", margin=2), [3.0, -3.0] * 5, [0.0] * 10, "fails"),  # far off either way is not similar
        (claim("similar", margin=2), [3.0, 1.0] * 5, [0.0] * 10, "open"),
        (claim("similar", margin=2), [3.0, 2.5, 4.0], [0.0] * 3, "fails"),
        (claim("similar", margin=2), [3.0, -3.0], [0.0] * 2, "fails"),
        (claim("similar", margin=2), [3.0, 1.0], [0.0] * 2, "open"),
        (claim("lower", factor=0.6), [12, 12], [20, 20], "holds"),  # 40 % fewer
        (claim("lower"), [12, 12], [12, 12], "open"),
    ],
    ids=str,
)
def test_comparisons(claimed: Claim, ours: list[float], theirs: list[float], expected: str) -> None:
    scores = [score(claimed, until(a), until(b)) for a, b in zip(ours, theirs, strict=True)]
    assert outcome(claimed, scores) == expected


@pytest.mark.parametrize(
    ("relation", "gain", "expected"),
    [
        ("higher", 0.0011, "holds"),
        ("higher", 0.0009, "does not hold"),  # as good as equal is not higher
        ("higher", -0.0011, "does not hold"),
        ("lower", -0.0011, "holds"),
        ("lower", 0.0009, "does not hold"),
    ],
)
def test_accuracies_are_higher_or_lower_from_a_tenth_of_a_point_on(relation: str, gain: float, expected: str) -> None:
    claims = [{**SMALL["claims"][0], "relation": relation, "cells": ["a"]}]
    found = {seed: [0.5 + gain] for seed in range(3)}
    results = results_of({"a": {"fedavg": {seed: [0.5] for seed in range(3)}, "fedldf": found}}, claims=claims)
    ruling = check(results.study.claims[0], results)
    assert ruling.verdict == expected
    assert ruling.claim == results.study.claims[0]


def test_rounds_that_were_not_run_are_not_compared() -> None:
    """A mean of rounds 91 to 100 of three: there is none, which is no tie."""
    measures = {"end": {"title": "end", "kind": "mean", "first": 91}}
    claims = [{**SMALL["claims"][0], "measure": "end", "relation": "similar", "margin": 0.01}]
    cells = [{"name": "a", "title": "as it is"}]
    results = results_of(
        {"a": {"fedavg": {0: [0.1, 0.5, 0.6]}, "fedldf": {0: [0.1, 0.5, 0.6]}}},
        measures=measures,
        claims=claims,
        cells=cells,
    )
    assert check(results.study.claims[0], results).verdict == "not tested"


@pytest.mark.parametrize(
    ("claimed", "ours", "theirs", "expected"),
    [
        (claim("lower"), 207, INF, "holds"),
        (claim("lower"), INF, 300, "fails"),
        (claim("lower", factor=0.563), 207, INF, "open"),  # 301 rounds would be too few: 0.563 · 301 = 169
        (claim("lower", factor=0.563), 168, INF, "holds"),  # 0.563 · 300 = 168.9, and it is more
        (claim("lower", factor=0.563), INF, 250, "fails"),
        (claim("lower", margin=50), 260, INF, "open"),
        (claim("lower", margin=50), 250, INF, "holds"),
        (claim("similar", margin=3), 299, INF, "open"),  # 302 would be within 3, 303 would not
        (claim("similar", margin=3), 290, INF, "fails"),
        (claim("similar", margin=3), INF, 290, "fails"),
        (claim("similar", margin=3, factor=1.5), INF, 250, "open"),  # 375 would be the same
        (claim("higher", margin=5), INF, 296, "open"),
        (claim("higher", margin=5), INF, 295, "holds"),
    ],
    ids=str,
)
def test_of_a_target_not_reached_only_the_last_round_is_known(
    claimed: Any, ours: float, theirs: float, expected: str
) -> None:
    assert outcome(claimed, [score(claimed, until(ours, 300), until(theirs, 300))] * 3) == expected


def test_of_an_upload_not_reached_only_what_was_uploaded_is_known() -> None:
    """The cheap arm's whole run is ten bytes: against twelve of the dear one, it might have needed eleven."""
    reach = {"reach": {"title": "bytes to 0.5", "kind": "upload_to", "target": 0.5}}
    claims = [{**SMALL["claims"][0], "measure": "reach", "relation": "lower", "cells": ["a"]}]

    def verdict_with(theirs: list[float]) -> str:
        found = {"a": {"fedavg": {0: theirs}, "fedldf": {0: [0.1] * 10}}}
        cells = [{"name": "a", "title": "a"}]
        results = results_of(found, measures=reach, claims=claims, cells=cells, quick={"rounds": 2})
        return check(results.study.claims[0], results).verdict

    assert verdict_with([0.1] * 11 + [0.5]) == "open"
    assert verdict_with([0.1] * 8 + [0.5]) == "does not hold"
    assert verdict_with([0.1] * 12) == "open"


@pytest.mark.parametrize(("relation", "expected"), [("lower", None), ("higher", -INF)])
def test_the_best_of_several_may_be_one_that_was_not_watched_long_enough(relation: str, expected: float | None) -> None:
    """Ours needed 11.5, another 12, and a third more than 10: perhaps 11, and perhaps 13."""
    claimed = claim(relation, than=["b", "c"], together=True)
    best = _best(claimed, [until(12, 60), until(INF, 10)])
    assert score(claimed, until(11.5, 60), best) == expected


def test_two_targets_that_were_missed_may_have_been_reached_in_either_order() -> None:
    """Ours needed more than 10, the best of the others more than 8 and at most 12: 10.5 and 11.5, or 13 and 9."""
    claimed = claim(than=["b", "c"], together=True)
    best = _best(claimed, [until(12, 60), until(INF, 8)])
    assert score(claimed, until(INF, 10), best) is None
    assert score(claimed, until(INF, 12), best) == -INF


@pytest.mark.parametrize(("there", "expected"), [(40, "open"), (30, "holds"), (20, "holds")])
def test_an_advantage_over_one_that_missed_the_target_is_at_least_so_large(there: int, expected: str) -> None:
    """In a, FedLDF has not reached it within 60 rounds and FedAvg did in 30: more than 30 rounds later."""

    def reaches(round: int) -> list[float]:
        return [0.1] * (round - 1) + [0.99]

    found = {"a": {"fedavg": {0: reaches(30)}, "fedldf": {0: [0.1] * 60}}}
    found["b"] = {"fedavg": {0: reaches(10)}, "fedldf": {0: reaches(10 + there)}}
    asked = {**SMALL["claims"][0], "measure": "rounds", "relation": "higher", "than_cells": {"a": "b"}}
    del asked["than"]
    results = results_of(found, claims=[{**asked, "over": "fedavg"}])
    assert check(results.study.claims[0], results).verdict == expected


def test_what_a_failed_run_has_not_reached_it_never_will() -> None:
    claims = [{**SMALL["claims"][0], "measure": "rounds", "relation": "higher", "margin": 5, "cells": ["a"]}]
    found = results_of({"a": {"fedavg": {0: [0.99]}, "fedldf": {0: [0.1, 0.1]}}}, claims=claims)
    assert check(found.study.claims[0], found).verdict == "open"  # two rounds are too few to know
    failed = replace(found, failed=frozenset({("a", "fedldf", 0)}))
    assert check(found.study.claims[0], failed).verdict == "holds"


@given(
    relation=st.sampled_from(["lower", "higher", "similar"]),
    factor=st.sampled_from([0.5, 1.0, 1.5]),
    margin=st.sampled_from([1, 5, 40]),
    reached=st.integers(1, 100),
    ours=st.booleans(),
    later=st.lists(st.integers(101, 400), min_size=1, max_size=20),
)
def test_whenever_the_target_would_have_been_reached_the_score_is_right(
    relation: str, factor: float, margin: float, reached: int, ours: bool, later: list[int]
) -> None:
    """Whatever the round beyond the 100 that were run: a seed that decided would have decided so."""
    claimed = claim(relation, factor=factor, margin=margin)

    def scored(unknown: float) -> float | None:
        found = (Known(unknown, 100 if unknown == INF else unknown, unknown), until(reached))
        return score(claimed, *(found if ours else reversed(found)))

    decided = scored(INF)
    for round in later:
        then = scored(round)
        assert then is not None
        if decided is not None:
            assert then * decided >= 0
    if decided is None and relation != "similar":  # it could have gone either way
        nearest, furthest = scored(100), scored(10_000)
        assert nearest is not None
        assert furthest is not None
        assert nearest * furthest < 0


@pytest.mark.parametrize(
    ("outcomes", "missing", "expected"),
    [
        ([], 2, "not tested"),
        (["holds", "holds"], 0, "holds"),
        (["holds", "holds"], 1, "holds in part"),
        (["holds", "open"], 0, "holds in part"),
        (["open", "fails"], 0, "does not hold"),
        (["open", "open"], 0, "open"),  # undecided is not refuted
    ],
    ids=str,
)
def test_verdicts(outcomes: list[Any], missing: int, expected: str) -> None:
    findings = [Finding("a", "b", [1.0], [2.0], [1.0], found) for found in outcomes]
    assert Ruling(claim(), findings, missing).verdict == expected


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (["holds", "holds"], "holds"),
        (["holds", "fails"], "does not hold"),
        (["holds", "open"], "open"),
        (["open", "fails"], "does not hold"),
        (["holds"], "open"),  # the other one is not run
    ],
    ids=str,
)
def test_who_is_said_to_be_the_best_must_not_be_beaten(outcomes: list[Any], expected: str) -> None:
    findings = [Finding("a", "b", [1.0], [2.0], [1.0], found) for found in outcomes]
    assert Ruling(claim(than=["b", "c"], best=True), findings, 2 - len(findings)).verdict == expected


@pytest.mark.parametrize(
    ("options", "rounds", "smaller"),
    [
        ({"factor": 0.5}, 4, True),  # 4 instead of 6: fewer, but not half as many
        ({"factor": 0.5}, 3, False),  # it holds
        ({"factor": 0.5}, 6, False),  # no fewer
        ({"factor": 0.5}, 7, False),
        ({"margin": 3}, 4, True),
        ({"margin": 3, "relation": "similar"}, 2, False),  # says no direction
        ({}, 7, False),  # says no size
    ],
    ids=str,
)
def test_a_claim_may_hold_but_for_its_size(options: dict[str, Any], rounds: int, smaller: bool) -> None:
    def reaches(round: int) -> dict[int, list[float]]:
        return {seed: [0.1] * (round - 1) + [0.99] for seed in range(3)}

    asked = {**SMALL["claims"][0], "measure": "rounds", "relation": "lower", "cells": ["a"], **options}
    results = results_of({"a": {"fedavg": reaches(6), "fedldf": reaches(rounds)}}, claims=[asked])
    assert is_smaller(check(results.study.claims[0], results), results) == smaller


def test_questions_are_answered() -> None:
    def answer(*outcomes: Any, missing: int = 0) -> str:
        findings = [Finding("a", "b", [1.0] * 3, [2.0] * 3, [1.0] * 3, found) for found in outcomes]
        return verdict(Ruling(claim(text="Under which readings is it so?"), findings, missing), mark="**")

    assert answer("holds", "holds") == "**all**"
    assert answer("holds", "fails") == "**some**"
    assert answer("fails", "fails") == "**none**"
    assert answer("open", "open") == "**open**"
    assert answer("fails", missing=1) == "**none so far**"
    assert answer() == "**not tested**"


def test_only_seeds_that_both_have_are_compared() -> None:
    results = results_of(
        {
            "a": {"fedavg": {0: [0.1, 0.5], 1: [0.1, 0.6]}, "fedldf": {1: [0.1, 0.7], 2: [0.1, 0.9]}},
            "b": {"fedavg": {0: [0.5]}},
        }
    )
    ruling = check(results.study.claims[0], results)
    assert [(f.cell, f.than, f.ours, f.theirs, f.outcome) for f in ruling.findings] == [
        ("a", "fedavg", [0.7], [0.6], "holds")
    ]
    assert ruling.missing == 1
    assert ruling.verdict == "holds in part"


@pytest.mark.parametrize(
    ("measure", "relation", "theirs", "outcome"),
    [
        ("final", "higher", [0.6, 0.65], "open"),  # each seed has its own best: 0.7 is above it, 0.62 is not
        ("final", "lower", [0.5, 0.4], "fails"),
        ("rounds", "lower", [2.0, 1.0], "open"),  # the other part never reaches it
    ],
)
def test_a_combination_is_compared_with_the_best_of_its_parts(
    measure: str, relation: str, theirs: list[float], outcome: str
) -> None:
    results = results_of(
        {
            "a": {
                "fedavg": {0: [0.1, 0.5], 1: [0.6, 0.65], 2: [0.1, 0.1]},  # seed 2 is not run by all
                "fedadp": {0: [0.1, 0.6], 1: [0.1, 0.4]},
                "fedldf": {0: [0.6, 0.7], 1: [0.1, 0.62], 2: [0.1, 0.9]},
            }
        },
        arms={"fedavg": "fedavg", "fedadp": "fedadp", "fedldf": "fedldf:n=2"},
        settings={**SMALL["settings"], "training.rounds": 2, "evaluation.target": 0.6},
        claims=[
            {
                **SMALL["claims"][0],
                "measure": measure,
                "relation": relation,
                "than": ["fedavg", "fedadp"],
                "together": True,
                "cells": ["a"],
            }
        ],
    )
    (found,) = check(results.study.claims[0], results).findings
    assert (found.than, found.theirs, found.outcome) == ("best of fedavg, fedadp", theirs, outcome)


def test_an_advantage_is_compared_between_cells() -> None:
    """In a FedLDF is 0.2 and 0.1 above FedAvg, in b 0.05 above and 0.1 below; seed 2 is not in both."""
    claims = [
        {
            "text": "FedLDF's advantage is larger",
            "paper": "p",
            "measure": "final",
            "arm": "fedldf",
            "over": "fedavg",
            "relation": "higher",
            "than_cells": {"a": "b"},
        }
    ]
    results = results_of(
        {
            "a": {"fedavg": {0: [0.5], 1: [0.6], 2: [0.1]}, "fedldf": {0: [0.7], 1: [0.7], 2: [0.2]}},
            "b": {"fedavg": {0: [0.45], 1: [0.5]}, "fedldf": {0: [0.5], 1: [0.4]}},
        },
        claims=claims,
    )
    study = results.study
    ruling = check(study.claims[0], results)
    (found,) = ruling.findings
    assert (found.cell, found.than, found.outcome) == ("a", "b", "holds")
    assert found.ours == pytest.approx([0.2, 0.1])
    assert found.theirs == pytest.approx([0.05, -0.1])
    assert summary(study, ruling) == "fedldf − fedavg, minus that of larger steps: +15.00, +20.00 points"
    assert differences_table(results, ruling).rows[0][1] == "fedldf − fedavg, minus that of larger steps"
    assert study.in_cells(study.cells).claims == study.claims
    assert study.in_cells(study.cells[:1]).claims == []  # one of the two cells is no comparison


def test_an_arm_is_compared_with_itself_in_another_cell() -> None:
    claims = [
        {
            "text": "FedLDF does not suffer",
            "paper": "p",
            "measure": "final",
            "arm": "fedldf",
            "relation": "higher",
            "margin": -0.01,
            "than_cells": {"b": "a"},
        }
    ]
    curves = {"a": {"fedldf": {0: [0.7], 1: [0.7]}}, "b": {"fedldf": {0: [0.72], 1: [0.695], 2: [0.1]}}}
    results = results_of(curves, claims=claims)
    ruling = check(results.study.claims[0], results)
    (found,) = ruling.findings
    assert (found.cell, found.than, found.ours, found.theirs) == ("b", "a", [0.72, 0.695], [0.7, 0.7])
    assert ruling.verdict == "holds"
    assert summary(results.study, ruling) == "fedldf, minus that of as it is: +2.00, −0.50 points"
    assert differences_table(results, ruling).rows[0][1] == "fedldf, minus that of as it is"
