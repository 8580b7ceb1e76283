"""Digests of what runs come to, to show that a change of the code changes no result.

$ git worktree add ../before COMMIT
$ PYTHONPATH=../before/src python tests/digests.py > before.txt
$ PYTHONPATH=src python tests/digests.py > after.txt
$ diff before.txt after.txt

There is a line for each case, so that `diff` names the case and the kind of thing that is not as it was:

    NAME  weights=…  history=…  layers=…  ledger=…  status=…  state=…

- weights: every tensor of the final model, by name.
- history: what the rounds measured and how many took part; floats by their `repr`.
- layers: every array of the per-layer records.
- ledger: bytes up and down per layer, of scores, and of all else.
- status: what became of every client in every round (the kind, not the wording), and how the run ended.
- state: what rules remember after the last round.

Ids, seconds, versions, paths and wording are left out. `-` stands for nothing, as where rounds are not recorded.
Digests hold on one machine only, so none is stored: both commits are run on the same machine.

`python tests/digests.py fault/ named/fedldf` runs the cases with one of these in their name. `--values` also prints
what is digested, to see which number it is. `--simulations` adds Flower's own, which are slow.

Where code is rearranged, `digested/inside.py` and `digested/on_flower.py` are to be adapted. All other cases go through
recipes, the command line and `fedstrata.run`, and read the files of run directories as they are. If what is adapted no
longer runs on the commit before, run that commit's own script there: `PYTHONPATH=../before/src python
../before/tests/digests.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

if __name__ == "__main__":  # as a script: what is imported from `tests` is found in the folder above
    sys.path[0] = str(Path(__file__).parents[1])

import torch

import fedstrata
from tests.support.digested import inside, on_flower, recipes
from tests.support.digested.values import KINDS, Case, Values

CASES: Mapping[str, Case] = recipes.CASES | inside.CASES | on_flower.CASES


def values_of(case: Case) -> Values:
    """Run a case. Flower's clients are not ours, and would use all cores, which another number of them changes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="digests-") as folder:
            return case(Path(folder))
    finally:
        torch.set_num_threads(threads)


def digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12] if lines else "-"


def line_of(name: str, values: Values) -> str:
    return "  ".join([name, *(f"{kind}={digest(values[kind])}" for kind in KINDS)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only the cases with one of these in their name")
    parser.add_argument("--values", action="store_true", help="print what is digested as well")
    parser.add_argument("--simulations", action="store_true", help="Flower's own simulations, too")
    options = parser.parse_args()
    logging.disable()
    print(f"of {Path(fedstrata.__file__).parent}", file=sys.stderr)
    cases = {**CASES, **(on_flower.SIMULATIONS if options.simulations else {})}
    chosen = [name for name in cases if not options.names or any(part in name for part in options.names)]
    started = time.perf_counter()
    for name in chosen:
        values = values_of(cases[name])
        print(line_of(name, values), flush=True)
        for kind in KINDS if options.values else ():
            for line in values[kind]:
                print(f"    {kind}: {line}")
    print(f"{len(chosen)} cases in {time.perf_counter() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
