"""The report's numbers: that they are the run directories', and that any of them fit on one page."""

from __future__ import annotations

import base64
import fnmatch
import json
import math
import re
import statistics
import tomllib
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import fedstrata
from fedstrata.report import collect, content, render
from fedstrata.report.packing import pack
from fedstrata.runs.reader import Run
from tests.support.make_runs import QUANTITIES, make_run

REPORT = Path(fedstrata.__file__).parent / "report"
LIMIT = 2_000_000


def unpacked(block: Any, count: int) -> list[float]:
    """The inverse of `pack`, slowly and with exact decimals."""
    if not isinstance(block, str):
        return [math.nan if block is None else block] * count
    raw = base64.b64decode(block)
    assert len(raw) == 3 * count
    values = []
    for at in range(count):
        code = int.from_bytes(raw[3 * at : 3 * at + 3], "little")
        if code == 0:
            values.append(math.nan)
            continue
        power, mantissa = divmod((code - 1) // 2, 100_000)
        value = Decimal(mantissa).scaleb(power - 44)
        values.append(float(-value if (code - 1) % 2 else value))
    return values


def quantity(series: dict[str, Any], run: dict[str, Any], name: str) -> np.ndarray:
    """A packed quantity as rows × layers."""
    layers = len(series["layers"])
    rows = sum(map(len, run["record"]["clients"]))
    return np.array(unpacked(run["record"][name], rows * layers)).reshape(rows, layers)


def on_page(page: str) -> dict[str, Any]:
    """What a page holds."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


# --- packing ---------------------------------------------------------------------------------------------------------

ordinary = st.floats(1e-39, 1e41) | st.floats(-1e41, -1e-39) | st.just(0.0)


@given(st.lists(ordinary | st.just(math.nan), min_size=2, max_size=20))
def test_five_digits_are_kept(values: list[float]) -> None:
    for value, back in zip(values, unpacked(pack(np.array(values)), len(values)), strict=True):
        if math.isnan(value):
            assert math.isnan(back)
        else:  # half a unit of the fifth digit, of which the first is at least 1
            assert abs(back - value) <= 0.5e-4 * (1 + 1e-9) * abs(value)
            assert len(Decimal(repr(back)).normalize().as_tuple().digits) <= 5


@pytest.mark.parametrize(
    ("value", "kept"),
    [(0.1, 0.1), (123456.0, 123460.0), (-2.5, -2.5), (9.99996, 10.0), (99999.0, 99999.0), (1e-50, 0.0), (0.0, 0.0)],
)
def test_packed_by_hand(value: float, kept: float) -> None:
    assert unpacked(pack(np.array([value, 7.0])), 2) == [kept, 7.0]


def test_what_is_the_same_everywhere_takes_one_number() -> None:
    assert pack(np.full((3, 4), 0.25)) == 0.25
    assert pack(np.array([math.nan, math.inf])) is None
    assert unpacked(pack(np.array([math.inf, 1.0])), 2)[1] == 1.0
    assert math.isnan(unpacked(pack(np.array([math.inf, 1.0])), 2)[0])
    assert unpacked(pack(np.array([1e60, 1.0])), 2)[0] == 9.9999e42  # the most there is


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_every_number_is_the_records(tmp_path: Path) -> None:
    make_run(tmp_path / "run", clients=6, sampled=3, rounds=4, layers=("a", "b", "c"))
    report = collect([tmp_path / "run"])
    series = report["series"][0]
    run = series["runs"][0]
    assert report["summary"] is None
    assert [layer["name"] for layer in series["layers"]] == ["a", "b", "c"]
    assert run["shown"] == [1, 2, 3, 4]
    for name in QUANTITIES:
        table = quantity(series, run, name)
        for round in range(1, 5):
            stored = load_file(tmp_path / "run" / "layers" / f"{round:06d}.safetensors")
            assert run["record"]["clients"][round - 1] == stored["clients"].tolist()
            ours = table[3 * (round - 1) : 3 * round]
            rounded = [[float(f"{value:.5g}") for value in row] for row in stored[name]]
            np.testing.assert_allclose(ours, rounded, rtol=1e-12)


def test_relative_divergence_is_divergence_by_norm(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    series = collect([tmp_path / "run"])["series"][0]
    run = series["runs"][0]
    stored = [load_file(file) for file in sorted((tmp_path / "run" / "layers").iterdir())]
    expected = np.concatenate([round["divergence"] / round["norm"] for round in stored])
    np.testing.assert_allclose(quantity(series, run, "relative"), expected, rtol=6e-5)


def test_of_a_real_run(tmp_path: Path, tiny: Any) -> None:
    run = fedstrata.run(tiny({"evaluation.target": 0.99}), algorithm="fedlayerwise", out=tmp_path / "run")
    report = collect([tmp_path / "run"])
    series = report["series"][0]
    ours, summary = series["runs"][0], run.summary()
    assert (series["name"], ours["seed"], ours["rounds"], ours["finished"]) == ("fedlayerwise", 0, 3, True)
    assert series["outcome"]["final"]["values"] == [pytest.approx(summary["accuracy"], rel=1e-4)]
    assert series["outcome"]["roundsToTarget"]["values"] == [None]  # 0.99 after three rounds: no
    curve = series["curves"][0]
    assert curve["label"] == "accuracy on test"
    assert curve["rounds"] == [round for round, _ in run.curve()]
    assert curve["median"] == pytest.approx([value for _, value in run.curve()], rel=1e-4)
    up = np.array(unpacked(ours["bytes"]["up"], 6)).reshape(3, 2)
    np.testing.assert_allclose(up, [line["bytes"]["up"] for line in run.history()], rtol=1e-4)
    counts = report["partitions"][ours["partition"]]["counts"]
    assert counts == run.about.data.table
    assert [sum(row) for row in counts] == [12] * 4


def test_curves_below_five_seeds_are_medians_and_every_seed(tmp_path: Path) -> None:
    values = {0: [0.1, 0.2, 0.9], 1: [0.3, 0.4, 0.8], 2: [0.2, 0.6, 0.7]}
    for seed, accuracy in values.items():
        make_run(tmp_path / str(seed), seed=seed, accuracy=accuracy)
    series = collect([tmp_path / str(seed) for seed in values])["series"]
    assert len(series) == 1
    curve = series[0]["curves"][0]
    assert curve["median"] == [0.2, 0.4, 0.8]
    assert curve["low"] is None
    assert [seed["values"] for seed in curve["seeds"]] == list(values.values())
    # 100 + 101 and 8 of feedback in the first round, then 200 + 201 + 8, then 300 + 301 + 8
    assert curve["upload"] == [209, 618, 1227]
    assert series[0]["outcome"]["final"] == {"values": [0.9, 0.8, 0.7], "median": 0.8, "interval": None}


def test_from_five_seeds_on_there_is_an_interval(tmp_path: Path) -> None:
    last = [0.5, 0.6, 0.7, 0.8, 0.9]
    for seed, value in enumerate(last):
        make_run(tmp_path / str(seed), seed=seed, accuracy=[0.4, 0.4, value])
    curve = collect([tmp_path / str(seed) for seed in range(5)])["series"][0]["curves"][0]
    assert curve["seeds"] == []
    # the extremes: the smallest of five values is the median of five draws in 5.8 % of cases, more than 2.5 %
    assert (curve["low"][2], curve["median"][2], curve["high"][2]) == (0.5, 0.7, 0.9)
    assert (curve["low"][0], curve["median"][0], curve["high"][0]) == (0.4, 0.4, 0.4)


def test_a_seed_that_diverged_counts_as_the_worst(tmp_path: Path) -> None:
    for seed, value in enumerate([0.9, None, None]):
        make_run(tmp_path / str(seed), seed=seed, accuracy=[0.5, 0.5, value])
    series = collect([tmp_path / str(seed) for seed in range(3)])["series"][0]
    assert series["curves"][0]["median"] == [0.5, 0.5, None]
    assert series["outcome"]["final"] == {"values": [0.9, None, None], "median": None, "interval": None}


def test_medians_only_over_rounds_that_all_seeds_have(tmp_path: Path) -> None:
    make_run(tmp_path / "whole", seed=0)
    make_run(tmp_path / "part", seed=1, done=2)
    make_run(tmp_path / "fresh", seed=2, done=0)
    series = collect([tmp_path / name for name in ("whole", "part", "fresh")])["series"][0]
    assert series["curves"][0]["rounds"] == [1, 2]
    assert [run["finished"] for run in series["runs"]] == [True, False, False]
    assert series["outcome"]["counted"] == [0]  # what is at its end
    assert render(collect([tmp_path / "fresh"]))


def test_series_are_told_apart(tmp_path: Path) -> None:
    make_run(tmp_path / "a", algorithm="fedldf:n=2")
    make_run(tmp_path / "b", algorithm="fedldf:n=3")
    make_run(tmp_path / "c", algorithm="fedavg")
    make_run(tmp_path / "d", algorithm="fedavg")  # the same seed again: another series, not a second seed
    make_run(tmp_path / "e", algorithm="fedprox", settings={"training.lr": 0.5})
    report = collect([tmp_path / name for name in "abcde"] + [tmp_path / "a"])
    names = [series["name"] for series in report["series"]]
    assert names == ["fedldf, algorithm.n = 2", "fedldf, algorithm.n = 3", "fedavg", "fedavg (2)", "fedprox"]
    assert [len(series["runs"]) for series in report["series"]] == [1] * 5
    make_run(tmp_path / "f", algorithm="fedprox", name="other")
    make_run(
        tmp_path / "g",
        algorithm="fedprox",
        settings={"training.lr": 0.1, "training.epochs": 7, "layers.grouping": "tensor"},
    )
    names = [series["name"] for series in collect([tmp_path / "e", tmp_path / "f"])["series"]]
    assert names == ["fedprox on made", "fedprox on other"]
    names = [series["name"] for series in collect([tmp_path / "e", tmp_path / "g"])["series"]]
    assert names == ["fedprox in e", "fedprox in g"]
    # Words about a run are no difference between runs; one of many directories is named by where they differ.
    make_run(
        tmp_path / "h", algorithm="fedprox", settings={"training.lr": 0.5, "training.epochs": 3, "description": "d"}
    )
    names = [series["name"] for series in collect([tmp_path / "e", tmp_path / "h"])["series"]]
    assert names == ["fedprox, training.epochs = 1", "fedprox, training.epochs = 3"]
    settings = {"training.lr": 0.1, "training.epochs": 7, "layers.grouping": "tensor"}
    make_run(tmp_path / "study" / "cell-2" / "seed-0", algorithm="fedprox")
    make_run(tmp_path / "study" / "cell-10" / "seed-0", algorithm="fedprox", settings=settings)
    names = [series["name"] for series in collect([tmp_path / "study"])["series"]]
    assert names == ["fedprox in cell-2", "fedprox in cell-10"]


def test_a_comparison_as_far_as_it_got(tmp_path: Path, recipe: Any, cli: Any) -> None:
    answer = cli("compare", recipe(), "-a", "fedavg,fedldf:n=2", "--seeds", "0,1", "--out", tmp_path / "cmp")
    assert answer.code == 0, answer.err
    report = collect([tmp_path / "cmp"])
    assert [series["name"] for series in report["series"]] == ["fedavg", "fedldf:n=2"]
    for series in report["series"]:
        assert [run["seed"] for run in series["runs"]] == [0, 1]
        finals = [Run(run["path"]).summary()["accuracy"] for run in series["runs"]]
        assert series["outcome"]["final"]["median"] == pytest.approx(statistics.median(finals), rel=1e-4)
    assert len(report["partitions"]) == 2  # one per seed, shared by the algorithms
    for line in (tmp_path / "cmp" / "fedldf-n=2" / "seed-1").glob("checkpoints/*3.safetensors"):
        line.unlink()
    runs = collect([tmp_path / "cmp"])["series"][1]["runs"]
    assert [run["finished"] for run in runs] == [True, False]


def test_lost_replies(tmp_path: Path) -> None:
    lost = {1: [(2, "dropped out")], 3: [(2, "failed: ValueError: no: sense (mine.py:3)"), (0, "dropped out")]}
    make_run(tmp_path / "run", lost=lost)
    trouble = collect([tmp_path / "run"])["series"][0]["runs"][0]["trouble"]
    assert (trouble["asked"], trouble["lost"], trouble["troubled"]) == (12, 3, 2)
    assert trouble["clients"][0] == {
        "client": 2,
        "sampled": 3,
        "partial": 0,
        "lost": {"dropped out": 1, "failed": 1},
        "last": "round 3: failed: ValueError: no: sense (mine.py:3)",
    }


def test_a_large_partition_shows_some_clients_and_the_spread_of_all(tmp_path: Path) -> None:
    table = [[client, 1] for client in range(300)]
    make_run(tmp_path / "run", clients=300, sampled=2, data={"table": table, "class_names": ["x", "y"]})
    partition = collect([tmp_path / "run"])["partitions"][0]
    assert partition["counts"] == table[:200]
    assert partition["clients"] == 300
    assert partition["samples"] == [1, 150.5, 300]
    assert partition["classesHeld"] == [1, 2, 2]


# --- size ------------------------------------------------------------------------------------------------------------


def test_twenty_clients_twenty_layers_hundred_rounds_in_two_megabytes_with_every_client(tmp_path: Path) -> None:
    names = [f"features.{at}.weight" for at in range(20)]
    make_run(tmp_path / "run", clients=20, layers=names, rounds=100)
    report = collect([tmp_path / "run"])
    assert report["summary"] is None
    assert report["every"] == 1
    assert len(report["series"][0]["runs"][0]["record"]["clients"]) == 100
    assert len(render(report).encode()) <= LIMIT


def test_beyond_that_clients_are_summarised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "BUDGET", 4 * 8 * 2 * 6 * 3)  # three rounds, two layers, six numbers for clients
    make_run(tmp_path / "run", clients=7)
    report = collect([tmp_path / "run"])
    assert report["summary"] == ["max", "75 %", "median", "25 %", "min", "mean"]
    assert report["every"] == 1
    run = report["series"][0]["runs"][0]
    ours = np.array(unpacked(run["record"]["divergence"], 3 * 6 * 2)).reshape(3, 6, 2)
    for at in range(3):
        values = load_file(tmp_path / "run" / "layers" / f"{at + 1:06d}.safetensors")["divergence"]
        for layer in range(2):
            known = sorted(value for value in values[:, layer] if not math.isnan(value))
            quarters = statistics.quantiles(known, n=4, method="inclusive")
            expected = [known[-1], quarters[2], quarters[1], quarters[0], known[0], statistics.mean(known)]
            np.testing.assert_allclose(ours[at, :, layer], expected, rtol=6e-5)


def test_then_rounds_are_thinned_and_no_byte_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "BUDGET", 4 * 8 * 2 * 6 * 3)
    make_run(tmp_path / "run", clients=7, rounds=7)
    report = collect([tmp_path / "run"])
    assert report["every"] == 3  # 7 rounds where 3 fit
    run = report["series"][0]["runs"][0]
    assert run["shown"] == [3, 6, 7]
    # 100 t + l in round t: 100 + 200 + 300, 400 + 500 + 600, 700; and l as often as there are rounds
    assert unpacked(run["bytes"]["up"], 6) == [600, 603, 1500, 1503, 700, 701]
    assert unpacked(run["bytes"]["feedback"], 3) == [24, 24, 8]


@pytest.mark.slow
def test_many_large_runs_stay_on_one_page(tmp_path: Path) -> None:
    names = [f"layer{at}" for at in range(20)]
    for seed in range(4):
        make_run(tmp_path / str(seed), clients=25, layers=names, rounds=100, seed=seed)
    report = collect([tmp_path / str(seed) for seed in range(4)])
    assert report["summary"] is not None
    assert len(render(report).encode()) <= LIMIT


# --- the page --------------------------------------------------------------------------------------------------------

EVIL = "</script><script>hacked = 1</script><img src=x onerror='hacked = 1'>&amp;{{script}}"


def test_names_cannot_become_markup(tmp_path: Path) -> None:
    make_run(tmp_path / "run", layers=(EVIL, "b"), data={"table": [[1], [2], [3], [4]], "class_names": [EVIL]})
    report = collect([tmp_path / "run"])
    report["title"] = EVIL
    page = render(report)
    assert "<img" not in page
    assert page.count("</script>") == 2
    assert page.count('"use strict";') == 1  # the script was not put in a second time by a name
    assert on_page(page)["series"][0]["layers"][0]["name"] == EVIL


def test_the_page_refers_to_nothing_outside(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    page = render(collect([tmp_path / "run"]))
    addresses = set(re.findall(r"[a-z]+://[^\s\"'<]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a vocabulary, which nothing fetches
    assert "default-src 'none'" in page
    assert "unsafe" not in page
    assert page == render(collect([tmp_path / "run"]))


def test_the_template_is_part_of_the_package() -> None:
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["fedstrata"]
    for file in REPORT.iterdir():
        if file.suffix in (".html", ".css", ".js"):
            assert any(fnmatch.fnmatch(f"report/{file.name}", pattern) for pattern in patterns), file


# --- the command -----------------------------------------------------------------------------------------------------


def test_command(tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "one")
    make_run(tmp_path / "two", algorithm="fedprox", done=1)
    answer = cli("report", "one", "two")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("wrote report.html (")
    assert [series["name"] for series in on_page(Path("report.html").read_text())["series"]] == ["fedavg", "fedprox"]
    assert cli("report", "one", "--out", "report.html").code == 0  # a report may be written again
    assert len(on_page(Path("report.html").read_text())["series"]) == 1
    assert cli("report", "one", "--out", "new/page.html").code == 0
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert cli("report", "one", "--open").code == 0
    assert opened == [(tmp_path / "report.html").as_uri()]


def test_without_a_record_of_layers(tmp_path: Path, cli: Any, tiny: Any) -> None:
    fedstrata.run(tiny({"record.layers": False}), out=tmp_path / "run")
    assert cli("report", tmp_path / "run", "--out", tmp_path / "page.html").code == 0
    assert on_page((tmp_path / "page.html").read_text())["series"][0]["runs"][0]["record"] is None


def damage_shape(run: Path) -> None:
    file = run / "layers" / "000002.safetensors"
    with safe_open(file, "numpy") as opened:
        metadata = opened.metadata()
    save_file({**load_file(file), "angle": np.zeros((4, 7))}, file, metadata)


def damage_info(run: Path) -> None:
    info = json.loads((run / "run.json").read_text())
    del info["layers"][0]["numbers"]
    (run / "run.json").write_text(json.dumps(info))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: (run / "run.json").unlink(), "no run directory"),
        (lambda run: (run / "layers" / "000002.safetensors").unlink(), "no record of the layers in round 2"),
        (damage_shape, "000002.safetensors is damaged: angle is float64 [4, 7], expected float64 [4, 2]"),
        (damage_info, "run.json is damaged: layers.0.numbers: missing"),
        (lambda run: (run / "page.html").mkdir(), "is not overwritten"),
        (lambda run: (run / "page.html").write_text("my notes"), "is not overwritten"),
    ],
    ids=["no run", "record gone", "shape", "field gone", "a folder", "not a report"],
)
def test_errors_are_one_line(tmp_path: Path, cli: Any, damage: Any, words: str) -> None:
    make_run(tmp_path / "run")
    damage(tmp_path / "run")
    answer = cli("report", tmp_path / "run", "--out", tmp_path / "run" / "page.html")
    assert answer.code == 2, answer
    assert answer.err.count("\n") == 1
    assert words in answer.err
    assert not (tmp_path / "run" / "page.html").is_file() or words == "is not overwritten"
