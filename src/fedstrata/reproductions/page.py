"""docs/reproductions.md, from the studies and the stored results: no figure on it is typed by hand.

python -m fedstrata reproduce --page docs/reproductions.md --figures docs/figures
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstrata.experiment import load
from fedstrata.reproductions.claims import FEW_SEEDS, Ruling, check
from fedstrata.reproductions.report import TextTable, differences_table, measured_tables, seeds_of, summary, verdict
from fedstrata.reproductions.results import Results, made_on
from fedstrata.reproductions.study import Study, load_study, studies

_INTRODUCTION = """\
# Reproductions

The measurable claims of the five papers, and some questions of our own, beside what we measured. The page is made by
`make page` from the studies in `src/fedstrata/studies/` and the results in [`results/`](../results), which have every
round of every run; a test fails when they do not agree. `fedstrata reproduce NAME` runs a study again.

{state}

Arms are compared seed by seed: unless the study changes just that, all arms of a seed share partition, initial
weights, client samples and batches. Below five seeds every seed's value is shown; from five on the median and a
nominal 95 % bootstrap interval of it (with five seeds: from the smallest value to the largest), unless some seeds have
no number. The median of differences is not the difference of medians. A target that was not reached within T rounds
counts as “>T” and stays in: of a pair, “neither” says that both missed it, “fedadp only” that only this arm reached it.

In one cell a comparison *holds* if every seed favours it, from five seeds on if the interval of the paired differences
(where it says “within”, of how far they stay within) does; it *fails* if the same is true of the opposite, and is
*open* otherwise. A seed favours neither side if neither
arm reached the target or, where nothing but the sign is asked, if accuracies differ by less than half an image of ten
thousand. A claim *holds* if all of its comparisons hold, *in part* if some do, is *open* if all are open (which is no
evidence against it), and *does not hold* otherwise; *not tested* means that nothing is stored that could be compared.
The same verdicts on a question of ours read *all*, *some* or *none* of the readings or settings that it asks about.
From fewer than three seeds a verdict is a hint. With some hundred comparisons, a few will be decided by chance.
“5 of 10 seeds” says that a study was planned with ten and five are stored so far.
"""


def build(results: Path, figures: Path) -> str:
    """The whole page; it shows the pictures that are in `figures`, a folder beside it."""
    known = [load_study(name) for name in studies()]
    papers = sorted({study.paper for study in known}, key=_order)
    known.sort(key=lambda study: (papers.index(study.paper), study.name))
    found = [Results.stored(study, results) for study in known]
    parts = [_INTRODUCTION.format(state=_state(found)), "## All claims\n", _markdown(_all_claims(found))]
    for paper in papers:
        parts += [f"## {paper}\n", *([f"{_CAME_OUT[paper]}\n"] if paper in _CAME_OUT else [])]
        parts += [_section(one, figures) for one in found if one.study.paper == paper]
    machines = made_on(known, results)
    if machines:
        parts.append("## Made with\n\n" + "\n".join(f"- {machine}" for machine in machines) + "\n")
    return "\n".join(parts)


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


# In words only: the numbers are in the tables, which are made from what is stored.
_CAME_OUT = {
    "FedAdp": """\
What came out so far: angles do sort nodes by how skewed their data is. With logistic regression FedAdp gains most
in the early rounds and with more non-IID nodes, and little remains at the end, all as the paper says. With the CNN,
of which one seed is run, FedAdp needs fewer rounds than FedAvg wherever either reaches the target, and leads by far
in the first 20 rounds. On MNIST both are close to the paper with five or six IID nodes; with three, one-class nodes
slow both less than reported and two-class ones far more. In this seed these seven nodes have drawn only six of the
ten digits between them, which may be why: the draw of so few nodes varies much. On FashionMNIST both need more
rounds than reported, or end lower.""",
    "FedLayerWise": """\
What came out so far: under our default reading the paper's table does not. With Adam at the printed learning rate
and inputs (x − mean)/std most runs miss the target within the 30 rounds, and some never leave chance: with one
class weightings by angle, with two FedAvg as well. With pixels in [0, 1] and one class, the one seed run so far
gives FedAvg's and FedLayerWise's rounds at 2 + 8, and FedAvg's at 5 + 5, nearly as reported; but FedAdp needs far
fewer than reported, and fewer than FedLayerWise under every reading in which either reaches the target. With SGD
none does.""",
    "FedLDF": """\
What came out so far, of a reduced setting and two seeds: the upload is a fifth, as the paper says. But FedLDF ends
with a larger error than FedAvg, and than random layers at the same upload, which do best of all that upload a fifth
(so they do wherever BatchNorm belongs; of two of the readings one seed is run); it is level with HDFL and ahead of
our pruning of neurons. With unequal shares the largest divergences are those of the same clients again and again,
as the picture of the layers shows, while random layers hear everyone.""",
    "Adaptive μ": """\
What came out: with logistic regression there is one weight and one bias. The weight always moves further, so only
the ten biases get another μ, and the method is FedProx with μ₀ for all practical purposes, in accuracy as in
oscillation. Single final rounds vary by several points from seed to seed, and the reported accuracies lie among
them.""",
    "FedLap": """\
What came out so far, from three seeds of five: on MNIST FedLap in our default reading is below FedAvg or level with
it in the first 20 rounds and ends like it; on FashionMNIST it is above FedAvg early in two seeds and level in one.
A weak FedProx is ahead of FedLap in the first 20 rounds on both, with stragglers as well. Under all seven readings
of λ, units and q FedLap is below FedAvg on MNIST (one seed). With stragglers FedLap is far above FedAvg only if
FedAvg throws away what stragglers send, which the paper does not say; FedProx with μ = 1, to which the paper's q
leads, is the lowest of those that keep it. Stragglers do FedLap no harm at the end, and little to FedAvg and
FedProx as long as what they send counts. Over five seeds on MNIST, five local epochs end above one, but ten no
longer above five; batches of five are better than the paper's of ten; and FedAvg with as many epochs ends no lower.""",
    "Combinations": """\
What came out so far, from one seed: in none of the four settings does a combination beat the better of its parts by
more than a trace. Where ten or twenty of many clients take part, weighing by angle is below FedAvg over the 50
rounds, and an objective that holds clients back makes up for some of it. In FedLap's settings it does so for
FedLDF's selection, too, and at the same upload comes much nearer to FedAvg. With two IID and eight one-class
clients, all in every round, weighing by angle is what helps, and a spring beside it changes nothing.""",
}
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
            measured, word = summary(study, ruling), verdict(ruling, mark="**")
            row = [study.paper, claim.text, claim.paper, measured, seeds_of(ruling), word, _why(ruling)]
            rows.append([*row, f"[{study.name}](#{_anchor(study)})"])
    return TextTable("", ["paper", "claim", "reported", "measured", "seeds", "verdict", "why", "study"], rows)


def _why(ruling: Ruling) -> str:
    """The study's own explanation, or else what decided."""
    if not ruling.findings:
        return "nothing to compare is stored"
    if ruling.claim.why:
        return ruling.claim.why
    undecided = [finding for finding in ruling.findings if finding.outcome == "open"]
    missed = sum(2 * finding.censored > finding.seeds for finding in undecided)
    counts = {
        "decided in its favour": ruling.count("holds"),
        "decided against it": ruling.count("fails"),
        "with seeds that do not decide": len(undecided) - missed,
        "with neither at the target in most seeds": missed,
    }
    return ", ".join(text if len(ruling.findings) == 1 else f"{n} {text}" for text, n in counts.items() if n)


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
        lines.append(f"No results are stored; two cores need {study.expected_time(2)}.\n")
        return "\n".join(lines)
    for plot in study.plots:
        if (figures / study.name / f"{plot.name}.png").exists():
            lines.append(f"![{study.name}: {plot.name}]({figures.name}/{study.name}/{plot.name}.png)\n")
    lines += [f"{table.title}\n\n{_markdown(table)}" for table in measured_tables(results)]
    for claim in study.claims:
        ruling = check(claim, results)
        if len(ruling.findings) > 1:
            table = differences_table(results, ruling)
            lines.append(f"{_before(table.title)} {verdict(ruling)}.\n\n{_markdown(table)}")
        else:
            lines.append(f"{_before(claim.text)} {verdict(ruling)}; {summary(study, ruling)}.\n")
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


def _before(text: str) -> str:
    """A claim or a question, and then its verdict."""
    return text if text.endswith("?") else f"{text}:"


def _markdown(table: TextTable) -> str:
    lines = [table.head, ["---"] * len(table.head), *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"
