"""How updates become one. One rule a file; a new one is a file, a line here, and a test."""

from __future__ import annotations

from fedstrata.core.axes import Mean

COMBINATIONS = {
    "mean": Mean,
}

__all__ = ["COMBINATIONS", "Mean"]
