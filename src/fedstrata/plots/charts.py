"""Every picture, once: declarative charts (Vega-Lite, by Altair) of the tables in `tables.py`.

The same definition is the live page's, the report's, the notebook's and the paper's. A chart takes its data inline or
by a name under which a page hands it over. Its ends of scales are the parameters `low` and `high`, its hidden arms the
parameter `hidden`, so that a page changes them without drawing anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from fedstrata.plots.quantities import HARM, Quantity
from fedstrata.plots.tables import OUTCOMES, Scale, Table

Chart = alt.Chart | alt.LayerChart | alt.FacetChart | alt.HConcatChart | alt.VConcatChart
Data = alt.Data | alt.NamedData

AGAINST = {"round": "round", "upload": "uploaded so far, all clients", "time": "time so far"}
"""What curves are drawn against."""

FORMAT = ".5~g"
BYTES = ".3~s"
WIDTH, HEIGHT = 460, 260
_ROW, _MOST_HEIGHT, _LEAST_ROW = 18, 640, 4


def _data(rows: list[dict[str, Any]]) -> alt.Data:
    return alt.Data(values=rows)  # type: ignore[no-untyped-call]


def inline(table: Table) -> alt.Data:
    """Data that is part of the chart."""
    return _data(table.rows())


def named(name: str = "table") -> alt.NamedData:
    """Data that a page hands over."""
    return alt.NamedData(name=name)


def _ends(scale: Scale) -> tuple[list[Any], list[Any]]:
    """The ends of a scale as parameters, and a domain made of them."""
    low, high = alt.param(name="low", value=scale.low), alt.param(name="high", value=scale.high)
    return [low, high], [alt.ExprRef("low"), alt.ExprRef("high")]


def _zoom(*encodings: Any) -> alt.Parameter:
    """The wheel zooms with Ctrl held, so that a page scrolls; dragging moves, a double click sets back."""
    held = "wheel![event.ctrlKey || event.metaKey]"
    return alt.selection_interval(name="zoom", bind="scales", encodings=list(encodings), zoom=held)


def _where(x: str = "round:Q") -> list[alt.Tooltip]:
    return [alt.Tooltip(x, title="round", format="d")]


def _value(quantity: Quantity) -> list[alt.Tooltip]:
    return [alt.Tooltip("value:Q", title=quantity.titled, format=FORMAT)]


def _axis_of_bytes(title: str) -> alt.Axis:
    return alt.Axis(title=title, format=".2~s", labelExpr="datum.label + 'B'")


# --- arms ------------------------------------------------------------------------------------------------------------


def _arms(names: Sequence[str]) -> tuple[alt.Color, list[Any], list[Any]]:
    """One colour for each arm; a click in the legend takes an arm away or brings it back."""
    picked = alt.selection_point(name="picked", fields=["arm"], bind="legend", toggle="true")
    hidden = alt.param(name="hidden", value=[])
    legend = alt.Legend(
        title=None, orient="bottom", columns=2, labelLimit=320, symbolType="stroke", symbolStrokeWidth=4
    )
    colour = alt.Color("arm:N", scale=alt.Scale(domain=list(names)), legend=legend if len(names) > 1 else None)
    return colour, [picked, hidden], [picked, "indexof(hidden, datum.arm) < 0"]


def _only(chart: alt.Chart, filters: Sequence[Any]) -> alt.Chart:
    for one in filters:
        chart = chart.transform_filter(one)
    return chart


def curves(
    data: Data,
    names: Sequence[str],
    label: str,
    scale: Scale,
    against: str = "round",
    target: float | None = None,
    width: int | str = WIDTH,
) -> Chart:
    """Medians over seeds as lines, intervals as bands, and each seed as a thin line."""
    colour, params, filters = _arms(names)
    ends, domain = _ends(scale)
    axis = alt.Axis(title=AGAINST[against], format="d", tickMinStep=1)
    if against == "upload":
        axis = _axis_of_bytes(AGAINST[against])
    elif against == "time":
        axis = alt.Axis(title=AGAINST[against], format=".3~s", labelExpr="datum.label + 's'")
    x = alt.X(f"{against}:Q", axis=axis, scale=alt.Scale(zero=False, nice=False))
    y = alt.Y("value:Q", title=label, scale=alt.Scale(domain=domain, nice=False, zero=False))
    tooltip = [
        alt.Tooltip("arm:N"),
        alt.Tooltip("seed:N"),
        *_where(),
        alt.Tooltip("upload:Q", title="bytes uploaded", format=BYTES),
        alt.Tooltip("value:Q", title=label, format=FORMAT),
        alt.Tooltip("low:Q", title="interval from", format=FORMAT),
        alt.Tooltip("high:Q", title="to", format=FORMAT),
    ]
    base = alt.Chart().encode(x=x, color=colour)
    median = base.transform_filter("datum.seed === 'median'")
    band = _only(median.transform_filter("isValid(datum.low)"), filters)
    seeds = _only(base.transform_filter("datum.seed !== 'median'"), filters)
    lines = _only(median, filters)
    layers: list[Any] = [
        band.mark_area(fillOpacity=0.16, clip=True).encode(y=y, y2="high:Q").transform_calculate(value="datum.low"),
        seeds.mark_line(strokeWidth=1, strokeOpacity=0.55, clip=True).encode(y=y, detail="seed:N"),
        lines.mark_line(strokeWidth=2.2, clip=True).encode(y=y),
        _only(base, filters).mark_point(size=70, filled=True, fillOpacity=0, clip=True).encode(y=y, tooltip=tooltip),
    ]
    if target is not None:
        goal = alt.Chart(_data([{"target": target}]))
        layers.append(goal.mark_rule(strokeDash=[5, 4], clip=True).encode(y="target:Q"))
    return (
        alt.layer(*layers, data=data).add_params(*params, *ends, _zoom("x", "y")).properties(width=width, height=HEIGHT)
    )


def differences(data: Data, names: Sequence[str], label: str, baseline: str, width: int | str = WIDTH) -> Chart:
    """One dot for each seed, the median as a tick, and its interval."""
    colour, params, filters = _arms(names)
    x = alt.X("value:Q", title=f"{label}, minus that of {baseline}", scale=alt.Scale(zero=True))
    tooltip = [alt.Tooltip("arm:N"), alt.Tooltip("seed:N"), alt.Tooltip("value:Q", title="difference", format=FORMAT)]
    base = _only(alt.Chart(), filters).encode(y=alt.Y("arm:N", title=None, sort=list(names)), color=colour.legend(None))
    median = base.transform_filter("datum.seed === 'median'")
    return (
        alt.layer(
            alt.Chart(_data([{"zero": 0}])).mark_rule(strokeDash=[4, 4]).encode(x="zero:Q"),
            median.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=3).encode(x="low:Q", x2="high:Q"),
            base.transform_filter("datum.seed !== 'median'")
            .mark_point(filled=True, size=50, opacity=0.7)
            .encode(x=x, tooltip=tooltip),
            median.mark_tick(thickness=3, size=18).encode(x=x, tooltip=tooltip),
            data=data,
        )
        .add_params(*params)
        .properties(width=width, height=30 * max(1, len(names) - 1))
    )


# --- heat maps -------------------------------------------------------------------------------------------------------


def _colour(quantity: Quantity, domain: list[Any], logarithmic: bool) -> alt.Color:
    scale = alt.Scale(scheme="viridis", domain=domain, type="log" if logarithmic else "linear", clamp=True, nice=False)
    title = quantity.titled + (", logarithmic" if logarithmic else "")
    legend = alt.Legend(
        title=title, orient="top", gradientLength=220, titleLimit=400, format=".3~g", titleOrient="left"
    )
    return alt.Color("value:Q", scale=scale, legend=legend)


def _rows(count: int) -> int:
    """How high a heat map of so many rows is."""
    return max(3 * _ROW, min(count * _ROW, max(_MOST_HEIGHT, count * _LEAST_ROW)))


def _category(field: str, title: str | None = None) -> Any:
    """Rows in the order in which they come, with as many labels as there is room for."""
    axis = alt.Axis(labelOverlap=True, labelLimit=170, ticks=False, domain=False)
    return alt.Y(f"{field}:N", sort=None, title=title, axis=axis)


def _rounds() -> dict[str, Any]:
    """A cell reaches from the shown round before it to its own."""
    axis = alt.Axis(tickMinStep=1, format="d", grid=False)
    return {"x": alt.X("from:Q", title="round", scale=alt.Scale(nice=False, zero=False), axis=axis), "x2": "to:Q"}


def over_rounds(
    data: Data,
    field: str,
    rows: int,
    quantity: Quantity,
    scale: Scale,
    width: int | str = WIDTH,
) -> Chart:
    """A heat map: rows of layers or clients (`field`), over rounds."""
    ends, domain = _ends(scale)
    order = alt.EncodingSortField("order") if field == "client" else None
    y = _category(field, "client" if field == "client" else None)
    chart: Chart = (
        alt.Chart(data)
        .transform_filter("isValid(datum.value)")
        .transform_calculate(
            **{"from": "datum.since + 0.5", "to": "datum.round + 0.5", "order": "toNumber(datum.client)"}
        )
        .mark_rect(clip=True)
        .encode(
            **_rounds(),
            y=y.sort(order),
            color=_colour(quantity, domain, scale.logarithmic),
            tooltip=[alt.Tooltip(f"{field}:N"), *_where(), *_value(quantity)],
        )
        .add_params(*ends, _zoom("x"))
        .properties(width=width, height=_rows(rows), view=alt.ViewBackground(style="cells"))
    )
    return chart


def lines_over_rounds(
    data: Data,
    field: str,
    quantity: Quantity,
    scale: Scale,
    width: int | str = WIDTH,
    name: str = "near",
) -> Chart:
    """The same as a line for each layer or client; what is pointed at stands out."""
    ends, domain = _ends(scale)
    near = alt.selection_point(name=name, fields=[field], on="pointerover", clear="pointerout", nearest=False)
    y = alt.Y(
        "value:Q",
        title=quantity.titled,
        scale=alt.Scale(domain=domain, type="log" if scale.logarithmic else "linear", nice=False, zero=False),
    )
    x = alt.X("round:Q", scale=alt.Scale(nice=False, zero=False), axis=alt.Axis(format="d", tickMinStep=1))
    base = alt.Chart().transform_filter("isValid(datum.value)").encode(x=x, y=y)
    if field == "layer":
        legend = alt.Legend(
            title="depth", orient="top", titleOrient="left", gradientLength=160, format="d", type="gradient"
        )
        scheme = alt.Scale(scheme="viridis")
        base = base.encode(color=alt.Color("depth:Q", scale=scheme, legend=legend))
    lines = base.mark_line(clip=True).encode(
        detail=f"{field}:N",
        opacity=alt.condition(near, alt.value(1), alt.value(0.15), empty=True),
        strokeWidth=alt.condition(near, alt.value(2.5), alt.value(1.2), empty=False),
    )
    dots = base.mark_point(size=60, filled=True, fillOpacity=0, clip=True).encode(
        tooltip=[alt.Tooltip(f"{field}:N"), *_where(), *_value(quantity)]
    )
    return (
        alt.layer(lines, dots, data=data)
        .add_params(*ends, near, _zoom("x", "y"))
        .properties(width=width, height=HEIGHT)
    )


def in_a_round(
    data: Data,
    clients: int,
    quantity: Quantity,
    scale: Scale,
    width: int | str = WIDTH,
) -> Chart:
    """A heat map of one round: clients × layers."""
    ends, domain = _ends(scale)
    axis = alt.Axis(labelAngle=-40, labelLimit=120, labelOverlap=True, ticks=False, domain=False)
    chart: Chart = (
        alt.Chart(data)
        .transform_filter("isValid(datum.value)")
        .mark_rect()
        .encode(
            x=alt.X("layer:N", sort=None, title=None, axis=axis),
            y=_category("client", "client"),
            color=_colour(quantity, domain, scale.logarithmic),
            tooltip=[alt.Tooltip("client:N"), alt.Tooltip("layer:N"), *_value(quantity)],
        )
        .add_params(*ends)
        .properties(width=width, height=_rows(clients), view=alt.ViewBackground(style="cells"))
    )
    return chart


def probe(data: Data, rows: int, scale: Scale, width: int | str = WIDTH) -> Chart:
    """Who harms in a round: clients × layers; red harms, blue helps."""
    chart: Any = in_a_round(data, rows, HARM, scale, width)
    colour = alt.Scale(scheme="redblue", reverse=True, domain=[alt.ExprRef("low"), alt.ExprRef("high")], nice=False)
    legend = alt.Legend(title=HARM.title, orient="top", gradientLength=220, format=".2~g", titleOrient="left")
    probed: Chart = chart.encode(color=alt.Color("value:Q", scale=colour, legend=legend))
    return probed


def model(
    data: Data,
    rows: int,
    quantity: Quantity,
    scale: Scale,
    width: int | str = WIDTH,
) -> Chart:
    """The model as a column of its layers: as long as they have numbers, coloured by the quantity."""
    ends, domain = _ends(scale)
    numbers = alt.Axis(title="numbers in the layer", format=".2~s", grid=False, tickCount=5)
    length = alt.Scale(type="symlog", domainMin=0, nice=False)
    y = _category("layer")
    bars = (
        alt.Chart()
        .mark_bar(clip=True)
        .encode(
            x=alt.X("numbers:Q", axis=numbers, scale=length),
            y=y,
            color=_colour(quantity, domain, scale.logarithmic),
            tooltip=[alt.Tooltip("layer:N"), alt.Tooltip("numbers:Q", format=",d"), *_value(quantity)],
        )
    )
    value = alt.Text("value:Q", format=".3~g")
    said = alt.Chart().mark_text(align="left", dx=4, fontSize=10).encode(x="numbers:Q", y=y, text=value)
    return alt.layer(bars, said, data=data).add_params(*ends).properties(width=width, height=_rows(rows))


_COLOURS_OF_OUTCOMES: Mapping[str, str] = {
    OUTCOMES[0]: "#2a9d74",
    OUTCOMES[1]: "#9bd3a2",
    OUTCOMES[2]: "#b9bfc7",
    "dropped out": "#e0b040",
    "straggler dropped": "#b8860b",
    "no reply": "#8a63c9",
    "refused": "#d55e00",
    "not finite": "#c2185b",
    "failed": "#a11d1d",
}


def participation(data: Data, rows: int, width: int | str = WIDTH) -> Chart:
    """Clients over rounds: what became of each that was sampled."""
    scale = alt.Scale(domain=list(_COLOURS_OF_OUTCOMES), range=list(_COLOURS_OF_OUTCOMES.values()))
    legend = alt.Legend(title=None, orient="top", columns=5, symbolType="square", labelLimit=140)
    chart: Chart = (
        alt.Chart(data)
        .transform_calculate(
            **{"from": "datum.since + 0.5", "to": "datum.round + 0.5", "order": "toNumber(datum.client)"}
        )
        .mark_rect(clip=True)
        .encode(
            **_rounds(),
            y=_category("client", "client").sort(alt.EncodingSortField("order")),
            color=alt.Color("outcome:N", scale=scale, legend=legend),
            tooltip=[alt.Tooltip("client:N"), *_where(), alt.Tooltip("why:N", title="what it did")],
        )
        .add_params(_zoom("x"))
        .properties(width=width, height=_rows(rows), view=alt.ViewBackground(style="cells"))
    )
    return chart


# --- bytes -----------------------------------------------------------------------------------------------------------


def traffic(data: Data, so_far: bool = False, width: int | str = WIDTH) -> Chart:
    """What travelled of each layer, one upon the other."""
    value, title = ("so_far", "bytes so far") if so_far else ("value", "bytes per round")
    legend = alt.Legend(title=None, orient="bottom", columns=3, labelLimit=160)
    scheme = alt.Scale(scheme="tableau10")
    chart: Chart = (
        alt.Chart(data)
        .transform_calculate(**{"from": "datum.since + 0.5", "to": "datum.round + 0.5"})
        .mark_bar(clip=True)
        .encode(
            x=_rounds()["x"].bin("binned"),
            x2="to:Q",
            y=alt.Y(f"{value}:Q", axis=_axis_of_bytes(title), stack=True),
            color=alt.Color("layer:N", sort=alt.EncodingSortField("order"), scale=scheme, legend=legend),
            order=alt.Order("order:Q"),
            tooltip=[
                alt.Tooltip("layer:N"),
                *_where(),
                alt.Tooltip("value:Q", title="bytes per round", format=".4~s"),
                alt.Tooltip("so_far:Q", title="bytes so far", format=".4~s"),
            ],
        )
        .add_params(_zoom("x"))
        .properties(width=width, height=220)
    )
    return chart
