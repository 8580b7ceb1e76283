"""How updates become one. One rule a file; a new one is a file, a line here, and a test."""

from __future__ import annotations

from fedstrata.combinations.median import Median
from fedstrata.combinations.norm_bounding import NormBounding
from fedstrata.combinations.trimmed_mean import TrimmedMean
from fedstrata.core.axes import Mean

COMBINATIONS = {
    "mean": Mean,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "norm_bounding": NormBounding,
}

__all__ = ["COMBINATIONS", "Mean", "Median", "NormBounding", "TrimmedMean"]
