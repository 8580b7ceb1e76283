"""The selections, with masks worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedstrata.core.aggregation import aggregate
from fedstrata.core.axes import Algorithm, SelectsAfterScores, SelectsBefore, SelectsOnClient
from fedstrata.core.errors import BadValue, RecipeError
from fedstrata.core.layers import Layers
from fedstrata.core.round import check_cohort
from fedstrata.objectives import Plain
from fedstrata.recipes.schema import Training
from fedstrata.selections import SELECTIONS, Everything, FedLDF, NeuronPruning, RandomClients, RandomLayers
from fedstrata.weightings import SampleSize
from tests.support.math import cohort, image_task, run, vectors, words


def test_the_registry_and_when_each_decides() -> None:
    assert list(SELECTIONS) == ["all", "fedldf", "random_layers", "random_clients", "neuron_pruning"]
    for early in (Everything(), RandomLayers(), RandomClients()):
        assert isinstance(early, SelectsBefore)
        assert early.decides == "before"
    assert isinstance(FedLDF(), SelectsAfterScores)
    assert isinstance(NeuronPruning(), SelectsOnClient)


def test_everything() -> None:
    mask = Everything().draw(3, vectors(1, 2), np.random.default_rng(0))
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[True, True]] * 3


# --- n -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "clients", "resolved"), [(None, 20, 4), (None, 10, 2), (None, 2, 1), (3, 20, 3), (20, 20, 20)]
)
def test_n_is_a_fifth_unless_said(n: int | None, clients: int, resolved: int) -> None:
    settled = FedLDF(n).for_cohort(clients)
    assert settled.count(clients) == resolved
    assert settled.count(resolved - 1) == resolved - 1  # fewer than n answered: all of them


@pytest.mark.parametrize("rule", [FedLDF, RandomLayers, RandomClients])
def test_n_must_be_possible(rule: type) -> None:
    with pytest.raises(BadValue, match="n must be at least 1"):
        rule(n=0)
    algorithm = Algorithm(Plain(), rule(n=5), SampleSize())
    with pytest.raises(RecipeError, match="at most the clients of a round, 4"):
        check_cohort(algorithm, 4)
    check_cohort(algorithm, 5)
    check_cohort(Algorithm(Plain(), rule(), SampleSize()), 1)
    assert rule(n=5).for_cohort(20).n == 5
    assert rule().for_cohort(20).n == 4


# --- FedLDF ------------------------------------------------------------------------------------------------------


def test_fedldf_score_is_the_norm_of_each_layer() -> None:
    """‖(3, 4)‖ = 5 and ‖(0, −5, 12)‖ = 13 (eq 3)."""
    score = FedLDF().score(torch.tensor([3, 4, 0, -5, 12], dtype=torch.float64), vectors(2, 3))
    assert score.tolist() == [5.0, 13.0]


def test_fedldf_score_ignores_statistics() -> None:
    """BatchNorm1d(1): weight, bias = 3, 4; the running statistics moved by 100."""
    layers = Layers.of(nn.BatchNorm1d(1).double())
    assert FedLDF().score(torch.tensor([3, 4, 100, 100], dtype=torch.float64), layers).tolist() == [5.0]


def test_fedldf_takes_the_n_largest_of_each_layer() -> None:
    """Layer 0: 3 and 3 of clients 1, 3 (above 2). Layer 1: 9, 4 of clients 2, 0. A client may win nothing or both."""
    scores = torch.tensor([[1.0, 4.0], [3.0, 1.0], [2.0, 9.0], [3.0, 2.0]])
    chosen = FedLDF(n=2).choose(scores)
    assert chosen.dtype == torch.bool
    assert chosen.tolist() == [[False, True], [True, False], [False, True], [True, False]]
    assert FedLDF(n=1).choose(scores).tolist() == [[False, False], [True, False], [False, True], [False, False]]


def test_fedldf_ties_go_to_the_lower_index() -> None:
    """All equal: clients 0 and 1. A tie for the last place: 2 wins it from 3 after 4 took the first."""
    scores = torch.tensor([[5.0, 0.0], [5.0, 1.0], [5.0, 2.0], [5.0, 2.0], [5.0, 7.0]])
    assert FedLDF(n=2).choose(scores).T.tolist() == [
        [True, True, False, False, False],
        [False, False, True, False, True],
    ]
    many = torch.ones(40, 1)  # a sort that is not stable shows itself in longer columns
    assert FedLDF(n=7).choose(many)[:, 0].tolist() == [True] * 7 + [False] * 33


def test_fedldf_with_fewer_replies_than_n_takes_them_all() -> None:
    assert FedLDF(n=4).choose(torch.rand(3, 2)).all()


def test_fedldf_in_a_round_averages_the_largest_by_sample_size() -> None:
    """A round of 4 clients, n = 2: each layer has exactly two senders, those with the largest recorded divergence,

    and their weights are n_k over the two (eq 5).
    """
    task = image_task([4, 6, 8, 10])
    algorithm = Algorithm(Plain(), FedLDF(n=2), SampleSize())
    _, (record,) = run(task, algorithm, Training(rounds=1, epochs=2, batch_size=4, lr=0.05), grouping="block")
    divergence, mask, weight = (record.layers[key] for key in ("divergence", "mask", "weight"))
    assert np.isfinite(divergence).all(), "everyone reports, also who is not chosen"
    for column in range(mask.shape[1]):
        top = sorted(np.argsort(-divergence[:, column])[:2])
        assert sorted(np.flatnonzero(mask[:, column])) == top
        shares = record.sizes[top] / record.sizes[top].sum()
        np.testing.assert_allclose(weight[top, column], shares, rtol=1e-12)


# --- random ------------------------------------------------------------------------------------------------------


def test_random_layers_draws_n_clients_for_each_layer_apart() -> None:
    """Every column has n clients; columns differ; over 600 draws everyone is drawn n/K of the time (± 4 σ)."""
    layers, generator = vectors(1, 1, 1, 1), np.random.default_rng(5)
    draws = torch.stack([RandomLayers(n=2).draw(5, layers, generator) for _ in range(600)])
    assert draws.dtype == torch.bool
    assert (draws.sum(1) == 2).all()
    assert any(not torch.equal(draw[:, 0], draw[:, 1]) for draw in draws)
    sigma = (0.4 * 0.6 / 600) ** 0.5
    assert ((draws.double().mean(0) - 0.4).abs() < 4 * sigma).all()


def test_random_clients_draws_n_clients_for_all_layers() -> None:
    layers, generator = vectors(1, 1, 1), np.random.default_rng(5)
    draws = torch.stack([RandomClients(n=2).draw(5, layers, generator) for _ in range(600)])
    assert (draws.sum(1) == 2).all()
    assert (draws == draws[:, :, :1]).all(), "a client sends everything or nothing"
    sigma = (0.4 * 0.6 / 600) ** 0.5
    assert ((draws[:, :, 0].double().mean(0) - 0.4).abs() < 4 * sigma).all()


@pytest.mark.parametrize("rule", [RandomLayers(n=2), RandomClients(n=2)], ids=lambda rule: type(rule).__name__)
def test_draws_are_the_generators(rule: RandomLayers | RandomClients) -> None:
    layers = vectors(1, 1, 1)
    first, again, other = (rule.draw(9, layers, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_who_is_drawn_for_nothing_does_not_train() -> None:
    """HDFL with n = 2 of 4: the other two are "not selected", get no model, and send nothing."""
    task = image_task([4, 6, 8, 10])
    algorithm = Algorithm(Plain(), RandomClients(n=2), SampleSize())
    _, (record,) = run(task, algorithm, Training(rounds=1, batch_size=4))
    assert sorted(words(record)) == ["not selected", "not selected", "ok", "ok"]
    chosen = np.array([status.kind == "ok" for status in record.status])
    assert np.isfinite(record.losses).tolist() == chosen.tolist()
    np.testing.assert_array_equal(record.layers["mask"], np.repeat(chosen[:, None], 3, 1))


# --- neuron pruning ----------------------------------------------------------------------------------------------


def block_model() -> tuple[Layers, dict[str, torch.Tensor], torch.Tensor]:
    """Linear(2, 5) with its BatchNorm, 5 units, and Linear(5, 2), 2 units; an update of zeros and its views."""
    model = nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()
    layers = Layers.of(model, "block")
    update = torch.zeros(layers.numel, dtype=torch.float64)
    return layers, layers.views(update), update


def test_neuron_pruning_counts_weight_bias_and_batch_norm_of_a_unit() -> None:
    """Changes of the first layer's units, squared: u0: weight 3² = 9; u1: bias 2² + BN weight 2² + BN bias 2² = 12;

    u2: only a running mean, 100², which is not measured: 0; u3: weight (2, 2) = 8; u4: 1. A share of 0.4 is two of
    five: u1 and u0. The second layer has 0.4 · 2 = 0.8 units, so one: u1 of it, the only one that moved.
    """
    layers, view, update = block_model()
    view["0.weight"][0, 1] = 3
    view["0.bias"][1] = view["1.weight"][1] = view["1.bias"][1] = 2
    view["1.running_mean"][2] = 100
    view["0.weight"][3] = 2
    view["0.weight"][4, 0] = -1
    view["2.weight"][1, 4] = 0.1
    picked = NeuronPruning(share=0.4).pick(update, layers)
    assert picked.tolist() == [True, True, False, False, False, False, True]
    assert NeuronPruning(share=0.6).pick(update, layers).tolist() == [True, True, False, True, False, False, True]


def test_neuron_pruning_sends_at_least_one_unit_and_breaks_ties_low() -> None:
    """Nothing moved, share tiny: unit 0 of each layer."""
    layers, _, update = block_model()
    assert NeuronPruning(share=0.01).pick(update, layers).tolist() == [True, False, False, False, False, True, False]


@pytest.mark.parametrize(
    ("units", "share", "kept"),
    [(10, 0.3, 3), (10, 0.29, 2), (10, 1.0, 10), (10, 0.1, 1), (100, 0.29, 29), (100, 0.57, 57), (100, 0.999, 99)],
)
def test_neuron_pruning_rounds_down_what_is_not_whole(units: int, share: float, kept: int) -> None:
    """0.29 · 100 is 28.999999999999996 in floating point, and 29 units."""
    layers = Layers.of(nn.Linear(1, units).double())
    assert int(NeuronPruning(share=share).pick(torch.rand(2 * units, dtype=torch.float64), layers).sum()) == kept


@pytest.mark.parametrize("share", [0.0, 1.1, -0.5, float("nan")])
def test_share_must_lie_in_range(share: float) -> None:
    with pytest.raises(BadValue, match="share"):
        NeuronPruning(share=share)


def test_aggregation_per_unit_by_hand() -> None:
    """Linear(1, 3) with weights 1: units (w, b). Client 0 (n = 1) sends units 0, 1; client 1 (n = 3) sends unit 1.

    Unit 0: 0 + 4 from client 0 alone. Unit 1: ¼·4 + ¾·8 = 7. Unit 2: nobody, stays. Same for the bias.
    """
    layers = Layers.of(nn.Linear(1, 3).double())
    units = torch.tensor([[True, True, False], [False, True, False]])
    model = torch.tensor([0, 10, 20, 0, 0, 0.5], dtype=torch.float64)
    crowd = cohort(
        layers, [[4, 4, 0, -4, -4, 0], [0, 8, 0, 0, -8, 0]], [1, 3], sent=[[True], [True]], model=model, units=units
    )
    weights, _ = SampleSize().weigh(crowd, {})
    assert aggregate(model, crowd, weights).tolist() == [4, 17, 20, -4, -7, 0.5]


def test_neuron_pruning_round_moves_batch_norm_statistics_with_their_unit() -> None:
    """One client, one of three channels: exactly that channel's weight, bias, BatchNorm entries and statistics move."""
    task = image_task([12])
    algorithm = Algorithm(Plain(), NeuronPruning(share=0.34), SampleSize())
    states, _ = run(task, algorithm, Training(rounds=1, batch_size=4, lr=0.1, weight_decay=0.1), grouping="block")
    layers = Layers.of(task.model().double(), "block")
    old, new = layers.views(states[0].model), layers.views(states[1].model)
    moved = {name: (new[name] != old[name]).reshape(3, -1).any(1) for name in old}
    channel = moved["conv.weight"]
    assert int(channel.sum()) == 1
    for name in ("conv.bias", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"):
        assert torch.equal(moved[name], channel), name
