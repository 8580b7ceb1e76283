"""Numbers over seeds: medians with intervals, and differences taken seed by seed.

A target that was not reached within T rounds is censored: it counts as "more than T", is infinite here, and is never
dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import comb

ENOUGH_SEEDS = 5
"""From this many seeds on an interval is given; below it, every value."""


@dataclass(frozen=True)
class Estimate:
    """A median over seeds; with enough of them, a 95 % bootstrap interval of it."""

    values: tuple[float, ...]
    median: float
    interval: tuple[float, float] | None

    def written(self, write: Callable[[float], str]) -> str:
        """Every seed's value, or from enough seeds on the median and its interval."""
        if self.interval is None:
            return ", ".join(map(write, self.values))
        low, high = self.interval
        return f"{write(self.median)} [{write(low)}, {write(high)}]"


def estimate(values: Sequence[float]) -> Estimate:
    """Median and percentile bootstrap; infinite (censored) values take part as what they are, larger than any other.

    What is no number is larger still.
    """

    def in_order(value: float) -> tuple[bool, float]:
        return math.isnan(value), value

    ordered = sorted(map(float, values), key=in_order)
    count = len(ordered)
    interval = None
    if count >= ENOUGH_SEEDS:
        medians = [(_between(ordered[i], ordered[j]), chance) for i, j, chance in _middles_of_resamples(count)]
        medians.sort(key=lambda found: in_order(found[0]))
        interval = (_beyond_the_tail(medians), _beyond_the_tail(medians[::-1]))
    median = _between(ordered[(count - 1) // 2], ordered[count // 2])
    return Estimate(tuple(map(float, values)), median, interval)


def _between(low: float, high: float) -> float:
    """The mean of the middle two, which is infinite if one of them is; between −∞ and ∞ it is 0."""
    return low if low == high else 0.0 if (low, high) == (-math.inf, math.inf) else (low + high) / 2


@lru_cache(maxsize=64)
def _middles_of_resamples(count: int) -> list[tuple[int, int, float]]:
    """How likely the middle two of `count` draws with replacement are the i-th and the j-th smallest value (from 0).

    Counted instead of drawn, out of count^count resamples. The lower middle, the h-th of the draws, is among the i
    smallest values if at least h draws are. With an even count it is the i-th and the upper middle a later one, the
    j-th, if the largest of h draws is the i-th and the smallest of the other h is the j-th.
    """
    half = (count + 1) // 2

    def lower_middle_within(i: int) -> int:
        return sum(comb(count, n) * i**n * (count - i) ** (count - n) for n in range(half, count + 1))

    found = []
    for i in range(count):
        ways = lower_middle_within(i + 1) - lower_middle_within(i)
        for j in range(i + 1, count) if count % 2 == 0 else ():
            largest, smallest = (i + 1) ** half - i**half, (count - j) ** half - (count - j - 1) ** half
            apart = comb(count, half) * largest * smallest
            ways -= apart
            found.append((i, j, apart / count**count))
        found.append((i, i, ways / count**count))
    return found


def _beyond_the_tail(medians: Sequence[tuple[float, float]]) -> float:
    """The first value, from the outside, at or before which 2.5 % of all resamples are."""
    so_far = accumulate(chance for _, chance in medians)
    return next(value for (value, _), chance in zip(medians, so_far, strict=True) if chance >= 0.025)


def paired_differences(ours: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Ours minus the baseline, seed by seed; NaN where both are censored, infinite where one is."""
    return [float("nan") if math.isinf(a) and math.isinf(b) else a - b for a, b in zip(ours, baseline, strict=True)]


def written_differences(
    differences: Sequence[float], write: Callable[[float], str], ours: str, theirs: str, rises: bool = False
) -> str:
    """Paired differences over seeds; where only one side has a number, its name is all that can be said.

    The other one has not reached the target, or its metric became no number; of one that `rises` the worst is −∞.
    """

    def written(value: float) -> str:
        if math.isnan(value):
            return "neither"
        if math.isinf(value):
            return f"{theirs if (value > 0) != rises else ours} only"
        return write(value)

    has_no_middle = any(map(math.isnan, differences)) or {math.inf, -math.inf} <= set(differences)
    return ", ".join(map(written, differences)) if has_no_middle else estimate(differences).written(written)
