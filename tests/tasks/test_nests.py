"""Nests of tensors: whatever is done to them is done to each leaf, and their form stays."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from fedstrata.tasks.nests import joined, leaves, map_nest, moved
from fedstrata.tasks.task import NestedSamples, Samples, as_data

ROWS = 6
DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.bool, torch.complex64)
Two = namedtuple("Two", "left right")


def tensor_of(place: tuple[Any, ...]) -> Tensor:
    """Rows of numbers that are no other tensor's."""
    dtype, width, seed = place
    numbers = torch.arange(ROWS * width).view(ROWS, width) + 100 * seed
    return (numbers % 2 if dtype == torch.bool else numbers).to(dtype)


TENSORS = st.tuples(st.sampled_from(DTYPES), st.integers(1, 3), st.integers(0, 9)).map(tensor_of)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    tables = st.dictionaries(st.sampled_from(["a", "b", 3]), inner, min_size=1)
    return st.one_of(
        tables,
        tables.map(OrderedDict),
        tables.map(lambda table: defaultdict(list, table)),
        tables.map(UserDict),
        tables.map(MappingProxyType),
        st.lists(inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3).map(tuple),
        st.tuples(inner, inner).map(lambda pair: Two(*pair)),
    )


NESTS = st.recursive(TENSORS, containers, max_leaves=6)


def spread(nest: Any) -> tuple[str, list[Tensor]]:
    """The form of a nest in words, and its tensors in order: an account of its own."""
    if isinstance(nest, Tensor):
        return "tensor", [nest]
    if isinstance(nest, Mapping):
        parts = [(f"{key!r}: ", *spread(part)) for key, part in nest.items()]
    else:
        parts = [("", *spread(part)) for part in nest]
    return f"{type(nest).__name__}({', '.join(key + form for key, form, _ in parts)})", [
        t for *_, tensors in parts for t in tensors
    ]


def assert_same(found: Any, wanted: Any) -> None:
    (form, tensors), (wanted_form, wanted_tensors) = spread(found), spread(wanted)
    assert form == wanted_form
    for tensor, wanted_tensor in zip(tensors, wanted_tensors, strict=True):
        assert tensor.dtype == wanted_tensor.dtype
        assert torch.equal(tensor, wanted_tensor)


@given(NESTS)
@settings(max_examples=200, deadline=None)
def test_every_leaf_is_mapped_once_and_the_form_stays(nest: Any) -> None:
    before = spread(nest)
    doubled = map_nest(lambda leaf: torch.cat([leaf, leaf]), nest)
    assert spread(nest)[0] == before[0]
    assert all(now is then for now, then in zip(spread(nest)[1], before[1], strict=True))  # the nest is not changed
    form, tensors = spread(doubled)
    assert form == before[0]
    for tensor, old in zip(tensors, before[1], strict=True):
        assert torch.equal(tensor[:ROWS], old)
        assert torch.equal(tensor[ROWS:], old)


@given(NESTS, NESTS, st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=9))
@settings(max_examples=200, deadline=None)
def test_a_batch_of_nests_has_the_rows_of_every_tensor(inputs: Any, targets: Any, indices: list[int]) -> None:
    data = as_data((inputs, targets), "clients[0]")
    assert len(data) == ROWS
    assert isinstance(data, NestedSamples)
    assert isinstance(data, Samples) == (isinstance(inputs, Tensor) and isinstance(targets, Tensor))
    for found, nest in zip(data.batch(np.array(indices)), (inputs, targets), strict=True):
        form, tensors = spread(nest)
        found_form, found_tensors = spread(found)
        assert found_form == form
        for got, whole in zip(found_tensors, tensors, strict=True):
            assert torch.equal(got, torch.stack([whole[index] for index in indices]))


@given(NESTS, st.sets(st.integers(1, ROWS - 1)))
@settings(max_examples=200, deadline=None)
def test_batches_joined_are_the_whole(nest: Any, cuts: set[int]) -> None:
    edges = [0, *sorted(cuts), ROWS]
    pieces = [map_nest(lambda leaf, a=a, b=b: leaf[a:b], nest) for a, b in pairwise(edges)]
    assert_same(joined(pieces), nest)


@given(NESTS, st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=200, deadline=None)
def test_only_floating_point_tensors_change_their_dtype(nest: Any, dtype: torch.dtype) -> None:
    form, tensors = spread(nest)
    found_form, found_tensors = spread(moved(nest, torch.device("cpu"), dtype))
    assert found_form == form
    for got, old in zip(found_tensors, tensors, strict=True):
        assert got.dtype == (dtype if old.dtype in (torch.float16, torch.float32, torch.float64) else old.dtype)
        assert torch.equal(got, old.to(got.dtype))


@given(NESTS)
@settings(max_examples=100, deadline=None)
def test_a_leafs_place_leads_to_it(nest: Any) -> None:
    """What an error says of a place is Python that finds it."""
    for (place, leaf), tensor in zip(leaves(nest, "nest"), spread(nest)[1], strict=True):
        assert leaf is tensor
        assert eval(place, {"nest": nest}) is tensor


def test_a_default_dict_keeps_its_default() -> None:
    nest = map_nest(lambda leaf: leaf + 1, defaultdict(lambda: "none", a=torch.zeros(1)))
    assert nest["a"].item() == 1
    assert nest["elsewhere"] == "none"


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_packed_sequence_moves_by_itself(dtype: torch.dtype) -> None:
    """Of unequal, unsorted lengths: its numbers change their dtype, the order of its sequences does not."""
    sequences = [torch.arange(length).to(dtype) for length in (2, 5, 3)]
    packed = moved({"x": pack_sequence(sequences, enforce_sorted=False)}, torch.device("cpu"), torch.float64)["x"]
    assert isinstance(packed, PackedSequence)
    assert packed.data.dtype == (torch.float64 if dtype == torch.float32 else torch.int64)
    assert packed.batch_sizes.dtype == torch.int64
    assert [part.tolist() for part in unpack_sequence(packed)] == [part.tolist() for part in sequences]


def test_what_is_no_tensor_stays() -> None:
    thing = object()
    nest = {"text": "words", "none": None, "number": 0.1, "thing": thing, "array": np.ones(2, dtype=np.float32)}
    found = moved(nest, torch.device("cpu"), torch.float64)
    assert all(found[key] is nest[key] for key in nest)


@pytest.mark.parametrize(
    "batches",
    [
        [torch.tensor(1.0), torch.tensor(2.0)],
        [("a", "b"), ("c",)],
        [{"a": torch.ones(1)}, {"b": torch.ones(1)}],
        [(torch.ones(2, 3), None), (torch.ones(2, 3), torch.ones(2))],
        [pack_sequence([torch.ones(2)]), pack_sequence([torch.ones(2)])],
    ],
    ids=["numbers", "lengths", "keys", "none", "packed"],
)
def test_what_cannot_be_joined_is_refused(batches: list[Any]) -> None:
    with pytest.raises((TypeError, ValueError, LookupError, RuntimeError)):
        joined(batches)


def test_nothing_and_nothing_are_nothing() -> None:
    found = joined([(torch.zeros(2), None), (torch.ones(1), None)])
    assert found[0].tolist() == [0, 0, 1]
    assert found[1] is None
