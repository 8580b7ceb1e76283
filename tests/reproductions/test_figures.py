"""Pictures of studies: what is drawn is what is stored. Axes are read back; pixels are for people."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from PIL import Image

from fedstrata.core.errors import RecipeError, UserError
from fedstrata.recipes.schema import load
from fedstrata.runs.compare import run_job
from fedstrata.runs.reader import Run
from fedstrata.runs.runner import create_run, run_rounds
from reproductions import figures
from reproductions.figures import layers
from reproductions.figures.content import Curve, Panel, Picture, Reference
from reproductions.figures.style import PALETTE, wrapped
from reproductions.results import Results
from reproductions.study import Study, load_study, plan, recipe_hash, studies
from tests.support import ROOT
from tests.support.small_study import SMALL, small

INF = math.inf


def results_of(curves: dict[str, dict[str, list[dict[str, list[Any]]]]], **changes: Any) -> Results:
    """Results from each seed's series; every round uploads two megabytes."""
    runs: Any = {
        cell: {
            arm: {seed: {"upload": [2_000_000] * len(next(iter(one.values()))), **one} for seed, one in enumerate(ones)}
            for arm, ones in arms.items()
        }
        for cell, arms in curves.items()
    }
    return Results(Study.parse(small(**changes)), runs)


def accuracies(*seeds: list[float | None]) -> list[dict[str, list[Any]]]:
    return [{"test.accuracy": values} for values in seeds]


def only(results: Results) -> Any:
    """The one picture of a study, drawn."""
    (picture,) = figures.pictures(results)
    return figures.draw(picture)


def line(ax: Any, label: str) -> tuple[Any, Any]:
    (found,) = [one for one in ax.lines if one.get_label() == label]
    return list(found.get_xdata()), list(found.get_ydata())


def unnamed(ax: Any) -> list[list[float]]:
    """The ordinates of the lines that are in no legend."""
    return [list(one.get_ydata()) for one in ax.lines if str(one.get_label()).startswith("_")]


def ends(band: Any) -> dict[float, tuple[float, float]]:
    """The lowest and highest ordinate of a band at each abscissa."""
    points: dict[float, list[float]] = {}
    for x, y in band.get_paths()[0].vertices:
        points.setdefault(float(x), []).append(float(y))
    return {x: (min(ys), max(ys)) for x, ys in points.items()}


def title(figure: Any) -> str:
    return str(figure.get_suptitle()).replace("\n", " ")


def words(figure: Any) -> list[str]:
    return [text.get_text() for ax in figure.axes for text in ax.texts]


def legend(figure: Any) -> list[str]:
    return [text.get_text() for one in figure.legends for text in one.get_texts()]


FIVE = accuracies([0.1, 0.5], [0.2, 0.4], [0.3, 0.9], [0.4, 0.6], [0.5, 0.8])
FEW = accuracies([0.1, 0.5, 0.6], [0.3, 0.7, 0.9])

# --- curves ----------------------------------------------------------------------------------------------------------


def test_from_five_seeds_on_medians_and_bands_are_drawn() -> None:
    """Of five values the interval of the median is their range: a resampled median is the smallest of them with
    probability P(Bin(5, 1/5) ≥ 3) = 5.8 %, more than the 2.5 % that are cut off."""
    figure = only(results_of({"a": {"fedavg": FIVE, "fedldf": FIVE[::-1]}, "b": {}}))
    (ax,) = figure.axes
    assert line(ax, "fedavg") == line(ax, "fedldf") == ([1, 2], [30, 60])
    assert len(ax.collections) == 2
    for band in ax.collections:
        assert ends(band) == {1: (10, 50), 2: (40, 90)}
    assert "medians of 5 seeds with 95 % bootstrap intervals" in title(figure)
    assert legend(figure) == ["fedavg", "fedldf"]


def test_bands_are_bootstrap_intervals() -> None:
    """Of seven seeds, by the binomial law instead of by drawing.

    A resampled median is at most the k-th smallest value with probability P(Bin(7, k/7) ≥ 4). The lower end is the
    first value where that exceeds 2.5 %, the upper end its mirror image; no value of k comes close to 2.5 %.
    """
    values = [0.13, 0.22, 0.31, 0.44, 0.57, 0.61, 0.78]
    at_most = [sum(math.comb(7, j) * (k / 7) ** j * (1 - k / 7) ** (7 - j) for j in range(4, 8)) for k in range(1, 8)]
    lower = next(k for k, share in enumerate(at_most) if share > 0.025)
    assert min(abs(share - 0.025) for share in at_most) > 0.005
    seeds = accuracies(*([v] for v in np.random.default_rng(0).permutation(values).tolist()))
    (ax,) = only(results_of({"a": {"fedavg": seeds}, "b": {}})).axes
    assert line(ax, "fedavg")[1] == [44]
    assert ends(ax.collections[0])[1] == pytest.approx((100 * values[lower], 100 * values[-1 - lower]))


def test_below_five_seeds_every_one_is_drawn() -> None:
    figure = only(results_of({"a": {"fedavg": FEW, "fedldf": FEW[:1]}, "b": {}}))
    (ax,) = figure.axes
    assert not ax.collections
    assert unnamed(ax)[:2] == [[10, 50, 60], [30, 70, 90]]
    assert line(ax, "fedavg") == ([1, 2, 3], pytest.approx([20, 60, 75]))
    assert line(ax, "fedldf")[1] == [10, 50, 60]  # one seed needs no thin line
    assert len(ax.lines) == 2 + 1 + 1 + 2  # seeds, medians, and two references
    assert "medians of 1 to 2 seeds; thin: every seed" in title(figure)


def test_runs_that_end_at_their_target_are_drawn_to_their_ends() -> None:
    """The median where all seeds have a value, and then each seed on its own."""
    longer = [*FIVE[:4], {"test.accuracy": [0.5, 0.8, 0.95]}]
    figure = only(results_of({"a": {"fedavg": longer}, "b": {}}))
    (ax,) = figure.axes
    assert line(ax, "fedavg") == ([1, 2], [30, 60])
    assert [50, 80, 95] in unnamed(ax)
    assert "thin: every seed" in title(figure)


def test_rounds_without_evaluation_are_not_drawn() -> None:
    (ax,) = only(results_of({"a": {"fedavg": accuracies([None, 0.5, None, 0.75])}, "b": {}})).axes
    assert line(ax, "fedavg") == ([2, 4], [50, 75])


def test_curves_against_upload_in_megabytes() -> None:
    plots = [{"name": "p", "series": "test.error", "against": "upload", "logarithmic": ["upload"]}]
    (ax,) = only(results_of({"a": {"fedavg": FEW}, "b": {}}, plots=plots)).axes
    assert line(ax, "fedavg") == ([2, 4, 6], pytest.approx([80, 40, 25]))
    assert ax.get_xlabel() == "uploaded so far, all clients (MB)"
    assert ax.get_ylabel() == "test error (%)"
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "linear")


def test_of_a_logarithmic_accuracy_what_is_missing_is_logarithmic() -> None:
    """From 90 to 99 % is as far as from 0 to 90 %: both times the error is divided by ten. 100 % stays on the axes."""
    plots = [{"name": "p", "logarithmic": ["test.accuracy"]}]
    (ax,) = only(results_of({"a": {"fedavg": accuracies([0.5, 0.99, 1.0])}, "b": {}}, plots=plots)).axes
    assert line(ax, "fedavg") == ([1, 2, 3], [50, 99, 100])
    heights = ax.transData.transform([(1, y) for y in (0, 90, 99, 99.9, 100)])[:, 1]
    steps = heights[1:] - heights[:-1]
    assert steps == pytest.approx([steps[0]] * 4)
    assert math.isfinite(ax.get_ylim()[1])
    assert "logarithmic" in ax.get_ylabel()
    assert {10, 50, 80, 90, 95, 98, 99} <= set(ax.get_yticks())


def test_one_series_against_another() -> None:
    plots = [{"name": "p", "series": "gradient_divergence", "against": "train.loss"}]
    seeds = [{"gradient_divergence": [3.0, 1.0], "train.loss": [0.5, 0.25]} for _ in range(2)]
    (ax,) = only(results_of({"a": {"fedavg": seeds}, "b": {}}, plots=plots)).axes
    assert line(ax, "fedavg") == ([0.5, 0.25], [3, 1])
    assert ax.get_xlabel() == "training loss (cross-entropy)"


def test_panels_are_cells_and_several_series_are_rows() -> None:
    plots = [{"name": "p", "series": ["test.accuracy", "test.loss"], "logarithmic": ["test.loss"]}]
    seeds = [{"test.accuracy": [0.5], "test.loss": [2.0]}]
    figure = only(results_of({"a": {"fedavg": seeds}, "b": {"fedavg": seeds * 2}}, plots=plots))
    assert [ax.get_title() for ax in figure.axes] == ["as it is; 1 seed", "larger steps; 2 seeds"] * 2
    assert [ax.get_ylabel() for ax in figure.axes] == ["test accuracy (%)", "", "test loss (cross-entropy)", ""]
    assert [ax.get_xlabel() for ax in figure.axes] == ["", "", "communication round", "communication round"]
    assert [ax.get_yscale() for ax in figure.axes] == ["linear", "linear", "log", "log"]
    assert [line(ax, "fedavg")[1] for ax in figure.axes] == [[50], [50], [2], [2]]
    assert title(figure).startswith("A small study small (None, nothing): ")
    # A cell that a plot leaves out, and one of which nothing is stored, have no panel.
    chosen = only(results_of({"a": {"fedavg": seeds}, "b": {"fedavg": seeds}}, plots=[{**plots[0], "cells": ["b"]}]))
    assert "small (None, nothing), larger steps: 1 seed" in title(chosen)
    assert [ax.get_ylabel() for ax in chosen.axes] == ["test accuracy (%)", "test loss (cross-entropy)"]
    assert len(only(results_of({"a": {"fedavg": seeds}, "b": {}}, plots=plots)).axes) == 2


def test_the_target_and_what_the_paper_reports_are_drawn() -> None:
    """SMALL's target is 0.99, and the paper's final value 0.5; at 12 rounds the paper reached the target."""
    cells = [{**SMALL["cells"][0], "reported": {"final": {"fedavg": 0.5}, "rounds": {"fedavg": 12, "fedldf": INF}}}]
    results = results_of({"a": {"fedavg": FEW}}, cells=cells, quick={"rounds": 2})
    figure = only(results)
    (ax,) = figure.axes
    assert words(figure) == ["paper, fedavg: 50 %", "target: 99 %"]
    assert unnamed(ax)[2:] == [[50, 50], [99, 99]]
    assert line(ax, "paper, fedavg") == ([12], [99])
    assert legend(figure) == ["fedavg", "paper, fedavg"]


def test_only_some_arms() -> None:
    """What the paper reports of the others is not drawn either; a plot of which nothing is stored is left out."""
    cells = [{**SMALL["cells"][0], "reported": {"final": {"fedavg": 0.5, "fedldf": 0.4}}}]
    plots = [{"name": "p", "arms": ["fedldf"]}]
    both = {"a": {"fedavg": FEW, "fedldf": FEW[:1]}}
    figure = only(results_of(both, cells=cells, quick={"rounds": 2}, plots=plots))
    assert legend(figure) == ["fedldf"]
    assert words(figure) == ["paper, fedldf: 40 %", "target: 99 %"]
    assert title(figure).endswith(": 1 seed")
    dots = only(results_of(both, cells=cells, quick={"rounds": 2}, plots=[{**plots[0], "measure": "final"}]))
    assert [text.get_text() for text in dots.axes[0].get_yticklabels()] == ["fedldf"]
    assert figures.pictures(results_of({"a": {"fedavg": FEW}, "b": {}}, plots=plots)) == []


# --- dots ------------------------------------------------------------------------------------------------------------

DOTS = {"plots": [{"name": "p", "measure": "rounds"}]}


def test_dots_are_the_measure_with_intervals_and_the_papers_value() -> None:
    """Rounds to 99 %: 1, 2, 2, 3 and never. Their median is 2, its interval the whole range: up to “not reached”."""
    seeds = accuracies([0.99], [0.1, 0.99], [0.2, 1.0], [0.1, 0.1, 0.99], [0.5, 0.5, 0.5])
    cells = [{**SMALL["cells"][0], "reported": {"rounds": {"fedavg": 2.5}}}]
    results = results_of({"a": {"fedavg": seeds, "fedldf": seeds[:2]}}, cells=cells, quick={"rounds": 2}, **DOTS)
    figure = only(results)
    (ax,) = figure.axes
    edge = pytest.approx(1.06 * 3)  # right of the last round
    interval, ticks, median, few, not_reached = [
        list(one.get_xdata()) for one in ax.lines if one.get_label() != "paper"
    ]
    assert interval == [1, edge]
    assert ticks == [1, 2, 2, 3, edge]
    assert median == [2]
    assert few == [1, 2]
    assert not_reached == [edge, edge]
    assert line(ax, "paper") == ([2.5], [0])
    assert words(figure) == ["not reached"]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["fedavg", "fedldf"]
    assert ax.get_xlabel() == "rounds"


def test_dots_have_units() -> None:
    results = results_of({"a": {"fedavg": FEW}, "b": {}}, plots=[{"name": "p", "measure": "final"}])
    (ax,) = only(results).axes
    assert ax.get_xlabel() == "final accuracy (%)"
    assert list(ax.lines[0].get_xdata()) == [60, 90]
    assert list(ax.lines[1].get_xdata()) == [50]  # the paper's


# --- clients ---------------------------------------------------------------------------------------------------------


def test_clients_angles_in_degrees() -> None:
    plots = [{"name": "p", "series": "angle", "rounds": [1, 2], "clients": ["IID", "one class"]}]
    seeds = [{"angle.0": [math.pi / 2, 0.0], "angle.1": [math.pi, math.pi / 4 * at]} for at in range(5)]
    figure = only(results_of({"a": {"fedavg": seeds, "fedldf": seeds}, "b": {}}, plots=plots))
    assert [ax.get_title() for ax in figure.axes] == ["fedavg", "fedldf"]
    ax = figure.axes[0]
    medians = [list(one.get_ydata()) for one in ax.lines if len(one.get_xdata()) == 1]
    assert medians == [pytest.approx([value]) for value in (90, 180, 0, 90)]
    bars = [list(one.get_ydata()) for one in ax.lines if len(one.get_xdata()) == 2][:-1]  # without the one at 90°
    assert bars == [pytest.approx(ends) for ends in ([90, 90], [180, 180], [0, 0], [0, 180])]
    places = [float(one.get_xdata()[0]) for one in ax.lines if len(one.get_xdata()) == 1]
    assert [round(place) for place in places] == [0, 1, 0, 1]
    assert [text.get_text() for text in ax.get_xticklabels()] == ["IID", "one class"]
    assert legend(figure) == ["round 1", "round 2"]
    assert ax.get_ylabel() == "smoothed angle to the mean update (°)"


# --- style -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", studies())
def test_arms_differ_in_colour_dashes_and_marker(name: str) -> None:
    """Each alone tells them apart, so that neither a grey print nor an eye that sees few colours is lost."""
    study = load_study(name)
    if any(plot.measure is None and not plot.layers for plot in study.plots):  # dots have their arms written beside
        for part in zip(*figures.styles(list(study.arms)).values(), strict=True):
            assert len(set(map(str, part))) == len(study.arms)


def test_an_algorithm_looks_the_same_in_every_study() -> None:
    ours = figures.styles(["fedprox-1", "fedavg", "fedlap"])
    theirs = figures.styles(["fedavg", "fedadp", "fedlap", "other"])
    assert (ours["fedavg"], ours["fedlap"]) == (theirs["fedavg"], theirs["fedlap"])
    assert ours["fedprox-1"] not in (ours["fedavg"], ours["fedlap"])


def test_nobody_else_looks_like_fedavg_and_no_two_arms_are_alike() -> None:
    many = figures.styles([f"arm-{number}" for number in range(20)])
    assert len(set(map(str, many.values()))) == 20
    known = figures.styles([*load_study("combinations").arms])
    assert len(set(map(str, known.values()))) == len(known) > 8
    black = figures.styles(["fedavg"])["fedavg"]
    assert black not in many.values()
    some = figures.styles(["epochs-1", "epochs-5", "fedavg-10"])
    assert some["fedavg-10"] == black


def test_a_palette_keeps_the_colours_of_thin_lines(tmp_path: Path) -> None:
    """Each colour of the style as a few pixels beside large grey areas, as in a picture with many shades."""
    figure = Figure(figsize=(4, 3))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow([[shade / 400 for shade in range(400)]], cmap="gray", aspect="auto", extent=(0, 1, 0, 1))
    for at, (colour, *_) in enumerate(PALETTE):
        axes.plot([0.1, 0.4], [0.1 * at + 0.1] * 2, color=colour, linewidth=2)
    shown = Image.open(figures._write(figure, tmp_path / "lines")).convert("RGB")
    colours: Any = shown.getcolors(maxcolors=1_000_000)
    found = {pixel for _, pixel in colours}
    for colour, *_ in PALETTE:
        wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
        assert min(max(abs(a - b) for a, b in zip(wanted, pixel, strict=True)) for pixel in found) <= 12, colour


def test_an_arm_with_nothing_to_be_compared_with_is_not_drawn() -> None:
    (one,) = figures.pictures(results_of({"a": {"fedavg": FEW}, "b": {}}))
    (two,) = figures.pictures(results_of({"a": {"fedavg": FEW, "fedldf": FEW}, "b": {}}))
    assert not one.compares
    assert two.compares


def test_an_arm_looks_the_same_in_every_plot_of_a_study() -> None:
    """Here it is the second of one plot's arms and the first of the other's."""
    arms = {arm: {"algorithm": "fedavg"} for arm in ("a", "b", "c", "d")}
    plots = [{"name": "one", "arms": ["a", "b"]}, {"name": "two", "arms": ["b", "c", "d"], "measure": "final"}]
    changes = {"arms": arms, "plots": plots, "claims": [], "cells": [{"name": "only", "title": "only"}]}
    found = results_of({"only": {arm: accuracies([0.5, 0.6]) for arm in arms}}, **changes, quick={"rounds": 2})
    curves, dots = figures.pictures(found)
    (of_curves,) = [one for one in figures.draw(curves).axes[0].lines if one.get_label() == "b"]
    panel = figures.draw(dots).axes[0]
    row = [tick.get_text() for tick in panel.get_yticklabels()].index("b")
    (of_dots,) = [one for one in panel.lines if np.array_equal(one.get_ydata(), [row])]
    assert (of_dots.get_color(), of_dots.get_marker()) == (of_curves.get_color(), of_curves.get_marker())


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("short", ["short"]),
        ("one two three four", ["one two", "three four"]),  # not: one two three / four
        ("unpadded, (x − mean)/std: 1 seed", ["unpadded,", "(x − mean)/std:", "1 seed"]),
        ("", [""]),
    ],
)
def test_titles_break_where_a_reader_would(text: str, lines: list[str]) -> None:
    assert wrapped(text, 16).split("\n") == lines


# --- every layer -----------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(tiny: Any, tmp_path: Path) -> Run:
    """Five clients of which three are in each round; three rounds of FedLayerWise."""
    settings = {"task.partition.clients": 5, "training.clients_per_round": 3, "algorithm": {"name": "fedlayerwise"}}
    run, experiment = create_run(load(tiny(settings)), tmp_path / "reproductions" / "a" / "fedavg" / "seed-1")
    list(run_rounds(run, experiment))
    return run


def test_heat_maps_are_the_recorded_figures(recorded: Run) -> None:
    maps = figures.layer_maps(recorded, "title")
    assert list(maps.maps) == ["angle", "weight", "divergence"]  # there is no μ in it
    figure = figures.draw_layers(maps)
    images = [ax.images[0] for ax in figure.axes if ax.images]
    names = [(name, layer) for name in maps.maps for layer in range(len(recorded.layer_names))]
    for (name, layer), image in zip(names, images, strict=True):
        drawn = image.get_array()
        assert drawn.shape == (5, 3)
        ends = np.nanmin(maps.maps[name]), np.nanmax(maps.maps[name])  # one scale for all layers
        assert (image.norm.vmin, image.norm.vmax) == ends
        assert isinstance(image.norm, LogNorm) == (name != "angle" and ends[1] > 10 * ends[0])
        for at in range(3):
            found = recorded.layers(at + 1)
            factor = {"angle": 180 / math.pi, "weight": 100, "divergence": 1}[name]
            for client in range(5):
                if client in found["clients"]:
                    value = found[name][list(found["clients"]).index(client), layer]
                    assert drawn[client, at] == pytest.approx(factor * value)
                else:
                    assert np.ma.is_masked(drawn[client, at])
    top = [ax.get_title() for ax in figure.axes if ax.get_title()]
    assert top == recorded.layer_names
    counts = [sum(count > 0 for count in row) for row in recorded.about.data.table]
    first = figure.axes[0]
    assert [text.get_text() for text in first.get_yticklabels()] == [f"{c} ({n})" for c, n in enumerate(counts)]
    assert {ax.get_ylabel() for ax in figure.axes} >= {"client (classes)", "angle to the\nmean update (°)"}


def test_of_many_clients_each_rounds_are_ranked(recorded: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_MOST_CLIENTS", 4)
    maps = figures.layer_maps(recorded, "title")
    for at in range(3):
        for layer in range(len(recorded.layer_names)):
            expected = sorted(recorded.layers(at + 1)["divergence"][:, layer], reverse=True)
            assert maps.maps["divergence"][layer, :, at].tolist() == expected


def test_the_first_seed_keeps_its_layers() -> None:
    study = Study.parse(SMALL)
    kept = [run.job.recipe.record.layers for run in plan(study, [0, 1], Path()) if run.cell == "a"]
    assert kept == [True, True, False, False]
    first, second = (study.recipe_of(study.cells[0], "fedavg", seed) for seed in (0, 1))
    assert recipe_hash(first) == recipe_hash(second)  # which changes no result


def test_a_run_that_was_recorded_otherwise_is_gone_on_with(tmp_path: Path) -> None:
    study = Study.parse(SMALL)
    job = plan(study, [0], tmp_path)[0].job
    other = load(job.recipe.to_table(), settings={"record.layers": False})
    run, experiment = create_run(other, job.path)
    rounds = run_rounds(run, experiment)
    next(rounds)
    rounds.close()
    assert [one["round"] for one in run_job(job)] == [2, 3]


# --- files and the command -------------------------------------------------------------------------------------------


def stored(tmp_path: Path, **changes: Any) -> Results:
    """A study's results; `reproductions/a/fedavg/seed-1` may have a run of it."""
    return results_of({"a": {"fedavg": FEW, "fedldf": FEW}, "b": {}}, **changes)


def test_files_and_their_digests(tmp_path: Path, recorded: Run) -> None:
    plots = [{"name": "curves"}, {"name": "layers", "layers": {"cell": "a", "arm": "fedavg"}}]
    results = stored(tmp_path, plots=plots)
    written = figures.write_all(results, tmp_path / "figures", tmp_path / "reproductions")
    assert [str(path.relative_to(tmp_path)) for path in written] == [
        "figures/small/curves.png",
        "figures/small/layers.png",
    ]
    files = sorted(path.name for path in (tmp_path / "figures" / "small").iterdir())
    assert files == [f"{name}.{suffix}" for name in ("curves", "layers") for suffix in ("pdf", "png", "svg")]
    (picture,) = figures.pictures(results)
    assert figures.digest_in(written[0]) == picture.digest()
    other = results_of({"a": {"fedavg": accuracies([0.1, 0.5, 0.6], [0.3, 0.7, 0.91])}, "b": {}}, plots=plots)
    assert figures.pictures(other)[0].digest() != picture.digest()
    # All arms' layers where a cell is asked for; without run directories there are none.
    plain = stored(tmp_path)
    every = figures.write_all(plain, tmp_path / "every", tmp_path / "reproductions", every_layer=True)
    assert [path.name for path in every] == ["accuracy.png", "layers-a-fedavg.png"]
    assert [path.name for path in figures.write_all(plain, tmp_path / "none", tmp_path / "nowhere")] == ["accuracy.png"]


def test_the_same_picture_is_the_same_file(tmp_path: Path) -> None:
    for name in ("one", "two"):
        figures.write_all(stored(tmp_path), tmp_path / name, tmp_path)
    for suffix in ("png", "svg", "pdf"):
        one, two = ((tmp_path / name / "small" / f"accuracy.{suffix}").read_bytes() for name in ("one", "two"))
        assert one == two, suffix


def test_the_command_draws_what_is_stored(reproduce: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = small(plots=[{"name": "layers", "layers": {"cell": "a", "arm": "fedldf"}}, {"name": "curves"}])
    (tmp_path / "small.toml").write_text(tomli_w.dumps(table), encoding="utf-8")
    assert "nothing is stored" in reproduce("figures", "small.toml").err
    assert reproduce("run", "small.toml", "--seeds", "0").code == 0
    answer = reproduce("figures", "small.toml")
    assert answer.code == 0, answer.err
    written = [part.partition(",")[0] for part in answer.out.split("written: ")[1:]]
    assert written == ["docs/figures/small/curves.png", "docs/figures/small/layers.png"]
    assert all((tmp_path / path).exists() for path in written)
    of_one_cell = reproduce("figures", "small.toml", "--cells", "b", "--figures", "mine")
    assert "written: mine/small/layers-b-fedavg.png" in of_one_cell.out
    # Those of a first impression are stored elsewhere.
    assert "nothing is stored" in reproduce("figures", "small.toml", "--quick").err
    assert reproduce("run", "small.toml", "--quick").code == 0
    quick = "reproductions/runs/small-quick/figures/small-quick/curves.png"
    assert f"written: {quick}," in reproduce("figures", "small.toml", "--quick").out
    assert (tmp_path / quick).exists()


def test_without_matplotlib_the_command_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        figures.write_all(stored(tmp_path), tmp_path / "figures", tmp_path)


@pytest.mark.parametrize(
    ("plot", "problem"),
    [
        ({"name": "p", "measure": "speed"}, "speed"),
        ({"name": "p", "cells": ["c"]}, "plots.p.cells"),
        ({"name": "p", "arms": ["fedadp"]}, "plots.p.arms"),
        ({"name": "p", "layers": {"cell": "a", "arm": "fedadp"}}, "plots.p.layers.arm"),
        ({"name": "../p"}, "name"),
        ({"name": "q"}, "two have the same name"),
        ({"name": "p", "colour": "red"}, "colour"),
    ],
    ids=str,
)
def test_mistakes_in_a_plot_are_named(plot: dict[str, Any], problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        Study.parse(small(plots=[{"name": "q"}, plot]))


@pytest.mark.parametrize("panels", [1, 2, 3])
@pytest.mark.parametrize("name", studies())
def test_a_legend_is_within_its_picture(name: str, panels: int) -> None:
    """Also with a word on what the paper reports of every arm."""
    arms = list(load_study(name).arms)
    curves = [Curve(arm, {0: [(1, 1.0, 0.5), (2, 2.0, 0.6)]}) for arm in arms]
    references = [Reference(f"paper, {arm}", 0.5, 1.5, arm) for arm in arms]
    panel = Panel("title", "round", "accuracy", curves, references=references)
    figure = figures.draw(Picture("curves", "curves", "title", arms, [panel] * panels, panels, arms))
    figure.canvas.draw()
    for one in figure.legends:
        box = one.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width
        assert box.y0 >= 0


# --- what the repository holds ---------------------------------------------------------------------------------------


def test_the_pages_pictures_are_those_of_the_stored_results() -> None:
    """`make page` puts it right."""
    folder = ROOT / "docs" / "figures"
    drawn = set()
    for name in studies():
        study = load_study(name)
        shown = figures.pictures(Results.stored(study, ROOT / "reproductions" / "results"))
        for picture in (picture for picture in shown if picture.compares):
            path = folder / name / f"{picture.name}.png"
            assert path.exists(), path
            assert figures.digest_in(path) == picture.digest(), path
            drawn.add(path)
        drawn |= {folder / name / f"{plot.name}.png" for plot in study.plots if plot.layers}
    for path in folder.glob("*/*.png"):
        assert path in drawn, f"{path} belongs to no plot"
        assert path.stat().st_size < 100_000, path
