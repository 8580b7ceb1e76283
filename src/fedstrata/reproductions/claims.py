"""Claims checked against measured numbers, seed by seed.

In one cell a comparison *holds* if every seed favours it, or, from five seeds on, if the 95 % bootstrap interval of the
median difference lies on its side; it *fails* if the same is true of the other side, and is otherwise *open*. The
claim holds if all of its comparisons hold, in part if some do, is open if all of them are (seeds that do not decide are
no evidence against it), and otherwise does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedstrata.compare import ENOUGH_SEEDS, estimate, paired_differences
from fedstrata.reproductions.results import Results
from fedstrata.reproductions.study import Claim

Outcome = Literal["holds", "open", "fails"]
Verdict = Literal["holds", "holds in part", "open", "does not hold", "not tested"]


@dataclass(frozen=True)
class Finding:
    """One comparison: a cell, what was compared with (an arm, or the claim's value), and the numbers seed by seed."""

    cell: str
    than: str
    ours: list[float]
    theirs: list[float]
    outcome: Outcome

    @property
    def seeds(self) -> int:
        """How many pairs there are."""
        return len(self.ours)


@dataclass(frozen=True)
class Ruling:
    """What became of a claim."""

    claim: Claim
    findings: list[Finding]
    missing: int
    """Comparisons that have no stored runs."""

    @property
    def verdict(self) -> Verdict:
        """In a word or three."""
        held = self.count("holds")
        if not self.findings:
            return "not tested"
        if held == len(self.findings):
            return "holds" if not self.missing else "holds in part"
        if held:
            return "holds in part"
        return "does not hold" if self.count("fails") else "open"

    def count(self, outcome: Outcome) -> int:
        """How many comparisons came out so."""
        return sum(finding.outcome == outcome for finding in self.findings)


def check(claim: Claim, results: Results) -> Ruling:
    """Compare in every cell that the claim speaks of."""
    findings, missing = [], 0
    for cell in claim.cells or [cell.name for cell in results.study.cells]:
        for than in claim.than or [""]:  # a number has no arm
            seeds = results.seeds(cell, *filter(None, [claim.arm, than]))
            if not seeds:
                missing += 1
                continue
            ours = results.values(claim.measure, cell, claim.arm, seeds)
            if than:
                theirs = results.values(claim.than_measure or claim.measure, cell, than, seeds)
            else:
                theirs = [float(claim.value or 0.0)] * len(seeds)
            label = than or f"{claim.value:g}"
            findings.append(Finding(cell, label, ours, theirs, decide(scores(claim, ours, theirs))))
    return Ruling(claim, findings, missing)


def scores(claim: Claim, ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """By how much each seed favours the claim: positive is in favour. Two censored values favour nobody."""
    differences = paired_differences(ours, [claim.factor * value for value in theirs])
    known = [0.0 if math.isnan(d) else d for d in differences]
    if claim.relation == "similar":
        return [claim.margin - abs(d) for d in known]
    sign = 1 if claim.relation == "higher" else -1
    return [sign * d - claim.margin for d in known]


def decide(scores: Sequence[float]) -> Outcome:
    """Every seed, or from five on the interval of the median."""
    if len(scores) < ENOUGH_SEEDS:
        low, high = min(scores), max(scores)
    else:
        interval = estimate(scores).interval
        assert interval is not None
        low, high = interval
    return "holds" if low > 0 else "fails" if high < 0 else "open"
