"""fedstrata: layer-aware federated learning.

The public names are imported when they are first used, so that the command line answers before torch is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedstrata._version import __version__ as __version__

if TYPE_CHECKING:
    from fedstrata.algorithms import adaptive_mu as adaptive_mu
    from fedstrata.algorithms import fedadp as fedadp
    from fedstrata.algorithms import fedavg as fedavg
    from fedstrata.algorithms import fedlap as fedlap
    from fedstrata.algorithms import fedlayerwise as fedlayerwise
    from fedstrata.algorithms import fedldf as fedldf
    from fedstrata.algorithms import fedprox as fedprox
    from fedstrata.algorithms import hdfl as hdfl
    from fedstrata.algorithms import named as named
    from fedstrata.algorithms import neuron_pruning as neuron_pruning
    from fedstrata.algorithms import random_layers as random_layers
    from fedstrata.clients.local import Local as Local
    from fedstrata.core.aggregation import initial_state as initial_state
    from fedstrata.core.axes import Algorithm as Algorithm
    from fedstrata.core.fit import Plan as Plan
    from fedstrata.core.fit import fit as fit
    from fedstrata.core.layers import Layers as Layers
    from fedstrata.core.training import LocalTraining as LocalTraining
    from fedstrata.core.training import Participation as Participation
    from fedstrata.recipes.schema import Recipe as Recipe
    from fedstrata.recipes.schema import load as load
    from fedstrata.runs.reader import Run as Run
    from fedstrata.runs.runner import resume as resume
    from fedstrata.runs.runner import run as run
    from fedstrata.server import Server as Server
    from fedstrata.tasks.metric import Metric as Metric
    from fedstrata.tasks.task import Task as Task

_HOMES = {
    "core.axes": ("Algorithm",),
    "algorithms": (
        "adaptive_mu",
        "fedadp",
        "fedavg",
        "fedlap",
        "fedlayerwise",
        "fedldf",
        "fedprox",
        "hdfl",
        "named",
        "neuron_pruning",
        "random_layers",
    ),
    "clients.local": ("Local",),
    "recipes.schema": ("Recipe", "load"),
    "core.layers": ("Layers",),
    "core.fit": ("Plan", "fit"),
    "core.aggregation": ("initial_state",),
    "server": ("Server",),
    "core.training": ("LocalTraining", "Participation"),
    "runs.reader": ("Run",),
    "runs.runner": ("resume", "run"),
    "tasks.metric": ("Metric",),
    "tasks.task": ("Task",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted([*_MODULE_OF, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fedstrata' has no attribute {name!r}")
    return getattr(import_module(f"fedstrata.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
