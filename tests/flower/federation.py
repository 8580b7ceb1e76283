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
from pathlib import Path

from deployment import BIN, PATIENCE

SOURCE = Path(__file__).parents[2] / "src"


REGISTERED = "registered: "
"""What server.sh says when nodes can come."""


class Federation:
    """A server and nodes that run until `stop`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
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

    def start(self) -> None:
        """server.sh, and every node.sh once the keys are registered."""
        self._serve()
        for node in sorted(self.folder.glob("node-*/node.sh")):
            self._script(str(node.relative_to(self.folder)))

    def restart_server(self) -> None:
        """SIGTERM to server.sh, and once more from the start; the nodes are left alone."""
        server = self.processes.pop(0)
        server.terminate()
        server.wait(60)
        self._serve()

    def run(self, name: str) -> Path:
        """start-run.sh, to its end; the run directory."""
        script = self.folder / "server" / "start-run.sh"
        done = subprocess.run(
            [script, name],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE,
            start_new_session=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr + self.log("server")[-2000:]
        return self.folder / "server" / "runs" / name

    def stop(self) -> list[int]:
        """SIGTERM, nodes first; how each script ended."""
        codes = []
        for process in reversed(self.processes):
            process.terminate()
        for process in reversed(self.processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            codes.append(-9 if process.poll() is None else process.returncode)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return codes

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _serve(self) -> None:
        before = self.log("server").count(REGISTERED) if (self.folder / "server.log").exists() else 0
        self._script("server/server.sh")
        self.processes.insert(0, self.processes.pop())
        deadline = time.monotonic() + PATIENCE
        while self.log("server").count(REGISTERED) == before:
            assert time.monotonic() < deadline, self.log("server")[-2000:]
            time.sleep(0.2)

    def _script(self, path: str) -> None:
        with (self.folder / f"{Path(path).parent.name}.log").open("ab") as log:
            process = subprocess.Popen(
                [self.folder / path],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)


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
