"""Prints constraints: the lowest versions that pyproject.toml allows, for `pip install -c`.

Usage: python scripts/lowest.py [EXTRA ...] > lowest.txt

torch is left out: constraints.txt has the one version that can be had.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def lowest(extras: list[str]) -> list[str]:
    """`name==version` of each requirement with a lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    found = [re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", requirement) for requirement in wanted]
    return [f"{one[1]}=={one[2]}" for one in found if one is not None and one[1] != "torch"]


if __name__ == "__main__":
    print("\n".join(lowest(sys.argv[1:])))
