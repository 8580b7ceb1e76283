"""What a user does wrong: one line that names the field and its value, exit code 2, and nothing is lost."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import fedstrata
from fedstrata.core.errors import FedstrataError, RunDirectoryError
from fedstrata.core.record import RoundFailed
from fedstrata.core.status import Status
from fedstrata.runs.reader import Run
from fedstrata.runs.runner import create_run, run_rounds
from fedstrata.tasks.task import Task
from tests.support.math import missing
from tests.support.processes import Answer, process_environment


def assert_refused(answer: Answer, *parts: str) -> None:
    assert answer.code == 2, answer
    assert answer.err.startswith("error: "), answer.err
    assert answer.err.count("\n") == 1, answer.err
    assert answer.err.endswith("\n")
    assert "Traceback" not in answer.err
    for part in parts:
        assert part in answer.err, (part, answer.err)


# --- recipes ---------------------------------------------------------------------------------------------------------

BAD_SETTINGS: list[tuple[str, str]] = [
    # keys nobody knows
    ("nonsense=1", "nonsense = 1: unknown key"),
    ("trainig.rounds=1", "trainig = {'rounds': 1}: unknown key; did you mean training?"),
    ("training.round=3", "training.round = 3: unknown key; did you mean rounds?"),
    ("training.x.y=3", "training.x = {'y': 3}: unknown key"),
    ("layers.nope=1", "layers.nope = 1: unknown key"),
    ("evaluation.nope=1", "evaluation.nope = 1: unknown key"),
    ("engine.nope=1", "engine.nope = 1: unknown key"),
    ("record.nope=1", "record.nope = 1: unknown key"),
    ("task.nope=1", "task.nope = 1: unknown key"),
    ("algorithm.mu=3", "algorithm.mu = 3: this algorithm has no such option"),
    ("algorithm.objective.mu=3", "algorithm.objective.mu = 3: Plain has no such option"),
    ("task.partition.client=5", "task.partition.client = 5: Iid has no such option (did you mean clients?)"),
    ("task.model.width=3", "task.model.width = 3: mlp has no such option"),
    ("task.model.classes=3", "task.model.classes = 3"),
    ("a..b=3", "a = "),
    # types
    ("algorithm=3", "algorithm = 3"),
    ("algorithm=fedldf", "algorithm = 'fedldf'"),
    ("training=1", "training = 1"),
    ("task=[1]", "task = [1]"),
    ("training.rounds=1.5", "training.rounds = 1.5"),
    ('training.rounds="3"', "training.rounds = '3'"),
    ("training.rounds=true", "training.rounds = True"),
    ("training.rounds=ten", "training.rounds = 'ten'"),
    ("training.rounds.x=3", "training.rounds.x = 3: rounds is a value, not a table"),
    ("training.lr=fast", "training.lr = 'fast'"),
    ("evaluation.on=3", "evaluation.on = 3"),
    ("evaluation.on=nope", "evaluation.on = ['nope']"),
    ("evaluation.stop_at_target=1", "evaluation.stop_at_target = 1"),
    ("record.layers=1", "record.layers = 1"),
    ("seed=1.5", "seed = 1.5"),
    ("description=3", "description = 3"),
    ("paper=3", "paper = 3"),
    ("layers.grouping=3", "layers.grouping = 3"),
    ("task.partition=3", "task.partition = 3"),
    ("task.model=3", "task.model = 3"),
    ("task.dataset=3", "task.dataset = 3"),
    ("algorithm.objective=3", "algorithm.objective = 3: must be a table with a name"),
    ("algorithm.selection=fedldf", "algorithm.selection = 'fedldf': must be a table with a name"),
    ("training.initial_weights=3", "training.initial_weights = 3"),
    # values that cannot be
    ("training.rounds=0", "training.rounds = 0"),
    ("training.rounds=-3", "training.rounds = -3"),
    ("training.lr=-1", "training.lr = -1"),
    ("training.lr=0", "training.lr = 0"),
    ("training.lr=nan", "training.lr = nan"),
    ("training.lr=inf", "training.lr = inf"),
    ("training.lr=1e999", "training.lr = inf"),
    ("training.lr_decay=2.0", "training.lr_decay = 2.0"),
    ("training.momentum=1.5", "training.momentum = 1.5"),
    ("training.weight_decay=-1", "training.weight_decay = -1"),
    ("training.batch_size=0", "training.batch_size = 0"),
    ("training.epochs=0", "training.epochs = 0"),
    ("training.steps=0", "training.steps = 0"),
    ("training.dropouts=1", "training.dropouts = 1"),
    ("training.stragglers=2", "training.stragglers = 2"),
    ("training.attempts=0", "training.attempts = 0"),
    ("training.clients_per_round=0", "training.clients_per_round = 0"),
    ("training.clients_per_round=5", "training.clients_per_round = 5: there are only 4 clients"),
    ("training.clients_per_round=9999999999999999999999", "training.clients_per_round = 9999999999999999999999"),
    ('training={optimizer="adam",momentum=0.9}', "training.momentum = 0.9"),
    ("training={stragglers=1.0,keep_stragglers=false}", "training.stragglers = 1.0"),
    ("evaluation.target=95", "evaluation.target = 95.0: an accuracy lies in (0, 1]; did you mean 0.95?"),
    ("evaluation.target=0", "evaluation.target = 0.0"),
    ("evaluation.target=nan", "evaluation.target = nan"),
    ("evaluation.on=[]", "evaluation.on = []"),
    ('evaluation.on=["test","test"]', "evaluation.on = ['test', 'test']: names a set twice"),
    ('evaluation.on=["nope"]', "evaluation.on = ['nope']: 'nope' is none of the task's sets: test, train"),
    ('evaluation.on=["validation"]', "evaluation.on = ['validation']"),
    ("evaluation.stop_at_target=true", "evaluation.stop_at_target = True: needs a target"),
    ("evaluation.every=0", "evaluation.every = 0"),
    ("evaluation.held_out=0", "evaluation.held_out = 0"),
    ("evaluation.held_out=1.0", "evaluation.held_out = 1.0"),
    ("evaluation.clients=0", "evaluation.clients = 0"),
    ("evaluation.batch_size=0", "evaluation.batch_size = 0"),
    ("engine.workers=0", "engine.workers = 0"),
    ("engine.workers=-3", "engine.workers = -3"),
    ("record.checkpoint_every=0", "record.checkpoint_every = 0"),
    ("seed=-1", "seed = -1"),
    ("format=2", "format = 2: this version of fedstrata reads recipes of format 1"),
    ('format="1"', "format = '1'"),
    ("name=../evil", "name = '../evil'"),
    ("name=", "name = ''"),
    ("task.validation=-1", "task.validation = -1"),
    ("task.validation=8000", "task.validation = 8000: must be below the 8000 training samples"),
    ("task.partition.clients=0", "task.partition.clients = 0: must be at least 1"),
    ("task.partition.clients=-1", "task.partition.clients = -1: must be at least 1"),
    ("task.partition.samples=0", "task.partition.samples = 0: must be at least 1"),
    ("task.partition.samples=100000", "samples = 100000 needs 400000 samples, but there are 8000"),
    ("task.partition={}", "task.partition.name: is missing"),
    ('task.partition={name="dirichlet",clients=4}', "task.partition.alpha: Dirichlet needs it"),
    ('task.partition={name="dirichlet",clients=4,alpha=0}', "task.partition.alpha = 0: must be > 0"),
    ('task.partition={name="dirichlet",clients=4,alpha=-1.0}', "task.partition.alpha = -1.0: must be > 0"),
    ('task.partition={name="dirichlet",clients=4,alpha=nan}', "task.partition.alpha = nan"),
    ('task.partition={name="iid_mix",iid=1,non_iid=1,classes=11,samples=5}', "task.partition.classes = 11"),
    ('task.partition={name="iid_mix",iid=0,non_iid=0,classes=1}', "iid + non_iid must be at least 1"),
    ("task.model={}", "task.model.name: is missing"),
    ("task.model.hidden=0", "hidden must be at least 1, got 0"),
    ("task.model.hidden=1.5", "task.model.hidden = 1.5"),
    ("task.model.hidden=x", "task.model.hidden = 'x'"),
    ("layers.grouping={a=['fc1']}", "layers.grouping = 'fc2.weight': this parameter belongs to no layer"),
    ("layers.grouping={a=['fc1','fc2'],b=['fc2']}", "this parameter belongs to several layers: a, b"),
    ("layers.grouping={a=['fc*'],b=['nothing']}", "layers.grouping.b = ['nothing']: matches no trainable parameter"),
    ("training.initial_weights=/nope", "training.initial_weights = '/nope': cannot be read"),
    ("training.initial_weights=/etc/passwd", "training.initial_weights = '/etc/passwd': cannot be read"),
    ("training.initial_weights=/tmp", "training.initial_weights = '/tmp': cannot be read"),
    ('algorithm={name="fedldf",n=5}', "algorithm.selection.n = 5: must be at most the clients of a round, 4"),
    ('algorithm={name="fedldf",n=0}', "algorithm.selection.n = 0: must be at least 1"),
    ('algorithm={name="fedldf",n=1.0}', "algorithm.selection.n = 1.0"),
    ('algorithm={name="hdfl",n=99999999999999999999}', "algorithm.n = 99999999999999999999: input should be"),
    ('algorithm={name="fedprox",mu=-1}', "algorithm.objective.mu = -1: must be ≥ 0"),
    ('algorithm={name="fedprox",mu=inf}', "algorithm.mu = inf: input should be a finite number"),
    ('algorithm={name="fedadp",alpha=0}', "algorithm.weighting.alpha = 0: must be > 0"),
    ('algorithm={name="fedadp",alpha="x"}', "algorithm.weighting.alpha = 'x'"),
    ('algorithm={name="fedadp",smoothing="x"}', "algorithm.weighting.smoothing = 'x'"),
    ('algorithm={name="neuron_pruning",share=0}', "algorithm.selection.share = 0"),
    ('algorithm={name="fedlap",q=2}', "algorithm.objective.q = 2"),
    # names nobody knows
    ("algorithm.name=nope", "algorithm.name = 'nope': unknown"),
    ("algorithm.name=fedldff", "algorithm.name = 'fedldff': unknown (did you mean fedldf?)"),
    ("algorithm.name=3", "algorithm.name = 3: must be a string"),
    ("algorithm.objective.name=nope", "algorithm.objective.name = 'nope': unknown"),
    ("algorithm.selection.name=nope", "algorithm.selection.name = 'nope': unknown"),
    ("algorithm.weighting.name=nope", "algorithm.weighting.name = 'nope': unknown"),
    ("task.dataset=nope", "task.dataset = 'nope': unknown"),
    ("task.model.name=nope", "task.model.name = 'nope': unknown"),
    ("task.partition.name=nope", "task.partition.name = 'nope': unknown"),
    ("task.inputs=raw", "task.inputs = 'raw'"),
    ("training.optimizer=lion", "training.optimizer = 'lion'"),
    ("training.sampling=x", "training.sampling = 'x'"),
    ("layers.grouping=nope", "layers.grouping = 'nope': is none of module, tensor, block"),
    ("engine.name=nope", "engine.name = 'nope'"),
    ("engine.dtype=float16", "engine.dtype = 'float16'"),
    ("engine.device=tpu", "engine.device = 'tpu': must be cpu, cuda, or one of several"),
    ("name=a b", "name = 'a b': names folders: letters and digits, with . _ - between them"),
    # things that cannot be imported, or are something else
    ("algorithm.name=nope:x", "algorithm.name = 'nope:x': cannot be imported"),
    ("algorithm.name=os:nothing", "algorithm.name = 'os:nothing': cannot be imported"),
    ("algorithm.name=os:getcwd", "algorithm.name = 'os:getcwd': gave a str, not an Algorithm"),
    ("algorithm.objective.name=builtins:dict", "algorithm.objective.name = 'dict': is no objective: it lacks init"),
    ("algorithm.selection.name=builtins:dict", "algorithm.selection.name = 'dict': "),
    ("algorithm.weighting.name=builtins:dict", "algorithm.weighting.name = 'dict': is no weighting: it lacks init"),
    ("task.function=nope:x", "task.function = 'nope:x': cannot be imported"),
    ("task.function=os:nothing", "task.function = 'os:nothing': cannot be imported"),
    ("task.function=os", "task.function = 'os': cannot be imported"),
    ("task.function=:", "task.function = ':': cannot be imported"),
    ("task.function=os:getcwd", "task.function = 'os:getcwd': gave a str, not a fedstrata.Task"),
    ("task.function=json:__name__", "task.function = 'json:__name__'"),
    ("task.function=python", "task.function = 'python': this run's Task was given in Python"),
    ("task.dataset=nope:load", "task.dataset = 'nope:load': cannot be imported"),
    ("task.dataset=os:getcwd", "task.dataset = 'os:getcwd': must give ((x, y), (x, y))"),
    ('task.model={name="os:getcwd"}', "task.model.name = 'os:getcwd': gave a str, not a torch.nn.Module"),
    ("task.model.name=nope:Net", "task.model.name = 'nope:Net': cannot be imported"),
    # not a setting at all
    ("nothing", "--set = 'nothing': must look like training.rounds=50"),
    ("=3", "--set = '=3': must look like training.rounds=50"),
    ("", "--set = ''"),
]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_no_setting_is_tested_twice() -> None:
    settings = [setting for setting, _ in BAD_SETTINGS]
    assert len(settings) == len(set(settings))


@pytest.mark.parametrize(("setting", "message"), BAD_SETTINGS, ids=[setting for setting, _ in BAD_SETTINGS])
def test_a_bad_setting(cli: Any, recipe: Any, out: Path, setting: str, message: str) -> None:
    answer = cli("run", recipe(), "--out", out, "--set", setting)
    assert_refused(answer, message)
    assert not out.exists()
    assert answer.out == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--algorithm", "fedldf:n=9"], "algorithm.selection.n = 9: must be at most the clients of a round, 4"),
        (["--algorithm", "fedldf:m=2"], "algorithm.m = 2: fedldf has no such option"),
        (["--algorithm", "fedldf:n"], "fedldf:n"),
        (["--algorithm", ""], "algorithm.name = ''"),
        (["--seed", "-1"], "seed = -1"),
        (["--workers", "0"], "engine.workers = 0"),
        (["--set", "algorithm.selection.name=fedldf", "--set", "algorithm.n=0"], "algorithm.selection.n = 0"),
        (["--set", "algorithm.objective={}"], None),
        (["--set", "algorithm.objective={}", "--set", "algorithm.name=nope"], "algorithm.name = 'nope'"),
    ],
    ids=str,
)
def test_bad_options(cli: Any, recipe: Any, out: Path, options: list[str], message: str | None) -> None:
    answer = cli("run", recipe(), "--out", out, *options)
    if message is None:  # an axis table without a name keeps the algorithm's rule
        assert answer.code == 0, answer.err
    else:
        assert_refused(answer, message)
        assert not out.exists()


BAD_RECIPES: dict[str, tuple[bytes, str]] = {
    "syntax": (b"[training\nrounds = 3", "is not valid TOML"),
    "twice": (b"seed = 1\nseed = 2", "is not valid TOML"),
    "not-utf8": (b"name = '\xff\xfe'", "not UTF-8 text"),
    "nul": (b"name = 'a\x00b'", "is not valid TOML"),
    "another-format": (b"format = 99", "format = 99: this version of fedstrata reads recipes of format 1"),
    "bad name": (b"seed = 1", "name = 'bad name'"),
    "deep": (b"[training.rounds.more]\nx = 1", "training.rounds = {'more': {'x': 1}}"),
    "array-of-tables": (b"[[training]]\nrounds = 1", "training = [{'rounds': 1}]"),
    "date": (b"seed = 2024-01-01", "seed = datetime.date(2024, 1, 1)"),
}


@pytest.mark.parametrize("name", BAD_RECIPES)
def test_a_bad_recipe(cli: Any, tmp_path: Path, name: str) -> None:
    content, message = BAD_RECIPES[name]
    (tmp_path / f"{name}.toml").write_bytes(content)
    assert_refused(cli("run", tmp_path / f"{name}.toml", "--out", tmp_path / "out"), message)
    assert not (tmp_path / "out").exists()


def test_recipes_that_are_not_there(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    assert_refused(cli("run", tmp_path / "none.toml"), "none.toml", "cannot be read: No such file or directory")
    assert_refused(cli("run", tmp_path / "folder.toml"), "cannot be read: Is a directory")
    assert_refused(cli("run", tmp_path), f"recipe = '{tmp_path}'")
    assert_refused(cli("run", "quickstar"), "recipe = 'quickstar'", "did you mean quickstart?")
    assert_refused(cli("run", ""), "recipe = ''")
    assert_refused(cli("run", "a\0b.toml"), "recipe = 'a\\x00b.toml'")
    assert_refused(cli("run"), "RECIPE is missing")
    for command in ("compare", "partition"):
        options = ["--algorithms", "fedavg"] if command == "compare" else []
        assert_refused(cli(command, "nope", *options), "recipe = 'nope'")


def test_an_empty_recipe_is_the_defaults(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    settings = ("training.rounds=1", 'task.model={name="logreg"}', "engine.workers=1", "training.steps=1")
    sets = [part for setting in settings for part in ("--set", setting)]
    assert cli("run", tmp_path / "empty.toml", "--out", tmp_path / "out", *sets).code == 0


# --- places ----------------------------------------------------------------------------------------------------------


def test_out_that_cannot_be(cli: Any, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recipe({"training.rounds": 1})
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    assert_refused(cli("run", path, "--out", tmp_path / "file"), "exists", str(tmp_path / "file"))
    assert_refused(cli("run", path, "--out", tmp_path / "full"), "exists and is not empty", "--resume")
    assert_refused(cli("run", path, "--out", tmp_path / "file" / "x"), str(tmp_path / "file"))
    assert_refused(cli("run", path, "--out", "/proc/nowhere/x"), "/proc/nowhere")
    assert_refused(cli("run", path, "--out", tmp_path / ("x" * 300)), "xxx")
    assert_refused(cli("compare", path, "-a", "fedavg", "--out", tmp_path / "file"), str(tmp_path / "file"))
    assert_refused(cli("compare", path, "-a", "fedavg", "--out", tmp_path / "full"), "holds no comparison")
    assert_refused(cli("compare", path, "-a", "fedavg", "--out", tmp_path / "file" / "x"), str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "full" / "mine").read_text() == "mine"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for here in (".", "", "../here"):  # a run directory is moved into place whole, which would pull the ground away
        assert_refused(cli("run", path, "--out", here), "--out")
    assert list((tmp_path / "here").iterdir()) == []
    (tmp_path / "empty").mkdir()
    assert cli("run", path, "--out", tmp_path / "empty").code == 0  # another empty folder is as good as none


def test_folders_one_may_not_write_to(cli: Any, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may run as root, who is refused nothing, so the refusal is put in."""
    path = recipe({"training.rounds": 1})
    assert cli("run", path, "--out", tmp_path / "run").code == 0

    def refuse(file: Any, *args: Any, **options: Any) -> int:
        raise PermissionError(13, "Permission denied", str(file))

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", refuse)
        assert_refused(cli("run", path, "--out", tmp_path / "other"), "Permission denied", str(tmp_path), "other")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        answer = cli("run", "--resume", tmp_path / "run", "--set", "training.rounds=2")
        assert_refused(answer, f"{tmp_path / 'run' / 'run.json'}: Permission denied")


# --- run directories -------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tiny: Any, tmp_path: Path) -> Run:
    """A run that has one round left to go."""
    run, experiment = create_run(fedstrata.load(tiny()), tmp_path / "run")
    lines = run_rounds(run, experiment)
    next(lines)
    next(lines)
    lines.close()
    return run


def files_of(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file() and f.name != "lock"}


def test_resume_what_is_no_run(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for command in (["run", "--resume"], ["show"]):
        assert_refused(cli(*command, tmp_path / "none"), "none does not exist or is no directory")
        assert_refused(cli(*command, tmp_path / "file"), "file does not exist or is no directory")
        assert_refused(cli(*command, tmp_path / "folder"), "is no run directory: it has no run.json")
    assert_refused(cli("export", tmp_path / "none", tmp_path / "x"), "none does not exist")
    assert list((tmp_path / "folder").iterdir()) == []


def test_resume_with_what_does_not_go_with_it(cli: Any, run: Run, recipe: Any, tmp_path: Path) -> None:
    before = files_of(run.path)
    path = recipe()
    assert_refused(cli("run", path, "--resume", run.path), f"RECIPE = '{path}'", "does not go with --resume")
    assert_refused(cli("run", "--resume", run.path, "--seed", "1"), "--seed = '1'")
    assert_refused(cli("run", "--resume", run.path, "--out", tmp_path / "x"), "--out = ")
    assert_refused(cli("run", "--resume", run.path, "--algorithm", "fedldf"), "--algorithm = 'fedldf'")
    assert_refused(cli("run", "--resume", run.path, "--set", "seed=3"), "seed = 3: cannot change")
    assert_refused(cli("run", "--resume", run.path, "--set", "training.lr=1.0"), "training.lr = 1.0: cannot change")
    assert_refused(cli("run", "--resume", run.path, "--set", "training.rounds=1"), "2 rounds are already done")
    assert_refused(cli("run", "--resume", run.path, "--set", "training.rounds=x"), "training.rounds = 'x'")
    assert_refused(cli("run", "--resume", run.path, "--set", "nothing"), "--set = 'nothing'")
    assert_refused(cli("run", "--resume", run.path, "--workers", "0"), "engine.workers = 0")
    assert files_of(run.path) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is no run directory: it has no run.json"),
        (b"", "run.json is damaged"),
        (b"{", "run.json is damaged"),
        (b"\xff\xff", "run.json is damaged"),
        (b"[]", "run.json: format = []"),
        (b"{}", "run.json: format = None"),
        (b'{"format": 3}', "run.json: format = 3; this version of fedstrata reads format 1 and 2"),
        (b'{"format": 2}', "run.json is damaged: created: missing"),
    ],
    ids=str,
)
def test_a_bad_run_json(cli: Any, run: Run, content: bytes | None, message: str) -> None:
    (run.path / "run.json").unlink()
    if content is not None:
        (run.path / "run.json").write_bytes(content)
    before = files_of(run.path)
    for command in (["run", "--resume", run.path], ["show", run.path], ["export", run.path, run.path / "x"]):
        assert_refused(cli(*command), message)
    assert files_of(run.path) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "recipe.toml"), (b"[", "recipe.toml is damaged"), (b"x = 1", "recipe.toml was edited after the run began")],
    ids=str,
)
def test_a_bad_recipe_in_a_run_directory(cli: Any, run: Run, content: bytes | None, message: str) -> None:
    (run.path / "recipe.toml").unlink()
    if content is not None:
        (run.path / "recipe.toml").write_bytes(content)
    assert_refused(cli("run", "--resume", run.path), message)


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "garbage", "metadata", "round", "none"])
def test_a_damaged_checkpoint(cli: Any, run: Run, tiny: Any, tmp_path: Path, same_run: Any, damage: str) -> None:
    """It says so, says what to do, and doing that leads to the same end."""
    last = run.path / "checkpoints" / "000002.safetensors"
    content = last.read_bytes()
    if damage == "flipped":
        last.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    elif damage == "metadata":
        last.write_bytes(content.replace(b'"round":"2"', b'"ruond":"2"'))
    elif damage == "round":  # one bit of it: a run that believes this would leave out rounds
        last.write_bytes(content.replace(b'"round":"2"', b'"round":"3"'))
    elif damage == "none":
        last.unlink()
        (run.path / "checkpoints" / "000001.safetensors").unlink()
        assert_refused(cli("run", "--resume", run.path), "checkpoints is empty")
        return
    else:
        last.write_bytes({"truncated": content[:-1000], "empty": b"", "garbage": os.urandom(500)}[damage])
    before = files_of(run.path)
    answers = [cli("run", "--resume", run.path), cli("export", run.path, tmp_path / "x"), cli("show", run.path)]
    for answer in answers:
        assert_refused(answer, f"checkpoint {last} is damaged", "delete it to go on from the checkpoint before it")
    assert files_of(run.path) == before
    last.unlink()
    assert cli("run", "--resume", run.path).code == 0
    fedstrata.run(tiny(), out=tmp_path / "whole")
    same_run(run.path, tmp_path / "whole")


def test_a_checkpoint_of_another_version_or_model(cli: Any, run: Run, tiny: Any, tmp_path: Path) -> None:
    last = run.path / "checkpoints" / "000002.safetensors"
    content = last.read_bytes()
    last.write_bytes(content.replace(b'"format":"2"', b'"format":"3"'))
    assert_refused(cli("run", "--resume", run.path), "format = '3', expected '2'")
    other = fedstrata.run(tiny({"task.model.hidden": 5}), out=tmp_path / "other")
    last.write_bytes((other.path / "checkpoints" / "000002.safetensors").read_bytes())
    assert_refused(cli("run", "--resume", run.path), f"{last} is of another run")


def test_a_model_whose_code_changed_since_the_checkpoint(cli: Any, tiny: Any, tmp_path: Path, user_module: Any) -> None:
    code = "from torch import nn\ndef build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10{}))"
    user_module("changing", code.format(""))
    run = fedstrata.run(tiny({"task.model": {"name": "changing:build"}, "training.rounds": 1}), out=tmp_path / "run")
    user_module("changing", code.format(", bias=False"))
    answer = cli("run", "--resume", run.path, "--set", "training.rounds=2")
    assert answer.code == 2
    assert "numbers of torch.float32, the recipe's model" in answer.err


def test_a_torn_last_line_is_dropped(cli: Any, run: Run, tiny: Any, tmp_path: Path, same_run: Any) -> None:
    history = run.path / "history.jsonl"
    history.write_bytes(history.read_bytes() + b'{"round":3,"attempt":0,"cli')
    assert len(run.history()) == 2
    assert cli("show", run.path).code == 0
    assert cli("run", "--resume", run.path).code == 0
    fedstrata.run(tiny(), out=tmp_path / "whole")
    same_run(run.path, tmp_path / "whole")


@pytest.mark.parametrize("garbage", [b"garbage\n", b"\xff\xff\n", b"\n", b"3\n", b"{}\n", b'{"round": "x"}\n'], ids=str)
def test_garbage_within_the_history(cli: Any, run: Run, garbage: bytes) -> None:
    history = run.path / "history.jsonl"
    lines = history.read_bytes().splitlines(keepends=True)
    history.write_bytes(lines[0] + garbage + lines[1])
    before = files_of(run.path)
    assert_refused(cli("run", "--resume", run.path), f"{history} is damaged")
    assert_refused(cli("show", run.path), f"{history} is damaged")
    assert files_of(run.path) == before


def test_a_history_that_misses_rounds_is_not_taken_for_whole(cli: Any, run: Run) -> None:
    """A checkpoint has all of its past beside it; without it, totals would be wrong without a word."""
    (run.path / "history.jsonl").unlink()
    assert_refused(cli("run", "--resume", run.path), "history.jsonl")


def test_damaged_figures(cli: Any, run: Run) -> None:
    file = run.path / "layers" / "000002.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    assert_refused(cli("show", run.path), f"{file} is damaged")


def test_two_processes_on_one_run(cli: Any, run: Run) -> None:
    lines = run_rounds(run)
    next(lines)
    answer = cli("run", "--resume", run.path)  # flock is per open file: a second one in this process is another
    assert_refused(answer, f"{run.path} is in use by process {os.getpid()}")
    assert_refused(cli("run", "--resume", run.path, "--set", "training.rounds=9"), "is in use by process")
    lines.close()
    assert cli("run", "--resume", run.path).code == 0


def test_export_overwrites_nothing(cli: Any, run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    assert_refused(cli("export", run.path, tmp_path / "mine"), "mine exists; it is not overwritten")
    assert (tmp_path / "mine").read_text() == "mine"
    assert_refused(cli("export", run.path, tmp_path / "mine" / "x"), str(tmp_path / "mine"))
    assert_refused(cli("export", run.path, "/proc/x"), "/proc/x")


# --- data ------------------------------------------------------------------------------------------------------------


def test_missing_data(cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    answer = cli("run", "fedadp-mnist-5iid-5x1", "--data", tmp_path, "--out", out)
    assert_refused(answer, "mnist", "fedstrata data get mnist", "--data DIR")
    assert not out.exists()
    assert_refused(cli("partition", "fedadp-mnist-5iid-5x1", "--data", tmp_path / "none"), "fedstrata data get mnist")
    assert_refused(cli("data", "show", "nope"), "'nope'")


def test_corrupt_data(cli: Any, tmp_path: Path) -> None:
    folder = tmp_path / "mnist"
    folder.mkdir()
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        header = bytes([0, 0, 8, 3]) + b"".join(size.to_bytes(4) for size in (60_000, 28, 28))
        whole = gzip.compress(header + os.urandom(5000))
        (folder / f"{name}-ubyte.gz").write_bytes(whole[:2000])
    answer = cli("run", "fedadp-mnist-5iid-5x1", "--data", tmp_path, "--out", tmp_path / "out")
    assert_refused(answer, "ubyte.gz", "cut short or damaged")
    assert not (tmp_path / "out").exists()


# --- comparisons -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-a", ""], "--algorithms = []: names nothing to run"),
        (["-a", "fedavg,fedavg"], "names the same one twice"),
        (["-a", "fedavg,nope"], "algorithm.name = 'nope'"),
        (["-a", "fedavg", "--seeds", "x"], "--seeds = 'x': must look like 0..4 or 0,1,7"),
        (["-a", "fedavg", "--seeds", ""], "--seeds = ''"),
        (["-a", "fedavg", "--seeds", "3..1"], "--seeds"),
        (["-a", "fedavg", "--seeds", "1,1"], "names the same one twice"),
        (["-a", "fedavg", "--seeds", "-1"], "seed = -1"),
        (["-a", "fedavg", "--seeds", "1.5"], "--seeds = '1.5'"),
        (["-a", "fedavg", "--seeds", "0..2..4"], "--seeds = '0..2..4'"),
        (["-a", "fedavg", "--set", "x"], "--set = 'x'"),
        (["-a", "fedavg", "--workers", "0"], "engine.workers = 0"),
        (["-a", "fedavg,fedldf:n=9"], "algorithm.selection.n = 9"),
    ],
    ids=str,
)
def test_bad_comparisons(cli: Any, recipe: Any, tmp_path: Path, options: list[str], message: str) -> None:
    """Found before the first cell runs, and before the directory is claimed."""
    assert_refused(cli("compare", recipe(), "--out", tmp_path / "out", *options), message)
    assert not (tmp_path / "out").exists()


# --- the real command ------------------------------------------------------------------------------------------------


def test_the_real_command(recipe: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedstrata"]
    options: dict[str, Any] = {"capture_output": True, "text": True, "cwd": tmp_path, "env": process_environment()}
    first = subprocess.run([*command, "run", recipe(), "--set", "evaluation.target=95"], **options)
    assert_refused(Answer(first.returncode, first.stdout, first.stderr), "evaluation.target = 95.0", "0.95")
    second = subprocess.run([*command, "run", "--resume", tmp_path / "none"], **options)
    assert_refused(Answer(second.returncode, second.stdout, second.stderr), "does not exist")
    assert not (tmp_path / "runs").exists()


def test_a_failure_that_is_not_the_users_is_code_1(cli: Any, recipe: Any, tmp_path: Path) -> None:
    settings = {"training.dropouts": 0.99, "training.min_replies": 1.0, "training.attempts": 1}
    answer = cli("run", recipe(settings), "--out", tmp_path / "run")
    assert answer.code == 1
    assert answer.err.startswith("error: round 1: ")
    assert answer.err.count("\n") == 1


# --- clients that fail -----------------------------------------------------------------------------------------------


class Broken(Dataset[Any]):
    """Eight points, and an accident when they are read."""

    def __init__(self, accident: Any) -> None:
        self.accident = accident

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.accident(index)


def raises(index: int) -> Any:
    raise OSError("the disk\nis gone")


def nan(index: int) -> Any:
    return torch.full((2,), float("nan")), 0


def wrong_shape(index: int) -> Any:
    return torch.ones(3), 0


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("accident", "why"),
    [
        (raises, "failed: OSError: the disk is gone"),
        (nan, "not finite: update"),
        (wrong_shape, "failed: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_a_client_that_fails_costs_the_round_that_client_only(
    blobs: Any, tmp_path: Path, accident: Any, why: str, workers: int
) -> None:
    task = Task(
        model=lambda: nn.Linear(2, 2),
        clients=[blobs(8, 0), Broken(accident), blobs(8, 2)],
        evaluation={"test": blobs(20, 9)},
    )
    table = {"training": {"rounds": 2}, "engine": {"workers": workers}}
    run = fedstrata.run(table, task=task, out=tmp_path / "run")
    for line in run.history():
        assert line["replies"] == 2
        assert [entry["client"] for entry in line["lost"]] == [1]
        ((_, status),) = missing(line["lost"])
        assert str(status).startswith(why)
        assert "\n" not in str(status)
        figures = run.layers(line["round"])
        assert figures["mask"].tolist() == [[1.0], [0.0], [1.0]]
    assert json.loads((run.path / "history.jsonl").read_text().splitlines()[0])["lost"]
    # the others' rounds are those of a task in which the client has nothing to give
    empty = (torch.empty(0, 2), torch.empty(0, dtype=torch.int64))
    without = Task(model=task.model, clients=[task.clients[0], empty, task.clients[2]], evaluation=task.evaluation)
    alone = fedstrata.run(table, task=without, out=tmp_path / "without")
    assert alone.summary()["weights_sha256"] == run.summary()["weights_sha256"]


def test_scores_that_are_not_finite_lose_the_client(blobs: Any, tmp_path: Path) -> None:
    task = Task(
        model=lambda: nn.Linear(2, 2), clients=[blobs(8, 0), Broken(nan), blobs(8, 2)], evaluation={"test": blobs(9, 9)}
    )
    table = {"training": {"rounds": 1}, "engine": {"workers": 1}, "algorithm": {"name": "fedldf", "n": 1}}
    (line,) = fedstrata.run(table, task=task, out=tmp_path / "run").history()
    assert missing(line["lost"]) == [(1, Status("not finite", "scores"))]


def test_if_everyone_fails_the_run_stops_and_says_why(blobs: Any, tmp_path: Path) -> None:
    task = Task(model=lambda: nn.Linear(2, 2), clients=[Broken(raises)] * 2, evaluation={"test": blobs(9, 9)})
    with pytest.raises(RoundFailed, match="client 0: failed: OSError: the disk is gone"):
        fedstrata.run({"engine": {"workers": 1}}, task=task, out=tmp_path / "run")


def test_a_broken_test_set_is_an_error_that_names_it(blobs: Any, tmp_path: Path) -> None:
    task = Task(model=lambda: nn.Linear(2, 2), clients=[blobs(8, 0)], evaluation={"test": Broken(raises)})
    with pytest.raises(FedstrataError, match="evaluation on test in round 1: failed: OSError: the disk is gone"):
        fedstrata.run({"engine": {"workers": 1}}, task=task, out=tmp_path / "run")


def test_a_python_task_has_to_be_given_again(blobs: Any, tmp_path: Path, cli: Any) -> None:
    task = Task(model=lambda: nn.Linear(2, 2), clients=[blobs(8, 0)], evaluation={"test": blobs(9, 9)})
    fedstrata.run({"training": {"rounds": 1}, "engine": {"workers": 1}}, task=task, out=tmp_path / "run")
    answer = cli("run", "--resume", tmp_path / "run", "--set", "training.rounds=2")
    assert_refused(answer, "task.function = 'python': this run's Task was given in Python; give it again there")
    assert fedstrata.resume(tmp_path / "run", task=task, settings={"training.rounds": 2}).finished()


def test_another_task_than_the_runs_is_refused(blobs: Any, tmp_path: Path) -> None:
    task = Task(model=lambda: nn.Linear(2, 2), clients=[blobs(8, 0)], evaluation={"test": blobs(9, 9)})
    run = fedstrata.run({"training": {"rounds": 1}, "engine": {"workers": 1}}, task=task, out=tmp_path / "run")
    other = Task(model=lambda: nn.Linear(2, 3), clients=[blobs(8, 0)], evaluation={"test": blobs(9, 9)})
    with pytest.raises(RunDirectoryError, match="has 6 numbers"):
        fedstrata.resume(run.path, task=other, settings={"training.rounds": 2})
