"""Which runs no longer count as seeds of a study: those whose bits a later arithmetic has changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fedstrata.objectives.fedlap import FedLap
from fedstrata.recipes.schema import Recipe

COUNTED = 1
"""Changes of bits up to this arithmetic count. It is raised to `ARITHMETIC` when what they changed is made anew."""


def _by_one_trainer(recipe: Recipe) -> bool:
    """Perceptrons are trained one client at a time, and FedLap's λ does not cancel; our convolutions are as before."""
    task = recipe.task
    convolution = task.function is None and task.model.get("name") in ("cnn", "cnn_padded", "tf_cnn", "vgg9")
    return not convolution or isinstance(recipe.built_algorithm.objective, FedLap)


CHANGED: Mapping[int, Callable[[Recipe], bool]] = {2: _by_one_trainer}
"""Whose bits each arithmetic changed, compared with the one before it."""


def is_outdated(recipe: Recipe, arithmetic: int) -> bool:
    """Whether a run that was computed with this arithmetic would have other bits now."""
    return any(changed(recipe) for number, changed in CHANGED.items() if arithmetic < number <= COUNTED)
