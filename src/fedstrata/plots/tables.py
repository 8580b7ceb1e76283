"""What is on each picture, as plain columns of numbers and names. No chart library is needed for it.

A screen has some hundred columns, so a table has every n-th round where there are more: `shown_rounds`. Only what is
shown is read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstrata.plots.arms import Arm, Source
from fedstrata.plots.quantities import LAYERED, Quantity
from fedstrata.runs.formats import LayerRecord, Line
from fedstrata.runs.statistics import ENOUGH_SEEDS, estimate, paired_differences

MOST_ROUNDS = 240
"""Rounds that a heat map shows."""

MOST_POINTS = 400
"""Points of one line."""

SUMMARY = ("max", "75 %", "median", "25 %", "min", "mean")
"""What stands for a round's clients when there are too many numbers."""

LARGEST = 7
"""Layers that have a colour of their own among what was sent."""


@dataclass(frozen=True)
class Table:
    """Columns of equal length: arrays of numbers, NaN where there is none, or lists of names."""

    columns: Mapping[str, np.ndarray | list[Any]]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def numbers(self, name: str) -> np.ndarray:
        """A column of numbers."""
        return np.asarray(self.columns[name], dtype=np.float64)

    def rows(self) -> list[dict[str, Any]]:
        """One mapping per row; None is what is not finite."""
        columns = [_plain(column) for column in self.columns.values()]
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*columns, strict=True)]


@dataclass(frozen=True)
class Scale:
    """The ends of an axis, or of a range of colours."""

    low: float
    high: float
    logarithmic: bool = False


def _plain(column: np.ndarray | list[Any]) -> list[Any]:
    if isinstance(column, list):
        return column
    return [value if math.isfinite(value) else None for value in column.tolist()]


def rounded(value: float) -> float | None:
    """With five digits; None, JSON's null, if it is not finite."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def stacked(tables: Sequence[Table]) -> Table:
    """One below the other."""
    if not tables:
        return Table({})
    joined: dict[str, np.ndarray | list[Any]] = {}
    for name, column in tables[0].columns.items():
        if isinstance(column, np.ndarray):
            joined[name] = np.concatenate([table.numbers(name) for table in tables])
        else:
            joined[name] = [item for table in tables for item in table.columns[name]]
    return Table(joined)


def shown_rounds(count: int, most: int = MOST_ROUNDS) -> list[int]:
    """Every n-th round, so that there are no more than so many; the last one always is among them."""
    every = max(1, math.ceil(count / most))
    shown = list(range(every, count + 1, every))
    return shown if shown[-1:] == [count] or not count else [*shown, count]


# --- curves ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """What a run measured over rounds: upload and seconds so far, and the value; the worst there is if not finite."""

    better: str
    points: Mapping[int, tuple[float, float, float]]


def measurements(source: Source) -> dict[str, Measured]:
    """By label, the deciding metric first."""
    run, metric = source.run, source.run.metric
    sets = dict.fromkeys([*run.recipe.evaluation.on, *(name for line in source.history for name in line["metrics"])])
    wanted = [(f"{metric.name} on {name}", name, metric.name, metric.direction) for name in sets]
    wanted += [(f"loss on {name}", name, "loss", "min") for name in sets if metric.name != "loss"]
    seconds = np.cumsum([line["seconds"] for line in source.history])
    found = {}
    for label, name, quantity, better in [*wanted, ("training loss", "", "train_loss", "min")]:
        worst = -math.inf if better == "max" else math.inf
        points = {}
        for line, so_far in zip(source.history, seconds.tolist(), strict=True):
            values = line["metrics"].get(name, {}) if name else {quantity: line["train_loss"]}
            if quantity in values:
                points[line["round"]] = (float(line["upload_total"]), so_far, or_worst(values[quantity], worst))
        if points:
            found[label] = Measured(better, points)
    return found


def or_worst(value: float | None, worst: float) -> float:
    """What was not reached, or is not finite, counts as the worst there is instead of being left out."""
    return worst if value is None or math.isnan(value) else value


def labels(arms: Sequence[Arm]) -> list[str]:
    """What can be drawn over rounds."""
    return list(dict.fromkeys(label for arm in arms for source in arm.sources for label in measurements(source)))


def curves(arms: Sequence[Arm], label: str) -> Table:
    """Each seed's line, and each arm's median over the rounds that all its seeds have, with its interval.

    `seed` is "median" there. Where an arm has one seed only, that is its median.
    """
    columns: dict[str, list[Any]] = {name: [] for name in ("arm", "seed", "round", "upload", "time", "value", *_ENDS)}

    def add(arm: str, seed: str, round: int, at: Sequence[float], value: float, ends: Sequence[float]) -> None:
        for column, item in zip(columns.values(), (arm, seed, round, *at, value, *ends), strict=True):
            column.append(item)

    for arm in arms:
        ours = {source.seed: found[label].points for source in arm.sources if label in (found := measurements(source))}
        for seed, points in ours.items() if len(ours) > 1 else ():
            for round in _thinned(points):
                add(arm.name, str(seed), round, points[round][:2], points[round][2], _NO_ENDS)
        common = set.intersection(*(set(points) for points in ours.values())) if ours else set()
        for round in _thinned(common):
            over = estimate([points[round][2] for points in ours.values()])
            at = [float(np.median([points[round][part] for points in ours.values()])) for part in (0, 1)]
            add(arm.name, "median", round, at, over.median, over.interval or _NO_ENDS)
    names = ("arm", "seed")
    return Table({k: c if k in names else np.array(c, dtype=np.float64) for k, c in columns.items()})


_ENDS = ("low", "high")
_NO_ENDS = (math.nan, math.nan)


def _thinned(rounds: Any) -> list[int]:
    """Some of them, the last among them."""
    known = sorted(rounds)
    every = max(1, math.ceil(len(known) / MOST_POINTS))
    return known[::-1][::every][::-1]


def interesting(table: Table, better: str, whole: bool = False) -> Scale:
    """The range of values to show: where the lines end, and not where they begin, unless that is close."""
    values = np.concatenate([table.numbers(name) for name in ("value", *_ENDS)])
    values = values[np.isfinite(values)]
    if not len(values):
        return Scale(0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    if not whole:  # a tenth of the values may be out of sight if that makes the rest at least half as large again
        rest = float(np.quantile(values, 0.1 if better == "max" else 0.9))
        near = (rest, high) if better == "max" else (low, rest)
        if 1.5 * (near[1] - near[0]) < high - low:
            low, high = near
    room = 0.05 * (high - low or abs(high) or 1.0)
    return Scale(low - room, high + room)


def differences(arms: Sequence[Arm], label: str, baseline: str | None = None) -> Table:
    """Each arm's last value minus the baseline's (the first arm's), seed by seed."""
    first = next((arm for arm in arms if arm.name == baseline), arms[0])
    last = {
        arm.name: {source.seed: points[max(points)][2] for source in arm.sources if (points := _points(source, label))}
        for arm in arms
    }
    columns: dict[str, list[Any]] = {"arm": [], "seed": [], "value": [], "low": [], "high": []}
    for arm in arms:
        seeds = sorted(set(last[arm.name]) & set(last[first.name]))
        if arm is first or not seeds:
            continue
        found = paired_differences([last[arm.name][s] for s in seeds], [last[first.name][s] for s in seeds])
        over = estimate(found)
        for seed, value in [*zip(map(str, seeds), found, strict=True), ("median", over.median)]:
            ends = (over.interval if seed == "median" else None) or _NO_ENDS
            for column, item in zip(columns.values(), (arm.name, seed, value, *ends), strict=True):
                column.append(item)
    numbers = {name: np.array(columns[name], dtype=np.float64) for name in ("value", *_ENDS)}
    return Table({"arm": columns["arm"], "seed": columns["seed"], **numbers})


def _points(source: Source, label: str) -> Mapping[int, tuple[float, float, float]]:
    found = measurements(source)
    return found[label].points if label in found else {}


# --- clients and layers ----------------------------------------------------------------------------------------------


def of_record(record: LayerRecord, quantity: Quantity) -> np.ndarray:
    """A quantity as it is shown: clients × layers, or one number per client."""
    if quantity.name == "relative":
        divergence, norm = record["divergence"], record["norm"]
        values = np.divide(divergence, norm, out=np.full(norm.shape, np.nan), where=norm > 0)
    elif quantity.name in ("sent_share", "weight_share"):
        shares = record[quantity.source]
        values = shares.mean(axis=1) if shares.shape[1] else np.full(len(shares), np.nan)
    else:
        values = record[quantity.source].astype(np.float64)
    shown: np.ndarray = values * quantity.factor
    return shown


def has(source: Source, quantity: Quantity) -> bool:
    """Whether there is any number of it, in the first or last round; no spring is none."""
    if not source.recorded:
        return False
    for line in (source.history[0], source.history[-1]):
        values = of_record(source.record(line["round"]), quantity)
        known = values[np.isfinite(values)]
        if len(known) and (quantity.name != "mu" or known.any()):
            return True
    return False


def over_clients(source: Source, quantity: Quantity, rounds: Sequence[int]) -> Table:
    """Layers × rounds, with the quantity's median, mean or maximum over clients."""
    values = np.full((len(source.layers), len(rounds)), np.nan)
    with np.errstate(all="ignore"):
        for at, round in enumerate(rounds):
            values[:, at] = _over(of_record(source.record(round), quantity), quantity.over)
    depth = np.repeat(np.arange(len(source.layers)), len(rounds))
    return Table(
        {
            "layer": [name for name in source.layers for _ in rounds],
            "depth": depth + 1.0,
            **_when(rounds, len(source.layers)),
            "value": values.ravel(),
        }
    )


def _over(values: np.ndarray, statistic: str) -> np.ndarray:
    """Over clients, of those that have a value."""
    if statistic == "mean":
        known = np.isfinite(values)
        found: np.ndarray = np.where(known, values, 0.0).sum(axis=0) / np.where(
            known.any(axis=0), known.sum(axis=0), np.nan
        )
        return found
    return quantile(values, {"median": 0.5, "max": 1.0}[statistic])


def quantile(values: np.ndarray, share: float) -> np.ndarray:
    """Of each column, between its finite values; NaN where there is none."""
    known = np.isfinite(values)
    count = known.sum(axis=0)
    in_order = np.sort(np.where(known, values, np.nan), axis=0)  # what is none comes last
    place = share * np.maximum(count - 1, 0)
    below = np.floor(place).astype(np.int64)
    above = np.minimum(below + 1, np.maximum(count - 1, 0))
    low, high = (np.take_along_axis(in_order, at[None, :], axis=0)[0] for at in (below, above))
    found: np.ndarray = np.where(place > below, low + (place - below) * (high - low), low)
    return found


def _when(rounds: Sequence[int], rows: int) -> dict[str, np.ndarray]:
    """A shown round stands for all since the one before it."""
    shown = np.array(rounds, dtype=np.float64)
    since = np.concatenate([[0.0], shown[:-1]])[: len(shown)]
    return {"round": np.tile(shown, rows), "since": np.tile(since, rows)}


@dataclass(frozen=True)
class Cells:
    """Everything of one quantity: a row per round and client (or summary), and in `values` a column per layer."""

    index: Table
    layers: Sequence[str]
    values: np.ndarray

    def of_layer(self, layer: int) -> Table:
        """Clients × rounds."""
        return Table({**self.index.columns, "value": self.values[:, layer]})

    def of_round(self, round: int) -> Table:
        """Clients × layers."""
        rows = np.flatnonzero(self.index.numbers("round") == round)
        clients = [self.index.columns["client"][row] for row in rows]
        return Table(
            {
                "client": [client for client in clients for _ in self.layers],
                "layer": list(self.layers) * len(clients),
                "value": self.values[rows].ravel(),
            }
        )


def cells(source: Source, quantity: Quantity, rounds: Sequence[int], summarised: bool = False) -> Cells:
    """A quantity of every client and layer in these rounds, or what summarises the clients."""
    clients: list[str] = []
    at: list[float] = []
    since: list[float] = []
    blocks = [np.empty((0, len(source.layers)))]
    before = 0
    for round in rounds:
        record = source.record(round)
        values = of_record(record, quantity)
        blocks.append(_summarised(values) if summarised else values)
        who = list(SUMMARY) if summarised else list(map(str, record["clients"].tolist()))
        clients += who
        at += [float(round)] * len(who)
        since += [float(before)] * len(who)
        before = round
    index = Table({"client": clients, "round": np.array(at), "since": np.array(since)})
    return Cells(index, source.layers, np.concatenate(blocks))


def _summarised(values: np.ndarray) -> np.ndarray:
    """SUMMARY over the clients that have a value."""
    return np.array([*(quantile(values, share) for share in (1.0, 0.75, 0.5, 0.25, 0.0)), _over(values, "mean")])


def extent(columns: Sequence[np.ndarray], quantity: Quantity) -> Scale:
    """The one scale of these numbers, logarithmic where they span more than two powers of ten."""
    known = np.concatenate([column[np.isfinite(column)].ravel() for column in columns] or [np.empty(0)])
    if not len(known):
        return Scale(0.0, 1.0)
    low, high = float(known.min()), float(known.max())
    if low == high:
        return Scale(low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2)
    return Scale(low, high, not quantity.linear and low > 0 and high / low > 100)


def model(source: Source, quantity: Quantity, round: int | None = None) -> Table:
    """One row per layer: its numbers, and the quantity over clients in a round (the last one)."""
    shown = round or source.history[-1]["round"]
    with np.errstate(all="ignore"):
        values = _over(of_record(source.record(shown), quantity), quantity.over)
    numbers = np.array([layer.numbers for layer in source.run.about.layers], dtype=np.float64)
    return Table({"layer": source.layers, "numbers": numbers, "value": values})


def clients(source: Source, quantity: Quantity, rounds: Sequence[int]) -> Table:
    """Clients × rounds of what a client has one number of in a round, such as its training loss."""
    parts = []
    before = 0
    for round in rounds:
        record = source.record(round)
        who = list(map(str, record["clients"].tolist()))
        parts.append(
            Table(
                {
                    "client": who,
                    "round": np.full(len(who), float(round)),
                    "since": np.full(len(who), float(before)),
                    "value": of_record(record, quantity),
                }
            )
        )
        before = round
    return stacked(parts)


OUTCOMES = ("all the work", "part of the work", "sent nothing")
"""What became of a client that was sampled, besides the kinds of loss."""


def participation(source: Source, rounds: Sequence[int]) -> Table:
    """Clients × rounds: what became of each client that was sampled."""
    columns: dict[str, list[Any]] = {"client": [], "round": [], "since": [], "outcome": [], "why": []}
    before, full = 0, max((int(source.record(r)["work"].max(initial=0)) for r in rounds), default=0)
    for round in rounds:
        record, line = source.record(round), source.history[round - 1]
        lost = {who["client"]: who for who in line["lost"]}
        for row, client in enumerate(record["clients"].tolist()):
            work, sent = int(record["work"][row]), bool(np.nansum(record["mask"][row]))
            outcome = OUTCOMES[2 if not sent else 1 if 0 < work < full else 0]
            who = lost.get(client)
            values = (str(client), round, before, who["kind"] if who else outcome, who["why"] if who else outcome)
            for column, item in zip(columns.values(), values, strict=True):
                column.append(item)
        before = round
    when = {name: np.array(columns[name], dtype=np.float64) for name in ("round", "since")}
    return Table({**columns, **when})


# --- what travelled --------------------------------------------------------------------------------------------------


def traffic(source: Source, direction: str, rounds: Sequence[int]) -> Table:
    """Bytes of each layer up to each shown round since the one before it, with feedback or control; the largest ones.

    `value` is per round.
    """
    layers = source.layers
    sent = [line["bytes"]["up"] if direction == "up" else line["bytes"]["down"] for line in source.history]
    per_round = np.array(sent, dtype=np.float64)
    extra_name = "feedback" if direction == "up" else "control"
    extra = np.array([_extra(line, extra_name) for line in source.history], dtype=np.float64)
    totals = per_round.sum(axis=0) if len(per_round) else np.zeros(len(layers))
    largest = sorted(np.argsort(-totals, kind="stable")[: LARGEST + (len(layers) == LARGEST + 1)].tolist())
    rest = [at for at in range(len(layers)) if at not in largest]
    named = [(layers[at], per_round[:, at]) for at in largest if totals[at] > 0]
    if rest and totals[rest].sum() > 0:
        named.append((f"{len(rest)} other layers", per_round[:, rest].sum(axis=1)))
    if extra.sum() > 0:
        named.append((extra_name, extra))
    ends = np.array(rounds, dtype=np.int64)
    starts = np.concatenate([[0], ends[:-1]])[: len(ends)]
    spans = (ends - starts).astype(np.float64)
    sums = [np.add.reduceat(values, starts) for _, values in named] if len(ends) else []
    return Table(
        {
            "layer": [name for name, _ in named for _ in rounds],
            "order": np.repeat(np.arange(len(named), dtype=np.float64), len(rounds)),
            **_when(rounds, len(named)),
            "value": np.concatenate([one / spans for one in sums]) if sums else np.empty(0),
            "so_far": np.concatenate([np.cumsum(one) for one in sums]) if sums else np.empty(0),
        }
    )


def _extra(line: Line, name: str) -> float:
    return float(line["bytes"]["feedback"] if name == "feedback" else line["bytes"]["control"])


# --- who harms -------------------------------------------------------------------------------------------------------

ALL_LAYERS, ALL_CLIENTS = "(all its layers)", "(all clients)"


def probe(source: Source, round: int) -> Table:
    """Clients × layers, with all layers of a client and all clients of a layer: how much lower the loss would be."""
    found = source.run.probe(round)
    clients = list(map(str, found.clients.tolist()))
    rows = np.vstack([np.append(found.layer_harm, np.nan), np.column_stack([found.cell_harm, found.harm])])
    names = [*found.layers, ALL_LAYERS]
    return Table(
        {
            "client": [client for client in (ALL_CLIENTS, *clients) for _ in names],
            "layer": names * (len(clients) + 1),
            "value": rows.ravel(),
        }
    )


def around_nothing(values: np.ndarray) -> Scale:
    """A scale with 0 in its middle."""
    most = float(np.max(np.abs(values[np.isfinite(values)]), initial=0.0)) or 1.0
    return Scale(-most, most)


# --- one line per client ---------------------------------------------------------------------------------------------


def trouble(source: Source, rounds: Sequence[int]) -> dict[int, Counter[str]]:
    """Of each client that was sampled: how often it was, and what became of it."""
    found: dict[int, Counter[str]] = {}
    for round in rounds if source.recorded else ():
        for client in source.record(round)["clients"].tolist():
            found.setdefault(client, Counter())["asked"] += 1
    for line in source.history:
        for who in line["lost"]:
            found.setdefault(who["client"], Counter())[who["kind"]] += 1
        for who in line["unmeasured"]:
            found.setdefault(who["client"], Counter())["not evaluated"] += 1
    return found


def enough(arms: Sequence[Arm]) -> bool:
    """Whether some arm has an interval."""
    return any(len(arm.sources) >= ENOUGH_SEEDS for arm in arms)


def quantities(source: Source) -> list[Quantity]:
    """Those per client and layer that the run has."""
    return [quantity for quantity in LAYERED.values() if has(source, quantity)]
