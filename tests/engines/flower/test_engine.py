"""The Flower engine on a Grid in this process: the local engine's bits, and the round goes on whatever a node does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict

import fedstrata
from fedstrata.algorithms import NAMED
from fedstrata.core.errors import DataError, FedstrataError, RecipeError, RunDirectoryError
from fedstrata.core.fit import fit
from fedstrata.core.layers import Layers
from fedstrata.core.messages import Order, Reply
from fedstrata.core.record import RoundFailed, RoundRecord
from fedstrata.core.status import Status
from fedstrata.deployment import server
from fedstrata.deployment.server import serve
from fedstrata.engines.flower.codec import Hello, decode_order, decode_reply, encode_hello, encode_reply
from fedstrata.engines.flower.engine import FlowerEngine
from fedstrata.engines.flower.failures import NodeFailed
from fedstrata.engines.local import LocalEngine
from fedstrata.recipes.experiment import Experiment, build_experiment
from fedstrata.recipes.schema import load
from fedstrata.runs.reader import Run
from fedstrata.tasks.nodes import RemoteData
from tests.support.fake_grid import FakeGrid, Fault, gone
from tests.support.math import missing, words

CLIENTS = 4
TOO_LATE = Status("no reply", "nothing within 0.05 s")
RecipeFile = Callable[..., Path]


def on_flower(grid: FakeGrid, out: Path, **config: Any) -> list[Any]:
    return list(serve(grid, {"recipe": str(grid.recipe), "out": str(out), "data": "", "wait": 10, **config}))


@pytest.fixture
def federation(recipe: RecipeFile) -> Callable[..., tuple[Experiment, FakeGrid]]:
    """The tiny recipe on the server, and four nodes that have it as a file."""

    def make(algorithm: str = "fedavg", settings: dict[str, Any] | None = None) -> tuple[Experiment, FakeGrid]:
        path = recipe({"algorithm": {"name": algorithm}, "engine.name": "flower", **(settings or {})})
        return build_experiment(load(path)), FakeGrid(path, CLIENTS)

    return make


def rounds(experiment: Experiment, grid: FakeGrid, **options: Any) -> list[tuple[torch.Tensor, RoundRecord]]:
    """All rounds on Flower: models and records."""
    engine = FlowerEngine(
        grid, experiment.setup, experiment.agreement, CLIENTS, **{"timeout": 0.05, "poll": 0.001, **options}
    )
    engine.wait_for(CLIENTS, 10)
    return [(s.model, r) for s, r in fit(experiment.first_state(), experiment.algorithm, engine, experiment.plan)]


def rounds_without(experiment: Experiment, lost: Callable[[Order], bool]) -> list[tuple[torch.Tensor, RoundRecord]]:
    """All rounds on the local engine, where some orders are never answered."""

    class Silent(LocalEngine):
        def exchange(self, orders: Any) -> Any:
            return super().exchange([order for order in orders if not lost(order)])

    with Silent(experiment.setup, 1) as engine:
        return [(s.model, r) for s, r in fit(experiment.first_state(), experiment.algorithm, engine, experiment.plan)]


def same_models(left: Any, right: Any) -> None:
    assert len(left) == len(right)
    for (ours, _), (theirs, _) in zip(left, right, strict=True):
        assert torch.equal(ours, theirs)


# --- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", NAMED)
def test_every_algorithm_ends_in_the_local_engines_run(
    algorithm: str, recipe: RecipeFile, tmp_path: Path, same_run: Callable[..., None]
) -> None:
    """Weights, figures, history with its bytes and losses, checkpoints: all but times and the recipe."""
    path = recipe(
        {
            "algorithm": {"name": algorithm},
            "evaluation.on": ["test", "clients"],
            "evaluation.private": "initial",
            "training.stragglers": 0.5,
            "training.epochs": 2,
        }
    )
    on_flower(FakeGrid(path, CLIENTS), tmp_path / "flower")
    fedstrata.run(path, out=tmp_path / "local")
    same_run(tmp_path / "flower", tmp_path / "local", recipe=False)


@pytest.mark.parametrize("algorithm", ["fedldf", "fedadp", "adaptive_mu", "scaffold", "ditto", "fedadam"])
def test_a_server_that_died_goes_on_from_its_checkpoint(
    algorithm: str, recipe: RecipeFile, tmp_path: Path, same_run: Callable[..., None]
) -> None:
    path = recipe({"algorithm": {"name": algorithm}, "training.rounds": 4})
    on_flower(FakeGrid(path, CLIENTS), tmp_path / "whole")
    config = {"recipe": str(path), "out": str(tmp_path / "parts")}
    dies: Any = serve(FakeGrid(path, CLIENTS), config)
    next(dies), next(dies)
    dies.close()
    assert [line["round"] for line in on_flower(FakeGrid(path, CLIENTS), tmp_path / "parts")] == [3, 4]
    same_run(tmp_path / "parts", tmp_path / "whole")


def test_a_server_that_goes_on_with_another_torch_says_so(
    recipe: RecipeFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, out = recipe(), tmp_path / "run"
    dies: Any = serve(FakeGrid(path, CLIENTS), {"recipe": str(path), "out": str(out)})
    next(dies)
    dies.close()
    about = json.loads((out / "run.json").read_text())
    about["versions"]["torch"] = "2.0.0"
    (out / "run.json").write_text(json.dumps(about))
    on_flower(FakeGrid(path, CLIENTS), out)
    said = f"{out} goes on with torch 2.0.0 → {torch.__version__}: from round 2 on bits may differ"
    assert said in caplog.messages
    assert [entry["round"] for entry in json.loads((out / "run.json").read_text())["later"]] == [2]


def test_a_server_does_not_go_on_with_another_arithmetic(recipe: RecipeFile, tmp_path: Path) -> None:
    """And says so before it waits for nodes, of which there are none."""
    path, out = recipe(), tmp_path / "run"
    dies: Any = serve(FakeGrid(path, CLIENTS), {"recipe": str(path), "out": str(out)})
    next(dies)
    dies.close()
    about = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps(about | {"arithmetic": 1}))
    with pytest.raises(RunDirectoryError, match=r"computed with arithmetic 1 .* begin a new run"):
        on_flower(FakeGrid(path, 0), out)


def test_upload_bytes_are_the_ledgers_and_little_more(recipe: RecipeFile, tmp_path: Path) -> None:
    """Over a whole run, at most 256 bytes an array and 2 kB a message."""
    for algorithm in ("fedavg", "fedldf", "neuron_pruning", "adaptive_mu"):
        grid = FakeGrid(recipe({"algorithm": {"name": algorithm}}, f"{algorithm}.toml"), CLIENTS)
        lines = on_flower(grid, tmp_path / algorithm)
        up = [
            (content, size)
            for message, content, size in grid.wire
            if message.metadata.message_type in ("train", "query.upload")
        ]
        arrays = sum(len(record) for content, _ in up for record in content.array_records.values())
        ledger = sum(line["upload"] for line in lines)
        assert ledger < sum(size for _, size in up) <= ledger + 256 * arrays + 2048 * len(up)


# --- what nodes do to a round ----------------------------------------------------------------------------------------


Change = Callable[[Reply, Order], tuple[Reply, Order]]
"""From what a node says, and the order it answers, to what it says instead, and the order it says that it answers."""


def spoiled(change: Change, layers: Layers) -> Fault:
    """A node whose replies to training orders are changed, but still encoded as they should be."""

    def fault(message: Message, reply: Message) -> Message:
        if message.metadata.message_type != "train":
            return reply
        order = decode_order(message.content, layers)
        return Message(
            encode_reply(*change(decode_reply(reply.content, order, layers), order), layers), reply_to=message
        )

    return fault


def says(**values: Any) -> Change:
    """A reply with other values."""
    return lambda reply, order: (replace(reply, **values), order)


def answers(**values: Any) -> Change:
    """A true reply, to another order than this one."""
    return lambda reply, order: (reply, replace(order, **values))


def one_nan(reply: Reply, order: Order) -> tuple[Reply, Order]:
    assert reply.update is not None
    update = reply.update.clone()
    update[5] = float("nan")
    return replace(reply, update=update), order


def without_first_layer(reply: Reply, order: Order) -> tuple[Reply, Order]:
    assert reply.sent is not None
    return replace(reply, sent=reply.sent & (torch.arange(len(reply.sent)) > 0)), order


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (one_nan, "not finite: update"),
        (without_first_layer, "refused: layers fc1: sent without being asked for, or asked for and not sent"),
        (answers(kind="evaluate"), "refused: kind = 'evaluate', asked for 'train'"),
        (answers(round=0), "refused: round = 0, asked for 1"),
        (answers(attempt=9), "refused: attempt = 9, asked for 0"),
        (answers(client=1), "refused: client = 1, asked for 2"),
        (says(size=0), "refused: size = 0, must be a positive number of samples"),
        (says(update=None), "refused: update is missing"),
    ],
)
def test_a_bad_reply_costs_the_round_that_client_only(change: Any, status: str, federation: Any) -> None:
    """Whatever client 2 does, the models are those of a run in which it never answered."""
    experiment, grid = federation()
    grid.faults[2] = spoiled(change, experiment.layers)
    results = rounds(experiment, grid)
    assert words(results[0][1]) == ("ok", "ok", status, "ok")
    same_models(results, rounds_without(experiment, lambda order: order.client == 2))


def failing(text: str | None = None) -> Fault:
    """A node that says so, in our words; if it is simulated, also in its own."""

    def fault(message: Message, reply: Message) -> Message:
        record = ConfigRecord({"kind": "training", "type": "ValueError"})
        if text is not None:
            record["text"] = text
        return Message(RecordDict({"failure": record}), reply_to=message)

    return fault


def raises(message: Message, reply: Message) -> Message:
    return Message(Error(2, "ZeroDivisionError:\n division by zero"), reply_to=message)


def is_silent(message: Message, reply: Message) -> None:
    return None


def of_another_version(message: Message, reply: Message) -> Message:
    reply.content.config_records["reply"]["schema"] = 99
    return reply


def says_nothing_we_know(message: Message, reply: Message) -> Message:
    return Message(RecordDict({"fitres": ConfigRecord({"status": "ok"})}), reply_to=message)


def has_died(message: Message, reply: Message) -> Message:
    return Message(Error(8, ""), reply_to=message)


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (failing(), "failed: it cannot train (ValueError); its own log says more"),
        (failing("no data"), "refused: says that it failed, in words that are not fedstrata's"),
        (raises, "failed: the ClientApp raised"),
        (is_silent, "no reply: nothing within 0.05 s"),
        (of_another_version, "refused: schema = 99; this version of fedstrata speaks 2"),
        (says_nothing_we_know, "refused: record 'fitres' is not expected"),
        (has_died, "no reply: the ClientApp died"),
        (lambda message, reply: gone(message), "no reply: the node is gone"),
    ],
)
def test_a_node_that_fails_costs_the_round_its_client_only(fault: Fault, status: str, federation: Any) -> None:
    experiment, grid = federation()
    grid.faults[2] = lambda message, reply: fault(message, reply) if message.metadata.message_type == "train" else reply
    results = rounds(experiment, grid)
    assert words(results[0][1]) == ("ok", "ok", status, "ok")
    same_models(results, rounds_without(experiment, lambda order: order.client == 2))


def test_a_reply_that_flower_cannot_put_together_costs_its_client_only(federation: Any) -> None:
    """A node writes the objects of a message itself, and the Grid raises when they do not fit together.

    They are gone then, as is everything that was fetched with them; so nothing is.
    """
    experiment, whole = federation()

    class Torn(FakeGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            found = super().pull_messages(message_ids)
            if any(m.metadata.src_node_id == 1002 and m.metadata.message_type == "train" for m in found):
                raise KeyError("\x1b[2Jno such object")
            return found

    results = rounds(experiment, Torn(whole.recipe, CLIENTS))
    why = "refused: Flower cannot read it: KeyError: '\\x1b[2Jno such object'"
    assert [words(record) for _, record in results] == [("ok", "ok", why, "ok")] * 3
    same_models(results, rounds_without(experiment, lambda order: order.client == 2))


def test_a_connection_that_breaks_ends_the_run(federation: Any) -> None:
    """That is nobody's fault who could be left out; the run goes on from its checkpoint."""
    experiment, whole = federation()

    class Broken(FakeGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            if self.count("train"):
                raise ConnectionError("the SuperLink is gone")
            return super().pull_messages(message_ids)

    with pytest.raises(ConnectionError):
        rounds(experiment, Broken(whole.recipe, CLIENTS))


def test_what_a_client_writes_cannot_reach_a_terminal(federation: Any) -> None:
    """In one line, without control characters, and not for ever; where its text is shown at all."""
    experiment, grid = federation("fedavg", {"training.rounds": 1})
    text = f"\x1b]0;owned\x07\u202e{'a' * 5000}\n\r\x00"
    for client, fault in enumerate((failing(text), lambda message, reply: Message(Error(2, text), reply_to=message))):
        grid.faults[client] = lambda m, r, fault=fault: fault(m, r) if m.metadata.message_type == "train" else r
    [(_, record)] = rounds(experiment, grid, simulated=True)
    assert words(record)[0].startswith(r"failed: \x1b]0;owned\x07\u202eaaa")
    assert words(record)[1].startswith("failed: the ClientApp raised: …aaa")  # the end of a long reason
    for status in words(record):
        assert status.isprintable()
        assert len(status) < 1100


def test_a_fault_in_the_second_exchange_costs_that_upload_only(federation: Any) -> None:
    """FedLDF with n = 2: whoever is chosen and silent has no row, and the others' layers count as they came."""
    experiment, grid = federation("fedldf", {"algorithm": {"name": "fedldf", "n": 2}})
    grid.faults[1] = lambda message, reply: None if message.metadata.message_type == "query.upload" else reply
    results = rounds(experiment, grid)
    asked = grid.count("query.upload")
    assert asked
    for _, record in results:
        assert words(record)[1] in ("no reply: nothing within 0.05 s", "nothing chosen")
    assert any(record.status[1].kind == "no reply" for _, record in results)
    same_models(results, rounds_without(experiment, lambda order: (order.kind, order.client) == ("upload", 1)))


def test_a_node_that_restarts_between_the_exchanges_has_nothing_to_upload(federation: Any) -> None:
    experiment, grid = federation("fedldf", {"algorithm": {"name": "fedldf", "n": 4}, "training.rounds": 1})

    def restarts(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            grid.nodes[1003].state.clear()
        return reply

    grid.faults[3] = restarts
    [(_, record)] = rounds(experiment, grid)
    assert words(record)[:3] == ("ok", "ok", "ok")
    assert words(record)[3] == "failed: it has no such update, or cannot upload it (LookupError); its own log says more"


def test_too_few_replies_are_a_new_attempt(federation: Any) -> None:
    """Three of four are silent in the first attempt; the second one samples and draws for itself."""
    experiment, grid = federation("fedavg", {"training.min_replies": 0.5, "training.rounds": 1})

    def silent_at_first(message: Message, reply: Message) -> Message | None:
        order = message.content.config_records.get("order")
        return None if order is not None and order["attempt"] == 0 else reply

    grid.faults |= dict.fromkeys((0, 1, 2), silent_at_first)
    [(model, record)] = rounds(experiment, grid)
    assert record.attempt == 1
    assert words(record) == ("ok",) * 4
    assert record.earlier == tuple((0, client, TOO_LATE) for client in range(3))
    same_models([(model, record)], rounds_without(experiment, lambda o: o.attempt == 0 and o.client < 3))


def test_a_round_that_was_tried_again_is_evaluated(recipe: RecipeFile, tmp_path: Path) -> None:
    """A node refuses orders of an attempt that is over; those of the evaluation are of the last one."""
    settings = {"training.min_replies": 0.9, "training.rounds": 2, "engine.timeout": 0.05, "evaluation.on": ["clients"]}
    grid = FakeGrid(recipe({"engine.name": "flower", **settings}), CLIENTS)

    def silent_at_first(message: Message, reply: Message) -> Message | None:
        order = message.content.config_records.get("order")
        return None if order is not None and order["round"] == 1 and order["attempt"] == 0 else reply

    grid.faults[2] = silent_at_first
    lines = on_flower(grid, tmp_path / "run")
    assert [line["attempt"] for line in lines] == [1, 0]
    assert [line["metrics"]["clients"]["clients"] for line in lines] == [CLIENTS, CLIENTS]


def test_an_evaluation_that_nobody_answers_loses_no_round(recipe: RecipeFile, tmp_path: Path) -> None:
    settings = {"training.rounds": 2, "engine.timeout": 0.05, "evaluation.on": ["clients"]}
    grid = FakeGrid(recipe({"engine.name": "flower", **settings}), CLIENTS)

    def silent(message: Message, reply: Message) -> Message | None:
        order = message.content.config_records.get("order")
        return None if order is not None and (order["kind"], order["round"]) == ("evaluate", 1) else reply

    grid.faults |= dict.fromkeys(range(CLIENTS), silent)
    first, second = on_flower(grid, tmp_path / "run")
    assert missing(first["unmeasured"]) == [(client, TOO_LATE) for client in range(CLIENTS)]
    assert first["metrics"] == {}
    assert first["bytes"]["evaluation"] == second["bytes"]["evaluation"] > 0
    assert second["metrics"]["clients"]["clients"] == CLIENTS
    assert second["unmeasured"] == []
    assert Run(tmp_path / "run").finished()


def test_the_log_of_a_round_without_a_loss(
    recipe: RecipeFile, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"round": 3, "replies": 4, "clients": 4, "metrics": {"clients": {"loss": None}}, "lost": []}
    line["unmeasured"] = [{"client": 1, "why": "refused: loss is not finite"}]
    monkeypatch.setattr(server, "serve", lambda *_: [line])
    with caplog.at_level("INFO", "fedstrata"):
        nobody: Any = None
    server.app(nobody, Context(1, 1, {}, RecordDict(), {}))
    assert caplog.messages == ["round 3, 4 of 4 replies, clients loss –; client 1: refused: loss is not finite"]


def test_silence_of_all_is_tried_again_and_then_said(federation: Any) -> None:
    experiment, grid = federation("fedavg", {"training.attempts": 2})
    grid.faults |= dict.fromkeys(range(4), lambda m, r: None if m.metadata.message_type == "train" else r)
    with pytest.raises(
        RoundFailed, match=r"0 of 4 replies usable after 2 attempts; client 0: no reply: nothing within"
    ):
        rounds(experiment, grid)


def test_a_late_order_is_not_carried_out(federation: Any) -> None:
    """A round-1 order that arrives in round 2 would overwrite the update that round 2's second exchange asks for."""
    experiment, grid = federation("fedldf", {"algorithm": {"name": "fedldf", "n": 4}, "training.rounds": 2})
    first: list[Message] = []

    def once_more(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            first.append(message)
            if len(first) == 2:
                del grid.faults[0]
                late = grid.carry_out(first[0], grid.nodes[1000])
                assert late is not None
                with pytest.raises(NodeFailed, match="a later round or attempt has begun there"):
                    decode_reply(late.content, decode_order(first[0].content, experiment.layers), experiment.layers)
        return reply

    grid.faults[0] = once_more
    results = rounds(experiment, grid)
    assert len(first) == 2
    assert words(results[1][1]) == ("ok",) * 4
    same_models(results, rounds_without(experiment, lambda order: False))


def test_an_order_for_somebody_else_or_for_too_much_work_is_not_carried_out(
    federation: Any, caplog: pytest.LogCaptureFixture
) -> None:
    experiment, grid = federation()
    grid.join(1003, 2)
    engine = FlowerEngine(grid, experiment.setup, experiment.agreement, CLIENTS, timeout=0.05, poll=0.001)
    engine.wait_for(3, 10)
    grid.nodes[1001].node_config["partition-id"] = 0  # it said 1
    model = experiment.first_state().model
    orders = [Order("train", 1, 0, client, model=model, mask=torch.ones(2, dtype=torch.bool)) for client in (0, 1, 3)]
    asked = [replace(orders[0], work=9), *orders[1:]]
    more = "(MessageError); its own log says more"
    assert {order.client: answer for order, answer in engine.exchange(asked)} == {
        0: Status("failed", f"the order is for more work than its recipe has {more}"),
        1: Status("failed", f"the order is for another client than it has {more}"),
        3: Status("no reply", "no node that is online has this client"),
    }
    assert "work = 9, this node's recipe has 1" in caplog.text
    assert "order for client 1, this node has client 0" in caplog.text


# --- who the nodes are -----------------------------------------------------------------------------------------------


def test_a_node_is_asked_once_who_it_is(federation: Any) -> None:
    experiment, grid = federation()
    rounds(experiment, grid)
    assert grid.count("query.hello") == CLIENTS
    assert grid.count("train") == 3 * CLIENTS


def test_a_restarted_node_takes_its_client_over_when_the_old_one_is_gone(federation: Any) -> None:
    """Not before: a second node cannot push the first one out."""
    experiment, grid = federation()
    engine = FlowerEngine(grid, experiment.setup, experiment.agreement, CLIENTS, timeout=0.05, poll=0.001)
    engine.wait_for(CLIENTS, 10)
    grid.join(7, 1)
    model = experiment.first_state().model
    order = Order("train", 1, 0, 1, model=model, mask=torch.ones(2, dtype=torch.bool))
    for expected in (1001, 7):
        [(answered, reply)] = engine.exchange([order])
        assert answered is order
        assert isinstance(reply, Reply)
        assert grid.sent[-1].metadata.dst_node_id == expected
        if expected == 1001:
            grid.leave(1001)


def test_a_node_that_was_killed_and_comes_back_takes_part_again(federation: Any) -> None:
    experiment, grid = federation("fedavg", {"training.rounds": 3})
    engine = FlowerEngine(grid, experiment.setup, experiment.agreement, CLIENTS, timeout=0.05, poll=0.001)
    engine.wait_for(CLIENTS, 10)
    records = []
    for after, record in fit(experiment.first_state(), experiment.algorithm, engine, experiment.plan):
        records.append(record)
        if after.round == 1:
            grid.leave(1002)
        elif after.round == 2:
            grid.join(2002, 2)
            engine.wait_for(CLIENTS, 10)
    assert [words(record)[2] for record in records] == ["ok", "no reply: no node that is online has this client", "ok"]


def test_nodes_that_do_not_fit_are_left_out_and_named(federation: Any, recipe: RecipeFile) -> None:
    experiment, grid = federation()
    grid.join(1, 3, recipe=str(recipe({"training.lr": 0.2}, "other.toml")))
    grid.leave(1003)
    liar = Message(encode_hello(Hello(9, 1, 0, experiment.agreement)), dst_node_id=1, message_type="query")
    grid.faults[2] = lambda message, reply: Message(liar.content, reply_to=message)
    engine = FlowerEngine(grid, experiment.setup, experiment.agreement, CLIENTS, timeout=0.05, poll=0.001)
    with pytest.raises(FedstrataError) as caught:
        engine.wait_for(CLIENTS, 0.02)
    problem = str(caught.value)
    assert problem.startswith("waited 0.02 s for 4 clients, 2 are here")
    assert "node 1: client 3 has another recipe than the server" in problem
    assert "node 1002: client = 9, there are only 4" in problem
    assert engine.sizes.tolist() == [12, 12, 0, 0]


def test_a_node_that_was_away_is_asked_again_who_it_is(federation: Any, recipe: RecipeFile) -> None:
    """With authentication it has the same id as before, and perhaps the right recipe now."""
    experiment, grid = federation()
    other = str(recipe({"training.lr": 0.2}, "other.toml"))
    grid.nodes[1003].node_config["recipe"] = other
    engine = FlowerEngine(grid, experiment.setup, experiment.agreement, CLIENTS, timeout=0.05, poll=0.001)
    with pytest.raises(FedstrataError, match="node 1003: client 3 has another recipe than the server"):
        engine.wait_for(CLIENTS, 0.02)
    grid.leave(1003)
    with pytest.raises(FedstrataError, match=r"3 are here$"):
        engine.wait_for(CLIENTS, 0.02)
    grid.join(1003, 3)
    engine.wait_for(CLIENTS, 10)
    grid.leave(1003)
    engine.wait_for(CLIENTS - 1, 10)
    grid.join(1003, 3, recipe=other)
    with pytest.raises(FedstrataError, match="another recipe"):
        engine.wait_for(CLIENTS, 0.02)


def test_a_node_that_comes_late_takes_part_from_the_next_round_on(federation: Any, tmp_path: Path) -> None:
    """The run begins with three of four; the fourth comes after round 1, and is asked who it is during round 2."""
    _, grid = federation()
    grid.leave(1003)
    running = serve(grid, {"recipe": str(grid.recipe), "out": str(tmp_path / "run"), "min-clients": 3})
    first = next(running)
    grid.join(1003, 3)
    assert [line["clients"] for line in (first, *running)] == [3, 3, 4]
    assert not any(line["lost"] for line in Run(tmp_path / "run").history())


def test_the_server_knows_sizes_and_has_no_data(federation: Any) -> None:
    experiment, grid = federation("fedavg", {"evaluation.on": ["clients"], "evaluation.held_out": 0.25})
    engine = FlowerEngine(grid, experiment.setup, experiment.agreement, CLIENTS, timeout=0.05, poll=0.001)
    engine.wait_for(CLIENTS, 10)
    assert engine.sizes.tolist() == [9] * CLIENTS
    assert engine.held_out_sizes.tolist() == [3] * CLIENTS
    with pytest.raises(DataError, match="client 2's data is on its own node"):
        RemoteData(engine.sizes)[2]


def test_no_sample_is_in_any_message(federation: Any) -> None:
    """A node's first image, as it is trained on, occurs in nothing that it sends."""
    experiment, grid = federation("fedavg", {"evaluation.on": ["clients"]})
    rounds(experiment, grid)
    images = [experiment.task.client(k).batch(torch.arange(1).numpy())[0].numpy().tobytes() for k in range(CLIENTS)]
    assert grid.wire
    for _, content, _ in grid.wire:
        everything = b"".join(array.data for record in content.array_records.values() for array in record.values())
        assert not any(image in everything for image in images)


def test_two_nodes_that_say_to_be_one_client_are_named(recipe: RecipeFile, tmp_path: Path) -> None:
    grid = FakeGrid(recipe(), CLIENTS)
    grid.leave(1003)
    grid.join(1003, 0)
    problem = "3 are here; node 1003: says to be client 0, which is node 1000"
    with pytest.raises(FedstrataError, match=problem):
        on_flower(grid, tmp_path / "run", wait=0.5)


def test_a_problem_that_lasts_is_told_once(
    recipe: RecipeFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A node is asked who it is until it can say so."""
    grid = FakeGrid(recipe(), CLIENTS)
    grid.join(1003, 3, recipe="/no/where.toml")
    problem = "node 1003: its configuration or recipe cannot be used (RecipeError); its own log says more"
    with pytest.raises(FedstrataError, match=rf"3 are here; {re.escape(problem)}$"):
        on_flower(grid, tmp_path / "run", wait=2.0)
    assert grid.count("query.hello") > CLIENTS
    assert caplog.messages.count(problem) == 1


# --- what can be wrong beforehand ------------------------------------------------------------------------------------


def test_without_flower_one_line_says_what_to_install(
    recipe: RecipeFile, cli: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr("fedstrata.recipes.experiment.find_spec", lambda name: None)
    answer = cli("run", recipe(), "--engine", "flower", "--out", tmp_path / "run")
    assert (answer.code, answer.err) == (
        2,
        "error: engine.name = 'flower' needs flwr: pip install 'fedstrata[flower]'\n",
    )
    assert not (tmp_path / "run").exists()


def test_a_task_given_in_python_cannot_reach_the_nodes(tiny: Any, blobs: Any) -> None:
    task = fedstrata.Task(model=lambda: torch.nn.Linear(2, 2), clients=[blobs(10)])
    with pytest.raises(RecipeError, match=r"engine\.name = 'flower': its clients build the task on their own"):
        fedstrata.run({"engine": {"name": "flower"}}, task=task)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, "the run config's out = None"),
        ({"out": "runs/x"}, "out = 'runs/x': must be an absolute path"),
        ({"out": "/nowhere/x", "recipe": ""}, "the run config's recipe = ''"),
    ],
)
def test_a_run_config_that_does_not_say_enough(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(FedstrataError, match=problem):
        next(serve(None, config))  # type: ignore[arg-type]


def test_a_node_without_a_recipe_says_so(federation: Any) -> None:
    experiment, grid = federation()
    for context in grid.nodes.values():
        del context.node_config["recipe"]
    engine = FlowerEngine(grid, experiment.setup, experiment.agreement, CLIENTS, timeout=0.05, poll=0.001)
    with pytest.raises(FedstrataError, match=r"waited 0\.01 s for 4 clients, 0 are here"):
        engine.wait_for(CLIENTS, 0.01)
