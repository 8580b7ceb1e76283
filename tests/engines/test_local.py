"""The local engine: workers change who computes, never what; nor does one that dies."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import fedstrata
from fedstrata.clients.client import Client
from fedstrata.core import rng
from fedstrata.core.errors import ModelError
from fedstrata.core.messages import Answer, Order, Reply
from fedstrata.core.status import Status
from fedstrata.engines import local
from fedstrata.engines.local import LocalEngine, available_workers
from fedstrata.recipes.experiment import Experiment, build_experiment
from fedstrata.recipes.schema import load
from fedstrata.runs.reader import Run
from fedstrata.tasks.task import Task
from tests.support import faults
from tests.support.faults import PLACES, DoomedPipe, Moments
from tests.support.math import missing


class Accident(Dataset[Any]):
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


def experiment(blobs: Any, clients: list[Any] | None = None, **settings: Any) -> Experiment:
    task = Task(
        model=lambda: nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.ReLU(), nn.Linear(4, 2)),
        clients=clients or [blobs(10 + k, k) for k in range(5)],
        held_out=[blobs(6, 50 + k) for k in range(len(clients) if clients else 5)],
        evaluation={"test": blobs(4500, 9)},
    )
    table = {"algorithm": settings.pop("algorithm", {"name": "fedavg"}), "training": {"epochs": 2, "batch_size": 4}}
    return build_experiment(load(table, settings=settings), task)


def train_orders(setup: Experiment, model: torch.Tensor, round: int = 1) -> list[Order]:
    mask = torch.ones(len(setup.layers), dtype=torch.bool)
    return [Order("train", round, 0, k, model=model, mask=mask) for k in range(len(setup.task.clients))]


def by_client(answers: Iterable[tuple[Order, Answer]]) -> dict[tuple[int, int], Answer]:
    """By client and part; an update lies in memory that the next exchange may use."""
    return {
        (order.client, order.part[0]): (
            replace(answer, update=answer.update.clone())
            if isinstance(answer, Reply) and answer.update is not None
            else answer
        )
        for order, answer in answers
    }


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_replies_do_not_depend_on_workers(blobs: Any, workers: int) -> None:
    setup = experiment(blobs)
    state = setup.first_state()
    parts = [Order("evaluate", 1, 0, rng.SERVER, model=state.model, dataset="test", part=(p, 3)) for p in range(3)]
    own = [Order("evaluate", 1, 0, k, model=state.model) for k in range(5)]
    answers = []
    for count in (1, workers):
        with LocalEngine(experiment(blobs).setup, count) as engine:
            assert engine.workers == count
            answers.append(
                [by_client(engine.exchange(orders)) for orders in (train_orders(setup, state.model), parts, own)]
            )
    for alone, shared in zip(*answers, strict=True):
        assert alone.keys() == shared.keys()
        for key, reply in alone.items():
            other = shared[key]
            assert isinstance(reply, Reply)
            assert isinstance(other, Reply)
            assert reply.metrics == other.metrics
            assert reply.size == other.size
            assert (reply.update is None) == (other.update is None)
            if reply.update is not None and other.update is not None:
                assert torch.equal(reply.update, other.update)
                assert reply.update.abs().sum() > 0


# --- workers that die ------------------------------------------------------------------------------------------------


def accident_run(blobs: Any, accident: Accident, path: Path, algorithm: str = "fedavg") -> Run:
    clients = [blobs(8, 0), accident, blobs(8, 2), blobs(8, 3)]
    task = Task(model=lambda: nn.Linear(2, 2), clients=clients, evaluation={"test": blobs(20, 9)})
    table = {"training": {"rounds": 2}, "engine": {"workers": 2}, "algorithm": {"name": algorithm}}
    return fedstrata.run(table, task=task, out=path)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedldf"])
@pytest.mark.parametrize("what", ["exit", "kill"])
def test_a_worker_that_dies_once_changes_nothing(
    blobs: Any, tmp_path: Path, same_run: Any, what: str, algorithm: str
) -> None:
    happened = tmp_path / "happened"
    run = accident_run(blobs, Accident(what, happened), tmp_path / "run", algorithm)
    assert happened.exists()
    accident_run(blobs, Accident(what, happened), tmp_path / "undisturbed", algorithm)
    same_run(tmp_path / "run", tmp_path / "undisturbed")
    assert all(line["lost"] == [] for line in run.history())


@pytest.mark.parametrize(("what", "code"), [("exit", 7), ("kill", -9)])
def test_a_worker_that_dies_twice_costs_its_client_only(blobs: Any, tmp_path: Path, what: str, code: int) -> None:
    """In every round; the others' updates are what they are beside a client that raises."""
    run = accident_run(blobs, Accident(what), tmp_path / "run")
    why = Status("failed", f"worker process died 2 times, the last time with exit code {code}")
    assert [missing(line["lost"]) for line in run.history()] == [[(1, why)]] * 2
    raising = accident_run(blobs, Accident("raise"), tmp_path / "raising")
    assert raising.summary()["weights_sha256"] == run.summary()["weights_sha256"]


def test_workers_that_never_begin_end_no_round_late(blobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which no process lives: every client fails, and nobody waits."""
    setup = experiment(blobs)
    with LocalEngine(setup.setup, 2) as engine:
        monkeypatch.setattr(local, "_work", lambda *args: os._exit(3))
        kill_all(engine)
        replies = by_client(engine.exchange(train_orders(setup, setup.first_state().model)))
    assert set(replies.values()) == {Status("failed", "worker process died 10 times, the last time with exit code 3")}
    assert len(replies) == 5


def kill_all(engine: LocalEngine) -> None:
    for worker in engine._crew._team:
        worker.process.kill()
        worker.process.join()


def test_what_was_kept_outlives_its_worker(blobs: Any) -> None:
    """FedLDF's second exchange, and an evaluation, after every worker has died: as in this process alone."""
    setup = experiment(blobs, algorithm={"name": "fedldf", "n": 2})
    model, mask = setup.first_state().model, torch.arange(len(setup.layers)) == 0
    asked = (
        [Order("train", 1, 0, k, model=model, answer="scores") for k in range(5)],
        [Order("upload", 1, 0, k, mask=mask) for k in range(5)],
        [Order("evaluate", 1, 0, rng.SERVER, model=model, dataset="test", part=(p, 3)) for p in range(3)],
    )
    answers: dict[int, list[Any]] = {}
    for workers in (1, 2):
        with LocalEngine(experiment(blobs, algorithm={"name": "fedldf", "n": 2}).setup, workers) as engine:
            for orders in asked:
                if workers == 2:
                    kill_all(engine)
                answers.setdefault(workers, []).append(by_client(engine.exchange(orders)))
    for alone, shared in zip(answers[1], answers[2], strict=True):
        assert alone.keys() == shared.keys()
        for key, reply in alone.items():
            assert (reply.size, reply.metrics) == (shared[key].size, shared[key].metrics)
            for ours, theirs in zip(tensors(reply), tensors(shared[key]), strict=True):
                assert torch.equal(ours, theirs)
    assert all(reply.update.any() for reply in answers[2][1].values())
    assert all(reply.scores is not None for reply in answers[2][0].values())


def tensors(reply: Reply) -> list[torch.Tensor]:
    return [value for value in vars(reply).values() if isinstance(value, torch.Tensor)]


def test_a_reply_that_has_come_is_used_though_its_worker_died(
    blobs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every order is carried out once: five of them by at least two workers, the first of which dies after a reply."""
    (tmp_path / "kills").mkdir()
    moments = Moments(tmp_path / "kills", 0)
    moments.left[PLACES.index("replied")] = 1
    work: Any = local._work
    answer = Client.answer

    def doomed(client: Any, post: Any, begun: Any, at: int, pipe: Any, inherited: Any) -> None:
        work(client, post, begun, at, DoomedPipe(pipe, moments), inherited)

    def counted(self: Client, order: Order, row: Any = None) -> Answer:
        with (tmp_path / "answered").open("a") as file:
            file.write(f"{order.client}\n")
        return answer(self, order, row)

    monkeypatch.setattr(local, "_work", doomed)
    monkeypatch.setattr(Client, "answer", counted)
    setup = experiment(blobs)
    with LocalEngine(setup.setup, 2) as engine:
        replies = by_client(engine.exchange(train_orders(setup, setup.first_state().model)))
    assert all(isinstance(reply, Reply) for reply in replies.values())
    assert moments.kills() == {"replied": 1}
    assert sorted((tmp_path / "answered").read_text().split()) == ["0", "1", "2", "3", "4"]


SOME = ("two exchanges", "clients remember", "extended")


def test_kills_at_any_moment_change_nothing(tmp_path: Path) -> None:
    """A sample of `make faults`."""
    outcome = faults.campaign(tmp_path, 30, seed=1, kinds=SOME, random_runs=1)
    assert (outcome.differences, outcome.hangs) == ([], [])
    assert outcome.kills.total() >= 30


def test_the_campaign_finds_orders_that_are_not_given_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_TURNS", 1)
    assert faults.campaign(tmp_path, 1, seed=1, kinds=SOME, random_runs=0).differences


def test_the_campaign_finds_a_run_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "KINDS", {"stuck": lambda path: time.sleep(60) if path.parent.name == "1" else None})
    outcome = faults.campaign(tmp_path, 0, kinds=["stuck"], random_runs=1, limit=2.0)
    assert outcome.hangs == ["run 1, stuck, 0 kills at random"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_model_error_ends_the_exchange(blobs: Any, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    def refuse(self: Client, order: Order, row: Any = None) -> Reply:
        raise ModelError("Sequential: 0.weight is another in a second training from the same state")

    monkeypatch.setattr(Client, "answer", refuse)
    setup = experiment(blobs)
    with LocalEngine(setup.setup, workers) as engine:
        processes = [worker.process for worker in engine._crew._team] if engine._crew else []
        with pytest.raises(ModelError, match=r"^Sequential: 0\.weight is another in a second training"):
            list(engine.exchange(train_orders(setup, setup.first_state().model)))
    assert not any(process.is_alive() for process in processes)


# --- everything else -------------------------------------------------------------------------------------------------


def test_the_longest_orders_are_given_out_first(blobs: Any) -> None:
    """Samples × work: 10·5, 11·1, 12·4, 13·3 and 14·1 of clients 0 to 4, for one worker."""
    setup = experiment(blobs)
    client = Client(setup.setup)
    orders = train_orders(setup, setup.first_state().model)
    orders = [replace(order, work=work) for order, work in zip(orders, (5, 1, 4, 3, 1), strict=True)]
    crew = local._Crew(client, 1, 5, client.setup.task.sizes())
    try:
        assert [order.client for order, _ in crew.exchange(orders)] == [0, 2, 3, 4, 1]
    finally:
        crew.stop()


def test_an_update_of_another_round_is_not_sent(blobs: Any) -> None:
    setup = experiment(blobs, algorithm={"name": "fedldf", "n": 2})
    state, mask = setup.first_state(), torch.ones(len(setup.layers), dtype=torch.bool)
    for workers in (1, 2):
        with LocalEngine(setup.setup, workers) as engine:
            list(engine.exchange([Order("train", 1, 0, 0, model=state.model, answer="scores")]))
            ((_, answer),) = engine.exchange([Order("upload", 2, 0, 0, mask=mask)])
            assert isinstance(answer, Status)
            assert str(answer).startswith("failed: LookupError: no update kept for round 2, attempt 0")


@pytest.mark.parametrize("workers", [1, 2])
def test_an_exception_in_a_client_is_an_answer(blobs: Any, workers: int) -> None:
    setup = experiment(blobs, [blobs(8, 0), Accident("raise"), blobs(8, 1)])
    with LocalEngine(setup.setup, workers) as engine:
        replies = by_client(engine.exchange(train_orders(setup, setup.first_state().model)))
    failed = replies.pop((1, 0))
    assert isinstance(failed, Status)
    assert str(failed).startswith("failed: RuntimeError: an accident")
    assert {key: type(reply) for key, reply in replies.items()} == {(0, 0): Reply, (2, 0): Reply}


def test_outside_its_block_an_engine_refuses(blobs: Any) -> None:
    setup = experiment(blobs)
    for workers in (1, 2):
        engine = LocalEngine(setup.setup, workers)
        orders = train_orders(setup, setup.first_state().model)
        with pytest.raises(RuntimeError, match="outside its `with` block"):
            list(engine.exchange(orders))
        with engine:
            assert len(list(engine.exchange(orders))) == 5
            assert list(engine.exchange([])) == []
        with pytest.raises(RuntimeError, match="outside its `with` block"):
            list(engine.exchange(orders))


def test_workers_end_with_the_block(blobs: Any) -> None:
    setup = experiment(blobs)
    with LocalEngine(setup.setup, 3) as engine:
        processes = [worker.process for worker in engine._crew._team]
        assert all(process.is_alive() for process in processes)
    assert not any(process.is_alive() for process in processes)


def test_as_many_workers_as_there_is_work(blobs: Any) -> None:
    setup = experiment(blobs).setup
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
