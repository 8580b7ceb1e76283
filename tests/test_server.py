"""`fedstrata.Server`: any algorithm for somebody's own federation, by hand, against `fit`, and from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

import fedstrata
from fedstrata import algorithms
from fedstrata.clients.client import Client
from fedstrata.core.axes import Algorithm
from fedstrata.core.errors import BadValue, FedstrataError, RunDirectoryError
from fedstrata.core.messages import Order, Reply
from fedstrata.core.record import RoundFailed
from fedstrata.recipes.schema import Training
from fedstrata.server import _digest
from tests.support.math import Tiny, image_task, prepare, run

ONE = {"a": np.array([0.0, 0.0]), "b": np.array([1.0])}


def trained(*rows: tuple[float, float, float]) -> list[dict[str, np.ndarray]]:
    return [{"a": np.array(row[:2], float), "b": np.array(row[2:], float)} for row in rows]


def test_fedavg_by_hand() -> None:
    """Sizes 1 and 3: a = (¼·4 + ¾·0, ¼·0 + ¾·8), b = ¼·1 + ¾·5."""
    server = fedstrata.Server(ONE, algorithms.fedavg())
    new = server.aggregate(trained((4, 0, 1), (0, 8, 5)), sizes=[1, 3])
    assert {name: array.tolist() for name, array in new.items()} == {"a": [1, 6], "b": [4]}
    assert server.last_record.ledger.upload == 2 * 24
    assert [str(status) for status in server.last_record.status] == ["ok", "ok"]


def test_fedldf_has_the_updates_at_hand() -> None:
    """n = 1: `a` comes from the second client, which went further, `b` from the first."""
    server = fedstrata.Server(ONE, algorithms.fedldf(n=1), layers="tensor")
    new = server.aggregate(trained((3, 0, 9), (0, 4, 2)), sizes=[10, 10])
    assert {name: array.tolist() for name, array in new.items()} == {"a": [0, 4], "b": [9]}
    assert server.last_record.ledger.feedback == 2 * 2 * 4


NAMES = ["fedavg", "fedadp", "fedlayerwise", "fedldf", "hdfl", "random_layers", "neuron_pruning"]
NAMES += ["fedadam", "fedexp", "ida", "multi_krum", "median", "norm_bounding"]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_as_fit(name: str) -> None:
    """Three rounds of clients trained by ours: the server comes to `fit`'s models, bit for bit, memory included."""
    algorithm: Algorithm = algorithms.named(name)
    task, training = image_task([5, 9, 6, 8, 12]), Training(rounds=3, batch_size=4, lr=0.2)
    states, records = run(task, algorithm, training)
    setup, plan, state = prepare(task, algorithm, training)
    plain = Client(replace(setup, selection=algorithms.fedavg().selection))
    server = fedstrata.Server(setup.build(), algorithm)
    assert torch.equal(server.state.model, state.model)
    everything = torch.ones(len(plan.layers), dtype=torch.bool)
    for number, (after, record) in enumerate(zip(states[1:], records, strict=True), start=1):
        before, models = states[number - 1].model, []
        for client in range(5):
            reply = plain.answer(Order("train", number, 0, client, model=before, mask=everything))
            assert isinstance(reply, Reply)
            assert reply.update is not None
            models.append(plan.layers.views(before + reply.update))
        server.aggregate([tracked(setup.build(), model) for model in models], sizes=[5, 9, 6, 8, 12])
        torch.testing.assert_close(server.state.model, after.model, rtol=1e-12, atol=1e-15)
        assert server.last_record.ledger.up.tolist() == record.ledger.up.tolist()
        for key, values in record.layers.items():
            if key != "mu":
                np.testing.assert_allclose(server.last_record.layers[key], values, rtol=1e-6, atol=1e-9, err_msg=key)


def tracked(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return model.state_dict() | dict(tensors)


# --- arrays of every kind --------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A tied weight, a frozen one, a counter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("steps", torch.tensor(0))


def test_tied_frozen_and_counted() -> None:
    """What goes in by two names comes out alike; integers come from the largest client; buffers are not measured."""
    model = Odd()
    server = fedstrata.Server(model, algorithms.fedavg())
    start = model.first.weight.detach().clone()
    models = []
    for step in (1, 3):
        one = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        one["first.weight"] += step
        one["second.weight"] += step
        one["mean"] += 100 * step
        one["steps"] += step
        models.append(one)
    new = server.aggregate(models, sizes=[1, 1.5])
    mean = 1 * 0.4 + 3 * 0.6
    torch.testing.assert_close(new["first.weight"], start + mean)
    assert torch.equal(new["first.weight"], new["second.weight"])
    assert new["frozen"].tolist() == [1, 1]
    assert new["steps"].item() == 3
    assert new["steps"].dtype == torch.int64
    torch.testing.assert_close(new["mean"], torch.tensor([100 * mean] * 2))
    np.testing.assert_allclose(server.last_record.layers["divergence"].sum(1), [2 * 2, 6 * 2], rtol=1e-6)
    model.load_state_dict(new)


def test_bfloat16_comes_back_as_such() -> None:
    model = {"w": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)}
    server = fedstrata.Server(model, algorithms.fedavg())
    new = server.aggregate([{"w": model["w"] + 1}, {"w": model["w"] + 3}], sizes=[1, 1])
    assert new["w"].dtype == torch.bfloat16
    assert new["w"].tolist() == [3, 4]


def test_read_only_arrays_and_those_handed_out_stay_as_they_are() -> None:
    first = {name: array.copy() for name, array in ONE.items()}
    for array in first.values():
        array.flags.writeable = False
    server = fedstrata.Server(first, algorithms.fedavg())
    one = server.aggregate(trained((1, 1, 1)), sizes=[1])
    kept = {name: array.copy() for name, array in one.items()}
    server.aggregate(trained((5, 5, 5)), sizes=[1])
    assert all((one[name] == kept[name]).all() for name in one)
    assert first["a"].tolist() == [0, 0]


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("models", "sizes", "clients", "message"),
    [
        (trained((1, 1, 1)), [1, 2], None, "sizes must be"),
        ([], [], None, "sizes must be"),
        ([{"a": np.zeros(2)}], [1], None, r"trained\[0\]: 'b' is missing"),
        ([{**ONE, "c": np.zeros(1)}], [1], None, r"trained\[0\]: 'c' is not in"),
        ([{"a": np.zeros(3), "b": np.zeros(1)}], [1], None, r"trained\[0\]: a has shape \[3\], expected \[2\]"),
        ([{"a": np.zeros(2, int), "b": np.zeros(1)}], [1], None, r"trained\[0\]: a has dtype int64"),
        (trained((1, 1, 1), (1, 1, 1)), [1, 1], ["x", "x"], "names a client twice"),
        (trained((1, 1, 1)), [1], ["x", "y"], "clients must be"),
    ],
)
def test_mistakes_name_the_array(models: Any, sizes: Any, clients: Any, message: str) -> None:
    server = fedstrata.Server(ONE, algorithms.fedavg())
    with pytest.raises(FedstrataError, match=message):
        server.aggregate(models, sizes, clients)
    assert server.arrays()["b"].tolist() == [1]


def test_positions_that_no_longer_say_who_is_who() -> None:
    server = fedstrata.Server(ONE, algorithms.fedadp())
    server.aggregate(trained((1, 1, 1), (2, 2, 2)), sizes=[1, 1])
    with pytest.raises(BadValue, match=r"there were 2 before; say who is who with clients="):
        server.aggregate(trained((1, 1, 1)), sizes=[1])


def test_an_algorithm_whose_clients_have_a_part_says_so() -> None:
    server = fedstrata.Server(ONE, algorithms.fedprox())
    with pytest.raises(BadValue, match=r"FedProx.*pulls while clients train"):
        server.aggregate(trained((1, 1, 1)), sizes=[1])


def test_nan_is_set_aside_and_a_round_of_it_changes_nothing() -> None:
    server = fedstrata.Server(ONE, algorithms.fedavg())
    new = server.aggregate(trained((np.nan, 0, 1), (2, 2, 2)), sizes=[5, 1])
    assert new["a"].tolist() == [2, 2]
    assert [str(status) for status in server.last_record.status] == ["not finite: a", "ok"]
    with pytest.raises(RoundFailed):
        server.aggregate(trained((0, np.inf, 1), (2, 2, np.nan)), sizes=[5, 1])
    assert server.arrays()["a"].tolist() == [2, 2]
    assert server.state.round == 1


# --- who is who, and files -------------------------------------------------------------------------------------------


def test_names_keep_their_rows(tmp_path: Path) -> None:
    """FedAdp's smoothed angles by name: other clients in another order, and a server that was saved in between."""
    rounds = [
        (["ann", "bob"], trained((1, 0, 1), (0, 2, 3))),
        (["cy", "ann", "dee"], trained((1, 3, 1), (0, 2, 2), (9, 2, 1))),
        (["dee", "bob"], trained((1, 1, 1), (4, 2, 0))),
    ]
    whole, halves = (fedstrata.Server(ONE, algorithms.fedadp()) for _ in range(2))
    for clients, models in rounds:
        sizes = list(range(1, len(models) + 1))
        new = whole.aggregate(models, sizes, clients)
        same = halves.aggregate(models, sizes, clients)
        assert all((new[name] == same[name]).all() for name in new)
        halves.save(tmp_path / "server.safetensors")
        halves = fedstrata.Server.load(tmp_path / "server.safetensors", algorithms.fedadp())
        assert halves.rows == whole.rows
        assert halves.state.weighting.keys() == whole.state.weighting.keys()
    assert list(whole.rows) == ["ann", "bob", "cy", "dee"]
    assert whole.state.weighting["count"].tolist() == [2, 2, 1, 2]


def test_a_file_is_of_one_algorithm_and_model(tmp_path: Path) -> None:
    path = tmp_path / "server.safetensors"
    fedstrata.Server(ONE, algorithms.fedadp()).save(path)
    for other in (
        fedstrata.Server(ONE, algorithms.fedadp(alpha=4.0)),
        fedstrata.Server(ONE, algorithms.fedlayerwise()),
        fedstrata.Server(ONE, algorithms.fedadp(), seed=1),
        fedstrata.Server({"a": np.zeros(2), "c": np.zeros(1)}, algorithms.fedadp()),
    ):
        with pytest.raises(RunDirectoryError, match="another algorithm, model or seed"):
            other.restore(path)
        with pytest.raises(RunDirectoryError, match="another algorithm, model or seed"):
            fedstrata.Server.load(path, algorithms.fedadp(alpha=4.0))


def test_a_file_that_is_damaged_or_nobodys(tmp_path: Path) -> None:
    """One line that names the file, whatever is wrong, and a server that is as it was."""
    server, path = fedstrata.Server(Tiny(), algorithms.fedlayerwise()), tmp_path / "server.safetensors"
    server.aggregate([Tiny().state_dict(), Tiny().state_dict()], sizes=[2, 1])
    server.save(path)
    arrays, content = load_file(path), path.read_bytes()
    about = json.loads(json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]["server"])
    wrong: list[Any] = [{}, {"server": "no json"}, {"server": "[" * 100_000}, {"server": "[]"}]
    value: Any
    for key in about:
        for value in (None, -1, "x", [[1]], [["a", 5]], 10**400, {}):
            wrong.append({"server": json.dumps(about | {key: value})})
        wrong.append({"server": json.dumps({k: v for k, v in about.items() if k != key})})
    for metadata in wrong:
        save_file(arrays, path, metadata)
        refused(server, path)
    signed(path, arrays, about | {"round": 1})
    server.restore(path)
    for key in ("round", "rows", "what", "arrays", "tensors", "settings"):  # somebody who knows how the digest is made
        for value in (None, -1, "x", [[1]], [["a", 5]], [["a", "object", [1]]], 10**400, {}, {"layers": [3]}):
            signed(path, arrays, about | {key: value})
            with suppress(RunDirectoryError):  # or what is wrong does not matter
                fedstrata.Server.load(path, server.algorithm)
    for name in arrays:
        for other in (arrays[name][..., None], arrays[name].astype(np.int8), np.asarray(arrays[name] + 1)):
            save_file(arrays | {name: other}, path, {"server": json.dumps(about)})
            refused(server, path)
        save_file({k: v for k, v in arrays.items() if k != name}, path, {"server": json.dumps(about)})
        refused(server, path)
    for damaged in (b"", b"x", content[:100], content[:-1]):
        path.write_bytes(damaged)
        refused(server, path)
    refused(server, tmp_path / "missing")
    path.write_bytes(content)
    server.restore(path)
    assert fedstrata.Server.load(path, algorithms.fedlayerwise()).arrays().keys() == server.arrays().keys()


def signed(path: Path, arrays: Any, about: dict[str, Any]) -> None:
    about = {key: value for key, value in about.items() if key != "sha256"}
    save_file(arrays, path, {"server": json.dumps(about | {"sha256": _digest(arrays, about)})})


def refused(server: fedstrata.Server, path: Path) -> None:
    state = server.state
    with pytest.raises((RunDirectoryError, FileNotFoundError), match=path.name) as caught:
        server.restore(path)
    assert "\n" not in str(caught.value)
    with pytest.raises((RunDirectoryError, FileNotFoundError), match=path.name):
        fedstrata.Server.load(path, server.algorithm)
    assert server.state is state
