"""Pictures of runs: each function takes a run, several runs or a comparison, and returns an Altair chart.

    chart = fedstrata.plots.curves(run)         # or run.plot("curves"), comparison.plot("curves")
    chart.save("curves.pdf")                    # or .svg, .png, .html; in a notebook it shows itself

They are those of the live page and of the report. `KINDS` has their names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.core.errors import MissingExtra, UserError
from fedstrata.plots import tables
from fedstrata.plots.arms import Arm, Source, arms_of
from fedstrata.plots.quantities import LAYERED, OF_CLIENTS, Quantity
from fedstrata.plots.tables import Scale, Table
from fedstrata.runs.comparison import Comparison
from fedstrata.runs.reader import Run

if TYPE_CHECKING:
    from fedstrata.plots.charts import Chart

Runs = Run | Comparison | Sequence[Run]
"""What can be drawn."""

__all__ = [
    "KINDS",
    "bytes_by_layer",
    "client_layers",
    "clients",
    "compare_rounds",
    "curves",
    "differences",
    "draw",
    "layers",
    "model",
    "participation",
    "probe",
    "save",
    "upload",
]


def definitions() -> Any:
    """The definitions of the charts, which need Altair."""
    try:
        from fedstrata.plots import charts
    except ImportError as error:
        raise MissingExtra("altair and vl-convert-python", "plots", "drawing pictures") from error
    return charts


def _sources(runs: Runs) -> list[Source]:
    if isinstance(runs, Comparison):
        return [Source.of(Run(job.path), job.algorithm) for job in runs.jobs]
    found = [Source.of(run) for run in ([runs] if isinstance(runs, Run) else runs)]
    if not found:
        raise UserError("runs = []: there is nothing to draw")
    return found


def _arms(runs: Runs) -> list[Arm]:
    return arms_of(_sources(runs))


def _label(arms: Sequence[Arm], wanted: str | None) -> str:
    known = tables.labels(arms)
    if not known:
        raise UserError("no round is done yet: there is nothing to draw")
    if wanted is not None and wanted not in known:
        raise UserError(f"of = {wanted!r}: there are {', '.join(map(repr, known))}")
    return wanted or known[0]


def _quantity(name: str, known: dict[str, Quantity]) -> Quantity:
    if name not in known:
        raise UserError(f"quantity = {name!r}: there are {', '.join(known)}")
    return known[name]


def _styled(chart: Chart) -> Chart:
    from fedstrata.plots.style import DAY

    styled: Chart = chart.configure(**DAY)
    return styled


def _beside(runs: Runs, what: Quantity | None, read: Callable[[Source], Table], drawn: Callable[..., Any]) -> Chart:
    """A chart for each run on one scale, below each other where there are several; then each has its name."""
    sources = _sources(runs)
    for source in sources:
        if not source.recorded:
            raise UserError(f"{source.run.path}: it has no record of layers and clients")
    found = [read(source) for source in sources]
    scale = [] if what is None else [tables.extent([table.numbers("value") for table in found], what)]
    parts = [drawn(at, *pair, *scale) for at, pair in enumerate(zip(sources, found, strict=True))]
    if len(sources) == 1:
        return _styled(parts[0])
    import altair as alt

    names = {id(source): arm.name for arm in arms_of(sources) for source in arm.sources}
    titled = [
        part.properties(title=f"{names[id(one)]}, seed {one.seed}") for one, part in zip(sources, parts, strict=True)
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Automatically deduplicated")  # they are zoomed together
        return _styled(alt.vconcat(*titled).resolve_scale(x="independent", y="independent"))


# --- arms beside each other ------------------------------------------------------------------------------------------


def curves(runs: Runs, of: str | None = None, against: str = "round", whole: bool = False) -> Chart:
    """A metric or a loss over rounds: medians over seeds with intervals, and every seed as a thin line.

    `of` is what is measured, such as "accuracy on test" (the metric that decides) or "training loss"; `against` is
    "round", "upload" or "time". The y axis shows where lines end; with `whole` it shows all values. A click in the
    legend takes an arm away or brings it back.
    """
    charts = definitions()
    if against not in charts.AGAINST:
        raise UserError(f"against = {against!r}: there are {', '.join(charts.AGAINST)}")
    arms = _arms(runs)
    label = _label(arms, of)
    table = tables.curves(arms, label)
    better = next(
        found[label].better for arm in arms for source in arm.sources if label in (found := tables.measurements(source))
    )
    target = arms[0].first.run.recipe.evaluation.target if label == tables.labels(arms)[0] else None
    scale = tables.interesting(table, better, whole)
    return _styled(charts.curves(charts.inline(table), [arm.name for arm in arms], label, scale, against, target))


def upload(runs: Runs, of: str | None = None) -> Chart:
    """The metric against the bytes uploaded so far."""
    return curves(runs, of, "upload")


def differences(runs: Runs, of: str | None = None, baseline: str | None = None) -> Chart:
    """Each arm's last value minus the baseline's (the first arm's), seed by seed."""
    charts, arms = definitions(), _arms(runs)
    names = [arm.name for arm in arms]
    if len(arms) < 2 or (baseline is not None and baseline not in names):
        raise UserError(f"baseline = {baseline!r}: there are {', '.join(names)}, and it takes two to differ")
    first, label = baseline or names[0], _label(arms, of)
    table = tables.differences(arms, label, first)
    return _styled(charts.differences(charts.inline(table), names, label, first))


# --- every layer, every client ---------------------------------------------------------------------------------------


def layers(runs: Runs, quantity: str = "angle", lines: bool = False) -> Chart:
    """All layers over rounds: a heat map of a recorded quantity over clients, or as lines."""
    charts, what = definitions(), _quantity(quantity, LAYERED)

    def read(source: Source) -> Table:
        return tables.over_clients(source, what, tables.shown_rounds(len(source.history)))

    def drawn(at: int, source: Source, table: Table, scale: Scale) -> Any:
        if lines:
            return charts.lines_over_rounds(charts.inline(table), "layer", what, scale, name=f"near{at}")
        return charts.over_rounds(charts.inline(table), "layer", len(source.layers), what, scale)

    return _beside(runs, what, read, drawn)


def model(runs: Runs, quantity: str = "angle", round: int | None = None) -> Chart:
    """The model as a column of its layers, coloured by how much the clients disagree (or by another quantity)."""
    charts, what = definitions(), _quantity(quantity, LAYERED)
    return _beside(
        runs,
        what,
        lambda source: tables.model(source, what, round),
        lambda _, source, table, scale: charts.model(charts.inline(table), len(source.layers), what, scale),
    )


def clients(runs: Runs, quantity: str = "loss", layer: str | int | None = None, lines: bool = False) -> Chart:
    """All clients over rounds: their training loss, or with a `layer` a quantity of that layer; or as lines."""
    charts = definitions()
    what = _quantity(quantity, OF_CLIENTS if layer is None else LAYERED)

    def read(source: Source) -> Table:
        rounds = tables.shown_rounds(len(source.history))
        if layer is None:
            return tables.clients(source, what, rounds)
        return tables.cells(source, what, rounds).of_layer(_layer(source, layer))

    def drawn(at: int, source: Source, table: Table, scale: Scale) -> Any:
        if lines:
            return charts.lines_over_rounds(charts.inline(table), "client", what, scale, name=f"near{at}")
        return charts.over_rounds(charts.inline(table), "client", len(set(table.columns["client"])), what, scale)

    return _beside(runs, what, read, drawn)


def _layer(source: Source, wanted: str | int) -> int:
    at = source.layers.index(wanted) if wanted in source.layers else wanted
    if not isinstance(at, int) or not 0 <= at < len(source.layers):
        raise UserError(f"layer = {wanted!r}: there are {', '.join(source.layers)}")
    return at


def client_layers(runs: Runs, quantity: str = "angle", round: int | None = None) -> Chart:
    """Clients × layers in one round (the last one)."""
    sources = _sources(runs)
    return compare_rounds([(source.run, round) for source in sources], quantity)


def compare_rounds(rounds: Sequence[tuple[Run, int | None]], quantity: str = "angle") -> Chart:
    """Clients × layers in rounds of one run or of several, beside each other on one scale; None is the last round."""
    charts, what = definitions(), _quantity(quantity, LAYERED)
    import altair as alt

    parts = []
    for run, round in rounds:
        source = Source.of(run)
        if not source.recorded:
            raise UserError(f"{run.path}: it has no record of layers and clients")
        shown = round or source.history[-1]["round"]
        parts.append((source, shown, tables.cells(source, what, [shown]).of_round(shown)))
    scale = tables.extent([table.numbers("value") for _, _, table in parts], what)
    drawn = [
        charts.in_a_round(charts.inline(table), len(set(table.columns["client"])), what, scale) for _, _, table in parts
    ]
    if len(drawn) == 1:
        return _styled(drawn[0])
    titles = [f"{source.name}, seed {source.seed}, round {shown}" for source, shown, _ in parts]
    beside = [one.properties(title=title) for one, title in zip(drawn, titles, strict=True)]
    return _styled(alt.hconcat(*beside))


def participation(runs: Runs) -> Chart:
    """Clients over rounds: who did all the work or part of it, who sent nothing, and whose reply was lost and why."""
    charts = definitions()
    return _beside(
        runs,
        None,
        lambda source: tables.participation(source, tables.shown_rounds(len(source.history))),
        lambda _, __, table: charts.participation(charts.inline(table), len(set(table.columns["client"]))),
    )


def probe(runs: Runs, round: int | None = None) -> Chart:
    """Who harms in a round that was probed (the last of them): clients × layers."""
    charts = definitions()

    def read(source: Source) -> Table:
        probed = source.run.probes()
        if round is None and not probed:
            raise UserError(f"{source.run.path}: no round was probed; see fedstrata probe")
        return tables.probe(source, round or probed[-1])

    def drawn(at: int, source: Source, table: Table) -> Any:
        scale = tables.around_nothing(table.numbers("value"))
        return charts.probe(charts.inline(table), len(set(table.columns["client"])), scale)

    return _beside(runs, None, read, drawn)


def bytes_by_layer(runs: Runs, direction: str = "up", so_far: bool = False) -> Chart:
    """What travelled of each layer, "up" or "down", in each round or so far."""
    charts = definitions()
    if direction not in ("up", "down"):
        raise UserError(f"direction = {direction!r}: there are up, down")
    return _beside(
        runs,
        None,
        lambda source: tables.traffic(source, direction, tables.shown_rounds(len(source.history))),
        lambda _, __, table: charts.traffic(charts.inline(table), so_far),
    )


KINDS: dict[str, Callable[..., Any]] = {
    "curves": curves,
    "differences": differences,
    "upload": upload,
    "layers": layers,
    "layer-lines": partial(layers, lines=True),
    "model": model,
    "clients": clients,
    "client-lines": partial(clients, lines=True),
    "client-layers": client_layers,
    "participation": participation,
    "bytes": bytes_by_layer,
    "probe": probe,
}
"""The pictures by name: what `run.plot(kind)` and `fedstrata figures` draw."""


OVER_SEEDS = ("curves", "differences", "upload")
"""Those that take all seeds together; the others have a picture for each run."""


def draw(kind: str, runs: Runs, **options: Any) -> Chart:
    """A picture by its name in `KINDS`."""
    if kind not in KINDS:
        raise UserError(f"kind = {kind!r}: there are {', '.join(KINDS)}")
    chart: Chart = KINDS[kind](runs, **options)
    return chart


def save(chart: Chart, path: str | Path) -> None:
    """Write a chart as SVG, PNG or PDF, as the name says; nothing is downloaded, and no browser is needed."""
    from fedstrata.plots.saving import written
    from fedstrata.runs.files import write_whole

    at = Path(path)
    write_whole(at, written(chart.to_dict(), at.suffix.removeprefix(".")))


def outcome_tables(sources: Sequence[Source]) -> dict[str, str]:
    """What came of runs, a row for each arm, by the names of the files: Markdown and LaTeX."""
    from fedstrata.plots import tabular

    rows = tabular.outcome(arms_of(sources))
    return {"outcome.md": tabular.markdown(rows), "outcome.tex": tabular.latex(rows)}
