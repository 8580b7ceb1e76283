"""`fedstrata.flower.Strategy`: the same rounds as `fit`, out of Flower's messages."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from fedstrata import algorithms
from fedstrata.clients.training import build_model
from fedstrata.core.axes import Algorithm
from fedstrata.core.errors import BadValue, RecipeError, UserError
from fedstrata.core.layers import Layers
from fedstrata.flower import Strategy
from fedstrata.objectives import FedProx, Plain
from fedstrata.recipes.schema import Training
from fedstrata.selections import Everything
from fedstrata.weightings import SampleSize
from tests.support import reference
from tests.support.flower import FakeGrid, array_app, failure, record_bytes
from tests.support.math import by_client, run, words
from tests.support.strategies import ALGORITHMS, EPOCHS, LR, NODES, ROUNDS, TASK, helped, start, stock


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_same_as_fit(name: str) -> None:
    """Full batches, so nothing is drawn: Flower's messages and the local engine come to the same models and figures.

    Nodes get their rows by id in round 1, so client k of `fit` is the node with the k-th smallest id; each has the
    k-th client's data if the apps are handed out in that order.
    """
    algorithm = ALGORITHMS[name]
    nodes = sorted(NODES)
    grid = FakeGrid(dict(zip(nodes, helped(), strict=True)))
    strategy = Strategy(algorithm)
    result, _ = start(strategy, grid)

    training = Training(rounds=ROUNDS, epochs=EPOCHS, batch_size=100, lr=LR)
    states, records = run(TASK, algorithm, training)
    layers = Layers.of(build_model(TASK, 0, torch.float64), algorithm.grouping)
    assert strategy.layers == layers
    expected = layers.views(states[-1].model)
    arrays = {name: array.numpy() for name, array in result.arrays.items()}
    for key, value in expected.items():
        np.testing.assert_allclose(arrays[key], value.numpy(), rtol=1e-9, atol=1e-12, err_msg=key)
    assert len(strategy.records) == ROUNDS
    for ours, theirs in zip(strategy.records, records, strict=True):
        assert ours.clients.tolist() == nodes
        assert ours.status == theirs.status
        assert ours.ledger.up.tolist() == theirs.ledger.up.tolist()
        assert ours.ledger.feedback == theirs.ledger.feedback
        assert set(ours.layers) == set(theirs.layers)
        for figure, values in theirs.layers.items():
            if figure == "mu" and algorithm.objective == Plain():
                continue  # `fit` records the zeros of no spring
            # A bias before BatchNorm has no gradient but rounding, and rounding has no angle.
            moved = np.broadcast_to(True, values.shape) if values.ndim == 1 else ~(theirs.layers["divergence"] < 1e-9)
            np.testing.assert_allclose(ours.layers[figure][moved], values[moved], 1e-6, 1e-9, err_msg=figure)


@pytest.mark.parametrize("name", ["fedavg", "fedadp", "fedlayerwise", "hdfl"])
def test_stock_clients_see_only_what_fedavg_sends(name: str) -> None:
    """What the server decides alone adds nothing to Flower's messages, and stock clients come to the same result."""
    plain, grid = start(Strategy(ALGORITHMS[name]), stock())
    assert all(set(message.content) == {"arrays", "config"} for message in grid.sent)
    same, _ = start(Strategy(ALGORITHMS[name]), helped())
    for key, array in plain.arrays.items():
        assert array.numpy().tobytes() == same.arrays[key].numpy().tobytes()


def test_fedavg_is_flowers_fedavg() -> None:
    """Also the clients' metrics and the evaluation."""
    ours, _ = start(Strategy(algorithms.fedavg(), record=False, fraction_evaluate=1.0), stock())
    random.seed(0)
    grid = FakeGrid(dict(zip(NODES, stock(), strict=True)))
    initial = ArrayRecord(build_model(TASK, 0, torch.float64).state_dict())
    theirs = FedAvg().start(grid, initial, num_rounds=ROUNDS)
    for key, array in theirs.arrays.items():
        if array.dtype != "float64":
            continue
        np.testing.assert_allclose(ours.arrays[key].numpy(), array.numpy(), rtol=1e-12, atol=1e-14)
    for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
        for number, metrics in getattr(theirs, name).items():
            for key, value in metrics.items():
                assert getattr(ours, name)[number][key] == pytest.approx(value, rel=1e-9)
    assert isinstance(Strategy(algorithms.fedavg()), FlowerStrategy)


@pytest.mark.parametrize("name", ["fedavg", "fedadp", "fedlayerwise", "fedldf", "all three axes"])
def test_the_ids_of_nodes_change_no_bit(name: str) -> None:
    """They are drawn anew whenever nodes are started, and sums of floating-point numbers depend on their order."""
    results = []
    for nodes in (NODES, sorted(NODES), sorted(NODES, reverse=True)):
        result, _ = start(Strategy(ALGORITHMS[name]), FakeGrid(dict(zip(nodes, helped(), strict=True))))
        arrays = {key: array.numpy().tobytes() for key, array in result.arrays.items()}
        results.append((arrays, result.train_metrics_clientapp))
    assert results[0] == results[1] == results[2]


def captured(messages: list[Message], model: dict[str, np.ndarray]) -> tuple[list[Any], dict[int, int], list[int]]:
    """Updates, sizes and node ids of a round's replies."""
    updates = [{name: m.content["arrays"][name].numpy() - model[name] for name in model} for m in messages]
    told: list[Any] = [message.content["metrics"] for message in messages]
    sizes = {at: int(metrics["num-examples"]) for at, metrics in enumerate(told)}
    return updates, sizes, [m.metadata.src_node_id for m in messages]


@pytest.mark.parametrize("weighting", ["fedadp", "fedlayerwise"])
@pytest.mark.parametrize("smoothing", ["participation", "round"])
def test_angles_are_remembered_by_node(weighting: str, smoothing: str) -> None:
    """Nodes come and go, and each keeps its own running angle: against the slow reference, fed with the replies."""
    meetings = [[90, 400, 12], [7001, 12, 90], [2**63 + 5, 400, 7001, 90], [400, 12]]
    present: list[int] = []
    grid = FakeGrid(dict(zip(NODES, stock(), strict=True)), connected=lambda: present)
    strategy = Strategy(algorithms.named(weighting, smoothing=smoothing))
    arrays = ArrayRecord(build_model(TASK, 0, torch.float64).state_dict())
    grouping = {layer.name: [entry.name for entry in layer.entries] for layer in Layers.of(TASK.model()).layers}
    trainable = set(dict(TASK.model().named_parameters()))
    rules = reference.Rules(weighting=weighting, smoothing=smoothing)
    angles: dict[Any, float] = {}
    counts: dict[Any, int] = {}
    for number, who in enumerate(meetings, start=1):
        present[:] = who
        model = {name: array.numpy() for name, array in arrays.items() if array.dtype == "float64"}
        replies = grid.send_and_receive(strategy.configure_train(number, arrays, ConfigRecord(), grid))
        updates, sizes, clients = captured(replies, model)
        sent = [{name: np.ones(3, dtype=bool) for name in grouping} for _ in updates]
        weights = reference.weigh(updates, sent, sizes, clients, grouping, trainable, rules, number, angles, counts)
        expected = reference.aggregate(model, updates, sent, weights, grouping)
        aggregated, _ = strategy.aggregate_train(number, replies)
        assert aggregated is not None
        for name, value in expected.items():
            np.testing.assert_allclose(aggregated[name].numpy(), value, rtol=1e-9, atol=1e-12)
        record = strategy.records[-1]
        for at, client in enumerate(clients):
            row = record.clients.tolist().index(client)
            share = weights[at] / weights.sum(0)
            np.testing.assert_allclose(record.layers["weight"][row], share, rtol=1e-6)
        assert np.ptp(record.layers["weight"]) > 0.01
        arrays = aggregated
    assert len(counts) == len(NODES) * (len(grouping) if weighting == "fedlayerwise" else 1)


def test_a_new_start_forgets_angles_and_records() -> None:
    strategy = Strategy(algorithms.fedlayerwise())
    first, _ = start(strategy, stock())
    second, _ = start(strategy, stock())
    assert len(strategy.records) == ROUNDS
    for key, array in first.arrays.items():
        assert array.numpy().tobytes() == second.arrays[key].numpy().tobytes()


# --- replies that cannot be used ---------------------------------------------------------------------------------


def with_array(name: str, array: Any) -> Callable[[Message], None]:
    def change(reply: Message) -> None:
        reply.content.array_records["arrays"][name] = array if isinstance(array, Array) else Array(np.asarray(array))

    return change


def with_metric(key: str, value: Any) -> Callable[[Message], None]:
    def change(reply: Message) -> None:
        if value is None:
            del reply.content["metrics"][key]
        else:
            reply.content["metrics"][key] = value

    return change


def with_record(key: str, record: Any) -> Callable[[Message], None]:
    def change(reply: Message) -> None:
        reply.content[key] = record

    return change


def drop(name: str) -> Callable[[Message], None]:
    def change(reply: Message) -> None:
        del reply.content["arrays"][name]

    return change


PICKLED = Array("float64", (3,), "numpy.ndarray", b"\x93NUMPY\x01\x00\x76\x00{'descr': '|O', 'fortran_order': False, "
                b"'shape': (3,), }".ljust(128) + b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")  # fmt: skip
SPOILT = {
    "no number of examples": (with_metric("num-examples", None), "num-examples = None, must be a positive number"),
    "no examples": (with_metric("num-examples", 0), "num-examples = 0, must be"),
    "negative": (with_metric("num-examples", -3), "num-examples = -3, must be"),
    "not a number": (with_metric("num-examples", math.nan), "num-examples = nan, must be"),
    "infinite": (with_metric("num-examples", math.inf), "num-examples = inf, must be"),
    "absurd": (with_metric("num-examples", 1e300), r"num-examples = 1e\+300, must be a positive number, at most"),
    "a list": (with_metric("num-examples", [1, 2]), r"num-examples = \[1, 2\], must be"),
    "shape": (with_array("fc.bias", np.zeros(4)), r"fc.bias has shape \[4\], expected \[3\]"),
    "NaN": (with_array("fc.bias", [0, math.nan, 0]), "fc.bias"),
    "integers": (with_array("fc.bias", [1, 2, 3]), "fc.bias has dtype int64, expected float64"),
    "an integer of another kind": (
        with_array("bn.num_batches_tracked", np.float32(1)),
        r"bn.num_batches_tracked is float32 \[\], expected int64 \[\]",
    ),
    "missing": (drop("fc.bias"), "arrays fc.bias are missing"),
    "too many": (with_array("fc.extra", [1.0]), "arrays fc.extra were not asked for"),
    "garbage": (with_array("fc.bias", Array("float64", (3,), "numpy.ndarray", b"garbage")), "fc.bias cannot be read"),
    "pickle": (with_array("fc.bias", PICKLED), "fc.bias cannot be read"),
    "serialised otherwise": (with_array("fc.bias", Array("float64", (3,), "pickle", b"")), "fc.bias cannot be read"),
    "two records": (with_record("more", ArrayRecord()), "2 ArrayRecords, expected 1"),
    "two metrics": (with_record("more", MetricRecord()), "2 MetricRecords, expected 1"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_bad_reply_is_set_aside(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """With a line in the log, and the round goes on as if the node had not been there."""
    spoil, reason = SPOILT[name]
    bad = NODES[1]

    def change(reply: Message, node: int) -> Message:
        if node == bad and reply.metadata.message_type == "train":
            spoil(reply)
        return reply

    grid = FakeGrid(dict(zip(NODES, stock(), strict=True)), change=change)
    strategy = Strategy(algorithms.fedlayerwise(), fraction_evaluate=0.0)
    with caplog.at_level("WARNING", logger="flwr"):
        result, _ = start(strategy, grid, rounds=2)

    without = FakeGrid(
        dict(zip(NODES, stock(), strict=True)), connected=lambda: [node for node in NODES if node != bad]
    )
    expected, _ = start(Strategy(algorithms.fedlayerwise(), fraction_evaluate=0.0), without, rounds=2)
    for key, array in expected.arrays.items():
        np.testing.assert_allclose(result.arrays[key].numpy(), array.numpy(), rtol=1e-12)
    for record in strategy.records:
        status = by_client(record)
        assert [node for node, word in status.items() if word != "ok"] == [bad]
        assert re.match(f"{'not finite' if name == 'NaN' else 'refused'}: {reason}", status[bad])


def test_errors_and_silence() -> None:
    """A client that raises, one that never answers, one that answers twice, one that nobody asked, and one that says to
    be the one that never answers: what a reply says of its origin, its sender has written.
    """
    apps = dict(zip(NODES, stock(), strict=True))

    def fail(arrays: Any, node: int) -> Any:
        raise OSError("\x1b[2Jdisk full\n")

    apps[NODES[0]] = array_app(fail)

    class Odd(FakeGrid):
        def pull_messages(self, message_ids: Any) -> list[Message]:
            replies = super().pull_messages(message_ids)
            twice = next((r for r in replies if r.metadata.src_node_id == NODES[2]), None)
            if twice is None:
                return replies
            stranger = Message(twice.content, dst_node_id=1, message_type="train")
            stranger.metadata.__dict__["_src_node_id"] = 31337
            impostor = Message(twice.content, dst_node_id=1, message_type="train")
            impostor.metadata.__dict__["_src_node_id"] = NODES[1]
            return [*replies, twice, stranger, impostor]

    grid = Odd(apps, change=lambda reply, node: None if node == NODES[1] else reply)
    strategy = Strategy(algorithms.fedavg(), fraction_evaluate=0.0)
    start(strategy, grid, rounds=1)
    record = strategy.records[0]
    status = by_client(record)
    assert status.pop(NODES[0]) == r"failed: \x1b[2Jdisk full"
    assert status.pop(NODES[1]) == "no reply"
    assert status == dict.fromkeys(NODES[2:], "ok")
    assert int(record.ledger.up.sum()) == 3 * 81 * 8  # Tiny: 75 trainable numbers and 6 statistics, in float64


def test_too_few_replies_leave_the_model_alone() -> None:
    good = set(NODES[:2])
    initial = build_model(TASK, 0, torch.float64).state_dict()

    def change(reply: Message, node: int) -> Message | None:
        return reply if node in good or reply.metadata.message_type != "train" else None

    grid = FakeGrid(dict(zip(NODES, stock(), strict=True)), change=change)
    strategy = Strategy(algorithms.fedadp(), min_replies=3)
    seen: list[bytes] = []

    def evaluate(number: int, arrays: ArrayRecord) -> None:
        seen.append(arrays["fc.weight"].numpy().tobytes())
        if number == 1:
            good.add(NODES[2])

    result, _ = start(strategy, grid, rounds=2, evaluate_fn=evaluate)
    assert seen[0] == seen[1] == initial["fc.weight"].numpy().tobytes()
    assert seen[2] != seen[0]
    assert list(result.train_metrics_clientapp) == [2]
    assert [record.replies for record in strategy.records] == [2, 3]


def test_a_round_with_fewer_nodes_than_n_goes_on() -> None:
    """n is at most the nodes of the first round, which fails here; in the second, all that are left send all layers."""
    present = list(NODES)
    grid = FakeGrid(
        dict(zip(NODES, helped(), strict=True)),
        change=lambda reply, node: None if len(present) == 5 and reply.metadata.message_type == "train" else reply,
        connected=lambda: present,
    )

    def leave(number: int, arrays: ArrayRecord) -> None:
        del present[5 - number :]

    strategy = Strategy(algorithms.fedldf(n=5), fraction_evaluate=0.0)
    start(strategy, grid, rounds=2, evaluate_fn=leave)
    assert [words(record) for record in strategy.records] == [("no reply",) * 5, ("ok",) * 4]
    assert strategy.records[1].layers["mask"].all()


def test_the_log_counts_those_that_were_asked(caplog: pytest.LogCaptureFixture) -> None:
    """HDFL asks two of five."""
    with caplog.at_level("INFO", logger="flwr"):
        start(Strategy(algorithms.hdfl(n=2), fraction_evaluate=0.0), stock(), rounds=1)
    assert "aggregate_train: 2 of 2 replies usable" in caplog.messages


def test_metrics_are_of_all_usable_first_replies() -> None:
    """Also of a node whose upload fails, as its training was as good as the others'; not of one that is refused.

    Examples are 5, 9, 6, 8 and 12. The loss of the two nodes is 1 and 100, of the others 0.
    """
    tells = {NODES[0]: 1.0, NODES[1]: 100.0}

    def change(reply: Message, node: int) -> Message:
        if not reply.content.metric_records:
            return failure(reply, "no disk") if node == NODES[0] else reply
        reply.content.metric_records["metrics"]["train_loss"] = tells.get(node, 0.0)
        if node == NODES[1]:
            del reply.content["fedstrata-scores"]
        return reply

    strategy = Strategy(algorithms.fedldf(n=4), fraction_evaluate=0.0)
    result, _ = start(strategy, FakeGrid(dict(zip(NODES, helped(), strict=True)), change=change), rounds=1)
    told = by_client(strategy.records[0])
    assert told.pop(NODES[0]) == "failed: no disk"
    assert told.pop(NODES[1]).startswith("refused: no scores for fedldf")
    assert set(told.values()) == {"ok"}
    assert result.train_metrics_clientapp[1]["train_loss"] == pytest.approx(5 / (5 + 6 + 8 + 12))


def test_integers_do_not_come_from_a_reply_that_is_refused() -> None:
    """Node 2 has most examples, and an update that no float32 can hold: 3e38 − (−3e38)."""

    def train(arrays: dict[str, Any], node: int) -> Any:
        new = {"0": np.full_like(arrays["0"], {1: -3e38, 2: 3e38}[node]), "1": np.array([node])}
        return new, {"num-examples": node}

    initial = ArrayRecord([np.full(2, -3e38, np.float32), np.array([0])])
    strategy = Strategy(algorithms.fedavg(), fraction_evaluate=0.0)
    result = strategy.start(FakeGrid(dict.fromkeys([1, 2], array_app(train))), initial, num_rounds=1)
    assert by_client(strategy.records[0]) == {1: "ok", 2: "not finite: update"}
    assert result.arrays["1"].numpy().tolist() == [1]


def test_metrics_that_only_some_report(caplog: pytest.LogCaptureFixture) -> None:
    """Flower's FedAvg ends the run; here the common ones are averaged."""

    def train(arrays: dict[str, Any], node: int) -> Any:
        mine = {"only-here": 1.0, "list": [1.0, 2.0]} if node == 3 else {"list": [4.0]}
        return arrays, {"loss": float(node), "num-examples": node} | mine

    strategy = Strategy(algorithms.fedavg(), fraction_evaluate=0.0, record=False)
    grid = FakeGrid(dict.fromkeys([1, 3], array_app(train)))
    result = strategy.start(grid, ArrayRecord([np.ones(2)]), num_rounds=1)
    assert dict(result.train_metrics_clientapp[1]) == {"loss": pytest.approx((1 * 1 + 3 * 3) / 4)}


def test_a_function_of_ones_own_sees_whole_replies() -> None:
    """Also where clients report different metrics."""
    seen: list[Any] = []

    def aggregate(contents: list[RecordDict], key: str) -> MetricRecord:
        seen.extend((set(content), set(content["metrics"])) for content in contents)
        return MetricRecord({"count": len(contents)})

    app = array_app(lambda arrays, node: (arrays, {"num-examples": 1, f"of-{node}": 2.0}))
    strategy = Strategy(algorithms.fedavg(), fraction_evaluate=0.0, train_metrics_aggr_fn=aggregate)
    result = strategy.start(FakeGrid({1: app, 2: app}), ArrayRecord([np.ones(2)]), num_rounds=1)
    assert seen == [({"arrays", "metrics"}, {"num-examples"})] * 2
    assert result.train_metrics_clientapp[1]["count"] == 2


def test_an_evaluation_that_some_clients_spoil_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    """One raises, one says nothing of its examples, one has a metric of its own: the mean is over the two others' loss.

    Sizes are 6, 8 and 12; the loss of the node with 12 is set to 1 and of the others to 0.
    """

    def change(reply: Message, node: int) -> Message:
        if reply.metadata.message_type != "evaluate":
            return reply
        if node == NODES[0]:
            return failure(reply, "\x1b[2Jno disk")
        metrics = reply.content.metric_records["metrics"]
        metrics["eval_loss"] = float(node == NODES[4])
        if node == NODES[1]:
            del metrics["num-examples"]
        if node == NODES[2]:
            metrics["mood"] = 3.0
        return reply

    grid = FakeGrid(dict(zip(NODES, stock(), strict=True)), change=change)
    with caplog.at_level("WARNING", logger="flwr"):
        result, _ = start(Strategy(algorithms.fedavg()), grid, rounds=1)
    metrics = dict(result.evaluate_metrics_clientapp[1])
    assert metrics == {"eval_loss": pytest.approx(12 / (6 + 8 + 12))}
    assert r"failed: \x1b[2Jno disk" in caplog.text
    assert f"node {NODES[1]}: refused: num-examples = None" in caplog.text


# --- arrays of any framework -------------------------------------------------------------------------------------


def test_index_names_and_mixed_dtypes_by_hand() -> None:
    """A list of arrays, as Keras models come: each is a layer, integers pass, dtypes stay.

    Node 1 has 1 example, node 2 has 3: the mean of 1 and 5 is 4. The integers come from node 2.
    """

    def train(arrays: dict[str, Any], node: int) -> Any:
        assert [arrays[str(at)].dtype for at in range(4)] == [np.float32, np.float16, np.int32, np.float64]
        new = {
            "0": arrays["0"] + np.float32({1: 1, 2: 5}[node]),
            "1": (arrays["1"] + {1: 1, 2: 5}[node]).astype(np.float64),  # a client may compute in another precision
            "2": np.full_like(arrays["2"], node * 10),
            "3": np.asarray(arrays["3"] + {1: 1, 2: 5}[node]),
        }
        return new, {"num-examples": 2 * node - 1}

    initial = ArrayRecord(
        [np.zeros((2, 3, 4, 5), np.float32), np.ones(2, np.float16), np.arange(3, dtype=np.int32), np.array(7.0)]
    )
    strategy = Strategy(algorithms.fedavg(), fraction_evaluate=0.0)
    result = strategy.start(FakeGrid(dict.fromkeys([1, 2], array_app(train))), initial, num_rounds=1)
    assert strategy.layers.names == ("0", "1", "3")
    assert list(result.arrays) == ["0", "1", "2", "3"]
    new = [array.numpy() for array in result.arrays.values()]
    assert [array.dtype for array in new] == [np.float32, np.float16, np.int32, np.float64]
    assert [array.shape for array in new] == [(2, 3, 4, 5), (2,), (3,), ()]
    assert [float(array.min()) for array in new] == [float(array.max()) for array in new] == [4, 5, 20, 11]
    assert strategy.records[0].ledger.up.tolist() == [2 * 120 * 4, 2 * 2 * 2, 2 * 8]


def test_own_layers_and_buffers() -> None:
    """`layers=` groups by patterns, `buffers=` says what is not measured: with everything but "1" a buffer, the angle
    of the one layer is that of array 1 alone. Its updates are (1, 0) and (0, 1) with sizes 1 and 1: 45° from the mean.
    """
    steps = {1: (1.0, 0.0), 2: (0.0, 1.0)}

    def train(arrays: dict[str, Any], node: int) -> Any:
        return {"0": arrays["0"] + 100.0 * node, "1": arrays["1"] + np.array(steps[node])}, {"num-examples": 10}

    initial = ArrayRecord([np.zeros(3), np.zeros(2)])
    strategy = Strategy(algorithms.fedlayerwise(), layers={"both": ["*"]}, buffers=["0"], fraction_evaluate=0.0)
    result = strategy.start(FakeGrid(dict.fromkeys([1, 2], array_app(train))), initial, num_rounds=1)
    assert strategy.layers.names == ("both",)
    assert result.arrays["0"].numpy().tolist() == [150.0] * 3
    assert result.train_metrics_clientapp[1]["layer-angles"] == pytest.approx([45])


@pytest.mark.parametrize(
    ("options", "arrays", "reason"),
    [
        ({"buffers": ["conv*"]}, [np.ones(2)], "buffers = 'conv\\*': matches no array"),
        ({"buffers": ["*"]}, [np.ones(2)], "no floating-point array that is not a buffer"),
        ({}, [np.ones(2, int)], "no floating-point array that is not a buffer"),
        ({}, [np.ones(2, complex)], "arrays.0 = 'complex128': must be float16"),
        ({"layers": "rows"}, [np.ones(2)], "layers.grouping = 'rows'"),
        ({"layers": {"a": ["1"]}}, [np.ones(2), np.ones(2)], "belongs to no layer"),
        ({}, [np.array([math.nan])], "the global model: 0 is not finite"),
    ],
)
def test_arrays_that_cannot_be_grouped(options: Any, arrays: Any, reason: str) -> None:
    grid = FakeGrid(dict.fromkeys([1, 2], array_app(lambda arrays, node: (arrays, {"num-examples": 1}))))
    with pytest.raises(UserError, match=reason):
        Strategy(algorithms.fedavg(), **options).start(grid, ArrayRecord(arrays), num_rounds=1)


def test_what_a_strategy_refuses() -> None:
    with pytest.raises(RecipeError, match=r"must be an Algorithm, like fedstrata.fedlayerwise\(\)"):
        Strategy(algorithms.fedlayerwise)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"NeuronPruning.*picks units on the client"):
        Strategy(algorithms.neuron_pruning())
    with pytest.raises(RecipeError, match=r"algorithm\.weighting = 'FedNova': needs to know each client's local steps"):
        Strategy(algorithms.fednova())
    with pytest.raises(BadValue, match="min_replies"):
        Strategy(algorithms.fedavg(), min_replies=0)
    with pytest.raises(TypeError, match="fraction_fit"):
        Strategy(algorithms.fedavg(), fraction_fit=0.5)
    with pytest.raises(RecipeError, match="n = 9: must be at most the clients of a round, 5"):
        start(Strategy(algorithms.fedldf(n=9)), helped())

    class Own(FedProx):
        pass

    with pytest.raises(RecipeError, match=r"Own.*register it as an entry point of fedstrata\.objectives"):
        Strategy(Algorithm(Own(), Everything(), SampleSize()))


def test_a_model_that_changes_its_shape_between_rounds() -> None:
    strategy = Strategy(algorithms.fedavg())
    grid = FakeGrid(dict.fromkeys([1, 2], array_app(lambda arrays, node: (arrays, {"num-examples": 1}))))
    strategy.configure_train(1, ArrayRecord([np.ones(2)]), ConfigRecord(), grid)
    with pytest.raises(RecipeError, match="other names, shapes or dtypes than before"):
        strategy.configure_train(2, ArrayRecord([np.ones(3)]), ConfigRecord(), grid)


# --- bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "fedldf", "random_layers", "all three axes"])
def test_flowers_records_weigh_little_more_than_the_ledger_says(name: str) -> None:
    strategy = Strategy(ALGORITHMS[name], fraction_evaluate=0.0)
    _, grid = start(strategy, helped())
    carried = sum(record_bytes(message) for message in grid.received)
    counted = sum(record.ledger.upload for record in strategy.records)
    arrays = sum(len(record) for message in grid.received for record in message.content.array_records.values())
    assert counted < carried <= counted + 256 * arrays + 2048 * len(grid.received)
