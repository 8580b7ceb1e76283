"""The command line. Commands import what they need when they run, so that `--help` answers at once."""

from __future__ import annotations

import re
import sys

import typer

from fedstrata.cli import compare, data, figures, flower, probe, report, run, show, terminal, watch
from fedstrata.core.errors import FedstrataError, UserError
from fedstrata.processes import hold_collection, keep_memory, stop_when_asked

app = typer.Typer(
    name="fedstrata",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help=(
        "Layer-aware federated learning: train FedAvg, FedProx, FedAdp, FedLayerWise, FedLDF, adaptive mu, FedLap, or "
        "any mixture of their parts, on non-IID data, and see what happens in every layer.\n\n"
        "Start with: fedstrata run quickstart"
    ),
)
app.command("run")(run.run_command)
app.command("compare")(compare.compare_command)
app.command("show")(show.show_command)
app.command("probe")(probe.probe_command)
app.command("report")(report.report_command)
app.command("watch")(watch.watch_command)
app.command("figures")(figures.figures_command)
app.command("export")(show.export_command)
app.command("partition")(show.partition_command)
app.command("list")(show.list_command)
app.add_typer(data.app, name="data")
app.add_typer(flower.app, name="flower")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def reproduce() -> None:
    """Moved out of the package: in a clone of the repository, python -m reproductions runs the papers' studies."""
    raise UserError("the papers' studies are in reproductions/ of the repository: in a clone, python -m reproductions")


def _version(show: bool) -> None:
    if show:
        from fedstrata._version import __version__

        terminal.say(f"fedstrata {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    pass


def program(commands: typer.Typer = app) -> None:
    """`main` as a process of its own."""
    hold_collection()
    main(commands)


def main(commands: typer.Typer = app) -> None:
    """Run one of the commands; an error of the user's is one line and exit code 2, never a traceback."""
    terminal.prepare()
    stop_when_asked()
    keep_memory()
    try:
        code = commands(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except FedstrataError as error:
        _complain(str(error))
        for hint in getattr(error, "hints", ()):
            terminal.say(f"  {hint}", stderr=True)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:  # a disk that is full, a folder one may not write to
        _complain(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))
        sys.exit(2)
    except Exception as error:
        usage = getattr(error, "format_message", None)  # what typer raises when an option is wrong
        if usage is None:
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            for line in usage().splitlines():  # empty, where typer has shown the help itself
                terminal.say(line)
        else:
            said = re.sub(r"( Did you mean [^?]*\?)\1", r"\1", usage())  # typer and click both have the idea
            _complain(f"{said} (--help shows what there is)")
        sys.exit(2)


def _complain(problem: str) -> None:
    terminal.say(f"error: {' '.join(problem.split())}", stderr=True)
