"""The server's side of a round once more, number by number, in plain Python: for the tests of its rules.

It is written from the papers' equations and calls nothing of fedstrata's. A model is a list of numbers, a layer the
positions of its trainable numbers and of its buffers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from fedstrata.core.cohort import Cohort
from fedstrata.core.layers import Layers
from tests.support.math import cohort, double

LAYERS = Layers.of_shapes(
    {"a.weight": (2, 1), "b.weight": (1,), "b.running_mean": (1,), "c.weight": (3,)}, "module", dtype=double(0).dtype
)
"""a: numbers 0 and 1; b: number 2, and the buffer 3; c: numbers 4 to 6. Every number is a unit, but b's are one."""

OF_LAYERS = (((0, 1), ()), ((2,), (3,)), ((4, 5, 6), ()))
"""The trainable numbers of each layer, and its buffers."""

LAYER_OF = (0, 0, 1, 1, 2, 2, 2)
TRAINABLE = (0, 1, 2, 4, 5, 6)
NUMBERS = 7


@dataclass
class Upload:
    """What one client has sent: its number, the layers, and the update, 0 where nothing was sent."""

    size: float
    sent: Sequence[bool]
    update: Sequence[float]
    reach: float = 1.0

    @property
    def places(self) -> list[int]:
        """The trainable numbers that it has sent."""
        return [at for at in TRAINABLE if self.sent[LAYER_OF[at]]]

    @property
    def norm(self) -> float:
        return math.sqrt(math.fsum(self.update[at] ** 2 for at in self.places))


Uploads = Sequence[Upload]


def mean(uploads: Uploads, at: int, weights: Sequence[float]) -> float:
    """How far a number goes."""
    senders = [k for k, one in enumerate(uploads) if one.sent[LAYER_OF[at]] and weights[k] > 0]
    if not senders:
        return 0.0
    return math.fsum(weights[k] * uploads[k].update[at] for k in senders) / math.fsum(weights[k] for k in senders)


def sizes(uploads: Uploads) -> list[float]:
    return [one.size for one in uploads]


def by_mean(uploads: Uploads) -> list[float]:
    return [mean(uploads, at, sizes(uploads)) for at in range(NUMBERS)]


def by_fednova(uploads: Uploads) -> list[float]:
    """(Σ p a) Σ p Δ / a over each layer's senders, as in the paper; buffers are weighted by n / a alone."""
    steps = []
    for at in range(NUMBERS):
        senders = [one for one in uploads if one.sent[LAYER_OF[at]]]
        total = math.fsum(sizes(senders))
        if at not in TRAINABLE:
            steps.append(mean(uploads, at, [one.size / one.reach for one in uploads]))
        elif senders:
            effective = math.fsum(one.size / total * one.reach for one in senders)
            steps.append(effective * math.fsum(one.size / total * one.update[at] / one.reach for one in senders))
        else:
            steps.append(0.0)
    return steps


def by_fedexp(uploads: Uploads, epsilon: float) -> list[float]:
    steps = by_mean(uploads)
    squares = 0.0
    for at in TRAINABLE:
        senders = [one for one in uploads if one.sent[LAYER_OF[at]]]
        squares += math.fsum(one.size * one.update[at] ** 2 for one in senders) / max(1, math.fsum(sizes(senders)))
    below = 2 * (math.fsum(steps[at] ** 2 for at in TRAINABLE) + epsilon)
    gain = max(1.0, squares / below) if below > 0 else 1.0
    return [gain * step if at in TRAINABLE else step for at, step in enumerate(steps)]


def by_ida(uploads: Uploads) -> list[float]:
    steps = by_mean(uploads)
    distances, lengths = [], []
    for one in uploads:
        count = max(1, len(one.places))
        distances.append(math.sqrt(math.fsum((one.update[at] - steps[at]) ** 2 for at in one.places) / count))
        lengths.append(math.sqrt(math.fsum(one.update[at] ** 2 for at in one.places) / count))
    least = 1e-6 * max(lengths)
    weights = [1 / max(distance, least) if least > 0 else 1.0 for distance in distances]
    return [mean(uploads, at, weights) for at in range(NUMBERS)]


def krum_scores(uploads: Uploads, byzantine: int) -> list[float]:
    """The sum of the squared distances to the K − f − 2 nearest others."""
    found = []
    for k, one in enumerate(uploads):
        others = [other for j, other in enumerate(uploads) if j != k]
        distances = sorted(math.fsum((one.update[at] - o.update[at]) ** 2 for at in TRAINABLE) for o in others)
        found.append(math.fsum(distances[: max(1, len(uploads) - byzantine - 2)]))
    return found


def values(uploads: Uploads, at: int) -> list[float]:
    return sorted(one.update[at] for one in uploads if one.sent[LAYER_OF[at]])


def by_median(uploads: Uploads) -> list[float]:
    return [statistics.median(values(uploads, at) or [0.0]) for at in range(NUMBERS)]


def by_trimmed_mean(uploads: Uploads, trim: float) -> list[float]:
    steps = []
    for at in range(NUMBERS):
        found = values(uploads, at)
        low = int(trim * len(found))
        steps.append(math.fsum(found[low : len(found) - low]) / max(1, len(found) - 2 * low))
    return steps


def by_norm_bounding(uploads: Uploads, bound: float | None) -> list[float]:
    if bound is None:
        bound = statistics.median([one.norm for one in uploads if any(one.sent)] or [0.0])
    shorter = []
    for one in uploads:
        factor = min(1.0, bound / one.norm) if one.norm > 0 else 1.0
        update = [factor * x if at in TRAINABLE else x for at, x in enumerate(one.update)]
        shorter.append(Upload(one.size, one.sent, update))
    return by_mean(shorter)


COMBINED: dict[str, Callable[..., list[float]]] = {
    "fednova": by_fednova,
    "fedexp": by_fedexp,
    "ida": by_ida,
    "median": by_median,
    "trimmed_mean": by_trimmed_mean,
    "norm_bounding": by_norm_bounding,
}


@dataclass
class Stepping:
    """FedAvgM and the three of Reddi et al., one number after the other, with their memory."""

    name: str
    options: dict[str, float]
    first: list[float] = field(default_factory=lambda: [0.0] * NUMBERS)
    second: list[float] = field(default_factory=list)

    def step(self, model: Sequence[float], uploads: Uploads) -> list[float]:
        new = []
        o = self.options
        self.second = self.second or [o.get("tau", 0.0) ** 2] * NUMBERS
        for at, delta in enumerate(by_mean(uploads)):
            if at not in TRAINABLE or not any(one.sent[LAYER_OF[at]] for one in uploads):
                new.append(model[at] + delta)
                continue
            if self.name == "fedavgm":
                self.first[at] = o["beta"] * self.first[at] + delta
                new.append(model[at] + o["lr"] * self.first[at])
                continue
            self.first[at] = o["beta1"] * self.first[at] + (1 - o["beta1"]) * delta
            self.second[at] = self._second(self.second[at], delta * delta)
            new.append(model[at] + o["lr"] * self.first[at] / (math.sqrt(self.second[at]) + o["tau"]))
        return new

    def _second(self, v: float, squared: float) -> float:
        if self.name == "fedadagrad":
            return v + squared
        rest = 1 - self.options["beta2"]
        if self.name == "fedadam":
            return self.options["beta2"] * v + rest * squared
        return v - rest * squared if v > squared else v + rest * squared if v < squared else v


# --- what hypothesis draws -------------------------------------------------------------------------------------------

numbers = st.floats(-10, 10, allow_nan=False, allow_subnormal=False).map(lambda x: 0.0 if abs(x) < 1e-6 else x)


@st.composite
def rounds(draw: Any, masked: bool = True) -> list[Upload]:
    """The uploads of 1 to 7 clients."""
    uploads = []
    for _ in range(draw(st.integers(1, 7))):
        sent = draw(st.lists(st.booleans(), min_size=3, max_size=3)) if masked else [True] * 3
        update = draw(st.lists(numbers, min_size=NUMBERS, max_size=NUMBERS))
        kept = [x if sent[LAYER_OF[at]] else 0.0 for at, x in enumerate(update)]
        uploads.append(Upload(draw(st.integers(1, 1000)), sent, kept, draw(st.floats(0.5, 50))))
    return uploads


def as_cohort(uploads: Uploads, model: Sequence[float] = (0.0,) * NUMBERS, round: int = 1) -> Cohort:
    """The same as fedstrata has it."""
    return cohort(
        LAYERS,
        [list(one.update) for one in uploads],
        sizes(uploads),
        sent=[list(one.sent) for one in uploads],
        model=double(list(model)),
        round=round,
        reach=[one.reach for one in uploads],
    )
