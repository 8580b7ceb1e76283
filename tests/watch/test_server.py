"""The live page's server: what it says of runs, whom it answers, and that it changes nothing."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

import fedstrata
from fedstrata.core.errors import MissingExtra
from fedstrata.runs.runner import create_run, run_rounds
from fedstrata.runs.writer import RunWriter
from fedstrata.watch.following import Following
from fedstrata.watch.server import Server, is_loopback
from tests.support.make_runs import make_run
from tests.support.processes import process_environment
from tests.support.runs import run_content
from tests.support.views import columns

Serve = Callable[..., Server]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers = []

    def served(*folders: Path, host: str = "127.0.0.1") -> Server:
        server = Server(folders, host)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return server

    yield served
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read(), dict(answer.getheaders())
    connection.close()
    return found


def get(server: Server, path: str) -> Any:
    status, content, _ = ask(server, path)
    assert status == 200, content
    return json.loads(content)


def listed(server: Server) -> dict[str, dict[str, Any]]:
    server.following.look(everywhere=True)
    return {run["name"]: run for run in get(server, "/runs")["runs"]}


@pytest.fixture
def going(tmp_path: Path, tiny: Any) -> Iterator[tuple[Path, Generator[Any]]]:
    """A run of three rounds that does the next one when it is told to."""
    run, experiment = create_run(fedstrata.load(tiny(), algorithm="fedlayerwise"), tmp_path / "runs" / "going")
    rounds = run_rounds(run, experiment)
    yield run.path, rounds
    rounds.close()


# --- what it says ----------------------------------------------------------------------------------------------------


def test_a_run_from_its_beginning_to_its_end(serve: Serve, going: Any) -> None:
    path, rounds = going
    server = serve(path.parent)
    assert listed(server)["going"]["state"] == "stopped"  # nobody works in it yet
    next(rounds)
    one = listed(server)["going"]
    assert (one["state"], one["round"], one["rounds"], one["metric"]) == ("running", 1, 3, "accuracy")
    assert one["left"] == pytest.approx(2 * fedstrata.Run(path).history()[0]["seconds"], rel=1e-4)
    assert columns(get(server, "/view?of=0/going&part=measured/0"))["round"] == [1]
    next(rounds)
    assert columns(get(server, "/view?of=0/going&part=measured/0"))["round"] == [1, 2] or listed(server)
    assert "running, round 2 of 3" in get(server, "/view?of=0/going&part=")["facts"][-1]
    assert list(rounds)
    one = listed(server)["going"]
    assert (one["state"], one["round"], one["left"]) == ("finished", 3, None)
    assert one["best"] == pytest.approx(fedstrata.Run(path).summary()["best"], rel=1e-4)


def test_states(serve: Serve, tmp_path: Path) -> None:
    make_run(tmp_path / "finished")
    make_run(tmp_path / "stopped", done=2)
    make_run(tmp_path / "killed", done=2)
    (tmp_path / "killed" / "layers" / "000003.safetensors.partial").touch()
    make_run(tmp_path / "between", done=2)  # killed between the line and the checkpoint
    (tmp_path / "between" / "checkpoints" / "000002.safetensors").unlink()
    failed = make_run(tmp_path / "failed", done=2)
    line = json.loads((tmp_path / "failed" / "history.jsonl").read_text().splitlines()[-1])
    failed.append_failure({**{key: value for key, value in line.items() if key != "run"}, "round": 3})
    make_run(tmp_path / "damaged")
    (tmp_path / "damaged" / "recipe.toml").write_text("edited = 1")
    states = {name: run["state"] for name, run in listed(serve(tmp_path)).items()}
    assert states == {
        "finished": "finished",
        "stopped": "stopped",
        "killed": "dead",
        "between": "dead",
        "failed": "failed",
        "damaged": "damaged",
    }


def test_a_change_is_told_at_once(serve: Serve, going: Any) -> None:
    """One event to begin with, and one for each round, without a look at anything but the files."""
    path, rounds = going
    server = serve(path.parent)
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=20) as stream:
        stream.sendall(b"GET /events?of=0/going HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % server.server_address[1])
        file = stream.makefile("rb")

        def event() -> bytes:
            while (line := file.readline()) not in (b"event: changed\n", b""):
                pass
            return line

        assert event()
        for _ in range(2):
            next(rounds)
            assert event()
        assert len(get(server, "/view?of=0/going&part=")["rounds"][0]) >= 1


def test_runs_that_belong_together(serve: Serve, tmp_path: Path) -> None:
    for cell in ("a", "b"):
        for seed in (0, 1):
            make_run(
                tmp_path / "study" / cell / f"seed-{seed}",
                seed=seed,
                settings={"training.lr": 0.1 * (cell == "b") + 0.1},
            )
    make_run(tmp_path / "alone")
    server = serve(tmp_path)
    groups = {group["name"]: group["runs"] for group in get(server, "/runs")["groups"]}
    assert groups == {f"all of {tmp_path.name}": 5, "study": 4, "study/a": 2, "study/b": 2}
    arms = get(server, "/view?of=0/study&part=")["arms"]
    assert [arm["name"] for arm in arms] == ["fedavg, training.lr = 0.1", "fedavg, training.lr = 0.2"]
    assert [list(arm["runs"]) for arm in arms] == [["0", "1"], ["0", "1"]]


def test_a_new_run_is_found(serve: Serve, tmp_path: Path) -> None:
    server = serve(tmp_path / "none yet")
    assert get(server, "/runs")["runs"] == []
    make_run(tmp_path / "none yet" / "one")
    assert list(listed(server)) == ["one"]


def test_another_run_in_the_place_of_one_is_another(serve: Serve, tmp_path: Path) -> None:
    """What was read of the rounds of the first is not shown for the second."""
    import shutil

    make_run(tmp_path / "run", seed=0)
    server = serve(tmp_path)
    before = get(server, "/view?of=0/run&part=over/0/norm")
    shutil.rmtree(tmp_path / "run")
    make_run(tmp_path / "run", seed=1)
    listed(server)
    assert get(server, "/view?of=0/run&part=over/0/norm") != before


# --- whom it answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1:1", "[::1", ""])
def test_who_asks_for_another_machine_is_not_answered(serve: Serve, tmp_path: Path, host: str) -> None:
    make_run(tmp_path / "secret-run")
    server = serve(tmp_path)
    port = server.server_address[1]
    for path in ("/", "/runs", "/view?of=0/secret-run", "/events"):
        status, content, _ = ask(server, path, Host=host.format(port=port))
        assert status == 403
        assert b"secret" not in content
    for own in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}"):
        assert ask(server, "/runs", Host=own)[0] == 200


def test_beyond_this_machine_a_token_is_asked_for(serve: Serve, tmp_path: Path) -> None:
    make_run(tmp_path / "secret-run")
    server = serve(tmp_path, host="0.0.0.0")
    assert server.address.endswith(f"?token={server.token}")
    assert len(server.token) >= 32
    for headers in ({}, {"Cookie": "fedstrata=guessed"}, {"Cookie": "fedstrata"}, {"Cookie": '=;;="\\'}):
        status, content, _ = ask(server, "/runs", **headers)
        assert (status, b"secret" in content) == (401, False)
    assert ask(server, "/?token=%C3%A9")[0] == 401
    status, _, headers = ask(server, f"/?token={server.token}")
    assert (status, headers["Location"]) == (303, "/")
    cookie = headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert ask(server, "/runs", Cookie=cookie.split(";")[0])[0] == 200


def test_this_machine() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "")] == [False] * 5


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_it_answers_get_only(serve: Serve, tmp_path: Path, method: str) -> None:
    make_run(tmp_path / "run")
    assert ask(serve(tmp_path), "/runs", method)[0] == 501


def test_no_address_leads_out_of_the_folder(serve: Serve, tmp_path: Path) -> None:
    make_run(tmp_path / "in" / "run")
    make_run(tmp_path / "out" / "run")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "out")
    server = serve(tmp_path / "in")
    names = ["../out/run", "0/../out/run", f"{tmp_path}/out/run", "0/link/run", "1/run", "0/run/../run", "0/run/"]
    for name in names:
        assert ask(server, f"/view?of={name}&part=outcome")[0] == 404, name
    for path in ("/../out/run/run.json", "/runs/../../out", "/run.json", "/page.js"):
        assert ask(server, path)[0] == 404, path
    for part in ("nothing", "../outcome", "cells/7/angle", "__init__", "of", "part"):
        assert get(server, f"/view?of=0/run&part={part}") is None, part
    assert ask(server, "/view?of=0/run&part=outcome")[0] == 200


def test_headers(serve: Serve, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    status, page, headers = ask(serve(tmp_path), "/view?of=0/run")
    assert status == 200
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Cache-Control"] == "no-store"
    policy = page.decode().split('Content-Security-Policy" content="')[1].split('"')[0]
    assert policy.endswith("; connect-src 'self'")
    assert "unsafe" not in policy


# --- that it only looks ----------------------------------------------------------------------------------------------


def state_of(folder: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


def test_it_writes_nothing(serve: Serve, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "one")
    make_run(tmp_path / "runs" / "two", done=1)
    before = state_of(tmp_path)
    server = serve(tmp_path / "runs")
    for name in ("0/one", "0/two", "0/"):
        for part in server.view(name).names():
            assert get(server, f"/view?of={name}&part={part}") is not None, part
    assert state_of(tmp_path) == before


def test_a_run_that_is_watched_has_the_same_bits(serve: Serve, tmp_path: Path, tiny: Any) -> None:
    alone = fedstrata.run(tiny(), algorithm="fedlayerwise", out=tmp_path / "alone")
    (tmp_path / "watched").mkdir()
    server, seen = serve(tmp_path / "watched"), []
    run, experiment = create_run(fedstrata.load(tiny(), algorithm="fedlayerwise"), tmp_path / "watched" / "run")
    for _ in run_rounds(run, experiment):
        server.following.look(everywhere=True)
        for part in server.view("0/run").names():
            seen.append(get(server, f"/view?of=0/run&part={part}"))
    assert None not in seen
    assert run_content(run.path) == run_content(alone.path)


def test_a_look_keeps_nobody_out(tmp_path: Path) -> None:
    """Somebody who begins to work in a directory at the moment of a look at it is not refused."""
    make_run(tmp_path / "run", done=1)
    following, ended = Following([tmp_path]), threading.Event()

    def look() -> None:
        while not ended.is_set():
            following.look()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        from fedstrata.runs.writer import open_for_writing

        for _ in range(300):
            with open_for_writing(tmp_path / "run") as writer:
                assert isinstance(writer, RunWriter)
    finally:
        ended.set()
        looking.join()


def test_watching_loads_no_torch() -> None:
    code = """
import sys
from fedstrata.watch.server import Server
from fedstrata.plots import definitions
definitions()
assert not {"torch", "pandas", "pyarrow", "flwr"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=process_environment())


def test_without_the_extra_it_says_what_to_install(cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "fedstrata.plots.charts", None)
    monkeypatch.delattr(fedstrata.plots, "charts", raising=False)
    for command in (("watch", tmp_path), ("report", tmp_path), ("figures", tmp_path, "--out", tmp_path / "f")):
        answer = cli(*command)
        assert (answer.code, answer.err.count("\n")) == (2, 1)
        assert "pip install 'fedstrata[plots]'" in answer.err
    with pytest.raises(MissingExtra):
        fedstrata.Run(tmp_path / "run").plot()
