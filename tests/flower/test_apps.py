"""`fedstrata.flower` in somebody's own app: what is set up wrongly, what clients send, Flower's mods and wrappers."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import (
    LocalDpMod,
    adaptiveclipping_mod,
    arrays_size_mod,
    fixedclipping_mod,
    message_size_mod,
)
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)
from flwr.serverapp.strategy import Strategy as FlowerStrategy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fedstrata import algorithms
from fedstrata.core.axes import Algorithm
from fedstrata.core.errors import ClientAppError, RecipeError, UserError
from fedstrata.flower import Local, Strategy, selection_mod
from fedstrata.objectives import Plain
from fedstrata.selections import Everything
from fedstrata.weightings import SampleSize, Uniform
from tests.support.flower import FakeGrid, asked, failure
from tests.support.math import by_client, words

NODES = [3, 1, 2**63 + 7]
LOCAL_DP = LocalDpMod(clipping_norm=5.0, sensitivity=1e-3, epsilon=10.0, delta=1e-5)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def app(*mods: Any, proximal: bool = True, pull: bool = True, acknowledge: bool = True) -> ClientApp:
    """Three steps of SGD towards the node's own number."""
    made = ClientApp(mods=list(mods))

    @made.train()
    def train(message: Message, context: Context) -> Message:
        model = network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        local = Local(message, model) if proximal else None
        for batch in [torch.eye(2)] * 3:
            optimizer.zero_grad()
            (model(batch) - context.node_id % 5).square().mean().backward()
            if local is not None and pull:
                local.pull()
            optimizer.step()
        metrics = MetricRecord({"num-examples": 4})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        if local is not None and acknowledge:
            local.acknowledge(content)
        return Message(content, reply_to=message)

    @made.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 4, "loss": 1.0})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return made


def start(strategy: FlowerStrategy, grid: Grid | ClientApp, rounds: int = 1, **options: Any) -> Any:
    grid = FakeGrid(dict.fromkeys(NODES, grid)) if isinstance(grid, ClientApp) else grid
    options = {"timeout": 0.2} | options
    return strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=rounds, **options)


# --- what is certainly set up wrongly --------------------------------------------------------------------------------

WRONG: dict[str, tuple[str, ClientApp, str]] = {
    "no proximal term": ("fedprox", app(proximal=False), "did not apply fedprox: use fedstrata.flower.Local in its"),
    "no acknowledgement": ("fedprox", app(acknowledge=False), r"not apply fedprox: use .* call acknowledge\(content\)"),
    "no pull": ("adaptive_mu", app(pull=False), r"not apply adaptive_mu: call local.pull\(\) between backward and"),
    "no epochs": ("fedlap", app(), r"failed: FedLap has to know when an epoch begins: call local.epoch\(\), or"),
    "no mod, scores": ("fedldf", app(), r"no scores for fedldf: put selection_mod first in ClientApp\(mods=\[…\]\)"),
    "no mod, layers": ("random_layers", app(), r"were not asked for; put selection_mod first in ClientApp\(mods="),
    "clipping before it": ("fedldf", app(fixedclipping_mod, selection_mod), "'fixedclipping_mod': must come after"),
    "adaptive clipping before it": (
        "random_layers",
        app(adaptiveclipping_mod, selection_mod),
        "mods = 'adaptiveclipping_mod': must come after selection_mod: put selection_mod first",
    ),
    "noise before it": ("fedldf", app(LOCAL_DP, selection_mod), "mods = 'LocalDpMod': must come after selection_mod"),
    "a mod of one's own before it": (
        "fedldf",
        app(lambda message, context, call: call(message, context).content["arrays"] and None, selection_mod),
        r"failed: 'arrays'; if a mod has failed, put selection_mod first",
    ),
}  # fmt: skip


def named(name: str) -> Algorithm:
    return algorithms.named(name, **({"n": 1} if name in ("fedldf", "random_layers") else {}))


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_on_every_client_ends_the_run(name: str) -> None:
    """It will not be right in the next round either; the text says what to change. Flower marks the run as failed."""
    algorithm, client, text = WRONG[name]
    strategy = Strategy(named(algorithm), layers="tensor", seed=3)
    with pytest.raises(ClientAppError, match=rf"^round 1: all 3 nodes answered, and no answer can be used; .*{text}"):
        start(strategy, client, rounds=3, train_config=ConfigRecord({"clipping_norm": 1.0}))
    assert len(strategy.records) == 1
    assert issubclass(ClientAppError, UserError)


def test_a_client_that_raises_everywhere_ends_the_run() -> None:
    """Of any algorithm, also where it raises in the second exchange."""

    def broken(message: Message, context: Context, call_next: Any) -> Message:
        if "kept" in message.content["config"].get("fedstrata", ""):
            raise OSError("no disk\x1b[2J")
        return call_next(message, context)

    with pytest.raises(ClientAppError, match=r"node \d: failed: no disk\\x1b\[2J; if a mod has failed, put"):
        start(Strategy(named("fedldf")), app(broken, selection_mod))
    made = ClientApp()

    @made.train()
    def train(message: Message, context: Context) -> Message:
        raise OSError("no data")

    with pytest.raises(ClientAppError, match=r"no answer can be used; node 1: failed: no data$"):
        start(Strategy(algorithms.fedavg()), made)


@pytest.mark.parametrize("code", [None, 0, 3, 4, 5, 8])
def test_silence_does_not_end_the_run(code: int | None) -> None:
    """With one node silent, gone or dead nothing is certain; and once a round has succeeded, it was not the set-up."""
    number = 0

    def change(reply: Message, node: int) -> Message | None:
        nonlocal number
        number += reply.metadata.message_type == "train" and node == min(NODES)
        if reply.metadata.message_type != "train" or number == 2:
            return reply
        if number == 1 and node == NODES[0]:
            return None if code is None else failure(reply, "gone", code)
        return failure(reply, "raised")

    strategy = Strategy(algorithms.fedavg(), fraction_evaluate=0.0)
    grid = FakeGrid(dict.fromkeys(sorted(NODES), app()), change=change)
    random.seed(1)
    start(strategy, grid, rounds=1)
    assert [status.kind for status in strategy.records[0].status] == ["failed", "no reply", "failed"]
    number = 1
    strategy = Strategy(algorithms.fedavg(), fraction_evaluate=0.0)
    start(strategy, OrderedGrid(grid), rounds=3)
    assert [record.replies for record in strategy.records] == [3, 0, 0]


class OrderedGrid(FakeGrid):
    """Messages in the order of node ids."""

    def __init__(self, grid: FakeGrid) -> None:
        super().__init__(grid.apps, change=grid.change)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return super().push_messages(sorted(messages, key=lambda message: message.metadata.dst_node_id))


def test_it_is_checked_again_until_a_round_has_succeeded() -> None:
    """Round 1: one silent. Round 2: all refused, and the run ends."""
    rounds = 0

    def change(reply: Message, node: int) -> Message | None:
        nonlocal rounds
        rounds += node == min(NODES)
        return None if rounds == 1 and node == min(NODES) else reply

    strategy = Strategy(algorithms.fedprox(), fraction_evaluate=0.0)
    with pytest.raises(ClientAppError, match=r"^round 2: all 3 nodes answered"):
        start(strategy, FakeGrid(dict.fromkeys(NODES, app(proximal=False)), change=change), rounds=3)


# --- what clients may send -------------------------------------------------------------------------------------------


@dataclass
class Spoiled:
    """What one client sends in the place of a true reply, in one of the three kinds of exchange."""

    phase: str
    spoil: Callable[[Message], None]


def npy(array: np.ndarray) -> bytes:
    return Array(array).data


ODD_ARRAYS = [
    np.zeros((3, 2), np.float32),
    np.zeros((3, 2), ">f4"),
    np.full((3, 2), 3e38, np.float32),
    np.full((3, 2), -1e308),
    np.asfortranarray(np.ones((3, 2))),
    np.array(np.int64(3)),
    np.array(5.0),
    np.zeros((0, 2), np.float32),
    np.zeros(2, [("a", "f4")]),
    np.array(["x"]),
    np.zeros(1, "M8[s]"),
]
odd_names = st.one_of(
    st.sampled_from(["0.weight", "1.bias", "count", "scores", "", "\x1b[2J", "é" * 300, "\ud800", "\0"]),
    st.text(max_size=5),
)
odd_dtypes = st.one_of(st.sampled_from(["float32", "int64", "O", "f4,f4", ">f8", ""]), st.text(max_size=4))
arrays = st.builds(
    lambda dtype, shape, stype, data: Array(dtype, tuple(shape), stype, data),
    odd_dtypes,
    st.lists(st.integers(-2, 10**18), max_size=3),
    st.sampled_from(["numpy.ndarray", "pickle", ""]),
    st.one_of(st.binary(max_size=200), st.sampled_from([npy(array) for array in ODD_ARRAYS])),
)
numbers = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(), st.just(10**5000))
metrics = st.one_of(numbers, st.lists(st.integers(-5, 5), max_size=3), st.lists(st.floats(), max_size=3))
odd: list[Any] = [5, None, True, "7", b"7", [], [None], [True, "x"], {}, object, 2.5, math.nan, (), (1, "a")]
broken = st.sampled_from(odd)
"""What Flower's classes do not accept, and what a client may send all the same."""


@st.composite
def spoiled(draw: st.DrawFn) -> Spoiled:
    kind = draw(
        st.sampled_from(
            ["array", "arrays", "attribute", "metric", "broken metric", "receipt", "record", "no content", "no records"]
        )
    )
    name, array, other = draw(odd_names), draw(arrays), draw(broken)
    attribute = draw(st.sampled_from(["dtype", "shape", "stype", "data"]))
    number, key = draw(metrics), draw(st.one_of(st.just("num-examples"), st.just("loss"), odd_names))
    record = draw(st.sampled_from(["arrays", "metrics", "fedstrata", "fedstrata-scores", "x"]))
    receipt_key = draw(st.sampled_from(["round", "objective", "pulls", "stiffness", "x"]))
    take_number = draw(st.booleans())
    made = draw(st.sampled_from([ArrayRecord, MetricRecord, ConfigRecord]))

    def spoil(reply: Message) -> None:
        records = list(reply.content.array_records.values())
        if kind == "array" and records:
            records[0][name] = array
        elif kind == "arrays":
            for one in records:
                for each in list(one):
                    one[each] = array
        elif kind == "attribute":
            for one in records:
                for broken_array in one.values():
                    setattr(broken_array, attribute, other)
        elif kind in ("metric", "broken metric"):
            for told in reply.content.metric_records.values():
                told.__dict__["_data"][key] = number if kind == "metric" else other
        elif kind == "receipt":
            for receipt in reply.content.config_records.values():
                receipt.__dict__["_data"][receipt_key] = number if take_number else other
        elif kind == "record":
            reply.content[record] = made()
        elif kind == "no content":
            reply.__dict__["_content"] = None
        elif kind == "no records":
            reply.__dict__["_content"] = RecordDict()

    return Spoiled(draw(st.sampled_from(["train", "second", "evaluate"])), spoil)


def counting_network() -> ArrayRecord:
    return ArrayRecord({**ArrayRecord(network().state_dict()), "count": Array(np.array(np.int64(1)))})


def counting_app() -> ClientApp:
    """With an array of integers, which passes through."""
    made = ClientApp(mods=[selection_mod])

    @made.train()
    def train(message: Message, context: Context) -> Message:
        record = message.content["arrays"]
        new = {
            name: Array(np.asarray(array.numpy() + np.asarray(context.node_id % 5, array.numpy().dtype)))
            for name, array in record.items()
        }
        metrics = MetricRecord({"num-examples": 5 - context.node_id % 3, "loss": 1.0})
        return Message(RecordDict({"arrays": ArrayRecord(new), "metrics": metrics}), reply_to=message)

    @made.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 4, "loss": 1.0})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return made


CLIENT, PULLING = counting_app(), app()


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize("name", ["fedlayerwise", "fedldf", "fedprox"])
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(wrong=spoiled())
def test_whatever_a_client_sends_costs_one_reply(name: str, simulated: bool, wrong: Spoiled) -> None:
    """Of three clients one sends anything at all; two rounds go by, and the other two were used in both."""
    bad = NODES[0]

    def change(reply: Message, node: int) -> Message:
        second = reply.has_content() and not reply.content.metric_records
        phase = "evaluate" if reply.metadata.message_type == "evaluate" else "second" if second else "train"
        if node == bad and phase == wrong.phase and reply.has_content():
            wrong.spoil(reply)
        return reply

    strategy = Strategy(algorithms.named(name, **({"n": 3} if name == "fedldf" else {})))
    client, model = (
        (PULLING, ArrayRecord(network().state_dict())) if name == "fedprox" else (CLIENT, counting_network())
    )
    grid = FakeGrid(dict.fromkeys(NODES, client), change=change, simulated=simulated)
    result = strategy.start(grid, model, num_rounds=2, timeout=0.2)
    assert len(strategy.records) == 2
    for record in strategy.records:
        for node, word in by_client(record).items():
            assert word == "ok" or node == bad, word
            assert word.isprintable()
    for array in result.arrays.values():
        assert np.isfinite(array.numpy()).all()
    assert result.evaluate_metrics_clientapp


def test_what_flower_cannot_put_together_costs_one_reply() -> None:
    """Of those that are fetched at the same time it would take all with it, and end the run."""

    def change(reply: Message, node: int) -> Message:
        if node == NODES[0] and reply.has_content():
            for record in reply.content.array_records.values():
                next(iter(record.values())).dtype = 5  # type: ignore[assignment]
        return reply

    for algorithm, rounds in ((algorithms.fedavg(), 2), (algorithms.fedldf(n=2), 2)):
        strategy = Strategy(algorithm)
        start(strategy, FakeGrid(dict.fromkeys(NODES, app(selection_mod)), change=change), rounds=rounds)
        for record in strategy.records:
            status = by_client(record)
            assert status.pop(NODES[0]).startswith("refused: Flower cannot read it: TypeError: ")
            assert set(status.values()) <= {"ok", "nothing chosen"}


def test_integers_that_call_themselves_something_else() -> None:
    """They pass through as what they are: another dtype in the next round's model would end the run."""

    def change(reply: Message, node: int) -> Message:
        if reply.metadata.message_type == "train":
            forged = Array("float32", (9, 9), "numpy.ndarray", npy(np.array(np.int64(7))))
            reply.content.array_records["arrays"]["count"] = forged
        return reply

    strategy = Strategy(algorithms.fedavg())
    grid = FakeGrid(dict.fromkeys(NODES, CLIENT), change=change)
    result = strategy.start(grid, counting_network(), num_rounds=2, timeout=0.2)
    assert (result.arrays["count"].dtype, result.arrays["count"].shape) == ("int64", ())
    assert result.arrays["count"].numpy() == 7


# --- time ------------------------------------------------------------------------------------------------------------


class Wrapper(FlowerStrategy):
    """Does nothing of its own, and is what Flower's `start` knows."""

    def __init__(self, inner: FlowerStrategy) -> None:
        self.inner = inner

    def configure_train(self, *arguments: Any) -> Iterable[Message]:
        return self.inner.configure_train(*arguments)

    def aggregate_train(self, *arguments: Any) -> Any:
        return self.inner.aggregate_train(*arguments)

    def configure_evaluate(self, *arguments: Any) -> Iterable[Message]:
        return self.inner.configure_evaluate(*arguments)

    def aggregate_evaluate(self, *arguments: Any) -> Any:
        return self.inner.aggregate_evaluate(*arguments)

    def summary(self) -> None:
        self.inner.summary()


class Own(Strategy):
    """With a `start` of its own."""

    def start(self, *arguments: Any, **options: Any) -> Any:
        return super().start(*arguments, **options)


@pytest.mark.parametrize(
    "made", [Strategy, Own, lambda inner: Wrapper(Strategy(inner)), lambda inner: Wrapper(Wrapper(Own(inner)))]
)
@pytest.mark.parametrize("by_position", [False, True])
def test_the_timeout_holds_in_the_second_exchange(made: Any, by_position: bool) -> None:
    """One client never answers there; Flower's default is an hour."""

    def change(reply: Message, node: int) -> Message | None:
        silent = node == NODES[0] and reply.has_content() and not reply.content.metric_records
        return None if silent else reply

    strategy = made(algorithms.fedldf(n=3))
    grid = FakeGrid(dict.fromkeys(NODES, app(selection_mod)), change=change)
    began = time.monotonic()
    model = ArrayRecord(network().state_dict())
    if by_position:
        strategy.start(grid, model, 1, 0.3)
    else:
        strategy.start(grid, model, num_rounds=1, timeout=0.3)
    assert 0.3 <= time.monotonic() - began < 5


# --- Flower's mods ---------------------------------------------------------------------------------------------------

STOCK_MODS = {
    "fixedclipping_mod": fixedclipping_mod,
    "adaptiveclipping_mod": adaptiveclipping_mod,
    "LocalDpMod": LOCAL_DP,
    "message_size_mod": message_size_mod,
    "arrays_size_mod": arrays_size_mod,
}
CHANGES_ARRAYS = {"fixedclipping_mod", "adaptiveclipping_mod", "LocalDpMod"}


@pytest.mark.parametrize("mod", STOCK_MODS)
@pytest.mark.parametrize("name", ["fedprox", "adaptive_mu", "fedldf", "random_layers"])
def test_flowers_mods_work_on_either_side(name: str, mod: str) -> None:
    """After selection_mod all of them do; before it those that change arrays only where all arrays are sent."""
    selects = name in ("fedldf", "random_layers")
    orders = [[selection_mod, STOCK_MODS[mod]]]
    if not (selects and mod in CHANGES_ARRAYS):
        orders.append([STOCK_MODS[mod], selection_mod])
    for mods in orders:
        strategy = Strategy(named(name), layers="tensor", seed=3)
        grid = FakeGrid(dict.fromkeys(NODES, app(*mods)))
        result = start(strategy, grid, rounds=2, train_config=ConfigRecord({"clipping_norm": 0.5}))
        told = {word for record in strategy.records for word in words(record)}
        assert "ok" in told
        assert told <= {"ok", "nothing chosen", "not selected"}
        assert result.train_metrics_clientapp.keys() == {1, 2}
        assert all(len(message.content.config_records) == 1 for message in grid.sent)


def test_the_second_exchange_has_the_rounds_configuration() -> None:
    """Mods read it, under the key that the strategy has for it."""
    seen: list[Any] = []

    def reads(message: Message, context: Context, call_next: Any) -> Message:
        config = message.content["settings"]
        seen.append((config["server-round"], config["lr"], len(message.content.array_records)))
        return call_next(message, context)

    strategy = Strategy(algorithms.fedldf(n=3), configrecord_key="settings", fraction_evaluate=0.0)
    start(strategy, app(reads, selection_mod), rounds=2, train_config=ConfigRecord({"lr": 0.5}))
    assert seen == [*[(1, 0.5, 1)] * 3, *[(1, 0.5, 0)] * 3, *[(2, 0.5, 1)] * 3, *[(2, 0.5, 0)] * 3]


def test_no_value_of_ours_is_empty() -> None:
    """Flower cannot count the bytes of an empty list or string (`message_size_mod`)."""
    for name in ("fedprox", "adaptive_mu", "fedldf", "random_layers"):
        grid = FakeGrid(dict.fromkeys(NODES, app(selection_mod)))
        start(Strategy(named(name), layers="tensor", seed=3, fraction_evaluate=0.0), grid)
        assert any("fedstrata" in message.content["config"] and asked(message) for message in grid.sent)
        for message in (*grid.sent, *grid.received):
            assert sum(record.count_bytes() for record in message.content.values()) > 0


# --- Flower's differential privacy -----------------------------------------------------------------------------------

WRAPPERS: dict[str, Callable[[FlowerStrategy], FlowerStrategy]] = {
    "server, fixed": lambda inner: DifferentialPrivacyServerSideFixedClipping(inner, 0.1, 1.0, 3),
    "client, fixed": lambda inner: DifferentialPrivacyClientSideFixedClipping(inner, 0.1, 1.0, 3),
    "server, adaptive": lambda inner: DifferentialPrivacyServerSideAdaptiveClipping(inner, 0.1, 3),
    "client, adaptive": lambda inner: DifferentialPrivacyClientSideAdaptiveClipping(inner, 0.1, 3),
}
MODS = {"client, fixed": [fixedclipping_mod], "client, adaptive": [adaptiveclipping_mod]}


class Larger(SampleSize):
    """Somebody's own."""


class Doubled:
    """A server step of somebody's own."""

    def init(self, layers: Any) -> dict[str, Any]:
        return {}

    def step(self, old: Any, aggregate: Any, state: Any, layers: Any) -> Any:
        return 2 * aggregate - old, state


UNSAFE = {
    "FedLDF": algorithms.fedldf(n=2),
    "RandomLayers": algorithms.random_layers(n=2),
    "RandomClients": algorithms.hdfl(n=2),
    "FedAdp": algorithms.fedadp(),
    "FedLayerWise": algorithms.fedlayerwise(),
    "Krum": algorithms.krum(),
    "FedAdam": algorithms.fedadam(),
    "Median": algorithms.median(),
    "NormBounding": algorithms.norm_bounding(bound=1.0),
    "Larger": Algorithm(Plain(), Everything(), Larger()),
    "Doubled": replace(algorithms.fedavg(), server=Doubled()),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("rule", UNSAFE)
def test_noise_that_is_not_enough_is_refused(wrapper: str, rule: str) -> None:
    """Before a message is sent, also where there is a wrapper in between."""
    for around in (lambda inner: inner, Wrapper):
        grid = FakeGrid(dict.fromkeys(NODES, app(selection_mod)))
        outer = around(WRAPPERS[wrapper](around(Strategy(UNSAFE[rule], layers="tensor"))))
        text = rf"^strategy = 'Diff.*a sensitivity of clipping_norm / num_sampled_clients, but .*{rule} .*LocalDpMod$"
        with pytest.raises(RecipeError, match=text):
            start(outer, grid)
        assert not grid.sent


def test_integers_get_no_noise() -> None:
    grid = FakeGrid(dict.fromkeys(NODES, CLIENT))
    outer = WRAPPERS["client, fixed"](Strategy(algorithms.fedavg()))
    with pytest.raises(RecipeError, match=r"integers and booleans \(count\) are one client's own, and get no noise"):
        outer.start(grid, counting_network(), num_rounds=1)
    assert not grid.sent


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    "algorithm", [algorithms.fedavg(), algorithms.fedprox(), replace(algorithms.fedavg(), weighting=Uniform())]
)
def test_noise_that_is_enough_passes(wrapper: str, algorithm: Algorithm) -> None:
    inner = Strategy(algorithm)
    result = start(WRAPPERS[wrapper](inner), app(*MODS.get(wrapper, [])), rounds=2)
    assert [words(record) for record in inner.records] == [("ok",) * 3] * 2
    assert np.isfinite(result.arrays["0.weight"].numpy()).all()


def test_a_refused_reply_is_missing_in_the_mean_that_the_noise_is_for() -> None:
    """The wrapper has counted three replies; the mean of two would have a larger sensitivity, so there is none."""

    def change(reply: Message, node: int) -> Message:
        if node == NODES[0] and "fedstrata" in reply.content:
            del reply.content["fedstrata"]
        return reply

    inner = Strategy(algorithms.fedprox())
    grid = FakeGrid(dict.fromkeys(NODES, app()), change=change)
    result = start(WRAPPERS["server, fixed"](inner), grid)
    assert inner.records[0].replies == 2
    assert not result.train_metrics_clientapp
    start(inner, FakeGrid(grid.apps, change=change))
    assert inner.records[0].layers  # without noise two are enough
