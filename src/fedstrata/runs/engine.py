"""From a recipe's `[engine]` to the engine that a run goes on."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from fedstrata.core.fit import Engine
from fedstrata.engines.local import LocalEngine
from fedstrata.processes import resume_collection
from fedstrata.recipes.experiment import Experiment


def open_engine(experiment: Experiment, memory: Path | None = None) -> AbstractContextManager[Engine]:
    """The engine that a recipe asks for. The nodes of a simulation keep their clients' memory in a folder."""
    experiment.require_data()
    resume_collection()  # from here on there is training, which may leave large garbage
    if experiment.recipe.engine.name == "flower":
        from fedstrata.nodes.simulation import FlowerSimulation

        return FlowerSimulation(experiment, memory)
    return LocalEngine(experiment.setup, experiment.recipe.engine.workers, experiment.cohort_size)
