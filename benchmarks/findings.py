"""How many faulty clients `Run.findings()` names, how many sound ones it accuses, and whom the probe puts first.

python -m benchmarks.findings make DIR     five faults × three kinds of skew, and runs without a fault
python -m benchmarks.findings table DIR    what is found in them: the tables of docs/findings.md

Both take `--seeds`. The thresholds in `runs/findings.py` were chosen on the seeds 0 to 4, and docs/findings.md reports
the seeds 5 to 9, which were looked at once.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedstrata
from fedstrata.core.fit import Engine
from fedstrata.core.messages import Answer, Order, Reply
from fedstrata.recipes.experiment import Experiment, build_experiment
from fedstrata.runs.engine import open_engine
from fedstrata.runs.runner import run_rounds, start_run
from fedstrata.tasks import datasets
from fedstrata.tasks.models import MODELS
from fedstrata.tasks.partitions import Dirichlet, Iid, IidMix
from fedstrata.tasks.task import Samples, Task

CLIENTS, SAMPLES = 8, 200
SKEWS: dict[str, Iid | Dirichlet | IidMix] = {
    "IID": Iid(CLIENTS, SAMPLES),
    "Dirichlet 0.3": Dirichlet(CLIENTS, 0.3, min_samples=20),
    "two classes": IidMix(0, CLIENTS, 2, SAMPLES),
}
FAULTS = ("flipped labels", "scale of one input", "noise", "few samples", "stuck")
TRAINING = {"rounds": 15, "epochs": 2, "batch_size": 20, "lr": 0.05}
ONE_WORKER = {"workers": 1}
PROBED = 7
"""The round in the middle, when there is still something to learn."""
REPORTED = range(5, 10)


# --- runs with a faulty client ---------------------------------------------------------------------------------------


@cache
def _digits() -> datasets.ImageDataset:
    return datasets.load("mnist-mini")


def task(skew: str, fault: str, seed: int) -> Task:
    """Eight clients with digits, one of which has a fault in its data."""
    digits, generator = _digits(), np.random.default_rng([seed, 7])
    inputs, labels = digits.train_images.float().div(255), digits.train_labels
    some = np.arange(len(labels))
    if skew == "Dirichlet 0.3":
        some = generator.permutation(len(labels))[: CLIENTS * SAMPLES]
    partition = SKEWS[skew].split(labels.numpy()[some], generator)
    rows = [some[partition[client]] for client in range(CLIENTS)]
    clients = [Samples(inputs[own], labels[own]) for own in rows]
    clients[faulty(seed)] = spoiled(clients[faulty(seed)], fault, generator)
    test = Samples(digits.test_images.float().div(255), digits.test_labels)
    shape = {"input_shape": (1, 28, 28), "classes": 10, "hidden": 32}
    return Task(model=lambda: MODELS["mlp"](**shape), clients=clients, evaluation={"test": test})


def faulty(seed: int) -> int:
    """Which client has the fault."""
    return seed * 3 % CLIENTS


def spoiled(data: Samples, fault: str, generator: np.random.Generator) -> Samples:
    """A client's data with a fault."""
    inputs, labels = data.inputs.clone(), data.targets.clone()
    count = len(labels)
    if fault == "flipped labels":  # half of them, each to one of the nine others
        which = generator.permutation(count)[: count // 2]
        labels[which] = (labels[which] + torch.from_numpy(generator.integers(1, 10, len(which)))) % 10
    elif fault == "scale of one input":  # up to 255, where all others are from 0 to 1
        inputs[:, 0, 14, 14] *= 255
    elif fault == "noise":
        inputs += torch.from_numpy(generator.normal(0, 1, tuple(inputs.shape))).float()
    elif fault == "few samples":
        inputs, labels = inputs[:6], labels[:6]
    return Samples(inputs, labels)


class StuckEngine:
    """An engine one of whose clients is stuck: it sends no update, or the same update or model as in round 1."""

    def __init__(self, engine: Engine, experiment: Experiment) -> None:
        self.engine, seed = engine, experiment.recipe.seed
        self.client, self.says = faulty(seed), ("the same model", "no update", "the same update")[seed % 3]
        everything = torch.ones(len(experiment.layers), dtype=torch.bool)
        self.start: Tensor = experiment.initial.clone()
        first = Order("train", 1, 0, self.client, model=self.start, mask=everything, work=int(TRAINING["epochs"]))
        ((_, answer),) = engine.exchange([first])
        assert isinstance(answer, Reply)
        assert answer.update is not None
        self.update, self.first = answer.update.clone(), answer

    @property
    def sizes(self) -> np.ndarray:
        """Those of the engine."""
        return self.engine.sizes

    def exchange(self, orders: Sequence[Order]) -> Iterator[tuple[Order, Answer]]:
        """The engine's answers, but for one client's."""
        for order, answer in self.engine.exchange(orders):
            if order.kind != "train" or order.client != self.client or not isinstance(answer, Reply):
                yield order, answer
            elif self.says == "no update":
                yield order, replace(answer, update=torch.zeros_like(self.update))
            elif self.says == "the same update":
                yield order, replace(self.first, update=self.update)
            else:
                assert order.model is not None
                yield order, replace(self.first, update=self.start + self.update - order.model)


@contextmanager
def engine_of(experiment: Experiment, fault: str) -> Iterator[Engine]:
    """With the fault, if it is none of the data."""
    with open_engine(experiment) as engine:
        yield StuckEngine(engine, experiment) if fault == "stuck" else engine


def run_faulty(out: Path, skew: str, fault: str, seed: int) -> None:
    """One run with this fault; none, if it is empty."""
    options = {"skew": skew, "fault": fault, "seed": seed}
    table = {"name": "findings", "task": {"function": "benchmarks.findings:task", "options": options}}
    settings = {"training": TRAINING, "engine": ONE_WORKER, "record": {"keep_checkpoints": 16}}
    experiment = build_experiment(fedstrata.load({**table, **settings}, seed=seed))
    run = start_run(experiment, out)
    with engine_of(experiment, fault) as engine:
        list(run_rounds(run, experiment, engine))


# --- runs without ----------------------------------------------------------------------------------------------------


def _clean(partition: str, **settings: Any) -> dict[str, Any]:
    """A recipe from a partition's name and options, such as `iid_mix iid=2 non_iid=8`, and other settings."""
    name, *options = partition.split()
    pairs = (option.split("=") for option in options)
    shares = {key: float(value) if "." in value else int(value) for key, value in pairs}
    training = {**TRAINING, **{key: value for key, value in settings.items() if key not in ("model", "algorithm")}}
    model = settings.get("model", {"name": "mlp", "hidden": 32})
    return {
        "task": {"dataset": "mnist-mini", "partition": {"name": name, **shares}, "model": model},
        "algorithm": settings.get("algorithm", {"name": "fedavg"}),
        "training": training,
    }


_TWO = "iid_mix iid=0 non_iid=8 classes=2 samples=200"
_SOME = "iid_mix iid=2 non_iid=6 classes=2 samples=200"
_X_CLASS = {"name": "x_class", "classes": [10, 10, 10, 10, 10, 10, 1], "samples": 200}

CLEAN: dict[str, Any] = {
    "quickstart": "quickstart",
    "IID": _clean("iid clients=8 samples=200"),
    "Dirichlet 0.3": _clean("dirichlet clients=20 alpha=0.3", clients_per_round=8),
    "Dirichlet 0.1": _clean("dirichlet clients=10 alpha=0.1", rounds=10),
    "two classes": _clean(_TWO),
    "one IID among two-class clients": _clean("iid_mix iid=1 non_iid=7 classes=2 samples=200"),
    "two IID among one-class clients": _clean("iid_mix iid=2 non_iid=8 classes=1 samples=200"),
    "one class among IID clients": {
        **_clean("iid clients=7"),
        "task": {"dataset": "mnist-mini", "partition": _X_CLASS, "model": {"name": "mlp", "hidden": 32}},
    },
    "one to ten classes": _clean("fedadp_case1 samples=200"),
    "logistic regression, two classes": _clean(_TWO, model={"name": "logreg"}, lr=0.02),
    "FedLDF, two-class clients": _clean(
        "iid_mix iid=1 non_iid=9 classes=2 samples=200", algorithm={"name": "fedldf", "n": 4}
    ),
    "FedProx, Dirichlet 0.3": _clean(
        "dirichlet clients=8 alpha=0.3", algorithm={"name": "fedprox", "mu": 0.1}, rounds=10
    ),
    "stragglers and dropouts": _clean(
        "iid_mix iid=2 non_iid=8 classes=2 samples=200", stragglers=0.5, dropouts=0.1, epochs=4
    ),
    "six rounds": _clean(_SOME, rounds=6),
    "a large step": _clean(_SOME, lr=0.3),
    "a small step": _clean(_SOME, lr=0.003),
}
"""Recipes of runs without a fault, skewed in every way that there is."""


def folders(folder: Path, seed: int) -> Iterator[tuple[Path, str, str]]:
    """Where each run of a seed is, with its skew, or recipe, and its fault."""
    for skew, fault in product(SKEWS, (*FAULTS, "")):
        kind = Path("faulty") / fault if fault else Path("sound")
        yield folder / str(kind / skew / str(seed)).replace(" ", "-"), skew, fault
    for name in CLEAN:
        yield folder / f"clean/{name}/{seed}".replace(" ", "-"), name, ""


def make(folder: Path, seeds: Sequence[int]) -> None:
    """All runs that are not there yet."""
    for seed in seeds:
        for out, name, fault in folders(folder, seed):
            if (out / "run.json").exists():
                continue
            if out.parts[-3] == "clean":
                fedstrata.run(CLEAN[name], seed=seed, out=out, settings={"engine.workers": 1})
            else:
                run_faulty(out, name, fault, seed)


# --- what is found ---------------------------------------------------------------------------------------------------


@dataclass
class Cell:
    """What became of a fault under one kind of skew, over seeds."""

    runs: int = 0
    found: int = 0
    first: int = 0
    """How often the probe put the faulty client first."""
    harmful: int = 0
    """How often the model would have been better without it."""
    reasons: Counter[str] = field(default_factory=Counter)


def table(folder: Path, seeds: Sequence[int]) -> None:
    """Print what `findings` and the probe say of these runs."""
    cells = {place: Cell() for place in product(FAULTS, SKEWS)}
    accused, clean = [], 0
    for seed in seeds:
        for out, name, fault in folders(folder, seed):
            run = fedstrata.Run(out)
            suspects = {finding.client: finding for finding in run.findings() if finding.kind == "client_suspect"}
            bad = faulty(seed) if fault else None
            clean += not fault
            accused += [(fault, name, seed, who, one.reason) for who, one in suspects.items() if who != bad]
            if not fault:
                continue
            cell = cells[fault, name]
            cell.runs += 1
            if bad in suspects:
                cell.found += 1
                cell.reasons[suspects[bad].reason] += 1
            probed = _probe(out, fault)
            cell.first += probed.ranking()[0] == bad
            cell.harmful += bool(probed.harm[bad] > 0)
    print(f"seeds {', '.join(map(str, seeds))}: named by findings / put first by the probe / better without it")
    print("| fault |", " | ".join(SKEWS), "|\n|---|" + "---|" * len(SKEWS))
    for fault in FAULTS:
        row = [cells[fault, skew] for skew in SKEWS]
        print(f"| {fault} |", " | ".join(f"{cell.found} / {cell.first} / {cell.harmful}" for cell in row), "|")
        print("   ", [dict(cell.reasons) for cell in row])
    whole = list(cells.values())
    found, first, runs = (sum(getattr(cell, name) for cell in whole) for name in ("found", "first", "runs"))
    print(f"named: {found} of {runs}; put first by the probe: {first}")
    runs_accused = {place[:3] for place in accused}
    print(f"accused though sound: in {sum(not place[0] for place in runs_accused)} of {clean} runs without a fault,")
    print(f"and in {sum(bool(place[0]) for place in runs_accused)} of {runs} with one: {accused}")


def _probe(out: Path, fault: str) -> fedstrata.Probe:
    """What the model would be without each client."""
    experiment = build_experiment(fedstrata.Run(out).recipe)
    with engine_of(experiment, fault) as engine:
        found = fedstrata.probe(out, PROBED, task=experiment.task, engine=engine)
    assert found.matches, out
    return found


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "table"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(REPORTED))
    options = parser.parse_args()
    (make if options.what == "make" else table)(options.folder, options.seeds)


if __name__ == "__main__":
    main()
