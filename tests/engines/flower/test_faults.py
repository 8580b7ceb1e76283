"""Clients that really misbehave, in Flower's simulation and on three SuperNodes (misbehaving.py has what they do).

Every run ends, its record names the fault and the client, and all else in it is as in a run on the local engine in
which these clients never answered: weights, figures of the others, bytes.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
pytest.importorskip("ray")

import tomli_w

import fedstrata
from fedstrata.core.messages import Order
from fedstrata.engines.local import LocalEngine
from fedstrata.nodes import client
from fedstrata.recipes.schema import load
from fedstrata.runs.reader import Run
from fedstrata.runs.runner import create_run, run_rounds
from tests.support import misbehaving
from tests.support.federation import Federation
from tests.support.math import missing
from tests.support.runs import TINY, run_content

pytestmark = pytest.mark.deployment

Plan = dict[int, dict[int, str]]
"""By client and round: the name of a fault."""


class Silent(LocalEngine):
    """The local engine, where clients that misbehave never answer."""

    plan: Plan

    def exchange(self, orders: Any) -> Any:
        return super().exchange([order for order in orders if not self._is_spoiled(order)])

    def _is_spoiled(self, order: Order) -> bool:
        fault = self.plan.get(order.client, {}).get(order.round)
        return fault is not None and fault.startswith("upload") == (order.kind == "upload")


def without_them(table: dict[str, Any], plan: Plan, out: Path) -> Path:
    """The same run on the local engine, with silence in place of faults."""
    run, experiment = create_run(load(table), out)
    engine = Silent(experiment.setup, 1)
    engine.plan = plan
    with engine:
        for _ in run_rounds(run, experiment, engine):
            pass
    return run.path


def masks(run: Path, number: int) -> list[int]:
    """How many layers each client was to send in a round."""
    return [int(count) for count in Run(run).layers(number)["mask"].sum(1)]


def check(run: Path, expected: Path, plan: Plan, reasons: dict[str, str]) -> None:
    """The record names all faults, and nothing else differs from the run without them."""
    ours, theirs = (run_content(path, recipe=False) for path in (run, expected))
    told = {
        (client, line["round"]): str(status) for line in ours["history"] for client, status in missing(line["lost"])
    }
    for line in (*ours["history"], *theirs["history"]):
        line["lost"] = [who["client"] for who in line["lost"]]
    planned = {(who, number): fault for who, faults in plan.items() for number, fault in faults.items()}
    assert told.keys() == planned.keys()
    for where, fault in planned.items():
        assert re.fullmatch(reasons[fault], told[where]), (fault, told[where])
        assert told[where].isprintable()
        assert len(told[where]) < 1100
    for part in ours:
        assert ours[part] == theirs[part], part


IN_SIMULATION = {
    "raises": r"failed: the ClientApp raised: .*\\x1b\[2J\\x1b\]0;owned\\x07disk on fire.*",
    "sleeps": "no reply: nothing within 14 s",
    "reports a failure": r"failed: ValueError: \\x1b\[2J\\x1b\]0;owned\\x07no no no .*",
    "another version": "refused: schema = 99; this version of fedstrata speaks 2",
    "another version, at length": "refused: schema = '9+…",
    "another round": "refused: round = 1, asked for 2",
    "another attempt": "refused: attempt = 7, asked for 0",
    "another client": r"refused: client = 0, asked for \d+",
    "a negative size": "refused: size = -5, must not be negative",
    "an absurd size": "refused: size = 1000000000000000000, at the beginning it was 12",
    "not a number": "not finite: update",
    "a wrong shape": r"refused: fc\d has shape \[\d+\], expected \[\d+\]",
    "a huge shape": r"refused: fc\d has shape \[1000000000000000\], expected \[\d+\]",
    "a wrong dtype": r"refused: fc\d has dtype float64, expected float32",
    "an odd dtype": r"refused: fc\d has dtype \\x1b\[2J\\x1b\]0;owned\\x07, expected float32",
    "a pickle": r"refused: fc\d is stored as 'pickle', expected 'raw'",
    "too short": r"refused: fc\d has \d+ bytes for \d+ numbers",
    "malformed": "refused: cannot be read: TypeError: .*",
    "layers not asked for": r"refused: layers fc\d: sent without being asked for, or asked for and not sent",
    "a layer withheld": r"refused: layers fc\d: sent without being asked for, or asked for and not sent",
    "an earlier round's layers": "refused: round = 1, asked for 2",
    "more records": r"refused: record '\\x1b.*' is not expected",
    "many metrics": "refused: 10000 metrics, at most 100 are taken",
    "many layers": r"refused: layers \['\\x1b.*…",
    "nothing": "refused: record reply is missing",
}


@pytest.fixture
def plan_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Ray's actors find their plan; they run our app with its faults, which they find in this folder."""
    path = tmp_path / "plan.json"
    monkeypatch.setenv(misbehaving.PLAN, str(path))
    monkeypatch.setattr(client, "app", misbehaving.app)
    return path


def simulate(table: dict[str, Any], plan: Plan, plan_file: Path, out: Path) -> Path:
    plan_file.write_text(json.dumps(plan))
    settings = {"engine.name": "flower", "engine.workers": 2, "engine.timeout": 14.0}
    return fedstrata.run(table, settings=settings, out=out).path


def test_every_fault_in_a_simulation(tiny: Callable[..., Any], plan_file: Path, tmp_path: Path) -> None:
    """Round 1 is clean, in round 2 each client has a fault of its own, and after that they are well again.

    One of two clients that sleep does so in round 3, in which the other's reply comes, too late.
    """
    faults = [*IN_SIMULATION, "sleeps"]
    count = len(faults) + 4
    table = tiny(
        {
            "algorithm": {"name": "random_layers", "n": count - 2},
            "task.partition.clients": count,
            "training.rounds": 4,
        }
    )
    asked = masks(without_them(table, {}, tmp_path / "clean"), 2)
    some = [who for who in range(1, count) if asked[who] == 1]
    plan: Plan = {some.pop(): {2: "layers not asked for"}}
    faults.remove("layers not asked for")
    free = (who for who in range(1, count) if who not in plan and asked[who] > 0)
    for fault in faults:
        first = not any(fault in other.values() for other in plan.values())
        plan[next(free)] = {2 if first else 3: fault}
    run = simulate(table, plan, plan_file, tmp_path / "flower")
    check(run, without_them(table, plan, tmp_path / "local"), plan, IN_SIMULATION)


IN_TWO_EXCHANGES = {
    "scores not finite": "not finite: scores",
    "scores too short": r"refused: scores has shape \[1\], expected \[2\]",
    "scores and layers": "refused: layers were sent along with the scores",
    "upload: raises": IN_SIMULATION["raises"],
    "upload: layers not asked for": IN_SIMULATION["layers not asked for"],
    "upload: an earlier round's layers": "refused: round = 1, asked for 3",
    "upload: a wrong shape": IN_SIMULATION["a wrong shape"],
}


def test_faults_in_either_exchange_of_a_simulation(tiny: Callable[..., Any], plan_file: Path, tmp_path: Path) -> None:
    """FedLDF: whoever spoils its scores is not chosen, and whoever spoils its upload is missing where it was chosen."""
    count = 9
    table = tiny({"algorithm": {"name": "fedldf", "n": count - 1}, "task.partition.clients": count})
    asked = masks(without_them(table, {}, tmp_path / "clean"), 1)
    some = next(who for who in range(count) if asked[who] == 1)
    all_of_them = [who for who in range(count) if asked[who] == 2]
    plan: Plan = {
        some: {1: "upload: layers not asked for"},
        all_of_them[0]: {1: "upload: raises"},
        all_of_them[1]: {1: "upload: a wrong shape"},
        all_of_them[2]: {2: "scores not finite"},
        all_of_them[3]: {2: "scores too short", 3: "upload: an earlier round's layers"},
        all_of_them[4]: {2: "scores and layers"},
    }
    run = simulate(table, plan, plan_file, tmp_path / "flower")
    check(run, without_them(table, plan, tmp_path / "local"), plan, IN_TWO_EXCHANGES)


# --- on three SuperNodes ---------------------------------------------------------------------------------------------

ON_SUPERNODES = IN_SIMULATION | {
    "raises": "failed: the ClientApp raised",
    "malformed": "refused: Flower cannot read it: TypeError: .*",
    "sleeps long": "no reply: nothing within 30 s",
}


def test_faults_on_supernodes(tmp_path: Path) -> None:
    """Three nodes with TLS and keys, whose ClientApp is ours with its faults, and whose plan is read at every order.

    Each layer is asked of two nodes. One node or two misbehave in every round, and one that is asked does not.
    """
    table = TINY | {
        "algorithm": {"name": "random_layers", "n": 2, "weighting": {"name": "fedlayerwise"}},
        "training": TINY["training"] | {"rounds": 5},
        "task": TINY["task"] | {"partition": {"name": "iid", "clients": 3, "samples": 12}},
        "engine": {"timeout": 30.0},
    }
    plan: Plan = {
        0: {1: "a wrong shape", 3: "malformed", 4: "raises", 5: "an absurd size"},
        1: {2: "layers not asked for", 4: "not a number", 5: "sleeps long"},
        2: {2: "an earlier round's layers"},
    }
    clean = without_them(table, {}, tmp_path / "clean")
    assert [masks(clean, number) for number in range(1, 6)] == [[2, 0, 2], [2, 1, 1], [2, 2, 0], [1, 1, 2], [1, 2, 1]]
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(table))
    made = Federation.init(tmp_path / "made", tmp_path / "recipe.toml", "--nodes", 3)
    app = made.folder / "server" / "app"
    shutil.copy(misbehaving.__file__, app)
    text = (app / "pyproject.toml").read_text()
    (app / "pyproject.toml").write_text(text.replace("fedstrata.nodes.client:app", "misbehaving:app"))
    made.environment[misbehaving.PLAN] = str(made.folder / "plan.json")
    (made.folder / "plan.json").write_text(json.dumps(plan))
    try:
        made.start()
        run = made.run("faults")
    finally:
        made.stop()
    check(run, without_them(table, plan, tmp_path / "local"), plan, ON_SUPERNODES)
