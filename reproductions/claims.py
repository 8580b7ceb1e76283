"""Claims checked against measured numbers, seed by seed.

In one cell a comparison *holds* if every seed favours it, or, from five seeds on, if the 95 % bootstrap interval of the
median lies on its side; it *fails* if the same is true of the other side, and is otherwise *open*. How much a seed
favours “within m” is by how much its difference stays within m, on either side. The
claim holds if all of its comparisons hold, in part if some do, is open if all of them are (seeds that do not decide are
no evidence against it), and otherwise does not hold. One that says “the best of all” cannot hold in part: it does not
hold as soon as one comparison fails, and is open as long as one is open or not run.

An accuracy is higher than another one if it is so by a tenth of a point, and otherwise is not. A seed decides nothing
if neither arm reached the target. A seed without a number, as of rounds that were not run, does not count. Of a target
that was not reached, all that is known is that it lies beyond what was run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

from fedstrata.runs.statistics import ENOUGH_SEEDS, estimate, paired_differences
from reproductions.results import Results
from reproductions.study import Claim

RELEVANT = 1e-3
"""Of accuracies: what is not higher by at least a tenth of a point, ten images of ten thousand, is no higher."""

FEW_SEEDS = 3
"""With fewer, a verdict is only a hint."""

Outcome = Literal["holds", "open", "fails"]
Verdict = Literal["holds", "holds in part", "open", "does not hold", "not tested"]


@dataclass(frozen=True)
class Known:
    """A number, and between which two it lies: of a target that was missed, beyond where the run ended."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Finding:
    """One comparison: a cell, what it was compared with (an arm, a value, a cell), and the numbers seed by seed."""

    cell: str
    than: str
    ours: list[float]
    theirs: list[float]
    scores: list[float | None]
    """By how much each seed favours the claim."""
    outcome: Outcome

    @property
    def seeds(self) -> int:
        """How many pairs there are."""
        return len(self.ours)

    @property
    def contradictory(self) -> bool:
        """Whether some seeds decide one way and some the other."""
        decided = [score for score in self.scores if score is not None]
        return min(decided, default=0) < 0 < max(decided, default=0)

    @property
    def censored(self) -> int:
        """In how many of them neither reached the target."""
        return sum(math.isinf(a) and math.isinf(b) for a, b in zip(self.ours, self.theirs, strict=True))


@dataclass(frozen=True)
class Ruling:
    """What became of a claim."""

    claim: Claim
    findings: list[Finding]
    missing: int
    """Comparisons of which nothing is stored, or nothing that can be compared."""

    @property
    def verdict(self) -> Verdict:
        """In a word or three."""
        held = self.count("holds")
        if not self.findings:
            return "not tested"
        if held == len(self.findings) and not self.missing:
            return "holds"
        if held and not self.claim.best:
            return "holds in part"
        return "does not hold" if self.count("fails") else "open"

    @property
    def hint(self) -> bool:
        """Whether the verdict rests on too few seeds somewhere."""
        return any(finding.seeds < FEW_SEEDS for finding in self.findings)

    def count(self, outcome: Outcome) -> int:
        """How many comparisons came out so."""
        return sum(finding.outcome == outcome for finding in self.findings)


def check(claim: Claim, results: Results) -> Ruling:
    """Compare in every cell that the claim speaks of."""
    findings, missing = [], 0
    what = results.study.measures[claim.measure]
    asks_for_the_sign = claim.value is None and claim.relation != "similar" and claim.margin == 0 and claim.factor == 1
    if asks_for_the_sign and what.unit in ("%", "points"):
        tested = claim.model_copy(update={"margin": RELEVANT})
    else:
        tested = claim
    for cell, than, ours, theirs in _comparisons(claim, results):
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if not (math.isnan(a.value) or math.isnan(b.value))]
        if pairs:
            scores = [score(tested, a, b) for a, b in pairs]
            values, others = [a.value for a, _ in pairs], [b.value for _, b in pairs]
            findings.append(Finding(cell, than, values, others, scores, outcome(tested, scores)))
        else:
            missing += 1
    return Ruling(claim, findings, missing)


def is_smaller(ruling: Ruling, results: Results) -> bool:
    """Whether a claim that does not hold would, if it did not say by how much."""
    bare = ruling.claim.model_copy(update={"factor": 1.0, "margin": 0.0})
    directed = bare != ruling.claim and ruling.claim.relation != "similar"
    return directed and ruling.verdict == "does not hold" and check(bare, results).verdict == "holds"


def _comparisons(claim: Claim, results: Results) -> Iterator[tuple[str, str, list[Known], list[Known]]]:
    """Cell, what it is compared with, and both sides' numbers by seed."""
    for cell, other in claim.than_cells.items():
        arms = [arm for arm in (claim.arm, claim.over) if arm is not None]
        common = sorted(set(results.seeds(cell, *arms)) & set(results.seeds(other, *arms)))
        here, there = ([_known(results, claim.measure, where, arm, common) for arm in arms] for where in (cell, other))
        if claim.over is None:
            yield cell, other, here[0], there[0]
        else:
            yield cell, other, _advantage(*here), _advantage(*there)
    if claim.than_cells:
        return
    for cell in claim.cells or [cell.name for cell in results.study.cells]:
        for than in [claim.than] if claim.together else [[arm] for arm in claim.than]:
            seeds = results.seeds(cell, claim.arm, *than)
            theirs = [_known(results, claim.than_measure or claim.measure, cell, arm, seeds) for arm in than]
            ours = _known(results, claim.measure, cell, claim.arm, seeds)
            named = than[0] if len(than) == 1 else f"best of {', '.join(than)}"
            yield cell, named, ours, [_best(claim, values) for values in zip(*theirs, strict=True)]
        if claim.value is not None:
            ours = _known(results, claim.measure, cell, claim.arm, results.seeds(cell, claim.arm))
            yield cell, f"{claim.value:g}", ours, [Known(claim.value, claim.value, claim.value)] * len(ours)


def _known(results: Results, measure: str, cell: str, arm: str, seeds: list[int]) -> list[Known]:
    values, ends = results.values(measure, cell, arm, seeds), results.ends(measure, cell, arm, seeds)
    return [Known(value, min(value, end), value) for value, end in zip(values, ends, strict=True)]


def _advantage(ours: list[Known], theirs: list[Known]) -> list[Known]:
    differences = paired_differences([a.value for a in ours], [b.value for b in theirs])
    return [
        Known(difference, a.low - b.high, a.high - b.low)
        for difference, a, b in zip(differences, ours, theirs, strict=True)
    ]


def _best(claim: Claim, found: Sequence[Known]) -> Known:
    """The one that is hardest to beat; none if any has no number."""
    if any(math.isnan(one.value) for one in found):
        return Known(math.nan, math.nan, math.nan)
    choose = max if claim.relation == "higher" else min
    return Known(*(choose(numbers) for numbers in zip(*map(astuple, found), strict=True)))


def outcome(claim: Claim, scores: Sequence[float | None]) -> Outcome:
    """What became of one comparison."""
    plain = claim.relation != "similar" and claim.factor == 1 and claim.margin == 0
    return decide(scores, at_least=not plain)


def score(claim: Claim, ours: Known, theirs: Known) -> float | None:
    """By how much a seed favours the claim, or None where it does not decide, as both outcomes are possible."""

    def favour(difference: float) -> float:
        if claim.relation == "similar":
            return claim.margin - abs(difference)
        return (difference if claim.relation == "higher" else -difference) - claim.margin

    if math.isinf(ours.value) and math.isinf(theirs.value):
        return None
    difference = ours.value - claim.factor * theirs.value
    least, most = ours.low - claim.factor * theirs.high, ours.high - claim.factor * theirs.low
    possible = [favour(least), favour(most), favour(min(max(0.0, least), most))]  # the last: as similar as can be
    if min(possible) < 0 < max(possible):
        return None
    return favour(difference)


def decide(scores: Sequence[float | None], at_least: bool = False) -> Outcome:
    """Every seed, or from five on the interval of the median. `at_least`: 0 is in favour."""
    smallest = math.ulp(0.0)
    in_favour = [-smallest if score is None else score for score in scores]
    against = [0.0 if score is None else score for score in scores]
    low, high = _ends(in_favour)[0], _ends(against)[1]
    if low > 0 or (at_least and low == 0):
        return "holds"
    return "fails" if high < 0 else "open"


def _ends(scores: Sequence[float]) -> tuple[float, float]:
    if len(scores) < ENOUGH_SEEDS:
        return min(scores), max(scores)
    interval = estimate(scores).interval
    assert interval is not None
    return interval
