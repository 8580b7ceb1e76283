"""What the view says in words and tables. A cell is text, or text and the number it stands for, which is in the CSV."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedstrata.formatting import duration, number, size
from fedstrata.plots.arms import Arm, Source, settings_of
from fedstrata.plots.quantities import Quantity
from fedstrata.plots.tables import of_record, or_worst, rounded, trouble
from fedstrata.runs.statistics import ENOUGH_SEEDS, Estimate, estimate

MOST_CLIENTS = 200
"""Rows of a table of clients."""

_RATE = 10e6 / 8  # bytes a second

Cell = str | dict[str, Any]
Words = dict[str, Any]


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], words: Sequence[int] = (), note: str = "") -> Words:
    """A table; in the columns `words` are sentences and not numbers."""
    return {"columns": list(columns), "rows": [list(row) for row in rows], "words": list(words), "note": note}


def _cell(value: float | None, write: Callable[[float], str], missing: str = "–") -> Cell:
    if value is None or not math.isfinite(value):
        return missing
    return {"text": write(value), "value": rounded(value)}


def _short(value: float) -> str:
    return f"{value:.4g}"


# --- outcome ---------------------------------------------------------------------------------------------------------


def outcome(arms: Sequence[Arm]) -> Words:
    """A row for each arm: of its finished runs, or of all as far as they are if none is finished."""
    metrics = {arm.first.run.metric.name for arm in arms}
    targets = {arm.first.run.recipe.evaluation.target for arm in arms}
    metric = metrics.pop() if len(metrics) == 1 else "metric"
    goal = f"{next(iter(targets)):g}" if len(targets) == 1 and None not in targets else "target"
    columns = ["algorithm", "seeds", "rounds", metric, "best", "upload", "time", "upload at 10 Mbit/s"]
    if targets != {None}:
        columns += [f"rounds to {goal}", f"upload to {goal}"]
    rows = [_outcome(arm, targeted=targets != {None}) for arm in arms]
    note = "Upload at 10 Mbit/s: how long a client's upload takes in a round."
    if any(len(arm.sources) > 1 for arm in arms):
        note += (
            f" From {ENOUGH_SEEDS} seeds on, medians over seeds with 95 % bootstrap intervals; below that, every "
            "seed's value. Time: all seeds together."
        )
    return table(columns, rows, note=note)


def _outcome(arm: Arm, targeted: bool) -> list[Cell]:
    begun = [source for source in arm.sources if source.history]
    counted = [source for source in begun if source.finished] or begun
    metric, target = arm.first.run.metric, arm.first.run.recipe.evaluation.target
    seeds = ", ".join(str(source.seed) for source in arm.sources)
    rounds = ", ".join(dict.fromkeys(str(len(source.history)) for source in arm.sources))

    def over(name: str, missing: float, write: Callable[[float], str]) -> Cell:
        if not counted:
            return "–"
        return _over_seeds(estimate([or_worst(one.summary[name], missing) for one in counted]), write)

    lines = [line for source in counted for line in source.history]
    sent = sum(line["upload"] for line in lines) / max(1, sum(line["clients"] for line in lines))
    row: list[Cell] = [arm.name, seeds, rounds, over(metric.name, metric.worst, number)]
    row += [over("best", metric.worst, number), over("upload", math.inf, size)]
    row += [_cell(sum(line["seconds"] for line in lines), duration), _cell(sent / _RATE, duration)]
    if targeted and target is None:
        row += ["–", "–"]
    elif targeted:
        within = min((len(source.history) for source in counted), default=0)
        row += [
            over("rounds_to_target", math.inf, lambda value: _short(value) if math.isfinite(value) else f">{within}")
        ]
        row += [
            over("upload_to_target", math.inf, lambda value: size(value) if math.isfinite(value) else "not reached")
        ]
    return row


def _over_seeds(found: Estimate, write: Callable[[float], str]) -> Cell:
    texts = list(dict.fromkeys(map(write, found.values)))
    if len(texts) > 1 and found.interval is not None:
        low, high = map(write, found.interval)
        return {"text": f"{write(found.median)} [{low}, {high}]", "value": rounded(found.median)}
    return {"text": ", ".join(texts), "value": rounded(found.median)}


def notices(arms: Sequence[Arm], left_out: Sequence[str], summarised: bool, every: int) -> list[str]:
    """What a reader must know before the numbers."""
    lines = [
        f"Not finished: {arm.name}, seed {source.seed}, has {len(source.history)} of "
        f"{source.run.recipe.training.rounds} rounds. Go on with: fedstrata run --resume {source.run.path}"
        for arm in arms
        for source in arm.sources
        if not source.finished
    ]
    lines += [f"Left out: {problem}" for problem in left_out]
    if summarised:
        lines.append(
            "Too many numbers for one page: clients are summarised. Layers show the maximum, quartiles, minimum and "
            "mean over each round's clients."
        )
    if every > 1:
        lines.append(
            f"Of the numbers per layer, every {every}th round is shown; bytes are means over the rounds between."
        )
    return lines


# --- findings --------------------------------------------------------------------------------------------------------


def findings(source: Source) -> list[dict[str, Any]]:
    """What stands out in a run: kind and sentence, and the client and layer to look at."""
    found = source.run.findings(source.history)
    return [{"kind": one.kind, "text": one.sentence, "client": one.client, "layer": one.layer} for one in found]


# --- layers and clients ----------------------------------------------------------------------------------------------


def layers(source: Source, quantities: Sequence[Quantity]) -> Words:
    """The last round in numbers: medians over clients, and what was uploaded in all rounds."""
    if not source.recorded:
        return table(["layer"], [])
    last = source.history[-1]["round"]
    record = source.record(last)
    shown = [quantity for quantity in quantities if quantity.name != "smoothed_angle"]
    values = [of_record(record, quantity) for quantity in shown]
    uploaded = np.sum([line["bytes"]["up"] for line in source.history], axis=0)
    rows: list[list[Cell]] = []
    for at, layer in enumerate(source.run.about.layers):
        row: list[Cell] = [layer.name, {"text": f"{layer.numbers:,}", "value": layer.numbers}]
        for quantity, of in zip(shown, values, strict=True):
            known = of[:, at][np.isfinite(of[:, at])]
            if quantity.name == "weight" and len(known):
                row.append({"text": f"{known.min():.3g}–{known.max():.3g}", "value": rounded(float(np.median(known)))})
            else:
                middle = np.mean if quantity.over == "mean" else np.median
                row.append(_cell(float(middle(known)), _short) if len(known) else "–")
        rows.append([*row, _cell(float(uploaded[at]), size)])
    note = f"Round {last}: medians over clients; of weights the range, of “sent” the mean. Uploaded: in all rounds."
    return table(["layer", "numbers", *(quantity.titled for quantity in shown), "uploaded"], rows, note=note)


def people(source: Source, rounds: Sequence[int]) -> Words:
    """One line per client, those with most trouble first: what it has, what it did, and its last numbers."""
    if not source.history:
        return table(["client"], [])
    became, recent = trouble(source, rounds), rounds[-_RECENT:]
    records = [source.record(round) for round in recent] if source.recorded else []
    sizes = {client: int(n) for record in records for client, n in _pairs(record, "sizes")}
    means = {
        name: _means([pair for record in records for pair in _pairs(record, name)])
        for name in ("loss", "model_angle", "weight")
    }
    kinds = [kind for kind in dict.fromkeys(kind for of in became.values() for kind in of) if kind != "asked"]
    held = source.run.about.data.table
    order = sorted(became, key=lambda client: (-sum(became[client][kind] for kind in kinds), client))
    rows: list[list[Cell]] = []
    for client in order[:MOST_CLIENTS]:
        row: list[Cell] = [str(client), _count(sizes.get(client)), _count(became[client]["asked"])]
        row += [_count(became[client][kind]) for kind in kinds]
        row.append(_cell(means["loss"].get(client), number))
        row.append(_cell(math.degrees(means["model_angle"].get(client, math.nan)), lambda value: f"{value:.1f}°"))
        row.append(_cell(means["weight"].get(client), _short))
        if held is not None and client < len(held):
            row.append(_count(sum(count > 0 for count in held[client])))
        elif held is not None:
            row.append("–")
        rows.append(row)
    columns = ["client", "samples", "rounds asked", *kinds, "training loss", "angle", "weight"]
    columns += ["classes"] if held is not None else []
    note = (
        f"Training loss, angle of the whole update and weight: means over the last {len(recent)} of the rounds shown."
    )
    if source.recorded and len(rounds) < len(source.history):
        note += f" Rounds asked: of every {rounds[0]}th round."
    if len(order) > MOST_CLIENTS:
        note += f" The first {MOST_CLIENTS} of {len(order)} clients."
    return table(columns, rows, note=note)


_RECENT = 10


def _pairs(record: Mapping[str, np.ndarray], name: str) -> Iterator[tuple[int, float]]:
    values = record[name]
    if values.ndim == 2:  # without a layer that travels there is no mean
        values = values.mean(axis=1) if values.shape[1] else np.full(len(values), np.nan)
    yield from zip(record["clients"].tolist(), values.tolist(), strict=True)


def _means(pairs: Sequence[tuple[int, float]]) -> dict[int, float]:
    of: dict[int, list[float]] = {}
    for client, value in pairs:
        if math.isfinite(value):
            of.setdefault(client, []).append(value)
    return {client: sum(values) / len(values) for client, values in of.items()}


def _count(value: int | None) -> Cell:
    return "·" if not value else {"text": f"{value:,}", "value": value}


def partition(source: Source) -> Words:
    """Samples by client and class, where the task tells."""
    data = source.run.about.data
    about = f"Data: {data.dataset} ({data.source})." if data.source is not None else ""
    if data.table is None:
        return table([], [], note=f"{about} The run says nothing of its clients' classes.".strip())
    counts = np.array(data.table, dtype=np.int64)
    names = [" ".join([str(client), *data.client_names[client : client + 1]]) for client in range(len(counts))]
    rows: list[list[Cell]] = [
        [names[client], *map(_count, row), {"text": f"{sum(row):,}", "value": sum(row)}]
        for client, row in enumerate(counts[:MOST_CLIENTS].tolist())
    ]
    note = (
        f"{about} {len(counts)} clients; each has {_spread(counts.sum(1), 'samples')} of "
        f"{_spread((counts > 0).sum(1), 'classes')}."
    )
    if len(counts) > MOST_CLIENTS:
        note += f" The first {MOST_CLIENTS} are shown."
    return {**table(["client", *data.class_names, "all"], rows, note=note.strip()), "shaded": int(counts.max())}


def _spread(values: np.ndarray, what: str) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low:,} {what}" if low == high else f"{low:,} to {high:,} {what} (median {np.median(values):,g})"


def replies(source: Source) -> Words:
    """Whose replies were lost, and why; who could not be evaluated."""
    lost = [(line["round"], who) for line in source.history for who in line["lost"]]
    lost += [(line["round"], who) for line in source.history for who in line["unmeasured"]]
    asked = sum(line["clients"] for line in source.history)
    again = sum(line["attempt"] for line in source.history)
    if not lost and not again:
        return table([], [], note="Every client that was asked replied, in every round." if asked else "")
    missing = sum(len(line["lost"]) for line in source.history)
    note = f"{missing} of {asked} requests to clients brought no usable reply"
    note += f"; {again} attempts at a round had to be repeated." if again else "."
    last = sorted(lost, key=lambda one: one[0])[-MOST_CLIENTS:]
    rows = [[str(round), str(who["client"]), who["kind"], who["why"][:300]] for round, who in last]
    if len(lost) > len(rows):
        note += f" The last {len(rows)} are listed."
    return table(["round", "client", "what", "why"], rows, words=[3], note=note)


# --- settings --------------------------------------------------------------------------------------------------------


def settings(arms: Sequence[Arm], shared: bool) -> Words:
    """The settings that all arms share, or those in which they differ."""
    of = [settings_of(arm.first.run.recipe) for arm in arms]
    keys = list(dict.fromkeys(key for one in of for key in one))
    wanted = [key for key in keys if (len({one.get(key) for one in of}) == 1) == shared]
    if shared:
        return table(["setting", "value"], [[key, of[0][key]] for key in wanted], words=[1])
    columns = ["setting", *(arm.name for arm in arms)]
    return table(columns, [[key, *(one.get(key, "–") for one in of)] for key in wanted], words=range(1, len(columns)))


def directories(arms: Sequence[Arm]) -> Words:
    """Where the runs are."""
    rows = [
        [arm.name, str(source.seed), source.run.about.created, str(source.run.path)]
        for arm in arms
        for source in arm.sources
    ]
    return table(["run", "seed", "begun", "directory"], rows, words=[3])


def became(source: Source) -> Counter[str]:
    """How many replies were lost, by kind."""
    return Counter(who["kind"] for line in source.history for who in line["lost"])
