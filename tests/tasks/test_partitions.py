from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fedstrata.cli.tables import partition_table
from fedstrata.core.rng import generator
from fedstrata.tasks.partitions import (
    PARTITIONS,
    Dirichlet,
    FedAdpCase1,
    FedAdpCase2,
    Iid,
    IidMix,
    Partition,
    Shards,
    TwoClassDirichlet,
    XClass,
    _log_gammas,
)

BALANCED = np.tile(np.arange(10), 100)
label_arrays = st.lists(st.integers(0, 4), min_size=30, max_size=200).map(np.array)
seeds = st.integers(0, 2**32)


def split(scheme, labels, seed=0):
    return scheme.split(labels, generator(seed, "partition"))


def assert_disjoint(partition, labels):
    assert len(np.unique(partition.indices)) == len(partition.indices)
    assert set(partition.indices) <= set(range(len(labels)))


def classes_held(partition, labels):
    return [len(np.unique(labels[own])) for own in partition]


# --- the partition itself


def test_partition_by_hand():
    partition = Partition.from_lists([np.array([4, 0]), np.array([], dtype=int), np.array([2])])
    assert len(partition) == 3
    assert partition.indices.dtype == partition.offsets.dtype == np.int64
    assert [partition[client].tolist() for client in range(len(partition))] == [[4, 0], [], [2]]
    assert partition.sizes.tolist() == [2, 0, 1]
    assert partition.table(np.array([1, 9, 0, 9, 1]), 2).tolist() == [[0, 2], [0, 0], [1, 0]]
    for client in (3, -1):
        with pytest.raises(IndexError, match=f"client {client} of 3"):
            partition[client]


def test_partition_of_nobody_and_of_owners():
    assert len(Partition.from_lists([])) == 0
    partition = Partition.from_owners(np.array([5, 6, 7, 8]), np.array([2, 0, 2, 0]), clients=4)
    assert [partition[client].tolist() for client in range(len(partition))] == [[6, 8], [], [5, 7], []]


# --- iid


@given(label_arrays, st.integers(1, 40), seeds)
def test_iid_shares_out_everything_evenly(labels, clients, seed):
    partition = split(Iid(clients), labels, seed)
    assert sorted(partition.indices) == list(range(len(labels)))
    assert partition.sizes.max() - partition.sizes.min() <= 1


@given(label_arrays, st.integers(1, 6), st.integers(1, 5), seeds)
def test_iid_with_samples_is_disjoint(labels, clients, samples, seed):
    partition = split(Iid(clients, samples), labels, seed)
    assert_disjoint(partition, labels)
    assert partition.sizes.tolist() == [samples] * clients


# --- FedAdp's


@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 10), st.integers(1, 100), seeds)
def test_iid_mix_has_the_right_sizes_and_classes(iid, non_iid, classes, samples, seed):
    partition = split(IidMix(iid, non_iid, classes, samples), BALANCED, seed)
    assert partition.sizes.tolist() == [samples] * (iid + non_iid)
    assert all(len(np.unique(own)) == samples for own in partition)
    assert max(classes_held(partition, BALANCED)[iid:]) <= classes


def test_iid_mix_puts_iid_nodes_first_and_lets_nodes_overlap():
    partition = split(IidMix(iid=2, non_iid=3, classes=1, samples=100), BALANCED)
    held = classes_held(partition, BALANCED)
    assert min(held[:2]) > 5
    assert held[2:] == [1, 1, 1]
    overlapping = split(IidMix(iid=0, non_iid=11, classes=1, samples=100), BALANCED)
    assert len(np.unique(overlapping.indices)) < len(overlapping.indices)


def test_x_class_gives_every_node_its_number_of_classes():
    partition = split(XClass([10, 2, 1, 3], samples=90), BALANCED)
    assert classes_held(partition, BALANCED) == [10, 2, 1, 3]
    assert partition.sizes.tolist() == [90] * 4
    assert all(len(np.unique(own)) == 90 for own in partition)


@pytest.mark.parametrize("seed", range(5))
def test_fedadp_case1_is_a_permutation_of_class_counts(seed):
    held = classes_held(split(FedAdpCase1(samples=90), BALANCED, seed), BALANCED)
    assert sorted(held) == list(range(1, 11))


@pytest.mark.parametrize("seed", range(5))
def test_fedadp_case2_has_few_classes_first_and_many_later(seed):
    # A hundred draws from five values miss one of them once in 10⁹ times.
    held = classes_held(split(FedAdpCase2(clients=200, samples=90), BALANCED, seed), BALANCED)
    assert set(held[:100]) == {1, 2, 3, 4, 5}
    assert set(held[100:]) == {6, 7, 8, 9, 10}


# --- shards


@given(label_arrays, st.integers(1, 5), st.integers(1, 3), seeds)
def test_shards_are_equal_and_disjoint(labels, clients, per_client, seed):
    partition = split(Shards(clients, per_client), labels, seed)
    assert_disjoint(partition, labels)
    assert partition.sizes.tolist() == [per_client * (len(labels) // (clients * per_client))] * clients


def test_shards_by_hand():
    labels = np.array([1, 0, 1, 0, 2, 2, 3, 3])
    partition = split(Shards(clients=4, per_client=1), labels)
    assert sorted(tuple(sorted(own)) for own in partition) == [(0, 2), (1, 3), (4, 5), (6, 7)]


def test_shards_of_a_given_size_leave_no_class_out():
    partition = split(Shards(clients=10, per_client=2, shard_size=20), BALANCED)
    assert partition.sizes.tolist() == [40] * 10
    assert len(np.unique(BALANCED[partition.indices])) == 10
    assert max(classes_held(partition, BALANCED)) <= 4


# --- Dirichlet


@given(label_arrays, st.integers(1, 8), st.floats(0.05, 50), seeds)
def test_dirichlet_uses_every_sample_once(labels, clients, alpha, seed):
    partition = split(Dirichlet(clients, alpha, min_samples=0), labels, seed)
    assert len(partition) == clients
    assert sorted(partition.indices) == list(range(len(labels)))


def test_dirichlet_keeps_the_least_size():
    assert split(Dirichlet(clients=20, alpha=0.5, min_samples=8), BALANCED).sizes.min() >= 8


def test_dirichlet_alpha_sets_the_skew():
    def largest_share(alpha):
        table = split(Dirichlet(clients=10, alpha=alpha, min_samples=0), BALANCED).table(BALANCED, 10)
        return (table.max(axis=0) / table.sum(axis=0)).mean()

    assert largest_share(0.05) > 0.6 > 0.2 > largest_share(100)


@given(
    label_arrays,
    st.integers(1, 30),
    st.floats(0.01, 50),
    st.integers(1, 2),
    st.sampled_from(["holders", "classes"]),
    seeds,
)
def test_two_class_dirichlet_gives_held_classes_away_completely(labels, clients, alpha, classes, over, seed):
    labels = np.concatenate([labels, [0, 1]])
    partition = split(TwoClassDirichlet(clients, alpha, classes, over), labels, seed)
    assert len(partition) == clients
    assert_disjoint(partition, labels)
    assert max(classes_held(partition, labels)) <= classes
    totals, given_away = np.bincount(labels), np.bincount(labels[partition.indices], minlength=labels.max() + 1)
    assert all(count in (0, total) for count, total in zip(given_away, totals, strict=True))


def test_two_class_dirichlet_readings_differ_in_size_skew():
    labels = np.tile(np.arange(10), 4800)
    sizes = {over: split(TwoClassDirichlet(over=over), labels).sizes for over in ("holders", "classes")}
    assert all(own.sum() == 48_000 and len(own) == 250 for own in sizes.values())
    assert sizes["holders"].std() > 2 * sizes["classes"].std()


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.5, 1.0, 30.0])
@pytest.mark.parametrize("over", ["holders", "classes"])
@pytest.mark.parametrize("seed", range(3))
def test_two_class_dirichlet_as_written(alpha, over, seed):
    """The formula once more: random classes, Gamma draws in proportion, and cuts at the rounded cumulative shares."""
    labels = np.tile(np.arange(10), 137)
    draw = generator(seed, "partition")
    held = np.argsort(draw.random((40, 10)), axis=1)[:, :2]
    gammas = draw.gamma(alpha, size=(40, 2))
    assert gammas.min() > 1e-300
    expected: list[list[int]] = [[] for _ in range(40)]
    for label in range(10):
        holders = [(k, i) for k in range(40) for i in range(2) if held[k, i] == label]
        weight = [gammas[k, i] / (gammas[k].sum() if over == "classes" else 1) for k, i in holders]
        members: Any = draw.permutation(np.flatnonzero(labels == label)) if holders else []
        cuts = [0, *np.round(np.cumsum(weight) / np.cumsum(weight)[-1] * len(members)).astype(int)]
        for (k, _), first, last in zip(holders, cuts[:-1], cuts[1:], strict=True):
            expected[k] += list(members[first:last])
    found = split(TwoClassDirichlet(40, alpha, over=over), labels, seed)
    assert [own.tolist() for own in found] == expected


TINY_ALPHAS = [1e-4, 1e-6, 1e-12, 1e-100, 1e-300, 5e-324]


@pytest.mark.parametrize("alpha", TINY_ALPHAS)
def test_two_class_dirichlet_with_a_tiny_alpha_gives_a_class_to_one_holder(alpha):
    """Any of its holders is as likely as another: of four, each has 100 ± 35 (four σ) of 400 classes."""
    scheme, labels = TwoClassDirichlet(4, alpha, classes=1), np.zeros(1000, int)
    sizes = np.array([split(scheme, labels, seed).sizes for seed in range(400)])
    assert sizes.max(axis=1).mean() > 999
    assert np.bincount(sizes.argmax(axis=1), minlength=4).tolist() == pytest.approx([100] * 4, abs=35)


@pytest.mark.parametrize("alpha", TINY_ALPHAS[1:])
def test_two_class_dirichlet_over_classes_with_a_tiny_alpha(alpha):
    """Each client has one of its two classes with a share of 1, so who has the same one has as much of it."""
    partition = split(TwoClassDirichlet(200, alpha, over="classes"), BALANCED)
    table = partition.table(BALANCED, 10)
    assert ((table > 0).sum(axis=1) == 1).all()
    for label in range(10):
        own = table[table[:, label] > 0, label]
        assert own.sum() == 100
        assert own.max() - own.min() <= 1
    assert ((table > 0).sum(axis=0) > 5).all()


@pytest.mark.parametrize("over", ["holders", "classes"])
def test_two_class_dirichlet_with_a_few_vanishing_draws(over):
    """At alpha = 0.01 one Gamma draw in 1,200 is below 2e-308. A share of nothing changes nothing.

    With enough classes to each client, and clients to each class, the plain formula is right as well.
    """
    vanished = 0
    for seed in range(10):
        draw = generator(seed, "partition")
        held = np.argsort(draw.random((60, 10)), axis=1)
        gammas = draw.gamma(0.01, size=(60, 10))
        vanished += (gammas < np.finfo(float).tiny).sum()
        shares = np.zeros((60, 10))
        np.put_along_axis(shares, held, gammas / (gammas.sum(1, keepdims=True) if over == "classes" else 1), axis=1)
        expected = np.diff(np.round(np.cumsum(shares, 0) / shares.sum(0) * 100).astype(int), axis=0, prepend=0)
        found = split(TwoClassDirichlet(60, 0.01, classes=10, over=over), BALANCED, seed)
        assert found.table(BALANCED, 10).tolist() == expected.tolist()
    assert vanished > 0


@pytest.mark.parametrize("alpha", [1e-2, 1e-3, 1e-4, 1e-300])
def test_logarithms_of_gamma_draws_below_what_a_float_holds(alpha):
    """−alpha log x of Gamma(alpha) tends to an exponential variable: a quarter each between these quartiles."""
    draw = generator(0, "partition")
    x = draw.gamma(alpha, size=40_000)
    after = draw.bit_generator.state
    found = -_log_gammas(x, alpha, draw)
    assert draw.bit_generator.state["state"]["counter"].tolist() == after["state"]["counter"].tolist()
    quartiles = -np.log([0.75, 0.5, 0.25])
    counts = np.bincount(np.searchsorted(quartiles, found), minlength=4)
    assert counts.tolist() == pytest.approx([10_000] * 4, abs=4 * 87 + 40_000 * alpha)


def test_dirichlet_with_a_tiny_alpha_gives_a_class_to_one_client():
    for alpha in (1e-6, 1e-100, 1e-300):
        table = split(Dirichlet(8, alpha, min_samples=0), BALANCED).table(BALANCED, 10)
        assert (table.max(axis=0) == 100).all()


def test_two_class_dirichlet_survives_a_vanishing_alpha():
    assert split(TwoClassDirichlet(clients=1, alpha=1e-12, classes=1), np.zeros(5, int)).sizes.tolist() == [5]


# --- all of them

EXAMPLES = [
    Iid(7),
    Iid(7, samples=20),
    IidMix(2, 2, 3, samples=30),
    XClass([10, 2, 1], samples=30),
    FedAdpCase1(samples=30),
    FedAdpCase2(samples=30),
    Shards(10),
    Dirichlet(5, 0.5),
    TwoClassDirichlet(20),
]


def test_every_scheme_has_an_example():
    assert {type(scheme) for scheme in EXAMPLES} == set(PARTITIONS.values())


@pytest.mark.parametrize("scheme", EXAMPLES, ids=repr)
def test_the_generator_decides_everything(scheme):
    first, again, other = split(scheme, BALANCED, 1), split(scheme, BALANCED, 1), split(scheme, BALANCED, 2)
    assert np.array_equal(first.indices, again.indices)
    assert np.array_equal(first.offsets, again.offsets)
    assert not np.array_equal(first.indices, other.indices)
    assert first.indices.dtype == first.offsets.dtype == np.int64


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("iid", {"clients": 0}, "clients must be at least 1, got 0"),
        ("iid", {"clients": 1, "samples": 0}, "samples must be at least 1, got 0"),
        ("iid_mix", {"iid": 0, "non_iid": 0, "classes": 1}, "iid \\+ non_iid must be at least 1, got 0"),
        ("iid_mix", {"iid": -1, "non_iid": 2, "classes": 1}, "iid must be at least 0, got -1"),
        ("iid_mix", {"iid": 1, "non_iid": 1, "classes": 0}, "classes must be at least 1, got 0"),
        ("x_class", {"classes": []}, "classes must name at least one node, got \\[\\]"),
        ("x_class", {"classes": [2, 0]}, "classes must be at least 1 each, got \\[2, 0\\]"),
        ("fedadp_case1", {"samples": 0}, "samples must be at least 1, got 0"),
        ("fedadp_case2", {"clients": 1}, "clients must be at least 2, got 1"),
        ("shards", {"per_client": 0}, "per_client must be at least 1, got 0"),
        ("shards", {"shard_size": 0}, "shard_size must be at least 1, got 0"),
        ("dirichlet", {"clients": 3, "alpha": -1}, "alpha must be > 0 and finite, got -1"),
        ("dirichlet", {"clients": 3, "alpha": float("nan")}, "alpha must be > 0 and finite, got nan"),
        ("dirichlet", {"clients": 3, "alpha": 1, "min_samples": -1}, "min_samples must be at least 0, got -1"),
        ("two_class_dirichlet", {"classes": 0}, "classes must be at least 1, got 0"),
        ("two_class_dirichlet", {"alpha": 0}, "alpha must be > 0 and finite, got 0"),
        ("two_class_dirichlet", {"over": "clients"}, "over must be holders or classes, got 'clients'"),
    ],
)
def test_bad_hyperparameters_name_field_and_value(name, fields, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        PARTITIONS[name](**fields)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (Iid(10, samples=101), "samples = 101 needs 1010 samples, but there are 1000"),
        (IidMix(1, 0, 1, samples=1001), "samples = 1001 needs 1001 samples, but there are 1000"),
        (IidMix(0, 1, 1, samples=101), "samples = 101 needs 101 samples, but there are 100 in 1 random class$"),
        (IidMix(0, 1, 11, samples=5), "classes must be at most 10.* got 11"),
        (FedAdpCase1(clients=9, samples=10), "clients must be the number of classes, 10, got 9"),
        (FedAdpCase1(samples=101), "samples = 101 needs"),
        (Shards(clients=501), "clients × per_client = 1002 needs 1002 samples"),
        (Shards(clients=10, shard_size=51), "shard_size = 51 needs 1020 samples"),
        (Dirichlet(clients=1001, alpha=1), "min_samples = 1 needs 1001 samples"),
        (Dirichlet(clients=100, alpha=0.01, min_samples=10), "min_samples = 10 was not reached in 100 draws"),
        (TwoClassDirichlet(classes=11), "classes must be at most 10.* got 11"),
    ],
    ids=repr,
)
def test_impossible_requests_name_field_and_value(scheme, message):
    with pytest.raises(ValueError, match=message):
        split(scheme, BALANCED)


@pytest.mark.parametrize("scheme", [Iid(100_000), Dirichlet(100_000, 0.3, min_samples=0), TwoClassDirichlet(100_000)])
def test_a_hundred_thousand_clients_are_cheap(scheme):
    labels = np.tile(np.arange(10), 6000)
    start = time.perf_counter()
    partition = split(scheme, labels)
    assert partition.table(labels, 10).sum() == 60_000
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(("clients", "caption"), [(0, None), (40, None), (41, "and 1 more clients")])
def test_partition_table_shows_sizes_and_says_what_it_leaves_out(clients, caption):
    view = partition_table([[3, 0, 4]] * clients, ("cat", "dog", "emu"))
    assert view.row_count == min(clients, 40)
    assert view.caption == caption
    with (console := Console(width=80)).capture() as capture:
        console.print(view)
    assert clients == 0 or re.search(r"0 │ +3 │ +· │ +4 │ +7", capture.get())
