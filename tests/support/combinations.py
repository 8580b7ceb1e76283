"""Every combination of the three axes: a rule of ours, and what the slow reference is told of it."""

from __future__ import annotations

import itertools
from typing import Any

from fedstrata.objectives import AdaptiveMu, FedLap, FedProx, Plain
from fedstrata.selections import Everything, FedLDF, NeuronPruning, RandomClients, RandomLayers
from fedstrata.weightings import FedAdp, FedLayerWise, SampleSize, Uniform

Table = dict[str, tuple[Any, dict[str, Any]]]

OBJECTIVES: Table = {
    "plain": (Plain(), {}),
    "fedprox": (FedProx(mu=0.3), {"mu": 0.3}),
    "adaptive_mu": (AdaptiveMu(mu0=0.4, a=0.5), {"mu": 0.4, "a": 0.5}),
    "fedlap": (FedLap(q=0.5), {"q": 0.5}),
}
SELECTIONS: Table = {
    "all": (Everything(), {}),
    "fedldf": (FedLDF(n=2), {"n": 2}),
    "random_layers": (RandomLayers(n=2), {"draw": RandomLayers(n=2)}),
    "random_clients": (RandomClients(n=3), {"draw": RandomClients(n=3)}),
    "neuron_pruning": (NeuronPruning(share=0.4), {"share": 0.4}),
}
WEIGHTINGS: Table = {
    "sample_size": (SampleSize(), {}),
    "uniform": (Uniform(), {}),
    "fedadp": (FedAdp(), {}),
    "fedlayerwise": (FedLayerWise(alpha=3.0), {"alpha": 3.0}),
}
COMBINATIONS = list(itertools.product(OBJECTIVES, SELECTIONS, WEIGHTINGS))

SIZES = (5, 12, 8, 9, 6, 7)
"""Samples of the clients."""
