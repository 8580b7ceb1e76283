"""Pictures: what is on them, that every kind is drawn of a run, of several and of a comparison, and files of them."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import altair
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedstrata
from fedstrata import plots
from fedstrata.core.errors import UserError
from fedstrata.plots import arms, saving, tables, tabular
from fedstrata.plots.quantities import LAYERED
from fedstrata.plots.tables import Scale, Table, extent, interesting, quantile, shown_rounds
from fedstrata.runs.comparison import read_comparison
from tests.support.make_runs import make_run


def lines(values: list[float]) -> Table:
    none = np.full(len(values), math.nan)
    return Table({"value": np.array(values), "low": none, "high": none})


# --- what is shown ---------------------------------------------------------------------------------------------------


@given(st.integers(0, 5000), st.integers(1, 300))
def test_shown_rounds_are_few_and_end_with_the_last(count: int, most: int) -> None:
    shown = shown_rounds(count, most)
    assert shown == sorted(set(shown))
    assert shown[-1:] == ([count] if count else [])
    assert len(shown) <= most + 1
    assert len({b - a for a, b in itertools.pairwise(shown[:-1])}) <= 1


@given(
    st.lists(
        st.lists(st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf]), min_size=3, max_size=3), max_size=9
    ),
    st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
)
def test_quantiles_are_those_of_what_is_known(rows: list[list[float]], share: float) -> None:
    values = np.array(rows, dtype=float).reshape(len(rows), 3)
    if not len(rows):
        return
    found = quantile(values, share)
    for column, ours in zip(values.T, found, strict=True):
        known = column[np.isfinite(column)]
        if len(known):
            assert ours == pytest.approx(np.quantile(known, share), rel=1e-9, abs=1e-9)
        else:
            assert math.isnan(ours)


def test_the_axis_shows_where_lines_end() -> None:
    """19 values from 0.80 to 0.98, and the 0.1 of the first round: without it nothing of interest is out of sight."""
    rising = lines([0.1, 0.2, *(0.8 + at / 100 for at in range(19))])
    near = interesting(rising, "max")
    assert near.high > 0.98
    assert 0.7 < near.low < 0.81
    whole = interesting(rising, "max", whole=True)
    assert whole.low < 0.1
    falling = interesting(lines([9.0, 8.0, *(1.0 - at / 100 for at in range(19))]), "min")
    assert falling.high < 1.2
    even = interesting(lines([0.1, 0.2, 0.3, 0.4, 0.5]), "max")
    assert even.low < 0.1  # nothing is gained by leaving something out
    assert interesting(lines([math.nan, -math.inf]), "max") == Scale(0.0, 1.0)


def test_scales() -> None:
    """Logarithmic over more than two powers of ten, but never of angles; a constant is in the middle of its scale."""
    wide = [np.array([0.001, 1.0, math.nan])]
    assert extent(wide, LAYERED["divergence"]) == Scale(0.001, 1.0, True)
    assert extent(wide, LAYERED["angle"]) == Scale(0.001, 1.0, False)
    assert extent([np.array([0.0, 1.0])], LAYERED["divergence"]) == Scale(0.0, 1.0, False)
    assert extent([np.array([4.0, 4.0])], LAYERED["norm"]) == Scale(2.0, 6.0, False)
    assert extent([np.array([math.nan])], LAYERED["norm"]) == Scale(0.0, 1.0, False)


# --- every kind ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[fedstrata.Run]]:
    folder = tmp_path_factory.mktemp("runs")
    for algorithm in ("fedavg", "fedprox"):
        for seed in (0, 1):
            make_run(folder / f"{algorithm}-{seed}", algorithm=algorithm, seed=seed, lost={1: [(2, "dropped out")]})
    found = {name: [fedstrata.Run(path) for path in sorted(folder.glob(f"{name}*"))] for name in ("fedavg", "fedprox")}
    return {**found, "all": found["fedavg"] + found["fedprox"], "one": found["fedavg"][:1]}


ALONE = sorted(set(plots.KINDS) - {"differences", "probe"})


@pytest.mark.parametrize("of", ["one", "all"])
@pytest.mark.parametrize("kind", ALONE)
def test_every_kind_is_drawn(runs: Any, kind: str, of: str) -> None:
    chart = plots.draw(kind, runs[of])
    spec = chart.to_dict()  # which checks it against the schema of Vega-Lite
    assert "title" not in spec
    assert saving.written(spec, "svg").startswith(b"<svg")


def test_a_run_and_a_comparison_draw_themselves(runs: Any, tmp_path: Path, recipe: Any, cli: Any) -> None:
    assert isinstance(runs["one"][0].plot("layers", quantity="norm"), altair.Chart)
    assert cli("compare", recipe(), "-a", "fedavg,fedldf:n=2", "--seeds", "0,1", "--out", tmp_path / "cmp").code == 0
    comparison = read_comparison(tmp_path / "cmp")[0]
    spec = comparison.plot("differences").to_dict()
    assert "fedldf:n=2" in json.dumps(spec)
    svg = saving.written(spec, "svg").decode()
    assert "minus that of fedavg" in svg


def test_what_a_chart_holds_is_the_records(runs: Any) -> None:
    run = runs["one"][0]
    rows = plots.client_layers(run, "norm", round=2).to_dict()["data"]["values"]
    record = run.layers(2)
    found = {(row["client"], row["layer"]): row["value"] for row in rows}
    for at, client in enumerate(record["clients"].tolist()):
        for layer, name in enumerate(run.layer_names):
            expected = record["norm"][at, layer]
            assert found[str(client), name] == (None if math.isnan(expected) else expected)


def test_two_rounds_have_one_scale(runs: Any) -> None:
    first, last = ((runs["one"][0], round) for round in (1, 3))
    spec = plots.compare_rounds([first, last], "norm").to_dict()
    ends = {one["name"]: one["value"] for one in spec["params"]}
    values = [run.layers(round)["norm"] for run, round in (first, last)]
    assert (ends["low"], ends["high"]) == (np.nanmin(values), np.nanmax(values))
    assert len(spec["hconcat"]) == 2


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("beauty", {}, "kind = 'beauty': there are curves, "),
        ("curves", {"of": "beauty"}, "of = 'beauty': there are 'accuracy on test'"),
        ("curves", {"against": "beauty"}, "against = 'beauty': there are round, upload, time"),
        ("layers", {"quantity": "beauty"}, "quantity = 'beauty': there are angle"),
        ("clients", {"quantity": "loss", "layer": 0}, "quantity = 'loss': there are angle"),
        ("clients", {"quantity": "angle", "layer": "third"}, "layer = 'third': there are first, second"),
        ("bytes", {"direction": "left"}, "direction = 'left': there are up, down"),
        ("differences", {}, "it takes two to differ"),
        ("probe", {}, "no round was probed"),
    ],
)
def test_what_cannot_be_drawn_is_told(runs: Any, kind: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as told:
        plots.draw(kind, runs["one"], **options)
    assert words in str(told.value)


def test_of_nothing_there_is_no_picture(tmp_path: Path) -> None:
    make_run(tmp_path / "fresh", done=0)
    fresh = fedstrata.Run(tmp_path / "fresh")
    for kind, words in (("curves", "no round is done yet"), ("layers", "no record of layers")):
        with pytest.raises(UserError, match=words):
            fresh.plot(kind)
    with pytest.raises(UserError, match="nothing to draw"):
        plots.curves([])


# --- files -----------------------------------------------------------------------------------------------------------

BEGINS = {"svg": b"<svg", "png": b"\x89PNG", "pdf": b"%PDF"}


@pytest.mark.parametrize("form", BEGINS)
def test_saved(runs: Any, tmp_path: Path, form: str) -> None:
    plots.save(runs["one"][0].plot(), tmp_path / f"curves.{form}")
    assert (tmp_path / f"curves.{form}").read_bytes().startswith(BEGINS[form])
    with pytest.raises(UserError, match="format = 'bmp': there are svg, png, pdf"):
        plots.save(runs["one"][0].plot(), tmp_path / "curves.bmp")


def test_command(runs: Any, tmp_path: Path, cli: Any) -> None:
    paths = [run.path for run in runs["all"]]
    answer = cli("figures", *paths, "--out", tmp_path / "figures", "--formats", "svg")
    assert answer.code == 0, answer.err
    drawn = {path.stem for path in (tmp_path / "figures").glob("*.svg")}
    assert drawn == set(plots.KINDS) - {"probe"}  # no round was probed
    assert not any(b"seed 0" in (tmp_path / "figures" / f"{kind}.svg").read_bytes() for kind in plots.OVER_SEEDS)
    answer = cli("figures", paths[0], "--out", tmp_path / "few", "--kinds", "curves", "--formats", "pdf,png")
    assert answer.code == 0, answer.err
    assert {path.name for path in (tmp_path / "few").iterdir()} == {
        "curves.pdf",
        "curves.png",
        "outcome.md",
        "outcome.tex",
    }
    assert cli("figures", paths[0], "--kinds", "beauty", "--out", tmp_path / "none").code == 2


def test_tables_for_a_paper(tmp_path: Path) -> None:
    """Three rounds of 0.25, 0.5 and 0.75; 1227 bytes; the target 0.6 in the third round, which `slow` misses."""
    for name, accuracy in (("fast", None), ("slow", [0.1, 0.2, 0.3])):
        make_run(
            tmp_path / name, accuracy=accuracy, algorithm="fedavg" if name == "fast" else "fedprox",
            settings={"evaluation.target": 0.6},
        )  # fmt: skip
    found = plots.outcome_tables(list(arms.find(tmp_path)))
    assert found["outcome.md"].splitlines() == [
        "| algorithm | seeds | accuracy | best | rounds to 0.6 | upload |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| fedavg | 1 | 0.7500 | 0.7500 | 3 | 1.23 kB |",
        "| fedprox | 1 | 0.3000 | 0.3000 | >3 | 1.23 kB |",
    ]
    assert r"fedprox & 1 & 0.3000 & 0.3000 & $>$3 & 1.23 kB \\" in found["outcome.tex"].splitlines()


def test_nothing_in_a_name_is_markup() -> None:
    rows = [["a", "b"], [r"50 % & \evil{x}_y|z #1 ~^ $", "–"]]
    assert (
        r"50 \% \& \textbackslash{}evil\{x\}\_y|z \#1 \textasciitilde{}\textasciicircum{} \$ & -- \\"
        in tabular.latex(rows)
    )
    assert tabular.markdown(rows).splitlines()[2] == r"| 50 % & \evil{x}_y\|z #1 ~^ $ | – |"


def test_names_are_no_formulas_of_charts(tmp_path: Path) -> None:
    """Whatever a layer is called, it is data: no expression of the chart has it."""
    evil = "datum.value; alert(1) ' \" \\ ]"
    make_run(tmp_path / "run", layers=(evil, "b"))
    spec = fedstrata.Run(tmp_path / "run").plot("layers").to_dict()
    rows = spec.pop("data")["values"]
    assert "alert" not in json.dumps(spec)
    assert evil in {row["layer"] for row in rows}
    assert tables.MOST_ROUNDS > 100
