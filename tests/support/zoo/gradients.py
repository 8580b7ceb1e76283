"""Hooks, and parameters that are not always used."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from tests.support.zoo.animals import CLASSES, FEATURES, Animal, register
from tests.support.zoo.ordinary import Net, mlp

GRADIENTS: dict[str, Animal] = {}
add = partial(register, GRADIENTS)


class GradientHook(Net):
    """Every gradient is smaller than the one before."""

    def __init__(self) -> None:
        super().__init__()
        calls: list[None] = []

        def smaller(gradient: Tensor) -> Tensor:
            calls.append(None)
            return gradient / len(calls)

        self.fc.weight.register_hook(smaller)


def hooked_perceptron() -> nn.Module:
    model: Any = mlp()
    model[0].weight.register_hook(lambda gradient: 0.5 * gradient)
    model[2].weight.register_post_accumulate_grad_hook(clip)
    return model


def clip(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.05, 0.05)


class AccumulateHook(Net):
    def __init__(self) -> None:
        super().__init__()
        self.fc.weight.register_post_accumulate_grad_hook(clip)


class HooksLate(Net):
    """Registers hooks in its first forward, once."""

    def __init__(self) -> None:
        super().__init__()
        self.hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.hooked = True
            self.fc.weight.register_hook(lambda gradient: 0.5 * gradient)
            self.fc.register_forward_hook(lambda module, inputs, output: 1.5 * output)
        return self.fc(x)


def with_module_hooks() -> nn.Module:
    """State in closures: a forward hook that counts, a backward hook that alternates."""
    model = mlp()
    calls = {"forward": 0, "backward": 0}

    def louder(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        calls["forward"] += 1
        return output * (1 + 0.1 * calls["forward"])

    def turn(module: nn.Module, inputs: tuple[Tensor, ...], outputs: Any) -> tuple[Tensor, ...]:
        calls["backward"] += 1
        return tuple(gradient / calls["backward"] for gradient in inputs)

    model[2].register_forward_hook(louder)
    model[2].register_full_backward_hook(turn)
    return model


class Unused(Net):
    """Without a gradient there is no weight decay either."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(FEATURES, CLASSES)


class SometimesUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.low(x) if x.sum() < 0 else self.high(x)


add("a gradient hook", GradientHook)
add("a hook after a gradient is accumulated", AccumulateHook)
add("gradient hooks on a perceptron", hooked_perceptron)
add("hooks that forward registers", HooksLate, refused=r"fc\.weight", or_right=True)
add("module hooks with state", with_module_hooks)
add("unused parameters under weight decay", Unused, training={"weight_decay": 0.1})
add("parameters unused in some batches", SometimesUsed, training={"epochs": 2})
