"""Small runs, and the few things that most tests of runs need."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tomli_w
import torch
from safetensors import safe_open

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"

TINY: dict[str, Any] = {
    "name": "tiny",
    "task": {
        "dataset": "mnist-mini",
        "partition": {"name": "iid", "clients": 4, "samples": 12},
        "model": {"name": "mlp", "hidden": 4},
    },
    "training": {"rounds": 3, "batch_size": 6, "lr": 0.1},
    "engine": {"workers": 1},
}


class Answer(NamedTuple):
    """What a command came to."""

    code: int
    out: str
    err: str


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
    import tomli_w

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


def process_environment() -> dict[str, str]:
    """For a fedstrata, or our reproductions, in a process of its own."""
    return os.environ | {"PYTHONPATH": f"{SOURCE}{os.pathsep}{ROOT}", "COLUMNS": "200"}


def default_sigint() -> None:
    """A shell that starts pytest in the background has its children ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


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


def checkpoint_content(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Metadata and tensors of a checkpoint."""
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def run_content(path: str | Path, *, checkpoints: bool = True, recipe: bool = True) -> dict[str, Any]:
    """Everything in a run directory that is the same in two runs of one experiment, in a form that compares."""
    from fedstrata.runs.reader import Run

    run, folder = Run(path), Path(path)
    history = [{key: value for key, value in line.items() if key != "seconds"} for line in run.history()]
    figures = {
        file.name: {
            name: (v.dtype.str, v.shape, v.tobytes()) for name, v in run.layers(int(file.name.split(".")[0])).items()
        }
        for file in sorted((folder / "layers").iterdir())
    }
    content = {"history": history, "figures": figures, "weights": run.summary()["weights_sha256"]}
    if checkpoints:
        content["checkpoints"] = {}
        for file in sorted((folder / "checkpoints").iterdir()):
            metadata, tensors = checkpoint_content(file)
            del metadata["run"], metadata["sha256"]  # the run's own name, and a digest that has it in it
            content["checkpoints"][file.name] = (
                metadata,
                {n: (str(t.dtype), tuple(t.shape), t.numpy().tobytes()) for n, t in tensors.items()},
            )
    if recipe:
        content["recipe"] = (folder / "recipe.toml").read_text(encoding="utf-8")
    content["files"] = sorted(entry.name for entry in folder.iterdir() if checkpoints or entry.name != "checkpoints")
    return content


def forge_recipe(path: Path, recipe: dict[str, Any]) -> None:
    """Put another recipe into a run directory, as somebody does who knows about its digest."""
    content = tomli_w.dumps(recipe).encode()
    (path / "recipe.toml").write_bytes(content)
    about = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(about | {"recipe_sha256": hashlib.sha256(content).hexdigest()}))


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
