"""Axis 1: what a client minimises. One rule a file; a new one is a file, a line here, and a test."""

from __future__ import annotations

from fedstrata.core.axes import Plain
from fedstrata.objectives.adaptive_mu import AdaptiveMu
from fedstrata.objectives.ditto import Ditto
from fedstrata.objectives.fedbabu import FedBabu
from fedstrata.objectives.feddyn import FedDyn
from fedstrata.objectives.fedlap import FedLap
from fedstrata.objectives.fedprox import FedProx
from fedstrata.objectives.fedrep import FedRep
from fedstrata.objectives.moon import Moon
from fedstrata.objectives.scaffold import Scaffold

OBJECTIVES = {
    "plain": Plain,
    "fedprox": FedProx,
    "adaptive_mu": AdaptiveMu,
    "fedlap": FedLap,
    "fedrep": FedRep,
    "fedbabu": FedBabu,
    "scaffold": Scaffold,
    "feddyn": FedDyn,
    "ditto": Ditto,
    "moon": Moon,
}

__all__ = [
    "OBJECTIVES",
    "AdaptiveMu",
    "Ditto",
    "FedBabu",
    "FedDyn",
    "FedLap",
    "FedProx",
    "FedRep",
    "Moon",
    "Plain",
    "Scaffold",
]
