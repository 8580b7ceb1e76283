"""docs/reproductions.md and a page per paper behind it, from the studies, the stored results and a few words on them.

No figure is typed by hand. `python -m reproductions page` writes them.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstrata.recipes.schema import load
from reproductions.claims import FEW_SEEDS, Ruling, Verdict, check, is_smaller
from reproductions.report import TextTable, differences_table, measured_tables, seeds_of, summary, verdict
from reproductions.results import Results, made_on
from reproductions.study import Claim, Study, load_study, studies


@dataclass(frozen=True)
class Paper:
    """What a page is about: the name that studies give the paper, the page's file, and what was asked."""

    name: str
    page: str
    asked: str


PAPERS = [
    Paper("FedAdp", "fedadp.md", "Does weighing clients by angle save rounds where some have few classes?"),
    Paper("FedLayerWise", "fedlayerwise.md", "Does it save more rounds to weigh each layer by its own angle?"),
    Paper(
        "FedLDF", "fedldf.md", "Is a fifth of the upload enough, if each layer comes from those where it moved most?"
    ),
    Paper("Adaptive μ", "adaptive-mu.md", "Is a μ for each layer as accurate as one constant μ, and calmer?"),
    Paper("FedLap", "fedlap.md", "Does a spring for each neuron help in the first rounds, and with stragglers?"),
    Paper("Combinations", "combinations.md", "Our own question: do parts of these algorithms gain by being combined?"),
]

_INDEX = """\
# Reproductions

What five papers claim, run again: a page per paper has every claim with what was reported, what we measured, and why.

{table}
- **settings**: how many of the paper's are run with all algorithms; beside them, reduced ones that two cores can run.
- **claims**: how many came out so. *Smaller* are those that would hold if the paper did not say by how much.
- **seeds**: of each comparison, the fewest and the most. {hints} of {tested} tested claims and questions rest on fewer
  than {few} somewhere.

[What the verdicts mean](studies.md#verdicts), and [how to run a study](studies.md): `python -m reproductions run NAME`.
"""

_ABOVE = """\
[All papers](../reproductions.md) · [What the verdicts mean](../studies.md#verdicts) · \
[How to run a study](../studies.md)
"""

_MADE_WITH = """\
## Made with

{machines}

Another processor or torch gives [other last digits](../studies.md#checking).
"""


@dataclass(frozen=True)
class _Told:
    """What is stored of a study, and what became of its claims."""

    results: Results
    rulings: list[Ruling]

    @classmethod
    def of(cls, results: Results) -> _Told:
        return cls(results, [check(claim, results) for claim in results.study.claims])

    @property
    def study(self) -> Study:
        return self.results.study


def pages(results: Path, docs: Path, figures: Path) -> dict[Path, str]:
    """The index and each paper's page, by their places below `docs`; they show the pictures that are in `figures`."""
    told = [_Told.of(Results.stored(load_study(name), results)) for name in sorted(studies())]
    by_paper = {paper: [one for one in told if one.study.paper == paper.name] for paper in PAPERS}
    path = results / "findings.toml"
    findings = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    folder = docs / "reproductions"
    found = {docs / "reproductions.md": _index(by_paper)}
    for paper, its in by_paper.items():
        parts = [f"# {paper.name}\n", _ABOVE, f"**{paper.asked}**\n"]
        parts += [f"{findings[paper.name]}\n"] if paper.name in findings else []
        parts += ["## Claims\n", _markdown(_claims(its)), *(_section(one, figures, folder) for one in its)]
        machines = made_on([one.study for one in its], results)
        if machines:
            parts.append(_MADE_WITH.format(machines="\n".join(f"- {machine}" for machine in machines)))
        found[folder / paper.page] = "\n".join(parts)
    return found


def _index(by_paper: Mapping[Paper, list[_Told]]) -> str:
    """A row per paper."""
    rows = []
    for paper, told in by_paper.items():
        seeds = sorted(finding.seeds for one in told for ruling in one.rulings for finding in ruling.findings)
        rows.append(
            [
                f"[{paper.name}](reproductions/{paper.page})",
                paper.asked,
                _settings_run(told),
                _counts(told),
                "–".join(dict.fromkeys(str(number) for number in (*seeds[:1], *seeds[-1:]))),
            ]
        )
    tested = [ruling for told in by_paper.values() for one in told for ruling in one.rulings if ruling.findings]
    return _INDEX.format(
        table=_markdown(TextTable("", ["paper", "what was asked", "settings", "claims", "seeds"], rows)),
        hints=sum(ruling.hint for ruling in tested),
        tested=len(tested),
        few=FEW_SEEDS,
    )


_VERDICTS: list[Verdict] = ["holds", "holds in part", "does not hold", "open", "not tested"]


def _counts(told: list[_Told]) -> str:
    """How the claims of a paper came out; questions of ours have no verdict."""
    rulings = [(one, ruling) for one in told for ruling in one.rulings]
    judged = [(one, ruling) for one, ruling in rulings if not ruling.claim.is_question]
    verdicts = [ruling.verdict for _, ruling in judged]
    counts: dict[str, str] = {verdict: str(verdicts.count(verdict)) for verdict in _VERDICTS if verdict in verdicts}
    smaller = sum(is_smaller(ruling, one.results) for one, ruling in judged)
    if smaller:
        counts["does not hold"] += f" (smaller {smaller})"
    if len(judged) < len(rulings):
        counts["questions of ours"] = str(len(rulings) - len(judged))
    return ", ".join(f"{what} {count}" for what, count in counts.items())


def _settings_run(told: list[_Told]) -> str:
    """How many cells have results of every arm, of all and of reduced ones."""

    def count(studies: list[_Told]) -> tuple[int, int]:
        whole = [
            all(one.results.seeds(cell.name, arm) for arm in one.study.arms)
            for one in studies
            for cell in one.study.cells
        ]
        return sum(whole), len(whole)

    run, all_of_them = count([one for one in told if not one.study.reduced])
    reduced, _ = count([one for one in told if one.study.reduced])
    return f"{run} of {all_of_them}" + (f", {reduced} reduced" if reduced else "")


def _claims(told: list[_Told]) -> TextTable:
    rows = []
    for one in told:
        study = one.study
        for ruling in one.rulings:
            claim, measured, word = ruling.claim, summary(study, ruling), verdict(ruling, mark="**")
            row = [claim.text, claim.paper, measured, seeds_of(ruling), word, _why(ruling, study)]
            rows.append([*row, f"[{study.name}](#{_anchor(study.name)})"])
    return TextTable("", ["claim", "reported", "measured", "seeds", "verdict", "why", "study"], rows)


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


def _section(told: _Told, figures: Path, folder: Path) -> str:
    study, results = told.study, told.results
    lines = [f"## {study.name}\n", f"{study.title}: {study.shows}.\n"]
    if study.reduced:
        lines.append(f"**Reduced:** {study.reduced.strip()}\n")
    if study.notes:
        lines.append(study.notes.strip() + "\n")
    lines.append(_setting(study))
    if not any(results.all_seeds()):
        lines.append(f"No results are stored; two cores need {study.expected_time(2)}.\n")
        return "\n".join(lines)
    for plot in study.plots:
        picture = figures / study.name / f"{plot.name}.png"
        if picture.exists():
            link = Path(os.path.relpath(picture, folder)).as_posix()
            lines.append(f"![{study.name}: {plot.name}]({link})\n")
    lines += [f"{table.title}\n\n{_markdown(table)}" for table in measured_tables(results)]
    for ruling in told.rulings:
        claim = ruling.claim
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
