"""fedstrata: layer-aware federated learning.

The public names are imported when they are first used, so that the command line answers before torch is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from fedstrata.algorithm import Algorithm as Algorithm
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
    from fedstrata.experiment import Experiment as Experiment
    from fedstrata.experiment import load as load
    from fedstrata.layers import Layers as Layers
    from fedstrata.rounds import Plan as Plan
    from fedstrata.rounds import fit as fit
    from fedstrata.rounds import initial_state as initial_state
    from fedstrata.runs import Run as Run
    from fedstrata.runs import resume as resume
    from fedstrata.runs import run as run
    from fedstrata.tasks.metric import Metric as Metric
    from fedstrata.tasks.task import Task as Task

_HOMES = {
    "algorithm": ("Algorithm",),
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
    "experiment": ("Experiment", "load"),
    "layers": ("Layers",),
    "rounds": ("Plan", "fit", "initial_state"),
    "runs": ("Run", "resume", "run"),
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
