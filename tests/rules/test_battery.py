"""Every combination of the three axes against the slow reference: 4 objectives × 5 selections × 4 weightings.

float64, E = 3, unequal shards, 4 of 6 clients a round, 3 rounds, SGD with momentum, weight decay and a decaying
learning rate, a model with BatchNorm, and the three groupings spread over the combinations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedstrata.core.axes import Algorithm
from fedstrata.core.determinism import steady
from fedstrata.core.layers import Layers
from fedstrata.objectives import FedLap, Plain
from fedstrata.recipes.schema import Training
from fedstrata.selections import Everything, RandomClients, RandomLayers
from fedstrata.tasks.task import Task
from fedstrata.weightings import FedAdp, FedLayerWise, Uniform
from tests.support import reference
from tests.support.combinations import COMBINATIONS, OBJECTIVES, SELECTIONS, SIZES, WEIGHTINGS
from tests.support.math import Tiny, image_task, prepare, run
from tests.support.reference import Rules

BN = ["bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"]
GROUPINGS = {  # Tiny's layers, by hand
    "module": {"conv": ["conv.weight", "conv.bias"], "bn": BN, "fc": ["fc.weight", "fc.bias"]},
    "block": {"conv": ["conv.weight", "conv.bias", *BN], "fc": ["fc.weight", "fc.bias"]},
    "tensor": {
        "conv.weight": ["conv.weight"],
        "conv.bias": ["conv.bias"],
        "bn.weight": ["bn.weight"],
        "bn.bias": BN[1:],
        "fc.weight": ["fc.weight"],
        "fc.bias": ["fc.bias"],
    },
}
TRAINING = Training(
    rounds=3, clients_per_round=4, epochs=3, batch_size=4, lr=0.1, lr_decay=0.9, momentum=0.9, weight_decay=0.01
)


class _ReferenceDraw:
    """Lets the reference call a random selection's `draw` with its own kind of layers."""

    def __init__(self, selection: RandomLayers | RandomClients, layers: Layers) -> None:
        self.selection, self.layers = selection, layers

    def __call__(self, clients: int, grouping: object, generator: np.random.Generator) -> np.ndarray:
        return self.selection.draw(clients, self.layers, generator).numpy()


def compare(
    algorithm: Algorithm,
    rules: Rules,
    grouping: str,
    seed: int,
    tolerance: float = 1e-9,
    task: Task | None = None,
    by_hand: reference.Grouping | None = None,
) -> None:
    """Run both, and compare models and records after every round."""
    task, by_hand = task or image_task(SIZES), by_hand or GROUPINGS[grouping]
    setup, _, _ = prepare(task, algorithm, TRAINING, seed=seed, grouping=grouping)
    layers = setup.layers
    assert layers.names == tuple(by_hand)
    if rules.draw is not None:
        rules.draw = _ReferenceDraw(rules.draw, layers)
    states, records = run(task, algorithm, TRAINING, seed=seed, grouping=grouping)
    with steady():
        expected = reference.run(task, setup.build(), by_hand, rules, TRAINING, seed=seed)
    assert len(records) == len(expected) == 3
    near: dict[str, Any] = {"rtol": tolerance, "atol": tolerance}
    for state, record, truth in zip(states[1:], records, expected, strict=True):
        np.testing.assert_array_equal(record.clients, truth.clients)
        ours = layers.views(state.model)
        assert set(ours) == set(truth.model)
        for name, value in truth.model.items():
            np.testing.assert_allclose(ours[name].numpy(), value, err_msg=name, **near)
        _compare_record(record, truth, rules, list(by_hand), near)
        if rules.objective == "adaptive_mu":
            np.testing.assert_allclose(state.objective["mu"].numpy(), list(truth.mu.values()), **near)
    moved = layers.norms(states[-1].model - states[0].model)
    assert (moved > 1e-4).all(), "a run in which nothing happens tests nothing"


def _compare_record(record, truth, rules: Rules, names: list[str], near: dict[str, Any]) -> None:
    figures, sent = record.layers, truth.mask
    answered = sent.any(1)
    np.testing.assert_array_equal(figures["mask"] > 0, sent)
    np.testing.assert_allclose(figures["weight"][answered], truth.weight[answered], **near)
    np.testing.assert_allclose(figures["model_angle"][answered], truth.model_angle[answered], **near)
    np.testing.assert_array_equal(np.isnan(figures["angle"]), ~sent)
    # arccos turns a rounding error e near ±1 into √(2e): two numbers that are both "zero angle" may differ by 1e-8.
    np.testing.assert_allclose(figures["angle"][sent], truth.angle[sent], rtol=near["rtol"], atol=1e-7)
    if rules.selection != "neuron_pruning":  # there the server knows only the norm of the units that were sent
        known = np.ones_like(sent) if rules.selection == "fedldf" else sent
        single = 1e-6 if rules.selection == "fedldf" else near["rtol"]  # scores are sent in single precision
        np.testing.assert_allclose(figures["divergence"][known], truth.divergence[known], rtol=single)
    # who was drawn for nothing does not train; everybody trains for FedLDF's scores
    trained = answered if rules.selection.startswith("random") else np.full(len(answered), True)
    np.testing.assert_allclose(record.losses[trained], np.array(truth.losses)[trained], **near)
    assert np.isnan(record.losses[~trained]).all()
    for k, client in enumerate(truth.clients):
        for at, layer in enumerate(figures["smoothed_angle"][k]):
            key = client if rules.weighting == "fedadp" else (client, names[at])
            if answered[k] and key in truth.smoothed:
                assert layer == pytest.approx(truth.smoothed[key], rel=1e-9, abs=1e-7)


@pytest.mark.parametrize(("objective", "selection", "weighting"), COMBINATIONS)
def test_every_combination_is_the_reference(objective: str, selection: str, weighting: str) -> None:
    number = COMBINATIONS.index((objective, selection, weighting))
    grouping = ("module", "block", "tensor")[number % 3]
    options: dict[str, Any] = {}
    rules = []
    for axis, name in ((OBJECTIVES, objective), (SELECTIONS, selection), (WEIGHTINGS, weighting)):
        rule, plain = axis[name]
        rules.append(rule)
        options.update(plain)
    compare(Algorithm(*rules), Rules(objective, selection, weighting, **options), grouping, seed=number)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"units": "output"}, 1e-9),
        ({"refresh": "step"}, 1e-9),
        ({"q": 1.0}, 1e-9),
        ({"form": "exponent", "q": 0.4}, 1e-9),
        ({"form": "exponent", "q": 1.0}, 1e-9),
        ({"through": True}, 1e-9),
        ({"through": True, "units": "output"}, 1e-9),
        ({"through": True, "form": "exponent", "q": 0.5}, 1e-9),
        # the powers of a small λ amplify rounding: λ after one small step is 1e-6 with an error of 1e-16
        ({"through": True, "form": "exponent", "q": 0.4}, 1e-7),
    ],
    ids=str,
)
def test_fedlap_switches(options: dict[str, Any], tolerance: float) -> None:
    """Each reading of FedLap that the switches offer, as the reference computes it neuron by neuron."""
    algorithm = Algorithm(FedLap(**options), Everything(), Uniform())
    compare(algorithm, Rules("fedlap", "all", "uniform", **options), "module", seed=5, tolerance=tolerance)


class Odd(nn.Module):
    """Weights that are not [out, in, …]: grouped, depthwise and transposed convolutions, an embedding; and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 1)
        self.grouped = nn.Conv2d(4, 6, 2, groups=2)
        self.depthwise = nn.Conv2d(6, 6, 2, groups=6)
        self.norm = nn.LayerNorm([6, 2, 2])
        self.up = nn.ConvTranspose2d(6, 3, 2)
        self.up_grouped = nn.ConvTranspose2d(3, 6, 2, groups=3)
        self.embed = nn.Embedding(4, 5)
        self.fc = nn.Linear(6 * 16 + 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        image = torch.tanh(self.depthwise(torch.tanh(self.grouped(self.conv(x)))))
        image = torch.tanh(self.up_grouped(torch.tanh(self.up(self.norm(image)))))
        words = self.embed((x[:, 0, 0] > 0).sum(1) % 4)
        return self.fc(torch.cat([image.flatten(1), words], 1))


ODD_LAYERS = {name: [name] for name, _ in Odd().named_parameters()}


@pytest.mark.parametrize("form", ["factor", "exponent"])
@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize("units", ["input", "output"])
def test_fedlap_on_every_kind_of_weight(units: Any, through: bool, form: Any) -> None:
    """The reference finds out by trying which neuron each weight leaves and enters."""
    options: dict[str, Any] = {"q": 0.5, "units": units, "through": through, "form": form}
    algorithm = Algorithm(FedLap(**options), Everything(), Uniform())
    rules = Rules("fedlap", "all", "uniform", **options)
    task = image_task(SIZES, Odd)
    compare(algorithm, rules, "tensor", seed=2, task=task, by_hand=ODD_LAYERS)


@pytest.mark.parametrize("weighting", ["fedadp", "fedlayerwise"])
@pytest.mark.parametrize("selection", ["all", "fedldf"])
def test_smoothing_by_round_number(selection: str, weighting: str) -> None:
    """θ̃ = ((t − 1) θ̃ + θ)/t with the literal round number t, under partial participation."""
    rule: Any = {"fedadp": FedAdp, "fedlayerwise": FedLayerWise}[weighting](smoothing="round")
    chosen, options = SELECTIONS[selection]
    rules = Rules("plain", selection, weighting, smoothing="round", **options)
    compare(Algorithm(Plain(), chosen, rule), rules, "module", seed=3)


def test_the_model_of_the_battery() -> None:
    """70 trainable numbers: 3·9 + 3, 3 + 3, 3·12 + 3 … and six statistics; the reference groups all of them."""
    layers = Layers.of(Tiny(), "module")
    assert layers.numel == 30 + 6 + 39 + 6
    for grouping in GROUPINGS.values():
        assert len([name for names in grouping.values() for name in names]) == 8
