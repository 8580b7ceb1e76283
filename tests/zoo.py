"""How the modules of the zoo (tests/support/zoo) fare, as a Markdown table.

$ python tests/zoo.py [part of a name …]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # as a script: what is imported from `tests` is found in the folder above
    sys.path[0] = str(Path(__file__).parents[1])

from fedstrata.core.determinism import steady
from tests.support.zoo import ZOO
from tests.support.zoo.fares import WAYS, visit


def shortened(cell: str, most: int = 160) -> str:
    return cell if len(cell) <= most else f"{cell[:most]}…{'**' * cell.startswith('**')}"


def print_table(parts: Sequence[str]) -> None:
    """All animals, or those whose names have one of these parts; what is wrong is bold."""
    columns = ["plain PyTorch", *WAYS]
    print(f"| module | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name, animal in ZOO.items():
        if parts and not any(part in name for part in parts):
            continue
        with tempfile.TemporaryDirectory() as folder, steady():
            row = visit(animal, Path(folder))
        cells = [shortened(row.cells.get(column, "")).replace("|", "\\|") for column in columns]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    print_table(sys.argv[1:])
