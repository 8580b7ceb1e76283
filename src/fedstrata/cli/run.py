"""`fedstrata run`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fedstrata.cli.options import Algorithm, Data, Engine, Seed, Settings, Workers
from fedstrata.cli.tables import LiveTable
from fedstrata.cli.terminal import Console
from fedstrata.core.errors import DiskFull, FedstrataError, UserError
from fedstrata.formatting import number, size

if TYPE_CHECKING:
    from fedstrata.runs.reader import Run


def run_command(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE|NAME]", help="A .toml file, or a name from `fedstrata list`.")
    ] = None,
    algorithm: Algorithm = None,
    settings: Settings = None,
    seed: Seed = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="The run directory to make.")] = None,
    data: Data = None,
    engine: Engine = None,
    workers: Workers = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="DIR", help="Continue a run that was stopped, or extend one.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="With --resume: refuse another torch, NumPy or CPU than before.")
    ] = False,
) -> None:
    """Train, and keep everything that happened in a run directory.

    Examples:

    fedstrata run quickstart

    fedstrata run quickstart --algorithm fedldf:n=4 --set training.rounds=50 --seed 1

    fedstrata run quickstart --set algorithm.objective.name=fedlap --set algorithm.weighting.name=fedlayerwise

    fedstrata run quickstart --engine flower

    fedstrata run fedadp-mnist-5iid-5x1 --data DIR

    fedstrata run --resume runs/... --set training.rounds=100

    Ctrl-C stops after storing all whole rounds; --resume goes on and ends with exactly the same result.

    With another torch, NumPy or CPU the last bits may differ: this is said and recorded, and with --strict refused.
    """
    from fedstrata.recipes.schema import load
    from fedstrata.runs.runner import create_run, reopen

    changes = [*(settings or []), *([f"engine.workers={workers}"] if workers is not None else [])]
    changes += [f"engine.name={engine}"] if engine is not None else []
    console = Console()
    if resume is not None:
        for name, value in (
            ("RECIPE", recipe),
            ("--algorithm", algorithm),
            ("--seed", seed),
            ("--out", out),
            ("--engine", engine),
        ):
            if value is not None:
                raise UserError(f"{name} = {str(value)!r}: does not go with --resume, which keeps the run's own recipe")
        old = reopen(resume, changes, strict)
        follow(console, old, strict=strict, data=data)
        return
    if strict:
        raise UserError("--strict: goes with --resume only")
    if recipe is None:
        raise UserError("RECIPE is missing: a .toml file or a name from `fedstrata list`, or --resume DIR")
    new, experiment = create_run(load(recipe, algorithm=algorithm, settings=changes, seed=seed), out, data=data)
    follow(console, new, experiment=experiment)


def follow(console: Console, run: Run, **options: Any) -> None:
    """Run what is left, with a live table, and say at the end what came out and where it is."""
    from fedstrata.runs.runner import run_rounds

    recipe = run.recipe
    title = f"{recipe.name}: {recipe.label}, seed {recipe.seed}"
    table = LiveTable(console, title, run.metric.name, recipe.evaluation.on[0], recipe.training.rounds)
    try:
        with table:
            for line in run_rounds(run, **options):
                table.add(line)
    except KeyboardInterrupt:
        history = run.history()
        done = history[-1]["round"] if history else 0
        console.print(f"stopped after round {done}; go on with: fedstrata run --resume {run.path}", soft_wrap=True)
        raise typer.Exit(130) from None
    except DiskFull:
        console.print(f"when there is room, go on with: fedstrata run --resume {run.path}", soft_wrap=True)
        raise
    except FedstrataError:
        console.print(f"run directory, with what was done: {run.path}", soft_wrap=True)
        raise
    console.print(summary_table(run))
    console.print(f"SHA-256 of the weights: {run.summary()['weights_sha256']}", soft_wrap=True)
    console.print(f"run directory: {run.path}", soft_wrap=True)


def summary_table(run: Run) -> Table:
    """A run in a few lines."""
    summary, metric, target = run.summary(), run.metric.name, run.recipe.evaluation.target
    table = Table(show_header=False)
    table.add_row("rounds", str(summary["rounds"]))
    measured = summary["measured_in_round"]
    when = "" if measured in (None, summary["rounds"]) else f" in round {measured}"
    table.add_row(metric, f"{number(summary[metric])}{when} (best {number(summary['best'])})")
    if measured is not None and (worst := run.worst_tenth(measured)) is not None:
        table.add_row("worst tenth", f"{number(worst)} (mean over the clients that fare worst)")
    if target is not None:
        reached = summary["rounds_to_target"]
        table.add_row(f"rounds to {target:g}", str(reached) if reached else f"not reached in {summary['rounds']}")
    table.add_row("upload", size(summary["upload"]))
    return table
