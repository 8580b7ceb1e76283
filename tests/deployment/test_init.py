"""`fedstrata flower init`: what it writes, who may read it, and what its scripts do when a node ends."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import node_data

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedstrata.deployment import credentials
from fedstrata.recipes.experiment import build_experiment
from fedstrata.recipes.schema import load
from fedstrata.tasks import datasets
from tests.support.processes import process_environment

Cli = Callable[..., Any]


@pytest.fixture
def made(cli: Cli, recipe: Callable[..., Path], tmp_path: Path) -> Path:
    answer = cli("flower", "init", tmp_path / "made", recipe(), "--nodes", 3, "--server-address", "fed.example.org")
    assert answer.code == 0, answer.err
    return tmp_path / "made"


# --- the files -------------------------------------------------------------------------------------------------------


def test_each_machine_has_a_folder_with_what_it_needs_and_no_more(made: Path) -> None:
    assert {path.name for path in made.iterdir()} == {"README.md", "server", "node-0", "node-1", "node-2"}
    for client in range(3):
        node = made / f"node-{client}"
        assert {path.name for path in node.iterdir()} == {
            "ca.crt", "key", "node.env", "node.sh", "node.toml", "recipe.toml",
        }  # fmt: skip
        config = tomllib.loads((node / "node.toml").read_text())
        assert config == {"partition-id": client, "data": ""}
        assert "SUPERLINK=fed.example.org:8000\n" in (node / "node.env").read_text()
        assert (node / "recipe.toml").read_bytes() == (made / "server" / "recipe.toml").read_bytes()
        assert (node / "ca.crt").read_bytes() == (made / "server" / "certificates" / "ca.crt").read_bytes()
    assert len(build_experiment(load(made / "server" / "recipe.toml")).task.clients) == 3


def test_only_the_owner_reads_secrets(made: Path) -> None:
    secrets = {path for path in made.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()}
    expected = {made / f"node-{client}" / "key" for client in range(3)} | {made / "server/certificates/server.key"}
    assert secrets == expected
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in secrets)
    assert made.stat().st_mode & 0o777 == 0o700


def test_nothing_secret_is_where_flower_packs_the_app(made: Path) -> None:
    assert [path.name for path in (made / "server" / "app").iterdir()] == ["pyproject.toml"]


def test_every_public_key_is_that_of_its_node(made: Path) -> None:
    numbers = set()
    for client in range(3):
        private = load_ssh_private_key((made / f"node-{client}" / "key").read_bytes(), None)
        public = load_ssh_public_key((made / "server" / "nodes" / f"node-{client}.pub").read_bytes())
        assert private.public_key() == public
        numbers.add(public.public_numbers())
    assert len(numbers) == 3


@pytest.mark.parametrize(
    ("name", "accepted"),
    [("fed.example.org", True), ("localhost", True), ("127.0.0.1", True), ("other.org", False), ("127.0.0.2", False)],
)
def test_tls_with_these_certificates(name: str, accepted: bool, made: Path) -> None:
    """A handshake as a node makes it, with all that OpenSSL can check, under the name that it thinks it calls."""
    folder = made / "server" / "certificates"
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(folder / "server.crt", folder / "server.key")
    theirs = ssl.create_default_context(cafile=made / "node-0" / "ca.crt")
    theirs.verify_flags |= ssl.VERIFY_X509_STRICT
    left, right = socket.socketpair()

    def answer() -> None:
        try:
            ours.wrap_socket(left, server_side=True).close()
        except OSError:
            left.close()

    server = threading.Thread(target=answer)
    server.start()
    try:
        if accepted:
            theirs.wrap_socket(right, server_hostname=name).close()
        else:
            with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
                theirs.wrap_socket(right, server_hostname=name)
    finally:
        right.close()
        server.join()


def test_another_federations_authority_is_not_believed(made: Path) -> None:
    theirs = ssl.create_default_context(cadata=credentials.certificates(["localhost"], 1).authority.decode())
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(made / "server/certificates/server.crt", made / "server/certificates/server.key")
    hello, answer = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = theirs.wrap_bio(answer, hello, server_hostname="localhost")
    server = ours.wrap_bio(hello, answer, server_side=True)
    for half in (client, server):
        with pytest.raises(ssl.SSLWantReadError):
            half.do_handshake()
    with pytest.raises(ssl.SSLCertVerificationError):
        client.do_handshake()


def test_local_data_looks_like_the_recipes_own(cli: Cli, recipe: Callable[..., Path], tmp_path: Path) -> None:
    """Shape, classes, mean and deviation of the embedded digits, worked out here once more."""
    answer = cli("flower", "init", tmp_path / "made", recipe(), "--nodes", 2, "--local-data")
    assert answer.code == 0, answer.err
    task = tomllib.loads((tmp_path / "made/node-1/recipe.toml").read_text())["task"]
    images = datasets.load("mnist-mini").train_images.double() / 255
    assert (task["dataset"], "partition" in task) == ("nodes", False)
    assert task["nodes"]["shape"] == [1, 28, 28]
    assert task["nodes"]["classes"] == list("0123456789")
    assert task["nodes"]["clients"] == 2
    assert task["nodes"]["mean"] == pytest.approx([images.mean().item()], abs=1e-4)
    assert task["nodes"]["std"] == pytest.approx([images.std(correction=0).item()], abs=1e-4)
    assert "Say in its `node.toml` where its data is" in (tmp_path / "made/README.md").read_text()


def test_local_data_of_another_shape(cli: Cli, recipe: Callable[..., Path], tmp_path: Path) -> None:
    options = ("--nodes", 2, "--local-data", "--shape", "16", "--classes", "ok, broken")
    answer = cli("flower", "init", tmp_path / "made", recipe(), *options)
    assert answer.code == 0, answer.err
    made = load(tmp_path / "made/server/recipe.toml")
    assert made.task.inputs == "unit"
    assert made.task.nodes is not None
    assert made.task.nodes.class_names == ("ok", "broken")
    assert build_experiment(made).layers.numel == 16 * 4 + 4 + 4 * 2 + 2


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--server-address", "fed.example.org:8000"], "--server-address = 'fed.example.org:8000'"),
        (["--server-address", "$(reboot)"], "--server-address = '$(reboot)'"),
        (["--server-address", "1.2.3"], "--server-address = '1.2.3'"),
        (["--server-address", "a\nb"], "--server-address = 'a\\nb'"),
        (["--port", "0"], "--port = 0"),
        (["--port", "65534"], "--port = 65534"),
        (["--shape", "1,2"], "--shape = '1,2': goes with --local-data"),
        (["--local-data", "--shape", "a", "--classes", "2"], "--shape = 'a'"),
        (["--local-data", "--nodes", "2", "--classes", "1"], "task.nodes.classes = 1"),
        (["--local-data"], "--nodes"),
        (["--nodes", "3", "--set", "task.partition.name=iid_mix", "--set", "task.partition.iid=1",
          "--set", "task.partition.non_iid=1", "--set", "task.partition.classes=1",
          "--set", "task.partition.samples=5"], "--nodes = 3: the recipe has 2 clients"),
        (["--algorithm", "fedxyz"], "algorithm.name = 'fedxyz'"),
    ],
)  # fmt: skip
def test_nonsense_is_one_line_and_leaves_nothing_behind(
    options: list[str], problem: str, cli: Cli, recipe: Callable[..., Path], tmp_path: Path
) -> None:
    path = recipe()
    before = set(tmp_path.iterdir())
    answer = cli("flower", "init", tmp_path / "made", path, *options)
    assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
    assert problem in answer.err
    assert set(tmp_path.iterdir()) == before


def test_nothing_is_overwritten(cli: Cli, recipe: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    assert cli("flower", "init", folder, recipe()).code == 0  # an empty folder is as good as none
    key = (folder / "node-0" / "key").read_bytes()
    answer = cli("flower", "init", folder, recipe())
    assert answer.code == 2
    assert "nothing is overwritten" in answer.err
    assert (folder / "node-0" / "key").read_bytes() == key


# --- a node's own configuration --------------------------------------------------------------------------------------


@pytest.fixture
def node(cli: Cli, recipe: Callable[..., Path], tmp_path: Path) -> Path:
    """A node that has 20 samples, in a folder beside its configuration."""
    options = ("--nodes", 2, "--local-data", "--set", "evaluation.held_out=0.25")
    assert cli("flower", "init", tmp_path / "made", recipe(), *options).code == 0
    folder = tmp_path / "made" / "node-1"
    node_data.write_idx(folder / "my data", *node_data.digits(20))
    (folder / "node.toml").write_text('partition-id = 1\ndata = "my data"\n')
    return folder


SAMPLES = "client 1 of 2, counted from 0: 15 samples to train on, 5 to be evaluated on\n"


def test_check_says_what_a_node_comes_to(node: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli("flower", "check", node) == (0, f"node-1: {SAMPLES}", "")
    monkeypatch.setenv("HOME", str(node))
    (node / "node.toml").write_text('partition-id = 1\ndata = "~/my data"\n')
    monkeypatch.chdir(node)
    assert cli("flower", "check") == (0, f"node-1: {SAMPLES}", "")


def test_check_finds_a_function_in_the_nodes_folder(node: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (node / "clinic.py").write_text(
        "import torch\ndef samples(): return torch.zeros(20, 1, 28, 28), torch.zeros(20).long()\n"
    )
    (node / "node.toml").write_text('partition-id = 1\ndata = "clinic:samples"\n')
    assert cli("flower", "check", node) == (0, f"node-1: {SAMPLES}", "")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('partition-id = 1\ndata = ""\n', "data = None: this node's config must name its data"),
        ('partition-id = 1\ndata = "/no/where"\n', "data = '/no/where': is neither a folder on this node nor"),
        ('partition-id = 1\ndata = "."\n', "data = '.': has no files of any kind"),
        ("partition-id = 1\ndata = 3\n", "data = 3: must be text"),
        ('partition-id = 1\ndata = "no_such:thing"\n', "data = 'no_such:thing': cannot be imported"),
        ('partition-id = 2\ndata = "my data"\n', "partition-id = 2: the recipe has 2 clients"),
        ('partition-id = -1\ndata = "my data"\n', "partition-id = -1: must say which client"),
        ('partition-id = "1"\ndata = "my data"\n', "partition-id = '1': must say which client"),
        ('data = "my data"\n', "partition-id = None: must say which client"),
        ('partition-id = 1\nfolder = "my data"\n', "folder = 'my data': unknown key in"),
        ("partition-id = \n", "is not valid TOML"),
        (None, "node.toml: cannot be read: No such file or directory"),
    ],
)
def test_check_names_what_is_wrong_in_one_line(text: str | None, problem: str, node: Path, cli: Cli) -> None:
    if text is None:
        (node / "node.toml").unlink()
    else:
        (node / "node.toml").write_text(text)
    answer = cli("flower", "check", node)
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1), answer.err
    assert problem in answer.err


# --- the scripts -----------------------------------------------------------------------------------------------------


def test_the_scripts_are_posix_shell(made: Path) -> None:
    scripts = [*made.rglob("*.sh")]
    assert len(scripts) == 4 + 3
    for script in scripts:
        assert os.access(script, os.X_OK)
        subprocess.run(["sh", "-n", script], check=True)


SUPERNODE = """#!/bin/sh
# Notes how it is called; is refused the first time, and runs until SIGTERM the second.
trap 'echo signed off >> calls; exit 0' TERM
echo "$FEDSTRATA_FLOWER_RECIPE $*" >> calls
if [ "$(wc -l < calls)" -eq 1 ]; then exit 1; fi
while :; do sleep 0.05; done
"""


def test_a_node_that_is_refused_tries_again_and_sigterm_reaches_it(made: Path, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "flower-supernode"
    program.parent.mkdir()
    program.write_text(SUPERNODE)
    program.chmod(0o755)
    node = made / "node-1"
    environment = scripts_environment(program.parent) | {"RESTART": "0"}
    process = subprocess.Popen([node / "node.sh"], env=environment, stderr=subprocess.PIPE, start_new_session=True)
    try:
        wait_for(lambda: (node / "calls").exists() and len((node / "calls").read_text().splitlines()) == 2)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    calls = (node / "calls").read_text().splitlines()
    assert calls[-1] == "signed off"
    assert calls[0] == calls[1]
    assert calls[0].startswith(f"{node / 'recipe.toml'} --superlink fed.example.org:8000 --root-certificates ca.crt")
    assert "--auth-supernode-private-key key" in calls[0]
    assert "--insecure" not in calls[0]
    assert b"started again" in errors


def scripts_environment(*first: Path) -> dict[str, str]:
    """With the Python of these tests, and programs that come before all others."""
    path = map(str, (*first, Path(sys.executable).parent, os.environ["PATH"]))
    return process_environment() | {"PATH": os.pathsep.join(path)}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_node_whose_data_is_not_there_does_not_start(node: Path, tmp_path: Path) -> None:
    (node / "node.toml").write_text('partition-id = 1\ndata = "/no/where"\n')
    program = tmp_path / "bin" / "flower-supernode"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\ntouch started\n")
    program.chmod(0o755)
    done = subprocess.run([node / "node.sh"], env=scripts_environment(program.parent), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: data = '/no/where': is neither a folder on this node nor module:function\n"
    assert not (node / "started").exists()


@pytest.mark.parametrize(("script", "program"), [("server", "flower-superlink"), ("node", "flower-supernode")])
def test_a_script_without_flower_says_what_is_missing(script: str, program: str, made: Path, tmp_path: Path) -> None:
    path = made / ("server" if script == "server" else "node-0") / f"{script}.sh"
    done = subprocess.run([path], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"{program} is not there: activate the environment with fedstrata[flower]\n"
