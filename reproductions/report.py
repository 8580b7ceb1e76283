"""A study's tables, as text in rows: the terminal and the page show the same ones."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fedstrata.formatting import size
from fedstrata.runs.statistics import estimate, paired_differences, written_differences
from reproductions.claims import Finding, Outcome, Ruling, check
from reproductions.results import Results
from reproductions.study import Claim, Measure, Study, StudyCell


@dataclass(frozen=True)
class TextTable:
    """A heading and rows."""

    title: str
    head: list[str]
    rows: list[list[str]]


def measured_tables(results: Results) -> list[TextTable]:
    """One table per measure, cells by arms, or the other way round where arms are more."""
    return [_measured_table(results, name) for name in results.study.measures]


def _measured_table(results: Results, name: str) -> TextTable:
    study, what = results.study, results.study.measures[name]
    reporting = {arm for cell in study.cells for arm in cell.reported.get(name, {})}
    columns: list[list[str]] = [["", *(cell.title for cell in study.cells)]]
    for arm in study.arms:
        if arm in reporting:
            told = [cell.reported.get(name, {}).get(arm) for cell in study.cells]
            shown = ["–" if v is None else _told(what, v) for v in told]
            columns.append([f"{arm}, paper", *shown])
        columns.append([arm, *(_measured(results, name, cell, arm) for cell in study.cells)])
    lines = [list(line) for line in zip(*columns, strict=True)]
    if len(study.arms) > len(study.cells):
        lines = columns
    return TextTable(f"{what.heading}, {seeds_stored(results)}", lines[0], lines[1:])


def _told(what: Measure, value: float) -> str:
    """What a paper reports."""
    return "not reached" if math.isinf(value) else write(what, value, 0)


def seeds_stored(results: Results) -> str:
    """How many of the planned seeds there are, from the arm that has the fewest to the one that has the most."""
    fewest, most = min(results.all_seeds()), max(results.all_seeds())
    stored = str(most) if fewest == most else f"{fewest} to {most}"
    return f"{stored} of {results.study.seeds} seeds"


def _measured(results: Results, name: str, cell: StudyCell, arm: str) -> str:
    seeds = results.seeds(cell.name, arm)
    if not seeds:
        return "–"
    study = results.study
    return spread(study.measures[name], results.values(name, cell.name, arm, seeds), study.rounds(cell))


def differences_table(results: Results, ruling: Ruling) -> TextTable:
    """The comparisons of one claim, seed by seed."""
    study, claim = results.study, ruling.claim
    titles = {cell.name: cell.title for cell in study.cells}
    rows = []
    for found in ruling.findings:
        pair = _pair(study, claim, found)
        numbers = difference(study, ruling, found) + _unit_of_difference(study, ruling)
        rows.append([titles[found.cell], pair, str(found.seeds), numbers, found.outcome])
    return TextTable(claim.text, ["cell", "pair", "seeds", study.measures[claim.measure].title, "outcome"], rows)


def _pair(study: Study, claim: Claim, finding: Finding) -> str:
    """What was subtracted from what."""
    if claim.value is not None:
        return claim.arm
    if claim.than_measure is not None and claim.than == [claim.arm]:
        return f"{study.measures[claim.measure].title} − {study.measures[claim.than_measure].title}"
    if not claim.than_cells:
        return f"{claim.arm} − {finding.than}"
    titles = {cell.name: cell.title for cell in study.cells}
    ours = claim.arm if claim.over is None else f"{claim.arm} − {claim.over}"
    return f"{ours}, minus that of {titles[finding.than]}"


def claims_table(results: Results) -> TextTable:
    """One row per claim."""
    rulings = [check(claim, results) for claim in results.study.claims]
    rows = [[r.claim.text, r.claim.paper, summary(results.study, r), seeds_of(r), verdict(r)] for r in rulings]
    return TextTable("claims", ["claim", "paper", "measured", "seeds", "verdict"], rows)


_ANSWERS = {"holds": "all", "holds in part": "some", "does not hold": "none"}
"""To a claim that is a question: under which readings, in which settings …?"""


def verdict(ruling: Ruling, mark: str = "") -> str:
    """A claim's verdict, or a question's answer, between marks, and whether it is more than a hint."""
    asked = ruling.claim.is_question
    word: str = _ANSWERS.get(ruling.verdict, ruling.verdict) if asked else ruling.verdict
    word += " so far" if asked and ruling.findings and ruling.missing else ""
    return f"{mark}{word}{mark}" + (f" (a hint: {_many(ruling)})" if ruling.hint else "")


def _many(ruling: Ruling) -> str:
    return f"{seeds_of(ruling)} seed{'s' * (seeds_of(ruling) != '1')}"


_OUTCOMES: list[tuple[Outcome, str, str]] = [
    ("holds", "holds", "hold"),
    ("open", "is open", "are open"),
    ("fails", "fails", "fail"),
]


def summary(study: Study, ruling: Ruling) -> str:
    """How a claim came out, in a line: the numbers where there is one comparison, else how often and where it held."""
    if not ruling.findings:
        return "–"
    planned = len(ruling.findings) + ruling.missing
    not_run = f"; {ruling.missing} of {planned} comparisons not run" if ruling.missing else ""
    if len(ruling.findings) == 1:
        (found,) = ruling.findings
        numbers_of = difference(study, ruling, found) + _unit_of_difference(study, ruling)
        return (
            numbers_of if ruling.claim.value is not None else f"{_pair(study, ruling.claim, found)}: {numbers_of}"
        ) + not_run
    count, most = len(ruling.findings), max(ruling.count(outcome) for outcome, _, _ in _OUTCOMES)
    parts, rest = [], ""
    for outcome, one, many in _OUTCOMES:
        places = [_place(study, ruling, finding) for finding in ruling.findings if finding.outcome == outcome]
        if places and len(places) == most and not rest:  # the most common outcome is that of all others
            rest = (
                f"{'both' if count == 2 else f'all {count}'} {many}"
                if most == count
                else f"{most} of {count} {one if most == 1 else many}"
            )
        elif places:
            parts.append(f"{len(places)} {one if len(places) == 1 else many} ({'; '.join(places)})")
    return ", ".join([rest, *parts]) + not_run + _range(study, ruling)


def _range(study: Study, ruling: Ruling) -> str:
    """From the smallest median of the comparisons to the largest."""
    found = [numbers(study, ruling, finding) for finding in ruling.findings]
    if not all(math.isfinite(value) for values in found for value in values):
        return ""
    medians = [statistics.median(values) for values in found]
    low, high = (_signed(study, ruling, value) for value in (min(medians), max(medians)))
    return f"; medians {low if low == high else f'{low} to {high}'}{_unit_of_difference(study, ruling)}"


def _unit_of_difference(study: Study, ruling: Ruling) -> str:
    what = study.measures[ruling.claim.measure]
    if _as_share(ruling, what) or not what.unit:
        return ""
    return f" {what.unit}" if ruling.claim.value is not None or what.unit != "%" else " points"


def _as_share(ruling: Ruling, what: Measure) -> bool:
    """Whether differences are written in % of theirs: where the claim is about a share, and of bytes."""
    return ruling.claim.value is None and (ruling.claim.factor != 1 or what.kind in ("upload_to", "upload"))


def seeds_of(ruling: Ruling) -> str:
    """The number of pairs, or the fewest and the most."""
    counts = [finding.seeds for finding in ruling.findings]
    if not counts:
        return "0"
    return str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)}–{max(counts)}"


def _place(study: Study, ruling: Ruling, finding: Finding) -> str:
    cell = next(cell.title for cell in study.cells if cell.name == finding.cell)
    if len(ruling.claim.than) < 2 or ruling.claim.together:
        return cell
    against = f"against {finding.than}"
    return f"{cell}, {against}" if len({f.cell for f in ruling.findings}) > 1 else against


# --- how numbers are written -----------------------------------------------------------------------------------------


def write(what: Measure, value: float, limit: int) -> str:
    """One value of a measure, in its unit; a censored one as more than the rounds there were."""
    if math.isnan(value):
        return "–"
    if what.kind == "rounds_to":
        return f">{limit}" if math.isinf(value) else f"{value:g}"
    if what.kind in ("upload_to", "upload"):
        return "not reached" if math.isinf(value) else size(value)
    if what.unit in ("%", "points"):
        return f"{100 * value:.{3 if what.kind == 'deviation' else 2}f}"
    if what.unit == "°":
        return f"{math.degrees(value):.1f}"
    return f"{value:.4g}"


def spread(what: Measure, values: Sequence[float], limit: int) -> str:
    """Every seed's value, or from five seeds on the median and its interval."""
    return estimate(values).written(lambda value: write(what, value, limit))


def difference(study: Study, ruling: Ruling, finding: Finding) -> str:
    """Ours minus theirs, or the value itself where the claim is about a number; in % of theirs where it is a share."""
    claim = ruling.claim
    if claim.value is not None:
        cell = next(cell for cell in study.cells if cell.name == finding.cell)
        return spread(study.measures[claim.measure], finding.ours, study.rounds(cell))

    ours = finding.cell if claim.than_cells else claim.arm
    found = numbers(study, ruling, finding)
    what = study.measures[claim.measure]
    rises = what.rises and what.kind not in ("rounds_to", "upload_to")
    return written_differences(found, lambda value: _signed(study, ruling, value), ours, finding.than, rises)


def numbers(study: Study, ruling: Ruling, finding: Finding) -> list[float]:
    """What the seeds say to a claim: differences, shares, or values."""
    if ruling.claim.value is not None:
        return finding.ours
    if _as_share(ruling, study.measures[ruling.claim.measure]):
        return [_share(a, b) for a, b in zip(finding.ours, finding.theirs, strict=True)]
    return paired_differences(finding.ours, finding.theirs)


def _signed(study: Study, ruling: Ruling, value: float) -> str:
    what = study.measures[ruling.claim.measure]
    if ruling.claim.value is not None:
        return write(what, value, 0)
    text = f"{100 * abs(value):.0f} %" if _as_share(ruling, what) else write(what, abs(value), 0)
    sign = "−" if value < 0 else "+"
    return (sign if any(digit in text for digit in "123456789") else "±") + text


def _share(ours: float, theirs: float) -> float:
    if math.isinf(ours) or math.isinf(theirs):
        return paired_differences([ours], [theirs])[0]
    return ours / theirs - 1
