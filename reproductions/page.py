"""docs/reproductions.md, from the studies, the stored results and a few words on them: no figure is typed by hand.

python -m reproductions page
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstrata.experiment import load
from reproductions.claims import FEW_SEEDS, Ruling, Verdict, check
from reproductions.report import TextTable, differences_table, measured_tables, seeds_of, summary, verdict
from reproductions.results import Results, made_on
from reproductions.study import Claim, Study, load_study, studies

_INTRODUCTION = """\
# Reproductions

The measurable claims of the five papers, and some questions of our own, beside what we measured. The page is made by
`make page` from the studies and results in [`reproductions/`](../reproductions), which have every round of every run; a
test fails when they do not agree. `python -m reproductions run NAME` runs a study again.

{state}

Arms are compared seed by seed: unless the study changes just that, all arms of a seed share partition, initial
weights, client samples and batches. Below five seeds every seed's value is shown; from five on the median and a
nominal 95 % bootstrap interval of it (with five seeds: from the smallest value to the largest), unless some seeds have
no number. The median of differences is not the difference of medians. A target that was not reached within T rounds
counts as “>T” and stays in: of a pair, “neither” says that both missed it, “fedadp only” that only this arm reached it.
At equal upload, errors are interpolated between evaluations.

In one cell a comparison *holds* if every seed favours it, from five seeds on if the interval of the paired differences
(where it says “within”, of how far they stay within) does; it *fails* if the same is true of the opposite, and is
*open* otherwise. Where nothing but “higher” or “lower” is said of accuracies, a tenth of a point (ten images of ten
thousand) is the least that counts: two that are equal but for that are not evidence for the claim. A seed favours
neither side if neither arm reached the target, or if only one did, and it depends on how much longer the other would
have needed. A claim *holds* if all of its comparisons hold, *in part* if some do or if others are not run
yet, is *open* if all are open (which is no evidence against it), and *does not hold* otherwise. One that says “the best
of all” cannot hold in part: it does not hold as soon as one comparison fails, and is open until all are decided.
*Not tested* means that nothing is stored that could be compared.
The same verdicts on a question of ours read *all*, *some* or *none* of the readings or settings that it asks about.
From fewer than three seeds a verdict is a hint. With some hundred comparisons, a few will be decided by chance.
“5 of 10 seeds” says that a study was planned with ten and five are stored so far.
"""


_MADE_WITH = """\
## Made with

On the same processor and torch a run gives the same digits again. Another processor adds numbers up in another order,
and after some rounds an accuracy may be another one: with logistic regression and FedAdp's CNN by less than a point,
early in the training of a network with BatchNorm by several. `python -m reproductions check NAME` shows by how much.

"""


def build(results: Path, figures: Path, link: str = "figures") -> str:
    """The whole page; it shows the pictures that are in `figures`, which `link` leads to."""
    known = [load_study(name) for name in studies()]
    papers = sorted({study.paper for study in known}, key=_order)
    known.sort(key=lambda study: (papers.index(study.paper), study.name))
    found = [Results.stored(study, results) for study in known]
    findings = _findings(results / "findings.toml")
    parts = [_INTRODUCTION.format(state=_state(found)), "## In short\n", _markdown(_counts(found, papers))]
    parts += ["## All claims\n", _markdown(_all_claims(found))]
    for paper in papers:
        parts += [f"## {paper}\n", *([f"{findings[paper]}\n"] if paper in findings else [])]
        parts += [_section(one, figures, link) for one in found if one.study.paper == paper]
    machines = made_on(known, results)
    if machines:
        parts.append(_MADE_WITH + "\n".join(f"- {machine}" for machine in machines) + "\n")
    return "\n".join(parts)


def _findings(path: Path) -> dict[str, str]:
    """What came out of each paper, in words: the numbers are in the tables, which are made from what is stored."""
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _state(found: list[Results]) -> str:
    """How much of it is there."""
    rulings = [check(claim, results) for results in found for claim in results.study.claims]
    tested = [ruling for ruling in rulings if ruling.findings]
    whole = sum(all(results.all_seeds()) for results in found)
    begun = sum(any(results.all_seeds()) for results in found) - whole
    return (
        f"**So far** {whole} of {len(found)} studies have results in every cell, {begun} in some; "
        f"{len(tested)} of {len(rulings)} claims and questions are tested, "
        f"{sum(ruling.hint for ruling in tested)} of these with fewer than {FEW_SEEDS} seeds."
    )


_PAPERS = ["FedAdp", "FedLayerWise", "FedLDF", "Adaptive μ", "FedLap"]


def _order(paper: str) -> tuple[int, str]:
    """The papers in the order of the documentation, then what no paper asks."""
    return (_PAPERS.index(paper) if paper in _PAPERS else len(_PAPERS), paper)


_VERDICTS: list[Verdict] = ["holds", "holds in part", "open", "does not hold", "not tested"]


def _counts(found: list[Results], papers: list[str]) -> TextTable:
    """How the claims of each paper came out; questions of ours, which have no verdict, apart."""
    rows = []
    for paper in papers:
        studies_of = [results for results in found if results.study.paper == paper]
        asked = [(claim, results) for results in studies_of for claim in results.study.claims]
        verdicts = [check(claim, results).verdict for claim, results in asked if not claim.is_question]
        counts = [str(verdicts.count(verdict)) for verdict in _VERDICTS]
        rows.append([f"[{paper}](#{_anchor(paper)})", *counts, str(len(asked) - len(verdicts))])
    return TextTable("", ["paper", *_VERDICTS, "questions of ours"], rows)


def _all_claims(found: list[Results]) -> TextTable:
    rows = []
    for results in found:
        study = results.study
        for claim in study.claims:
            ruling = check(claim, results)
            measured, word = summary(study, ruling), verdict(ruling, mark="**")
            row = [study.paper, claim.text, claim.paper, measured, seeds_of(ruling), word, _why(ruling, study)]
            rows.append([*row, f"[{study.name}](#{_anchor(study.name)})"])
    return TextTable("", ["paper", "claim", "reported", "measured", "seeds", "verdict", "why", "study"], rows)


def _why(ruling: Ruling, study: Study) -> str:
    """The study's own explanation, or else what decided."""
    if not ruling.findings:
        reduced = f"{study.name}-reduced"
        instead = f"; [{reduced}](#{_anchor(reduced)}) was run instead" if reduced in studies() else ""
        return f"not run, or not enough of it: two cores need {study.expected_time(2)}{instead}"
    if ruling.claim.why:
        return ruling.claim.why
    undecided = [finding for finding in ruling.findings if finding.outcome == "open"]
    missed = sum(2 * finding.censored > finding.seeds for finding in undecided)
    split = sum(2 * finding.censored <= finding.seeds and finding.contradictory for finding in undecided)
    counts = {
        "decided in its favour": ruling.count("holds"),
        "decided against it": ruling.count("fails"),
        "with seeds that contradict each other": split,
        "with seeds that do not decide": len(undecided) - missed - split,
        "with neither at the target in most seeds": missed,
    }
    return ", ".join(text if len(ruling.findings) == 1 else f"{n} {text}" for text, n in counts.items() if n)


def _anchor(heading: str) -> str:
    """As GitHub makes it."""
    return heading.lower().replace(".", "").replace(" ", "-")


def _section(results: Results, figures: Path, link: str) -> str:
    study = results.study
    lines = [f"### {study.name}\n", f"{study.title}: {study.shows}.\n"]
    if study.reduced:
        lines.append(f"**Reduced:** {study.reduced.strip()}\n")
    if study.notes:
        lines.append(study.notes.strip() + "\n")
    lines.append(_setting(study))
    if not any(results.all_seeds()):
        lines.append(f"No results are stored; two cores need {study.expected_time(2)}.\n")
        return "\n".join(lines)
    for plot in study.plots:
        if (figures / study.name / f"{plot.name}.png").exists():
            lines.append(f"![{study.name}: {plot.name}]({link}/{study.name}/{plot.name}.png)\n")
    lines += [f"{table.title}\n\n{_markdown(table)}" for table in measured_tables(results)]
    for claim in study.claims:
        ruling = check(claim, results)
        if len(ruling.findings) > 1:
            table = differences_table(results, ruling)
            lines.append(f"{_before(claim)} {verdict(ruling)}.\n\n{_markdown(table)}")
        else:
            lines.append(f"{_before(claim)} {verdict(ruling)}; {summary(study, ruling)}.\n")
    lines += [f"- {note}" for note in (*results.sources, *results.notes)]
    return "\n".join(lines) + "\n"


def _setting(study: Study) -> str:
    """What the arms and cells are, in full."""
    recipe = load(study.recipe)
    changes = ", ".join(f"{key} = {_written(value)}" for key, value in study.settings.items())
    text = f"Recipe `{study.recipe}` ({recipe.description})" + (f", with {changes}" if changes else "")
    arms = [[name, _algorithm(arm.algorithm), _settings(arm.settings)] for name, arm in study.arms.items()]
    cells = [[cell.title, f"`{cell.recipe}`" if cell.recipe else "", _settings(cell.settings)] for cell in study.cells]
    tables = [["arm", "algorithm", "settings"], *arms], [["cell", "recipe", "settings"], *cells]
    shown = "\n".join(_markdown(TextTable("", head, rows)) for head, *rows in tables)
    return f"<details><summary>Settings</summary>\n\n{text}.\n\n{shown}\n</details>\n"


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {_written(value)}" for key, value in settings.items())


def _algorithm(algorithm: str | Mapping[str, Any]) -> str:
    return f"`{algorithm}`" if isinstance(algorithm, str) else _settings(algorithm)


def _written(value: Any) -> str:
    """As in a recipe."""
    if isinstance(value, Mapping):
        return "{ " + _settings(value) + " }"
    return json.dumps(value, ensure_ascii=False)


def _before(claim: Claim) -> str:
    """A claim or a question, and then its verdict."""
    return claim.text if claim.is_question else f"{claim.text}:"


def _markdown(table: TextTable) -> str:
    lines = [table.head, ["---"] * len(table.head), *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"
