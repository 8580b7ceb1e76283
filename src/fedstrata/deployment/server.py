"""The ServerApp: it runs an experiment with the nodes of a deployment, or goes on with one that was interrupted."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedstrata.core.errors import RecipeError, UserError
from fedstrata.core.round import check_cohort
from fedstrata.engines.flower.engine import FlowerEngine
from fedstrata.formatting import number
from fedstrata.recipes.experiment import Experiment, build_experiment
from fedstrata.recipes.schema import load
from fedstrata.runs.formats import Line
from fedstrata.runs.reader import Run
from fedstrata.runs.runner import run_rounds, start_run
from fedstrata.tasks.nodes import RemoteData

_log = logging.getLogger("fedstrata")

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run an experiment, or go on with one that was interrupted (docs/flower.md has the keys of the run config)."""
    logging.basicConfig(format="%(message)s")
    _log.setLevel(logging.INFO)
    for line in serve(grid, context.run_config):
        metrics = "".join(f", {on} loss {number(values['loss'])}" for on, values in line["metrics"].items())
        lost = "".join(f"; client {who['client']}: {who['why']}" for who in (*line["lost"], *line["unmeasured"]))
        _log.info("round %d, %d of %d replies%s%s", line["round"], line["replies"], line["clients"], metrics, lost)


def serve(grid: Grid, config: Mapping[str, Any]) -> Iterator[Line]:
    """The rounds of the run in `out`, which is made if it is not there."""
    out = Path(_text(config, "out"))
    if not out.is_absolute():
        raise RecipeError("out", str(out), "must be an absolute path on the server")
    data = Path(str(config["data"])) if config.get("data") else None
    old = Run(out) if (out / "run.json").exists() else None
    if old is not None:
        old.announce_imports()
        old.directory.require_resumable()
        experiment = build_experiment(old.recipe, data=data)
    else:
        experiment = build_experiment(load(_text(config, "recipe"), settings={"engine.name": "flower"}), data=data)
    clients = int(config.get("clients") or len(experiment.task.clients))
    setup, timeout = experiment.setup, experiment.recipe.engine.timeout
    engine = FlowerEngine(grid, setup, experiment.agreement, clients, timeout=timeout, poll=0.2)
    engine.wait_for(int(config.get("min-clients") or clients), float(config.get("wait") or 600))
    experiment = _with_remote_data(experiment, engine)
    if old is None:
        experiment.warn()
    yield from run_rounds(old or start_run(experiment, out), experiment, engine)


def _with_remote_data(experiment: Experiment, engine: FlowerEngine) -> Experiment:
    """The server's task, with the clients' data where it is, once the algorithm is known to suit these clients."""
    held_out = RemoteData(engine.held_out_sizes) if engine.held_out_sizes.any() else None
    notes = dict(experiment.task.notes)
    if not np.array_equal(engine.sizes, experiment.task.sizes()):
        notes.pop("table", None)  # the recipe's partition, which is not what these nodes have
    task = replace(experiment.task, clients=RemoteData(engine.sizes), held_out=held_out, notes=notes)
    cohort = experiment.recipe.training.participation.cohort_size(int((engine.sizes > 0).sum()))
    check_cohort(experiment.algorithm, cohort)
    return replace(experiment, task=task)


def _text(config: Mapping[str, Any], key: str) -> str:
    value = config.get(key)
    if not isinstance(value, str) or not value:
        raise UserError(f"the run config's {key} = {value!r}: must be a path or a name")
    return value
