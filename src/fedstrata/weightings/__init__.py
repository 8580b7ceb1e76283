"""Axis 3: how much an upload counts. One rule a file; a new one is a file, a line here, and a test."""

from __future__ import annotations

from fedstrata.core.axes import SampleSize
from fedstrata.weightings.fedadp import FedAdp
from fedstrata.weightings.fedlayerwise import FedLayerWise
from fedstrata.weightings.uniform import Uniform

WEIGHTINGS = {
    "sample_size": SampleSize,
    "uniform": Uniform,
    "fedadp": FedAdp,
    "fedlayerwise": FedLayerWise,
}

__all__ = ["WEIGHTINGS", "FedAdp", "FedLayerWise", "SampleSize", "Uniform"]
