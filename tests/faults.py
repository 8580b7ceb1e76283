"""A campaign against the local engine: 200 kills of workers over all kinds of runs, and what came of them.

$ python tests/faults.py [--kills N] [--seed N]

support/faults.py says what is done; tests do a little of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":  # as a script: what is imported from `tests` is found in the folder above
    sys.path[0] = str(Path(__file__).parents[1])

from tests.support.faults import campaign


def main() -> None:
    """Until so many kills were made."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outcome = campaign(Path(folder), asked.kills, seed=asked.seed, say=lambda line: print(line, flush=True))
    print("\n".join(f"{count:5} {moment}" for moment, count in outcome.kills.most_common()))
    print(
        f"{outcome.kills.total()} kills of workers in {outcome.runs} runs: {len(outcome.differences)} differences, "
        f"{len(outcome.hangs)} hangs, {time.monotonic() - started:.0f} seconds"
    )
    sys.exit(bool(outcome.differences or outcome.hangs))


if __name__ == "__main__":
    main()
