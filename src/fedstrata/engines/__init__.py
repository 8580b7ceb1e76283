"""Engines carry orders to clients and replies back."""

from __future__ import annotations

from contextlib import AbstractContextManager

from fedstrata.core.rounds import Engine
from fedstrata.recipes.experiment import Experiment


def open_engine(experiment: Experiment) -> AbstractContextManager[Engine]:
    """The engine that a recipe asks for."""
    experiment.require_data()
    if experiment.recipe.engine.name == "flower":
        from fedstrata.engines.flower.simulation import FlowerSimulation

        return FlowerSimulation(experiment)
    from fedstrata.engines.local import LocalEngine

    return LocalEngine(experiment.setup, experiment.recipe.engine.workers, experiment.cohort_size)
