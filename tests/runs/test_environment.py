"""Going on with another arithmetic, torch, NumPy or CPU than a run began with, and recipes of version 0.1."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fedstrata
from fedstrata.core import determinism
from fedstrata.core.determinism import ARITHMETIC
from fedstrata.core.errors import RunDirectoryError
from fedstrata.recipes import schema
from fedstrata.recipes.schema import EngineConfig, load
from fedstrata.runs import environment
from fedstrata.runs.reader import Run
from fedstrata.runs.runner import create_run, run_rounds
from tests.support.runs import forge_recipe

Said = Callable[[], list[str]]

IGNORED = "ignored; every client is trained on its own, by the same trainer on every engine"


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Said]:
    """What was logged since the last time; nothing was said before in this process."""
    schema._say_ignored.cache_clear()

    def lines() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    yield lines
    schema._say_ignored.cache_clear()


def info(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((path / "run.json").read_text())
    return content


def forge(path: Path, **changes: Any) -> None:
    """Change run.json; None takes a field away."""
    about = {key: value for key, value in (info(path) | changes).items() if value is not None}
    (path / "run.json").write_text(json.dumps(about))


def made_with(path: Path, **versions: str) -> None:
    """As if the run had begun with these."""
    forge(path, versions=info(path)["versions"] | versions)


def stop_after(table: dict[str, Any], out: Path, rounds: int) -> Path:
    run, experiment = create_run(load(table), out)
    _some(run_rounds(run, experiment), rounds)
    return out


def _some(lines: Iterator[Any], rounds: int) -> None:
    for _ in range(rounds):
        next(lines)
    lines.close()  # type: ignore[attr-defined]


# --- recipes of version 0.1 ------------------------------------------------------------------------------------------


def test_keys_of_version_0_1_are_ignored_and_said_once(tiny: Any, recipe: Any, said: Said) -> None:
    plain = load(tiny())
    old = {"engine.trainer": "stack", "engine.stack_size": 7}
    assert load(tiny(old)) == plain
    assert load(recipe(old)) == plain
    assert "trainer" not in load(tiny(old)).to_toml()
    assert said() == [f"engine.trainer, engine.stack_size: {IGNORED}"]
    assert load(tiny(), settings=["engine.trainer=stack"]) == plain
    assert load(tiny(), settings={"engine.trainer": "client"}) == plain
    assert said() == [f"engine.trainer: {IGNORED}"]


def test_other_unknown_keys_are_refused_as_before(tiny: Any, said: Said) -> None:
    with pytest.raises(fedstrata.core.errors.RecipeError, match=r"engine\.trainers = 'stack': unknown key"):
        load(tiny({"engine.trainers": "stack"}))
    assert said() == []


def test_the_command_line_takes_a_recipe_of_version_0_1(recipe: Any, tmp_path: Path, spawn: Any) -> None:
    process = spawn(
        "run", recipe({"engine.trainer": "auto"}), "--set", "engine.stack_size=2", "--out", tmp_path / "run"
    )
    err = process.communicate(timeout=120)[1]
    assert process.returncode == 0, err
    assert err == f"engine.trainer, engine.stack_size: {IGNORED}\n"
    assert "trainer" not in (tmp_path / "run" / "recipe.toml").read_text()
    assert info(tmp_path / "run")["resolved"] == {"threads": 1, "dtype": "float32"}


def test_no_setting_chooses_a_trainer(cli: Any) -> None:
    assert not {"trainer", "stack_size"} & EngineConfig.model_fields.keys()
    assert "engine.workers" in cli("list", "settings").out
    assert "trainer" not in cli("list", "settings").out


# --- arithmetic ------------------------------------------------------------------------------------------------------


def as_of_0_1(path: Path) -> None:
    """What version 0.1 wrote: no arithmetic, and the trainer in the recipe and in what was resolved."""
    table = tomllib.loads((path / "recipe.toml").read_text())
    table["engine"]["trainer"] = "auto"
    forge_recipe(path, table)
    resolved = {"trainer": "stack", "stack_size": 20, "why": "a plain perceptron under cross-entropy"}
    forge(path, arithmetic=None, resolved=info(path)["resolved"] | resolved)


def test_a_run_of_version_0_1_is_shown_and_not_resumed(
    tiny: Any, tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    monkeypatch.chdir(tmp_path)
    path = fedstrata.run(tiny(), out=Path("runs/old")).path
    as_of_0_1(path)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    command: tuple[object, ...]
    for command in (("show", path), ("list", "runs"), ("report", path, "--out", "p.html"), ("export", path, "model")):
        answer = cli(*command)
        assert answer.code == 0, answer
        assert "damaged" not in answer.out
    assert len(said()) == 1  # that its trainer is ignored
    for command in (("run", "--resume", path), ("run", "--resume", path, "--set", "training.rounds=5")):
        answer = cli(*command)
        assert answer.code == 2
        version = fedstrata.__version__
        assert answer.err == (
            f"error: runs/old was computed with arithmetic 1 (fedstrata {version}) and this version has {ARITHMETIC}, "
            "with other bits: it can be shown and not resumed; begin a new run\n"
        )
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    assert cli("run", path / "recipe.toml", "--out", "anew").code == 0


@pytest.mark.parametrize("now", [1, 2, 3])
def test_a_run_goes_on_with_its_own_arithmetic_only(
    now: int, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stop_after(tiny(), tmp_path / "run", 1)
    forge(path, arithmetic=2)
    monkeypatch.setattr(determinism, "ARITHMETIC", now)
    if now == 2:
        assert fedstrata.resume(path).finished()
    else:
        with pytest.raises(RunDirectoryError, match=f"computed with arithmetic 2 .* this version has {now}"):
            fedstrata.resume(path)
    assert len(Run(path).history()) == (3 if now == 2 else 1)


def test_showing_an_unfinished_run_says_whether_it_can_go_on(tiny: Any, tmp_path: Path, cli: Any) -> None:
    path = stop_after(tiny(), tmp_path / "run", 1)
    assert f"not finished; go on with: fedstrata run --resume {path}\n" in cli("show", path).out
    forge(path, arithmetic=None)
    assert f"not finished; {path} was computed with arithmetic 1 " in cli("show", path).out


def test_a_new_run_says_its_arithmetic(tiny: Any, tmp_path: Path) -> None:
    path = stop_after(tiny(), tmp_path / "run", 1)
    assert info(path)["arithmetic"] == ARITHMETIC == Run(path).about.arithmetic
    assert fedstrata.resume(path, settings={"training.rounds": 2}).about.arithmetic == ARITHMETIC


# --- torch, NumPy, CPU -----------------------------------------------------------------------------------------------

OTHERS = {"torch": "2.0.0", "numpy": "1.0.0", "cpu": "Z80", "processor": "abacus"}


@pytest.mark.parametrize("name", OTHERS)
def test_going_on_with_another_one_is_said_and_recorded(
    name: str, tiny: Any, tmp_path: Path, cli: Any, said: Said, same_run: Any
) -> None:
    path = stop_after(tiny(), tmp_path / "run", 2)
    now, old = environment.versions(), OTHERS[name]
    made_with(path, **{name: old})
    assert cli("run", "--resume", path).code == 0
    change = f"{name} {old} → {now[name]}"
    assert said() == [f"{path} goes on with {change}: from round 3 on bits may differ"]
    assert info(path)["versions"] == now | {name: old}
    assert info(path)["later"] == [{"round": 3, "versions": now}]
    assert f"from round 3 on with {change}: bits may differ\n" in cli("show", path).out
    fedstrata.run(tiny(), out=tmp_path / "whole")
    same_run(path, tmp_path / "whole")  # it was only said to be another one


@pytest.mark.parametrize("name", ["fedstrata", "python", "platform"])
def test_what_decides_no_bits_is_not_said(name: str, tiny: Any, tmp_path: Path, cli: Any, said: Said) -> None:
    path = stop_after(tiny(), tmp_path / "run", 2)
    made_with(path, **{name: "another"})
    fedstrata.resume(path, strict=True)
    assert said() == []
    assert "later" not in info(path)
    assert "bits may differ" not in cli("show", path).out


def test_strict_refuses_and_changes_nothing(tiny: Any, tmp_path: Path, cli: Any) -> None:
    path = stop_after(tiny(), tmp_path / "run", 2)
    made_with(path, torch="2.0.0", cpu="Z80")
    now = environment.versions()
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    problem = (
        f"{path} would go on with torch 2.0.0 → {now['torch']}, cpu Z80 → {now['cpu']}: bits may differ; "
        "not resumed (strict)"
    )
    for command in (("run", "--resume", path), ("run", "--resume", path, "--set", "training.rounds=5")):
        assert cli(*command, "--strict") == (2, "", f"error: {problem}\n")
    for refuses in (lambda: fedstrata.resume(path, strict=True), lambda: next(run_rounds(Run(path), strict=True))):
        with pytest.raises(RunDirectoryError) as caught:
            refuses()
        assert str(caught.value) == problem
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    made_with(path, torch=now["torch"], cpu=now["cpu"])
    assert cli("run", "--resume", path, "--strict").code == 0


def test_strict_goes_with_resume(recipe: Any, cli: Any) -> None:
    assert cli("run", recipe(), "--strict") == (2, "", "error: --strict: goes with --resume only\n")


def test_each_change_is_kept_with_its_round_and_one_without_a_round_is_not(
    tiny: Any, tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """A computes round 1, B nothing, C rounds 2 and 3 of which the last is lost, A rounds 3 and 4, A round 5."""
    real = environment.versions()
    machines = {name: real | {"processor": name} for name in "ABC"}

    def on(name: str, rounds: int) -> list[str]:
        monkeypatch.setattr(environment, "versions", lambda: machines[name])
        lines = run_rounds(Run(path))
        if rounds:
            _some(lines, rounds)
        else:  # killed when the first round begins
            with monkeypatch.context() as patch:
                patch.setattr("fedstrata.runs.runner.fit", _killed)
                with pytest.raises(KeyboardInterrupt):
                    next(lines)
        return said()

    path = tmp_path / "run"
    monkeypatch.setattr(environment, "versions", lambda: machines["A"])
    stop_after(tiny({"training.rounds": 5}), path, 1)
    assert on("A", 0) == []
    assert on("B", 0) == [f"{path} goes on with processor A → B: from round 2 on bits may differ"]
    assert [entry["round"] for entry in info(path)["later"]] == [2]
    assert "bits may differ" not in cli("show", path).out
    assert on("C", 2) == [f"{path} goes on with processor A → C: from round 2 on bits may differ"]
    (path / "checkpoints" / "000003.safetensors").unlink()
    assert on("A", 2) == [f"{path} goes on with processor C → A: from round 3 on bits may differ"]
    assert on("A", 1) == []
    assert Run(path).finished()
    assert info(path)["later"] == [{"round": 2, "versions": machines["C"]}, {"round": 3, "versions": machines["A"]}]
    shown = [line for line in cli("show", path).out.splitlines() if "bits may differ" in line]
    assert shown == [
        "from round 2 on with processor A → C: bits may differ",
        "from round 3 on with processor C → A: bits may differ",
    ]


def _killed(*_: Any) -> Iterator[Any]:
    raise KeyboardInterrupt
    yield


def test_back_where_it_was_nothing_is_left_of_one_that_did_nothing(
    tiny: Any, tmp_path: Path, said: Said, same_run: Any
) -> None:
    path = stop_after(tiny(), tmp_path / "run", 2)
    forge(path, later=[{"round": 3, "versions": info(path)["versions"] | {"torch": "9"}}])
    fedstrata.resume(path, strict=True)
    assert said() == []
    assert info(path)["later"] == []


def test_extending_keeps_the_record(tiny: Any, tmp_path: Path, said: Said) -> None:
    path = stop_after(tiny(), tmp_path / "run", 2)
    made_with(path, torch="2.0.0")
    fedstrata.resume(path, settings={"training.rounds": 4})
    later = info(path)["later"]
    assert [entry["round"] for entry in later] == [3]
    assert len(said()) == 1
    fedstrata.resume(path, settings={"training.rounds": 5})
    assert info(path)["later"] == later
    assert said() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"arithmetic": "2"},
        {"arithmetic": True},
        {"arithmetic": 0},
        {"versions": 5},
        {"versions": {"torch": 2}},
        {"later": 5},
        {"later": {"round": 2}},
        {"later": [5]},
        {"later": [{"round": "2", "versions": {}}]},
        {"later": [{"round": 2, "versions": ["torch"]}]},
        {"later": [{"round": 2, "versions": {"torch": None}}]},
    ],
    ids=str,
)
def test_what_run_json_says_of_it_is_checked(changes: dict[str, Any], tiny: Any, tmp_path: Path, cli: Any) -> None:
    path = stop_after(tiny(), tmp_path / "run", 1)
    forge(path, **changes)
    for command in (("show", path), ("run", "--resume", path)):
        answer = cli(*command)
        assert (answer.code, answer.out) == (2, "")
        assert answer.err.startswith(f"error: {path}/run.json is damaged: ")
        assert answer.err.count("\n") == 1
