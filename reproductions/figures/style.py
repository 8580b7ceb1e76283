"""How pictures look, and the library that draws them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedstrata.core.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "savefig.dpi": 110,
    "pdf.fonttype": 42,  # text stays text
    "svg.hashsalt": "fedstrata",  # the same picture is the same file
}

PALETTE: list[tuple[str, Any, str]] = [  # colour (after Okabe and Ito), dashes, marker: each tells arms apart alone
    ("#000000", "-", "o"),
    ("#0072B2", (0, (5, 1.5)), "s"),
    ("#D55E00", (0, (7, 1.5, 1.5, 1.5)), "^"),
    ("#009E73", (0, (2, 1)), "D"),
    ("#CC79A7", (0, (9, 2)), "v"),
    ("#E69F00", (0, (4, 1, 1, 1, 1, 1)), "P"),
    ("#56B4E9", (0, (1, 1)), "X"),
    ("#777777", (0, (3, 1.2, 1, 1.2)), "*"),
]

_OWN = ["fedavg", "fedadp", "fedlayerwise", "fedldf", "fedlap", "adaptive_mu", "random_layers", "hdfl"]
"""Whose style is whose, in every study; other arms take what is left."""

GREY = "#555555"
NOTHING = "#d8d8d8"


def styles(arms: Sequence[str]) -> dict[str, tuple[str, Any, str]]:
    """A colour, dashes and a marker for each arm. With more arms than colours, dashes and marker tell them apart."""
    found = {arm: PALETTE[_OWN.index(arm)] for arm in arms if arm in _OWN}
    kinds_of_fedavg = [arm for arm in arms if arm.startswith("fedavg") and "fedavg" not in found]
    found |= dict.fromkeys(kinds_of_fedavg[:1], PALETTE[0])  # nobody else looks like FedAvg
    others = PALETTE[1:]
    left = [style for style in others if style not in found.values()]
    for shift in range(1, len(others)):
        left += [(colour, others[at - shift][1], others[at - shift][2]) for at, (colour, _, _) in enumerate(others)]
    unknown = [arm for arm in arms if arm not in found]
    found |= {arm: left[at % len(left)] for at, arm in enumerate(unknown)}
    return found


def library() -> Any:
    """Matplotlib, or how to install it."""
    try:
        import matplotlib.figure
        import matplotlib.scale
        import matplotlib.ticker
    except ImportError as error:
        raise UserError("drawing figures needs matplotlib: pip install matplotlib") from error
    return matplotlib


def titled_figure(title: str, width: float, height: float) -> Figure:
    """An empty one under a title, in inches."""
    figure: Figure = library().figure.Figure(figsize=(width, height), layout="constrained")
    figure.suptitle("\n".join(wrapped(line, int(width * 16)) for line in title.splitlines()), fontsize=8.5)
    return figure


def wrapped(text: str, letters: int) -> str:
    """As few lines as possible, of about the same length; a number stays with its word, a formula in one piece."""
    space = "\N{NO-BREAK SPACE}"
    together = re.sub(r"(?<=\d) (?=[a-z%])| (?=[+−=] )|(?<=[+−=]) ", space, text)
    at_width = [textwrap.wrap(together, width, break_long_words=False) for width in range(1, letters + 1)]
    fewest = len(at_width[-1])
    return "\n".join(next(lines for lines in at_width if len(lines) == fewest)).replace(space, " ")
