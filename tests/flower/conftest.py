"""What tests of a Strategy need."""

from __future__ import annotations

import random

import pytest


@pytest.fixture(autouse=True)
def server_app(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the ServerApp of a run, and Flower's sampling, by the global generator, is repeatable."""
    TaskIdentity = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity
    for name in ("run_id", "node_id", "task_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)
    random.seed(0)
