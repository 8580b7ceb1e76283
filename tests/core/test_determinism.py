"""The scope in which everything is computed."""

from __future__ import annotations

import torch

from fedstrata.core.determinism import steady


def half_of_the_smallest() -> float:
    return float(torch.full((8,), torch.finfo(torch.float32).tiny).mul_(0.5).sum())


def test_one_thread_and_no_subnormals_inside_and_as_before_after() -> None:
    threads = torch.get_num_threads()
    assert half_of_the_smallest() > 0
    with steady():
        assert torch.get_num_threads() == 1
        assert half_of_the_smallest() == 0
        with steady():
            pass
        assert half_of_the_smallest() == 0  # the inner scope leaves what it found
    assert torch.get_num_threads() == threads
    assert half_of_the_smallest() > 0
