"""`fedstrata list`, `show`, `export` and `partition`: looking without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from fedstrata.cli.compare import show_comparison
from fedstrata.cli.options import Data, Seed, Settings
from fedstrata.cli.probe import print_probe
from fedstrata.cli.run import summary_table
from fedstrata.cli.tables import partition_table
from fedstrata.cli.terminal import Console, say
from fedstrata.core.errors import FedstrataError, RunDirectoryError, UserError
from fedstrata.formatting import number, size

if TYPE_CHECKING:
    import numpy as np

    from fedstrata.runs.formats import Line, Lost
    from fedstrata.runs.reader import Run

RunDir = Annotated[Path, typer.Argument(metavar="DIR", help="A run directory, as `fedstrata list runs` shows them.")]


def show_command(directory: RunDir) -> None:
    """Show a run: its outcome, what happened in each layer, where its bytes went, and who held which classes.

    Of a comparison's directory, show the tables that `fedstrata compare` ended with.

    Examples:

    fedstrata show runs/example

    fedstrata show runs/compare-quickstart-...
    """
    from fedstrata.runs.reader import Run

    console = Console()
    if (directory / "compare.json").exists():
        show_comparison(console, directory)
        return
    run = Run(directory)
    history = run.history()
    recipe = run.recipe
    console.print(f"{recipe.name}: {recipe.label}, seed {recipe.seed}", style="bold")
    failures = run.failures()
    _print_lost(
        console, "lost replies in rounds that failed", [(one["round"], who) for one in failures for who in one["lost"]]
    )
    if history:
        console.print(summary_table(run))
    else:
        console.print("no round is done yet")
    if run.running():
        console.print("running: this is what it has done so far")
    elif not run.finished(history):
        console.print(f"not finished; {_how_to_go_on(run)}", soft_wrap=True)
    if not history:
        return
    for first, changes in run.directory.changes(done=history[-1]["round"]):
        console.print(f"from round {first} on with {', '.join(changes)}: bits may differ", soft_wrap=True)
    _print_findings(console, run, history)
    console.print(_layer_table(run, history))
    _print_probes(console, run)
    lost = [(line["round"], who) for line in history for who in line["lost"]]
    unmeasured = [(line["round"], who) for line in history for who in line["unmeasured"]]
    _print_lost(console, "lost replies", lost)
    _print_lost(console, "evaluations that failed", unmeasured)
    data = run.about.data
    if data.table is not None:
        console.print(partition_table(data.table, data.class_names, 12, data.client_names))
    if data.source is not None:
        console.print(f"data: {data.dataset} ({data.source})")


def _print_lost(console: Console, title: str, lost: Sequence[tuple[int, Lost]]) -> None:
    if lost:
        table = Table("round", "client", "why", title=f"{len(lost)} {title}")
        for number, who in lost[-10:]:
            table.add_row(str(number), str(who["client"]), who["why"])
        console.print(table)


def _print_findings(console: Console, run: Run, history: list[Line]) -> None:
    """What stands out, the most of each kind first."""
    try:
        findings = run.findings(history)
    except (FedstrataError, OSError) as error:  # a record of an earlier round, which nothing else here needs
        console.print(f"what stands out is not known: {error}", soft_wrap=True)
        return
    if findings:
        console.print("what stands out", style="bold")
    for kind, some in groupby(findings, key=lambda finding: finding.kind):
        told = list(some)
        for finding in told[:_MOST_TOLD]:
            console.print(f"  {finding.sentence}", style="yellow" if kind == "client_suspect" else None, soft_wrap=True)
        if len(told) > _MOST_TOLD:
            console.print(f"  and {len(told) - _MOST_TOLD} more ({kind})")


def _print_probes(console: Console, run: Run) -> None:
    """Who harmed in the last of the rounds that were probed."""
    try:
        rounds = run.probes()
        if not rounds:
            return
        last = run.probe(rounds[-1])
    except (FedstrataError, OSError) as error:
        console.print(f"who harmed is not known: {error}", soft_wrap=True)
        return
    print_probe(console, last)
    if len(rounds) > 1:
        console.print(f"also probed: {', '.join(map(str, rounds[:-1]))}", soft_wrap=True)


_MOST_TOLD = 5
"""Findings of a kind."""


def _how_to_go_on(run: Run) -> str:
    try:
        run.directory.require_resumable()
    except RunDirectoryError as error:
        return str(error)
    return f"go on with: fedstrata run --resume {run.path}"


def _layer_table(run: Run, history: Sequence[Line]) -> Table:
    """Each layer in the last round: medians over clients, and what was uploaded of it so far."""
    import numpy as np

    last = history[-1]["round"]
    record = run.layers(last) if run.recipe.record.layers else None
    uploaded = np.sum([line["bytes"]["up"] for line in history], axis=0)
    columns: dict[str, list[str]] = {}
    for at, layer in enumerate(run.about.layers):
        texts = {"numbers": f"{layer.numbers:,}"}
        if record is not None:
            with np.errstate(all="ignore"):  # whatever a file may hold
                texts |= _layer_texts({name: values[:, at] for name, values in record.items() if values.ndim == 2})
        texts["uploaded"] = size(float(uploaded[at]))
        for name, text in texts.items():
            columns.setdefault(name, []).append(text)
    if set(columns.get("μ", ())) <= {"0", "–"}:  # no spring: nothing to see
        columns.pop("μ", None)
    table = Table(title=f"layers in round {last} (medians over clients)")
    table.add_column("layer", overflow="fold", min_width=8)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for name, *row in zip(run.layer_names, *columns.values(), strict=True):
        table.add_row(name, *row)
    return table


def _layer_texts(of_clients: Mapping[str, np.ndarray]) -> dict[str, str]:
    import numpy as np

    weights = of_clients["weight"][of_clients["weight"] > 0]
    return {
        "angle": _median(np.degrees(of_clients["angle"]), "{:.0f}°"),
        "drift": _median(of_clients["divergence"], "{:.3g}"),
        "of norm": _median(of_clients["divergence"] / of_clients["norm"], "{:.1%}"),
        "weights": f"{weights.min():.2f}–{weights.max():.2f}" if len(weights) else "–",
        "μ": _median(of_clients["mu"], "{:.3g}"),
        "sent": f"{int((of_clients['mask'] > 0).sum())}/{len(of_clients['mask'])}",
    }


def _median(values: np.ndarray, form: str) -> str:
    import numpy as np

    known = values[np.isfinite(values)]
    return form.format(float(np.median(known))) if len(known) else "–"


def export_command(
    directory: RunDir,
    file: Annotated[Path, typer.Argument(metavar="FILE.safetensors", help="The file to write; it must be new.")],
    client: Annotated[
        int | None, typer.Option("--client", metavar="K", help="The model of this client, with its private layers.")
    ] = None,
    data: Data = None,
) -> None:
    """Write a run's model to a .safetensors file: a whole state dict, ready for load_state_dict.

    Example:

    fedstrata export runs/example model.safetensors

    In Python: model.load_state_dict(safetensors.torch.load_file("model.safetensors"))
    """
    from fedstrata.runs.reader import Run

    Run(directory).export(file, client=client, data=data)
    say(f"wrote {file}")


def partition_command(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE|NAME", help="A .toml file, or a name from `fedstrata list`.")
    ],
    settings: Settings = None,
    seed: Seed = None,
    data: Data = None,
) -> None:
    """Show which client would hold how many samples of which class, without training.

    Examples:

    fedstrata partition quickstart

    fedstrata partition quickstart --set 'task.partition={name="dirichlet", clients=10, alpha=0.3}'
    """
    from fedstrata.recipes.experiment import build_experiment
    from fedstrata.recipes.schema import load

    task = build_experiment(load(recipe, settings=settings or [], seed=seed), data=data).task
    notes = task.described()
    if "table" not in notes:
        raise UserError(f"{recipe}: the task {task.name!r} has no classes to count")
    Console().print(partition_table(notes["table"], notes["class_names"], client_names=notes.get("client_names", ())))


def list_command(
    what: Annotated[
        str | None, typer.Argument(help="recipes, algorithms, rules, models, partitions, settings or runs.")
    ] = None,
) -> None:
    """List what there is: recipes, algorithms, the rules on each axis, models, partitions, settings, runs.

    Examples:

    fedstrata list

    fedstrata list settings
    """
    tables = {
        "recipes": _recipes,
        "algorithms": _algorithms,
        "rules": _rules,
        "models": _models,
        "partitions": _partitions,
        "settings": _settings,
        "runs": _runs,
    }
    if what is not None and what not in tables:
        raise UserError(f"list = {what!r}: there are {', '.join(tables)}")
    shown = [what] if what is not None else ["recipes", "algorithms", "rules", "models", "partitions", "runs"]
    console = Console()
    for name in shown:
        table = tables[name]()
        if table.row_count:
            console.print(table)
        elif what is not None:
            console.print(f"no {what} here yet")


def _recipes() -> Table:
    from fedstrata.recipes.catalog import RECIPES

    table = Table("recipe", "what it is", title="fedstrata run NAME", title_justify="left")
    for name in RECIPES.names():
        table.add_row(name, RECIPES.read(name).get("description", ""))
    return table


def _algorithms() -> Table:
    from fedstrata.algorithms import NAMED, axes_of

    columns = ("algorithm", "its choices, where they are not FedAvg's", "layers")
    table = Table(*columns, title="--algorithm NAME", title_justify="left")
    usual = axes_of(NAMED["fedavg"]())
    for name, function in NAMED.items():
        algorithm = function()
        own = [f"{axis} {part['name']}" for axis, part in axes_of(algorithm).items() if part != usual.get(axis)]
        table.add_row(name, ", ".join(own), str(algorithm.grouping))
    return table


def _rules() -> Table:
    import dataclasses

    from fedstrata.algorithms import AXES

    table = Table("axis", "rule", "options", "what it does", title="the axes", title_justify="left")
    for axis, rules in AXES.items():
        for name, rule in rules.items():
            options = ", ".join(f"{item.name}={item.default!r}" for item in dataclasses.fields(rule))
            table.add_row(axis, name, options, _first_line(rule))
    return table


def _models() -> Table:
    import inspect

    from fedstrata.tasks.models import MODELS

    table = Table("model", "options", "what it is", title="task.model.name", title_justify="left")
    for name, factory in MODELS.items():
        parameters = list(inspect.signature(factory).parameters.values())[2:]
        table.add_row(name, ", ".join(f"{p.name}={p.default!r}" for p in parameters), _first_line(factory))
    return table


def _partitions() -> Table:
    import dataclasses

    from fedstrata.tasks.partitions import PARTITIONS

    table = Table("partition", "options", "what it is", title="task.partition.name", title_justify="left")
    for name, scheme in PARTITIONS.items():
        options = ", ".join(
            item.name if item.default is dataclasses.MISSING else f"{item.name}={item.default!r}"
            for item in dataclasses.fields(scheme)
        )
        table.add_row(name, options, _first_line(scheme))
    return table


def _settings() -> Table:
    from pydantic import BaseModel

    from fedstrata.recipes.schema import Recipe

    table = Table(title="--set KEY=VALUE", title_justify="left")
    table.add_column("setting", no_wrap=True)
    for heading in ("default", "what it is"):
        table.add_column(heading)
    for name, entry in Recipe.model_fields.items():
        if isinstance(entry.annotation, type) and issubclass(entry.annotation, BaseModel):
            for key, inner in entry.annotation.model_fields.items():
                default = inner.get_default(call_default_factory=True)
                table.add_row(f"{name}.{key}", str(default), inner.description or "")
        else:
            default = entry.get_default(call_default_factory=True)
            table.add_row(name, str(default), entry.description or "")
    return table


def _runs() -> Table:
    from fedstrata.runs.reader import Run

    name = Column("run", overflow="fold", ratio=1)
    table = Table(name, "rounds", "best", "upload", "state", title="runs/", title_justify="left")
    for info in sorted(Path("runs").glob("**/run.json")):
        try:
            run = Run(info.parent)
            history = run.history()
            summary = run.summary(history)
            rounds = f"{summary['rounds']}/{run.recipe.training.rounds}"
            row = (rounds, number(summary["best"]), size(summary["upload"]), run.state(history))
        except (FedstrataError, OSError) as error:  # one that somebody damaged hides no other
            row = ("", "", "", str(error))
        table.add_row(str(info.parent), *row)
    return table


def _first_line(thing: Any) -> str:
    return (thing.__doc__ or "").strip().split("\n")[0]
