"""Comparisons: figures worked out by hand, and directories that are gone on with."""

from __future__ import annotations

import csv
import itertools
import json
import math
import multiprocessing as mp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedstrata
from fedstrata.cli.compare import parse_seeds, result_tables
from fedstrata.core.errors import RecipeError, RunDirectoryError
from fedstrata.recipes.schema import load
from fedstrata.runs.compare import _claim, begin_comparison, run_job
from fedstrata.runs.comparison import Outcome, outcome
from fedstrata.runs.reader import Run
from fedstrata.runs.statistics import ENOUGH_SEEDS, _middles_of_resamples, estimate, paired_differences
from fedstrata.tasks.metric import ACCURACY

INF = math.inf


# --- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "median"),
    [
        ([3], 3),
        ([1, 5], 3),
        ([5, 1, 3], 3),
        ([4, 1, 3, 2], 2.5),
        ([1, 2, INF], 2),
        ([1, INF, INF], INF),
        ([1, 2, 3, INF], 2.5),
        ([1, 2, INF, INF], INF),
        ([INF, INF], INF),
        ([INF] * 6, INF),
    ],
)
def test_medians_with_censored_values(values: list[float], median: float) -> None:
    result = estimate(values)
    assert result.median == median
    assert result.values == tuple(values)  # all of them, in the seeds' order
    assert (result.interval is None) == (len(values) < ENOUGH_SEEDS)


def test_an_interval_from_five_seeds_on() -> None:
    assert ENOUGH_SEEDS == 5
    values = [1.0, 2.0, 3.0, 4.0, 100.0]
    first, again = estimate(values), estimate(list(reversed(values)))
    assert first.interval is not None
    low, high = first.interval
    assert first.interval == estimate(values).interval
    assert again.median == first.median == 3
    # The median of five draws is the smallest value if at least three of them are it: a chance of
    # Σ_{i≥3} C(5,i) 0.2^i 0.8^(5-i) = 5.8 %, above 2.5 %. So both ends are the extremes.
    assert (low, high) == (1.0, 100.0)
    many = estimate(np.arange(101.0).tolist())
    assert many.interval is not None
    assert 30 <= many.interval[0] < 50 < many.interval[1] <= 70
    assert estimate([7.0] * 5).interval == (7.0, 7.0)


@given(st.lists(st.integers(-3, 3) | st.sampled_from([-INF, INF]), min_size=5, max_size=6))
@settings(max_examples=8, deadline=None)
def test_the_interval_is_that_of_all_resamples(values: list[float]) -> None:
    """Every one of the n^n is made, and its median taken: 3,125 of five values, 46,656 of six."""

    def median(resample: tuple[float, ...]) -> float:
        ordered = sorted(resample)
        low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
        return low if low == high else 0.0 if math.isinf(low) and math.isinf(high) else (low + high) / 2

    medians = sorted(map(median, itertools.product(values, repeat=len(values))))
    outside = math.ceil(0.025 * len(medians))
    assert estimate(values).interval == (medians[outside - 1], medians[-outside])


@pytest.mark.parametrize("count", [5, 8, 10, 25])
def test_the_chances_of_resamples_are_those_of_drawing(count: int) -> None:
    draws = np.sort(np.random.default_rng(0).integers(0, count, (200_000, count)), axis=1)
    found = np.zeros((count, count))
    np.add.at(found, (draws[:, (count - 1) // 2], draws[:, count // 2]), 1 / len(draws))
    chances = np.zeros((count, count))
    for i, j, chance in _middles_of_resamples(count):
        chances[i, j] = chance
    assert chances.sum() == pytest.approx(1)
    assert chances.min() >= 0
    np.testing.assert_allclose(found, chances, atol=5 * 0.5 / math.sqrt(len(draws)))


def test_an_interval_may_end_at_more_than_t() -> None:
    result = estimate([10, 20, 30, INF, INF])
    assert result.median == 30
    assert result.interval == (10, INF)
    assert estimate([INF] * 5).interval == (INF, INF)


def test_what_is_no_number_is_the_largest_of_all() -> None:
    result = estimate([math.nan, 4, INF, 1, 2])
    assert result.median == 4
    assert result.interval is not None
    assert result.interval[0] == 1
    assert math.isnan(result.interval[1])


def test_differences_are_taken_seed_by_seed() -> None:
    assert paired_differences([1.0, 5.0, 3.0], [2.0, 1.0, 3.0]) == [-1.0, 4.0, 0.0]
    first, second, third = paired_differences([INF, 1.0, INF], [1.0, INF, INF])
    assert (first, second) == (INF, -INF)
    assert math.isnan(third)
    with pytest.raises(ValueError, match="zip"):
        paired_differences([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("0", [0]), ("0..4", [0, 1, 2, 3, 4]), ("0,1,7", [0, 1, 7]), ("0..2, 7, 9..10", [0, 1, 2, 7, 9, 10])],
)
def test_seeds(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


# --- tables ----------------------------------------------------------------------------------------------------------


def cells_of(table: Any) -> list[list[str]]:
    return [list(row) for row in zip(*(column.cells for column in table.columns), strict=True)]


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch, tiny: Any, tmp_path: Path) -> Any:
    """Result tables of outcomes that are given, not run."""

    def tables(algorithms: list[str], outcomes: dict[tuple[str, int], Outcome], target: float | None) -> Any:
        seeds = sorted({seed for _, seed in outcomes})
        recipe = tiny({} if target is None else {"evaluation.target": target})
        comparison = begin_comparison(recipe, algorithms, seeds, out=tmp_path / "compare")
        paths = {job.path: (job.algorithm, job.seed) for job in comparison.jobs}

        class Fake:
            def __init__(self, path: Path) -> None:
                self.key = paths[Path(path)]
                self.recipe = comparison.jobs[0].recipe
                self.metric = ACCURACY

        monkeypatch.setattr("fedstrata.runs.comparison.Run", Fake)
        monkeypatch.setattr("fedstrata.runs.comparison.outcome", lambda run: outcomes[run.key])
        return [cells_of(table) for table in result_tables(comparison)]

    return tables


def test_below_five_seeds_every_value_is_shown(faked: Any) -> None:
    outcomes = {
        ("fedavg", 0): Outcome(0.5, 10, 2_000, 1_000, 20),
        ("fedavg", 1): Outcome(0.25, INF, 2_000, INF, 20),
        ("fedadp", 0): Outcome(0.75, 7, 2_000, 700, 20),
        ("fedadp", 1): Outcome(0.5, 20, 2_000, 2_000, 20),
    }
    values, differences = faked(["fedavg", "fedadp"], outcomes, 0.9)
    assert values == [
        ["fedavg", "0.5000, 0.2500", "10, >20", "1 kB, not reached", "2 kB, 2 kB"],
        ["fedadp", "0.7500, 0.5000", "7, 20", "700 B, 2 kB", "2 kB, 2 kB"],
    ]
    (row,) = differences
    assert row[:2] == ["fedadp", "+0.2500, +0.2500"]
    assert row[2] == "−3, fedadp only"
    assert row[3] == "−300 B, fedadp only"
    assert row[4] == "+0 B, +0 B"


def test_from_five_seeds_on_medians_and_intervals(faked: Any) -> None:
    rounds = [10, 12, INF, 14, INF]
    outcomes = {("fedavg", s): Outcome(0.1 * s, r, 1_000, r * 100, 20) for s, r in enumerate(rounds)}
    outcomes |= {("fedadp", s): Outcome(0.1 * s + 0.5, 5, 1_000, 500, 20) for s in range(5)}
    values, differences = faked(["fedavg", "fedadp"], outcomes, 0.9)
    assert values[0][1:3] == ["0.2000 [0.0000, 0.4000]", "14 [10, >20]"]
    assert values[1][2] == "5 [5, 5]"
    assert differences[0][1] == "+0.5000 [+0.5000, +0.5000]"
    assert differences[0][2].startswith("−9 [fedadp only, −5]")


def test_a_metric_that_is_no_number_is_the_worst(faked: Any) -> None:
    """Of accuracies 0.9, 0.8 and three that are none, the median is none, and not the best."""
    outcomes = {("fedavg", s): Outcome(m, None, 1_000, None, 20) for s, m in enumerate([0.9, 0.8, -INF, -INF, -INF])}
    outcomes |= {("fedadp", s): Outcome(0.5, None, 1_000, None, 20) for s in range(5)}
    values, differences = faked(["fedavg", "fedadp"], outcomes, None)
    assert values[0][1] == "no number [no number, 0.9000]"
    assert differences[0][1] == "fedadp only [−0.4000, fedadp only]"


def test_without_a_target_there_is_no_column_for_it(faked: Any) -> None:
    outcomes = {("fedavg", 0): Outcome(0.5, None, 3_000_000, None, 20)}
    (values,) = faked(["fedavg"], outcomes, None)
    assert values == [["fedavg", "0.5000", "3 MB"]]


# --- directories -----------------------------------------------------------------------------------------------------


def test_comparisons_that_add_seeds_at_once_lose_none(tiny: Any, tmp_path: Path) -> None:
    def add(seeds: list[int]) -> None:
        for seed in seeds:
            _claim(tmp_path / "compare", "tiny", "request", ["fedavg"], [seed])

    jobs = [mp.get_context("fork").Process(target=add, args=(list(range(k, 80, 4)),)) for k in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0] * 4
    assert json.loads((tmp_path / "compare" / "compare.json").read_text())["seeds"] == list(range(80))


def test_outcomes_of_real_runs(tiny: Any, tmp_path: Path) -> None:
    run = fedstrata.run(tiny({"evaluation.target": 0.0001}), out=tmp_path / "reached")
    found = outcome(run)
    assert found == Outcome(
        metric=run.curve()[-1][1],
        rounds_to_target=1,
        upload=run.history()[-1]["upload_total"],
        upload_to_target=run.history()[0]["upload_total"],
        limit=3,
    )
    missed = outcome(fedstrata.run(tiny({"evaluation.target": 1.0}), out=tmp_path / "missed"))
    assert (missed.rounds_to_target, missed.upload_to_target) == (INF, INF)
    free = outcome(fedstrata.run(tiny(), out=tmp_path / "free"))
    assert (free.rounds_to_target, free.upload_to_target) == (None, None)


def test_runs_are_paired_by_seed(tiny: Any, tmp_path: Path) -> None:
    """Runs of one seed start from the same weights and data."""
    comparison = begin_comparison(tiny({"training.rounds": 1}), ["fedavg", "fedldf:n=2"], [0, 1], out=tmp_path / "c")
    assert [(job.algorithm, job.seed) for job in comparison.jobs] == [
        ("fedavg", 0),
        ("fedldf:n=2", 0),
        ("fedavg", 1),
        ("fedldf:n=2", 1),
    ]
    for job in comparison.jobs:
        assert len(list(run_job(job))) == 1
    tables = {(c.algorithm, c.seed): Run(c.path).about.data.table for c in comparison.jobs}
    assert tables["fedavg", 0] == tables["fedldf:n=2", 0] != tables["fedavg", 1]


def test_a_comparison_goes_on_where_it_was(recipe: Any, cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "compare"
    arguments = ("compare", recipe({"evaluation.target": 0.9}), "-a", "fedavg,fedldf:n=2", "--out", out)
    answer = cli(*arguments, "--seeds", "0")
    assert answer.code == 0, answer.err
    stamps = {p: p.stat().st_mtime_ns for p in out.rglob("*.safetensors")}
    assert len(stamps) == 2 * (3 + 2)
    again = cli(*arguments, "--seeds", "0")
    assert again.code == 0
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*.safetensors")} == stamps
    assert "round 3/3" not in again.out
    assert again.out.split("┏", 1)[1] == answer.out.split("┏", 1)[1]
    # one run is set back by a round, and a seed is added: only these are run
    half = out / "fedldf-n=2" / "seed-0"
    (half / "checkpoints" / "000003.safetensors").unlink()
    more = cli(*arguments, "--seeds", "0,1", "--workers", "2")
    assert more.code == 0, more.err
    changed = {p for p, stamp in stamps.items() if p.stat().st_mtime_ns != stamp}
    assert changed == {half / "checkpoints" / "000003.safetensors", half / "layers" / "000003.safetensors"}
    assert (out / "fedavg" / "seed-1" / "run.json").exists()
    assert "2 seeds" in more.out
    assert "paired by seed" in more.out
    assert ">3, >3" in more.out


def test_algorithms_are_given_one_by_one_or_with_commas(recipe: Any, cli: Any, tmp_path: Path) -> None:
    for at, spelling in enumerate((["-a", "fedavg", "-a", "fedprox", "-a", "hdfl"], ["-a", "fedavg,fedprox,hdfl"])):
        out = tmp_path / f"compare-{at}"
        answer = cli("compare", recipe({"training.rounds": 1}), *spelling, "--out", out)
        assert answer.code == 0, answer.err
        assert sorted(path.name for path in out.iterdir() if path.is_dir()) == ["fedavg", "fedprox", "hdfl"]
        assert json.loads((out / "compare.json").read_text())["algorithms"] == ["fedavg", "fedprox", "hdfl"]


def test_the_results_have_every_seed_of_a_comparison_that_grows(recipe: Any, cli: Any, tmp_path: Path) -> None:
    out, path = tmp_path / "compare", recipe({"training.rounds": 1})
    for seeds in ("0,1", "5", "1"):
        answer = cli("compare", path, "-a", "fedavg,fedprox", "--out", out, "--seeds", seeds)
        assert answer.code == 0, answer.err
    with (out / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["algorithm"], row["seed"]) for row in rows] == [
        (algorithm, seed) for seed in "015" for algorithm in ("fedavg", "fedprox")
    ]
    for row in rows:
        run = Run(out / row["algorithm"] / f"seed-{row['seed']}")
        assert (float(row["value"]), int(row["upload"])) == (run.summary()["accuracy"], run.summary()["upload"])
        assert (row["metric"], row["rounds"], row["rounds_to_target"]) == ("accuracy", "1", "")
    assert "3 seeds" in answer.out, "the tables have them, too"
    assert f"{cli('show', out).out}as numbers: " in answer.out


def test_a_comparison_is_no_run(cli: Any, tiny: Any, tmp_path: Path) -> None:
    begin_comparison(tiny(), ["fedavg"], [0], out=tmp_path / "c")
    for command in (["run", "--resume", tmp_path / "c"], ["export", tmp_path / "c", tmp_path / "m.safetensors"]):
        answer = cli(*command)
        assert answer.code == 2
        assert "is no run directory: it is a comparison, which has its runs below it" in answer.err


def test_an_interrupted_comparison(tiny: Any, tmp_path: Path, same_run: Any) -> None:
    def jobs(out: str) -> Any:
        return begin_comparison(tiny(), ["fedavg", "fedadp"], [0], out=tmp_path / out).jobs

    for job in jobs("whole"):
        list(run_job(job))
    first, second = jobs("stopped")
    list(run_job(first))
    lines: Any = run_job(second)
    next(lines)
    lines.close()
    assert not Run(second.path).finished()
    first, second = jobs("stopped")
    assert list(run_job(first)) == []
    assert [line["round"] for line in run_job(second)] == [2, 3]
    for name in ("fedavg", "fedadp"):
        same_run(tmp_path / "whole" / name / "seed-0", tmp_path / "stopped" / name / "seed-0")


def test_another_request_is_refused(tiny: Any, tmp_path: Path) -> None:
    begin_comparison(tiny(), ["fedavg"], [0], out=tmp_path / "c")
    begin_comparison(tiny(), ["fedavg"], [1, 2], out=tmp_path / "c")  # more seeds are the same request
    begin_comparison(tiny({"engine.workers": 2}), ["fedavg"], [0], out=tmp_path / "c")
    for table, algorithms in (
        (tiny(), ["fedavg", "fedadp"]),
        (tiny(), ["fedprox"]),
        (tiny({"training.rounds": 4}), ["fedavg"]),
        (tiny({"training.lr": 0.2}), ["fedavg"]),
    ):
        with pytest.raises(RunDirectoryError, match="holds another comparison; choose another --out"):
            begin_comparison(table, algorithms, [0], out=tmp_path / "c")
    (tmp_path / "c" / "compare.json").write_text("{")
    with pytest.raises(RunDirectoryError, match=r"compare\.json is damaged"):
        begin_comparison(tiny(), ["fedavg"], [0], out=tmp_path / "c")


def test_a_run_of_another_recipe_is_refused(tiny: Any, tmp_path: Path) -> None:
    (job,) = begin_comparison(tiny(), ["fedavg"], [0], out=tmp_path / "c").jobs
    fedstrata.run(load(tiny({"training.lr": 0.3})), out=job.path)
    with pytest.raises(RunDirectoryError, match="was run with another recipe"):
        list(run_job(job))


def test_what_a_recipe_is_called_does_not_matter(tiny: Any, tmp_path: Path) -> None:
    (job,) = begin_comparison(tiny(), ["fedavg"], [0], out=tmp_path / "c").jobs
    rounds: Any = run_job(job)
    next(rounds)
    rounds.close()
    table = tiny({"name": "other", "description": "told otherwise", "record.layers": False})
    (again,) = begin_comparison(table, ["fedavg"], [0], out=tmp_path / "c").jobs
    assert again.path == job.path
    assert [line["round"] for line in run_job(again)] == [2, 3]


def test_the_same_request_finds_its_directory(
    recipe: Any, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = recipe({"training.rounds": 1})
    for options in ((), (), ("--workers", "2"), ("--seeds", "0,1")):
        assert cli("compare", path, "-a", "fedavg", *options).code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("compare-tiny-")
    assert cli("compare", path, "-a", "fedprox").code == 0
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_nothing_to_run(tiny: Any, tmp_path: Path) -> None:
    for algorithms, seeds in (([], [0]), (["fedavg"], []), (["fedavg", "fedavg"], [0]), (["fedavg"], [1, 1])):
        with pytest.raises(RecipeError):
            begin_comparison(tiny(), algorithms, seeds, out=tmp_path / "c")
    assert not (tmp_path / "c").exists()
