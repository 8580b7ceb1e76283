"""Small runs, and the few things that most tests of runs need."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import settings

from tests.support.processes import Answer, default_sigint, process_environment
from tests.support.runs import TINY, run_content

settings.register_profile("any machine", deadline=None)  # how long a case takes is the machine's affair
settings.load_profile("any machine")


@functools.cache
def _mini() -> Any:
    from fedstrata.tasks import datasets

    return datasets.load("mnist-mini")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Four clients with twelve digits each and a network of four neurons, with dotted settings on top.

    The embedded data set is read once for all tests of a process.
    """
    from fedstrata.recipes.tables import set_key
    from fedstrata.tasks import datasets

    mini, load = _mini(), datasets.load
    monkeypatch.setattr(datasets, "load", lambda name, *a: mini if name == "mnist-mini" else load(name, *a))

    def table(settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
        changed = copy.deepcopy(TINY)
        for key, value in (settings or {}).items():
            set_key(changed, key, value)
        return changed

    return table


@pytest.fixture
def recipe(tmp_path: Path, tiny: Callable[..., dict[str, Any]]) -> Callable[..., Path]:
    """The tiny recipe as a file."""

    def write(settings: Mapping[str, Any] | None = None, name: str = "tiny.toml") -> Path:
        path = tmp_path / name
        path.write_text(tomli_w.dumps(tiny(settings)), encoding="utf-8")
        return path

    return write


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """`fedstrata …`, in this process; an exception that gets out is code -1 and a traceback on stderr."""
    from fedstrata.cli import app

    return _called(app, monkeypatch)


@pytest.fixture
def reproduce(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """`python -m reproductions …`, in the same way."""
    from reproductions.cli import app

    return _called(app, monkeypatch)


def _called(commands: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    from fedstrata.cli import main

    monkeypatch.setenv("COLUMNS", "200")

    def call(*argv: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["fedstrata", *map(str, argv)])
        out, err = io.StringIO(), io.StringIO()
        code: Any = 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main(commands)
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                traceback.print_exc()
                code = -1
        return Answer(code, out.getvalue(), err.getvalue())

    return call


@pytest.fixture
def spawn(tmp_path: Path) -> Any:
    """Start `python -m fedstrata …`, or another module; whatever still runs at the end of the test is ended."""
    started: list[subprocess.Popen[str]] = []

    def start(
        *argv: object, module: str = "fedstrata", preexec_fn: Callable[[], None] = default_sigint, **options: Any
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, argv)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=process_environment(),
            preexec_fn=preexec_fn,
            **options,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Write a module that recipes can name; the current directory is the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def write(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return write


# --- comparing runs --------------------------------------------------------------------------------------------------


@pytest.fixture
def same_run() -> Callable[..., None]:
    """Two run directories that must not differ in anything but times."""

    def check(left: str | Path, right: str | Path, **options: Any) -> None:
        ours, theirs = run_content(left, **options), run_content(right, **options)
        assert ours.keys() == theirs.keys()
        for part in ours:
            assert ours[part] == theirs[part], part

    return check


@pytest.fixture
def blobs() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Two-dimensional points in two classes that can be told apart."""

    def make(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        generator = np.random.default_rng(seed)
        labels = generator.integers(0, 2, count)
        points = generator.normal(size=(count, 2)) + 2.0 * labels[:, None]
        return torch.from_numpy(points).float(), torch.from_numpy(labels)

    return make


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        problem = "no chromium on the PATH (Debian: apt-get install chromium)"
        pytest.fail(problem) if "CI" in os.environ else pytest.skip(problem)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()
