"""Engines carry orders to clients and replies back."""

from __future__ import annotations

from contextlib import AbstractContextManager

from fedstrata.core.rounds import Engine
from fedstrata.recipes.prepared import Prepared


def open_engine(prepared: Prepared) -> AbstractContextManager[Engine]:
    """The engine that a recipe asks for."""
    prepared.require_data()
    if prepared.experiment.engine.name == "flower":
        from fedstrata.engines.flower.simulation import FlowerSimulation

        return FlowerSimulation(prepared)
    from fedstrata.engines.local import LocalEngine

    return LocalEngine(prepared.setup, prepared.experiment.engine.workers)
