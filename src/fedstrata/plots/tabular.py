"""What came of runs as a table for a paper: LaTeX or Markdown, a row for each arm."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial

from fedstrata.formatting import number, size
from fedstrata.plots.arms import Arm
from fedstrata.plots.tables import or_worst
from fedstrata.runs.statistics import estimate


def outcome(arms: Sequence[Arm]) -> list[list[str]]:
    """Heading and rows: the metric, the best, the upload, and the rounds to the target, if there is one."""
    metric, target = arms[0].first.run.metric, arms[0].first.run.recipe.evaluation.target
    columns = [(metric.name, metric.name, metric.worst), ("best", "best", metric.worst)]
    columns += [(f"rounds to {target:g}", "rounds_to_target", math.inf)] if target is not None else []
    rows = [["algorithm", "seeds", *(title for title, _, _ in columns), "upload"]]
    for arm in arms:
        counted = [source for source in arm.sources if source.finished] or [one for one in arm.sources if one.history]
        row = [arm.name, str(len(counted))]
        for _, name, worst in columns:
            found = estimate([or_worst(source.summary[name], worst) for source in counted])
            limit = max((len(source.history) for source in counted), default=0)
            row.append(found.written(partial(_short, most=limit)))
        uploads = estimate([float(source.summary["upload"]) for source in counted])
        rows.append([*row, size(uploads.median) if counted else "–"])
    return rows


def _short(value: float, most: int) -> str:
    if value == math.inf:
        return f">{most}"
    return f"{value:g}" if value == round(value) else number(value)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """As a table of GitHub's Markdown."""
    lines = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines.insert(1, ["---", *["---:"] * (len(rows[0]) - 1)])
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def latex(rows: Sequence[Sequence[str]]) -> str:
    """As a tabular with the rules of booktabs."""
    head, *body = (" & ".join(map(_escaped, row)) + r" \\" for row in rows)
    lines = [r"\begin{tabular}{l" + "r" * (len(rows[0]) - 1) + "}", r"\toprule", head, r"\midrule"]
    return "\n".join([*lines, *body, r"\bottomrule", r"\end{tabular}", ""])


_TEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    ">": "$>$",
    "–": "--",
    "μ": r"$\mu$",
}


def _escaped(text: str) -> str:
    return re.sub(r"[\\~^>–μ]|[&%$#_{}]", lambda found: _TEX.get(found[0], "\\" + found[0]), text)
