"""Whole Flower apps with `fedstrata.flower`, in Flower's own processes (`make test-deployment`)."""

from __future__ import annotations

import difflib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import reference
from tests.support.flower import DROP_IN

pytestmark = pytest.mark.deployment

HERE = Path(__file__).parent
CLIENTS = 4


@pytest.fixture
def flower(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A SuperLink on the loopback that simulates nodes, or has `request.param` SuperNodes.

    `run(app, options)` waits for a run, and `run.status()` is what Flower says of it.

    Whatever it started, each in a session of its own, ends with the test.
    """
    supernodes = getattr(request, "param", 0)
    port, *node_ports = free_ports(1 + supernodes)
    home = tmp_path / "flwr-home"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    capture = tmp_path / "capture"
    capture.mkdir()
    binaries = Path(sys.executable).parent
    environment = os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, (HERE / "stand_ins", HERE.parents[1] / "src"))),
        "FLOWER_CAPTURE": str(capture),
    }
    log = tmp_path / "flower.log"
    processes: list[subprocess.Popen[bytes]] = []

    def launch(*command: str) -> None:
        with log.open("a") as out:
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    cwd=tmp_path,
                    start_new_session=True,
                )
            )

    simulation = [] if supernodes else ["--simulation"]
    launch("flower-superlink", "--insecure", *simulation, "--host", "127.0.0.1", "--port", str(port))

    def run(app: Path, **options: Any) -> dict[int, dict[str, Any]]:
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        for at, node_port in enumerate(node_ports):
            address = ["--superlink", f"127.0.0.1:{port}", "--host", "127.0.0.1", "--port", str(node_port)]
            config = f"partition-id={at} num-partitions={supernodes}"
            launch("flower-supernode", "--insecure", *address, "--node-config", config)
        config = " ".join(f"{key}={json.dumps(value)}" for key, value in options.items())
        federation = f"num-supernodes={CLIENTS} client-resources-num-cpus=1 init-args-num-cpus=2"
        command = ["flwr", "run", str(app), "here", "--stream"]
        if not supernodes:
            command += ["--federation-config", federation]
        finished = subprocess.run(
            [*command, "--run-config", config],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        run.log = finished.stdout + finished.stderr  # type: ignore[attr-defined]
        told = {int(path.stem): json.loads(path.read_text()) for path in capture.glob("*.json")}
        assert told, finished.stdout + finished.stderr + log.read_text()
        return told

    def status() -> str:
        listed = subprocess.run(
            ["flwr", "ls", "here", "--format", "json"], env=environment, capture_output=True, text=True, check=True
        )
        return str(json.loads(listed.stdout)["runs"][0]["status"])

    run.capture, run.status = capture, status  # type: ignore[attr-defined]
    try:
        yield run
    finally:
        for process in reversed(processes):
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def check_against_reference(told: dict[int, dict[str, Any]], capture: Path, rounds: int) -> None:
    """Every aggregate is FedLayerWise, computed by the slow reference from the replies that came in."""
    angles: dict[Any, float] = {}
    counts: dict[Any, int] = {}
    assert sorted(told) == list(range(1, rounds + 1))
    for number in sorted(told):
        answers = told[number]["replies"]
        assert not [answer for answer in answers if "error" in answer]
        before, after = (dict(np.load(capture / f"{number}-{when}.npz")) for when in ("before", "after"))
        replies = [dict(np.load(capture / f"{number}-{answer['node']}.npz")) for answer in answers]
        grouping = told[number]["layers"]
        updates = [{name: reply[name].astype(float) - before[name] for name in before} for reply in replies]
        sent = [{layer: np.ones(200, dtype=bool)[: before[g[0]].shape[0]] for layer, g in grouping.items()}] * len(
            replies
        )
        weights = reference.weigh(
            updates,
            sent,
            {at: answer["size"] for at, answer in enumerate(answers)},
            [answer["node"] for answer in answers],
            grouping,
            set(before),
            reference.Rules(weighting="fedlayerwise"),
            number,
            angles,
            counts,
        )
        expected = reference.aggregate(
            {n: a.astype(float) for n, a in before.items()}, updates, sent, weights, grouping
        )
        for name, value in expected.items():
            np.testing.assert_allclose(after[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
        shares = weights / weights.sum(0)
        order = [told[number]["nodes"].index(answer["node"]) for answer in answers]
        np.testing.assert_allclose(np.array(told[number]["weight"])[order], shares, rtol=1e-3)
        sizes = np.array([answer["size"] for answer in answers])
        assert np.abs(shares - 1 / len(shares)).max() > 0.02, "uniform"
        assert np.abs(shares - (sizes / sizes.sum())[:, None]).max() > 0.02, "FedAvg's"
        carried = sum(answer["bytes"] for answer in answers)
        arrays = sum(answer["arrays"] for answer in answers)
        assert told[number]["upload"] < carried <= told[number]["upload"] + 256 * arrays + 2048 * len(answers)


@pytest.mark.skipif("FLOWER_EXAMPLES" not in os.environ, reason="$FLOWER_EXAMPLES: the examples folder of Flower's git")
def test_quickstart_pytorch_as_flower_ships_it(flower: Any, tmp_path: Path) -> None:
    """Its own ClientApp and training code; only the packages that would fetch data from the hub are stand-ins."""
    original = Path(os.environ["FLOWER_EXAMPLES"]) / "quickstart-pytorch"
    app = tmp_path / "quickstart-pytorch"
    shutil.copytree(original, app)
    for name, lines in DROP_IN.items():
        text = (original / name).read_text()
        if name == "pyproject.toml":
            text = text.replace("dependencies = [\n", f"dependencies = [\n{lines[0][1:]}\n", 1)
        else:
            text = text.replace(lines[0][1:], lines[1][1:]).replace(lines[2][1:], lines[3][1:])
        (app / name).write_text(text)
        difference = difflib.unified_diff((original / name).read_text().splitlines(), text.splitlines(), n=0)
        assert [line for line in difference if not line.startswith(("---", "+++", "@@"))] == lines
    told = flower(app, **{"num-server-rounds": 3})
    check_against_reference(told, flower.capture, 3)


def test_a_whole_app(flower: Any) -> None:
    """A stock reply's way through Flower's processes: FedLayerWise against the reference."""
    check_against_reference(flower(HERE / "app", rounds=2), flower.capture, 2)


def test_a_whole_app_with_the_clients_half(flower: Any) -> None:
    """FedLDF's second exchange and FedProx's proximal term: two clients' uploads of each layer, all scores."""
    told = flower(HERE / "app", rounds=2, algorithm="mixed")
    assert sorted(told) == [1, 2]
    for table in told.values():
        assert set(table["status"]) <= {"ok", "nothing chosen"}, table["status"]
        assert table["upload"] == 2 * (4 * 8 + 8 + 8 + 1) * 4 + CLIENTS * 2 * 4
        assert (np.array(table["weight"]) > 0).sum(0).tolist() == [2, 2]
        np.testing.assert_allclose(table["mu"], 0.25)


def test_a_run_that_cannot_train_has_failed(flower: Any) -> None:
    """No client pulls: the run ends after its first round, and Flower says that it failed, and why."""
    told = flower(HERE / "app", rounds=3, algorithm="mixed", fault="no pull")
    assert sorted(told) == [1]
    assert flower.status() == "finished:failed"
    assert "ClientAppError: round 1: all 4 nodes answered, and no answer can be used; node" in flower.log
    assert "the client did not apply fedprox: call local.pull() between backward and the optimiser's step" in flower.log


@pytest.mark.parametrize("flower", [3], indirect=True)
@pytest.mark.parametrize("algorithm", ["fedlayerwise", "mixed"])
def test_an_array_that_flower_cannot_read_costs_one_reply(flower: Any, algorithm: str) -> None:
    """On SuperNodes, in the first exchange or in the second: client 0 sends what Flower cannot put together again."""
    told = flower(HERE / "app", rounds=2, algorithm=algorithm, fault="malformed", nodes=3)
    assert flower.status() == "finished:completed"
    assert sorted(told) == [1, 2]
    for table in told.values():
        assert sum(word in ("ok", "nothing chosen") for word in table["status"]) == 2, table["status"]
        assert sum(word.startswith("refused: Flower cannot read it: TypeError") for word in table["status"]) == 1
