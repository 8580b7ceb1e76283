"""What stands out in a run: who is suspected, and who merely differs."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedstrata
from fedstrata.runs.findings import Finding, find
from fedstrata.runs.formats import About, LayerRecord, Line, read_about
from tests.support import ROOT
from tests.support.make_runs import make_run

ROUNDS, CLIENTS = 8, 6
SIZE = 4
"""Numbers of a layer."""


def about(clients: int = CLIENTS, table: Sequence[Sequence[int]] | None = None, layers: int = 2) -> About:
    """A run's, with classes that were counted or not."""
    entry = {"tensors": ["t"], "trainable": SIZE, "numbers": SIZE, "units": 1, "bytes": 4 * SIZE}
    data = {} if table is None else {"table": table, "class_names": [str(c) for c in range(len(table[0]))]}
    found = {
        "format": 2,
        "id": "0",
        "created": "",
        "metric": {"name": "accuracy", "direction": "max"},
        "clients": clients,
        "layers": [{"name": f"layer{at}", **entry} for at in range(layers)],
        "data": data,
    }
    return read_about(found, Path("run.json"))


def line(round: int, loss: float = 1.0, lost: Sequence[Mapping[str, Any]] = ()) -> Line:
    """What of a history is looked at."""
    return {"round": round, "train_loss": loss, "lost": list(lost), "earlier": []}  # type: ignore[typeddict-item]


def history(rounds: int = ROUNDS) -> list[Line]:
    """A run that learns."""
    return [line(round, 2.0 / round) for round in range(1, rounds + 1)]


class Made:
    """Rounds whose updates, weights and losses a test chooses; clients learn alike, each in a direction of its own."""

    def __init__(self, clients: int = CLIENTS, rounds: int = ROUNDS, layers: int = 2) -> None:
        draw = np.random.default_rng(3)
        self.weights = np.full((rounds, layers, SIZE), 2.0)
        noise = draw.normal(size=(rounds, clients, layers, SIZE))
        along = (noise * self.weights[:, None]).sum(-1, keepdims=True) / (self.weights[:, None] ** 2).sum(-1)[..., None]
        across = noise - along * self.weights[:, None]  # none points along the weights
        self.lengths = draw.uniform(0.5, 2, size=(rounds, clients, 1, 1))
        self.updates = self.lengths * across / np.linalg.norm(across, axis=-1, keepdims=True)
        self.losses = np.full((rounds, clients), 0.5) + 0.02 * draw.normal(size=(rounds, clients))
        self.losses[0] = 2.0
        self.sizes = np.full(clients, 200)

    def layers(self, round: int) -> LayerRecord:
        """As the server records it, with every client in every round."""
        updates, weights = self.updates[round - 1], self.weights[round - 1]
        mean = updates.mean(0)
        lengths = np.linalg.norm(updates, axis=-1)
        cosines = (updates * mean).sum(-1) / np.maximum(lengths * np.linalg.norm(mean, axis=-1), 1e-300)
        count = len(updates)
        return {
            "clients": np.arange(count),
            "sizes": self.sizes,
            "loss": self.losses[round - 1],
            "angle": np.arccos(np.clip(cosines, -1, 1)),
            "divergence": lengths,
            "norm": np.linalg.norm(weights + updates, axis=-1),
        }

    def suspects(self, about: About, lines: list[Line] | None = None) -> list[Finding]:
        """Who is."""
        found = find(about, history() if lines is None else lines, self.layers, 20)
        return [finding for finding in found if finding.kind == "client_suspect"]

    def unlearn(self, client: int, cosine: float) -> None:
        """Turn its updates so that they have this cosine with the weights."""
        lengths = np.linalg.norm(self.weights, axis=-1, keepdims=True)
        along = cosine * self.lengths[:, client] * self.weights / lengths
        self.updates[:, client] = math.sqrt(1 - cosine**2) * self.updates[:, client] + along


def test_clients_that_learn_alike_are_no_suspects() -> None:
    assert Made().suspects(about()) == []


def test_a_high_loss_is_no_harm_while_it_points_along_the_weights() -> None:
    """The client has five times the loss of the others, and learns something of its own: as one with all classes does
    among others with two."""
    made = Made()
    made.losses[:, 2] *= 5
    made.unlearn(2, +0.4)
    assert made.suspects(about()) == []


def test_who_unlearns_is_a_suspect_with_its_numbers() -> None:
    """cos(Δ, w) = −0.4 in every layer; four of six clients have cosine 0, so the median takes nothing away. The loss is
    2.5, five times the others' 0.5."""
    made = Made()
    made.losses[1:, 2] = 2.5
    made.unlearn(2, -0.4)
    (found,) = made.suspects(about())
    assert (found.client, found.reason, found.rounds) == (2, "unlearns", (5, 8))
    assert found.evidence["along_weights"] == pytest.approx(-0.4, abs=1e-9)
    assert found.evidence["loss"] == 2.5
    assert found.evidence["median"] == pytest.approx(0.5, abs=0.03)
    assert found.effect == pytest.approx(5, rel=0.05)
    assert "Client 2" in found.sentence
    assert "2.5000" in found.sentence


def test_with_classes_that_explain_the_loss_there_is_no_suspect() -> None:
    """Of eight classes client 2 has all, the others one and a half each: ln 8 is more than five times theirs."""
    made = Made()
    made.losses[1:, 2] = 2.5
    made.unlearn(2, -0.15)
    mixed, simple = [25] * 8, [190, 10, *[0] * 6]
    plain = [list(simple) for _ in range(CLIENTS)]
    assert [found.client for found in made.suspects(about(table=plain))] == [2]
    table = [mixed if client == 2 else simple for client in range(CLIENTS)]
    entropy = -(0.95 * math.log(0.95) + 0.05 * math.log(0.05))
    assert math.log(8) / entropy > 5
    assert made.suspects(about(table=table)) == []
    assert made.suspects(about()) == [], "a little back is not enough where nobody knows the classes"


def test_as_long_as_nobody_has_learned_losses_tell_nothing() -> None:
    made = Made()
    made.losses[1:, 2] = 2.5
    made.unlearn(2, -0.4)
    assert made.suspects(about(), [line(round, 2.0) for round in range(1, ROUNDS + 1)]) == []


def sends_nothing(made: Made) -> None:
    made.updates[:, 1] = 0


def sends_the_same_update(made: Made) -> None:
    made.updates[:, 1] = made.updates[0, 1]


def sends_the_same_model(made: Made) -> None:
    made.weights *= np.linspace(1, 2, ROUNDS)[:, None, None]
    made.updates[:, 1] = 1.5 - made.weights


@pytest.mark.parametrize("fault", [sends_nothing, sends_the_same_update, sends_the_same_model])
def test_a_stuck_client_is_a_suspect(fault: Any) -> None:
    made = Made()
    fault(made)
    (found,) = made.suspects(about(), [line(round, 2.0) for round in range(1, ROUNDS + 1)])
    assert (found.client, found.reason) == (1, "stuck")


def test_where_most_stand_still_training_has_come_to_rest() -> None:
    made = Made()
    made.updates[:, :3] = 0
    assert [found.client for found in made.suspects(about())] == [0, 1, 2]
    made.updates[:, 3] = 0
    assert made.suspects(about()) == []


def test_a_frozen_layer_makes_nobody_stuck() -> None:
    made = Made()
    made.updates[:, :, 1] = 0
    assert made.suspects(about()) == []


def test_a_client_of_which_one_round_is_known_is_not_stuck() -> None:
    """What FedLDF did not choose is NaN: one round is not the same as another."""
    made = Made()

    def layers(round: int) -> LayerRecord:
        record = made.layers(round)
        if round < ROUNDS:
            record["norm"][1], record["angle"][1] = np.nan, np.nan
        return record

    found = find(about(), history(), layers, 20)
    assert [finding for finding in found if finding.kind == "client_suspect"] == []


@pytest.mark.parametrize(("samples", "suspected"), [(19, True), (20, True), (21, False)])
def test_few_samples_are_fewer_than_a_batch(samples: int, suspected: bool) -> None:
    made = Made()
    made.sizes[4] = samples
    made.sizes += np.arange(CLIENTS) * 10 * (made.sizes > 100)
    made.sizes[:3] *= 2
    assert [found.client for found in made.suspects(about())] == ([4] if suspected else [])


def test_small_clients_among_small_ones_are_no_suspects() -> None:
    made = Made()
    made.sizes[:] = [5, 12, 20, 40, 60, 200]
    assert made.suspects(about()) == []


def test_who_began_worse_than_guessing_does_not_fit() -> None:
    """Guessing among ten classes has ln 10 = 2.30; it began with 9, the others with 2, and its loss stays twice theirs.

    Its updates take nothing back, so that this alone tells.
    """
    made = Made()
    made.losses[0, 3] = 9.0
    made.losses[1:, 3] = 1.0
    table = [[20] * 10 for _ in range(CLIENTS)]
    (found,) = made.suspects(about(table=table))
    assert (found.client, found.reason, found.evidence["loss"]) == (3, "does not fit", 9.0)
    assert found.evidence["guessing"] == pytest.approx(2.302585, abs=1e-6)
    made.losses[0, 3] = 4.5  # 2 ln 10 = 4.6
    assert made.suspects(about(table=table)) == []


def test_who_memorises_noise_moves_its_first_layer_more() -> None:
    """A fifth of the loss, and three times as far in the first of two layers: √3, next to the mean of both."""
    made = Made()
    made.losses[1:, 0] = 0.1
    assert made.suspects(about()) == [], "a low loss alone"
    made.updates[:, 0, 0] *= 3
    (found,) = made.suspects(about())
    assert (found.client, found.reason, found.layer) == (0, "memorises", "layer0")
    assert found.evidence["moves"] == pytest.approx(math.sqrt(3), abs=1e-9)


def test_findings_follow_the_clients() -> None:
    """Numbered in another order, the same ones are found."""
    made = Made()
    made.losses[1:, 2] = 2.5
    made.unlearn(2, -0.4)
    made.sizes[5] = 6
    order = [3, 5, 1, 0, 2, 4]
    before = {(found.client, found.reason) for found in made.suspects(about())}
    made.updates, made.losses, made.sizes = made.updates[:, order], made.losses[:, order], made.sizes[order]
    after = {(order[found.client], found.reason) for found in made.suspects(about()) if found.client is not None}
    assert before == after == {(2, "unlearns"), (5, "few samples")}


def test_clients_go_by_their_names() -> None:
    made, names = Made(), ["north", "east", "south", "west", "city", "coast"]
    made.sizes[4] = 3
    named = about().model_copy(update={"data": about().data.model_copy(update={"client_names": names})})
    assert made.suspects(named)[0].sentence.startswith("Client 4 (city) has 3 samples")
    lost = [{"client": 1, "kind": "failed", "reason": "", "why": "failed"}]
    assert find(named, [line(1, lost=lost)], None, 20)[0].sentence.startswith("Client 1 (east) gave nothing")


def test_three_clients_are_too_few_to_compare() -> None:
    made = Made(clients=3)
    made.updates[:, 1] = 0
    made.sizes[0] = 2
    assert made.suspects(about(clients=3)) == []


def test_layers_and_clients_that_differ_are_described() -> None:
    """In layer0 all updates are the same, in layer1 they point in four directions at right angles, so that each is
    arccos(1 / √4) = 60° from their mean. Of layer0, client 5's points back: 180° from itself, and from the mean."""
    made = Made(clients=8)
    made.updates[:, :, 0] = [1, -1, 0, 0]
    made.updates[:, :, 1] = np.concatenate([np.eye(4), np.eye(4)])
    made.updates[:, 5, 0] *= -1
    made.updates *= np.linspace(1, 2, ROUNDS)[:, None, None, None]
    found = find(about(clients=8), history(), made.layers, 20)
    assert {(finding.kind, finding.layer, finding.client) for finding in found} == {
        ("client_differs", "layer0", 5),
        ("layer_differs", "layer1", None),
    }
    by_kind = {finding.kind: finding for finding in found}
    assert by_kind["client_differs"].evidence == pytest.approx({"angle": 180, "median": 0}, abs=1e-5)
    assert by_kind["layer_differs"].evidence == pytest.approx({"angle": 60, "others": 0}, abs=1e-5)
    assert "60°" in by_kind["layer_differs"].sentence


def test_failures_are_counted_and_dropouts_are_not() -> None:
    def lost(client: int, kind: str) -> dict[str, Any]:
        return {"client": client, "kind": kind, "reason": "", "why": f"{kind}: because"}

    lines = [
        line(1, lost=[lost(1, "failed"), lost(2, "dropped out")]),
        line(2, lost=[lost(1, "refused"), lost(3, "straggler dropped")]),
        line(3, lost=[lost(4, "no reply")]),
    ]
    found = find(about(), lines, None, 20)
    assert [(one.kind, one.client, one.effect, one.reason) for one in found] == [
        ("client_failed", 1, 2, "refused"),
        ("client_failed", 4, 1, "no reply"),
    ]
    assert "2 times, the last time in round 2: refused: because" in found[0].sentence


def test_numbers_of_any_size_are_no_trouble(tmp_path: Path) -> None:
    """Files hold whatever they hold: nothing but findings comes of it, and no warning."""
    run = make_run(tmp_path / "run", clients=9, rounds=12)
    assert isinstance(fedstrata.Run(run.path).findings(), list)
    made = Made()
    for value in (np.inf, -1.0, 0.0, 1e300):
        made.losses[2:, 1] = value
        made.updates[3:, 2] = value
        find(about(), history(), made.layers, 20)


def test_no_round_and_no_record_are_no_findings(tmp_path: Path, tiny: Any) -> None:
    run = fedstrata.run(tiny({"record.layers": False}), out=tmp_path / "run")
    assert run.findings() == []
    assert find(about(), [], Made().layers, 20) == []


def test_the_hospital_with_wrong_labels_is_named(tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("hospitals", ROOT / "examples" / "hospitals.py")
    assert spec is not None
    assert spec.loader is not None
    hospitals = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hospitals)
    run = fedstrata.run({"name": "hospitals", **hospitals.SETTINGS}, task=hospitals.task(), out=tmp_path / "run")
    suspects = [finding.client for finding in run.findings() if finding.kind == "client_suspect"]
    assert suspects == [hospitals.WRONG]
    shown = cli("show", run.path).out
    assert "what stands out" in shown
    assert "Client 3 (Dover) does not learn what the others learn" in shown


def test_the_iid_clients_of_quickstart_are_no_suspects(tmp_path: Path) -> None:
    """Their loss is several times that of the clients with two classes."""
    run = fedstrata.run("quickstart", settings={"training.rounds": 8, "engine.workers": 1}, out=tmp_path / "run")
    losses = run.layers(8)["loss"]
    assert losses[:2].min() > 2 * np.median(losses[2:])
    assert [finding.client for finding in run.findings() if finding.kind == "client_suspect"] == []


def test_a_record_that_cannot_be_read_hides_only_what_stands_out(tmp_path: Path, tiny: Any, cli: Any) -> None:
    run = fedstrata.run(tiny({"training.rounds": 6}), out=tmp_path / "run")
    (run.path / "layers" / "000004.safetensors").write_bytes(b"nothing")
    shown = cli("show", run.path)
    assert shown.code == 0
    assert "what stands out is not known" in shown.out
    assert "layers in round 6" in shown.out
