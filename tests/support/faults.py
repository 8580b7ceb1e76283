"""A campaign against the local engine: workers are killed at any moment, and no run may differ from an undisturbed one.

`make faults` makes 200 kills over all kinds of runs and says what came of them; tests make a few. In most runs workers
are killed from outside, at random instants. In the others they die at chosen moments: before, within and after all that
they do with an order. No order loses two workers that had begun with it, as that would be its client's fault.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from torch import nn
from torch.utils.data import Dataset

import fedstrata
from fedstrata.core.messages import Answer, Order
from fedstrata.engines import local
from fedstrata.runs import compare
from fedstrata.tasks.metric import ACCURACY, Metric
from fedstrata.tasks.task import Task
from tests.support.processes import assert_no_orphans, end_of, fork, living
from tests.support.runs import TINY, run_content

# --- moments to die at -----------------------------------------------------------------------------------------------

PLACES = ("starting", "receiving", "computing", "writing its row", "replying", "replied")
PLANS: tuple[tuple[str, ...], ...] = (
    ("computing",),
    ("writing its row",),
    ("replying",),
    ("replied",),
    ("receiving",),
    ("idle",),
    ("idle", "idle", "replied"),
    ("computing", "starting"),
    ("replying", "starting", "receiving", "replied"),
    ("idle", "starting", "writing its row"),
)
"""Who dies in one exchange. A worker that computes, writes or replies has begun: at most one of these."""


class Moments:
    """Where workers are to die, in memory that they share; each place once an exchange."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.draw = folder, random.Random(seed)
        self.left = local._shared(1, len(PLACES), torch.int64)[0]
        self.exchange = local._shared(1, 1, torch.int64)[0]

    def arm(self, engine: local.LocalEngine) -> None:
        """Before an exchange: choose who is to die in it, if any, and how often a place is passed before."""
        self.exchange += 1
        plan = self.draw.choice(PLANS) if self.draw.random() < 0.5 else ()
        for at, place in enumerate(PLACES):
            most = 8 if place == "computing" else 2
            self.left[at] = self.draw.randint(1, most) if place in plan else 0
        assert engine._crew is not None
        for worker in self.draw.sample(engine._crew._team, plan.count("idle")):
            if worker.process.is_alive():
                self._note(f"idle-{worker.process.pid}")
                worker.process.kill()
                if self.draw.random() < 0.5:
                    worker.process.join()

    def here(self, place: str) -> bool:
        """Whether a worker that passes this place is to die at it."""
        at = PLACES.index(place)
        self.left[at] -= 1
        return int(self.left[at]) == 0 and self._note(place)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _note(self, what: str) -> bool:
        """A file for each kill. Two workers may pass at the same time: the one that makes it is the one to die."""
        try:
            (self.folder / f"{int(self.exchange)}-{what}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def kills(self) -> Counter[str]:
        """How many there were, by place."""
        return Counter(file.name.split("-")[1] for file in self.folder.iterdir())


MOMENTS: Moments | None = None


def passing(place: str) -> None:
    if MOMENTS is not None and MOMENTS.here(place):
        MOMENTS.die()


@dataclass
class DoomedPipe:
    """A worker's end, at which it may die with half a message read or written."""

    pipe: Any
    moments: Moments

    def recv_bytes(self) -> bytes:
        self.pipe.poll(None)
        if self.moments.here("receiving"):
            os.read(self.pipe.fileno(), 2)
            self.moments.die()
        return bytes(self.pipe.recv_bytes())

    def send_bytes(self, message: bytes) -> None:
        if self.moments.here("replying"):
            os.write(self.pipe.fileno(), len(message).to_bytes(4, "big") + message[: len(message) // 2])
            self.moments.die()
        self.pipe.send_bytes(message)
        if self.moments.here("replied"):
            self.moments.die()


@dataclass
class DoomedClient:
    """It may die with half of its row written."""

    client: Any
    moments: Moments

    def answer(self, order: Order, row: torch.Tensor | None) -> Answer:
        if row is not None and self.moments.here("writing its row"):
            row[: len(row) // 2] = torch.nan
            self.moments.die()
        return self.client.answer(order, row)


def doom(moments: Moments) -> None:
    """Have the workers of this process die at these moments."""
    global MOMENTS
    MOMENTS = moments
    work: Any = local._work
    exchange = local.LocalEngine.exchange

    def doomed_work(client: Any, post: Any, begun: Any, at: int, pipe: Any, inherited: Any) -> None:
        passing("starting")
        work(DoomedClient(client, moments), post, begun, at, DoomedPipe(pipe, moments), inherited)

    def doomed_exchange(self: local.LocalEngine, orders: Sequence[Order]) -> Iterator[tuple[Order, Answer]]:
        moments.arm(self)
        yield from exchange(self, orders)

    local._work = doomed_work
    local.LocalEngine.exchange = doomed_exchange  # type: ignore[method-assign]


# --- kinds of runs ---------------------------------------------------------------------------------------------------


def points(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 3, count)
    return torch.from_numpy(generator.normal(size=(count, 8)) + labels[:, None]).float(), torch.from_numpy(labels)


class Shaken(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points that are another each time they are read."""

    def __init__(self, count: int, seed: int) -> None:
        self.inputs, self.targets = points(count, seed)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index] + 0.1 * torch.randn(8), self.targets[index]


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    passing("computing")
    return nn.functional.cross_entropy(outputs, targets)


def rank(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """How often a sample of class 2 is given more of it than one of another class: of all samples at once."""
    scores = outputs[:, 2].double()
    return float((scores[targets == 2][:, None] > scores[targets != 2][None]).double().mean())


def network(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), *between, nn.ReLU(), nn.Linear(16, 3))


ROUNDS = 8


def small_task(data: Any = points, model: Callable[[], nn.Module] = network, metric: Metric = ACCURACY) -> Task:
    return Task(
        model=model,
        clients=[data(30 + 10 * k, k) for k in range(5)],
        held_out=[points(20, 50 + k) for k in range(5)],
        evaluation={"test": points(4500, 98), "validation": points(100, 99)},
        loss=loss,
        metric=metric,
    )


Work = Callable[[Path], object]


def one_run(
    algorithm: dict[str, Any], task: Task, on: Sequence[str] = ("test",), extended: bool = False, **training: Any
) -> Work:
    """A run; `extended`, in two halves."""

    def work(path: Path) -> None:
        table = {
            "algorithm": algorithm,
            "training": {"rounds": ROUNDS // (2 if extended else 1), "epochs": 2, "batch_size": 8, "lr": 0.1}
            | training,
            "evaluation": {"on": list(on)},
            "engine": {"workers": 2},
        }
        fedstrata.run(table, task=task, out=path / "run")
        if extended:
            fedstrata.resume(path / "run", task=task, settings={"training.rounds": ROUNDS})

    return work


def comparison(path: Path) -> None:
    """Two algorithms on digits, with the trainer that perceptrons have."""
    recipe = TINY | {"training": {"rounds": 4, "epochs": 4, "batch_size": 6, "lr": 0.1}, "engine": {"workers": 2}}
    (path / "recipe.toml").write_text(tomli_w.dumps(recipe), encoding="utf-8")
    for job in compare.begin_comparison(path / "recipe.toml", ["fedlayerwise", "fedldf"], [0], out=path / "run").jobs:
        list(compare.run_job(job))


FEDLDF = {"name": "fedldf", "n": 2}
PARTLY: dict[str, Any] = {"stragglers": 0.4, "dropouts": 0.2, "min_replies": 0.7, "attempts": 20}
KINDS: dict[str, Work] = {
    "fedavg": one_run({"name": "fedavg"}, small_task()),
    "two exchanges": one_run(FEDLDF | {"weighting": {"name": "fedlayerwise"}}, small_task(), on=["test", "clients"]),
    "selection on the client": one_run({"name": "neuron_pruning"}, small_task()),
    "fedlap": one_run({"name": "fedlap"}, small_task(), on=["clients"]),
    "adaptive springs": one_run({"name": "adaptive_mu", "weighting": {"name": "fedadp"}}, small_task()),
    "stragglers, dropouts, attempts": one_run({"name": "random_layers"}, small_task(), **PARTLY),
    "dropout and batch norm": one_run(
        {"name": "fedprox"}, small_task(model=lambda: network(nn.BatchNorm1d(16), nn.Dropout(0.5)))
    ),
    "datasets that draw": one_run({"name": "fedavg"}, small_task(Shaken), clients_per_round=3),
    "a whole metric": one_run(
        FEDLDF, small_task(metric=Metric("rank", rank, whole=True)), on=["test", "validation", "clients"]
    ),
    "clients remember": one_run({"name": "scaffold", "selection": FEDLDF}, small_task(), on=["clients"], **PARTLY),
    "private layers": one_run(
        {"name": "fedbn"}, small_task(model=lambda: network(nn.BatchNorm1d(16))), on=["clients"], clients_per_round=3
    ),
    "a model of one's own": one_run({"name": "ditto", "private": ["bias"]}, small_task(), on=["clients"], **PARTLY),
    "extended": one_run(FEDLDF, small_task(), on=["test", "clients"], extended=True),
    "comparison": comparison,
}


# --- a run that is disturbed -----------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a campaign came to."""

    runs: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)


def campaign(
    folder: Path,
    kills: int,
    *,
    seed: int = 0,
    kinds: Sequence[str] = tuple(KINDS),
    random_runs: int = 7,
    limit: float = 60,
    say: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Disturb every kind of run, over and over until there were so many kills, and see what it comes to.

    Each kind has `random_runs` with kills at random for one at chosen moments, which has more of them. A run that takes
    longer than `limit` seconds hangs.
    """
    outcome, expected = Outcome(), {}
    for kind in kinds:
        code, _ = watch(start(kind, folder / kind), folder / kind, None, limit)
        assert code == 0, (kind, code, (folder / kind / "log").read_text())
        expected[kind] = contents(folder / kind / "work")
    while outcome.runs == 0 or outcome.kills.total() < kills:
        for kind, turn in ((kind, turn) for kind in kinds for turn in range(random_runs + 1)):
            outcome.runs += 1
            place, draw = folder / str(outcome.runs), random.Random(f"{seed}/{outcome.runs}")
            if turn < random_runs:
                how, child = "at random", start(kind, place)
                code, made = watch(child, place, draw, limit)
            else:
                (place / "kills").mkdir(parents=True)
                moments = Moments(place / "kills", draw.getrandbits(32))
                how, child = "at chosen moments", start(kind, place, moments)
                code, _ = watch(child, place, None, limit)
                made = moments.kills()
            assert_no_orphans(child)
            outcome.kills += made
            name = f"run {outcome.runs}, {kind}, {made.total()} kills {how}"
            if code is None:
                outcome.hangs.append(name)
                say(f"{name}: HANGS")
            elif code != 0 or contents(place / "work") != expected[kind]:
                outcome.differences.append(name)
                say(f"{name}: DIFFERS, exit code {code}\n{(place / 'log').read_text()}")
            else:
                say(f"{name}: the same")
    return outcome


def start(kind: str, folder: Path, moments: Moments | None = None) -> int:
    """A run in a child process."""
    (folder / "work").mkdir(parents=True)

    def work() -> None:
        os.fsync = lambda handle: None  # type: ignore[assignment]  # nobody kills the run itself
        if moments is not None:
            doom(moments)
        KINDS[kind](folder / "work")

    return fork(work, folder / "log")


def watch(child: int, folder: Path, draw: random.Random | None, limit: float) -> tuple[int | None, Counter[str]]:
    """A child's exit code, None if it hangs; and the kills of its workers, if there is a draw: at most one a round."""
    deadline, kills, seen = time.monotonic() + limit, 0, -1
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return end_of(child), Counter({"any": kills})
        if draw is not None and (stored := rounds_stored(folder)) > seen:
            time.sleep(draw.uniform(0, 0.06))
            workers = [process for process in living(child) if process != child]
            with contextlib.suppress(ProcessLookupError):
                if workers:
                    os.kill(draw.choice(workers), signal.SIGKILL)
                    kills, seen = kills + 1, max(stored, rounds_stored(folder))
        time.sleep(0.002)
    os.killpg(child, signal.SIGKILL)
    end_of(child)
    return None, Counter({"any": kills})


def rounds_stored(folder: Path) -> int:
    files = [*folder.glob("work/run/history.jsonl"), *folder.glob("work/run/*/seed-*/history.jsonl")]
    return sum(file.read_bytes().count(b"\n") for file in files)


def contents(path: Path) -> dict[str, Any]:
    """Everything that must be the same, of every run there is."""
    return {str(run.parent.relative_to(path)): run_content(run.parent) for run in sorted(path.rglob("run.json"))}
