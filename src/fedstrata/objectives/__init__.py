"""Axis 1: what a client minimises. One rule a file; a new one is a file, a line here, and a test."""

from __future__ import annotations

from fedstrata.core.axes import Plain
from fedstrata.objectives.adaptive_mu import AdaptiveMu
from fedstrata.objectives.fedlap import FedLap
from fedstrata.objectives.fedprox import FedProx

OBJECTIVES = {
    "plain": Plain,
    "fedprox": FedProx,
    "adaptive_mu": AdaptiveMu,
    "fedlap": FedLap,
}

__all__ = ["OBJECTIVES", "AdaptiveMu", "FedLap", "FedProx", "Plain"]
