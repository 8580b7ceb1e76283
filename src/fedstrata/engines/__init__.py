"""Engines carry orders to clients and replies back."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a node on which torch cannot be loaded says so, with what is in this package
    from contextlib import AbstractContextManager

    from fedstrata.core.fit import Engine
    from fedstrata.recipes.experiment import Experiment


def open_engine(experiment: Experiment) -> AbstractContextManager[Engine]:
    """The engine that a recipe asks for."""
    experiment.require_data()
    if experiment.recipe.engine.name == "flower":
        from fedstrata.engines.flower.simulation import FlowerSimulation

        return FlowerSimulation(experiment)
    from fedstrata.engines.local import LocalEngine

    return LocalEngine(experiment.setup, experiment.recipe.engine.workers)
