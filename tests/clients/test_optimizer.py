"""One client's SGD: torch's, to the bit, without what its class imports."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from fedstrata.clients.training import local_optimizer
from fedstrata.core.training import LocalTraining


def descend(optimizer: object, weights: list[Tensor]) -> None:
    """Three steps with given gradients."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        optimizer.zero_grad()  # type: ignore[attr-defined]
        assert all(weight.grad is None for weight in weights)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()  # type: ignore[attr-defined]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_equal_to_the_class_of_torch(momentum: float, decay: float) -> None:
    ours = [torch.ones(7, 3, requires_grad=True), torch.ones(4, requires_grad=True)]
    theirs = [weight.detach().clone().requires_grad_() for weight in ours]
    training = LocalTraining(lr=0.1, lr_decay=0.5, momentum=momentum, weight_decay=decay)
    descend(local_optimizer(training, ours, round=2), ours)
    descend(torch.optim.SGD(theirs, lr=0.05, momentum=momentum, weight_decay=decay, fused=True), theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not torch.equal(ours[0], torch.ones(7, 3))


def test_a_weight_whose_first_gradient_comes_late() -> None:
    """Its velocity starts with that gradient; the others' go on. By hand: v ← 0.5 v + g, w ← w − 0.1 v."""
    early, late = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = local_optimizer(LocalTraining(lr=0.1, momentum=0.5), [early, late], round=1)
    early.grad = torch.tensor([1.0])
    optimizer.step()
    early.grad, late.grad = torch.tensor([1.0]), torch.tensor([2.0])
    optimizer.step()
    optimizer.step()
    assert early.item() == pytest.approx(-0.1 * (1 + 1.5 + 1.75))
    assert late.item() == pytest.approx(-0.1 * (2 + 3))


def test_the_compiler_is_not_imported() -> None:
    """It costs each worker a second or two before its first step."""
    code = """
import sys, torch
from fedstrata.clients.training import local_optimizer
from fedstrata.core.training import LocalTraining
weight = torch.ones(2, requires_grad=True)
optimizer = local_optimizer(LocalTraining(momentum=0.9), [weight], 1)
optimizer.zero_grad()
weight.sum().backward()
optimizer.step()
assert torch.allclose(weight, torch.full((2,), 0.99)), weight
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
