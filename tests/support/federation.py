"""What `fedstrata flower init` wrote, started by its scripts and by nothing else."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w

from fedstrata.runs.reader import Run

BIN = Path(sys.executable).parent
SOURCE = Path(__file__).parents[2] / "src"
PATIENCE = 240.0

REGISTERED = "all keys are registered"
"""What server.sh says when nodes can come."""

LET_IN = "SuperNode ID"
"""What a node says when it was let in."""


class Federation:
    """A server and nodes, each with a log beside its folder, that run until `stop`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = os.environ | {
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(SOURCE),
            "RESTART": "1",
        }

    @classmethod
    def init(cls, folder: Path, *arguments: object) -> Federation:
        """`fedstrata flower init`."""
        command = [sys.executable, "-m", "fedstrata", "flower", "init", folder, *arguments, "--port", ports(5)]
        made = cls(folder)
        done = subprocess.run(list(map(str, command)), env=made.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return made

    # --- processes ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """server.sh, and every node.sh once the keys are registered."""
        self.serve()
        for node in sorted(path.parent.name for path in self.folder.glob("node-*/node.sh")):
            self.join(node)

    def serve(self) -> None:
        """server.sh, until nodes can come."""
        before = self.log("server").count(REGISTERED)
        self.launch("server", self.folder / "server" / "server.sh")
        wait_until(lambda: self.log("server").count(REGISTERED) > before, lambda: self.log("server")[-2000:])

    def join(self, node: str) -> None:
        """A node's node.sh."""
        self.launch(node, self.folder / node / "node.sh")

    def launch(self, name: str, *command: object, **environment: str) -> subprocess.Popen[bytes]:
        """A process in a session of its own, whose output goes to a log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                list(map(str, command)),
                cwd=self.folder,
                env=self.environment | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self.processes[name]

    def dismiss(self, name: str) -> int:
        """SIGTERM: a node signs off, a server closes its doors. How the script ended."""
        process = self.processes.pop(name)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        code = process.poll()
        _kill_group(process)
        return -signal.SIGKILL if code is None else code

    def kill(self, name: str) -> None:
        """SIGKILL to a script and everything it started."""
        _kill_group(self.processes.pop(name))

    def kill_server_app(self) -> None:
        """SIGKILL to the ServerApp's process, which the SuperLink started."""
        mine = f"FLWR_HOME={self.folder / 'server' / 'state'}".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_server = b"flwr-serverapp" in (process / "cmdline").read_bytes()
                if is_server and mine in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
        assert found, "there is no ServerApp"
        for number in found:
            os.kill(number, signal.SIGKILL)

    def stop(self) -> dict[str, int]:
        """End everything, the server last; how each script ended."""
        return {name: self.dismiss(name) for name in sorted(self.processes)}

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    # --- runs ---------------------------------------------------------------------------------------------------------

    def change(self, where: str, settings: dict[str, Any]) -> None:
        """Other values in the recipe of the server or of a node."""
        from fedstrata.recipes.tables import set_key

        path = self.folder / where / "recipe.toml"
        table = tomllib.loads(path.read_text())
        for key, value in settings.items():
            set_key(table, key, value)
        path.write_text(tomli_w.dumps(table))

    def submit(self, name: str) -> Path:
        """start-run.sh; the run directory that is being made."""
        self.launch(f"run-{name}", self.folder / "server" / "start-run.sh", name)
        return self.folder / "server" / "runs" / name

    def finish(self, name: str) -> int:
        """Wait for start-run.sh to end, and say how it did."""
        return self.processes.pop(f"run-{name}").wait(2 * PATIENCE)

    def run(self, name: str) -> Path:
        """start-run.sh to a good end; the run directory."""
        out = self.submit(name)
        assert self.finish(name) == 0, self.log(f"run-{name}")[-3000:] + self.log("server")[-2000:]
        return out


def history(out: Path) -> list[Any]:
    """A run's rounds, as far as it went."""
    return Run(out).history() if (out / "history.jsonl").exists() else []


def wait_until(condition: Callable[[], Any], problem: Callable[[], str] | str, every: float = 0.2) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, problem if isinstance(problem, str) else problem()
        time.sleep(every)


def ports(count: int) -> int:
    """The first of so many ports in a row that nobody uses now."""
    while True:
        first = random.SystemRandom().randrange(20000, 32000)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
