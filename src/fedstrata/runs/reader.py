"""A run that is looked at, while it goes on or afterwards. Nothing that computes is imported for it.

run = fedstrata.Run("runs/example")
print(run.summary(), run.layers(5)["divergence"])
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.core.errors import printable
from fedstrata.recipes.schema import Recipe
from fedstrata.runs.directory import RunDirectory
from fedstrata.runs.files import in_use
from fedstrata.runs.findings import Finding, find
from fedstrata.runs.formats import About, LayerRecord, Line
from fedstrata.tasks.metric import Metric

if TYPE_CHECKING:
    from torch import nn

    from fedstrata.tasks.task import Task

_log = logging.getLogger("fedstrata")


class Run:
    """A run in its directory."""

    def __init__(self, path: str | Path) -> None:
        """Open a run that exists."""
        self.directory = RunDirectory(Path(path))

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.directory.path

    @property
    def recipe(self) -> Recipe:
        """Its recipe."""
        return self.directory.recipe

    @property
    def about(self) -> About:
        """What was resolved when it began: layers, metric, data, versions."""
        return self.directory.about

    @property
    def layer_names(self) -> list[str]:
        """Its layers."""
        return [layer.name for layer in self.about.layers]

    @property
    def metric(self) -> Metric:
        """What is measured (by name and direction; the function is the task's)."""
        return Metric(self.about.metric.name, _no_function, self.about.metric.direction)

    def history(self) -> list[Line]:
        """One line per whole round."""
        return self.directory.history()

    def failures(self) -> list[Line]:
        """One line per round that failed, and stopped the run; what the clients did in it is told as in a history."""
        return self.directory.failures()

    def layers(self, round: int) -> LayerRecord:
        """What a round was for each client and layer, by name (docs/run-directory.md has the names)."""
        return self.directory.layers(round)

    def finished(self, history: list[Line] | None = None) -> bool:
        """Whether nothing is left to run."""
        lines = self.history() if history is None else history
        return bool(lines) and self.is_over(lines) and self.directory.last_checkpoint().round == lines[-1]["round"]

    def running(self) -> bool:
        """Whether a process works on it now."""
        return in_use(self.path)

    def is_over(self, history: list[Line]) -> bool:
        """Whether the last of these rounds is the last of all: as many as asked for, or the target is reached."""
        done = history[-1]["round"] if history else 0
        if done >= self.recipe.training.rounds:
            return True
        return self.recipe.evaluation.stop_at_target and self.rounds_to_target(history) is not None

    def curve(self, history: list[Line] | None = None) -> list[tuple[int, float]]:
        """The metric over rounds, on the set that decides."""
        decisive, name = self.recipe.evaluation.on[0], self.about.metric.name
        lines = self.history() if history is None else history
        measured = [(line["round"], line["metrics"][decisive][name]) for line in lines if decisive in line["metrics"]]
        return [(round, math.nan if value is None else value) for round, value in measured]  # null: was not finite

    def rounds_to_target(self, history: list[Line] | None = None) -> int | None:
        """The first round that reached the target; None if none did (or there is no target)."""
        target = self.recipe.evaluation.target
        if target is None:
            return None
        return next((round for round, value in self.curve(history) if self.metric.reached(value, target)), None)

    def summary(self, history: list[Line] | None = None) -> dict[str, Any]:
        """The run in a few numbers."""
        lines, metric = self.history() if history is None else history, self.metric
        curve = self.curve(lines)
        values = [value for _, value in curve]
        finite = [value for value in values if math.isfinite(value)]
        reached = self.rounds_to_target(lines)
        to_target = next((line["upload_total"] for line in lines if line["round"] == reached), None)
        return {
            "algorithm": self.recipe.label,
            "seed": self.recipe.seed,
            "rounds": lines[-1]["round"] if lines else 0,
            metric.name: values[-1] if values else None,
            "measured_in_round": curve[-1][0] if curve else None,
            "best": (max if metric.direction == "max" else min)(finite) if finite else None,
            "rounds_to_target": reached,
            "upload": lines[-1]["upload_total"] if lines else 0,
            "upload_to_target": to_target,
            "weights_sha256": self.directory.last_checkpoint().weights_sha256,
        }

    def findings(self, history: list[Line] | None = None) -> list[Finding]:
        """What stands out: suspects and failures first, then whom and what the clients disagree about."""
        lines = self.history() if history is None else history
        record = self.layers if self.recipe.record.layers else None
        return find(self.about, lines, record, self.recipe.training.batch_size)

    # --- its model, for which its recipe is built again ---------------------------------------------------------

    def announce_imports(self) -> None:
        """Say what code the recipe names, which may be somebody else's, before it is imported."""
        for field, name in self.recipe.named_code():
            what = f"{self.path}: its recipe names code that is imported now: {field} = {name}"
            _log.warning("%s", printable(what))

    def model(self, *, task: Task | None = None, data: Path | None = None) -> nn.Module:
        """The trained model. What its recipe names as `module:name` is imported; the log says so before."""
        from fedstrata.runs.trained import trained_model

        if task is None:
            self.announce_imports()
        return trained_model(self.directory, task, data)

    def export(self, path: str | Path, *, task: Task | None = None, data: Path | None = None) -> None:
        """Write the trained model's whole state dict, for `load_state_dict`, as safetensors."""
        from fedstrata.runs.trained import write_model

        if task is None:
            self.announce_imports()
        write_model(self.directory, Path(path), task, data)


def _no_function(outputs: Any, targets: Any) -> float:
    raise RuntimeError("a run directory knows a metric's name, not its function")
