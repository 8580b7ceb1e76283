"""Checks for selections: who sends which layer."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedstrata.core.axes import SelectsAfterScores, SelectsBefore, SelectsOnClient
from fedstrata.core.messages import SCORE_DTYPE
from fedstrata.testing.cases import all_layers, situations
from fedstrata.testing.report import check, expect
from fedstrata.testing.subject import Subject, random_scores


def _expect_mask(mask: object, shape: list[int], where: str) -> None:
    expect(isinstance(mask, Tensor), f"a {type(mask).__name__} {where}")
    assert isinstance(mask, Tensor)
    expect(mask.dtype == torch.bool, f"{mask.dtype} {where}")
    expect(list(mask.shape) == shape, f"shape {list(mask.shape)}, not {shape}, {where}")


@check("selection")
def mask(subject: Subject) -> None:
    """A mask is a boolean tensor: [K, L] from `draw` and `choose`, for any number of clients; [U] from `pick`."""
    rule = subject.rule
    for what, layers in all_layers().items():
        if isinstance(rule, SelectsOnClient):
            for when, one in situations(layers).items():
                for update in one.updates:
                    _expect_mask(rule.pick(update.clone(), layers), [layers.units], f"for {when} ({what})")
            continue
        for count, selection in subject.for_counts():
            where = f"for {count} client{'s' if count > 1 else ''} ({what})"
            if isinstance(selection, SelectsBefore):
                drawn = selection.draw(count, layers, np.random.default_rng(count))
                _expect_mask(drawn, [count, len(layers)], where)
            elif isinstance(selection, SelectsAfterScores):
                scores = random_scores(count, layers)
                _expect_mask(selection.choose(scores), [count, len(layers)], where)
                _expect_mask(
                    selection.choose(torch.zeros_like(scores)), [count, len(layers)], f"of equal scores {where}"
                )
                left = f"with the scores of one client left, {where}"
                _expect_mask(selection.choose(scores[:1]), [1, len(layers)], left)


@check("selection")
def scores(subject: Subject) -> None:
    """Scores are a finite number for each layer, [L], whatever the update is."""
    rule = subject.rule
    if not isinstance(rule, SelectsAfterScores):
        return
    for what, layers in all_layers().items():
        for when, one in situations(layers).items():
            for update in one.updates:
                found = rule.score(update.clone(), layers)
                where = f"for {when} ({what})"
                expect(isinstance(found, Tensor), f"a {type(found).__name__} {where}")
                expect(list(found.shape) == [len(layers)], f"shape {list(found.shape)}, not {[len(layers)]}, {where}")
                expect(found.to(SCORE_DTYPE).isfinite().all(), f"NaN, or a number that is infinite, {where}")


@check("selection")
def order_of_scores(subject: Subject) -> None:
    """What `choose` wants of a client follows from the scores: in another order, it is the same of everyone."""
    for what, layers in all_layers().items():
        for count, selection in subject.for_counts():
            if not isinstance(selection, SelectsAfterScores):
                return
            given = random_scores(count, layers)
            turned = [*range(1, count), 0]
            same = torch.equal(selection.choose(given[turned]), selection.choose(given)[turned])
            expect(same, f"another choice among {count} clients ({what})")
