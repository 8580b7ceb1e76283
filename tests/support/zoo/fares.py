"""How an animal fares: trained by fedstrata in each way that there is, and compared with plain PyTorch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import Tensor

import fedstrata
from fedstrata.core.errors import FedstrataError
from fedstrata.deployment.server import serve
from fedstrata.recipes.schema import load
from fedstrata.runs.reader import Run
from fedstrata.runs.runner import create_run, run_rounds
from fedstrata.runs.writer import last_state
from tests.support.fake_grid import FakeGrid
from tests.support.zoo.animals import SIZES, Animal
from tests.support.zoo.plain import SEED, TRAINING, build, plain

NEAR = {"float32": 2e-5, "float64": 1e-9}


def recipe(animal: Animal, workers: int = 1) -> dict[str, Any]:
    return {
        "name": "zoo",
        "seed": SEED,
        "task": {"function": "tests.support.zoo:task", "options": {"name": animal.name}},
        "training": TRAINING | dict(animal.training),
        "engine": {"workers": workers, "dtype": animal.dtype},
    }


def one_worker(animal: Animal, out: Path) -> None:
    fedstrata.run(recipe(animal), out=out)


def two_workers(animal: Animal, out: Path) -> None:
    fedstrata.run(recipe(animal, workers=2), out=out)


def resumed(animal: Animal, out: Path) -> None:
    """Stopped after the first round."""
    run, experiment = create_run(load(recipe(animal)), out)
    rounds = run_rounds(run, experiment)
    next(rounds)
    rounds.close()
    assert len(Run(out).history()) == 1
    fedstrata.resume(out)


def flowers_client(animal: Animal, out: Path) -> None:
    """Messages to Flower's ClientApp, on a grid in this process."""
    path = out.with_suffix(".toml")
    path.write_text(tomli_w.dumps(recipe(animal)), encoding="utf-8")
    for _ in serve(FakeGrid(path, len(SIZES)), {"recipe": str(path), "out": str(out), "wait": 0.5}):
        pass


WAYS: dict[str, Callable[[Animal, Path], None]] = {
    "1 worker": one_worker,
    "2 workers": two_workers,
    "resumed": resumed,
    "Flower's client": flowers_client,
}


@dataclass
class Row:
    """How an animal fared: in each way what it came to, and what is wrong with that."""

    cells: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def note(self, way: str, cell: str, *, wrong: bool) -> None:
        self.cells[way] = f"**{cell}**" if wrong else cell
        if wrong:
            self.problems.append(f"{way}: {cell}")


def visit(animal: Animal, folder: Path) -> Row:
    """Train it in all ways, and compare."""
    row, runs = Row(), {}
    for way, train_so in WAYS.items():
        out = folder / way.replace(" ", "-")
        try:
            train_so(animal, out)
        except Exception as error:
            refused, rounds = animal.refused, len(Run(out).history()) if (out / "run.json").exists() else 0
            # A node tells a server that it failed, and keeps to itself of what.
            said = refused is not None and (way == "Flower's client" or re.search(refused, str(error)))
            if said and isinstance(error, FedstrataError) and rounds == 0:
                row.note(way, f"refused: {error}", wrong=False)
            else:
                row.note(way, f"fails after {rounds} rounds: {type(error).__name__}: {error}", wrong=True)
            continue
        runs[way] = Run(out)
        if animal.refused is not None and not animal.or_right:
            row.note(way, "is not refused", wrong=True)
    if row.problems or not runs:
        return row
    first, *others = runs.items()
    if len(runs) < len(WAYS):
        row.note(first[0], "not refused, as elsewhere", wrong=True)
        return row
    try:
        compare_with_plain(animal, first[1], row)
    except Exception as error:
        row.note("plain PyTorch", f"{type(error).__name__}: {error}", wrong=True)
    for way, run in others:
        compare_bits(way, run, first[1], row)
    return row


def compare_with_plain(animal: Animal, run: Run, row: Row) -> None:
    (way, *_), history = WAYS, run.history()
    lost = [who for line in history for who in line["lost"]]
    row.note(way, f"client {lost[0]['client']}: {lost[0]['why']}" if lost else "done", wrong=bool(lost))
    expected = plain(animal)
    apart = {name: difference(expected.first[name], value) for name, value in expected.values.items()}
    assert max(apart.values()) > 1e-3, "a module that learns nothing shows nothing"
    ours = run.model()
    found = dict(ours.named_parameters()) | dict(ours.named_buffers())
    apart = {name: difference(value, found.get(name)) for name, value in expected.values.items()}
    built = build(animal, getattr(torch, animal.dtype))
    others = {n: t for n, t in [*built.named_parameters(), *built.named_buffers()] if n not in apart}
    apart |= {name: difference(value.detach(), found.get(name)) for name, value in others.items()}
    apart["(loss while training)"] = relative(expected.train_loss, history[-1]["train_loss"])
    apart["(loss on the test set)"] = relative(expected.test_loss, history[-1]["metrics"]["test"]["loss"])
    worst = max(apart, key=lambda name: apart[name])
    near = apart[worst] <= NEAR[animal.dtype]
    row.note("plain PyTorch", f"{apart[worst]:.0e}" if near else f"{apart[worst]:.0e} in {worst}", wrong=not near)


def compare_bits(way: str, run: Run, first: Run, row: Row) -> None:
    """The model, and what the history says of losses and metrics, on every engine."""
    ours, theirs = last_state(run.directory).model, last_state(first.directory).model
    same = ours.numpy().tobytes() == theirs.numpy().tobytes()
    figures = [[(line["train_loss"], line["metrics"], line["lost"]) for line in one.history()] for one in (run, first)]
    if same:
        row.note(
            way, "equal" if figures[0] == figures[1] else "equal, but not its figures", wrong=figures[0] != figures[1]
        )
    else:
        row.note(way, f"{difference(theirs, ours):.0e}", wrong=True)


def difference(right: Tensor, ours: Tensor | None) -> float:
    """The largest, relative to the largest number of the tensor; infinite numbers must be the same."""
    if ours is None or right.shape != ours.shape or right.dtype != ours.dtype:
        return math.inf
    ours = ours.detach()
    finite = right.isfinite()
    if not torch.equal(right[~finite], ours[~finite]) or not ours[finite].isfinite().all():
        return math.inf
    if not finite.any():
        return 0.0
    scale = max(float(right[finite].abs().max()), 1e-3)
    return float((right[finite] - ours[finite]).abs().max()) / scale


def relative(right: float, ours: float | None) -> float:
    return math.inf if ours is None else abs(ours - right) / abs(right)
