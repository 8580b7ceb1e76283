"""Private layers: trained, never sent, measured in nothing; and each client is evaluated with its own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata
from fedstrata import Task
from fedstrata.core.errors import RecipeError
from fedstrata.core.layers import Layers, unmatched
from fedstrata.runs.compare import begin_comparison
from fedstrata.runs.reader import Run
from tests.support.runs import TINY, run_content


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5), nn.Linear(5, 3))


def tensors(layers: Any) -> list[str]:
    return [entry.name for layer in layers for entry in layer.entries]


BN = ["1.weight", "1.bias", "1.running_mean", "1.running_var"]


@pytest.mark.parametrize("grouping", ["module", "block", "tensor"])
@pytest.mark.parametrize(
    ("private", "expected"),
    [
        ((), []),
        (("last",), ["4.weight", "4.bias"]),
        (("first",), ["0.weight", "0.bias"]),
        (("norm",), BN),
        (("bias",), ["0.bias", "1.bias", "3.bias", "4.bias"]),
        (("1",), BN),
        (("1.running_*",), ["1.running_mean", "1.running_var"]),
        (("3.w*", "last"), ["3.weight", "4.weight", "4.bias"]),
        (("!last",), ["0.weight", "0.bias", *BN, "3.weight", "3.bias"]),
        (("*",), ["0.weight", "0.bias", *BN, "3.weight", "3.bias", "4.weight", "4.bias"]),
    ],
    ids=str,
)
def test_words_and_patterns_mean_the_same_tensors_in_every_grouping(
    grouping: Any, private: tuple[str, ...], expected: list[str]
) -> None:
    net = model()
    layers = Layers.of(net, grouping, private)
    assert sorted(tensors(layers.private)) == sorted(expected)
    everything = [name for name, value in net.state_dict().items() if value.is_floating_point()]
    assert sorted(tensors(layers.layers)) == sorted(set(everything) - set(expected))
    assert layers.whole.numel == sum(net.state_dict()[name].numel() for name in everything)
    assert all(entry.stop <= layers.numel for layer in layers.layers for entry in layer.entries)
    assert all(entry.start >= layers.numel for layer in layers.private for entry in layer.entries)
    other = model()
    layers.whole.load(other, layers.whole.flatten(net))
    for name in everything:
        assert torch.equal(other.state_dict()[name], net.state_dict()[name])


def test_what_matches_nothing_is_named() -> None:
    assert unmatched(model(), ["norm", "head.*", "last", "body"]) == ["head.*", "body"]
    assert unmatched(nn.Linear(2, 2), ["norm"]) == ["norm"]


# --- runs ------------------------------------------------------------------------------------------------------------


def table(algorithm: Any, **tables: Any) -> dict[str, Any]:
    merged = {name: {**TINY.get(name, {}), **content} for name, content in tables.items()}
    return {**TINY, "algorithm": algorithm if isinstance(algorithm, dict) else {"name": algorithm}, **merged}


ON_CLIENTS = {"on": ["clients"]}


def test_the_ledger_falls_by_exactly_the_private_bytes(tmp_path: Path) -> None:
    """The last of the two layers has 4·10 + 10 numbers, four clients, three rounds; both ways."""
    runs = {
        name: fedstrata.run(table(name, evaluation=ON_CLIENTS), out=tmp_path / name) for name in ("fedavg", "fedper")
    }
    for avg, per in zip(runs["fedavg"].history(), runs["fedper"].history(), strict=True):
        assert avg["upload"] - per["upload"] == 4 * 50 * 4
        assert avg["download"] - per["download"] == 4 * 50 * 4
        assert avg["bytes"]["evaluation"] - per["bytes"]["evaluation"] == 4 * 50 * 4
    assert runs["fedper"].layer_names == runs["fedavg"].layer_names[:1]
    assert runs["fedper"].about.private == [f"{runs['fedavg'].layer_names[1]}.{end}" for end in ("weight", "bias")]


def test_fedbn_without_a_norm_is_fedavg_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    avg = fedstrata.run(table("fedavg", evaluation=ON_CLIENTS), out=tmp_path / "avg")
    assert not caplog.messages
    bn = fedstrata.run(table("fedbn"), out=tmp_path / "bn")
    assert caplog.messages == ["fedbn: private = 'norm' matches no tensor of the model: nothing stays on clients by it"]
    assert bn.summary()["weights_sha256"] == avg.summary()["weights_sha256"]
    assert [line["metrics"] for line in bn.history()] == [line["metrics"] for line in avg.history()]


def test_a_pattern_of_the_users_own_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"algorithm\.private = 'head\.\*': matches no tensor of the model"):
        fedstrata.run(table({"name": "fedavg", "private": ["last", "head.*"]}), out=tmp_path / "run")


def test_the_server_has_no_private_layers(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"evaluation\.on = 'test': the server has no private layers"):
        fedstrata.run(table("fedper", evaluation={"on": ["clients", "test"]}), out=tmp_path / "run")
    allowed = {"on": ["clients", "test"], "private": "initial"}
    run = fedstrata.run(table("fedbabu", evaluation=allowed), out=tmp_path / "run")
    assert set(run.history()[-1]["metrics"]) == {"clients", "test"}


def test_the_mean_of_private_layers(tmp_path: Path) -> None:
    """On the server the model with the clients' mean head has the loss that was measured there."""
    test = blobs(20, 99)
    task = Task(two_layers, TASK.clients, {"test": test}, TASK.held_out)
    evaluation = {"on": ["test"], "private": "mean"}
    run = fedstrata.run(
        {**FEW, "algorithm": {"name": "fedper"}, "evaluation": evaluation}, task=task, out=tmp_path / "r"
    )
    models = [run.model(client=k, task=task) for k in range(4)]
    took_part = [k for k in range(4) if any(k in run.layers(t)["clients"] for t in (1, 2))]
    mean: Any = run.model(task=task)
    with torch.no_grad():
        for name in ("weight", "bias"):
            heads = [getattr(models[k][2], name) for k in took_part]
            getattr(mean[2], name).copy_(sum(heads) / len(heads))
    assert run.history()[-1]["metrics"]["test"]["loss"] == pytest.approx(loss_of(mean, test), rel=1e-5)


def loss_of(net: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> float:
    with torch.no_grad():
        return float(nn.functional.cross_entropy(net(data[0]), data[1]))


def blobs(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 2, count)
    return torch.from_numpy(draw.normal(size=(count, 3)) + labels[:, None]).float(), torch.from_numpy(labels)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


TASK = Task(two_layers, [blobs(6 + k, k) for k in range(4)], held_out=[blobs(5, 10 + k) for k in range(4)])
FEW: dict[str, Any] = {
    "training": {"rounds": 2, "clients_per_round": 2, "batch_size": 3, "lr": 0.3},
    "evaluation": ON_CLIENTS,
}


@pytest.mark.parametrize("algorithm", ["fedper", "ditto"])
def test_every_client_is_measured_with_its_own(algorithm: str, tmp_path: Path) -> None:
    """Run.model(client=k) has the loss that was stored of k; who never took part has the first private layers."""
    run = fedstrata.run({**FEW, "algorithm": {"name": algorithm}}, task=TASK, out=tmp_path / "run")
    for line in run.history():
        found, places = run.clients(line["round"]), line["metrics"]
        took_part = found["taken_part"]
        assert places["clients"]["clients"] == took_part.sum() >= 2
        if not took_part.all():
            assert places["newcomers"]["clients"] == (~took_part).sum()
        assert found["client"].tolist() == [0, 1, 2, 3]
    losses = [loss_of(run.model(client=k, task=TASK), TASK.held_out[k]) for k in range(4)]
    np.testing.assert_allclose(found["loss"], losses, rtol=1e-6)
    known = found["loss"][took_part]
    assert places["clients"]["loss"] == pytest.approx(known.mean())
    assert len({round(float(loss), 6) for loss in losses}) == 4
    shared = {tuple(run.model(client=k, task=TASK)[0].weight.flatten().tolist()) for k in range(4)}
    assert len(shared) == (1 if algorithm == "fedper" else len(known) + (len(known) < 4))


def test_fine_tuning_is_one_step_by_hand_and_leaves_no_trace(tmp_path: Path) -> None:
    """All of a client's samples in one batch: an epoch is one step of gradient descent."""
    training = {**FEW["training"], "clients_per_round": 4, "batch_size": 100}
    recipe = {**FEW, "training": training, "algorithm": {"name": "fedbabu"}}
    plain = fedstrata.run(recipe, task=TASK, out=tmp_path / "plain")
    tuned = fedstrata.run({**recipe, "evaluation": {"fine_tune": 1}}, task=TASK, out=tmp_path / "tuned")
    assert plain.summary()["weights_sha256"] == tuned.summary()["weights_sha256"]
    for client, (inputs, targets) in enumerate(TASK.clients):
        net = tuned.model(client=client, task=TASK).train()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
        nn.functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
        measured = loss_of(net, TASK.held_out[client])
        assert tuned.clients(2)["loss"][client] == pytest.approx(measured, rel=1e-5)
        assert plain.clients(2)["loss"][client] != pytest.approx(measured, rel=1e-3)


def test_a_task_without_held_out_data_is_split_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = Task(two_layers, [blobs(10, 0), blobs(1, 1), list(zip(*blobs(5, 2), strict=True))])
    recipe = {"algorithm": {"name": "fedper"}, "training": {"rounds": 1, "batch_size": 3}}
    run = fedstrata.run(recipe, task=task, out=tmp_path / "run")
    assert "of each client's samples, 0.2 are held out (evaluation.held_out)" in caplog.text
    assert run.clients(1)["client"].tolist() == [0, 2]
    assert run.clients(1)["samples"].tolist() == [2, 1]
    assert run.layers(1)["sizes"].tolist() == [8, 1, 4]


def test_all_arms_of_a_comparison_are_measured_on_clients(tmp_path: Path) -> None:
    made = begin_comparison(TINY, ["fedavg", "fedper"], [0], out=tmp_path / "one")
    assert [job.recipe.evaluation.on for job in made.jobs] == [["clients"], ["clients"]]
    plain = begin_comparison(TINY, ["fedavg", "fedprox"], [0], out=tmp_path / "two")
    assert [job.recipe.evaluation.on for job in plain.jobs] == [["test"], ["test"]]


def test_local_training_alone(tmp_path: Path) -> None:
    """All layers private: nothing travels, and clients still learn."""
    run = fedstrata.run(table({"name": "fedavg", "private": ["*"]}), out=tmp_path / "run")
    assert [line["upload"] for line in run.history()] == [0, 0, 0]
    assert run.layer_names == []
    losses = [line["metrics"]["clients"]["loss"] for line in run.history()]
    assert losses[0] != losses[-1]
    assert Run(run.path).summary()["upload"] == 0


@pytest.mark.parametrize("algorithm", ["scaffold"])
def test_adam_has_no_reach(algorithm: str, tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"training\.optimizer = 'adam': Scaffold must know how far local steps reach"
    ):
        fedstrata.run(table(algorithm, training={"optimizer": "adam"}), out=tmp_path / "run")


def test_fedrep_needs_an_epoch_for_the_body(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"training\.epochs = 1: FedRep\(head_epochs=1\) comes to no epoch"):
        fedstrata.run(table("fedrep", training={"epochs": 1}), out=tmp_path / "run")


def test_who_is_too_slow_for_the_body_sends_no_layer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Stragglers with one epoch of two trained the head: they did their part, and remember it."""
    caplog.set_level(logging.WARNING)
    training = {"epochs": 2, "stragglers": 1.0, "rounds": 4}
    run = fedstrata.run(table("fedrep", training=training), out=tmp_path / "run")
    seen = set()
    for line in run.history():
        found = run.layers(line["round"])
        assert ((found["mask"] > 0).any(1) == (found["work"] == 2)).all()
        assert line["replies"] == 4
        assert line["bytes"]["up"] == [int((found["work"] == 2).sum()) * size for size in whole_bytes(run)]
        seen |= set(found["work"].tolist())
    assert seen == {1, 2}


def whole_bytes(run: Run) -> list[int]:
    return [layer.bytes for layer in run.about.layers]


def test_a_run_that_is_extended_forgets_what_was_measured_only_at_its_end(tmp_path: Path) -> None:
    """As the history does: two rounds and then four are four, with every other one evaluated."""
    recipe = {**FEW, "algorithm": {"name": "fedper"}, "evaluation": {"every": 2}}
    long = {**recipe, "training": {**FEW["training"], "rounds": 5}}
    short = {**recipe, "training": {**FEW["training"], "rounds": 3}}
    fedstrata.run(long, task=TASK, out=tmp_path / "long")
    fedstrata.run(short, task=TASK, out=tmp_path / "short")
    assert (tmp_path / "short" / "clients" / "000003.safetensors").exists()
    fedstrata.resume(tmp_path / "short", task=TASK, settings={"training.rounds": 5})
    assert run_content(tmp_path / "short") == run_content(tmp_path / "long")
