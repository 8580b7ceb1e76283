"""Checks of the form of answers: weights, models, states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors.numpy import load, save
from torch import Tensor

from fedstrata.core.axes import WithGain
from fedstrata.core.layers import Layers
from fedstrata.core.state import grown
from fedstrata.testing.cases import CLIENTS, all_layers
from fedstrata.testing.report import Unmet, check, expect
from fedstrata.testing.subject import Subject, kind_of, same


@check("weighting")
def weights(subject: Subject) -> None:
    """Weights are float64 [K, L], finite and not negative, whatever the updates are and whoever sent what."""
    for what, layers in all_layers().items():
        for when, one in subject.situations(layers).items():
            found, _ = subject.rule.weigh(one, subject.begin(layers).weighting)
            where = f"for {when} ({what})"
            shape = [len(one), len(layers)]
            expect(isinstance(found, Tensor), f"a {type(found).__name__} {where}")
            expect(list(found.shape) == shape, f"shape {list(found.shape)}, not {shape}, {where}")
            expect(found.dtype == torch.float64, f"{found.dtype} {where}")
            sent = found[one.sent]
            _expect_all(found.isfinite(), found, where)
            _expect_all(found >= 0, found, where)
            expect(not len(sent) or sent.max() > 0, f"no upload counts {where}")


@check("weighting")
def gain(subject: Subject) -> None:
    """A gain is a finite number ≥ 0 for each layer, [L], whatever the updates are and whoever sent what."""
    for what, layers in all_layers().items() if isinstance(subject.rule, WithGain) else ():
        for when, one in subject.situations(layers).items():
            found = subject.rule.gain(one)
            where = f"for {when} ({what})"
            expect(list(found.shape) == [len(layers)], f"shape {list(found.shape)}, not {[len(layers)]}, {where}")
            _expect_all(found.isfinite() & (found >= 0), found, where)


def _expect_all(fine: Tensor, values: Tensor, where: str) -> None:
    wrong = values[~fine].tolist()
    expect(not wrong, f"{wrong[0] if wrong else 0:g} {where}")


@check("weighting", "combine", "server")
def model_has_its_form(subject: Subject) -> None:
    """The new model is finite, in the shape and dtype of the old one, whatever the updates are, whoever sent what."""
    for what, layers in all_layers().items():
        for when, one in subject.situations(layers).items():
            before, after, _ = subject.first_round(one)
            where = f"for {when} ({what})"
            expect(after.shape == before.shape, f"shape {list(after.shape)}, not {list(before.shape)}, {where}")
            expect(after.dtype == before.dtype, f"{after.dtype}, not {before.dtype}, {where}")
            _expect_all(after.isfinite(), after, where)


STATEFUL = ("objective", "weighting", "server")


def _states(subject: Subject) -> Iterator[tuple[str, Layers, list[Any]]]:
    for what, layers in all_layers().items():
        yield what, layers, [getattr(state, subject.axis) for state, _ in subject.rounds(subject.history(layers))]


@check(*STATEFUL)
def state_has_one_form(subject: Subject) -> None:
    """A state is a mapping from names to tensors without NaN, with the names, shapes and dtypes of `init` for ever."""
    for what, _, (first, *later) in _states(subject):
        for number, state in enumerate([first, *later]):
            when = f"after round {number} ({what})" if number else f"from init ({what})"
            expect(isinstance(state, Mapping), f"a {type(state).__name__} {when}")
            for name, tensor in state.items():
                expect(isinstance(name, str), f"the name {name!r} {when}")
                expect(isinstance(tensor, Tensor), f"{name!r} is a {type(tensor).__name__} {when}")
                expect(not tensor.isnan().any(), f"{name!r} has NaN {when}")
            kinds = {name: kind_of(tensor) for name, tensor in state.items()}
            expected = {name: kind_of(tensor) for name, tensor in first.items()}
            expect(kinds == expected, f"{kinds} {when}; from init {expected}")


@check(*STATEFUL)
def state_can_be_saved(subject: Subject) -> None:
    """A state that is saved as safetensors and loaded is the same, bit for bit."""
    for what, _, states in _states(subject):
        state = states[-1]
        try:
            arrays = load(save({name: tensor.detach().contiguous().numpy() for name, tensor in state.items()}))
            loaded = {name: torch.from_numpy(array) for name, array in arrays.items()}
        except Exception as error:
            raise Unmet(f"{type(error).__name__}: {error} ({what})") from None
        wrong = [name for name, tensor in state.items() if not same(loaded[name], tensor.detach())]
        expect(not wrong, f"{', '.join(wrong)} is different ({what})")


@check("weighting")
def state_has_room_for_more_clients(subject: Subject) -> None:
    """`init` gives a client the same numbers however many clients there are: a server may meet new ones later."""
    for what, layers in all_layers().items():
        init = subject.rule.init
        for fewer in (0, 1, 5):
            small, large = init(fewer, layers), init(CLIENTS, layers)
            expect(small.keys() == large.keys(), f"other names where clients = {fewer} ({what})")
            for name, tensor in grown(small, large).items():
                found = f"{name!r} where clients = {fewer} is not the beginning of {name!r} where clients = {CLIENTS}"
                expect(same(tensor, large[name]), f"{found} ({what})")
