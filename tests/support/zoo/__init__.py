"""A zoo of modules, ordinary and odd, to be trained in every way that there is, and in plain PyTorch."""

from __future__ import annotations

from fedstrata.tasks.task import Task
from tests.support.zoo.animals import Animal
from tests.support.zoo.changing import CHANGING
from tests.support.zoo.dtypes import DTYPES
from tests.support.zoo.gradients import GRADIENTS
from tests.support.zoo.inputs import INPUTS
from tests.support.zoo.ordinary import ORDINARY
from tests.support.zoo.shared import SHARED
from tests.support.zoo.traps import TRAPS
from tests.support.zoo.unrepeatable import UNREPEATABLE

ZOO: dict[str, Animal] = ORDINARY | SHARED | CHANGING | DTYPES | GRADIENTS | INPUTS | UNREPEATABLE | TRAPS


def task(name: str) -> Task:
    """For recipes: task.function = "tests.support.zoo:task"."""
    return ZOO[name].task()
