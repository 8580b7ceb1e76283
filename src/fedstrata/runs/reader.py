"""A run that is looked at, while it goes on or afterwards. Nothing that computes is imported for it.

run = fedstrata.Run("runs/example")
print(run.summary(), run.layers(5)["divergence"])
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.core.display import Table
from fedstrata.core.errors import FedstrataError, MissingExtra, printable, visible
from fedstrata.core.lazy import plots
from fedstrata.formatting import number, size
from fedstrata.recipes.schema import Recipe
from fedstrata.runs.directory import RunDirectory
from fedstrata.runs.files import in_use
from fedstrata.runs.findings import Finding, find
from fedstrata.runs.formats import About, LayerRecord, Line
from fedstrata.runs.probes import Probe, read_probe, stored_probes
from fedstrata.tasks.metric import Metric

if TYPE_CHECKING:
    import numpy as np
    from altair import TopLevelMixin as Chart
    from pandas import DataFrame
    from torch import nn

    from fedstrata.tasks.seeded import AnyTask

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

    def clients(self, round: int) -> dict[str, np.ndarray]:
        """What every client was measured to after a round: `client`, `samples`, `loss`, `metric`, `taken_part`."""
        return self.directory.clients(round)

    def worst_tenth(self, round: int) -> float | None:
        """The mean over the tenth of the clients that fared worst after a round, at least one; None, if unknown."""
        if not self.directory.measured_clients(round):
            return None
        values: list[float] = sorted(self.clients(round)["metric"].tolist(), reverse=self.metric.direction == "min")
        worst = values[: max(1, len(values) // 10)]
        return sum(worst) / len(worst)

    def finished(self, history: list[Line] | None = None) -> bool:
        """Whether nothing is left to run."""
        lines = self.history() if history is None else history
        return bool(lines) and self.is_over(lines) and self.directory.last_checkpoint().round == lines[-1]["round"]

    def running(self) -> bool:
        """Whether a process works on it now."""
        return in_use(self.path)

    def state(self, history: list[Line] | None = None) -> str:
        """In a word or two: running, finished or not finished."""
        return "running" if self.running() else "finished" if self.finished(history) else "not finished"

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

    def probes(self) -> list[int]:
        """The rounds that were probed, of which `probe` tells who harmed."""
        return stored_probes(self.directory)

    def probe(self, round: int) -> Probe:
        """What the model would be without each client and layer of a round: as `fedstrata probe` has stored it."""
        return read_probe(self.directory, round)

    def frame(self) -> DataFrame:
        """A pandas DataFrame with a row for each round: what was measured, as `test.accuracy`, and what travelled."""
        rows = []
        for line in self.history():
            measured = {f"{on}.{name}": value for on, found in line["metrics"].items() for name, value in found.items()}
            counts = {"clients": line["clients"], "replies": line["replies"], "attempt": line["attempt"]}
            sums = {name: line[name] for name in ("upload", "download", "upload_total", "seconds")}
            rows.append({"round": line["round"], "train_loss": line["train_loss"], **measured, **counts, **sums})
        return to_pandas("Run.frame()", rows, index="round")

    # --- shown ----------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        try:
            history = self.history()
            done = f"{len(history)}/{self.recipe.training.rounds} rounds"
            values = [f", {self.metric.name} {number(value)}" for _, value in self.curve(history)[-1:]]
            what = f"{self.recipe.name}, {self.recipe.label}, seed {self.recipe.seed}; {done}{''.join(values)}"
        except (FedstrataError, OSError) as error:  # removed or damaged since it was opened
            what = str(error)
        return visible(f"<Run {self.path}: {what}>")

    def _repr_html_(self) -> str:
        try:
            history = self.history()
            summary, metric, target = self.summary(history), self.metric.name, self.recipe.evaluation.target
            rows = [
                ("rounds", f"{summary['rounds']} of {self.recipe.training.rounds}, {self.state(history)}"),
                (metric, f"{number(summary[metric])} (best {number(summary['best'])})"),
                *([(f"rounds to {target:g}", str(summary["rounds_to_target"] or "not reached"))] if target else []),
                ("upload", size(summary["upload"])),
                ("layers", ", ".join(self.layer_names)),
                ("directory", str(self.path)),
            ]
            title = f"{self.recipe.name}: {self.recipe.label}, seed {self.recipe.seed}"
        except (FedstrataError, OSError) as error:
            title, rows = str(self.path), [("", str(error))]
        return Table(title, (), tuple(rows))._repr_html_()

    def plot(self, kind: str = "curves", **options: Any) -> Chart:
        """A picture of the run as an Altair chart: one of `fedstrata.plots.KINDS`, with its options."""
        chart: Chart = plots.draw(kind, self, **options)
        return chart

    # --- its model, for which its recipe is built again ---------------------------------------------------------

    def announce_imports(self) -> None:
        """Say what code the recipe names, which may be somebody else's, before it is imported."""
        for field, name in self.recipe.named_code():
            what = f"{self.path}: its recipe names code that is imported now: {field} = {name}"
            _log.warning("%s", printable(what))

    def model(self, *, client: int | None = None, task: AnyTask | None = None, data: Path | None = None) -> nn.Module:
        """The trained model; of a `client`, with its private layers, or the one that is its own.

        What its recipe names as `module:name` is imported; the log says so before.
        """
        from fedstrata.runs.trained import trained_model

        if task is None:
            self.announce_imports()
        return trained_model(self.directory, task, data, client)

    def export(
        self,
        path: str | Path,
        *,
        client: int | None = None,
        task: AnyTask | None = None,
        data: Path | None = None,
    ) -> None:
        """Write the trained model's whole state dict, for `load_state_dict`, as safetensors; or that of a `client`."""
        from fedstrata.runs.trained import write_model

        if task is None:
            self.announce_imports()
        write_model(self.directory, Path(path), task, data, client)


def to_pandas(purpose: str, rows: Sequence[Mapping[str, Any]], index: str | None = None) -> DataFrame:
    """Rows as a DataFrame; what no row says is missing in it."""
    try:
        import pandas
    except ImportError:
        raise MissingExtra("pandas", "notebook", purpose) from None
    known = [{name: math.nan if value is None else value for name, value in row.items()} for row in rows]
    frame = pandas.DataFrame(known)
    return frame.set_index(index) if index is not None and rows else frame


def _no_function(outputs: Any, targets: Any) -> float:
    raise RuntimeError("a run directory knows a metric's name, not its function")
