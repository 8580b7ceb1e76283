"""Every module of the zoo, trained in each way that there is: the same bits, and what plain PyTorch comes to.

Before every order a client's model is exactly what the factory builds plus the values that travel; after it, those are
read from the module by name. What that means is written down once more in `plain`, with a new module for every order.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import default_collate

pytest.importorskip("flwr")


import fedstrata
from fedstrata.clients.trainers.schedule import schedule
from fedstrata.core import rng
from fedstrata.core.determinism import steady
from fedstrata.core.errors import FedstrataError
from fedstrata.core.messages import Order
from fedstrata.deployment.server import serve
from fedstrata.recipes.schema import Training, load
from fedstrata.runs.reader import Run
from fedstrata.runs.runner import create_run, run_rounds
from fedstrata.runs.writer import last_state
from tests.support.fake_grid import FakeGrid
from tests.zoo import SIZES, ZOO, Animal

SEED = 5
ROUNDS = 2
TRAINING = {"rounds": ROUNDS, "batch_size": 4, "lr": 0.1, "momentum": 0.5, "weight_decay": 0.01}
NEAR = {"float32": 2e-5, "float64": 1e-9}
Values = dict[str, Tensor]


# --- in plain PyTorch -----------------------------------------------------------------------------------------------


@dataclass
class Expected:
    """After the last round: what travels, the mean loss while training, and the loss on the test set."""

    first: Values
    values: Values
    train_loss: float
    test_loss: float


def plain(animal: Animal) -> Expected:
    """FedAvg, as slowly as one likes."""
    training = Training(**TRAINING | dict(animal.training))
    clients, dtype = animal.clients(), getattr(torch, animal.dtype)
    sizes = [len(data[1] if isinstance(data, tuple) else data) for data in clients]
    built = build(animal, dtype)
    names = [name for name, parameter in built.named_parameters() if parameter.requires_grad]
    kept = built.state_dict()
    names += [name for name, buffer in built.named_buffers() if buffer.is_floating_point() and name in kept]
    first = values = read(built, names)
    for number in range(1, training.rounds + 1):
        trained: list[Values] = []
        losses = []
        for client, data in enumerate(clients):
            model = load_values(build(animal, dtype), values)
            order = Order("train", number, 0, client, work=training.local.full_work)
            with rng.global_scope(SEED, "train", round=number, client=client):
                plan = schedule(sizes[client], order, training.local, SEED)
                losses.append(train(animal, model, data, [plan.batch(at) for at in range(len(plan))], training, dtype))
            trained.append(read(model, names))
        shares = [size / sum(sizes) for size in sizes]
        values = {name: sum(s * v[name] for s, v in zip(shares, trained, strict=True)) for name in names}  # type: ignore[misc]
    model = load_values(build(animal, dtype), values).eval()
    with torch.no_grad(), rng.global_scope(SEED, "evaluate", round=training.rounds):
        inputs, targets = gather(clients[-1], np.arange(sizes[-1]), dtype)
        test_loss = float(animal.loss(model(inputs), targets))
    train_loss = sum(share * loss for share, loss in zip(shares, losses, strict=True))
    return Expected(first, values, train_loss, test_loss)


def build(animal: Animal, dtype: torch.dtype) -> nn.Module:
    with rng.global_scope(SEED, "model"):
        model = animal.model()
    return model if dtype == torch.float32 else model.to(dtype)  # float32 is what torch builds, if not told otherwise


def train(
    animal: Animal, model: nn.Module, data: Any, batches: list[np.ndarray], training: Training, dtype: torch.dtype
) -> float:
    """One client's round; the mean loss over its samples."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if training.optimizer == "adam":
        optimizer: Any = torch.optim.Adam(parameters, lr=training.lr, weight_decay=training.weight_decay)
    else:
        optimizer = torch.optim.SGD(
            parameters, lr=training.lr, momentum=training.momentum, weight_decay=training.weight_decay
        )
    model.train()
    total = 0.0
    for indices in batches:
        inputs, targets = gather(data, indices, dtype)
        optimizer.zero_grad()
        loss = animal.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += float(loss.detach()) * len(indices)
    return total / sum(map(len, batches))


def gather(data: Any, indices: np.ndarray, dtype: torch.dtype) -> tuple[Any, Any]:
    """Inputs and targets at some positions, floating-point numbers in the run's dtype."""
    if isinstance(data, tuple):
        at, (inputs, targets) = torch.from_numpy(indices), data
        inputs = {key: part[at] for key, part in inputs.items()} if isinstance(inputs, dict) else inputs[at]
        targets = targets[at]
    elif hasattr(data, "batch"):
        inputs, targets = data.batch(indices)
    else:
        inputs, targets = default_collate([data[i] for i in indices.tolist()])
    return cast(inputs, dtype), cast(targets, dtype)


def cast(part: Any, dtype: torch.dtype) -> Any:
    if isinstance(part, Tensor):
        return part.to(dtype) if part.is_floating_point() else part
    if isinstance(part, PackedSequence):
        return part.to(dtype)
    if isinstance(part, dict):
        return {key: cast(inner, dtype) for key, inner in part.items()}
    return type(part)(*(cast(inner, dtype) for inner in part))  # a namedtuple


def read(model: nn.Module, names: Sequence[str]) -> Values:
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: found[name].detach().clone() for name in names}


def load_values(model: nn.Module, values: Values) -> nn.Module:
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, value in values.items():
            found[name].copy_(value)
    return model


# --- with fedstrata -------------------------------------------------------------------------------------------------


def recipe(animal: Animal, workers: int = 1) -> dict[str, Any]:
    return {
        "name": "zoo",
        "seed": SEED,
        "task": {"function": "tests.zoo:task", "options": {"name": animal.name}},
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


@pytest.mark.parametrize("name", ZOO)
def test_the_zoo(name: str, tmp_path: Path) -> None:
    with steady():
        row = visit(ZOO[name], tmp_path)
    assert not row.problems, "\n".join(row.problems)


def test_one_instance_for_all_runs(tmp_path: Path) -> None:
    """`Task(model=lambda: net)`: no run starts where another one ended, or it is refused."""
    animal = ZOO["Task(model=lambda: net)"]
    task, table = animal.task(), recipe(animal) | {"task": {}}
    digests, refusal = [], None
    try:
        for out in (tmp_path / "first", tmp_path / "second"):
            digests.append(fedstrata.run(table, task=task, out=out).summary()["weights_sha256"])
    except FedstrataError as error:
        refusal = str(error)
    if refusal is None:
        assert digests[0] == digests[1]
    else:
        assert "model" in refusal


@pytest.mark.parametrize("name", ["convolutions", "channels-last convolutions", "BatchNorm2d"])
def test_outside_training_tensors_lie_as_torch_lays_them(name: str, tmp_path: Path) -> None:
    """Who has a run's model can use it as any other: as one vector, by views, and in a file."""
    run = fedstrata.run(recipe(ZOO[name]), out=tmp_path / "run")
    model, state = run.model(), run.model().state_dict()
    assert all(tensor.is_contiguous() for tensor in state.values())
    vector = parameters_to_vector(model.parameters())
    assert torch.equal(vector, torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    save_file(state, tmp_path / "state.safetensors")
    stored = load_file(tmp_path / "state.safetensors")
    assert stored.keys() == state.keys()
    assert all(torch.equal(stored[key], state[key]) for key in state)


# --- as a table -----------------------------------------------------------------------------------------------------


def shortened(cell: str, most: int = 160) -> str:
    return cell if len(cell) <= most else f"{cell[:most]}…{'**' * cell.startswith('**')}"


def print_table(parts: Sequence[str]) -> None:
    """All animals, or those whose names have one of these parts; what is wrong is bold."""
    columns = ["plain PyTorch", *WAYS]
    print(f"| module | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name, animal in ZOO.items():
        if parts and not any(part in name for part in parts):
            continue
        with tempfile.TemporaryDirectory() as folder, steady():
            row = visit(animal, Path(folder))
        cells = [shortened(row.cells.get(column, "")).replace("|", "\\|") for column in columns]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
