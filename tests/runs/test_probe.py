"""Who harms: a round concluded without a client, or without a layer."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn

import fedstrata
from fedstrata.clients.evaluation import evaluate, measure
from fedstrata.core.errors import RecipeError, RunDirectoryError
from fedstrata.core.fit import Engine
from fedstrata.core.messages import Answer, Order
from fedstrata.core.status import Status
from fedstrata.engines.local import LocalEngine
from fedstrata.recipes.experiment import Experiment, build_experiment
from fedstrata.runs.runner import create_run, run_rounds
from tests.support.make_runs import make_run
from tests.support.runs import ALGORITHMS


class TwoNumbers(nn.Module):
    """a x₀ + b x₁ from a = b = 0; each of the two numbers is a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.a.weight)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x[:, :1]) + self.b(x[:, 1:])


def by_hand(targets: Sequence[float], sizes: Sequence[int]) -> fedstrata.Task:
    """Clients whose samples are all (1, 1) with one target; the test is (1, 2) with target 0: its loss is (a + 2b)²."""
    one = torch.ones(1, 2)
    clients = [(one.expand(n, 2), torch.full((n, 1), float(c))) for c, n in zip(targets, sizes, strict=True)]
    return fedstrata.Task(
        model=TwoNumbers,
        clients=clients,
        evaluation={"test": (torch.tensor([[1.0, 2.0]]), torch.zeros(1, 1))},
        loss=nn.functional.mse_loss,
        metric=fedstrata.Metric("error", nn.functional.l1_loss, direction="min"),
    )


ONE_STEP = {"training": {"rounds": 1, "steps": 1, "batch_size": 8, "lr": 0.1}, "engine": {"workers": 1}}


def test_leave_one_out_by_hand(tmp_path: Path) -> None:
    """A step from 0 on (w − c)² in each of a and b moves both by 0.2 c: for c = 1, 2, 6 by 0.2, 0.4, 1.2.

    With sizes 1, 2, 1 the mean is (0.2 + 0.8 + 1.2) / 4 = 0.55; without the first (0.8 + 1.2) / 3 = 2/3, without the
    second 1.4 / 2 = 0.7, without the third 1 / 3. The prediction for the test is a + 2b, its loss the square of it.
    """
    task = by_hand([1, 2, 6], [1, 2, 1])
    fedstrata.run(ONE_STEP, task=task, out=tmp_path / "run")
    found = fedstrata.probe(tmp_path / "run", task=task)
    without = np.array([2 / 3, 0.7, 1 / 3])
    assert (found.round, found.on, found.metric, found.matches, found.checked) == (
        1,
        "test",
        "error",
        True,
        "the checkpoint",
    )
    assert found.clients.tolist() == [0, 1, 2]
    assert found.score.whole == pytest.approx(3 * 0.55)
    assert found.loss.whole == pytest.approx((3 * 0.55) ** 2)
    assert found.loss.before == 0
    assert found.score.client == pytest.approx(3 * without)
    assert found.loss.client == pytest.approx((3 * without) ** 2)
    assert found.score.layer == pytest.approx([2 * 0.55, 0.55])  # a stays 0, b stays 0
    assert found.score.both == pytest.approx(np.stack([without + 2 * 0.55, 0.55 + 2 * without], axis=1))
    assert found.ranking() == [2, 0, 1]
    assert found.harm == pytest.approx((3 * 0.55) ** 2 - (3 * without) ** 2)
    said = found.sentences()
    assert "Without client 2 the loss on test after round 1 would be 1.0000 instead of 2.7225" in said[0]
    assert "its layer b harms most" in said[0]
    assert said[1] == "Had layer b stayed as it was, the loss on test would be 0.3025 instead of 2.7225."


def test_the_only_client_leaves_the_old_model(tmp_path: Path) -> None:
    task = by_hand([3], [4])
    fedstrata.run(ONE_STEP, task=task, out=tmp_path / "run")
    found = fedstrata.probe(tmp_path / "run", task=task)
    assert found.loss.client.tolist() == [found.loss.before] == [0]
    assert found.loss.both == pytest.approx(found.loss.layer[None])
    assert found.sentences()[0].startswith("Without client 0 the loss on test")


class Silent:
    """An engine of which one client answers nothing in one round."""

    def __init__(self, engine: Engine, client: int, round: int) -> None:
        self.engine, self.client, self.round = engine, client, round
        self.versions = getattr(engine, "versions", None)

    @property
    def sizes(self) -> np.ndarray:
        return self.engine.sizes

    def exchange(self, orders: Sequence[Order]) -> Iterator[tuple[Order, Answer]]:
        for order, answer in self.engine.exchange(orders):
            gone = order.kind == "train" and (order.client, order.round) == (self.client, self.round)
            yield order, Status("no reply", "silenced") if gone else answer


RULES = {
    **ALGORITHMS,
    "fedlayerwise": {"name": "fedlayerwise"},
    "fedadp": {"name": "fedadp"},
    "random_layers": {"name": "random_layers", "n": 2},
    "scaffold": {"name": "scaffold"},
}


@pytest.mark.parametrize("name", RULES)
def test_without_a_client_it_is_the_round_that_this_client_missed(name: str, tiny: Any, tmp_path: Path) -> None:
    """Another run loses the client's reply in round 3, and is evaluated: every number is the same to the bit."""
    table = {**tiny({"training.rounds": 3, "layers.grouping": "tensor"}), "algorithm": RULES[name]}
    run, experiment = create_run(fedstrata.load(table), tmp_path / "run")
    first = run_rounds(run, experiment)
    next(first), next(first)
    first.close()
    shutil.copytree(run.path, tmp_path / "copy")
    list(run_rounds(run, experiment))
    found = fedstrata.probe(run.path)
    assert found.matches
    told = run.history()[-1]["metrics"]["test"]
    assert (found.loss.whole, found.score.whole) == (told["loss"], told["accuracy"])
    for at, client in enumerate(found.clients.tolist()):
        other = tmp_path / str(client)
        shutil.copytree(tmp_path / "copy", other)
        with LocalEngine(experiment.setup, 1) as engine:
            (line,) = run_rounds(fedstrata.Run(other), experiment, Silent(engine, client, 3))
        told = line["metrics"]["test"]
        assert (found.loss.client[at], found.score.client[at]) == (told["loss"], told["accuracy"]), client


def one_layer_from(experiment: Experiment, path: Path, layer: int, old: Tensor, new: Tensor) -> float:
    """The loss of the new model with one layer of the old."""
    mixed, where = new.clone(), experiment.layers.layers[layer]
    mixed[where.start : where.stop] = old[where.start : where.stop]
    with LocalEngine(experiment.setup, 1) as engine:
        return evaluate(engine, experiment.task, mixed, ["test"], 3, 0)[0]["test"]["loss"]


@pytest.mark.parametrize("name", ["fedavg", "fedldf", "neuron_pruning"])
def test_a_layer_that_nobody_sent_is_the_old_one(name: str, tiny: Any, tmp_path: Path) -> None:
    """Where weights do not depend on other layers, all other layers are those of the round."""
    run = fedstrata.run({**tiny(), "algorithm": ALGORITHMS[name]}, out=tmp_path / "run")
    experiment = build_experiment(run.recipe)
    old, new = (torch.from_numpy(run.directory.checkpoint(round).arrays["model"]) for round in (2, 3))
    found = fedstrata.probe(run.path)
    expected = [one_layer_from(experiment, run.path, layer, old, new) for layer in range(len(found.layers))]
    assert found.loss.layer.tolist() == expected


def test_with_one_layer_leaving_it_out_of_a_client_is_leaving_out_the_client(tiny: Any, tmp_path: Path) -> None:
    table = tiny({"layers.grouping": {"all": ["*"]}})
    fedstrata.run(table, out=tmp_path / "run")
    found = fedstrata.probe(tmp_path / "run")
    assert found.loss.both[:, 0].tolist() == found.loss.client.tolist()
    assert found.loss.layer.tolist() == [found.loss.before]


def test_whose_reply_was_lost_changes_nothing(tiny: Any, tmp_path: Path) -> None:
    """Also where an earlier attempt failed, of which nothing counts."""
    settings = {"training.dropouts": 0.5, "training.min_replies": 0.75, "training.attempts": 20}
    table = tiny({**settings, "training.rounds": 8, "record.keep_checkpoints": 100})
    run = fedstrata.run(table, out=tmp_path / "run")
    lines = [line for line in run.history() if line["lost"] and line["attempt"]]
    assert lines, "no round of a later attempt with a loss"
    for line in lines[:2]:
        found = fedstrata.probe(run.path, line["round"])
        assert found.matches
        lost = {entry["client"] for entry in line["lost"]}
        for at, client in enumerate(found.clients.tolist()):
            changes = {*found.loss.both[at].tolist(), found.loss.client[at]} != {found.loss.whole}
            assert changes == (client not in lost)


# --- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "fedldf"])
def test_workers_change_no_bit_of_it(name: str, tiny: Any, tmp_path: Path) -> None:
    """With room for fewer models than there are."""
    run = fedstrata.run({**tiny(), "algorithm": ALGORITHMS[name]}, out=tmp_path / "run")
    file = run.path / "probe" / "000003.safetensors"
    contents, told = [], []
    for workers in (1, 2, 1):
        fedstrata.probe(run.path, workers=workers, on_progress=lambda done, total: told.append((done, total)))
        contents.append({name: array.tobytes() for name, array in load_file(file).items()})
    assert contents[0] == contents[1] == contents[2]
    layers, clients = len(run.layer_names), 4
    total = 2 + layers + clients + clients * layers
    assert told[0] == (2, total)
    assert told[-1] == (total, total)


@pytest.mark.parametrize("workers", [1, 2])
def test_several_models_are_measured_as_one_after_the_other(workers: int, tiny: Any) -> None:
    experiment = build_experiment(fedstrata.load(tiny()))
    models = [experiment.initial * factor for factor in (1.0, 2.0, -1.0, 0.5, 3.0, 0.0, 1.5)]
    with LocalEngine(experiment.setup, workers, cohort=2) as engine:
        found = measure(engine, experiment.task, models, "test", 1)
        alone = [evaluate(engine, experiment.task, model, ["test"], 1, 0)[0]["test"] for model in models]
    assert found == alone
    assert len({values["loss"] for values in found}) == len(models)


def test_kept_checkpoints_change_no_result(tiny: Any, tmp_path: Path, same_run: Any) -> None:
    few = fedstrata.run(tiny({"training.rounds": 6}), out=tmp_path / "few")
    all_of_them = fedstrata.run(tiny({"training.rounds": 6, "record.keep_checkpoints": 7}), out=tmp_path / "all")
    same_run(few.path, all_of_them.path, checkpoints=False, recipe=False)
    assert few.directory.rounds("checkpoints") == [5, 6]
    assert all_of_them.directory.rounds("checkpoints") == list(range(7))
    assert [fedstrata.probe(all_of_them.path, round).matches for round in (1, 4)] == [True, True]
    assert fedstrata.Run(all_of_them.path).probes() == [1, 4]


def test_more_checkpoints_are_kept_from_where_a_run_goes_on(tiny: Any, tmp_path: Path) -> None:
    run = fedstrata.run(tiny(), out=tmp_path / "run")
    fedstrata.resume(run.path, settings={"training.rounds": 6, "record.keep_checkpoints": 4})
    assert run.directory.rounds("checkpoints") == [3, 4, 5, 6]


def test_what_is_compared_where_the_checkpoint_after_it_is_gone(tiny: Any, tmp_path: Path) -> None:
    for layers, checked in ((True, "the record of its layers"), (False, "its training loss")):
        run = fedstrata.run(tiny({"record.layers": layers}), out=tmp_path / str(layers))
        (run.path / "checkpoints" / "000003.safetensors").unlink()
        found = fedstrata.probe(run.path, 3)
        assert (found.checked, found.matches) == (checked, True)


@pytest.mark.parametrize("checked", ["checkpoint", "record", "loss"])
def test_another_round_than_the_one_that_was_run_is_said_to_be(
    checked: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, cli: Any
) -> None:
    """The data has changed meanwhile."""
    recipe = {**ONE_STEP, "record": {"layers": checked == "record"}}
    fedstrata.run(recipe, task=by_hand([1, 2], [3, 3]), out=tmp_path / "run")
    if checked != "checkpoint":
        (tmp_path / "run" / "checkpoints" / "000001.safetensors").unlink()
    with caplog.at_level(logging.WARNING, "fedstrata"):
        found = fedstrata.probe(tmp_path / "run", task=by_hand([1, 3], [3, 3]))
    assert not found.matches
    assert "round 1 computed again differs from" in caplog.text
    assert "computed again differs from" in fedstrata.Run(tmp_path / "run").probe(1).sentences()[0]


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_round_whose_checkpoint_is_gone(tiny: Any, recipe: Any, tmp_path: Path, cli: Any) -> None:
    run = fedstrata.run(tiny({"training.rounds": 5}), out=tmp_path / "run")
    answer = cli("probe", run.path, "--round", 3)
    assert answer.code == 2
    assert "the checkpoint before round 3, that of round 2, is gone; rounds that can be probed: 5;" in answer.err
    assert "record.keep_checkpoints" in answer.err
    assert "round = 9, and 5 are done" in cli("probe", run.path, "--round", 9).err
    assert "round = 0, and 5 are done" in cli("probe", run.path, "--round", 0).err


def test_a_run_without_a_round(tiny: Any, tmp_path: Path) -> None:
    run, _ = create_run(fedstrata.load(tiny()), tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="no round can be probed"):
        fedstrata.probe(run.path)


def test_sets_that_the_server_does_not_have(tiny: Any, tmp_path: Path) -> None:
    run = fedstrata.run(tiny({"evaluation.on": ["clients"]}), out=tmp_path / "run")
    with pytest.raises(RecipeError, match=r"on = 'clients': is none of the server's evaluation sets: test, train"):
        fedstrata.probe(run.path, on="clients")
    assert fedstrata.probe(run.path).on == "test"
    assert fedstrata.probe(run.path, on="train").on == "train"


def test_a_model_whose_layers_stay_with_clients_is_refused(tiny: Any, tmp_path: Path) -> None:
    run = fedstrata.run({**tiny(), "algorithm": {"name": "fedper"}}, out=tmp_path / "run")
    with pytest.raises(RecipeError, match=r"algorithm\.private = .*the server has no whole model to evaluate"):
        fedstrata.probe(run.path)


def test_a_deployment_is_refused(tiny: Any, tmp_path: Path) -> None:
    shape = {"clients": 4, "shape": [1, 28, 28], "classes": 10}
    task = {"dataset": "nodes", "inputs": "unit", "nodes": shape, "model": {"name": "mlp", "hidden": 4}}
    run = make_run(tmp_path / "run", settings={"task": task, "evaluation.on": ["clients"]})
    with pytest.raises(RecipeError, match=r"task\.dataset = 'nodes': the clients' data is on their own nodes"):
        fedstrata.probe(run.path)


def test_code_is_named_before_it_is_imported(
    tmp_path: Path, user_module: Any, caplog: pytest.LogCaptureFixture
) -> None:
    source = "import torch, fedstrata\ndef task():\n    x = torch.ones(4, 2), torch.ones(4, 1)\n"
    source += "    return fedstrata.Task(lambda: torch.nn.Linear(2, 1), [x] * 2, {'test': x}, "
    source += "loss=torch.nn.functional.mse_loss, metric=fedstrata.Metric('e', torch.nn.functional.l1_loss, 'min'))\n"
    user_module("theirs", source)
    run = fedstrata.run({**ONE_STEP, "task": {"function": "theirs:task"}}, out=tmp_path / "run")
    with caplog.at_level(logging.WARNING, "fedstrata"):
        fedstrata.probe(run.path)
    assert "names code that is imported now: task.function = theirs:task" in caplog.text


# --- its file --------------------------------------------------------------------------------------------------------


@pytest.fixture
def probed(tiny: Any, tmp_path: Path) -> Path:
    """A run, and the probe of its last round."""
    run = fedstrata.run(tiny(), out=tmp_path / "run")
    fedstrata.probe(run.path)
    return run.path


def test_what_is_read_is_what_was_found(probed: Path) -> None:
    found, read = fedstrata.probe(probed), fedstrata.Run(probed).probe(3)
    for name in ("loss", "score"):
        ours, theirs = getattr(found, name), getattr(read, name)
        assert (ours.whole, ours.before) == (theirs.whole, theirs.before)
        for part in ("client", "layer", "both"):
            assert np.array_equal(getattr(ours, part), getattr(theirs, part))
    assert read.clients.tolist() == found.clients.tolist()
    assert replace(read, loss=found.loss, score=found.score, clients=found.clients) == found


def test_a_damaged_file_is_one_line(probed: Path, cli: Any) -> None:
    file = probed / "probe" / "000003.safetensors"
    content = file.read_bytes()
    for damage in (content[:-1], content[:-3] + b"abc", b"", b"{}", content.replace(b"yes", b"not")):
        file.write_bytes(damage)
        with pytest.raises(RunDirectoryError, match=r"000003\.safetensors is damaged: .+"):
            fedstrata.Run(probed).probe(3)
        shown = cli("show", probed)
        assert shown.code == 0
        assert shown.out.count("who harmed is not known: ") == 1
    file.write_bytes(content)
    file.rename(file.with_name("000002.safetensors"))
    with pytest.raises(RunDirectoryError, match="is of round 3; delete it"):
        fedstrata.Run(probed).probe(2)
    with pytest.raises(RunDirectoryError, match="has no probe of round 3; make it with: fedstrata probe"):
        fedstrata.Run(probed).probe(3)


def test_a_probe_of_another_run_is_refused(probed: Path, tiny: Any, tmp_path: Path) -> None:
    other = fedstrata.run(tiny(), out=tmp_path / "other")
    shutil.copytree(probed / "probe", other.path / "probe")
    with pytest.raises(RunDirectoryError, match="is of another run"):
        other.probe(3)


def test_show_tells_who_harmed(probed: Path, cli: Any) -> None:
    said, shown = cli("probe", probed), cli("show", probed)
    assert said.code == 0
    assert "round 3, probed" in said.out
    assert said.out in shown.out


def test_a_probed_run_goes_on_as_one_that_was_not(tiny: Any, tmp_path: Path, same_run: Any) -> None:
    plain, looked_at = (fedstrata.run(tiny(), out=tmp_path / name) for name in ("plain", "probed"))
    fedstrata.probe(looked_at.path)
    for run in (plain, looked_at):
        fedstrata.resume(run.path, settings={"training.rounds": 5})
    shutil.rmtree(looked_at.path / "probe")
    same_run(plain.path, looked_at.path)
