"""A SuperLink and SuperNodes on the loopback interface, with TLS and node authentication, as processes of their own."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

BIN = Path(sys.executable).parent
PATIENCE = 240.0

APP = """
[project]
name = "fedstrata-test"
version = "1.0.0"
description = ""
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedstrata"

[tool.flwr.app.components]
serverapp = "fedstrata.engines.flower.server:app"
clientapp = "fedstrata.engines.flower.client:app"

[tool.flwr.app.config]
recipe = ""
out = ""
data = ""
clients = 0
min-clients = 0
wait = 120.0
"""


class Deployment:
    """A SuperLink that runs until `stop`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        home = folder / "home"
        for directory in (home, folder / "app"):
            directory.mkdir(parents=True)
        (folder / "app" / "pyproject.toml").write_text(APP)
        self.environment = os.environ | {
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }
        make_certificates(folder)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{folder / "ca.crt"}"\n'
        )
        self.start(
            "superlink",
            *("flower-superlink", "--host", "127.0.0.1", "--port", self.port, "--enable-supernode-auth"),
            *("--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key"),
            "--disable-runtime-dependency-installation",
        )
        self.wait_until(self._answers, "the SuperLink does not answer")

    # --- processes ----------------------------------------------------------------------------------------------------

    def start(self, name: str, *command: object) -> subprocess.Popen[bytes]:
        """A process whose output goes to `<name>.log`."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [str(BIN / str(command[0])), *map(str, command[1:])],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def kill(self, name: str) -> None:
        """SIGKILL to a process and everything it started."""
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def dismiss(self, name: str) -> None:
        """SIGTERM: a SuperNode signs off, so that its key can be used again at once."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.processes[name].terminate()
            self.processes[name].wait(20)
        self.kill(name)

    def kill_server_app(self) -> None:
        """SIGKILL to the ServerApp's process, which the SuperLink started for us."""
        mine = f"FLWR_HOME={self.environment['FLWR_HOME']}".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_server = b"flwr-serverapp" in (process / "cmdline").read_bytes()
                if is_server and mine in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
        assert found, "there is no ServerApp"
        for number in found:
            os.kill(number, signal.SIGKILL)

    def stop(self) -> None:
        """End everything."""
        for name in reversed(list(self.processes)):
            self.kill(name)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def flwr(self, *command: object) -> str:
        """`flwr …`, and what it prints."""
        done = subprocess.run(
            [str(BIN / "flwr"), *map(str, command)],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def wait_until(self, condition: Callable[[], Any], problem: str, every: float = 0.2) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, problem
            time.sleep(every)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    # --- nodes and runs -----------------------------------------------------------------------------------------------

    def register(self, client: int) -> None:
        """A key for a client's node, known to the SuperLink."""
        make_key(self.folder / f"node{client}")
        self.flwr("supernode", "register", self.folder / f"node{client}.pub", "here", "--format", "json")

    def node(self, client: int, recipe: Path, *options: object, key: str | None = None) -> subprocess.Popen[bytes]:
        """Start a client's SuperNode."""
        return self.start(
            f"node{client}",
            *("flower-supernode", "--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1"),
            *("--port", free_port(), "--root-certificates", "ca.crt"),
            *("--auth-supernode-private-key", key or f"node{client}"),
            *("--node-config", f'partition-id={client} recipe="{recipe}"'),
            *options,
        )

    def submit(self, recipe: Path, out: Path) -> int:
        """`flwr run`; the id of the run."""
        config = f'recipe="{recipe}" out="{out}"'
        answer = json.loads(self.flwr("run", "app", "here", "--run-config", config, "--format", "json"))
        return int(answer["run-id"])

    def status(self, run: int) -> str:
        """What the SuperLink says of a run."""
        runs = json.loads(self.flwr("ls", "here", "--run-id", run, "--format", "json"))["runs"]
        return str(runs[0]["status"])

    def finish(self, run: int) -> str:
        """Wait for a run's end, and say how it ended."""
        self.wait_until(lambda: self.status(run).startswith("finished"), f"run {run} does not end", every=4)
        return self.status(run)


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_key(path: Path) -> None:
    """An EC key pair as OpenSSH writes it: `path` and `path.pub`."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = serialization.PrivateFormat.OpenSSH
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption()))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_name(f"{path.name}.pub").write_bytes(public)


def make_certificates(folder: Path) -> None:
    """A certificate authority, and the SuperLink's certificate for 127.0.0.1."""
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fedstrata test CA")])
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)

    def certificate(name: x509.Name, key: Any, *extensions: tuple[Any, bool]) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    ca = (x509.BasicConstraints(ca=True, path_length=None), True)
    address = (x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
    (folder / "ca.crt").write_bytes(certificate(issuer, authority, ca))
    (folder / "server.crt").write_bytes(certificate(subject, server, address))
    (folder / "server.key").write_bytes(
        server.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
    )
