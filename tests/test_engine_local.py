"""The local engine: workers change who computes, never what; one that dies costs its client only."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import fedstrata
from fedstrata import rng
from fedstrata.engines.local import LocalEngine, available_workers
from fedstrata.experiment import load
from fedstrata.messages import Order, Reply
from fedstrata.prepared import Prepared, prepare
from fedstrata.tasks.task import Task


class Accident(Dataset):
    """Eight points whose reading is an accident, in every round or until a file says that it has happened."""

    def __init__(self, what: str, once: Path | None = None) -> None:
        self.what, self.once = what, once

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.once is None or not self.once.exists():
            if self.once is not None:
                self.once.touch()
            if self.what == "exit":
                os._exit(7)
            if self.what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("an accident")
        return torch.tensor([1.0, float(index)]), index % 2


def prepared(blobs: Any, clients: list[Any] | None = None, **settings: Any) -> Prepared:
    task = Task(
        model=lambda: nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.ReLU(), nn.Linear(4, 2)),
        clients=clients or [blobs(10 + k, k) for k in range(5)],
        held_out=[blobs(6, 50 + k) for k in range(len(clients) if clients else 5)],
        evaluation={"test": blobs(4500, 9)},
    )
    table = {"algorithm": settings.pop("algorithm", {"name": "fedavg"}), "training": {"epochs": 2, "batch_size": 4}}
    return prepare(load(table, settings=settings), task)


def train_orders(setup: Prepared, model: torch.Tensor, round: int = 1) -> list[Order]:
    mask = torch.ones(len(setup.layers), dtype=torch.bool)
    return [Order("train", round, 0, k, model=model, mask=mask) for k in range(len(setup.task.clients))]


def by_client(replies: Any) -> dict[tuple[int, int], Reply]:
    # an update lives in memory that the next exchange may use
    return {
        (r.client, r.part[0]): r.__class__(**{**vars(r), "update": None if r.update is None else r.update.clone()})
        for r in replies
    }


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_replies_do_not_depend_on_workers(blobs: Any, workers: int) -> None:
    setup = prepared(blobs)
    state = setup.first_state()
    parts = [Order("evaluate", 1, 0, rng.SERVER, model=state.model, dataset="test", part=(p, 3)) for p in range(3)]
    own = [Order("evaluate", 1, 0, k, model=state.model) for k in range(5)]
    answers = []
    for count in (1, workers):
        with LocalEngine(prepared(blobs).engine()._setup, count) as engine:
            assert engine.workers == count
            answers.append(
                [by_client(engine.exchange(orders)) for orders in (train_orders(setup, state.model), parts, own)]
            )
    for alone, shared in zip(*answers, strict=True):
        assert alone.keys() == shared.keys()
        for key, reply in alone.items():
            other = shared[key]
            assert reply.error is None
            assert other.error is None
            assert reply.metrics == other.metrics
            assert reply.size == other.size
            assert (reply.update is None) == (other.update is None)
            if reply.update is not None:
                assert torch.equal(reply.update, other.update)
                assert reply.update.abs().sum() > 0


@pytest.mark.parametrize("what", ["exit", "kill"])
def test_a_worker_that_dies_costs_its_client_only(blobs: Any, tmp_path: Path, what: str) -> None:
    """Once in round 1; from round 2 on the client is back, with a new worker."""
    clients = [blobs(8, 0), Accident(what, tmp_path / "happened"), blobs(8, 2), blobs(8, 3)]
    task = Task(model=lambda: nn.Linear(2, 2), clients=clients, evaluation={"test": blobs(20, 9)})
    table = {"training": {"rounds": 3}, "engine": {"workers": 2}}
    run = fedstrata.run(table, task=task, out=tmp_path / "run")
    code = 7 if what == "exit" else -9
    first, *others = run.history()
    assert first["lost"] == [{"client": 1, "why": f"failed: worker process died with exit code {code}"}]
    assert first["replies"] == 3
    assert [line["replies"] for line in others] == [4, 4]
    assert all(line["lost"] == [] for line in others)


@pytest.mark.parametrize("algorithm", [{"name": "fedavg"}, {"name": "fedldf", "n": 2}])
def test_a_worker_that_always_dies(blobs: Any, tmp_path: Path, algorithm: dict[str, Any]) -> None:
    clients = [blobs(8, 0), Accident("kill"), blobs(8, 2), blobs(8, 3)]
    task = Task(model=lambda: nn.Linear(2, 2), clients=clients, evaluation={"test": blobs(20, 9)})
    table = {"training": {"rounds": 2}, "engine": {"workers": 2}, "algorithm": algorithm}
    run = fedstrata.run(table, task=task, out=tmp_path / "run")
    lost = [line["lost"][0] for line in run.history()]
    assert [entry["client"] for entry in lost] == [1, 1]
    raising = Task(model=task.model, clients=[clients[0], Accident("raise"), *clients[2:]], evaluation=task.evaluation)
    other = fedstrata.run(table, task=raising, out=tmp_path / "other")
    if algorithm["name"] == "fedavg":  # nobody else was touched
        assert other.summary()["weights_sha256"] == run.summary()["weights_sha256"]


def test_who_kept_an_update_in_a_worker_that_died_is_lost_alone(blobs: Any) -> None:
    """FedLDF's second exchange needs the process that trained; if it is gone, a reply with an error says so."""
    setup = prepared(blobs, algorithm={"name": "fedldf", "n": 2})
    state = setup.first_state()
    mask = torch.ones(len(setup.layers), dtype=torch.bool)
    with LocalEngine(setup.engine()._setup, 2) as engine:
        orders = [Order("train", 1, 0, k, model=state.model, answer="scores") for k in range(5)]
        assert all(reply.error is None and reply.scores is not None for reply in engine.exchange(orders))
        victim = engine._crew._team[0]
        homes = dict(engine._crew._home)
        os.kill(victim.process.pid, signal.SIGKILL)
        victim.process.join()
        uploads = [Order("upload", 1, 0, k, mask=mask) for k in range(5)]
        replies = by_client(engine.exchange(uploads))
        assert len(replies) == 5
        for (client, _), reply in replies.items():
            assert (reply.error is None) == (homes[client] == 1), reply.error
        again = by_client(engine.exchange([Order("train", 2, 0, k, model=state.model, mask=mask) for k in range(5)]))
        assert all(reply.error is None or "train" in reply.error for reply in again.values())


def test_an_update_of_another_round_is_not_sent(blobs: Any) -> None:
    setup = prepared(blobs, algorithm={"name": "fedldf", "n": 2})
    state, mask = setup.first_state(), torch.ones(len(setup.layers), dtype=torch.bool)
    for workers in (1, 2):
        with LocalEngine(setup.engine()._setup, workers) as engine:
            list(engine.exchange([Order("train", 1, 0, 0, model=state.model, answer="scores")]))
            (reply,) = engine.exchange([Order("upload", 2, 0, 0, mask=mask)])
            assert reply.error == "LookupError: no update kept for round 2, attempt 0"


@pytest.mark.parametrize("workers", [1, 2])
def test_an_exception_in_a_client_is_a_reply(blobs: Any, workers: int) -> None:
    setup = prepared(blobs, [blobs(8, 0), Accident("raise"), blobs(8, 1)])
    with LocalEngine(setup.engine()._setup, workers) as engine:
        replies = by_client(engine.exchange(train_orders(setup, setup.first_state().model)))
    errors = {client: reply.error for (client, _), reply in replies.items()}
    assert errors.pop(1).startswith("RuntimeError: an accident")
    assert errors == {0: None, 2: None}


def test_outside_its_block_an_engine_refuses(blobs: Any) -> None:
    setup = prepared(blobs)
    for workers in (1, 2):
        engine = LocalEngine(setup.engine()._setup, workers)
        orders = train_orders(setup, setup.first_state().model)
        with pytest.raises(RuntimeError, match="outside its `with` block"):
            list(engine.exchange(orders))
        with engine:
            assert len(list(engine.exchange(orders))) == 5
            assert list(engine.exchange([])) == []
        with pytest.raises(RuntimeError, match="outside its `with` block"):
            list(engine.exchange(orders))


def test_workers_end_with_the_block(blobs: Any) -> None:
    setup = prepared(blobs)
    with LocalEngine(setup.engine()._setup, 3) as engine:
        processes = [worker.process for worker in engine._crew._team]
        assert all(process.is_alive() for process in processes)
    assert not any(process.is_alive() for process in processes)


def test_as_many_workers_as_there_is_work(blobs: Any) -> None:
    setup = prepared(blobs).engine()._setup
    assert LocalEngine(setup, 64).workers == 5
    assert LocalEngine(setup, 1).workers == 1
    assert 1 <= LocalEngine(setup).workers <= max(1, min(5, available_workers()))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_leaves_the_process_as_it_was(tiny: Any, tmp_path: Path, workers: int) -> None:
    torch.manual_seed(5)
    np.random.seed(6)
    random.seed(7)
    threads = torch.get_num_threads()
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    table = tiny({"engine.workers": workers, "algorithm": {"name": "fedldf", "n": 2}})
    run = fedstrata.run(table, out=tmp_path / "run")
    run.model()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert random.getstate() == before[2]
    assert torch.get_num_threads() == threads


def test_the_global_state_decides_nothing(tiny: Any, tmp_path: Path) -> None:
    digests = set()
    for number, threads in enumerate((1, 2)):
        before = torch.get_num_threads()
        torch.manual_seed(number)
        np.random.seed(number)
        torch.set_num_threads(threads)
        try:
            digests.add(fedstrata.run(tiny(), out=tmp_path / str(number)).summary()["weights_sha256"])
        finally:
            torch.set_num_threads(before)
    assert len(digests) == 1
