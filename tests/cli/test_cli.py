"""The command line: what it shows, and that every command does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedstrata
from fedstrata.algorithms import AXES, NAMED
from fedstrata.formatting import duration, number, size
from fedstrata.recipes.catalog import RECIPES
from fedstrata.recipes.schema import Recipe
from fedstrata.runs.reader import Run
from fedstrata.runs.runner import create_run, run_rounds
from fedstrata.tasks.models import MODELS
from fedstrata.tasks.partitions import PARTITIONS
from tests.support.processes import process_environment


@pytest.mark.parametrize(
    ("command", "mentioned"),
    [
        (
            [],
            ["run", "compare", "reproduce", "show", "report", "export", "partition", "list", "data", "--version"],
        ),
        (["run"], ["--algorithm", "--set", "--seed", "--out", "--data", "--workers", "--resume", "quickstart"]),
        (["compare"], ["--algorithms", "--seeds", "--set", "--out", "--data", "--workers"]),
        (["reproduce"], ["python -m reproductions"]),
        (["show"], ["DIR"]),
        (["report"], ["DIR", "--out", "--open"]),
        (["export"], ["DIR", ".safetensors", "--data"]),
        (["partition"], ["--set", "--seed", "--data"]),
        (["list"], ["recipes", "algorithms", "rules", "models", "partitions", "settings", "runs"]),
        (["data"], ["list", "get", "show"]),
        (["data", "get"], ["--from", "--data"]),
        (["data", "list"], ["--data"]),
        (["data", "show"], ["--data"]),
    ],
    ids=str,
)
def test_help(cli: Any, command: list[str], mentioned: list[str]) -> None:
    answer = cli(*command, "--help")
    assert answer.code == 0
    for word in mentioned:
        assert word in answer.out, word


def test_every_documented_option_of_run_is_explained(cli: Any) -> None:
    text = cli("run", "--help").out
    for option in ("--algorithm", "--set", "--seed", "--out", "--data", "--workers", "--resume"):
        line = next(line for line in text.splitlines() if re.search(rf"│.*{option} ", line))
        assert len(line.replace("│", "").split()) > 3, line
    assert "A .toml file, or a name from" in text  # the argument


@pytest.mark.parametrize("argv", [[], ["adaptive-mu", "--quick"], ["--list"], ["--page", "page.md"]], ids=str)
def test_reproduce_says_where_the_studies_are(cli: Any, argv: list[str]) -> None:
    answer = cli("reproduce", *argv)
    assert (answer.code, answer.out) == (2, "")
    (line,) = answer.err.splitlines()
    assert "reproductions/" in line
    assert "python -m reproductions" in line


def test_version(cli: Any) -> None:
    assert cli("--version").out == f"fedstrata {fedstrata.__version__}\n"


def test_help_does_not_wait_for_torch(tmp_path: Path) -> None:
    code = "import sys, fedstrata.cli; assert 'torch' not in sys.modules, 'torch was loaded'"
    done = subprocess.run([sys.executable, "-c", code], env=process_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("topic", "names"),
    [
        ("recipes", list(RECIPES.names())),
        ("algorithms", list(NAMED)),
        ("rules", [rule for rules in AXES.values() for rule in rules]),
        ("models", list(MODELS)),
        ("partitions", list(PARTITIONS)),
        (
            "settings",
            ["training.rounds", "evaluation.target", "engine.workers", "task.dataset", "record.layers", "seed"],
        ),
    ],
)
def test_list(cli: Any, topic: str, names: list[str]) -> None:
    answer = cli("list", topic)
    assert answer.code == 0
    for name in names:
        assert name in answer.out, name


def test_every_setting_is_listed(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    text = cli("list", "settings").out
    for table in ("training", "evaluation", "engine", "record", "layers", "task"):
        for key in Recipe.model_fields[table].annotation.model_fields:
            assert f"{table}.{key}" in text


def test_list_everything_and_runs(cli: Any, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    answer = cli("list")
    assert answer.code == 0
    assert all(word in answer.out for word in ("quickstart", "fedldf", "dirichlet", "mlp"))
    assert cli("list", "runs").out == "no runs here yet\n"
    fedstrata.run(tiny(), out="runs/whole")
    create_run(fedstrata.load(tiny()), "runs/empty")
    (tmp_path / "runs" / "bad").mkdir()
    (tmp_path / "runs" / "bad" / "run.json").write_text("{")
    text = cli("list", "runs").out
    lines = {name: next(line for line in text.splitlines() if f"runs/{name}" in line) for name in ("whole", "empty")}
    assert "3/3" in lines["whole"]
    assert " finished" in lines["whole"].replace("not finished", "")
    assert "0/3" in lines["empty"]
    assert "not finished" in lines["empty"]
    assert "damaged" in text


# --- run, show, export, partition ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMED)
def test_quickstart_with_every_algorithm(cli: Any, tiny: Any, tmp_path: Path, name: str) -> None:
    """`tiny` is asked for so that the data is read once."""
    out = tmp_path / "run"
    settings = ["--set", f"algorithm.name={name}", "--set", "training.rounds=2", "--workers", "1"]
    answer = cli("run", "quickstart", *settings, "--out", out)
    assert answer.code == 0, answer.err
    assert f"quickstart: {name}, seed 0" in answer.out
    assert "round 2/2" in answer.out
    assert answer.err == ""
    run = Run(out)
    assert run.finished()
    assert run.summary()["weights_sha256"] in answer.out
    assert f"run directory: {out}" in answer.out
    assert len(run.history()) == 2
    assert run.summary()["accuracy"] > 0.15
    shown = cli("show", out)
    assert shown.code == 0, shown.err
    for layer in run.layer_names:
        assert layer in shown.out


def test_show_a_finished_run(cli: Any, recipe: Any, tmp_path: Path) -> None:
    assert cli("run", recipe({"evaluation.target": 1.0}), "-a", "fedldf:n=1", "--out", tmp_path / "run").code == 0
    text = cli("show", tmp_path / "run").out
    assert "tiny: fedldf, seed 0" in text
    assert "not finished" not in text
    assert "rounds to 1" in text
    assert "not reached in 3" in text
    assert "fc1" in text
    assert "fc2" in text
    assert text.count(" 1/4 ") == 2  # of each layer
    assert "samples by client and class" in text
    assert "mnist-mini" in text


def test_show_a_run_without_figures(cli: Any, recipe: Any, tmp_path: Path) -> None:
    assert cli("run", recipe({"record.layers": False}), "--out", tmp_path / "run").code == 0
    answer = cli("show", tmp_path / "run")
    assert answer.code == 0, answer.err
    assert "fc1" in answer.out


def test_show_unfinished_and_empty_runs(cli: Any, tiny: Any, tmp_path: Path) -> None:
    run, experiment = create_run(fedstrata.load(tiny()), tmp_path / "run")
    answer = cli("show", run.path)
    assert answer.code == 0
    assert "no round is done yet" in answer.out
    lines = run_rounds(run, experiment)
    next(lines)
    lines.close()
    answer = cli("show", run.path)
    assert answer.code == 0
    assert f"not finished; go on with: fedstrata run --resume {run.path}" in answer.out


def test_a_run_that_goes_on_is_running(cli: Any, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not "not finished; go on with …", which would be refused."""
    monkeypatch.chdir(tmp_path)
    run, experiment = create_run(fedstrata.load(tiny()), "runs/one")
    assert not run.running()
    lines = run_rounds(run, experiment)
    for done in (1, 2, 3):
        next(lines)
        assert run.running()
        text = cli("list", "runs").out
        assert f"{done}/3" in text
        assert "running" in text
        shown = cli("show", run.path)
        assert "running: this is what it has done so far" in shown.out
        assert "--resume" not in shown.out
    lines.close()
    assert not run.running()
    assert "running" not in cli("list", "runs").out + cli("show", run.path).out


def test_show_lost_clients(cli: Any, recipe: Any, tmp_path: Path) -> None:
    assert cli("run", recipe({"training.dropouts": 0.5}), "--out", tmp_path / "run").code == 0
    lost = sum(len(line["lost"]) for line in Run(tmp_path / "run").history())
    assert lost > 0
    text = cli("show", tmp_path / "run").out
    assert f"{lost} lost replies" in text
    assert "dropped out" in text


def test_show_brackets_as_they_are(cli: Any, user_module: Any, tmp_path: Path) -> None:
    """Names and reasons with square brackets are no markup."""
    user_module(
        "bracket_task",
        """
import torch
from torch import nn
from fedstrata import Task
class Bad(torch.utils.data.Dataset):
    def __len__(self): return 3
    def __getitem__(self, i): raise ValueError("[red]index[/nothing] [3]")
def make():
    data = (torch.ones(4, 2), torch.zeros(4, dtype=torch.int64))
    return Task(model=lambda: nn.Linear(2, 2), clients=[data, Bad()], evaluation={"test": data})
""",
    )
    (tmp_path / "b.toml").write_text("[task]\nfunction='bracket_task:make'\n[training]\nrounds=1\n[engine]\nworkers=1")
    answer = cli("run", tmp_path / "b.toml", "--out", tmp_path / "run")
    assert answer.code == 0, answer.err
    assert "[red]index[/nothing] [3]" in answer.out
    answer = cli("show", tmp_path / "run")
    assert answer.code == 0, answer.err
    assert "[red]index[/nothing] [3]" in answer.out


def test_export(cli: Any, recipe: Any, tmp_path: Path) -> None:
    assert cli("run", recipe(), "--out", tmp_path / "run").code == 0
    target = tmp_path / "a" / "model.safetensors"
    answer = cli("export", tmp_path / "run", target)
    assert answer.code == 0, answer.err
    assert f"wrote {target}" in answer.out.replace("\n", "")
    state = load_file(target)
    assert set(state) == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}
    Run(tmp_path / "run").model().load_state_dict(state, strict=True)


@pytest.mark.parametrize("name", ["m.pt", "m.pth", "m.bin", "m.npz", "m.v2"])
def test_export_writes_no_safetensors_under_another_name(cli: Any, recipe: Any, tmp_path: Path, name: str) -> None:
    assert cli("run", recipe({"training.rounds": 1}), "--out", tmp_path / "run").code == 0
    answer = cli("export", tmp_path / "run", tmp_path / name)
    assert (answer.code, answer.out) == (2, "")
    assert f"error: {tmp_path / name}: the model is written as safetensors" in answer.err
    assert f"name it {tmp_path / 'm.safetensors'}" in answer.err
    assert not (tmp_path / name).exists()
    if name == "m.pt":  # what it says instead, does
        (code,) = re.findall(r"torch\.save\(.*\)", answer.err)
        exec(code, {"torch": torch, "fedstrata": fedstrata})
        assert cli("export", tmp_path / "run", tmp_path / "m.safetensors").code == 0
        theirs, ours = torch.load(tmp_path / name), load_file(tmp_path / "m.safetensors")
        assert {key: value.tolist() for key, value in theirs.items()} == {k: v.tolist() for k, v in ours.items()}


def test_partition(cli: Any, recipe: Any) -> None:
    path = recipe({"task.partition": {"name": "iid_mix", "iid": 1, "non_iid": 2, "classes": 1, "samples": 30}})
    answer = cli("partition", path)
    assert answer.code == 0, answer.err
    rows = [re.findall(r"\d+|·", line) for line in answer.out.splitlines() if re.match(r"│\s+\d", line)]
    assert [row[-1] for row in rows] == ["30"] * 3
    assert sum(cell != "·" for cell in rows[1][1:-1]) == 1
    assert cli("partition", path, "--seed", "1").out != answer.out
    assert cli("partition", path).out == answer.out
    fewer = cli("partition", path, "--set", "task.partition.iid=0")
    assert len([line for line in fewer.out.splitlines() if re.match(r"│\s+\d", line)]) == 2


def test_run_then_extend(cli: Any, recipe: Any, tmp_path: Path) -> None:
    assert cli("run", recipe(), "--seed", "7", "--out", tmp_path / "run").code == 0
    assert Run(tmp_path / "run").recipe.seed == 7
    answer = cli("run", "--resume", tmp_path / "run", "--set", "training.rounds=4")
    assert answer.code == 0, answer.err
    assert "round 4/4" in answer.out
    assert "round 3/4" not in answer.out
    answer = cli("run", "--resume", tmp_path / "run")
    assert answer.code == 0
    assert "round " not in answer.out.split("┌")[0].replace("rounds", "")


def test_options_of_an_axis_without_its_name(cli: Any, recipe: Any, tmp_path: Path) -> None:
    """`fedprox` with its objective's μ changed by its full name."""
    options = ["-a", "fedprox", "--set", "algorithm.objective.mu=0.5"]
    answer = cli("run", recipe(), *options, "--out", tmp_path / "run")
    assert answer.code == 0, answer.err
    assert Run(tmp_path / "run").layers(1)["mu"].ravel().tolist() == pytest.approx([0.5] * 8)


def test_a_slip_is_put_right_once(cli: Any) -> None:
    answer = cli("rum")
    assert answer.code == 2
    assert "No such command 'rum'" in answer.err
    assert answer.err.count("Did you mean") <= 1


@pytest.mark.parametrize("pair", [("--nope",), ("quickstart", "extra"), ("quickstart", "--seed", "x")])
def test_misuse_is_code_2_and_no_traceback(cli: Any, pair: tuple[str, ...]) -> None:
    answer = cli("run", *pair)
    assert answer.code == 2
    assert "Traceback" not in answer.err


# --- figures for people ----------------------------------------------------------------------------------------------


def test_sizes() -> None:
    assert [size(n) for n in (0, 999, 1000, 1_234_567, 10**9, 5 * 10**12)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1.23 MB",
        "1 GB",
        "5 TB",
    ]
    assert size(999_999) in ("1e+03 kB", "1 MB")
    assert size(float("inf")) == "–"


def test_durations() -> None:
    assert [duration(s) for s in (0.04, 9.94, 42.4, 61, 3599, 3600, 7325)] == [
        "0.0 s",
        "9.9 s",
        "42 s",
        "1:01 min",
        "59:59 min",
        "1:00 h",
        "2:02 h",
    ]


def test_figures() -> None:
    assert number(None) == number(float("nan")) == "–"
    assert number(0.123456) == "0.1235"
