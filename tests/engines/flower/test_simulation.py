"""Flower's own simulation, with Ray: the local engine's bits, real faults, and a process that is killed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
pytest.importorskip("ray")


import fedstrata
from fedstrata.algorithms import NAMED
from fedstrata.nodes.environment import RECIPE
from fedstrata.runs.reader import Run
from tests.support.math import missing

pytestmark = pytest.mark.deployment

Same = Callable[..., None]


def on_both(path: Path, out: Path, algorithm: str | None = None, **settings: Any) -> tuple[Run, Run]:
    """The same recipe in a simulation and on the local engine."""
    flower = {**settings, "engine.name": "flower", "engine.workers": 2}
    return (
        fedstrata.run(path, algorithm=algorithm, settings=flower, out=out / "flower"),
        fedstrata.run(path, algorithm=algorithm, settings=settings, out=out / "local"),
    )


IN_EVERY_WAY = ("fedldf", "neuron_pruning", "adaptive_mu", "scaffold")
"""Scores and then layers, units of layers, what a rule remembers, what clients do. With all algorithms, runs over
Flower's messages are compared in test_engine.py; here `make faults` does so."""


@pytest.mark.parametrize(
    "algorithm", [name if name in IN_EVERY_WAY else pytest.param(name, marks=pytest.mark.campaign) for name in NAMED]
)
def test_every_algorithm_ends_in_the_local_engines_run(
    algorithm: str, recipe: Callable[..., Path], tmp_path: Path, same_run: Same
) -> None:
    path = recipe({"evaluation.on": ["test", "clients"], "evaluation.private": "initial"})
    flower, local = on_both(path, tmp_path, algorithm)
    assert flower.summary() == local.summary()
    same_run(flower.path, local.path, recipe=False)


FAULTY = '''
import time
import torch
import fedstrata


class Shard:
    """Client 1 raises, client 2 sleeps, client 3 has a sample that is not a number; client 0 and 4 are well."""

    def __init__(self, client):
        self.client = client
        self.inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(client))
        if client == 3:
            self.inputs[:] = float("nan")

    def __len__(self):
        return len(self.inputs)

    def batch(self, indices):
        if self.client == 1:
            raise OSError("disk on fire")
        if self.client == 2:
            time.sleep(3600)
        return self.inputs[indices], torch.from_numpy(indices) % 2


def task():
    test = Shard(0)
    return fedstrata.Task(
        model=lambda: torch.nn.Linear(3, 2), clients=[Shard(k) for k in range(5)], evaluation={"test": test}
    )
'''


def test_clients_that_raise_sleep_or_send_nan_cost_the_round_themselves_only(
    user_module: Callable[[str, str], str], tmp_path: Path
) -> None:
    user_module("faulty", FAULTY)
    table = {"name": "faulty", "task": {"function": "faulty:task"}, "training": {"rounds": 1}}
    settings = {"engine.name": "flower", "engine.workers": 2, "engine.timeout": 15.0}
    run = fedstrata.run(table, settings=settings, out=tmp_path / "run")
    [line] = run.history()
    assert line["replies"] == 2
    why = {client: str(status) for client, status in missing(line["lost"])}
    assert why.keys() == {1, 2, 3}
    assert why[1].startswith("failed: OSError: disk on fire (faulty.py")
    assert why[2] == "no reply: nothing within 15 s"
    assert why[3] == "not finite: update"
    assert "flower" not in [thread.name for thread in threading.enumerate()]  # it would wait for client 2 for an hour


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_process_that_is_killed_goes_on_and_ends_the_same(
    how: signal.Signals, recipe: Callable[..., Path], tmp_path: Path, spawn: Any, same_run: Same
) -> None:
    """FedLDF, killed when two rounds are stored, against a local run that was never stopped."""
    path, out = recipe({"training.rounds": 60}), tmp_path / "flower"
    process = spawn("run", path, "--algorithm", "fedldf:n=2", "--engine", "flower", "--out", out)
    wait_until(lambda: (out / "history.jsonl").exists() and len(Run(out).history()) >= 2, process)
    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode == (-how if how == signal.SIGKILL else 130)
    assert 2 <= len(Run(out).history()) < 60
    fedstrata.resume(out)
    local = fedstrata.run(path, algorithm="fedldf:n=2", out=tmp_path / "local")
    same_run(out, local.path, recipe=False)


def wait_until(condition: Callable[[], bool], process: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- other users of this machine -------------------------------------------------------------------------------------

ASK_RAY = """
import sys
from ray._raylet import GcsClient
print("answered", len(GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, timeout=10)))
"""


def test_nobody_else_gets_at_the_recipe_or_at_ray(recipe: Callable[..., Path], tmp_path: Path) -> None:
    """The actors run what the recipe names, and Ray what it is sent: both must be ours alone.

    Another user needs a way through every folder above a file to reach it, and Ray's token to have its ports answer.
    """
    found: dict[str, Any] = {}

    def look(line: Any) -> None:
        import ray

        file = Path(os.environ[RECIPE])
        found["open to others"] = [
            str(place)
            for place in (file.parent, *file.parent.rglob("*"))
            if not place.is_symlink() and _reachable_by_others(place)
        ]
        found["recipe"], found["folder"] = file.exists(), stat.S_IMODE(file.parent.stat().st_mode)
        found["ray is inside"] = Path(ray._private.worker.global_worker.node.get_temp_dir_path()).parent == file.parent
        worker: Any = ray._private.worker.global_worker
        address = worker.gcs_client.address
        token = {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
        bare = {name: value for name, value in os.environ.items() if name not in token}
        for who, variables in (("we", token), ("no token", {}), ("a wrong one", token | {"RAY_AUTH_TOKEN": "0" * 64})):
            command = [sys.executable, "-c", ASK_RAY, address]
            done = subprocess.run(command, env=bare | variables, capture_output=True, text=True, timeout=120)
            found[who] = "answered" in done.stdout

    settings = {"engine.name": "flower", "engine.workers": 1, "training.rounds": 1}
    fedstrata.run(recipe(), settings=settings, out=tmp_path / "run", on_round=look)
    assert found == {
        "open to others": [],
        "recipe": True,
        "folder": 0o700,
        "ray is inside": True,
        "we": True,
        "no token": False,
        "a wrong one": False,
    }
    assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", RECIPE} & set(os.environ)


def _reachable_by_others(place: Path) -> bool:
    """Whether a user that is not us, of no group of ours, can get to it: to a folder, and through those above."""
    return all(above.stat().st_mode & stat.S_IXOTH for above in place.parents) and bool(
        place.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IXOTH)
    )


def test_ray_may_have_been_used_before_and_can_be_used_afterwards(recipe: Callable[..., Path], tmp_path: Path) -> None:
    """Ray reads its settings when it is imported, so that a token of later would not reach it, or stay for ever."""
    script = f"""
import ray
import fedstrata
def own():
    ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", _node_ip_address="127.0.0.1")
    print(ray.get(ray.remote(lambda: "mine").remote()))
    ray.shutdown()
own()
settings = {{"engine.name": "flower", "engine.workers": 1, "training.rounds": 1}}
fedstrata.run({str(recipe())!r}, settings=settings, out={str(tmp_path / "run")!r})
own()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["mine", "mine"]
