"""What Python's functions take instead of a recipe: a task, an algorithm, and settings as keyword arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from fedstrata.algorithms import to_table
from fedstrata.core.axes import Algorithm
from fedstrata.core.errors import BadValue
from fedstrata.core.grouping import Grouping
from fedstrata.recipes.schema import NAME, Recipe, Training, as_table, load
from fedstrata.registry import did_you_mean
from fedstrata.tasks.config import PYTHON_TASK, TaskConfig
from fedstrata.tasks.seeded import AnyTask, SeededTask
from fedstrata.tasks.task import Task

What = str | Path | Mapping[str, Any] | Recipe | Task | SeededTask | TaskConfig
"""What is learned: a task, or a recipe, as an object, a table, a file or a name."""


class Settings(TypedDict, total=False):
    """Every setting of a recipe's `[training]` table by its own name, and the most useful ones of others."""

    rounds: int
    clients_per_round: int | None
    sampling: Literal["uniform", "size"]
    epochs: int
    steps: int | None
    batch_size: int
    optimizer: str
    optimizer_options: Mapping[str, Any]
    lr: float
    lr_decay: float
    schedule: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    momentum: float
    weight_decay: float
    clip_norm: float | None
    clip_value: float | None
    stragglers: float
    keep_stragglers: bool
    dropouts: float
    min_replies: float
    attempts: int
    initial_weights: str | Path | None
    evaluate_on: str | Sequence[str]
    evaluate_every: int
    evaluate_clients: int | None
    held_out: float
    target: float | None
    stop_at_target: bool
    layers: Grouping
    record_layers: bool
    checkpoint_every: int
    engine: Literal["local", "flower"]
    workers: int | None
    device: str
    dtype: Literal["float32", "float64"]


KEYS = {key: f"training.{key}" for key in Training.model_fields} | {
    "evaluate_on": "evaluation.on",
    "evaluate_every": "evaluation.every",
    "evaluate_clients": "evaluation.clients",
    "held_out": "evaluation.held_out",
    "target": "evaluation.target",
    "stop_at_target": "evaluation.stop_at_target",
    "layers": "layers.grouping",
    "record_layers": "record.layers",
    "checkpoint_every": "record.checkpoint_every",
    "engine": "engine.name",
    "workers": "engine.workers",
    "device": "engine.device",
    "dtype": "engine.dtype",
}
"""Where a recipe has each setting."""


def resolved(
    what: What,
    algorithm: str | Mapping[str, Any] | Algorithm | None,
    settings: Settings,
    more: Mapping[str, Any],
    seed: int | None = None,
) -> tuple[Recipe, AnyTask | None]:
    """The recipe of an experiment, and its task, if that was built in Python. `more` has settings by dotted keys."""
    for key, value in settings.items():
        if key not in KEYS:
            raise BadValue(key, value, f"is no setting{did_you_mean(key, KEYS)}")
    changes = {KEYS[key]: _as_toml(value) for key, value in settings.items() if value is not None} | dict(more)
    task = task_without_recipe(what)
    if isinstance(what, SeededTask):
        if not what.has_test:
            changes = {"evaluation.on": ["clients"], **changes}
        what = what.config
    if isinstance(what, Task):
        table: dict[str, Any] = {"task": {"function": PYTHON_TASK}}
        if what.name != "custom" and re.fullmatch(NAME, what.name):
            table["name"] = what.name
        if "evaluation.on" not in changes and "test" not in what.evaluation:
            on = [*what.evaluation, *(["clients"] if what.held_out is not None else [])][:1]
            changes |= {"evaluation.on": on} if on else {}
    elif isinstance(what, TaskConfig):
        table = {"task": _task_table(what)}
    elif isinstance(what, Recipe):
        table = what.to_table()
    else:
        table = as_table(what)
    if isinstance(algorithm, Algorithm):
        described = to_table(algorithm)
        if "name" not in described and not table.get("layers"):  # the recipe's own grouping comes first
            changes = {"layers.grouping": _as_toml(algorithm.grouping), **changes}
        algorithm = described
    return load(table, algorithm=algorithm, settings=changes, seed=seed), task


def with_task(what: What, task: AnyTask) -> What:
    """A recipe with another task."""
    if isinstance(what, Task | SeededTask | TaskConfig):
        raise BadValue("task", task, "is the second task; leave one out")
    table = what.to_table() if isinstance(what, Recipe) else as_table(what)
    if isinstance(task, SeededTask):
        on = {} if task.has_test else {"on": ["clients"]}
        return table | {"task": _task_table(task.config), "evaluation": on | table.get("evaluation", {})}
    return table | {"task": {**table.get("task", {}), "function": PYTHON_TASK}}


def _task_table(config: TaskConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude_none=True, exclude_defaults=True)


def task_without_recipe(what: What) -> AnyTask | None:
    """The task, if it was made in Python and no recipe can say how."""
    if isinstance(what, SeededTask):
        return what if what.config.function == PYTHON_TASK else None
    return what if isinstance(what, Task) else None


def _as_toml(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_toml(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
