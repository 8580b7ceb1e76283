"""Running an experiment: consumes `fit()`, evaluates, and keeps the run directory.

run = fedstrata.run("quickstart", algorithm="fedldf", settings={"training.rounds": 5})
print(run.summary(), run.layers(5)["divergence"])
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Unpack

from fedstrata.clients import evaluation
from fedstrata.clients.evaluation import NEWCOMERS
from fedstrata.core.axes import Algorithm
from fedstrata.core.errors import RecipeError, RunDirectoryError, printable
from fedstrata.core.fit import Engine, RemembersElsewhere, fit
from fedstrata.core.layers import Layers
from fedstrata.core.record import RoundFailed, RoundRecord
from fedstrata.core.state import ServerState
from fedstrata.core.status import Status
from fedstrata.recipes.experiment import Experiment, build_experiment
from fedstrata.recipes.schema import Recipe
from fedstrata.recipes.settings import Settings, What, resolved, task_without_recipe, with_task
from fedstrata.recipes.tables import parse_setting, set_key
from fedstrata.runs.engine import open_engine
from fedstrata.runs.formats import Line
from fedstrata.runs.progress import progress
from fedstrata.runs.reader import Run
from fedstrata.runs.writer import last_state, make_directory, open_for_writing
from fedstrata.tasks.config import PYTHON_TASK
from fedstrata.tasks.seeded import AnyTask, SeededTask

CHANGEABLE_ON_RESUME = (
    "training.rounds",
    "evaluation.target",
    "evaluation.stop_at_target",
    "engine.workers",
    "engine.timeout",
    "engine.lost_memory",
    "record.keep_checkpoints",
)
"""What may be different when a run goes on: nothing that would change the rounds already run."""

_log = logging.getLogger("fedstrata")


def create_run(
    recipe: Recipe, out: str | Path | None = None, *, task: AnyTask | None = None, data: Path | None = None
) -> tuple[Run, Experiment]:
    """Check everything, and make the run directory."""
    if isinstance(task, SeededTask):
        recipe = recipe.model_copy(update={"task": task.config})
    elif task is not None:
        recipe = recipe.model_copy(update={"task": recipe.task.model_copy(update={"function": PYTHON_TASK})})
    experiment = build_experiment(recipe, task, data)
    experiment.require_data()
    experiment.warn()
    return start_run(experiment, out), experiment


def start_run(experiment: Experiment, out: str | Path | None = None) -> Run:
    """Make the run directory of an experiment."""
    created = datetime.now().astimezone().isoformat(timespec="seconds")
    about, state = {"created": created, **experiment.described()}, experiment.first_state()
    while True:
        path = Path(out) if out is not None else default_directory(experiment.recipe)
        try:
            make_directory(path, experiment.recipe, about, state)
        except RunDirectoryError:
            if out is not None or not path.exists():
                raise  # else another process took the name a moment ago
        else:
            return Run(path)


def run_rounds(
    run: Run,
    experiment: Experiment | None = None,
    engine: Engine | None = None,
    *,
    strict: bool = False,
    **sources: Any,
) -> Generator[Line, None, None]:
    """Run what is left of a run and yield each round's history line when it is stored.

    Its `experiment` is built from `sources`, a task or where data is, if it is not given. An `engine` that is given
    already runs; otherwise the experiment's own is started, and stopped at the end. Going on with another torch, NumPy
    or CPU is said and recorded; if `strict`, it is refused.
    """
    run.directory.require_resumable(strict)
    with ExitStack() as stack:
        writer = stack.enter_context(open_for_writing(run.path))
        if experiment is None:
            experiment = build_experiment(run.recipe, **sources)
        whole = last_state(writer, experiment.layers)  # the last state whose line is in the history
        past = writer.rewind(whole.round)
        if run.is_over(past):
            return
        if changes := writer.note_environment():
            what = f"{run.path} goes on with {', '.join(changes)}: from round {whole.round + 1} on bits may differ"
            _log.warning("%s", printable(what))
        run.directory.reread()
        upload = past[-1]["upload_total"] if past else 0
        after, stored = whole, whole.round  # the newest state, and the last checkpoint
        if engine is None:
            engine = stack.enter_context(open_engine(experiment, run.path.absolute() / "nodes"))
        if isinstance(engine, RemembersElsewhere):
            engine.run, engine.afresh = str(run.directory.id), experiment.recipe.engine.lost_memory == "afresh"
        settings = experiment.recipe.record
        if (versions := getattr(engine, "versions", None)) is not None:
            writer.load_memory(whole, versions)
        try:
            for after, record in evaluated_rounds(whole, experiment, engine):
                upload += record.ledger.upload
                if settings.layers:
                    writer.store_layers(record)
                if record.each:
                    writer.store_clients(record.round, record.each)
                line = writer.append_history(_line(record, experiment.layers, upload))
                whole = after
                over = run.is_over([line])
                if over or record.round % settings.checkpoint_every == 0:
                    writer.store_checkpoint(whole, versions)
                    stored = whole.round
                yield line
                if over:
                    return
        except RoundFailed as failed:
            writer.append_failure(_line(failed.record, experiment.layers, upload))
            raise
        finally:  # Ctrl-C loses no whole round: neither between two checkpoints nor once its line is written
            if after.round > whole.round and len(writer.history()) == after.round:
                whole = after
            if whole.round > stored:
                writer.store_checkpoint(whole, versions)


def evaluated_rounds(
    state: ServerState, experiment: Experiment, engine: Engine
) -> Iterator[tuple[ServerState, RoundRecord]]:
    """The rounds that are left, evaluated as the recipe says."""
    recipe, config = experiment.recipe, experiment.recipe.evaluation
    for after, record in fit(state, experiment.algorithm, engine, experiment.plan):
        if record.round % config.every == 0 or record.round == recipe.training.rounds:
            started = time.perf_counter()
            metrics, unmeasured, each = evaluation.evaluate(
                engine,
                experiment.task,
                after.model,
                config.on,
                record.round,
                recipe.seed,
                config.clients,
                record.attempt,
                after.memory,
                config.fine_tune or 0,
                config.private if experiment.layers.private else None,
            )
            seconds = record.seconds + time.perf_counter() - started
            record = replace(record, metrics=metrics, unmeasured=tuple(unmeasured), each=each, seconds=seconds)
        yield after, record


def run(
    what: What = "quickstart",
    algorithm: str | Mapping[str, Any] | Algorithm | None = None,
    *,
    task: AnyTask | None = None,
    settings: Iterable[str] | Mapping[str, Any] = (),
    seed: int | None = None,
    out: str | Path | None = None,
    data: str | Path | None = None,
    on_round: Callable[[Line], None] | None = None,
    **more: Unpack[Settings],
) -> Run:
    """Run an experiment to its end, with a directory that can be resumed, and return the `Run`.

    `what`: a task, or a recipe by name, path, table or as a `Recipe`; `task` replaces a recipe's own. `algorithm`: an
    `Algorithm`, or its name with options ("fedldf:n=4"). `out`: the directory to make, below `runs/` if not given.
    `data`: where data sets are. `on_round` is called with every round's history line. All else is a setting by its name
    (`rounds=20, lr=0.1`), or by its place in a recipe (`settings={"evaluation.clients": 5}`).

    >>> run = fedstrata.run("quickstart", fedstrata.fedlayerwise(), rounds=5)  # doctest: +SKIP
    """
    if task is not None:
        what, task = with_task(what, task), task_without_recipe(task)
    recipe, given = resolved(what, algorithm, more, as_changes(settings), seed)
    where = Path(data) if data is not None else None
    new, experiment = create_run(recipe, out, task=given if task is None else task, data=where)
    _follow(new, run_rounds(new, experiment), on_round)
    return new


def _follow(run: Run, lines: Iterable[Line], on_round: Callable[[Line], None] | None) -> None:
    with progress([run.recipe.training.rounds]) as bar:
        bar.begins(0, f"{run.recipe.label}, seed {run.recipe.seed}")
        for line in lines:
            bar.reaches(line)
            if on_round is not None:
                on_round(line)


def resume(
    path: str | Path,
    *,
    settings: Iterable[str] | Mapping[str, Any] = (),
    task: AnyTask | None = None,
    data: str | Path | None = None,
    strict: bool = False,
    on_round: Callable[[Line], None] | None = None,
) -> Run:
    """Continue a run that was stopped, or extend a finished one: `resume(path, settings={"training.rounds": 100})`.

    With another torch, NumPy or CPU than before, the log says so and `run.json` records it; if `strict`, it is refused.
    """
    old = reopen(path, settings, strict)
    where = Path(data) if data is not None else None
    _follow(old, run_rounds(old, strict=strict, task=task, data=where), on_round)
    return old


def reopen(path: str | Path, settings: Iterable[str] | Mapping[str, Any] = (), strict: bool = False) -> Run:
    """Open a run for continuing it, with the few settings that may change. The log says what it will import."""
    old = Run(path)
    old.directory.require_resumable(strict)
    old.announce_imports()
    changes = as_changes(settings)
    if not changes:
        return old
    with open_for_writing(old.path) as writer:
        table = writer.recipe.to_table()  # another process may have extended it a moment ago
        for key, value in changes.items():
            if key not in CHANGEABLE_ON_RESUME:
                allowed = ", ".join(CHANGEABLE_ON_RESUME)
                raise RecipeError(key, value, f"cannot change when a run is resumed; only {allowed} can")
            set_key(table, key, value)
        changed = Recipe.parse(table)
        done = writer.last_checkpoint().round
        if changed.training.rounds < done:
            raise RecipeError("training.rounds", changed.training.rounds, f"{done} rounds are already done")
        writer.rewrite_recipe(changed)
    old.directory.reread()
    return old


def as_changes(settings: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted keys, also from texts like `training.rounds=5`."""
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


def _line(record: RoundRecord, layers: Layers, upload_total: int) -> dict[str, Any]:
    """A round as its history line is stored."""
    ledger, metrics = record.ledger, record.metrics
    logged = {name: _finite(record.mean(told)) for name, told in record.logged.items()}
    measured = sum(metrics.get(place, {}).get("clients", 0.0) for place in ("clients", NEWCOMERS))
    evaluated = measured + len(record.unmeasured)
    return {
        "round": record.round,
        "attempt": record.attempt,
        "clients": len(record.clients),
        "replies": record.replies,
        "lost": [_told(client, why) for client, why in record.lost],
        "earlier": [{"attempt": attempt, **_told(client, why)} for attempt, client, why in record.earlier],
        "train_loss": _finite(record.train_loss),
        **({"logged": logged} if logged else {}),
        "metrics": {name: {key: _finite(value) for key, value in values.items()} for name, values in metrics.items()},
        "unmeasured": [_told(client, why) for client, why in record.unmeasured],
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
        "seconds": round(record.seconds, 4),
    }


def _told(client: int, why: Status) -> dict[str, Any]:
    return {"client": client, "kind": why.kind, "reason": why.reason}


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
