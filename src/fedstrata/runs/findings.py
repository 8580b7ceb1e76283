"""What stands out in a run: layers and clients that differ, clients that one should look at, clients that failed.

run = fedstrata.Run("runs/example")
for finding in run.findings():
    print(finding.kind, finding.client, finding.sentence)

To differ is not to harm: where data is skewed, clients have other losses and other updates, and nobody is at fault. So
an alarm (`client_suspect`) needs more than an outlier, and its rules are few (docs/findings.md says what they find):

- *stuck*: what the client sends is nothing, the same update or the same model in every round.
- *few samples*: fewer than fill a batch, where the others have many times as many.
- *unlearns*: its loss stays far above the others', also for the classes that it has, and its updates take back what the
  model has learned: they point against the weights. A sound client whose data is harder points along them.
- *does not fit*: it began with a loss far worse than guessing, where the others did not, and stays above them.
- *memorises*: its loss is far below the others', while its first layer moves far more next to its other layers. So does
  a network that learns by heart what is noise.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fedstrata.formatting import number
from fedstrata.runs.formats import About, LayerRecord, Line

Kind = Literal["client_suspect", "client_failed", "client_differs", "layer_differs"]

KINDS: tuple[Kind, ...] = ("client_suspect", "client_failed", "client_differs", "layer_differs")
"""In the order in which they are told."""

FAILURES = ("failed", "refused", "not finite", "no reply")
"""What became of a client that has failed; dropouts and stragglers are as the experiment wants them."""

FEWEST_ROUNDS, FEWEST_CLIENTS = 3, 4
"""A client is judged by no fewer rounds, and beside no fewer clients."""

FIRST_ROUNDS = 5
"""A client begins in one of these, or nobody knows how."""

MOST_ROUNDS = 100
"""So many rounds are read: of the second half of a run, evenly."""


@dataclass(frozen=True)
class Finding:
    """One thing that stands out."""

    kind: Kind
    layer: str | None
    client: int | None
    effect: float
    """How large it is, to sort by; what it measures goes by `reason`."""
    reason: str
    """A word for what was found: the rule."""
    sentence: str
    """For people."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    """The numbers in the sentence, and what they were compared with."""
    rounds: tuple[int, int] = (0, 0)
    """The first and the last round that were looked at."""


def find(
    about: About, history: Sequence[Line], layers: Callable[[int], LayerRecord] | None, batch_size: int
) -> list[Finding]:
    """What stands out in these rounds. `layers` gives the record of a round, None if there is none."""
    found = list(_failed(about, history))
    rounds = _looked_at(len(history))
    if layers is not None and len(rounds) >= FEWEST_ROUNDS:
        with warnings.catch_warnings(), np.errstate(all="ignore"):  # whatever a file may hold; all-NaN slices
            warnings.simplefilter("ignore", RuntimeWarning)
            table = _Table.of(about, rounds, layers)
            suspects = list(_suspects(table, history, batch_size))
            found += suspects
            found += _differing_clients(table, {suspect.client for suspect in suspects})
            found += _differing_layers(table)
    return sorted(found, key=lambda finding: (KINDS.index(finding.kind), -finding.effect))


def _looked_at(done: int) -> list[int]:
    """The second half of the rounds, or some of it."""
    half = range(done // 2 + 1, done + 1)
    if len(half) <= MOST_ROUNDS:
        return list(half)
    return sorted({half[int(at)] for at in np.linspace(0, len(half) - 1, MOST_ROUNDS)})


# --- what was recorded -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
    """Rounds x clients (x layers) of what was recorded; NaN where a client did not take part, or nothing is known."""

    rounds: list[int]
    names: list[str]
    people: list[str]
    loss: np.ndarray
    sizes: np.ndarray
    angle: np.ndarray
    divergence: np.ndarray
    norm: np.ndarray
    first: np.ndarray
    """The losses of the first rounds, to begin with."""
    classes: int
    """How many there are; 0 where they were not counted."""
    entropy: np.ndarray | None
    """Of each client's classes, in nats, [N], where they were counted."""

    @classmethod
    def of(cls, about: About, rounds: list[int], layers: Callable[[int], LayerRecord]) -> _Table:
        """Read the rounds."""
        records = [layers(round) for round in rounds]
        early = [layers(round) for round in range(1, min(FIRST_ROUNDS, rounds[0] - 1) + 1)]

        def gathered(name: str, records: list[LayerRecord] = records) -> np.ndarray:
            shape = (about.clients, len(about.layers)) if records and records[0][name].ndim == 2 else (about.clients,)
            whole = np.full((len(records), *shape), np.nan)
            for at, record in enumerate(records):
                values = record[name].astype(np.float64)
                whole[at, record["clients"]] = np.where(np.isfinite(values), values, np.nan)
            return whole

        arrays = {name: gathered(name) for name in ("loss", "sizes", "angle", "divergence", "norm")}
        counts = about.data.table
        known = counts is not None and len(counts) == about.clients
        return cls(
            rounds,
            [layer.name for layer in about.layers],
            [_called(about, client) for client in range(about.clients)],
            first=gathered("loss", early),
            classes=len(about.data.class_names) if known else 0,
            entropy=_entropy(np.array(counts, dtype=np.float64)) if known else None,
            **arrays,
        )

    @property
    def window(self) -> tuple[int, int]:
        """The first and the last round."""
        return self.rounds[0], self.rounds[-1]

    def typical(self, values: np.ndarray) -> np.ndarray:
        """The median over rounds, NaN for who was there too seldom."""
        enough = np.isfinite(values).sum(0) >= FEWEST_ROUNDS
        typical: np.ndarray = np.where(enough, np.nanmedian(values, 0), np.nan)
        return typical


def _called(about: About, client: int) -> str:
    """A client, by the name that it has where the task gives names."""
    names = about.data.client_names
    return f"Client {client} ({names[client]})" if client < len(names) else f"Client {client}"


def _entropy(counts: np.ndarray) -> np.ndarray:
    """Of each row's shares, in nats: the loss of who knows nothing but how often each class comes."""
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    summed: np.ndarray = np.where(shares > 0, -shares * np.log(np.where(shares > 0, shares, 1)), 0).sum(1)
    return summed


def _outlying(values: np.ndarray, least: float) -> np.ndarray:
    """Robust z-scores: how far from the median, in spreads of the middle; no spread is less than `least`."""
    middle = np.nanmedian(values, 0)
    spread: np.ndarray = 1.4826 * np.nanmedian(np.abs(values - middle), 0)
    scores: np.ndarray = (values - middle) / np.maximum(spread, least)
    return scores


def _against_weights(table: _Table) -> np.ndarray:
    """cos(Δ_k, w) of each client, less the median client's, in the mean over layers, [N]: below 0, it takes back.

    ‖w + Δ‖² − ‖Δ‖² = ‖w‖² + 2⟨w, Δ⟩ is known of every client, and ‖w‖² is the same for all of a round. What the
    median client has is taken out with it.
    """
    projected = table.norm**2 - table.divergence**2
    middle = np.nanmedian(projected, 1, keepdims=True)
    lengths = table.divergence * np.sqrt(np.maximum(middle, 0))
    cosines = np.where(lengths > 0, (projected - middle) / 2 / np.where(lengths > 0, lengths, 1), np.nan)
    return table.typical(np.nanmean(cosines, 2))


# --- who is to be looked at ------------------------------------------------------------------------------------------

HIGHER = 2.0
"""The loss of who unlearns is so many times the median client's, also if the classes of each are taken into account."""
OUTLYING = 3.5
"""Robust standard deviations from the median client: what is far outside."""
TAKES_BACK, CLEARLY_BACK = -0.05, -0.2
"""cos(Δ, w), less the median client's, of who unlearns: this where its loss is far outside, that where it is not."""
WORSE, FAR_ABOVE = 2.0, 3.0
"""A first loss that fits nothing: so many times that of guessing, and so many times the median client's."""
LOWER, MOVES_MORE = 0.6, 1.15
"""Of who memorises: its loss, and how far the first layer moves next to the others, as parts of the median client's."""
FEW = 0.1
"""Samples, as a part of the median client's."""
LEARNED = 0.75
"""Training loss now, as a part of the first round's, above which nobody has learned enough to be judged by losses."""
SAME = 1e-5
"""What changes less than this from round to round, relatively, is the same."""


def _suspects(table: _Table, history: Sequence[Line], batch_size: int) -> Iterator[Finding]:
    """The first rule that holds speaks for a client."""
    there = np.isfinite(table.sizes).sum(0) >= FEWEST_ROUNDS
    if there.sum() < FEWEST_CLIENTS:
        return
    told: set[int] = set()
    stuck = list(_stuck(table))
    if 2 * len(stuck) > there.sum():
        stuck = []  # training has come to rest
    rules: list[Iterable[Finding]] = [stuck, _few(table, batch_size)]
    if _has_learned(history):
        rules += [_unlearning(table), _unfitting(table), _memorising(table)]
    for rule in rules:
        for finding in rule:
            if finding.client not in told and finding.client is not None:
                told.add(finding.client)
                yield finding


def _has_learned(history: Sequence[Line]) -> bool:
    losses = [line["train_loss"] for line in history if line["train_loss"] is not None]
    return len(losses) > 1 and float(np.median(losses[len(losses) // 2 :])) < LEARNED * losses[0]


def _stuck(table: _Table) -> Iterator[Finding]:
    """Nothing, the same update or the same model in every round, in all layers that move at all."""
    moving = np.nanmedian(table.divergence, (0, 1)) > 0
    divergence, norm = table.divergence[:, :, moving], table.norm[:, :, moving]
    for client in range(divergence.shape[1]):
        sent = np.isfinite(divergence[:, client]).any(1)
        moved, lengths = divergence[sent, client], norm[sent, client]
        if len(moved) < FEWEST_ROUNDS or not moving.any():
            continue
        what = ""
        if not np.nansum(moved):
            what = "sends no update: its layers come back as they were sent"
        elif _is_constant(moved):
            what = "sends the same update in every round"
        elif _is_constant(lengths) and np.nanmedian(moved / lengths) > 100 * SAME:
            what = "sends the same model in every round, wherever the global one is"
        if what:
            evidence = {"update": float(np.nanmean(moved)), "rounds": float(len(moved))}
            yield _suspect(table, client, "stuck", math.inf, what, evidence)


def _is_constant(values: np.ndarray) -> bool:
    """Whether every column stays the same over the rows, of those that are known often enough."""
    known = values[:, np.isfinite(values).sum(0) >= FEWEST_ROUNDS]
    low, high = np.nanmin(known, 0), np.nanmax(known, 0)
    return known.size > 0 and bool((high - low <= SAME * high).all())


def _few(table: _Table, batch_size: int) -> Iterator[Finding]:
    sizes = table.typical(table.sizes)
    middle = float(np.nanmedian(sizes))
    scores = _outlying(np.log(sizes), 0.1)
    for client in np.flatnonzero((sizes <= batch_size) & (sizes < FEW * middle) & (scores < -OUTLYING)).tolist():
        what = f"has {sizes[client]:.0f} samples, less than a batch of {batch_size}; the median client has {middle:.0f}"
        if sizes[client] == batch_size:
            what = what.replace("less than", "just")
        evidence = {"samples": float(sizes[client]), "median": middle}
        yield _suspect(table, client, "few samples", middle / float(sizes[client]), what, evidence)


def _relative_losses(table: _Table) -> list[np.ndarray]:
    """Logarithms of each client's loss over the median client's in the same round; and of its share of the entropy."""
    losses = np.log(np.where(table.loss > 0, table.loss, np.nan))
    found = [losses]
    if table.entropy is not None:  # whose classes are mixed has more to learn
        least = np.nanmedian(table.entropy) / 2
        if least > 0:
            found.append(losses - np.log(np.maximum(table.entropy, least)))
    return [table.typical(each - np.nanmedian(each, 1, keepdims=True)) for each in found]


def _unlearning(table: _Table) -> Iterator[Finding]:
    """A high loss, and updates that clearly take back; or a little, if the loss is far outside, and classes known."""
    relative, back = _relative_losses(table), _against_weights(table)
    times = np.min(relative, axis=0)
    outlying = np.min([_outlying(each, 0.1) for each in relative], axis=0)
    clearly = (back < CLEARLY_BACK) & (outlying > OUTLYING / 2)
    far = (back < TAKES_BACK) & (outlying > OUTLYING) & (len(relative) > 1)
    judged = (times > np.log(HIGHER)) & (clearly | far)
    for client in np.flatnonzero(judged).tolist():
        loss, others = _losses(table, client)
        what = (
            f"does not learn what the others learn: its training loss is {number(loss)}, the median client's "
            f"{number(others)}, and its updates take back what the model has learned"
        )
        effect = float(np.exp(times[client]))
        evidence = {"loss": loss, "median": others, "times": effect, "along_weights": float(back[client])}
        yield _suspect(table, client, "unlearns", effect, what, evidence)


def _unfitting(table: _Table) -> Iterator[Finding]:
    """Worse than guessing, by far and at first, and never as good as the others."""
    if table.classes < 2:
        return
    guessing = float(np.log(table.classes))
    times = np.min(_relative_losses(table), axis=0)
    for client in range(len(times)):
        there = np.flatnonzero(np.isfinite(table.first[:, client]))
        if not len(there):
            continue
        first, others = float(table.first[there[0], client]), float(np.nanmedian(table.first[there[0]]))
        if first > WORSE * guessing and first > FAR_ABOVE * others and times[client] > np.log(HIGHER) / 2:
            what = (
                f"has inputs or labels that are not like the others': its first training loss was {number(first)}, "
                f"where guessing has {number(guessing)} and the median client had {number(others)}"
            )
            evidence = {"loss": first, "median": others, "guessing": guessing}
            yield _suspect(table, client, "does not fit", first / others, what, evidence)


def _memorising(table: _Table) -> Iterator[Finding]:
    """A low loss, and a first layer that moves more than the rest of the network would let one think."""
    if table.divergence.shape[2] < 2:
        return
    relative = _relative_losses(table)
    logs = np.log(np.where(table.divergence > 0, table.divergence, np.nan))
    profile = logs[:, :, 0] - np.nanmean(logs, 2)
    moves = table.typical(profile - np.nanmedian(profile, 1, keepdims=True))
    times = np.max(relative, axis=0)
    outlying = np.max([_outlying(each, 0.1) for each in relative], axis=0)
    low = (times < np.log(LOWER)) & (outlying < -OUTLYING)
    judged = low & (moves > np.log(MOVES_MORE)) & (_outlying(moves, 0.05) > OUTLYING)
    for client in np.flatnonzero(judged).tolist():
        loss, others = _losses(table, client)
        what = (
            f"learns by heart, as one does with noise: its training loss is {number(loss)}, the median client's "
            f"{number(others)}, and layer {table.names[0]} moves more, next to the others, than elsewhere"
        )
        evidence = {"loss": loss, "median": others, "moves": float(np.exp(moves[client]))}
        effect = float(np.exp(-times[client]))
        yield _suspect(table, client, "memorises", effect, what, evidence, table.names[0])


def _losses(table: _Table, client: int) -> tuple[float, float]:
    """A client's, and the median client's in the rounds in which it was there."""
    there = np.isfinite(table.loss[:, client])
    return float(np.median(table.loss[there, client])), float(np.median(np.nanmedian(table.loss[there], 1)))


def _suspect(
    table: _Table,
    client: int,
    reason: str,
    effect: float,
    what: str,
    evidence: Mapping[str, float],
    layer: str | None = None,
) -> Finding:
    sentence = f"{table.people[client]} {what}."
    return Finding("client_suspect", layer, client, effect, reason, sentence, evidence, table.window)


# --- who and what differs --------------------------------------------------------------------------------------------


def _failed(about: About, history: Sequence[Line]) -> Iterator[Finding]:
    """Clients whose replies could not be used, earlier attempts included."""
    lost = [(line["round"], who) for line in history for who in [*line["earlier"], *line["lost"]]]
    lost = [(round, who) for round, who in lost if who["kind"] in FAILURES]
    times = Counter(who["client"] for _, who in lost)
    last = {who["client"]: (round, who) for round, who in lost}
    for client, count in times.items():
        round, who = last[client]
        often = f"{count} times, the last time in round {round}" if count > 1 else f"in round {round}"
        sentence = f"{_called(about, client)} gave nothing that can be used {often}: {who['why'][:300]}"
        evidence = {"times": float(count), "rounds": float(len(history))}
        window = (history[0]["round"], history[-1]["round"])
        yield Finding("client_failed", None, client, float(count), who["kind"], sentence, evidence, window)


MOST_DIFFERING = 3
"""Clients, and layers, that are described."""


def _differing_clients(table: _Table, suspects: set[int | None]) -> list[Finding]:
    """Whose updates point elsewhere than the other clients', and in which layer most."""
    degrees = np.degrees(table.angle)
    apart = table.typical(degrees - np.nanmedian(degrees, 1, keepdims=True))
    if np.isfinite(apart).any(1).sum() < FEWEST_CLIENTS:
        return []
    differs = (np.abs(apart) > 10) & (np.abs(_outlying(apart, 2.0)) > OUTLYING)
    found = []
    for client in np.flatnonzero(differs.any(1)).tolist():
        if client in suspects:
            continue
        layer = int(np.nanargmax(np.where(differs[client], np.abs(apart[client]), np.nan)))
        own = float(np.nanmedian(degrees[:, client, layer]))
        there = np.isfinite(degrees[:, client, layer])
        others = float(np.median(np.nanmedian(degrees[there, :, layer], 1)))
        sentence = (
            f"{table.people[client]} differs most in layer {table.names[layer]}: its update points {own:.0f}° from the "
            f"clients' mean, the median client's {others:.0f}°."
        )
        evidence = {"angle": own, "median": others}
        effect = abs(float(apart[client, layer]))
        name = table.names[layer]
        found.append(Finding("client_differs", name, client, effect, "angle", sentence, evidence, table.window))
    return sorted(found, key=lambda finding: -finding.effect)[:MOST_DIFFERING]


def _differing_layers(table: _Table) -> list[Finding]:
    """The layers that clients disagree about more than about others."""
    degrees = np.degrees(table.angle)
    angles = np.array([np.nanmedian(degrees[:, :, at]) for at in range(degrees.shape[2])])
    if len(angles) < 2 or not np.isfinite(angles).any():
        return []
    found = []
    for at in np.argsort(-np.where(np.isfinite(angles), angles, -np.inf))[:MOST_DIFFERING].tolist():
        others = float(np.nanmedian(np.delete(angles, at)))
        if not angles[at] - others > 5:
            continue
        sentence = (
            f"Clients disagree about layer {table.names[at]} more than about others: their updates point "
            f"{angles[at]:.0f}° from the clients' mean, {others:.0f}° in the other layers."
        )
        evidence = {"angle": float(angles[at]), "others": others}
        effect = float(angles[at]) - others
        found.append(Finding("layer_differs", table.names[at], None, effect, "angle", sentence, evidence, table.window))
    return found
