"""Checks for objectives: the proximal term while clients train."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedstrata.testing.cases import all_layers
from fedstrata.testing.report import check, expect
from fedstrata.testing.subject import Subject


@check("objective")
def refresh(subject: Subject) -> None:
    """`refresh` is "round", "epoch" or "step", and "step" for an objective that is differentiable."""
    rule = subject.rule
    expect(rule.refresh in ("round", "epoch", "step"), f"refresh = {rule.refresh!r}")
    expect(isinstance(rule.differentiable, bool), f"differentiable = {rule.differentiable!r}")
    found = f"refresh = {rule.refresh!r}: the second step would go through the graph of the first, which is gone"
    expect(not rule.differentiable or rule.refresh == "step", found)


@check("objective")
def stiffness(subject: Subject) -> None:
    """The stiffness is a number ≥ 0 for a trainable tensor, or numbers that broadcast to its shape and dtype."""
    for what, layers in all_layers().items():
        for when, term in subject.terms(layers):
            term.refresh()
            for name, found in term.stiffness.items():
                where = f"for {name}, {when} ({what})"
                expect(name in layers.entries, f"one {where}, which is no tensor of the model")
                expect(layers.entries[name].trainable, f"one {where}, which is a buffer")
                expect(isinstance(found, Tensor), f"a {type(found).__name__} {where}")
                local, c = term.local[name].detach(), found.detach()
                expect(_fits(c.shape, local.shape), f"shape {list(c.shape)}, for {list(local.shape)}, {where}")
                expect(torch.result_type(c, local) == local.dtype, f"{c.dtype}, for {local.dtype}, {where}")
                expect(c.isfinite().all(), f"NaN, or a number that is infinite, {where}")
                expect((c >= 0).all(), f"{float(c.min()):g} {where}")


def _fits(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether one broadcasts to the other, from its last dimension on."""
    pairs = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(length in (1, whole) for length, whole in pairs)


@check("objective")
def pull(subject: Subject) -> None:
    """The gradient of the proximal term is finite, and zero where training begins."""
    for what, layers in all_layers().items():
        for when, term in subject.terms(layers):
            term.refresh()
            if subject.rule.differentiable and term.stiffness:
                term.energy().backward()  # type: ignore[union-attr]
            else:
                term.pull()
            for name, local in term.local.items():
                if local.grad is not None:
                    where = f"at {name} {when} ({what})"
                    expect(local.grad.isfinite().all(), f"a gradient with NaN or infinity {where}")
                    expect("begins" not in when or not local.grad.any(), f"a gradient that is not zero {where}")
