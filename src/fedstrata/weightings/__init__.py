"""Axis 3: how much an upload counts. One rule a file; a new one is a file, a line here, and a test."""

from __future__ import annotations

from fedstrata.core.axes import SampleSize
from fedstrata.weightings.fedadp import FedAdp
from fedstrata.weightings.fedexp import FedExP
from fedstrata.weightings.fedlayerwise import FedLayerWise
from fedstrata.weightings.fednova import FedNova
from fedstrata.weightings.ida import IDA
from fedstrata.weightings.krum import Krum
from fedstrata.weightings.multi_krum import MultiKrum
from fedstrata.weightings.uniform import Uniform

WEIGHTINGS = {
    "sample_size": SampleSize,
    "uniform": Uniform,
    "fedadp": FedAdp,
    "fedlayerwise": FedLayerWise,
    "fednova": FedNova,
    "fedexp": FedExP,
    "ida": IDA,
    "krum": Krum,
    "multi_krum": MultiKrum,
}

__all__ = [
    "IDA",
    "WEIGHTINGS",
    "FedAdp",
    "FedExP",
    "FedLayerWise",
    "FedNova",
    "Krum",
    "MultiKrum",
    "SampleSize",
    "Uniform",
]
