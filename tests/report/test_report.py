"""The report's numbers: that they are the run directories', and that any of them fit on one page."""

from __future__ import annotations

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
from fedstrata.plots.quantities import LAYERED
from fedstrata.plots.tables import SUMMARY, Table
from fedstrata.report import View, collect, render, view, write
from fedstrata.report.packing import pack, packed
from fedstrata.runs.reader import Run
from tests.support.make_runs import QUANTITIES, make_run
from tests.support.views import cells, columns, on_page, texts, unpacked

REPORT = Path(fedstrata.__file__).parent / "report"
LIMIT = 3_000_000
"""Bytes of a page, of which Vega has 0.9 million."""


def looked_at(*paths: Path) -> View:
    return View.of(list(paths))


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


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-3, 3), st.sampled_from([0.5, -1.25, 1e9])), max_size=20))
def test_a_table_comes_back(rows: list[tuple[str, int, float]]) -> None:
    names, whole, others = ([row[at] for row in rows] for at in range(3))
    table = Table({"name": names, "whole": np.array(whole, dtype=float), "other": np.array(others, dtype=float)})
    back = columns(json.loads(json.dumps(packed(table))))
    assert back == {"name": names, "whole": whole, "other": others}


def test_what_comes_in_turn_is_said_once() -> None:
    """Layers × rounds: a layer's name is there once, and so is a round."""
    table = Table({"layer": ["a"] * 3 + ["b"] * 3, "round": np.array([1.0, 2, 3, 1, 2, 3])})
    assert packed(table)["columns"] == {"layer": {"of": ["a", "b"], "each": 3}, "round": {"of": [1, 2, 3], "each": 1}}


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_every_number_is_the_records(tmp_path: Path) -> None:
    make_run(tmp_path / "run", clients=6, sampled=3, rounds=4, layers=("a", "b", "c"))
    shown = looked_at(tmp_path / "run")
    assert not shown.summarised
    assert shown.outline()["arms"][0]["layers"] == ["a", "b", "c"]
    for name in QUANTITIES:
        part = shown.part(f"cells/0/{name}")
        index, table = columns(part), cells(part)
        for round in range(1, 5):
            stored = load_file(tmp_path / "run" / "layers" / f"{round:06d}.safetensors")
            rows = [at for at, when in enumerate(index["round"]) if when == round]
            assert [index["client"][at] for at in rows] == [str(client) for client in stored["clients"].tolist()]
            assert {index["since"][at] for at in rows} == {round - 1}
            expected = stored[name] * {"°": 180 / math.pi, "%": 100}.get(LAYERED[name].unit, 1)
            np.testing.assert_allclose(table[rows], expected, rtol=6e-5)


def test_relative_divergence_is_divergence_by_norm(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    stored = [load_file(file) for file in sorted((tmp_path / "run" / "layers").iterdir())]
    expected = np.concatenate([100 * round["divergence"] / round["norm"] for round in stored])
    np.testing.assert_allclose(cells(looked_at(tmp_path / "run").part("cells/0/relative")), expected, rtol=6e-5)


def test_all_clients_of_a_layer_are_one_number(tmp_path: Path) -> None:
    """The median; of weights the largest, of what was sent the mean."""
    make_run(tmp_path / "run", clients=7)
    shown = looked_at(tmp_path / "run")
    over = {"divergence": statistics.median, "weight": max, "mask": lambda known: 100 * statistics.mean(known)}
    for name, expected in over.items():
        table = columns(shown.part(f"over/0/{name}"))
        found = dict(zip(zip(table["layer"], table["round"], strict=True), table["value"], strict=True))
        for round in (1, 2, 3):
            stored = load_file(tmp_path / "run" / "layers" / f"{round:06d}.safetensors")[name]
            for at, layer in enumerate(("first", "second")):
                known = [value for value in stored[:, at].tolist() if not math.isnan(value)]
                assert found[layer, round] == pytest.approx(expected(known), rel=1e-4)


def test_of_a_real_run(tmp_path: Path, tiny: Any) -> None:
    run = fedstrata.run(tiny({"evaluation.target": 0.99}), algorithm="fedlayerwise", out=tmp_path / "run")
    shown, summary = looked_at(tmp_path / "run"), run.summary()
    part = shown.part("outcome")
    row = dict(zip(part["columns"], texts(part)[0], strict=True))
    assert (row["algorithm"], row["seeds"], row["rounds"]) == ("fedlayerwise", "0", "3")
    assert float(row["accuracy"]) == pytest.approx(summary["accuracy"], abs=5e-5)
    assert row["rounds to 0.99"] == ">3"
    assert row["upload to 0.99"] == "not reached"
    assert shown.labels[0] == "accuracy on test"
    curve = columns(shown.part("measured/0"))
    assert curve["round"] == [round for round, _ in run.curve()]
    assert curve["value"] == pytest.approx([value for _, value in run.curve()], rel=1e-4)
    sent = columns(shown.part("sent/0/up"))
    up = np.array([sent["value"][at] for at in range(len(sent["value"])) if sent["layer"][at] != "feedback"])
    np.testing.assert_allclose(up.reshape(2, 3).T, [line["bytes"]["up"] for line in run.history()], rtol=1e-4)
    counts = [list(map(int, row[1:])) for row in texts(shown.part("partition/0")) if "·" not in row]
    table = run.about.data.table
    assert counts == [[*row, 12] for row in table if all(row)]


def test_curves_below_five_seeds_are_medians_and_every_seed(tmp_path: Path) -> None:
    values = {0: [0.1, 0.2, 0.9], 1: [0.3, 0.4, 0.8], 2: [0.2, 0.6, 0.7]}
    for seed, accuracy in values.items():
        make_run(tmp_path / str(seed), seed=seed, accuracy=accuracy)
    shown = looked_at(*(tmp_path / str(seed) for seed in values))
    assert len(shown.arms) == 1
    table = columns(shown.part("measured/0"))
    lines = {
        seed: [at for at, whose in enumerate(table["seed"]) if whose == seed] for seed in ("0", "1", "2", "median")
    }
    assert {seed: [table["value"][at] for at in rows] for seed, rows in lines.items()} == {
        "0": values[0],
        "1": values[1],
        "2": values[2],
        "median": [0.2, 0.4, 0.8],
    }
    assert all(math.isnan(value) for value in table["low"] + table["high"])
    # 100 + 101 and 8 of feedback in the first round, then 200 + 201 + 8, then 300 + 301 + 8
    assert [table["upload"][at] for at in lines["median"]] == [209, 618, 1227]
    assert [table["time"][at] for at in lines["median"]] == [0.5, 1, 1.5]
    assert texts(shown.part("outcome"))[0][3] == "0.9000, 0.8000, 0.7000"


def test_from_five_seeds_on_there_is_an_interval(tmp_path: Path) -> None:
    last = [0.5, 0.6, 0.7, 0.8, 0.9]
    for seed, value in enumerate(last):
        make_run(tmp_path / str(seed), seed=seed, accuracy=[0.4, 0.4, value])
    shown = looked_at(*(tmp_path / str(seed) for seed in range(5)))
    table = columns(shown.part("measured/0"))
    rows = [at for at, whose in enumerate(table["seed"]) if whose == "median"]
    found = [[table[name][at] for name in ("low", "value", "high")] for at in rows]
    # the extremes: the smallest of five values is the median of five draws in 5.8 % of cases, more than 2.5 %
    assert found == [[0.4, 0.4, 0.4], [0.4, 0.4, 0.4], [0.5, 0.7, 0.9]]
    assert texts(shown.part("outcome"))[0][3] == "0.7000 [0.5000, 0.9000]"


def test_a_seed_that_diverged_counts_as_the_worst(tmp_path: Path) -> None:
    for seed, value in enumerate([0.9, None, None]):
        make_run(tmp_path / str(seed), seed=seed, accuracy=[0.5, 0.5, value])
    shown = looked_at(*(tmp_path / str(seed) for seed in range(3)))
    table = columns(shown.part("measured/0"))
    found = [table["value"][at] for at, whose in enumerate(table["seed"]) if whose == "median"]
    assert found[:2] == [0.5, 0.5]
    assert math.isnan(found[2])
    assert shown.part("outcome")["rows"][0][3]["value"] is None


def test_medians_only_over_rounds_that_all_seeds_have(tmp_path: Path) -> None:
    make_run(tmp_path / "whole", seed=0)
    make_run(tmp_path / "part", seed=1, done=2)
    shown = looked_at(tmp_path / "whole", tmp_path / "part")
    table = columns(shown.part("measured/0"))
    assert [table["round"][at] for at, whose in enumerate(table["seed"]) if whose == "median"] == [1, 2]
    lines = shown.part("notices")["lines"]
    assert [re.search(r"seed (\d), has (\d) of 3", line).groups() for line in lines] == [("1", "2")]
    make_run(tmp_path / "fresh", seed=2, done=0)
    fresh = looked_at(tmp_path / "fresh")
    assert render(collect(fresh))
    assert "0 of 3 rounds" in fresh.part("notices")["lines"][0]


def test_series_are_told_apart(tmp_path: Path) -> None:
    make_run(tmp_path / "a", algorithm="fedldf:n=2")
    make_run(tmp_path / "b", algorithm="fedldf:n=3")
    make_run(tmp_path / "c", algorithm="fedavg")
    make_run(tmp_path / "d", algorithm="fedavg")  # the same seed again: another arm, not a second seed
    make_run(tmp_path / "e", algorithm="fedprox", settings={"training.lr": 0.5})

    def names(*folders: str) -> list[str]:
        return [arm.name for arm in looked_at(*(tmp_path / name for name in folders)).arms]

    found = looked_at(*[tmp_path / name for name in "abcde"], tmp_path / "a").arms
    assert [arm.name for arm in found] == [
        "fedldf, algorithm.n = 2",
        "fedldf, algorithm.n = 3",
        "fedavg",
        "fedavg (2)",
        "fedprox",
    ]
    assert [len(arm.sources) for arm in found] == [1] * 5
    make_run(tmp_path / "f", algorithm="fedprox", name="other")
    make_run(
        tmp_path / "g",
        algorithm="fedprox",
        settings={"training.lr": 0.1, "training.epochs": 7, "layers.grouping": "tensor"},
    )
    assert names("e", "f") == ["fedprox on made", "fedprox on other"]
    assert names("e", "g") == ["fedprox in e", "fedprox in g"]
    # Words about a run are no difference between runs; one of many directories is named by where they differ.
    make_run(
        tmp_path / "h", algorithm="fedprox", settings={"training.lr": 0.5, "training.epochs": 3, "description": "d"}
    )
    assert names("e", "h") == ["fedprox, training.epochs = 1", "fedprox, training.epochs = 3"]
    settings = {"training.lr": 0.1, "training.epochs": 7, "layers.grouping": "tensor"}
    make_run(tmp_path / "study" / "cell-2" / "seed-0", algorithm="fedprox")
    make_run(tmp_path / "study" / "cell-10" / "seed-0", algorithm="fedprox", settings=settings)
    assert names("study") == ["fedprox in cell-2", "fedprox in cell-10"]


def test_a_comparison_as_far_as_it_got(tmp_path: Path, recipe: Any, cli: Any) -> None:
    answer = cli("compare", recipe(), "-a", "fedavg,fedldf:n=2", "--seeds", "0,1", "--out", tmp_path / "cmp")
    assert answer.code == 0, answer.err
    shown = looked_at(tmp_path / "cmp")
    assert [arm.name for arm in shown.arms] == ["fedavg", "fedldf:n=2"]
    for arm, row in zip(shown.arms, shown.part("outcome")["rows"], strict=True):
        assert [source.seed for source in arm.sources] == [0, 1]
        finals = [Run(source.run.path).summary()["accuracy"] for source in arm.sources]
        assert row[3]["value"] == pytest.approx(statistics.median(finals), rel=1e-4)
    differing = columns(shown.part("differing/0"))
    last = [[dict(source.run.curve())[3] for source in arm.sources] for arm in shown.arms]
    expected = [ours - theirs for ours, theirs in zip(last[1], last[0], strict=True)]
    assert differing["value"] == pytest.approx([*expected, statistics.median(expected)], rel=1e-4, abs=1e-9)
    assert differing["seed"] == ["0", "1", "median"]
    for line in (tmp_path / "cmp" / "fedldf-n=2" / "seed-1").glob("checkpoints/*3.safetensors"):
        line.unlink()
    assert [source.finished for source in looked_at(tmp_path / "cmp").arms[1].sources] == [True, False]


def test_lost_replies(tmp_path: Path) -> None:
    lost = {1: [(2, "dropped out")], 3: [(2, "failed: ValueError: no: sense (mine.py:3)"), (0, "dropped out")]}
    make_run(tmp_path / "run", lost=lost)
    shown = looked_at(tmp_path / "run")
    part = shown.part("replies/0")
    assert part["note"] == "3 of 12 requests to clients brought no usable reply."
    assert texts(part) == [
        ["1", "2", "dropped out", "dropped out"],
        ["3", "2", "failed", "failed: ValueError: no: sense (mine.py:3)"],
        ["3", "0", "dropped out", "dropped out"],
    ]
    people = shown.part("people/0")
    rows = [dict(zip(people["columns"], row, strict=True)) for row in texts(people)]
    assert [row["client"] for row in rows] == ["2", "0", "1", "3"]  # those with most trouble first
    assert {name: rows[0][name] for name in ("samples", "rounds asked", "dropped out", "failed", "training loss")} == {
        "samples": "10",
        "rounds asked": "3",
        "dropped out": "1",
        "failed": "1",
        "training loss": "0.5000",
    }
    outcomes = columns(shown.part("outcomes/0"))
    became = dict(zip(zip(outcomes["client"], outcomes["round"], strict=True), outcomes["outcome"], strict=True))
    assert became["2", 1] == "dropped out"
    assert became["2", 3] == "failed"
    assert became["1", 1] == "all the work"


def test_a_large_partition_shows_some_clients_and_the_spread_of_all(tmp_path: Path) -> None:
    table = [[client, 1] for client in range(300)]
    make_run(tmp_path / "run", clients=300, sampled=2, data={"table": table, "class_names": ["x", "y"]})
    part = looked_at(tmp_path / "run").part("partition/0")
    assert len(part["rows"]) == 200
    assert texts(part)[199] == ["199", "199", "1", "200"]
    assert "300 clients; each has 1 to 300 samples (median 150.5) of 1 to 2 classes (median 2)" in part["note"]
    assert "The first 200 are shown" in part["note"]


def test_clients_with_names_are_called_by_them(tmp_path: Path) -> None:
    data = {"table": [[1, 2]] * 4, "class_names": ["x", "y"], "client_names": ["east", "north", "<b>", "west"]}
    make_run(tmp_path / "run", data=data)
    part = looked_at(tmp_path / "run").part("partition/0")
    assert [row[0] for row in texts(part)] == ["0 east", "1 north", "2 <b>", "3 west"]


def test_upload_as_time(tmp_path: Path) -> None:
    """1227 bytes by 4 clients in 3 rounds: 102.25 B each, of which 10 Mbit/s carry 1.25 million a second."""
    make_run(tmp_path / "run")
    part = looked_at(tmp_path / "run").part("outcome")
    row = dict(zip(part["columns"], part["rows"][0], strict=True))
    assert row["upload at 10 Mbit/s"]["value"] == pytest.approx(102.25 / 1.25e6, rel=1e-4)


# --- size ------------------------------------------------------------------------------------------------------------


def test_twenty_clients_twenty_layers_hundred_rounds_in_three_megabytes_with_every_client(tmp_path: Path) -> None:
    names = [f"features.{at}.weight" for at in range(20)]
    make_run(tmp_path / "run", clients=20, layers=names, rounds=100)
    shown = looked_at(tmp_path / "run")
    assert not shown.summarised
    assert shown.every == 1
    assert shown.part("cells/0/angle")["count"] == 100 * 20
    assert len(render(collect(shown)).encode()) <= LIMIT


def test_beyond_that_clients_are_summarised(tmp_path: Path) -> None:
    make_run(tmp_path / "run", clients=7)
    shown = View.of([tmp_path / "run"], budget=4 * 8 * 2 * 6 * 3)  # three rounds, two layers, six numbers for clients
    assert (shown.summarised, shown.every) == (True, 1)
    part = shown.part("cells/0/divergence")
    assert columns(part)["client"] == ["max", "75 %", "median", "25 %", "min", "mean"] * 3 == list(SUMMARY) * 3
    ours = cells(part).reshape(3, 6, 2)
    for at in range(3):
        values = load_file(tmp_path / "run" / "layers" / f"{at + 1:06d}.safetensors")["divergence"]
        for layer in range(2):
            known = sorted(value for value in values[:, layer] if not math.isnan(value))
            quarters = statistics.quantiles(known, n=4, method="inclusive")
            expected = [known[-1], quarters[2], quarters[1], quarters[0], known[0], statistics.mean(known)]
            np.testing.assert_allclose(ours[at, :, layer], expected, rtol=6e-5)


def test_then_rounds_are_thinned(tmp_path: Path) -> None:
    make_run(tmp_path / "run", clients=7, rounds=7)
    shown = View.of([tmp_path / "run"], budget=4 * 8 * 2 * 6 * 3)
    assert shown.every == 3  # 7 rounds where 3 fit
    index = columns(shown.part("cells/0/angle"))
    assert sorted(set(zip(index["since"], index["round"], strict=True))) == [(0, 3), (3, 6), (6, 7)]
    assert "every 3th round" in " ".join(shown.part("notices")["lines"])


def test_no_byte_is_lost_where_rounds_are_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrata.plots.tables.MOST_ROUNDS", 3)
    make_run(tmp_path / "run", rounds=7)
    source = looked_at(tmp_path / "run").runs[0]
    table = fedstrata.plots.tables.traffic(source, "up", fedstrata.plots.tables.shown_rounds(7, 3))
    # 100 t + l in round t: 100 + 200 + 300, 400 + 500 + 600, 700; and l as often as there are rounds
    assert table.numbers("so_far").tolist() == [600, 2100, 2800, 603, 2106, 2807, 24, 48, 56]
    assert table.numbers("value").tolist() == [200, 500, 700, 201, 501, 701, 8, 8, 8]


@pytest.mark.slow
def test_many_large_runs_stay_on_one_page(tmp_path: Path) -> None:
    names = [f"layer{at}" for at in range(20)]
    for seed in range(4):
        make_run(tmp_path / str(seed), clients=25, layers=names, rounds=100, seed=seed)
    shown = looked_at(*(tmp_path / str(seed) for seed in range(4)))
    assert shown.summarised
    assert len(render(collect(shown)).encode()) <= LIMIT


# --- the page --------------------------------------------------------------------------------------------------------

EVIL = "</script><script>hacked = 1</script><img src=x onerror='hacked = 1'>&amp;{{script}}"


def test_names_cannot_become_markup(tmp_path: Path) -> None:
    make_run(tmp_path / "run", layers=(EVIL, "b"), data={"table": [[1], [2], [3], [4]], "class_names": [EVIL]})
    content = collect(looked_at(tmp_path / "run"))
    page = render({**content, "title": EVIL})
    ours = page.replace(fedstrata.plots.saving.library(), "")
    assert "<img" not in ours
    assert ours.count("</script>") == 3
    assert ours.count('"use strict";') == 1  # the script was not put in a second time by a name
    assert on_page(page)["arms"][0]["layers"][0] == EVIL


def test_the_page_refers_to_nothing_outside(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    page = render(collect(looked_at(tmp_path / "run")))
    ours = page.replace(fedstrata.plots.saving.library(), "")
    assert set(re.findall(r"[a-z]+://[^\s\"'<]+", ours)) == set()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert page == render(collect(looked_at(tmp_path / "run")))


def test_every_part_of_the_sections_is_there(tmp_path: Path) -> None:
    """Whatever is chosen, what it names is in the page, and so is the table of every picture."""
    for algorithm in ("fedavg", "fedprox"):
        make_run(tmp_path / algorithm, algorithm=algorithm)
    content = collect(looked_at(tmp_path))
    named = {name for part in content["parts"].values() if (name := part.get("table"))}
    assert named <= set(content["parts"])
    options = {choice["name"]: choice["options"] for of in content["sections"] for choice in of["choices"]}
    for section in content["sections"]:
        for block in section["blocks"]:
            names = [re.sub(r"\{run:\w+\}", "0", block["part"])]
            while "{" in names[0]:
                key = re.search(r"\{(\w+)\}", names[0])[1]
                names = [name.replace(f"{{{key}}}", value) for name in names for value, _ in options[key]]
            assert all(name in content["parts"] for name in names if name), block


def test_an_unknown_part_is_none(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    shown = looked_at(tmp_path / "run")
    for name in ("", "nothing", "cells", "cells/9/angle", "cells/0/beauty", "layers/0/angle/more", "of", "cells/../1"):
        with pytest.raises(KeyError):
            shown.part(name)


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
    assert [arm["name"] for arm in on_page(Path("report.html").read_text())["arms"]] == ["fedavg", "fedprox"]
    assert cli("report", "one", "--out", "report.html").code == 0  # a report may be written again
    assert len(on_page(Path("report.html").read_text())["arms"]) == 1
    assert cli("report", "one", "--out", "new/page.html").code == 0
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert cli("report", "one", "--open").code == 0
    assert opened == [(tmp_path / "report.html").as_uri()]


def test_without_a_record_of_layers(tmp_path: Path, cli: Any, tiny: Any) -> None:
    fedstrata.run(tiny({"record.layers": False}), out=tmp_path / "run")
    assert cli("report", tmp_path / "run", "--out", tmp_path / "page.html").code == 0
    content = on_page((tmp_path / "page.html").read_text())
    assert not any(name.startswith(("cells/", "layers/")) for name in content["parts"])
    assert "curves/0/round/ends" in content["parts"]


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


def test_a_damaged_run_hides_no_other(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "runs" / "b", algorithm="fedprox")
    damage_shape(tmp_path / "runs" / "b")
    count, left_out = write([tmp_path / "runs"], tmp_path / "page.html")
    assert count > 1_000_000
    assert len(left_out) == 1
    assert "000002.safetensors is damaged" in left_out[0]
    content = on_page((tmp_path / "page.html").read_text())
    assert [arm["name"] for arm in content["arms"]] == ["fedavg"]
    assert left_out[0] in content["parts"]["notices"]["lines"][0]
    assert view.BUDGET < LIMIT
