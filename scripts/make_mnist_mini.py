"""Makes src/fedstrata/tasks/mnist_mini.npz: a class-balanced sample of MNIST's training and test images.

Usage: python scripts/make_mnist_mini.py [DATA_DIRECTORY]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from fedstrata.core.rng import generator
from fedstrata.tasks.datasets import load

PER_CLASS = {"train": 800, "test": 200}
TARGET = Path(__file__).parent.parent / "src/fedstrata/tasks/mnist_mini.npz"


def main() -> None:
    """Draw the sample, in the order of the original files, and write it."""
    mnist = load("mnist", Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    draw = generator(0, "mnist-mini")
    arrays = {}
    for part, count in PER_CLASS.items():
        labels = getattr(mnist, f"{part}_labels").numpy()
        chosen = [draw.choice(np.flatnonzero(labels == digit), count, replace=False) for digit in range(10)]
        indices = np.sort(np.concatenate(chosen))
        arrays[f"{part}_images"] = getattr(mnist, f"{part}_images").numpy()[indices, 0]
        arrays[f"{part}_labels"] = labels[indices].astype(np.uint8)
    np.savez_compressed(TARGET, **arrays)
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
