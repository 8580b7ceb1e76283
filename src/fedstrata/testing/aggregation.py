"""Identities of what the server makes of updates: checks for weightings, combinations and server steps."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedstrata.core.axes import WithGain
from fedstrata.core.cohort import Cohort
from fedstrata.core.layers import Entry, Layers
from fedstrata.testing.cases import alike, all_layers, chosen, cohort
from fedstrata.testing.report import check, expect
from fedstrata.testing.subject import NEAR, Subject, apart


@check("weighting", "combine")
def equal_updates(subject: Subject) -> None:
    """If all clients send the same update, the model moves by that update, be it one client or more.

    Or by as much of it as a weighting's gain says.
    """
    for what, layers in all_layers().items():
        for count in (1, 2, 5):
            one = alike(cohort(layers, count))
            before, after, _ = subject.first_round(one)
            moved, wanted = after.double() - before.double(), one.updates[0].double()
            if isinstance(subject.rule, WithGain):
                for layer, gain in zip(layers.layers, subject.rule.gain(one).tolist(), strict=True):
                    wanted[layer.start : layer.trainable_stop] *= gain
            share = float(moved @ wanted / wanted.square().sum())
            where = f"{count} client{'s' if count > 1 else ''} ({what})"
            expect(apart(moved, wanted) < NEAR, f"the model moved by about {share:.3g} times the update of {where}")


@check("weighting", "combine", "server")
def no_update_no_step(subject: Subject) -> None:
    """If no client has moved, the model of a first round stays as it is."""
    for what, layers in all_layers().items():
        before, after, _ = subject.first_round(alike(cohort(layers, 4), 0.0))
        expect(apart(after, before) < NEAR, f"it moved by {apart(after, before):.3g} of its size ({what})")


@check("weighting", "combine")
def what_nobody_sent_stays(subject: Subject) -> None:
    """With partial uploads, layers and units that nobody sent stay as they are."""
    for what, layers in all_layers().items():
        for one in filter(subject.takes, (cohort(layers, 5, partial=True), cohort(layers, 5, units=True))):
            before, after, _ = subject.first_round(one)
            moved = [
                entry.name
                for at, layer in enumerate(layers.layers)
                for entry in layer.entries
                for unit in range(entry.units)
                if not (one.sent[:, at] if one.units is None else one.units[:, entry.first_unit + unit]).any()
                and not torch.equal(_unit(after, entry, unit), _unit(before, entry, unit))
            ]
            expect(not moved, f"{', '.join(sorted(set(moved)))} moved ({what})")


def _unit(flat: Tensor, entry: Entry, unit: int) -> Tensor:
    return flat[entry.start : entry.stop].view(entry.units, -1)[unit]


@check("weighting", "combine")
def order_of_clients(subject: Subject) -> None:
    """Nothing depends on the order in which the clients come: what belongs to a client goes by `cohort.clients`."""
    for what, layers in all_layers().items():
        straight = subject.rounds(subject.history(layers))
        turned = subject.rounds([chosen(one, _turned(one)) for one in subject.history(layers)])
        for number, ((state, _), (other, _)) in enumerate(zip(straight, turned, strict=True)):
            first = straight[0][0].model
            away = apart(other.model - first, state.model - first)
            expect(away < NEAR, f"another model after round {number}, by {away:.3g} of the way to it ({what})")


def _turned(one: Cohort) -> list[int]:
    """Another order in each round, so that nothing goes by position in one and comes back by position in the next."""
    rows = list(range(len(one)))
    by = one.round % len(rows)
    return rows[by:] + rows[:by]


@check("weighting", "combine")
def who_sent_nothing_does_not_count(subject: Subject) -> None:
    """A client in the round that sent no layer changes nothing for the others: the model is the one without it."""
    for what, layers in all_layers().items():
        silent = (cohort(layers, 5, partial=True), cohort(layers, 5, units=True), _with_silent(layers))
        for one in filter(subject.takes, silent):
            first, with_it, _ = subject.first_round(one)
            _, without, _ = subject.first_round(chosen(one, range(1, len(one))))
            away = apart(with_it - first, without - first)
            expect(away < NEAR, f"another model, by {away:.3g} of the way to it ({what}); look at `cohort.sent`")


def _with_silent(layers: Layers) -> Cohort:
    """Everybody but the first client sends everything."""
    one = cohort(layers, 4)
    sent = one.sent.clone()
    sent[0] = False
    return replace(one, sent=sent, updates=(torch.zeros_like(one.updates[0]), *one.updates[1:]))


@check("combine")
def weights_on_any_scale(subject: Subject) -> None:
    """Weights have no scale: ten times as large, they give the same model."""
    for what, layers in all_layers().items():
        for when, one in subject.situations(layers).items():
            given = one.sizes[:, None].expand(-1, len(layers))
            small, large = (subject.rule.combine(one.model, one, given * scale) for scale in (1.0, 10.0))
            away = apart(large, small)
            expect(away < NEAR, f"another model, by {away:.3g} of its size, for {when} ({what})")


@check("server")
def buffers_are_adopted(subject: Subject) -> None:
    """Buffers are those of the aggregate: with momentum, say, a variance of BatchNorm could become negative."""
    layers = all_layers()["layers with buffers in float64"]
    state, combine = subject.begin(layers), subject.algorithm().combine.combine
    for one in subject.history(layers):
        after, weights = subject.conclude(state, one)
        aggregate = combine(state.model, replace(one, model=state.model), weights)
        for name, buffer in layers.views(after.model).items():
            wanted = layers.views(aggregate)[name]
            stays = layers.entries[name].trainable or apart(buffer, wanted) < NEAR
            expect(stays, f"{name} is {buffer.tolist()} after round {one.round}, in the aggregate {wanted.tolist()}")
        state = after
