"""`python -m reproductions`: what its commands show, store and refuse."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedstrata.runs.files import locked
from reproductions.results import Results
from reproductions.study import load_study, studies
from tests.support.processes import process_environment
from tests.support.small_study import SMALL, small


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(tomli_w.dumps(SMALL), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("command", "mentioned"),
    [
        ([], ["list", "run", "show", "page", "check", "figures", "reproductions/studies", "make install"]),
        (["list"], ["--results"]),
        (["run"], ["NAME", "--quick", "--seeds", "--cells", "--arms", "--runs", "--results", "--data", "--workers"]),
        (["show"], ["NAME", "--quick", "--cells", "--runs", "--results"]),
        (["page"], ["--docs", "--figures", "--results"]),
        (["check"], ["NAME", "--quick", "--seeds", "--cells", "--arms", "--results", "--data", "--workers"]),
        (["figures"], ["NAME", "--quick", "--cells", "--figures", "--runs", "--results"]),
    ],
    ids=str,
)
def test_help(reproduce: Any, command: list[str], mentioned: list[str]) -> None:
    answer = reproduce(*command, "--help")
    assert answer.code == 0
    for word in mentioned:
        assert word in answer.out, word


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, reproductions.cli; assert 'torch' not in sys.modules, 'torch was loaded'"
    done = subprocess.run([sys.executable, "-c", code], env=process_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_list_says_what_exists_and_how_long_it_takes(reproduce: Any, tmp_path: Path) -> None:
    answer = reproduce("list", "--results", tmp_path)
    assert answer.code == 0
    for name in studies():
        line = next(line for line in answer.out.splitlines() if f" {name} " in line)
        assert "about" in line or "at most" in line
        assert "nothing" in line


def test_quick_ends_with_the_table_and_is_stored_apart(
    reproduce: Any, small_file: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = reproduce("run", small_file, "--quick")
    assert answer.code == 0, answer.err
    assert "2 of 3 rounds, 1 of 2 seeds, 1 of 2 cells" in answer.out
    assert "final accuracy" in answer.out
    assert "FedLDF is higher" in answer.out
    assert not (tmp_path / "reproductions" / "results").exists()
    assert "nothing is stored" in reproduce("show", small_file).err
    again = reproduce("show", small_file, "--quick")
    assert again.code == 0, again.err
    assert "FedLDF is higher" in again.out
    assert again.out == reproduce("show", small_file, "--quick", "--runs", "reproductions/runs/small-quick").out
    assert "nothing is stored" in reproduce("show", small_file, "--quick", "--results", "results").err


def test_some_arms_can_be_run_alone(reproduce: Any, tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text(tomli_w.dumps(small(cells=SMALL["cells"][:1])), encoding="utf-8")
    places = ("--seeds", "0", "--runs", tmp_path / "out", "--results", tmp_path / "results")
    for arm in ("fedldf", "fedavg"):
        assert reproduce("run", file, "--arms", arm, *places).code == 0
        stored = Results.stored(load_study(file), tmp_path / "results")
        assert list(stored.runs["a"]) == (["fedldf"] if arm == "fedldf" else ["fedavg", "fedldf"])
    assert "--arms = 'sgd': there are fedavg, fedldf" in reproduce("run", file, "--arms", "sgd", *places).err


def test_what_is_stored_can_be_checked_by_running_it_again(
    reproduce: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file, archive = tmp_path / "small.toml", tmp_path / "reproductions"
    path = archive / "results" / "small" / "a.json"
    file.write_text(tomli_w.dumps(small(cells=SMALL["cells"][:1])), encoding="utf-8")
    assert "nothing is stored of these runs" in reproduce("check", file).err
    assert reproduce("run", file, "--seeds", "0").code == 0
    content = json.loads(path.read_text())

    def check(*options: str) -> Any:
        before = path.read_text()
        answer = reproduce("check", file, *options)
        assert path.read_text() == before  # it only looks
        assert (archive / "runs" / "small" / "a" / "fedavg" / "seed-0").exists()
        assert (archive / "runs" / "small-check").exists() == (answer.code != 0)
        return answer

    found = check()
    assert found.code == 0
    assert "2 of 2 runs came out as stored, in every round." in found.out
    assert "1 of 1 runs" in check("--arms", "fedldf").out
    assert "nothing is stored of these runs" in check("--seeds", "1").err
    # A round that is not what this machine gives.
    run = content["arms"]["fedavg"]["runs"]["0"]
    run["series"]["test.accuracy"][1] += 0.01
    path.write_text(json.dumps(content))
    found = check()
    assert found.code == 1
    assert "others from round 2 on" in found.out
    assert "Stored with this processor and torch, and yet different: a/fedavg/seed-0." in found.out
    shutil.rmtree(archive / "runs" / "small-check")
    # Another machine may have other digits.
    run["made"]["processor"] = "abacus"
    path.write_text(json.dumps(content))
    found = check()
    assert found.code == 0
    assert "1 of 2 runs came out as stored" in found.out
    assert "1 was stored with another processor or torch" in found.out


def test_two_jobs_on_one_study_are_refused(reproduce: Any, small_file: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out"):
        answer = reproduce("run", small_file, "--runs", tmp_path / "out", "--results", tmp_path / "results")
    assert answer.code == 2
    assert "is in use by process" in answer.err
    assert not (tmp_path / "results").exists()


def test_wrong_requests(reproduce: Any, small_file: Path) -> None:
    assert "Missing argument 'NAME'" in reproduce("run").err
    assert "there are a, b" in reproduce("run", small_file, "--cells", "c").err


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (("run", "adaptive-mu", "--quick", "--workers", "0"), "--workers"),
        (("run", "adaptive-mu", "--quick", "--workers", "-1"), "--workers"),
        (("run", "adaptive-mu", "--quick", "--seeds", "0,0"), "--seeds = '0,0': names the same one twice"),
        (("run", "adaptive-mu", "--quick", "--seeds", "3..2"), "--seeds = '3..2': names nothing to run"),
        (("figures", "--cells", "holders"), "NAME is missing: --cells and --runs are of one study"),
        (("figures",), "results: nothing is stored there"),
        (("figures", "adaptive-mu"), "results/adaptive-mu: nothing is stored of this study"),
        (("page",), "results: no such directory"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(
    command: tuple[str, ...], problem: str, reproduce: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = reproduce(*command)
    assert answer.code not in (0, -1)
    assert problem in answer.err
    assert not list(tmp_path.iterdir())
