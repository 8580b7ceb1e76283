"""The client's half of what a Strategy cannot do alone: proximal terms, and selections on the client."""

from __future__ import annotations

import importlib
import importlib.util
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

import fedstrata
import fedstrata.flower
from fedstrata import algorithms
from fedstrata.clients.training import build_model
from fedstrata.core.axes import Algorithm
from fedstrata.core.errors import MissingExtra, RecipeError
from fedstrata.flower import Local, Strategy
from fedstrata.recipes.schema import Training
from fedstrata.selections import Everything
from fedstrata.weightings import SampleSize
from tests.support.flower import DROP_IN, FakeGrid, array_app, ask, asked, helped_app, stock_app
from tests.support.math import by_client, run, words
from tests.support.strategies import ALGORITHMS, EPOCHS, LR, NODES, TASK, helped, start, stock


@pytest.mark.parametrize("name", ["fedprox", "adaptive_mu", "fedlap"])
def test_an_objective_that_was_not_applied_is_refused(name: str) -> None:
    """A stock client's reply, and one whose loop never pulls; the others count."""
    apps = dict(zip(NODES, helped(), strict=True))
    apps[NODES[0]] = stock_app(TASK, lr=LR, epochs=EPOCHS)
    apps[NODES[1]] = helped_app(TASK, lr=LR, epochs=EPOCHS, pull=False)
    strategy = Strategy(ALGORITHMS[name])
    start(strategy, FakeGrid(apps), rounds=1)
    status = by_client(strategy.records[0])
    assert status.pop(NODES[0]).startswith(f"refused: the client did not apply {name}: use fedstrata.flower.Local")
    assert status.pop(NODES[1]).startswith(f"refused: the client did not apply {name}: call local.pull()")
    assert set(status.values()) == {"ok"}


def test_an_acknowledgement_of_something_else_is_refused() -> None:
    def change(reply: Message, node: int) -> Message:
        if node == NODES[0] and "fedstrata" in reply.content:
            reply.content.config_records["fedstrata"]["objective"] = '{"name": "fedprox", "mu": 0.0}'
        return reply

    strategy = Strategy(algorithms.fedprox(mu=0.5))
    start(strategy, FakeGrid(dict(zip(NODES, helped(), strict=True)), change=change), rounds=1)
    assert [word for word in words(strategy.records[0]) if word != "ok"] == [
        """refused: the client did not apply fedprox: it acknowledged '{"name": "fedprox", "mu": 0.0}'"""
    ]


def test_an_objective_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes by its entry point's name, on a client that has the package too."""
    (tmp_path / "held.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedstrata.objectives import FedProx\n\n\n"
        "@dataclass(frozen=True)\nclass Held(FedProx):\n    extra: float = 0.0\n"
    )
    information = tmp_path / "held-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: held\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[fedstrata.objectives]\nheld_back = held:Held\n")
    monkeypatch.syspath_prepend(tmp_path)
    held = importlib.import_module("held")
    strategy = Strategy(Algorithm(held.Held(mu=0.5), Everything(), SampleSize()))
    result, grid = start(strategy, helped(), rounds=1)
    assert '"held_back"' in asked(grid.sent[0])["objective"]
    random.seed(0)
    prox, _ = start(Strategy(algorithms.fedprox(mu=0.5)), helped(), rounds=1)
    assert result.arrays["fc.weight"].data == prox.arrays["fc.weight"].data


def test_without_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(MissingExtra, match=r"needs flwr: pip install 'fedstrata\[flower\]'"):
            importlib.reload(fedstrata.flower)
    importlib.reload(fedstrata.flower)


def test_arrays_that_come_along_with_scores_are_refused() -> None:
    """A client that sends its whole model in the first exchange has not understood what a selection is for."""

    def change(reply: Message, node: int) -> Message:
        if node == NODES[0] and reply.has_content() and "fedstrata-scores" in reply.content:
            reply.content["arrays"] = ArrayRecord(build_model(TASK, 0, torch.float64).state_dict())
        return reply

    strategy = Strategy(algorithms.fedldf(n=2))
    start(strategy, FakeGrid(dict(zip(NODES, helped(), strict=True)), change=change), rounds=1)
    status = by_client(strategy.records[0])
    assert status.pop(NODES[0]) == "refused: arrays were sent along with the scores"
    assert set(status.values()) <= {"ok", "nothing chosen"}


@pytest.mark.parametrize("name", ["fedldf", "random_layers"])
def test_a_selection_that_the_client_cannot_follow_is_refused(name: str) -> None:
    """Clients without the mod, among others."""
    lacking = set(NODES[:3])
    apps = dict(zip(NODES, stock()[:3] + helped()[3:], strict=True))
    strategy = Strategy(ALGORITHMS[name], seed=1)
    start(strategy, FakeGrid(apps), rounds=1)
    told = by_client(strategy.records[0])
    refused = {node: word for node, word in told.items() if word.startswith("refused")}
    assert refused
    assert refused.keys() <= lacking
    assert all(word.endswith(" put selection_mod first in ClientApp(mods=[…])") for word in refused.values())
    assert any(word == "ok" for node, word in told.items() if node not in lacking)


def test_a_kept_update_of_another_round_is_not_sent() -> None:
    """A `train` message that was delayed overwrote the state: the upload fails, and the round goes on without it."""
    apps = dict(zip(NODES, helped(), strict=True))
    grid: FakeGrid

    def change(reply: Message, node: int) -> Message:
        if node == NODES[3] and reply.has_content() and "fedstrata-scores" in reply.content:
            grid.contexts[node].state["fedstrata-kept-of"] = ConfigRecord({"round": 99})
        return reply

    grid = FakeGrid(apps, change=change)
    strategy = Strategy(algorithms.fedldf(n=4))
    start(strategy, grid, rounds=1)
    failed = by_client(strategy.records[0])
    assert failed.pop(NODES[3]) == "failed: nothing kept for round 1"
    assert set(failed.values()) == {"ok"}
    assert np.nansum(strategy.records[0].layers["mask"][:, 0]) in (3, 4)


class Proximal(nn.Module):
    """A frozen and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.last = nn.Linear(3, 2)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x)))


def test_a_pull_is_the_gradient_of_the_penalty() -> None:
    """μ/2 ‖w − a‖² added to the loss by hand; what is frozen gets no gradient, what is tied is pulled once."""
    torch.manual_seed(0)
    model = Proximal().double()
    message = first_message(Strategy(algorithms.fedprox(mu=0.7)), ArrayRecord(model.state_dict()))
    local = Local(message, model)
    anchors = {name: p.detach().clone() for name, p in model.named_parameters()}
    inputs = torch.randn(4, 3, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p))
    model(inputs).square().sum().backward()
    local.pull()
    pulled = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    penalty = sum((p - anchors[name]).square().sum() for name, p in model.named_parameters())
    (model(inputs).square().sum() + 0.35 * penalty).backward()
    assert pulled["last.bias"] is None
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(pulled[name], p.grad, rtol=1e-12, atol=1e-12)


def test_names_of_adapters() -> None:
    """PEFT's parameters have the adapter's name in theirs, and travel without it; what is not an adapter stays."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(3, 2).double().requires_grad_(False)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(3, 1, bias=False).double()})

    model = Adapted()
    adapter = model.lora_A["default"].weight
    before = adapter.detach().clone()
    travels = {"lora_A.weight": before.clone()}
    message = first_message(Strategy(algorithms.fedprox(mu=0.5)), ArrayRecord(travels))
    with pytest.raises(RecipeError, match=r"lora_A.weight.*the model has no such parameter"):
        Local(message, model)
    local = Local(message, model, names=lambda name: name.replace(".default.", "."))
    with torch.no_grad():
        adapter.add_(2.0)
    local.pull()
    assert adapter.grad is not None
    torch.testing.assert_close(adapter.grad, torch.ones(1, 3, dtype=torch.float64))
    assert model.base.weight.grad is None
    assert local.acknowledge(RecordDict())["fedstrata"]["pulls"] == 1


def train(model: nn.Module, data: Any, local: fedstrata.Local) -> None:
    """Somebody's training function, of a simulation or an app."""
    optimizer = torch.optim.SGD(model.parameters(), lr=local.lr, fused=True)
    for inputs, targets in local.batches():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        local.pull()
        optimizer.step()
        local.log(loss=loss)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedlap"])
def test_a_training_function_is_the_same_in_an_app_and_in_a_simulation(name: str) -> None:
    """Two rounds in full batches, with a Strategy over Flower's messages, and on the local engine."""
    app = ClientApp()

    @app.train()
    def answer(message: Message, context: Context) -> Message:
        model = TASK.model().double()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        data = TASK.clients[int(context.node_config["partition-id"])]
        local = Local(message, model, data, lr=LR, epochs=EPOCHS, batch_size=100)
        train(model, data, local)
        assert (local.steps_taken, local.epochs) == (EPOCHS, EPOCHS)
        metrics = MetricRecord({"num-examples": len(data[0]), "loss": local.metrics["loss"]})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(local.acknowledge(content), reply_to=message)

    algorithm = ALGORITHMS.get(name, algorithms.fedavg())
    strategy = Strategy(algorithm, fraction_evaluate=0.0)
    result, _ = start(strategy, FakeGrid(dict.fromkeys(NODES, app)), rounds=2)
    training = Training(rounds=2, epochs=EPOCHS, batch_size=100, lr=LR)
    states, _ = run(replace(TASK, train=train), algorithm, training)
    found = result.arrays.to_torch_state_dict()
    layers = strategy.layers
    for tensor, expected in layers.views(states[-1].model).items():
        torch.testing.assert_close(found[tensor], expected, rtol=1e-9, atol=1e-12)


def first_message(strategy: Strategy, arrays: ArrayRecord) -> Message:
    grid = FakeGrid(dict.fromkeys([1, 2], array_app(lambda arrays, node: (arrays, {}))))
    return next(iter(strategy.configure_train(1, arrays, ConfigRecord(), grid)))


def test_what_a_pull_needs() -> None:
    model = nn.Linear(2, 2).double()
    message = first_message(Strategy(algorithms.fedlap()), ArrayRecord(model.state_dict()))
    with pytest.raises(RuntimeError, match=r"FedLap has to know when an epoch begins: call local.epoch\(\)"):
        Local(message, model).pull()
    with pytest.raises(RecipeError, match=r"weight, bias.*the model has no such parameter"):
        Local(message, nn.Sequential(model))
    ask(message, schema=1)
    with pytest.raises(RecipeError, match="schema = 1: this fedstrata speaks 2"):
        Local(message, model)


def test_a_message_cannot_make_a_client_import(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil_rule.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    model = nn.Linear(2, 2).double()
    message = first_message(Strategy(algorithms.fedprox()), ArrayRecord(model.state_dict()))
    ask(message, objective='{"name": "evil_rule:Rule"}')
    with pytest.raises(RecipeError, match="'evil_rule:Rule': unknown"):
        Local(message, model)
    ask(message, objective="", answer="scores", selection='{"name": "evil_rule:Rule"}')
    app = helped_app(
        replace(TASK, model=lambda: nn.Linear(2, 2), clients=[(torch.ones(1, 2).double(), torch.zeros(1).long())]), lr=1
    )
    with pytest.raises(RecipeError, match="'evil_rule:Rule': unknown"):
        app(message, FakeGrid({1: app}).contexts[1])


def test_the_drop_in_is_what_the_documents_show() -> None:
    """At most five lines of quickstart-pytorch go or come; test_quickstart.py runs it with exactly these."""
    assert sum(len(lines) for lines in DROP_IN.values()) <= 5
    here = Path(__file__).parents[2]
    for document in ("README.md", "docs/flower-strategy.md"):
        text = (here / document).read_text(encoding="utf-8")
        for line in (line for lines in DROP_IN.values() for line in lines):
            assert f"\n{line}\n" in text
