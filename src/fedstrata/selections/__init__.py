"""Axis 2: who uploads which layer. One rule a file; a new one is a file, a line here, and a test."""

from __future__ import annotations

from fedstrata.core.axes import Everything
from fedstrata.selections.fedldf import FedLDF
from fedstrata.selections.neuron_pruning import NeuronPruning
from fedstrata.selections.random_clients import RandomClients
from fedstrata.selections.random_layers import RandomLayers

SELECTIONS = {
    "all": Everything,
    "fedldf": FedLDF,
    "random_layers": RandomLayers,
    "random_clients": RandomClients,
    "neuron_pruning": NeuronPruning,
}

__all__ = ["SELECTIONS", "Everything", "FedLDF", "NeuronPruning", "RandomClients", "RandomLayers"]
