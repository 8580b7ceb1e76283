"""From a recipe's `[engine]` to the engine that a run goes on."""

from __future__ import annotations

from contextlib import AbstractContextManager

from fedstrata.core.fit import Engine
from fedstrata.engines.local import LocalEngine
from fedstrata.processes import resume_collection
from fedstrata.recipes.experiment import Experiment


def open_engine(experiment: Experiment) -> AbstractContextManager[Engine]:
    """The engine that a recipe asks for."""
    experiment.require_data()
    resume_collection()  # from here on there is training, which may leave large garbage
    if experiment.recipe.engine.name == "flower":
        from fedstrata.nodes.simulation import FlowerSimulation

        return FlowerSimulation(experiment)
    return LocalEngine(experiment.setup, experiment.recipe.engine.workers, experiment.cohort_size)
