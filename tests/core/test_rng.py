"""All randomness is a function of (seed, round, attempt, client, purpose)."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from fedstrata.core import rng

BASE = {"seed": 3, "purpose": "batches", "round": 5, "attempt": 1, "client": 7}
OTHERS = {"seed": 4, "purpose": "sample", "round": 6, "attempt": 2, "client": 8}


def draw(**arguments: object) -> tuple[int, ...]:
    return tuple(rng.generator(**arguments).integers(0, 2**62, 4).tolist())  # type: ignore[arg-type]


def draw_global(**arguments: object) -> tuple[object, ...]:
    with rng.global_scope(**arguments):  # type: ignore[arg-type]
        return float(torch.rand(())), float(np.random.rand()), random.random()


@pytest.mark.parametrize("function", [draw, draw_global])
def test_same_arguments_same_numbers(function) -> None:
    assert function(**BASE) == function(**BASE)


@pytest.mark.parametrize("function", [draw, draw_global])
@pytest.mark.parametrize("argument", list(OTHERS))
def test_every_argument_matters(function, argument: str) -> None:
    before, after = function(**BASE), function(**{**BASE, argument: OTHERS[argument]})
    assert all(x != y for x, y in zip(before, after, strict=True)), "torch, NumPy and Python alike"


def test_arguments_are_not_confused_with_each_other() -> None:
    """Small numbers in each place: 3⁴ different combinations give 3⁴ different streams."""
    streams = {
        draw(seed=s, purpose="p", round=r, attempt=a, client=c)
        for s, r, a, c in itertools.product(range(3), range(3), range(3), (-1, 0, 1))
    }
    assert len(streams) == 81
    assert draw(seed=1, purpose="p", round=11) != draw(seed=11, purpose="p", round=1)


def test_the_server_is_nobodys_client() -> None:
    assert draw(seed=0, purpose="p") == draw(seed=0, purpose="p", client=rng.SERVER)
    assert draw(seed=0, purpose="p") != draw(seed=0, purpose="p", client=0)


def test_a_generator_does_not_depend_on_the_global_ones() -> None:
    torch.manual_seed(1)
    first = draw(**BASE)
    torch.manual_seed(2)
    np.random.seed(2)
    random.seed(2)
    assert draw(**BASE) == first


def test_numbers_are_the_same_everywhere() -> None:
    """A history made elsewhere can be continued here: the stream is fixed by SHA-256 and Philox, not by a platform."""
    values = rng.generator(0, "sample", round=1).integers(0, 1000, 5).tolist()
    assert values == rng.generator(0, "sample", round=1, attempt=0, client=-1).integers(0, 1000, 5).tolist()
    assert isinstance(rng.generator(0, "sample").bit_generator, np.random.Philox)


def after_scope(fail: bool) -> tuple[float, float, float]:
    torch.manual_seed(11)
    np.random.seed(11)
    random.seed(11)
    try:
        with rng.global_scope(0, "train", round=1, client=2):
            torch.rand(10)
            np.random.rand(3)
            random.random()
            if fail:
                raise RuntimeError("the user's code")
    except RuntimeError:
        pass
    return float(torch.rand(())), float(np.random.rand()), random.random()


@pytest.mark.parametrize("fail", [False, True], ids=["normally", "after an error"])
def test_global_scope_restores_torch_numpy_and_python(fail: bool) -> None:
    torch.manual_seed(11)
    np.random.seed(11)
    random.seed(11)
    undisturbed = float(torch.rand(())), float(np.random.rand()), random.random()
    assert after_scope(fail) == undisturbed


def test_global_scope_does_not_depend_on_what_was_before() -> None:
    torch.manual_seed(1)
    first = draw_global(**BASE)
    torch.manual_seed(2)
    np.random.seed(5)
    random.seed(5)
    assert draw_global(**BASE) == first
