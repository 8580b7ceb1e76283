"""`digests.py`: the same digests in every process, others where a result is another, and no case forgotten."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import torch
from torch import Tensor

from fedstrata.algorithms import AXES, NAMED
from fedstrata.core import aggregation, axes
from fedstrata.core.messages import Order
from fedstrata.tasks.partitions import PARTITIONS
from tests.digests import CASES, line_of, values_of
from tests.support.digested import on_flower, recipes
from tests.support.processes import process_environment

SOME = (
    "named/fedldf/odd",
    "named/adaptive_mu/batchnorm/float64",
    "lost/all-of-it/mixed",
    "resume/killed/random_layers",
    "fault/mixed/upload/late",
    "strategy/mixed/float32",
)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return [line_of(name, values_of(CASES[name])) for name in SOME]


def parts(line: str) -> dict[str, str]:
    return dict(part.split("=") for part in line.split("  ")[1:])


def test_another_process_comes_to_the_same_digests(lines: list[str]) -> None:
    """With other hashes of strings, and with nothing run before."""
    environment = process_environment() | {"PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    script = Path(__file__).parent / "digests.py"
    done = subprocess.run([sys.executable, script, *SOME], env=environment, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == sorted(lines)


def test_one_ulp_in_one_number_of_the_aggregate_shows(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the weights of every case; what travelled and what became of the clients is as before."""
    aggregate = aggregation.aggregate

    def off(*arguments: Any) -> Tensor:
        new = aggregate(*arguments)
        new[0] = torch.nextafter(new[0], torch.full_like(new[0], torch.inf))
        return new

    monkeypatch.setattr(axes, "aggregate", off)
    for line in lines:
        name = line.split("  ")[0]
        before, after = parts(line), parts(line_of(name, values_of(CASES[name])))
        assert after["weights"] != before["weights"], name
        assert (after["ledger"], after["status"]) == (before["ledger"], before["status"]), name


def test_one_byte_more_shows_in_the_ledger(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The history has it, too, in `download`; Flower's has no totals."""
    counted = Order.control_bytes
    monkeypatch.setattr(Order, "control_bytes", lambda order: counted(order) + 1)
    for line in lines:
        name = line.split("  ")[0]
        before, after = parts(line), parts(line_of(name, values_of(CASES[name])))
        changed = {kind for kind in before if before[kind] != after[kind]}
        assert changed == ({"ledger"} if name.startswith("strategy/") else {"ledger", "history"}), name


def test_what_is_digested_of_two_clients_that_send_nan() -> None:
    """Six clients, of which 1 and 4 send NaN in the first two of three rounds.

    The perceptron has 64 · 6 + 6 = 390 and 6 · 5 + 5 = 35 numbers of 4 bytes: four clients send 6240 and 560 bytes, and
    all six are sent 9360 and 840.
    """
    values = values_of(CASES["fault/fedlayerwise/train/nan"])
    assert [line for line in values["status"] if "asked" not in line] == [
        f"round {round}: client {client} {'not finite' if round < 3 and client in (1, 4) else 'ok'}"
        for round in (1, 2, 3)
        for client in range(6)
    ] + ["finished"]
    for number in ("up 0 = 6240", "up 1 = 560", "down 0 = 9360", "down 1 = 840", "feedback = 0"):
        assert f"round 2 {number}" in values["ledger"]
    assert "round 2 replies = 4" in values["history"]
    assert "round 3 replies = 6" in values["history"]
    arrays = [line.rpartition(" ")[0] for kind in ("layers", "weights", "state") for line in values[kind]]
    for array in (
        "round 3: angle F64 [6, 2]",
        "round 3: work I64 [6]",
        "at the end: fc1.weight F32 [6, 64]",
        "at the end: fc2.bias F32 [5]",
        "at the end: weighting/smoothed_angle F64 [6, 2]",
    ):
        assert array in arrays


def test_every_algorithm_rule_and_partition_has_a_case() -> None:
    assert set(recipes.NAMED) == set(NAMED)
    # Flower has no reply for the first, does not know the local steps that the second needs, and remembers nothing.
    remembers = {name for name, make in NAMED.items() if make().private or hasattr(make().objective, "remember")}
    assert set(on_flower.ALGORITHMS) >= set(NAMED) - {"neuron_pruning", "fednova"} - remembers
    weightings = {**recipes.WEIGHTINGS, **recipes.MORE_WEIGHTINGS}
    objectives = {**recipes.OBJECTIVES, **recipes.MORE_OBJECTIVES}
    kinds = (objectives, recipes.SELECTIONS, weightings, recipes.SERVERS, recipes.COMBINATIONS)
    for axis, cases in zip(AXES, kinds, strict=True):
        assert set(cases) == set(AXES[axis])
    assert {name.split("/")[1] for name in CASES if name.startswith("partition/")} == set(PARTITIONS)
