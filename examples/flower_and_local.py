"""The demo's recipe twice, in a simulation with Flower and on the local engine: they end in the same weights.

python examples/flower_and_local.py [DIR]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fedstrata

ENGINES = ("flower", "local")


def main() -> None:
    """Run both and compare."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    digests = {}
    for engine in ENGINES:

        def tell(line: Mapping[str, Any], engine: str = engine) -> None:
            accuracy = line["metrics"]["test"]["accuracy"]
            print(f"{engine:6}  round {line['round']:2}  accuracy {accuracy:.4f}  {line['seconds']:.2f} s", flush=True)

        run = fedstrata.run("demo", settings={"engine.name": engine}, out=folder / engine, on_round=tell)
        digests[engine] = run.summary()["weights_sha256"]
    print("\nSHA-256 of the weights")
    for engine, digest in digests.items():
        print(f"{engine:6}  {digest}")
    sys.exit(0 if len(set(digests.values())) == 1 else "the weights differ")


if __name__ == "__main__":
    main()
