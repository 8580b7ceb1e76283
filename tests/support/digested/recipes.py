"""The cases that go through what users have: recipes, `fedstrata.run` and `resume`, and the command line."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fedstrata
from tests.support.digested.tasks import Cautious, odd_task
from tests.support.digested.values import Case, Values, ending, no_values, values_of_run
from tests.support.zoo import ZOO

CASES: dict[str, Case] = {}

Settings = Mapping[str, Any]
"""Values of a recipe by dotted keys."""

BASE: dict[str, Any] = {
    "name": "digests",
    "seed": 3,
    "task": {
        "dataset": "tests.support.digested.tasks:images",
        "partition": {"name": "dirichlet", "clients": 6, "alpha": 0.7, "min_samples": 8},
        "model": {"name": "mlp", "hidden": 6},
    },
    "training": {"rounds": 3, "clients_per_round": 4, "epochs": 2, "batch_size": 8, "lr": 0.1},
    "engine": {"workers": 1},
}
DOUBLE: dict[str, Any] = {"engine.dtype": "float64"}
ALL: dict[str, Any] = {"training.clients_per_round": 6}
ON_CLIENTS: dict[str, Any] = {"evaluation.on": ["test", "clients"]}
MODELS: dict[str, Settings] = {
    "perceptron": {},
    "batchnorm": {"task.model": {"name": "tests.support.digested.tasks:small_cnn"}},
    "groupnorm": {"task.model": {"name": "tests.support.digested.tasks:small_cnn", "norm": "group"}},
    "odd": {"task": {"function": "tests.support.digested.tasks:odd_task"}, "training.batch_size": 4},
}
NAMED: dict[str, Any] = {
    "fedavg": "fedavg",
    "fedprox": "fedprox:mu=0.3",
    "fedadp": "fedadp",
    "fedlayerwise": "fedlayerwise",
    "fedldf": "fedldf:n=2",
    "random_layers": "random_layers:n=2",
    "hdfl": "hdfl:n=2",
    "neuron_pruning": "neuron_pruning:share=0.4",
    "adaptive_mu": "adaptive_mu:mu0=0.4",
    "fedlap": "fedlap",
    "fedavgm": "fedavgm:beta=0.7",
    "fedadagrad": "fedadagrad:lr=0.05",
    "fedadam": "fedadam:lr=0.05",
    "fedyogi": "fedyogi:lr=0.05",
    "fednova": "fednova",
    "fedexp": "fedexp",
    "ida": "ida",
    "krum": "krum",
    "multi_krum": "multi_krum:keep=2",
    "norm_bounding": "norm_bounding:bound=0.3",
    "median": "median",
    "trimmed_mean": "trimmed_mean:trim=0.3",
    "fedper": "fedper",
    "lg_fedavg": "lg_fedavg",
    "fedbn": "fedbn",
    "fedrep": "fedrep",
    "fedbabu": "fedbabu",
    "feddyn": "feddyn",
    "ditto": "ditto",
    "moon": "moon",
    "scaffold": "scaffold",
}
OBJECTIVES: dict[str, Any] = {"plain": {}, "fedprox": {"mu": 0.3}, "adaptive_mu": {"mu0": 0.4}, "fedlap": {"q": 0.7}}
MORE_OBJECTIVES: dict[str, Any] = {"scaffold": {}, "feddyn": {}, "ditto": {}, "moon": {}, "fedrep": {}, "fedbabu": {}}
SELECTIONS: dict[str, Any] = {
    "all": {},
    "fedldf": {"n": 2},
    "random_layers": {"n": 2},
    "random_clients": {"n": 3},
    "neuron_pruning": {"share": 0.4},
}
WEIGHTINGS: dict[str, Any] = {"sample_size": {}, "uniform": {}, "fedadp": {}, "fedlayerwise": {"alpha": 3.0}}
MORE_WEIGHTINGS: dict[str, Any] = {"fednova": {}, "fedexp": {}, "ida": {}, "krum": {}, "multi_krum": {"byzantine": 0}}
SERVERS: dict[str, Any] = {"adopt": {}, "fedavgm": {}, "fedadagrad": {}, "fedadam": {}, "fedyogi": {}, "feddyn": {}}
COMBINATIONS: dict[str, Any] = {"mean": {}, "median": {}, "trimmed_mean": {"trim": 0.4}, "norm_bounding": {}}
IN_ONE_STEP: dict[str, Any] = {"objective": {"name": "fedlap"}, "weighting": {"name": "fedlayerwise"}}
MIXED: dict[str, Any] = {**IN_ONE_STEP, "selection": {"name": "fedldf", "n": 3}}
CHOSEN: dict[str, Any] = {
    "fedlayerwise": "fedlayerwise",
    "random_layers": "random_layers:n=1:weighting.name=fedadp",
    "neuron_pruning": "neuron_pruning:share=0.4:weighting.name=fedlayerwise",
    "adaptive_mu": "adaptive_mu:mu0=0.4",
    "mixed": MIXED,
}
"""One algorithm of each kind, with memory where it can have one."""
STRAGGLERS: dict[str, Any] = {"training.stragglers": 0.5, "training.epochs": 4}
DROPPED: dict[str, Any] = {**STRAGGLERS, "training.keep_stragglers": False}
DROPOUTS: dict[str, Any] = {"training.dropouts": 0.3}
RETRIES: dict[str, Any] = {"training.dropouts": 0.5, "training.min_replies": 0.7, "training.attempts": 30}


def merged(*settings: Settings) -> dict[str, Any]:
    return {key: value for some in settings for key, value in some.items()}


def run_whole(folder: Path, algorithm: Any, settings: Settings, recipe: Any = BASE) -> Values:
    out = folder / "run"
    end = ending(lambda: fedstrata.run(recipe, algorithm=algorithm, settings=settings, out=out))
    return values_of_run(out, end)


def add(name: str, algorithm: Any, *settings: Settings) -> None:
    if algorithm in ("fedper", "lg_fedavg", "fedbn", "fedrep", "fedbabu"):  # the server measures with the first ones
        settings = (*settings, {"evaluation.private": "initial"})
    CASES[name] = partial(run_whole, algorithm=algorithm, settings=merged(*settings))


# --- algorithms ------------------------------------------------------------------------------------------------------

for name, algorithm in NAMED.items():
    for model, settings in MODELS.items():
        add(f"named/{name}/{model}", algorithm, settings)
    for model in ("perceptron", "batchnorm"):
        add(f"named/{name}/{model}/float64", algorithm, MODELS[model], DOUBLE)
    add(f"workers/{name}", algorithm, MODELS["batchnorm"], ON_CLIENTS, {"engine.workers": 2})

HARD = {"training.momentum": 0.9, "training.weight_decay": 0.01, "training.lr_decay": 0.9, "training.lr": 0.03}
for objective, selection, weighting in itertools.product(OBJECTIVES, SELECTIONS, WEIGHTINGS):
    name = f"axes/{objective}+{selection}+{weighting}"
    axes = {
        "objective": {"name": objective, **OBJECTIVES[objective]},
        "selection": {"name": selection, **SELECTIONS[selection]},
        "weighting": {"name": weighting, **WEIGHTINGS[weighting]},
    }
    add(name, axes, HARD)
    if (objective, weighting) in (("fedlap", "fedadp"), ("adaptive_mu", "fedlayerwise")):
        add(f"{name}/groupnorm", axes, HARD, MODELS["groupnorm"])

for kind, rules in {
    "objective": MORE_OBJECTIVES,
    "weighting": MORE_WEIGHTINGS,
    "server": SERVERS,
    "combine": COMBINATIONS,
}.items():
    for rule, selection in itertools.product(rules, ("random_clients", "random_layers", "neuron_pruning")):
        if kind == "weighting" and selection != "random_clients":
            continue
        axes = {"selection": {"name": selection, **SELECTIONS[selection]}, kind: {"name": rule, **rules[rule]}}
        add(f"{kind}/{rule}+{selection}", axes, HARD, MODELS["batchnorm"], STRAGGLERS)

for options in (
    "fedprox:mu=2.0",
    "adaptive_mu:mu0=0.2:a=0.9",
    "fedlap:units=output",
    "fedlap:refresh=step",
    "fedlap:form=exponent:q=0.4",
    "fedlap:form=exponent:q=1.0",
    "fedlap:through=true",
    "fedlap:through=true:units=output:form=exponent",
    "fedadp:alpha=50.0",
    "fedadp:smoothing=round",
    "fedlayerwise:alpha=0.5:smoothing=round",
    "fedldf",
    "fedldf:n=4",
    "hdfl",
    "random_layers",
    "neuron_pruning:share=0.01",
    "neuron_pruning:share=1.0",
    "fedavg:weighting.name=tests.support.digested.tasks:Cautious:weighting.power=0.7",
    "fedldf:n=3:weighting.name=tests.support.digested.tasks:Cautious",
):
    add(f"option/{options}", options)

GROUPINGS = {"module": "module", "tensor": "tensor", "block": "block", "own": {"first": ["0", "1"], "rest": ["3", "6"]}}
for grouping, algorithm in itertools.product(GROUPINGS, CHOSEN):
    own = {"layers.grouping": GROUPINGS[grouping]}
    add(f"grouping/{grouping}/{algorithm}", CHOSEN[algorithm], MODELS["batchnorm"], own)

# --- training, and who is lost in it ---------------------------------------------------------------------------------

for name, settings in {
    "everyone": ALL,
    "three-clients": {"training.clients_per_round": 3},
    "by-size": {"training.sampling": "size", "training.clients_per_round": 3},
    "steps": {"training.steps": 5},
    "small-batches": {"training.batch_size": 3, "training.lr": 0.01},
    "adam": {"training.optimizer": "adam", "training.lr": 0.01, "training.weight_decay": 0.1},
    "momentum": {"training.momentum": 0.9, "training.lr_decay": 0.5},
    "another-seed": {"seed": 2**40},
    "hardly-moves": {"training.lr": 1e-30},
}.items():
    add(f"training/{name}/perceptron", "fedavg", settings)
    add(f"training/{name}/groupnorm", MIXED, MODELS["groupnorm"], settings)

for name, settings in {
    "stragglers": STRAGGLERS,
    "stragglers-by-steps": {**STRAGGLERS, "training.steps": 9},
    "stragglers-dropped": DROPPED,
    "dropouts": {**DROPOUTS, **ALL},
    "retries": RETRIES,
    "all-of-it": {**DROPPED, **RETRIES, **ALL, **DOUBLE, "training.min_replies": 0.4},
    "too-few": {"training.dropouts": 0.9, "training.min_replies": 0.9},
}.items():
    for algorithm in CHOSEN:
        add(f"lost/{name}/{algorithm}", CHOSEN[algorithm], settings)

FINE = [""] * 7
TROUBLE = ["", "raises", "", "nan", "", "huge", ""]
for name, (train, held_out, settings) in {
    "some": (TROUBLE, TROUBLE, {}),
    "some-again": (TROUBLE, TROUBLE, {"training.min_replies": 0.75, "training.attempts": 10}),
    "some-of-all": (TROUBLE, TROUBLE[::-1], ALL),
    "all-raise": (["raises"] * 7, FINE, {}),
    "all-nan": (["nan"] * 7, FINE, {}),
    "all-huge": (["huge"] * 7, FINE, DOUBLE),
    "all-raise-not-finite": (["raises, not finite"] * 7, FINE, {}),
    "all-raise-or-nan": (["raises", "nan", "nan", "raises", "nan", "nan", "nan"], FINE, {}),
    "none-measured": (FINE, ["raises"] * 7, {}),
    "hardly-measured": (FINE, ["raises"] * 6 + [""], {"evaluation.clients": 3}),
    "diverges": (FINE, FINE, {"training.lr": 1e38, "training.momentum": 0.9, "training.rounds": 9}),
}.items():
    trouble = {
        "task": {
            "function": "tests.support.digested.tasks:troubled_task",
            "options": {"train": train, "held_out": held_out},
        }
    }
    add(f"trouble/{name}/fedadp", "fedadp", trouble, ON_CLIENTS, settings)
    add(f"trouble/{name}/fedadp/workers", "fedadp", trouble, ON_CLIENTS, settings, {"engine.workers": 2})
    add(f"trouble/{name}/mixed", MIXED, trouble, ON_CLIENTS, settings)

# --- evaluation, data and models -------------------------------------------------------------------------------------

for name, settings in {
    "all-sets": {"evaluation.on": ["validation", "test", "train", "clients"], "task.validation": 60},
    "clients": {"evaluation.on": ["clients"], "evaluation.held_out": 0.4},
    "sampled-clients": {**ON_CLIENTS, "evaluation.clients": 3},
    "every-second": {"evaluation.every": 2, "training.rounds": 5},
    "stop-at-target": {"evaluation.target": 0.9, "evaluation.stop_at_target": True, "training.rounds": 12},
    "batches-of-7": {**ON_CLIENTS, "evaluation.batch_size": 7},
    "batches-of-1": {"evaluation.batch_size": 1},
}.items():
    add(f"evaluation/{name}/perceptron", "fedlayerwise", settings)
    add(f"evaluation/{name}/batchnorm", "fedldf:n=2", settings, MODELS["batchnorm"])
SETS: dict[str, Any] = {"evaluation.on": ["more", "test", "clients"], "evaluation.target": 2.3}
WHOLE: dict[str, Any] = {"task.options": {"whole": True}, "evaluation.batch_size": 3}
add("evaluation/own-metric/odd", "fedadp", MODELS["odd"], SETS)
add("evaluation/whole-metric/odd", "fedadp", MODELS["odd"], SETS, WHOLE)
LARGE = {"task.dataset": "mnist-mini", "task.model.name": "logreg", "training.rounds": 1, "training.batch_size": 500}
PARTS: dict[str, Any] = {"evaluation.on": ["train", "test"], "evaluation.batch_size": 300}
for workers in (1, 2):
    add(f"evaluation/large/{workers}", "fedadp", LARGE, PARTS, {"engine.workers": workers})

PARTITIONED: dict[str, dict[str, Any]] = {
    "iid": {"clients": 5},
    "iid_mix": {"iid": 2, "non_iid": 3, "classes": 1, "samples": 30},
    "x_class": {"classes": [1, 2, 5], "samples": 30},
    "fedadp_case1": {"clients": 5, "samples": 30},
    "fedadp_case2": {"clients": 6, "samples": 30},
    "shards": {"clients": 8},
    "dirichlet": {"clients": 20, "alpha": 0.1, "min_samples": 0},
    "two_class_dirichlet": {"clients": 12},
}
for name, partition in PARTITIONED.items():
    few = {"task.partition": {"name": name, **partition}, "training.clients_per_round": 3}
    add(f"partition/{name}", "fedadp", few, ON_CLIENTS)

LITTLE: dict[str, Any] = {
    "task.dataset": "mnist-mini",
    "task.inputs": "unit",
    "task.partition": {"name": "iid", "clients": 3, "samples": 10},
    "training.clients_per_round": 2,
    "training.rounds": 2,
}
for name, sizes in {"logreg": {}, "mlp": {"hidden": 20}, "cnn": {}, "tf_cnn": {}, "vgg9": {"width": 4}}.items():
    add(f"model/{name}", "fedldf:n=1:weighting.name=fedlayerwise", LITTLE, {"task.model": {"name": name, **sizes}})
for name in ("quickstart", "demo"):
    short = {"training.rounds": 1, "training.clients_per_round": 2, "engine.workers": 1}
    CASES[f"recipe/{name}"] = partial(run_whole, algorithm=None, settings=short, recipe=name)

for name, animal in ZOO.items():
    if animal.refused is None:
        task = {"function": "tests.support.zoo:task", "options": {"name": name}}
        where = {"task": task, "engine.dtype": animal.dtype}
        how = {f"training.{key}": value for key, value in animal.training.items()}
        few = {"training.clients_per_round": 2, "training.batch_size": 4, "training.lr": 0.05}
        add(f"zoo/{re.sub('[^A-Za-z0-9_.]+', '-', name)}", IN_ONE_STEP, where, few, how)

add("record/no-layers", "fedldf:n=2", {"record.layers": False}, DROPOUTS)
add("record/few-checkpoints", "fedadp", {"record.checkpoint_every": 2})

# --- more than one run, or from outside ------------------------------------------------------------------------------


class Stop(Exception):
    """Raised out of a run, as Ctrl-C would be."""


def stop_after(round: int) -> Callable[[Any], None]:
    def on_round(line: Mapping[str, Any]) -> None:
        if line["round"] == round:
            raise Stop

    return on_round


def resumed(folder: Path, algorithm: Any, settings: Settings, killed: bool = False) -> Values:
    """Stopped after round 3, and gone on with; or killed so that round 3 has a line in the history, and no more."""
    out = folder / "run"
    with suppress(Stop):
        fedstrata.run(BASE, algorithm=algorithm, settings=settings, out=out, on_round=stop_after(3))
    if killed:
        (out / "checkpoints" / "000003.safetensors").unlink()
        with (out / "history.jsonl").open("a") as history:
            history.write('{"run": "')
    return values_of_run(out, ending(lambda: fedstrata.resume(out)))


def extended(folder: Path, algorithm: Any, settings: Settings) -> Values:
    """Run to its end, and then with more rounds than it had."""
    out = folder / "run"
    fedstrata.run(BASE, algorithm=algorithm, settings={**settings, "training.rounds": 3}, out=out)
    rounds = {"training.rounds": settings["training.rounds"]}
    return values_of_run(out, ending(lambda: fedstrata.resume(out, settings=rounds)))


FIVE: dict[str, Any] = {**RETRIES, "training.rounds": 5, "training.stragglers": 0.5, "evaluation.every": 2}
for name, algorithm in CHOSEN.items():
    add(f"resume/never/{name}", algorithm, FIVE)
    CASES[f"resume/stopped/{name}"] = partial(resumed, algorithm=algorithm, settings=FIVE)
    CASES[f"resume/killed/{name}"] = partial(resumed, algorithm=algorithm, settings=FIVE, killed=True)
    CASES[f"resume/extended/{name}"] = partial(extended, algorithm=algorithm, settings=FIVE)
RARE: dict[str, Any] = {**FIVE, **MODELS["batchnorm"], "record.checkpoint_every": 4, "evaluation.target": 0.5}
CASES["resume/rare-checkpoints"] = partial(resumed, algorithm=MIXED, settings=RARE)


def from_exported_weights(folder: Path) -> Values:
    """One run begins where another one ended."""
    exported = str(folder / "first.safetensors")
    fedstrata.run(BASE, settings=MODELS["odd"], out=folder / "first").export(exported)
    settings = {**MODELS["odd"], "training.initial_weights": exported}
    return run_whole(folder, "fedadp", settings)


def given_in_python(folder: Path) -> Values:
    """A Task, and an Algorithm made of rules, instead of a recipe's."""
    task, out = odd_task(), folder / "run"
    algorithm = replace(fedstrata.fedldf(n=3), weighting=Cautious())
    options: Any = {"settings": {"training.batch_size": 4, "evaluation.on": ["more", "clients"]}, "task": task}
    with suppress(Stop):
        fedstrata.run(BASE, algorithm=algorithm, out=out, on_round=stop_after(1), **options)
    return values_of_run(out, ending(lambda: fedstrata.resume(out, task=task)), task)


CASES["initial-weights"] = from_exported_weights
CASES["python"] = given_in_python


def command(folder: Path, *arguments: object) -> str:
    """What `fedstrata …` prints, in a process of its own."""
    paths = os.pathsep.join(map(str, [Path(__file__).parents[3], Path(fedstrata.__file__).parent.parent]))
    environment = os.environ | {"PYTHONPATH": paths, "COLUMNS": "200", "NO_COLOR": "1"}
    words = [sys.executable, "-m", "fedstrata", *map(str, arguments)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
    return done.stdout


def write_recipe(folder: Path, settings: Settings) -> Path:
    path = folder / "digests.toml"
    path.write_text(fedstrata.load(BASE, settings=settings).to_toml(), encoding="utf-8")
    return path


def by_command(folder: Path, *arguments: str, **settings: Any) -> Values:
    """`fedstrata run`."""
    command(folder, "run", write_recipe(folder, settings), "--out", folder / "run", *arguments)
    return values_of_run(folder / "run", "finished")


def compared(folder: Path, seeds: str, algorithms: str, settings: Settings) -> Values:
    """`fedstrata compare`: the numbers of its tables and of results.csv, and each of its runs."""
    recipe, out = write_recipe(folder, settings), folder / "comparison"
    printed = command(folder, "compare", recipe, "--algorithms", algorithms, "--seeds", seeds, "--out", out)
    values = no_values()
    for row in (line for line in printed.splitlines() if "│" in line):
        cells = [re.findall(r"[-−+]?[0-9][0-9.,]*", cell) for cell in row.split("│")[2:]]
        values["history"].append(f"table: {cells}")
    values["history"] += (out / "results.csv").read_text().splitlines()
    for run in sorted(path.parent for path in out.glob("*/*/run.json")):
        for kind, lines in values_of_run(run, "finished").items():
            values[kind] += [f"{run.parent.name} {run.name} {line}" for line in lines]
    return values


CASES["command/run"] = partial(by_command, **DROPOUTS)
CASES["command/options"] = lambda folder: by_command(
    folder, "--algorithm", "fedldf:n=3", "--seed", "9", "--workers", "2"
)
TARGET: dict[str, Any] = {"evaluation.target": 0.9, "training.rounds": 2}
THREE, TWO = "fedavg,fedldf:n=1,fedadp", "fedavg,fedlayerwise"
CASES["compare/three-seeds"] = partial(compared, seeds="0..2", algorithms=THREE, settings=TARGET)
CASES["compare/five-seeds"] = partial(compared, seeds="0..4", algorithms=TWO, settings=TARGET)
