"""Numbers out of what was recorded in every round of a run.

A series has one value per round, or None where there was no evaluation. "test.error" is 1 − "test.accuracy".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from fedstrata.core.errors import RecipeError
from reproductions.study import Measure

Series = Mapping[str, Sequence[float | None]]


def read(series: Series, name: str) -> list[tuple[int, float]]:
    """(round, value) of a series, where there is one; what became no number is the worst accuracy there is."""
    place, _, quantity = name.rpartition(".")
    if quantity == "error":
        return [(round, 1 - value) for round, value in read(series, f"{place}.accuracy")]
    if name not in series:
        raise RecipeError("series", name, f"was not recorded; there are: {', '.join(series)}")
    recorded = [(round, value) for round, value in enumerate(series[name], start=1) if value is not None]
    if quantity == "accuracy":
        return [(round, value if math.isfinite(value) else 0.0) for round, value in recorded]
    return recorded


def cumulative_upload(series: Series) -> list[float]:
    """Bytes uploaded up to and including each round."""
    total, sums = 0.0, []
    for _, value in read(series, "upload"):
        total += value
        sums.append(total)
    return sums


def measure(
    what: Measure, series: Series, target: float | None = None, budget: float = math.inf, failed: bool = False
) -> float:
    """The measure's value; the mean over its series. Infinite where a target was not reached.

    `target` is the recipe's, `budget` the upload up to which `at_equal_upload` looks. A run that `failed` has no
    weights left: what it had reached before counts, all else is the worst there is.
    """
    target = target if what.target is None else what.target
    return statistics.fmean(_measure(what, series, name, target, budget, failed) for name in what.names)


def _measure(what: Measure, series: Series, name: str, target: float | None, budget: float, failed: bool) -> float:
    if what.kind == "upload":
        return sum(value for _, value in read(series, "upload"))
    if failed and (what.kind not in ("rounds_to", "upload_to", "best") or not _is_recorded(series, name)):
        return math.inf if what.kind in ("rounds_to", "upload_to") else _worst(what, name)
    worst = _worst(what, name)
    values = [(round, value if math.isfinite(value) else worst) for round, value in read(series, name)]
    if not values:
        return math.nan
    if what.kind in ("rounds_to", "upload_to"):
        if target is None:
            raise RecipeError(f"measures.{what.kind}", what.title, "has no target, and neither has the recipe")
        known = values if what.kind == "rounds_to" else _in_every_round(values)
        reached = next((round for round, value in known if _reached(what, value, target)), None)
        if reached is None:
            return math.inf
        return float(reached) if what.kind == "rounds_to" else cumulative_upload(series)[reached - 1]
    if what.kind == "best":
        return (max if what.rises else min)(value for _, value in values)
    if what.kind == "at":
        return next((value for round, value in values if round == what.round), math.nan)
    if what.kind == "mean":
        chosen = [value for round, value in values if what.first <= round <= (what.last or math.inf)]
        return statistics.fmean(chosen) if chosen else math.nan
    if what.kind == "deviation":
        last = [value for _, value in values[-(what.last or 0) :]]
        return statistics.pstdev(last) if all(map(math.isfinite, last)) else worst
    if what.kind == "at_equal_upload":
        totals = cumulative_upload(series)
        uploaded, there = zip(*((totals[round - 1], value) for round, value in values), strict=True)
        return float(np.interp(budget, uploaded, there)) if uploaded[0] <= budget else math.nan
    return values[-1][1]


def _in_every_round(values: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """From the first evaluation to the last one, with what lies on straight lines between them."""
    rounds, numbers = zip(*values, strict=True)
    every = range(rounds[0], rounds[-1] + 1)
    return list(zip(every, np.interp(every, rounds, numbers).tolist(), strict=True))


def _is_recorded(series: Series, name: str) -> bool:
    return (f"{name.rpartition('.')[0]}.accuracy" if name.endswith(".error") else name) in series


def _worst(what: Measure, name: str) -> float:
    """What weights that are no numbers are worth."""
    if what.kind == "deviation":
        return math.inf
    return {"accuracy": 0.0, "error": 1.0}.get(name.rpartition(".")[2], -math.inf if what.rises else math.inf)


def _reached(what: Measure, value: float, target: float) -> bool:
    return value >= target if what.rises else value <= target
