"""`python -m reproductions`, in the root of a clone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from fedstrata.cli.compare import parse_seeds
from fedstrata.cli.options import Data
from fedstrata.cli.terminal import Console
from fedstrata.core.errors import UserError
from fedstrata.runs.files import locked

if TYPE_CHECKING:
    from reproductions.report import TextTable
    from reproductions.study import Study, StudyRun

RUNS, RESULTS, DOCS = Path("reproductions/runs"), Path("reproductions/results"), Path("docs")

Name = Annotated[str, typer.Argument(metavar="NAME", help="A study that `list` shows, or a .toml file.")]
Quick = Annotated[
    bool,
    typer.Option("--quick", help="A first impression: few rounds, seeds and cells; stored apart from the others."),
]
Seeds = Annotated[str | None, typer.Option("--seeds", help="0..2, or 0,1; the study's own if not given.")]
Cells = Annotated[str | None, typer.Option("--cells", help="Only these, with commas between.")]
Arms = Annotated[str | None, typer.Option("--arms", help="Run only these, with commas between.")]
Runs = Annotated[
    Path | None,
    typer.Option("--runs", metavar="DIR", help=f"Run directories; {RUNS}/NAME, or NAME-quick there, if not given."),
]
Stored = Annotated[Path, typer.Option("--results", metavar="DIR", help="Stored results.")]
StoredOrQuick = Annotated[
    Path | None,
    typer.Option("--results", metavar="DIR", help=f"Stored results; {RESULTS}, or with --quick those of its runs."),
]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Runs side by side; as many as there are cores if not given.")
]

app = typer.Typer(
    name="reproductions",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help=(
        "The papers' tables and figures, run again: what was measured, beside what the paper reports.\n\n"
        "Each is a study, a TOML file in reproductions/studies. What its runs came to is in reproductions/results, and "
        "docs/reproductions.md is made of that. Give all commands in the root of a clone, after `make install`.\n\n"
        "Start with: python -m reproductions run adaptive-mu --quick"
    ),
)


@app.command("list")
def list_command(results: Stored = RESULTS) -> None:
    """Show which studies there are, how long each takes, and how many of its seeds are stored."""
    Console().print(_overview(results))


@app.command("run")
def run_command(
    name: Name,
    quick: Quick = False,
    seeds: Seeds = None,
    cells: Cells = None,
    arms: Arms = None,
    runs: Runs = None,
    results: StoredOrQuick = None,
    data: Data = None,
    workers: Workers = None,
) -> None:
    """Run a study, store what came out, and show it beside what the paper reports.

    Interrupted, the same command goes on where it was. What is stored already is not run again.

    Examples:

    python -m reproductions run adaptive-mu --quick --data DIR

    python -m reproductions run fedadp-table1-mnist --seeds 0..2
    """
    from reproductions.study import load_study, plan

    console = Console()
    whole = load_study(name)
    study = _only(whole.quickened() if quick else whole, cells)
    chosen_arms = _chosen("--arms", arms, list(study.arms))
    chosen = parse_seeds(seeds) if seeds is not None else list(range(study.seeds))
    folder, store = _places(study, quick, runs, results)
    planned = [run for run in plan(study, chosen, folder) if run.arm in chosen_arms]
    if quick:
        console.print(_quick_note(whole, study, len(chosen)), soft_wrap=True)
    with _alone_in(folder, console):
        _run(console, study, planned, store, data, workers)
    _show(console, study, store)
    if quick:
        console.print(_quick_note(whole, study, len(chosen)), soft_wrap=True)
    console.print(f"stored: {store / study.name}; run directories: {folder}", soft_wrap=True)


@app.command("show")
def show_command(
    name: Name, quick: Quick = False, cells: Cells = None, runs: Runs = None, results: StoredOrQuick = None
) -> None:
    """Show a study's tables and verdicts from what is stored; this runs nothing."""
    study = _load(name, quick, cells)
    _show(Console(), study, _places(study, quick, runs, results)[1])


@app.command("page")
def page_command(
    docs: Annotated[
        Path, typer.Option("--docs", metavar="DIR", help="Where reproductions.md and the pages go.")
    ] = DOCS,
    figures: Annotated[
        Path | None,
        typer.Option("--figures", metavar="DIR", help="The pictures that they show; figures there if not given."),
    ] = None,
    results: Stored = RESULTS,
) -> None:
    """Write the pages of what is stored, and their index; `figures` draws pictures, and `make page` does both."""
    from reproductions.page import pages

    if not results.is_dir():
        raise UserError(f"{results}: no such directory; give the command in the root of a clone")
    for path, text in pages(results, docs, figures or docs / "figures").items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        Console().print(f"written: {path}", soft_wrap=True)


@app.command("check")
def check_command(
    name: Name,
    quick: Quick = False,
    seeds: Annotated[str | None, typer.Option("--seeds", help="0..2, or 0,1; seed 0 if not given.")] = None,
    cells: Cells = None,
    arms: Arms = None,
    results: StoredOrQuick = None,
    data: Data = None,
    workers: Workers = None,
) -> None:
    """Run stored runs again, apart, and compare every round; the stored results stay as they are.

    With the processor and torch that a run was stored with, every digit has to be the same; if not, the command ends
    with code 1 and keeps the run directories. With others, the table shows by how much they differ.

    Example:

    python -m reproductions check fedadp-figure3 --cells mnist-5iid-5x1
    """
    from reproductions.study import plan

    console = Console()
    study = _load(name, quick, cells)
    chosen_arms = _chosen("--arms", arms, list(study.arms))
    chosen = parse_seeds(seeds) if seeds is not None else [0]
    folder = RUNS / f"{study.name}-check"
    planned = [run for run in plan(study, chosen, folder) if run.arm in chosen_arms]
    with _alone_in(folder, console):
        _check(console, study, planned, folder, _places(study, quick, None, results)[1], data, workers)


@app.command("figures")
def figures_command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A study that `list` shows, or a .toml file; else all.")
    ] = None,
    quick: Quick = False,
    cells: Annotated[
        str | None, typer.Option("--cells", help="Only these, with commas between, and every layer of all their arms.")
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option("--figures", metavar="DIR", help=f"Where to; {DOCS}/figures, or with --quick beside its runs."),
    ] = None,
    runs: Runs = None,
    results: StoredOrQuick = None,
) -> None:
    """Draw what is stored as PNG, SVG and PDF: curves, dots with intervals, and every layer; this runs nothing.

    Pictures of layers come from run directories, and are drawn where these are there.

    Examples:

    python -m reproductions figures

    python -m reproductions figures adaptive-mu --figures figures
    """
    from reproductions.figures import write_all
    from reproductions.results import Results
    from reproductions.study import studies

    if name is None and (cells or runs):
        raise UserError("NAME is missing: --cells and --runs are of one study")
    console, drawn = Console(), 0
    for one in [name] if name is not None else studies():
        study = _load(one, quick, cells)
        folder, store = _places(study, quick, runs, results)
        target = figures or (folder if quick else DOCS) / "figures"
        for path in write_all(Results.stored(study, store), target, folder, every_layer=cells is not None):
            console.print(f"written: {path}, .svg and .pdf", soft_wrap=True)
            drawn += 1
    if not drawn and name is not None:
        raise UserError(f"{store / study.name}: nothing is stored of this study")
    if not drawn:
        raise UserError(f"{results or RESULTS}: nothing is stored there; give the command in the root of a clone")


@contextmanager
def _alone_in(folder: Path, console: Console) -> Iterator[None]:
    """One job at a time works in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder):
            yield
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here", soft_wrap=True)
        raise typer.Exit(130) from None


def _load(name: str, quick: bool, cells: str | None) -> Study:
    from reproductions.study import load_study

    study = load_study(name)
    return _only(study.quickened() if quick else study, cells)


def _places(study: Study, quick: bool, runs: Path | None, results: Path | None) -> tuple[Path, Path]:
    """Where run directories are, and where results are stored."""
    folder = runs or RUNS / study.name
    return folder, results or (folder / "results" if quick else RESULTS)


def _only(study: Study, cells: str | None) -> Study:
    if cells is None:
        return study
    names = _chosen("--cells", cells, [cell.name for cell in study.cells])
    return study.in_cells([cell for cell in study.cells if cell.name in names])


def _chosen(option: str, given: str | None, known: list[str]) -> list[str]:
    """Some of the names that there are, or all."""
    names = known if given is None else [name.strip() for name in given.split(",")]
    for name in names:
        if name not in known:
            raise UserError(f"{option} = {name!r}: there are {', '.join(known)}")
    return names


def _quick_note(whole: Study, study: Study, seeds: int) -> str:
    rounds, all_rounds = study.rounds(study.cells[0]), whole.rounds(whole.cells[0])
    return (
        f"quick: {rounds} of {all_rounds} rounds, {seeds} of {whole.seeds} seeds, {len(study.cells)} of "
        f"{len(whole.cells)} cells, {len(study.arms)} of {len(whole.arms)} arms: a first impression, not a result"
    )


def _overview(results: Path) -> Table:
    from fedstrata.engines.local import available_workers
    from reproductions.report import seeds_stored
    from reproductions.results import Results
    from reproductions.study import load_study, studies

    cores = available_workers()
    table = Table(
        title="python -m reproductions run NAME",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for heading in ("study", "what it is", "runs", f"on {cores} core{'s' * (cores > 1)}", "seeds stored"):
        table.add_column(heading, no_wrap=heading != "what it is")
    for name in studies():
        study = load_study(name)
        found = Results.stored(study, results)
        stored = seeds_stored(found).removesuffix(" seeds") if any(found.all_seeds()) else "nothing"
        runs = str(sum(study.runs(cell) for cell in study.cells))
        table.add_row(name, f"{study.paper}: {study.shows}", runs, study.expected_time(cores), stored)
    return table


def _show(console: Console, study: Study, results: Path) -> None:
    from reproductions.claims import check
    from reproductions.report import claims_table, differences_table, measured_tables
    from reproductions.results import Results

    found = Results.stored(study, results)
    if not any(found.all_seeds()):
        raise UserError(f"{results / study.name}: nothing is stored of this study")
    console.print(f"{study.title}: {study.paper}, {study.shows}", soft_wrap=True)
    for table in measured_tables(found):
        _print(console, table)
    for claim in study.claims:
        ruling = check(claim, found)
        if len(ruling.findings) > 1:
            _print(console, differences_table(found, ruling))
    if study.claims:
        _print(console, claims_table(found))
    for note in (*found.sources, *found.notes):
        console.print(note, soft_wrap=True)


def _print(console: Console, table: TextTable) -> None:
    shown = Table(*table.head, title=table.title)
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)


def _run(
    console: Console, study: Study, runs: list[StudyRun], results: Path, data: Path | None, cores: int | None
) -> None:
    """Run what is left; after each run its cell's results are written again."""
    from reproductions.jobs import is_finished, run_all
    from reproductions.results import Elsewhere, refuse_contradictions, store
    from reproductions.watch import Watch

    others = Elsewhere.stored(study, results)
    unfinished = [run for run in runs if not is_finished(run)]
    taken = {
        run.job.path: lender
        for run in unfinished
        if not (run.job.path / "run.json").exists()
        for lender, _ in others.find(run.job.recipe, [run.seed]).values()
    }
    if taken:
        console.print(f"{len(taken)} runs are stored by {', '.join(sorted(set(taken.values())))}", soft_wrap=True)
    left = [run for run in unfinished if run.job.path not in taken]
    refuse_contradictions(study, [run for run in runs if run not in unfinished], results)
    for cell in {run.cell for run in runs if run not in unfinished}:
        store(study, cell, runs, results, {})
    failed: dict[Path, str] = {}
    with Watch(console, study, runs, left) as watch:
        for event in run_all(left, data, cores):
            watch.add(event)
            if event.kind != "round":
                if event.kind == "failed":
                    failed[event.run.job.path] = event.problem
                store(study, event.run.cell, runs, results, failed)


def _check(
    console: Console,
    study: Study,
    runs: list[StudyRun],
    folder: Path,
    results: Path,
    data: Path | None,
    cores: int | None,
) -> None:
    """Run again what is stored, and say what came out otherwise; the stored results stay as they are."""
    from reproductions.jobs import is_finished, run_all
    from reproductions.repeats import Repeats
    from reproductions.results import Results
    from reproductions.watch import Watch

    stored = Results.stored(study, results)
    runs = [run for run in runs if run.place in stored.made]
    if not runs:
        raise UserError(f"{results / study.name}: nothing is stored of these runs")
    left, failed = [run for run in runs if not is_finished(run)], []
    with Watch(console, study, runs, left) as watch:
        for event in run_all(left, data, cores):
            watch.add(event)
            failed += [event.run] if event.kind == "failed" else []
    repeats = Repeats.of(stored, runs, failed)
    _print(console, repeats.table())
    console.print(repeats.conclusion(), soft_wrap=True)
    if repeats.contradictions():
        console.print(f"their run directories are in {folder}; remove it before the next check", soft_wrap=True)
        raise typer.Exit(1)
    shutil.rmtree(folder)  # the next check must not find them
