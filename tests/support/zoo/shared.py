"""Weights that are computed, shared or held elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.support.zoo.animals import CLASSES, FEATURES, Animal, images, register
from tests.support.zoo.ordinary import Net, after, mlp

SHARED: dict[str, Animal] = {}
add = partial(register, SHARED)


def quietly(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Without a word about what is old."""

    def model() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return build()

    return model


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def symmetric() -> nn.Module:
    model = after(nn.Linear(5, 5))
    parametrize.register_parametrization(model[1], "weight", Symmetric())
    return model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.code, self.decode = nn.Linear(FEATURES, 4), nn.Linear(4, FEATURES)
        self.decode.weight = nn.Parameter(self.code.weight.detach().T.clone())
        self.again = nn.Linear(FEATURES, 4, bias=False)
        self.again.weight = self.code.weight
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.again(self.decode(torch.tanh(self.code(x))))))


class Shares(nn.Module):
    """One submodule under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(torch.tanh(self.first(x))))


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.randn(FEATURES)) for _ in range(CLASSES)])
        self.terms = nn.ParameterDict(
            {"shift": nn.Parameter(torch.zeros(CLASSES)), "scale": nn.Parameter(torch.ones(()))}
        )

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.stack(list(self.rows)).T * self.terms["scale"] + self.terms["shift"]


class Alias(Net):
    """Its weight is also held in a list, and used from there."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [self.fc.weight]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.held[0], self.fc.bias)


class ViewOfWeight(Net):
    """A view of the weight, which sees every step."""

    def __init__(self) -> None:
        super().__init__()
        self.row = self.fc.weight.detach()[0]

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        super()._apply(*arguments, **options)
        self.row = self.fc.weight.detach()[0]
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + (x @ self.row).unsqueeze(1) * torch.arange(CLASSES)


class OneStorage(nn.Module):
    """Two parameters that are one in memory: a step of one is a step of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES, bias=False), nn.Linear(FEATURES, FEATURES, bias=False)
        self.second.weight = nn.Parameter(self.first.weight)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(torch.tanh(self.first(x))))


class OddBuffers(Net):
    """Of no number, of one number in many places, and none at all until the first call."""

    places: Tensor
    late: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("places", torch.arange(FEATURES).expand(4, -1), persistent=False)
        self.register_buffer("late", None)
        self.unused = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.late = x.detach().mean(0) if self.late is None else 0.5 * self.late
        return self.fc(x[:, self.places[-1]] + self.late)


class PlainList(Net):
    """A module that nobody registered: it is never trained, but changes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.hidden[1](self.hidden[0](x))
        return self.fc(x + self.hidden[1].get_buffer("running_mean"))


class Views(nn.Module):
    """Reads a convolution's weights as PyTorch says that they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.conv.weight.view(4, -1)
        weight = (rows - rows.mean(1, keepdim=True)).view(self.conv.weight.shape)
        first = self.conv.weight.view(-1)[:5].sum()
        return self.head(torch.relu(F.conv2d(x, weight, self.conv.bias)).flatten(1)) * (1 + first)


class Scaled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.5


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


def with_another_layers_forward() -> nn.Module:
    model: Any = mlp()
    usual = model[2].forward
    model[2].forward = lambda x: usual(x) * 1.5
    return model


def with_another_forward() -> nn.Module:
    """A closure on the instance, which a copy would share."""
    model: Any = mlp()
    usual = model.forward
    model.forward = lambda x: usual(x) * 1.5
    return model


class Lambdas(Net):
    def __init__(self) -> None:
        super().__init__()
        self.compute = lambda x: torch.tanh(self.fc(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)


class Checkpoints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = after(nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


add("weight_norm", lambda: after(parametrizations.weight_norm(nn.Linear(5, 5))))
add("weight_norm, the old kind", quietly(lambda: after(nn.utils.weight_norm(nn.Linear(5, 5)))))
add("spectral_norm", lambda: after(parametrizations.spectral_norm(nn.Linear(5, 5))))
add("spectral_norm, the old kind", quietly(lambda: after(nn.utils.spectral_norm(nn.Linear(5, 5)))))
add("orthogonal", lambda: after(parametrizations.orthogonal(nn.Linear(5, 5))))
add("a parametrization of its own", symmetric)
add("tied weights", Tied)
add("shared submodules", Shares)
add("ParameterList and ParameterDict", Lists)
add("a parameter held in a list, too", Alias)
add("a view of a parameter", ViewOfWeight, refused=r"fc\.weight|row", or_right=True)
add("two parameters in one storage", OneStorage, dtype="float32", refused=r"(first|second)\.weight", or_right=True)
add("odd buffers", OddBuffers)
add("odd buffers, float32", OddBuffers, dtype="float32")
add("modules in a plain list", PlainList, dtype="float32")
add("weight.view on a convolution", Views, images)
add("weight.view on a convolution, float32", Views, images, dtype="float32")
add("a Sequential with its own forward", lambda: Scaled(*mlp()))
add("a Linear with its own forward", lambda: nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), Doubling(5, CLASSES)))
add("a forward put on the instance", with_another_forward)
add("a forward put on a layer", with_another_layers_forward)
add("a lambda over self", Lambdas)
add("checkpointed activations", Checkpoints)
add("torch.jit.script", quietly(lambda: torch.jit.script(after(nn.BatchNorm1d(5)))), refused="[Ss]cript", or_right=True)
