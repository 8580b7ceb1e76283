"""Run directories that somebody else made or changed: nothing outside is touched, and no file passes for another."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedstrata
from fedstrata.core.errors import RunDirectoryError
from fedstrata.recipes import schema
from fedstrata.runs import compare, comparison
from fedstrata.runs.files import Folder, locked, write_whole
from fedstrata.runs.reader import Run
from fedstrata.runs.runner import create_run, reopen, run_rounds
from tests.support import ROOT
from tests.support.processes import process_environment
from tests.support.runs import forge_recipe, run_content

EXTEND = ("--set", "training.rounds=3")

DATA = ROOT / "tests" / "data"


@pytest.fixture
def run(tiny: Any, tmp_path: Path) -> Path:
    """Two rounds of a run that goes on to three."""
    return fedstrata.run(tiny({"training.rounds": 2}), out=tmp_path / "run").path


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Files of the user's that no run has anything to do with."""
    folder = tmp_path / "home"
    (folder / "folder").mkdir(parents=True)
    for name in ("precious", "folder/000001.safetensors", "folder/000009.safetensors", "folder/x.partial"):
        (folder / name).write_text(f"what {name} was\n")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(answer: Any, *words: str) -> None:
    assert answer.code == 2, answer
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1
    for word in words:
        assert word in answer.err, answer.err


# --- links ---------------------------------------------------------------------------------------------------------

LINKED = {
    "history.jsonl": "precious",
    "run.json": "precious",
    "recipe.toml": "precious",
    "layers": "folder",
    "checkpoints": "folder",
    "checkpoints/000002.safetensors": "precious",
    "layers/000002.safetensors": "precious",
}


@pytest.mark.parametrize("keeps", ["its content", "other content"])
@pytest.mark.parametrize("name", LINKED)
def test_a_link_in_a_run_directory_is_refused_by_name(name: str, keeps: str, run: Path, victim: Path, cli: Any) -> None:
    """Also one that leads to the right content: nobody could say what else it will lead to a moment later."""
    target, place = victim / LINKED[name], run / name
    if keeps == "its content":
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        place.rename(target)
    elif place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink()
    place.symlink_to(target)
    before = content(victim)
    refused(cli("run", "--resume", run, *EXTEND), f"{place} is a link")
    if name != "checkpoints/000002.safetensors":
        answer = cli("report", run, "--out", run.parent / "page.html")
        refused(answer, f"{place} is a link")
    assert content(victim) == before
    assert place.is_symlink()


PLANTED = (
    *("lock", "history.jsonl.partial", "run.json.partial", "recipe.toml.partial", "anything.partial"),
    *("layers/000003.safetensors.partial", "checkpoints/000003.safetensors.partial"),
)


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("hard", [False, True], ids=["link", "hard link"])
def test_a_file_that_is_replaced_is_never_written_through(
    name: str, hard: bool, run: Path, victim: Path, cli: Any, tiny: Any, tmp_path: Path
) -> None:
    """The name of a file that is about to be written leads elsewhere: the name is taken, what it led to stays."""
    target = victim / "precious"
    if hard:
        os.link(target, run / name)
    else:
        (run / name).symlink_to(target)
    before = content(victim)
    assert cli("run", "--resume", run, *EXTEND).code == 0
    assert content(victim) == before
    whole = fedstrata.run(tiny({"training.rounds": 3}), out=tmp_path / "whole").path
    found, expected = run_content(run), run_content(whole)
    found["files"] = [name for name in found["files"] if name != "lock"]  # no name of ours, and nobody's business
    assert found == expected


def test_a_history_with_a_second_name_elsewhere_is_not_written_to(run: Path, victim: Path, cli: Any) -> None:
    """A hard link: what is appended to one is appended to both."""
    os.link(run / "history.jsonl", victim / "copy")
    before = (victim / "copy").read_bytes()
    refused(cli("run", "--resume", run, *EXTEND), "history.jsonl", "hard link")
    assert (victim / "copy").read_bytes() == before


@pytest.mark.parametrize("kind", ["fifo", "socket", "device"])
@pytest.mark.parametrize("name", ["run.json", "recipe.toml", "history.jsonl", "checkpoints/000002.safetensors"])
def test_special_files_are_refused_and_not_opened(
    name: str, kind: str, run: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a FIFO would wait for ever, and opening some devices already does something."""
    place = run / name
    place.unlink()
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "socket":
        monkeypatch.chdir(place.parent)  # the path of a socket must be short
        server = socket.socket(socket.AF_UNIX)
        server.bind(place.name)
        server.close()
    elif os.geteuid() == 0:
        try:
            os.mknod(place, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero, which never ends
        except PermissionError:
            pytest.skip("devices cannot be made here")
    else:
        pytest.skip("only root makes devices")
    for command in (("run", "--resume", run, *EXTEND), ("show", run)):
        refused(cli(*command), f"{place} is neither a file nor a folder")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.sampled_from(["a", "b", "up", "out", "file", "fifo", "..", ".", "/", "\0", "\ud800"]), min_size=1, max_size=4
    ),
    act=st.sampled_from(["read", "write", "append", "remove", "has", "names", "folder"]),
)
def test_no_name_leads_out_of_a_folder(steps: list[str], act: str, tmp_path: Path) -> None:
    """Over links up, out and around: whatever is asked of a folder, what lies outside stays as it is."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    if not root.exists():
        (root / "a" / "b").mkdir(parents=True)
        (outside / "b").mkdir(parents=True)
        for place in (root / "file", root / "a" / "file", outside / "file", outside / "b" / "file"):
            place.write_text("{}\n")
        for place in (root, root / "a"):
            (place / "up").symlink_to("..")
            (place / "out").symlink_to(outside)
            os.mkfifo(place / "fifo")
    before = content(outside)
    folder, name = Folder(root), "/".join(steps)
    calls = {
        "read": lambda: folder.read(name),
        "write": lambda: folder.write(name, b"mine"),
        "append": lambda: folder.append_line(name, b"mine\n"),
        "remove": lambda: folder.remove(name),
        "has": lambda: folder.has(name),
        "names": lambda: folder.names(name),
        "folder": lambda: folder.folder(name),
    }
    try:
        found = calls[act]()
    except (RunDirectoryError, OSError):
        pass
    else:
        assert act != "read" or found is not None
        assert ".." not in steps
    assert content(outside) == before


def test_a_comparison_is_not_led_elsewhere(tmp_path: Path, recipe: Any, cli: Any) -> None:
    path = recipe({"training.rounds": 1})
    command = ("compare", path, "--algorithms", "fedavg,fedadp", "--out", tmp_path / "out")
    assert cli(*command).code == 0
    (tmp_path / "out" / "fedadp").rename(tmp_path / "elsewhere")
    (tmp_path / "out" / "fedadp").symlink_to(tmp_path / "elsewhere")
    before = content(tmp_path / "elsewhere")
    for again in (command, ("show", tmp_path / "out"), ("report", tmp_path / "out", "--out", tmp_path / "p.html")):
        refused(cli(*again), f"{tmp_path / 'out' / 'fedadp'}", "is a link" if again is not command else "")
    assert content(tmp_path / "elsewhere") == before
    with pytest.raises(RunDirectoryError, match="is a link"):  # also if the link comes when all was checked
        list(compare.run_job(comparison.Job("fedadp", 0, None, tmp_path / "out" / "fedadp" / "seed-0")))  # type: ignore
    about = json.loads((tmp_path / "out" / "compare.json").read_text())
    (tmp_path / "out" / "compare.json").write_text(json.dumps(about | {"algorithms": [".."]}))
    with pytest.raises(RunDirectoryError, match="is no name of a file in a folder"):
        comparison.begun_runs(tmp_path / "out")


def test_the_directory_itself_may_be_a_link(run: Path, tmp_path: Path, cli: Any) -> None:
    """Where it is, its owner says."""
    (tmp_path / "short").symlink_to(run)
    assert cli("run", "--resume", tmp_path / "short", *EXTEND).code == 0
    assert len(Run(run).history()) == 3


# --- files that are not what they seem to be -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["best.safetensors", "000002.backup.safetensors", "latest", "2.safetensors"])
def test_a_copy_of_a_checkpoint_is_nothing_of_the_runs(
    name: str, run: Path, tiny: Any, tmp_path: Path, same_run: Any, cli: Any
) -> None:
    """It used to sort behind all numbers, and so became the run's state."""
    folder, other = run / "checkpoints", fedstrata.run(tiny({"training.lr": 0.5}), out=tmp_path / "other").path
    shutil.copy(folder / "000001.safetensors", folder / name)
    digest = Run(run).summary()["weights_sha256"]
    shutil.copy(other / "checkpoints" / "000003.safetensors", folder / name)
    assert Run(run).summary()["weights_sha256"] == digest
    before = (folder / name).read_bytes()
    assert cli("run", "--resume", run, *EXTEND).code == 0
    assert (folder / name).read_bytes() == before  # nor is it ours to remove
    (folder / name).unlink()
    same_run(run, fedstrata.run(tiny(), out=tmp_path / "whole").path)


@pytest.mark.parametrize("name", ["000003.safetensors", "999999.safetensors", "1000000.safetensors"])
def test_a_checkpoint_that_was_renamed_is_refused_by_name(name: str, run: Path, cli: Any) -> None:
    shutil.copy(run / "checkpoints" / "000001.safetensors", run / "checkpoints" / name)
    for command in (("run", "--resume", run, *EXTEND), ("show", run), ("export", run, run.parent / "model")):
        refused(cli(*command), f"checkpoints/{name} is of round 1")


@pytest.mark.parametrize("name", ["checkpoints/000002.safetensors", "layers/000002.safetensors"])
def test_a_type_of_number_that_is_never_stored_is_refused_by_name(name: str, run: Path, cli: Any) -> None:
    from safetensors.torch import save_file

    save_file({"model": torch.ones(2, dtype=torch.bfloat16)}, run / name)
    refused(cli("show", run), f"{run / name} is damaged")


def test_rounds_are_ordered_as_numbers(run: Path) -> None:
    """As text, 1000000 comes before 999999."""
    for name in ("999999", "1000000", "0000007"):
        (run / "checkpoints" / f"{name}.safetensors").write_bytes(b"")
    directory = Run(run).directory
    assert directory.rounds("checkpoints") == [1, 2, 999999, 1000000]
    with pytest.raises(RunDirectoryError, match=r"1000000.safetensors is damaged"):
        directory.last_checkpoint()


@pytest.mark.parametrize("name", ["checkpoints/000002.safetensors", "layers/000002.safetensors", "history.jsonl"])
def test_a_file_of_another_run_is_refused_by_name(name: str, run: Path, tiny: Any, tmp_path: Path, cli: Any) -> None:
    """Of the same recipe and seed: only the run's id tells them apart, and whatever happened to the other one."""
    other = fedstrata.run(tiny({"training.rounds": 2}), out=tmp_path / "other").path
    assert (run / "recipe.toml").read_bytes() == (other / "recipe.toml").read_bytes()
    shutil.copy(other / name, run / name)
    command: tuple[object, ...] = ("run", "--resume", run, *EXTEND)
    if name.startswith("layers"):
        command = ("report", run, "--out", tmp_path / "page.html")
    refused(cli(*command), f"{run / name}", "of another run")


def test_a_record_of_layers_that_was_renamed_are_refused_by_name(run: Path) -> None:
    (run / "layers" / "000001.safetensors").replace(run / "layers" / "000002.safetensors")
    with pytest.raises(RunDirectoryError, match=r"layers/000002.safetensors is of round 1"):
        Run(run).layers(2)


def test_every_file_of_a_run_says_whose_it_is(run: Path) -> None:
    directory = Run(run).directory
    assert directory.id
    assert len(directory.id) == 16
    for name in ("checkpoints/000001", "checkpoints/000002", "layers/000001", "layers/000002"):
        metadata = Folder(run).read_arrays(f"{name}.safetensors")[1]
        assert (metadata["run"], metadata["round"]) == (directory.id, name[-1])
    lines = (run / "history.jsonl").read_text().splitlines()
    assert {json.loads(line)["run"] for line in lines} == {directory.id}


@pytest.mark.parametrize("edit", [("rounds = 2", "rounds = 3"), ("lr = 0.1", "lr = 0.2"), ("seed = 0", "seed = 1")])
def test_an_edited_recipe_is_refused_by_name(edit: tuple[str, str], run: Path, cli: Any) -> None:
    path = run / "recipe.toml"
    original = path.read_text()
    assert original.count(edit[0]) == 1
    path.write_text(original.replace(*edit))
    for command in (("run", "--resume", run), ("show", run), ("export", run, run.parent / "model")):
        refused(cli(*command), f"{path} was edited after the run began")
    path.write_text(original)
    assert cli("run", "--resume", run, *EXTEND).code == 0  # extending it the right way is no edit
    assert cli("show", run).code == 0
    assert "recipe_sha256_before" not in json.loads((run / "run.json").read_text())


class Killed(BaseException):
    """As good as a kill: nothing is done after it."""


def extend(run: Path, rounds: int, writes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Extend a run, and be killed before the write after so many."""
    left = [writes]

    def write(folder: Folder, name: str, content: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        original(folder, name, content)

    original = Folder.write
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "write", write)
        with contextlib.suppress(Killed):
            reopen(run, {"training.rounds": rounds})


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("second", range(4))
def test_extending_may_be_killed_again_and_again(
    first: int, second: int, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever recipe is there belongs to the run; and when all is done, no other one does any more."""
    recipes = [(run / "recipe.toml").read_bytes()]
    for rounds, writes in ((5, first), (6, second)):
        extend(run, rounds, writes, monkeypatch)
        recipes.append((run / "recipe.toml").read_bytes())
        assert Run(run).recipe.training.rounds in (2, 5, 6)
    fedstrata.resume(run, settings={"training.rounds": 3})
    last = (run / "recipe.toml").read_bytes()
    assert "recipe_sha256_before" not in json.loads((run / "run.json").read_text())
    for other in set(recipes) - {last}:
        (run / "recipe.toml").write_bytes(other)
        with pytest.raises(RunDirectoryError, match="was edited after the run began"):
            Run(run)


def test_an_extension_that_was_killed_is_settled_when_the_run_goes_on(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = (run / "recipe.toml").read_bytes()
    extend(run, 3, 2, monkeypatch)  # the new recipe is there, and both are allowed
    assert "recipe_sha256_before" in json.loads((run / "run.json").read_text())
    assert len(fedstrata.resume(run).history()) == 3
    (run / "recipe.toml").write_bytes(old)
    with pytest.raises(RunDirectoryError, match="was edited after the run began"):
        Run(run)


@pytest.mark.parametrize("name", ["run.json", "recipe.toml", "history.jsonl"])
def test_files_that_are_far_too_large_or_too_deep(name: str, run: Path, cli: Any) -> None:
    whole = (run / name).read_bytes()
    for damage in (b"[" * 100_000 + b"\n", None):
        (run / name).write_bytes(damage or whole)
        if damage is None:
            os.truncate(run / name, 1 << 37)
        for command in (("show", run), ("run", "--resume", run, *EXTEND)):
            refused(cli(*command), f"{run / name} is damaged")


def test_one_damaged_run_hides_no_other(run: Path, tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c"):
        shutil.copytree(run, tmp_path / "runs" / name)
    about = json.loads((run / "run.json").read_text())
    (tmp_path / "runs" / "a" / "run.json").write_text(json.dumps(about | {"metric": None}))
    (tmp_path / "runs" / "b" / "run.json").write_text("[" * 100_000)
    answer = cli("list", "runs")
    assert answer.code == 0
    assert "finished" in answer.out
    assert answer.out.count("damaged") == 2


OF_VERSION_0_1 = {1: "has format 1", 2: "was computed with arithmetic 1 (fedstrata 0.1.0)"}
"""Runs that the last commits of 0.1 with these formats have made (tests/data), and why they are not resumed."""


@pytest.mark.parametrize("format", OF_VERSION_0_1)
def test_a_run_of_version_0_1_is_shown_and_not_resumed(
    format: int, cli: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both are of the same recipe, which says `trainer` and `stack_size`, and came to the same."""
    schema._say_ignored.cache_clear()
    run = Path(shutil.copytree(DATA / f"run-0.1-format-{format}", tmp_path / "runs" / "old"))
    before = content(run)
    old = Run(run)
    assert [record.getMessage().partition(": ")[:2] for record in caplog.records] == [
        ("engine.trainer, engine.stack_size", ": ")
    ]
    assert old.summary()["weights_sha256"] == "8248c33ff26d031113fd83e0a27cf8e29d2ec7a6ea8dc8811a96485938deb476"
    assert (old.about.format, old.about.arithmetic, old.layer_names) == (format, 1, ["fc1", "fc2"])
    assert [line["upload_total"] for line in old.history()] == [6424, 12840, 19256]
    assert [line["lost"] for line in old.history()] == [
        [],
        [{"client": 0, "kind": "dropped out", "reason": "", "why": "dropped out"}],
        [{"client": 1, "kind": "dropped out", "reason": "", "why": "dropped out"}],
    ]
    assert old.layers(2)["mask"].sum(0).tolist() == [1, 1]  # FedLDF's n
    assert old.finished()
    command: tuple[object, ...]
    for command in (("show", run), ("report", run, "--out", tmp_path / "p.html"), ("export", run, tmp_path / "model")):
        assert cli(*command).code == 0
    for command in (("run", "--resume", run), ("run", "--resume", run, *EXTEND)):
        refused(cli(*command), f"{run} {OF_VERSION_0_1[format]}", "can be shown and not resumed")
    assert content(run) == before


# --- one process at a time -----------------------------------------------------------------------------------------


def test_deleting_whatever_is_in_the_directory_does_not_unlock_it(run: Path, cli: Any) -> None:
    """There was a file to lock, and whoever deleted it let a second process in."""
    with locked(run):
        assert not (run / "lock").exists()
        refused(cli("run", "--resume", run, *EXTEND), f"{run} is in use by process {os.getpid()}")
        (run / "lock").write_text("")
        (run / "lock").unlink()
        moved = run.rename(run.with_name("moved"))
        refused(cli("run", "--resume", moved, *EXTEND), f"{moved} is in use by process {os.getpid()}")
    assert cli("run", "--resume", moved, *EXTEND).code == 0


def test_another_directory_in_the_place_of_the_one_that_is_locked(tiny: Any, tmp_path: Path, same_run: Any) -> None:
    """A run that is moved away goes on where it is now, and does not write into what took its place."""
    run, experiment = create_run(fedstrata.recipes.schema.load(tiny()), tmp_path / "run")
    rounds = run_rounds(run, experiment)
    next(rounds)
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    shutil.copytree(moved, tmp_path / "run")
    before = content(tmp_path / "run")
    assert len(list(rounds)) == 2
    assert content(tmp_path / "run") == before
    same_run(moved, fedstrata.run(tiny(), out=tmp_path / "whole").path)
    fedstrata.resume(tmp_path / "run")  # the copy is a run as well
    same_run(tmp_path / "run", moved)


# --- code that a directory names -----------------------------------------------------------------------------------

NAMES = {
    "task.function": "theirs:thing",
    "task.dataset": "theirs:thing",
    "task.model.name": "theirs:thing",
    "task.partition.name": "theirs:thing",
    "algorithm.name": "theirs:thing",
    "algorithm.objective.name": "theirs:thing",
    "algorithm.selection.name": "theirs:thing",
    "algorithm.weighting.name": "theirs:thing",
}


@pytest.mark.parametrize("field", NAMES)
def test_looking_imports_nothing_and_resuming_says_what(
    field: str, run: Path, tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from fedstrata.recipes.tables import set_key

    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    (tmp_path / "runs").mkdir()
    run = run.rename(tmp_path / "runs" / "run")
    trace = tmp_path / "trace"
    (tmp_path / "theirs.py").write_text(f"open({str(trace)!r}, 'w').close()\n")
    table = Run(run).recipe.to_table() | {"algorithm": {"name": "fedavg"}}
    if field.count(".") == 2:
        set_key(table, field.removesuffix(".name"), {})
    set_key(table, field, NAMES[field])
    forge_recipe(run, table)
    command: tuple[object, ...]
    for command in (("show", run), ("list",), ("list", "runs"), ("report", run, "--out", tmp_path / "page.html")):
        assert cli(*command).code == 0
    assert not trace.exists()
    said = f"{run}: its recipe names code that is imported now: {field} = theirs:thing"

    for command in (("run", "--resume", run), ("run", "--resume", run, *EXTEND), ("export", run, tmp_path / "model")):
        caplog.clear()
        trace.unlink(missing_ok=True)
        monkeypatch.delitem(sys.modules, "theirs", raising=False)
        assert cli(*command).code != 0  # there is no such thing in it
        assert said in [record.getMessage() for record in caplog.records]
        assert trace.exists()


def test_resuming_says_what_it_imports_on_the_terminal(run: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text("print('imported')\n")
    table = Run(run).recipe.to_table()
    table["task"]["model"] = {"name": "theirs:thing"}
    forge_recipe(run, table)
    command = [sys.executable, "-u", "-m", "fedstrata", "run", "--resume", str(run), *EXTEND]
    done = subprocess.run(
        command, cwd=tmp_path, env=process_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 2
    said = f"{run}: its recipe names code that is imported now: task.model.name = theirs:thing\n"
    assert said in done.stdout
    assert done.stdout.index(said) < done.stdout.index("imported\n")


# --- disks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named(
    code: int, run: Path, cli: Any, monkeypatch: pytest.MonkeyPatch, tiny: Any, tmp_path: Path, same_run: Any
) -> None:
    write = os.write

    def full(handle: int, content: Any) -> int:
        if os.readlink(f"/proc/self/fd/{handle}").startswith(str(run)):
            raise OSError(code, os.strerror(code))
        return write(handle, content)

    monkeypatch.setattr(os, "write", full)
    answer = cli("run", "--resume", run, *EXTEND)
    mount = tmp_path
    while not os.path.ismount(mount):
        mount = mount.parent
    refused(answer, "cannot be written: no space left on the disk at ", f"{mount} (", "free); make room there")
    assert not list(run.rglob("*.partial"))
    monkeypatch.setattr(os, "write", write)
    assert cli("run", "--resume", run, *EXTEND).code == 0
    same_run(run, fedstrata.run(tiny(), out=tmp_path / "whole").path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_a_disk_that_is_really_full(tmp_path: Path, recipe: Any, cli: Any, same_run: Any) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.decode()}")
    try:
        path = recipe({"training.rounds": 30})
        (disk / "ballast").write_bytes(b"x" * 300_000)
        answer = cli("run", path, "--out", disk / "run")
        refused(answer, f"no space left on the disk at {disk} (")
        assert f"when there is room, go on with: fedstrata run --resume {disk / 'run'}" in answer.out
        (disk / "ballast").unlink()
        assert cli("run", "--resume", disk / "run").code == 0
        assert cli("run", path, "--out", tmp_path / "whole").code == 0
        same_run(disk / "run", tmp_path / "whole")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_renamed_file_is_on_the_disk_when_it_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is synced after the rename: a name that is only in memory is gone when the power goes."""
    calls: list[str] = []

    def noting(name: str) -> None:
        original = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            what = os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else str(args[1])
            calls.append(f"{name} {what}")
            return original(*args, **options)

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "replace", "rename"):
        noting(name)
    write_whole(tmp_path / "file", b"content")
    assert calls == [f"fsync {tmp_path}/file.partial", "replace file", f"fsync {tmp_path}"]
    calls.clear()
    fedstrata.run({"training": {"rounds": 1}, "task": {"model": {"name": "logreg"}}}, out=tmp_path / "run")
    at = calls.index(f"rename {tmp_path}/run")
    assert calls[at + 1] == f"fsync {tmp_path}"
    for place, call in enumerate(calls):
        if call.startswith("replace"):
            assert calls[place + 1].startswith("fsync ")
            assert not calls[place + 1].endswith((".safetensors.partial", ".json.partial", ".toml.partial"))
