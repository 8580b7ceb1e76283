"""What lasts between a Strategy's rounds, and what depends on nobody's id: checkpoints, sums, who is named."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.clientapp import ClientApp

from fedstrata import algorithms
from fedstrata.clients.training import build_model
from fedstrata.core.axes import Algorithm
from fedstrata.core.errors import RunDirectoryError
from fedstrata.flower import Strategy
from tests.support.flower import FakeGrid, array_app, failure, helped_app
from tests.support.math import image_task

TASK = image_task([5, 9, 6, 8, 12])
NODES = [7001, 90, 2**63 + 5, 12, 400]


def model() -> ArrayRecord:
    return ArrayRecord(build_model(TASK, 0, torch.float64).state_dict())


def grid(nodes: Sequence[int] = NODES, **options: Any) -> FakeGrid:
    app = helped_app(TASK, lr=0.3, epochs=2)
    return FakeGrid(dict.fromkeys(nodes, app), **options)


def numbers(arrays: ArrayRecord) -> dict[str, bytes]:
    return {name: array.numpy().tobytes() for name, array in arrays.items()}


ALGORITHMS = {
    "fedadp": algorithms.fedadp(),
    "fedlayerwise": algorithms.fedlayerwise(),
    "adaptive_mu": algorithms.adaptive_mu(mu0=0.5),
    "random_layers": algorithms.random_layers(n=2),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_strategy_goes_on_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    """Two rounds, another process, two more: the same bits as four in one go, what the rule remembers included.

    The second one is started with other numbers, as by somebody who has not kept the model.
    """
    whole = Strategy(ALGORITHMS[name], fraction_evaluate=0.0)
    expected = whole.start(grid(), model(), num_rounds=4, timeout=1)
    first = Strategy(ALGORITHMS[name], fraction_evaluate=0.0, checkpoint=tmp_path / "server.safetensors")
    first.start(grid(), model(), num_rounds=2, timeout=1)
    second = Strategy(ALGORITHMS[name], fraction_evaluate=0.0, checkpoint=tmp_path / "server.safetensors")
    other = ArrayRecord({key: Array(np.asarray(array.numpy() + 7)) for key, array in model().items()})
    seen: list[dict[str, bytes]] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        seen.append(numbers(arrays))
        return None

    result = second.start(grid(), other, num_rounds=2, timeout=1, evaluate_fn=evaluate)
    assert numbers(result.arrays) == numbers(expected.arrays) == seen[-1]
    assert seen[0] != numbers(other), "what is evaluated before the first round is the model that was kept"
    assert [record.round for record in second.records] == [3, 4]
    for ours, theirs in zip(second.records, whole.records[2:], strict=True):
        for key, values in theirs.layers.items():
            np.testing.assert_array_equal(ours.layers[key], values)


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "server.safetensors"
    Strategy(algorithms.fedadp(), fraction_evaluate=0.0, checkpoint=path).start(grid(), model(), 1, timeout=1)
    with pytest.raises(RunDirectoryError, match=r"server\.safetensors is of another algorithm"):
        Strategy(algorithms.fedlayerwise(), checkpoint=path).start(grid(), model(), 1, timeout=1)


@pytest.mark.parametrize("name", ["fedavg", "fedadp", "fedlayerwise"])
def test_models_and_metrics_do_not_depend_on_node_ids(name: str) -> None:
    """The same clients under six sets of ids: one result, bit for bit."""
    found = set()
    for seed in range(6):
        ids = [random.Random(f"{seed}-{at}").getrandbits(64) for at in range(len(NODES))]
        strategy = Strategy(algorithms.named(name), fraction_evaluate=0.0, record=False)
        result = strategy.start(grid(ids), model(), num_rounds=3, timeout=1)
        metrics = [sorted(record.items()) for record in result.train_metrics_clientapp.values()]
        found.add((tuple(numbers(result.arrays).items()), repr(metrics)))
    assert len(found) == 1


# --- one node that spoils it, by hand --------------------------------------------------------------------------------


def nodes_that_send(values: dict[int, Any], dtype: Any) -> FakeGrid:
    def app(value: Any) -> ClientApp:
        return array_app(lambda arrays, node: ({"w": np.array(value, dtype)}, {"num-examples": 1}))

    return FakeGrid({node: app(value) for node, value in values.items()})


def started(algorithm: Algorithm, nodes: FakeGrid, start: Any, dtype: Any) -> tuple[Strategy, np.ndarray]:
    strategy = Strategy(algorithm, fraction_evaluate=0.0)
    first = ArrayRecord({"w": Array(np.array(start, dtype))})
    return strategy, strategy.start(nodes, first, num_rounds=1, timeout=1).arrays["w"].numpy()


def test_arrays_whose_difference_overflows_are_set_aside() -> None:
    """3e38 − (−3e38) is no float32. The node is named, and the model is the other's, not infinite."""
    nodes = nodes_that_send({1: [3e38, 0], 2: [-2e38, 1]}, np.float32)
    strategy, new = started(algorithms.fedavg(), nodes, [-3e38, 0], np.float32)
    assert [str(status) for status in strategy.records[0].status] == ["not finite: update", "ok"]
    np.testing.assert_allclose(new, [-2e38, 1])


@pytest.mark.parametrize("name", ["fedavg", "fedadp", "fedlayerwise"])
def test_a_float64_node_that_sends_1e200_ends_nothing(name: str) -> None:
    nodes = nodes_that_send({1: [1e200, 0], 2: [1, 1]}, np.float64)
    strategy, new = started(algorithms.named(name), nodes, [0, 0], np.float64)
    assert [status.kind for status in strategy.records[0].status] == ["not finite", "ok"]
    np.testing.assert_allclose(new, [1, 1])


def test_a_model_that_overflows_stays_as_it_was() -> None:
    """Six nodes send the largest float32. A sixth of it, rounded up, six times, is larger: nobody is to blame."""
    most = float(np.finfo(np.float32).max)
    nodes = nodes_that_send({node: [most, 0] for node in range(1, 7)}, np.float32)
    strategy = Strategy(algorithms.fedavg(), fraction_evaluate=0.0)
    first = ArrayRecord({"w": Array(np.array([0, 1], np.float32))})
    result = strategy.start(nodes, first, num_rounds=1, timeout=1)
    assert [status.kind for status in strategy.records[0].status] == ["ok"] * 6
    assert "w" not in result.arrays, "Flower is told of no new model"
    assert strategy.server.arrays()["w"].tolist() == [0, 1]


def test_fedldfs_n_is_a_fifth_of_the_nodes_that_are_there() -> None:
    """Five nodes, then ten, then twenty: one, two and four upload each layer."""
    here: list[int] = []
    ids = list(range(1, 21))
    apps = grid(ids, connected=lambda: here)

    def meet(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        here[:] = ids[: (5, 10, 20, 20)[server_round]]
        return None

    for node, context in apps.contexts.items():
        context.node_config["partition-id"] = node % 5
    strategy = Strategy(algorithms.fedldf(), fraction_evaluate=0.0)
    strategy.start(apps, model(), num_rounds=3, timeout=1, evaluate_fn=meet)
    assert [record.layers["mask"].sum(0).tolist() for record in strategy.records] == [[1.0] * 2, [2.0] * 2, [4.0] * 2]


# --- who is named, and what Flower's own functions may give ----------------------------------------------------------


def spoiled(kind: str, node: int, reason: str) -> Callable[[Message, int], Message]:
    """An error in the place of one node's replies of a kind, as the SuperLink makes it: it comes from node 1."""

    def change(reply: Message, sender: int) -> Message:
        if sender != node or reply.metadata.message_type != kind:
            return reply
        failed = failure(reply, reason)
        failed.metadata.__dict__["_src_node_id"] = 1
        return failed

    return change


def test_an_error_in_evaluation_names_the_node_it_is_of(caplog: pytest.LogCaptureFixture) -> None:
    nodes = grid(change=spoiled("evaluate", 12, "no data"))
    Strategy(algorithms.fedavg()).start(nodes, model(), num_rounds=1, timeout=1)
    assert "node 12: failed: no data" in caplog.text
    assert "node 1:" not in caplog.text


def test_of_a_long_reason_the_end_is_kept() -> None:
    """What was raised is the last line of a traceback."""
    reason = "\n".join(["Traceback (most recent call last):", *["  File …"] * 300, "ValueError: eleven labels"])
    strategy = Strategy(algorithms.fedavg(), fraction_evaluate=0.0)
    strategy.start(grid(change=spoiled("train", 12, reason)), model(), num_rounds=1, timeout=1)
    (status,) = (status for status in strategy.records[0].status if status.kind != "ok")
    assert status.reason.endswith("ValueError: eleven labels")
    assert len(status.reason) < 400


@pytest.mark.parametrize("record", [True, False])
def test_a_metrics_function_may_give_none(record: bool) -> None:
    strategy = Strategy(
        algorithms.fedavg(), fraction_evaluate=0.0, record=record, train_metrics_aggr_fn=lambda contents, key: None
    )
    result = strategy.start(grid(), model(), num_rounds=1, timeout=1)
    found = result.train_metrics_clientapp.get(1)
    assert (found is None) is not record
    if record:
        assert found is not None
        assert list(found) == ["layer-angles"]


def test_the_server_is_there_when_the_first_round_begins() -> None:
    strategy = Strategy(algorithms.fedavg(), fraction_evaluate=0.0)
    with pytest.raises(RuntimeError, match="when the first round begins"):
        _ = strategy.server
    strategy.start(grid(), model(), num_rounds=1, timeout=1)
    assert strategy.server.state.round == 1
    assert set(strategy.server.rows) == set(NODES)
