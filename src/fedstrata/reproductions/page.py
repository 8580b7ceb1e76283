"""docs/reproductions.md, from the studies and the stored results: no figure on it is typed by hand.

python -m fedstrata reproduce --page docs/reproductions.md --figures docs/figures
"""

from __future__ import annotations

from pathlib import Path

from fedstrata.experiment import load
from fedstrata.reproductions.claims import Ruling, check
from fedstrata.reproductions.report import TextTable, differences_table, measured_tables, seeds_of, summary
from fedstrata.reproductions.results import Results, made_on
from fedstrata.reproductions.study import Study, load_study, studies

_INTRODUCTION = """\
# Reproductions

Every claim of the five papers that says something measurable, beside what we measured. The page is made by
`make page` from the studies in `src/fedstrata/studies/` and the results in `results/`; a test fails when they do not
agree. `fedstrata reproduce NAME` runs a study again.

Arms are compared seed by seed: unless the study changes just that, all arms of a seed share partition, initial
weights, client samples and batches. Below five seeds every seed's value is shown; from five on the median and a
nominal 95 % bootstrap interval of it (with five seeds: from the smallest value to the largest). A target that was not
reached within T rounds counts as “>T” and stays in: of a pair, “neither” says that both missed it, “fedadp only” that
only this arm reached it. A seed in which neither did, or in which accuracies differ by less than half an image of ten
thousand, decides nothing. In one cell a comparison *holds* if every seed favours it, from five seeds on if the
interval of the paired differences does; it *fails* if the same is true of the opposite, and is *open* otherwise. A
claim *holds* if all of its comparisons hold, *in part* if some do, is *open* if all are open (which is no evidence
against it), and *does not hold* otherwise; *not tested* means that nothing is stored that could be compared. With few
seeds, a verdict is only a hint. “5 of 10 seeds” says that a study was planned with ten and five are stored so far.
"""


def build(results: Path, figures: Path) -> str:
    """The whole page; it shows the pictures that are in `figures`, a folder beside it."""
    known = [load_study(name) for name in studies()]
    papers = sorted({study.paper for study in known}, key=_order)
    known.sort(key=lambda study: (papers.index(study.paper), study.name))
    found = [Results.stored(study, results) for study in known]
    parts = [_INTRODUCTION, "## All claims\n", _markdown(_all_claims(found))]
    for paper in papers:
        parts.append(f"## {paper}\n")
        parts += [_section(one, figures) for one in found if one.study.paper == paper]
    machines = made_on(known, results)
    if machines:
        parts.append("## Made with\n\n" + "\n".join(f"- {machine}" for machine in machines) + "\n")
    return "\n".join(parts)


_PAPERS = ["FedAdp", "FedLayerWise", "FedLDF", "Adaptive μ", "FedLap"]


def _order(paper: str) -> tuple[int, str]:
    """The papers in the order of the documentation, then what no paper asks."""
    return (_PAPERS.index(paper) if paper in _PAPERS else len(_PAPERS), paper)


def _all_claims(found: list[Results]) -> TextTable:
    rows = []
    for results in found:
        study = results.study
        for claim in study.claims:
            ruling = check(claim, results)
            measured, verdict = summary(study, ruling), f"**{ruling.verdict}**"
            row = [study.paper, claim.text, claim.paper, measured, seeds_of(ruling), verdict, _why(ruling)]
            rows.append([*row, f"[{study.name}](#{_anchor(study)})"])
    return TextTable("", ["paper", "claim", "reported", "measured", "seeds", "verdict", "why", "study"], rows)


def _why(ruling: Ruling) -> str:
    """The study's own explanation, or else what decided."""
    if not ruling.findings:
        return "nothing to compare is stored"
    if ruling.claim.why:
        return ruling.claim.why
    reasons = []
    if ruling.count("holds"):
        reasons.append(f"{ruling.count('holds')} clear")
    undecided = [finding for finding in ruling.findings if finding.outcome == "open"]
    missed = sum(2 * finding.censored > finding.seeds for finding in undecided)
    if missed:
        reasons.append(f"{missed} where in most seeds neither reached the target")
    if len(undecided) > missed:
        reasons.append(f"{len(undecided) - missed} where the seeds do not decide")
    if ruling.count("fails"):
        reasons.append(f"{ruling.count('fails')} clearly not so")
    return ", ".join(reasons)


def _anchor(study: Study) -> str:
    return study.name.replace(".", "")


def _section(results: Results, figures: Path) -> str:
    study = results.study
    lines = [f"### {study.name}\n", f"{study.title}: {study.shows}.\n"]
    if study.reduced:
        lines.append(f"**Reduced:** {study.reduced.strip()}\n")
    if study.notes:
        lines.append(study.notes.strip() + "\n")
    lines.append(_setting(study))
    if not any(results.all_seeds()):
        lines.append("No results are stored.\n")
        return "\n".join(lines)
    for plot in study.plots:
        if (figures / study.name / f"{plot.name}.png").exists():
            lines.append(f"![{study.name}: {plot.name}]({figures.name}/{study.name}/{plot.name}.png)\n")
    lines += [f"{table.title}\n\n{_markdown(table)}" for table in measured_tables(results)]
    for claim in study.claims:
        ruling = check(claim, results)
        if len(ruling.findings) > 1:
            table = differences_table(results, ruling)
            lines.append(f"{table.title}: {ruling.verdict}.\n\n{_markdown(table)}")
    lines += [f"- {note}" for note in (*results.sources, *results.notes)]
    return "\n".join(lines) + "\n"


def _setting(study: Study) -> str:
    recipe = load(study.recipe)
    changes = ", ".join(f"{key} = {value}" for key, value in study.settings.items())
    text = f"Recipe `{study.recipe}` ({recipe.description})"
    return f"{text}, with {changes}.\n" if changes else f"{text}.\n"


def _markdown(table: TextTable) -> str:
    lines = [table.head, ["---"] * len(table.head), *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"
