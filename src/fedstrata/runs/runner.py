"""Running an experiment: consumes `fit()`, evaluates, and keeps the run directory.

run = fedstrata.run("quickstart", algorithm="fedldf", settings={"training.rounds": 5})
print(run.summary(), run.figures(5)["divergence"])

Whoever only looks at runs does not wait for torch: what computes is imported by the methods that compute.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.algorithms import to_table
from fedstrata.core.axes import Algorithm
from fedstrata.core.errors import RecipeError, RunDirectoryError, printable
from fedstrata.recipes.schema import Recipe, as_table, load, parse_setting, set_key
from fedstrata.runs.directory import RunDirectory
from fedstrata.runs.files import write_whole
from fedstrata.tasks.config import PYTHON_TASK
from fedstrata.tasks.metric import Metric

if TYPE_CHECKING:
    from torch import nn

    from fedstrata.clients.evaluation import Figures, Unmeasured
    from fedstrata.core.layers import Layers
    from fedstrata.core.rounds import Engine, RoundRecord
    from fedstrata.recipes.experiment import Experiment
    from fedstrata.tasks.task import Task

CHANGEABLE_ON_RESUME = (
    "training.rounds",
    "evaluation.target",
    "evaluation.stop_at_target",
    "engine.workers",
    "engine.timeout",
)
"""What may be different when a run goes on: nothing that would change the rounds already run."""

_log = logging.getLogger("fedstrata")

Line = dict[str, Any]
"""A line of the history."""


class Run:
    """A run and its directory: start it, continue it, look at it."""

    def __init__(self, path: str | Path) -> None:
        """Open a run that exists."""
        self.directory = RunDirectory(Path(path))

    # --- starting -----------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        recipe: Recipe,
        out: str | Path | None = None,
        *,
        task: Task | None = None,
        data: Path | None = None,
    ) -> tuple[Run, Experiment]:
        """Check everything, and make the run directory."""
        from fedstrata.recipes.experiment import build_experiment

        if task is not None:
            recipe = recipe.model_copy(update={"task": recipe.task.model_copy(update={"function": PYTHON_TASK})})
        experiment = build_experiment(recipe, task, data)
        experiment.require_data()
        experiment.warn()
        return cls.start(experiment, out), experiment

    @classmethod
    def start(cls, experiment: Experiment, out: str | Path | None = None) -> Run:
        """Make the run directory of an experiment."""
        created = datetime.now().astimezone().isoformat(timespec="seconds")
        about, state = {"created": created, **experiment.described()}, experiment.first_state()
        while True:
            path = Path(out) if out is not None else default_directory(experiment.recipe)
            try:
                RunDirectory.create(path, experiment.recipe, about, state)
            except RunDirectoryError:
                if out is not None or not path.exists():
                    raise  # else another process took the name a moment ago
            else:
                return cls(path)

    def build_experiment(self, **sources: Any) -> Experiment:
        """Load what the run needs to go on."""
        from fedstrata.recipes.experiment import build_experiment

        self.directory.require_resumable()
        return build_experiment(self.recipe, **sources)

    def rounds(
        self,
        experiment: Experiment | None = None,
        engine: Engine | None = None,
        *,
        strict: bool = False,
        **sources: Any,
    ) -> Generator[Line, None, None]:
        """Run what is left of the experiment and yield each round's history line when it is stored.

        An `engine` that is given already runs; otherwise the experiment's own is started, and stopped at the end.
        Going on with another torch, NumPy or CPU is said and recorded; if `strict`, it is refused.
        """
        from fedstrata.clients.evaluation import evaluate
        from fedstrata.core.rounds import fit
        from fedstrata.engines import open_engine

        directory = self.directory
        directory.require_resumable(strict)
        with ExitStack() as stack:
            stack.enter_context(directory.locked())
            if experiment is None:
                experiment = self.build_experiment(**sources)
            whole = directory.latest(experiment.layers)  # the last state whose line is in the history
            directory.rewind(whole.round)
            past = directory.history()
            if self._is_over(past, whole.round):
                return
            if changes := directory.note_environment():
                what = f"{self.path} goes on with {', '.join(changes)}: from round {whole.round + 1} on bits may differ"
                _log.warning("%s", printable(what))
            upload = past[-1]["upload_total"] if past else 0
            after, stored = whole, whole.round  # the newest state, and the last checkpoint
            engine = stack.enter_context(open_engine(experiment) if engine is None else nullcontext(engine))
            config, settings = experiment.recipe.evaluation, experiment.recipe.record
            rounds = experiment.recipe.training.rounds
            try:
                for after, record in fit(whole, experiment.algorithm, engine, experiment.plan):
                    started = time.perf_counter()
                    figures: Figures = {}
                    unmeasured: Unmeasured = []
                    if record.round % config.every == 0 or record.round == rounds:
                        figures, unmeasured = evaluate(
                            engine,
                            experiment.task,
                            after.model,
                            config.on,
                            record.round,
                            experiment.recipe.seed,
                            config.clients,
                            record.attempt,
                        )
                    upload += record.ledger.upload
                    seconds = record.seconds + time.perf_counter() - started
                    line = _line(record, experiment.layers, figures, unmeasured, upload, seconds)
                    if settings.layers:
                        directory.store_figures(record)
                    directory.append_history(line)
                    whole = after
                    over = self._is_over([line], record.round)
                    if over or record.round % settings.checkpoint_every == 0:
                        directory.store_checkpoint(whole)
                        stored = whole.round
                    yield line
                    if over:
                        return
            finally:  # Ctrl-C loses no whole round: neither between two checkpoints nor once its line is written
                if after.round > whole.round and len(directory.history()) == after.round:
                    whole = after
                if whole.round > stored:
                    directory.store_checkpoint(whole)

    def _is_over(self, history: list[Line], round: int) -> bool:
        recipe = self.directory.recipe
        if round >= recipe.training.rounds:
            return True
        return recipe.evaluation.stop_at_target and self.rounds_to_target(history) is not None

    # --- looking ------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.directory.path

    @property
    def recipe(self) -> Recipe:
        """Its recipe."""
        return self.directory.recipe

    @property
    def layer_names(self) -> list[str]:
        """Its layers."""
        return [layer["name"] for layer in self.directory.info["layers"]]

    @property
    def metric(self) -> Metric:
        """What is measured (by name and direction; the function is the task's)."""
        metric = self.directory.info["metric"]
        return Metric(metric["name"], _no_function, metric["direction"])

    def history(self) -> list[Line]:
        """One line per whole round."""
        return self.directory.history()

    def figures(self, round: int) -> dict[str, Any]:
        """The per-layer figures of a round, by name."""
        return self.directory.figures(round)

    def finished(self) -> bool:
        """Whether nothing is left to run."""
        history = self.history()
        return bool(history) and self._is_over(history, history[-1]["round"]) and self._checkpointed(history)

    def _checkpointed(self, history: list[Line]) -> bool:
        return bool(self.directory.last_checkpoint().round == history[-1]["round"])

    def curve(self, history: list[Line] | None = None) -> list[tuple[int, float]]:
        """The metric over rounds, on the set that decides."""
        decisive = self.recipe.evaluation.on[0]
        lines = self.history() if history is None else history
        name = self.metric.name
        measured = [(line["round"], line["metrics"][decisive][name]) for line in lines if decisive in line["metrics"]]
        return [(round, math.nan if value is None else value) for round, value in measured]  # null: was not finite

    def rounds_to_target(self, history: list[Line] | None = None) -> int | None:
        """The first round that reached the target; None if none did (or there is no target)."""
        target = self.recipe.evaluation.target
        if target is None:
            return None
        return next((round for round, value in self.curve(history) if self.metric.reached(value, target)), None)

    def summary(self) -> dict[str, Any]:
        """The run in a few figures."""
        history, metric = self.history(), self.metric
        curve = self.curve(history)
        values = [value for _, value in curve]
        finite = [value for value in values if math.isfinite(value)]
        reached = self.rounds_to_target(history)
        to_target = next((line["upload_total"] for line in history if line["round"] == reached), None)
        return {
            "algorithm": self.recipe.label,
            "seed": self.recipe.seed,
            "rounds": history[-1]["round"] if history else 0,
            metric.name: values[-1] if values else None,
            "measured_in_round": curve[-1][0] if curve else None,
            "best": (max if metric.direction == "max" else min)(finite) if finite else None,
            "rounds_to_target": reached,
            "upload": history[-1]["upload_total"] if history else 0,
            "upload_to_target": to_target,
            "weights_sha256": self.directory.last_checkpoint().weights_sha256,
        }

    def announce_imports(self) -> None:
        """Say what code the recipe names, which may be somebody else's, before it is imported."""
        for field, name in self.recipe.named_code():
            what = f"{self.path}: its recipe names code that is imported now: {field} = {name}"
            _log.warning("%s", printable(what))

    def model(self, *, task: Task | None = None, data: Path | None = None) -> nn.Module:
        """The trained model. What its recipe names as `module:name` is imported; the log says so before."""
        from fedstrata.clients.modules import is_whole
        from fedstrata.recipes.experiment import build_experiment

        if task is None:
            self.announce_imports()
        experiment = build_experiment(self.recipe, task, data)
        model = experiment.build()
        experiment.layers.load(model, self.directory.latest(experiment.layers).model)
        for tensor in (*model.parameters(), *model.buffers()):
            if is_whole(tensor):  # and not a part of another
                tensor.data = tensor.data.contiguous()  # as files and `view` want it
        return model.eval()

    def export(self, path: str | Path, *, task: Task | None = None, data: Path | None = None) -> None:
        """Write the trained model's whole state dict, for `load_state_dict`, as safetensors."""
        from safetensors.torch import save
        from torch import Tensor

        target = Path(path)
        if target.exists():
            raise RunDirectoryError(f"{target} exists; it is not overwritten")
        target.parent.mkdir(parents=True, exist_ok=True)
        state = self.model(task=task, data=data).state_dict()
        tensors = {name: tensor.clone() for name, tensor in state.items() if isinstance(tensor, Tensor)}
        metadata = {"experiment": self.recipe.name, "algorithm": self.recipe.label}
        write_whole(target, save(tensors, metadata))


def _no_function(outputs: Any, targets: Any) -> float:
    raise RuntimeError("a run directory knows a metric's name, not its function")


def run(
    recipe: str | Path | Mapping[str, Any] | Recipe = "quickstart",
    *,
    task: Task | None = None,
    algorithm: str | Mapping[str, Any] | Algorithm | None = None,
    settings: Iterable[str] | Mapping[str, Any] = (),
    seed: int | None = None,
    out: str | Path | None = None,
    data: str | Path | None = None,
    on_round: Callable[[Line], None] | None = None,
) -> Run:
    """Run a recipe to its end, by name, path, table or as a Recipe, or your own Task, and return the Run."""
    table = recipe.to_table() if isinstance(recipe, Recipe) else as_table(recipe)
    if isinstance(algorithm, Algorithm):
        if not table.get("layers"):  # the recipe's own grouping comes first
            settings = {"layers.grouping": algorithm.grouping, **_as_mapping(settings)}
        algorithm = to_table(algorithm)
    if task is not None:
        settings = {"task.function": PYTHON_TASK, **_as_mapping(settings)}
    recipe = load(table, algorithm=algorithm, settings=settings, seed=seed)
    new, experiment = Run.create(recipe, out, task=task, data=Path(data) if data is not None else None)
    for line in new.rounds(experiment):
        if on_round is not None:
            on_round(line)
    return new


def resume(
    path: str | Path,
    *,
    settings: Iterable[str] | Mapping[str, Any] = (),
    task: Task | None = None,
    data: str | Path | None = None,
    strict: bool = False,
    on_round: Callable[[Line], None] | None = None,
) -> Run:
    """Continue a run that was stopped, or extend a finished one: `resume(path, settings={"training.rounds": 100})`.

    With another torch, NumPy or CPU than before, the log says so and `run.json` records it; if `strict`, it is refused.
    """
    old = reopen(path, settings, strict)
    for line in old.rounds(strict=strict, task=task, data=Path(data) if data is not None else None):
        if on_round is not None:
            on_round(line)
    return old


def reopen(path: str | Path, settings: Iterable[str] | Mapping[str, Any] = (), strict: bool = False) -> Run:
    """Open a run for continuing it, with the few settings that may change. The log says what it will import."""
    old = Run(path)
    old.directory.require_resumable(strict)
    old.announce_imports()
    changes = _as_mapping(settings)
    if not changes:
        return old
    with old.directory.locked():
        old.directory.reread()  # another process may have extended it a moment ago
        table = old.recipe.to_table()
        for key, value in changes.items():
            if key not in CHANGEABLE_ON_RESUME:
                allowed = ", ".join(CHANGEABLE_ON_RESUME)
                raise RecipeError(key, value, f"cannot change when a run is resumed; only {allowed} can")
            set_key(table, key, value)
        changed = Recipe.parse(table)
        done = old.directory.last_checkpoint().round
        if changed.training.rounds < done:
            raise RecipeError("training.rounds", changed.training.rounds, f"{done} rounds are already done")
        old.directory.rewrite_recipe(changed)
    return old


def _as_mapping(settings: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    return dict(settings.items() if isinstance(settings, Mapping) else map(parse_setting, settings))


def default_directory(recipe: Recipe) -> Path:
    """`runs/<recipe>-<algorithm>-s<seed>-<time>`, with a number behind it if that is taken."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"{recipe.name}-{recipe.label}-s{recipe.seed}-{stamp}"
    base = Path("runs") / name
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{name}-{number}")
    return path


def _line(
    record: RoundRecord,
    layers: Layers,
    figures: Figures,
    unmeasured: Unmeasured,
    upload_total: int,
    seconds: float,
) -> Line:
    """A round as its history line."""
    ledger = record.ledger
    evaluated = figures.get("clients", {}).get("clients", 0.0) + len(unmeasured)
    return {
        "round": record.round,
        "attempt": record.attempt,
        "clients": len(record.clients),
        "replies": sum(status.startswith("ok") for status in record.status),
        "lost": [{"client": client, "why": why} for client, why in record.lost],
        "earlier": [{"attempt": attempt, "client": client, "why": why} for attempt, client, why in record.earlier],
        "train_loss": _finite(record.train_loss),
        "metrics": {name: {key: _finite(value) for key, value in values.items()} for name, values in figures.items()},
        "unmeasured": [{"client": client, "why": why} for client, why in unmeasured],
        "bytes": {
            "up": ledger.up.tolist(),
            "down": ledger.down.tolist(),
            "feedback": ledger.feedback,
            "feedback_numbers": ledger.feedback_numbers,
            "control": ledger.control,
            "evaluation": int(evaluated) * layers.numel * layers.itemsize,
        },
        "upload": ledger.upload,
        "download": ledger.download,
        "upload_total": upload_total,
        "seconds": round(seconds, 4),
    }


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
