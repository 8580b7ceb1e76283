"""The networks of the papers, as plain named stacks of modules: the names are the layer names of every report.

A ReLU stands behind its pooling: it commutes with the maximum, gradients included, and has a quarter of the work there.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, TypeVar

from fedstrata.core.lazy import nn

Shape = tuple[int, ...]
"""Of one input; of an image: channels, height, width."""

Factory = TypeVar("Factory", bound="Callable[..., nn.Module]")

MODELS: dict[str, Callable[..., nn.Module]] = {}
"""Every network by name: a factory (input_shape, classes, **options)."""


def _named(factory: Factory) -> Factory:
    MODELS[factory.__name__] = factory
    return factory


@_named
def logreg(input_shape: Shape, classes: int) -> nn.Module:
    """Multinomial logistic regression: one linear layer over all inputs."""
    _check_numbers(input_shape=min(input_shape, default=0), classes=classes)
    return _stack(flatten=nn.Flatten(), fc=nn.Linear(math.prod(input_shape), classes))


@_named
def mlp(input_shape: Shape, classes: int, hidden: int = 200) -> nn.Module:
    """A two-layer network with ReLU."""
    _check_numbers(input_shape=min(input_shape, default=0), classes=classes, hidden=hidden)
    return _stack(
        flatten=nn.Flatten(),
        fc1=nn.Linear(math.prod(input_shape), hidden),
        relu1=nn.ReLU(),
        fc2=nn.Linear(hidden, classes),
    )


@_named
def cnn(input_shape: Shape, classes: int) -> nn.Module:
    """Two 5×5 convolutions without padding and two linear layers: 582,026 parameters on 1×28×28 with 10 classes."""
    return _two_convolutions(input_shape, classes, padding=0, smallest=16)


@_named
def cnn_padded(input_shape: Shape, classes: int) -> nn.Module:
    """The same with padding, as McMahan et al. have it: 1,663,370 parameters on 1×28×28 with 10 classes."""
    return _two_convolutions(input_shape, classes, padding=2, smallest=4)


def _two_convolutions(input_shape: Shape, classes: int, padding: int, smallest: int) -> nn.Module:
    _check_image(input_shape, smallest)
    _check_numbers(classes=classes)

    def side(pixels: int) -> int:
        lost = 4 - 2 * padding
        return ((pixels - lost) // 2 - lost) // 2

    channels, height, width = input_shape
    return _stack(
        conv1=nn.Conv2d(channels, 32, 5, padding=padding),
        pool1=nn.MaxPool2d(2),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(32, 64, 5, padding=padding),
        pool2=nn.MaxPool2d(2),
        relu2=nn.ReLU(),
        flatten=nn.Flatten(),
        fc1=nn.Linear(64 * side(height) * side(width), 512),
        relu3=nn.ReLU(),
        fc2=nn.Linear(512, classes),
    )


@_named
def tf_cnn(input_shape: Shape, classes: int) -> nn.Module:
    """The TensorFlow tutorial's network of three 3×3 convolutions: 122,570 parameters on 3×32×32 with 10 classes."""
    _check_image(input_shape, smallest=18)
    _check_numbers(classes=classes)

    def side(pixels: int) -> int:
        return ((pixels - 2) // 2 - 2) // 2 - 2

    channels, height, width = input_shape
    return _stack(
        conv1=nn.Conv2d(channels, 32, 3),
        pool1=nn.MaxPool2d(2),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(32, 64, 3),
        pool2=nn.MaxPool2d(2),
        relu2=nn.ReLU(),
        conv3=nn.Conv2d(64, 64, 3),
        relu3=nn.ReLU(),
        flatten=nn.Flatten(),
        fc1=nn.Linear(64 * side(height) * side(width), 64),
        relu4=nn.ReLU(),
        fc2=nn.Linear(64, classes),
    )


@_named
def vgg9(input_shape: Shape, classes: int, width: int = 64) -> nn.Module:
    """Eight 3×3 convolutions with BatchNorm, width doubling with every pooling (after 2, 4, 6, 8), one linear layer."""
    _check_image(input_shape, smallest=16)
    _check_numbers(classes=classes, width=width)
    channels, height, image_width = input_shape
    modules: dict[str, nn.Module] = {}
    for number in range(1, 9):
        wider = width * 2 ** ((number - 1) // 2)
        # BatchNorm's shift makes a bias of the convolution redundant.
        modules[f"conv{number}"] = nn.Conv2d(channels, wider, 3, padding=1, bias=False)
        modules[f"norm{number}"] = nn.BatchNorm2d(wider)
        if number % 2 == 0:
            modules[f"pool{number}"] = nn.MaxPool2d(2)
        modules[f"relu{number}"] = nn.ReLU()
        channels = wider
    features = channels * (height // 16) * (image_width // 16)
    return _stack(**modules, flatten=nn.Flatten(), fc=nn.Linear(features, classes))


@_named
def resnet20(input_shape: Shape, classes: int, norm: Literal["batch", "group"] = "batch") -> nn.Module:
    """He et al.'s network for CIFAR-10: 19 3×3 convolutions and a linear layer, 269,722 parameters on 3×32×32.

    `norm="group"`: GroupNorm, in groups of 8 channels, which keeps no statistics of a client's data.
    """
    from fedstrata.tasks.networks import Residual

    _check_image(input_shape, smallest=5)
    _check_numbers(classes=classes)

    def normalise(channels: int) -> nn.Module:
        return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(channels // 8, channels)

    if norm not in ("batch", "group"):
        raise ValueError(f"norm must be batch or group, got {norm!r}")
    modules: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(input_shape[0], 16, 3, padding=1, bias=False),
        "norm1": normalise(16),
        "relu1": nn.ReLU(),
    }
    channels = 16
    for number in range(9):
        width = 16 * 2 ** (number // 3)
        modules[f"block{number + 1}"] = Residual(channels, width, normalise)
        channels = width
    return _stack(**modules, pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(channels, classes))


@_named
def vit(input_shape: Shape, classes: int, patch: int = 4, dim: int = 64, depth: int = 4, heads: int = 4) -> nn.Module:
    """A small vision transformer (Dosovitskiy et al. 2021): 141,898 parameters on 3×32×32 with 10 classes.

    Learned positions, LayerNorm before each part of a block, and the mean over all patches in place of a class token.
    """
    from fedstrata.tasks.networks import Mean, Patches, TransformerBlock

    _check_numbers(classes=classes, patch=patch, dim=dim, depth=depth, heads=heads)
    _check_image(input_shape, smallest=patch)
    if dim % heads:
        raise ValueError(f"dim must be a multiple of heads, got dim = {dim} and heads = {heads}")
    channels, height, width = input_shape
    blocks = {f"block{number}": TransformerBlock(dim, heads) for number in range(1, depth + 1)}
    return _stack(
        patches=Patches(channels, height, width, patch, dim),
        **blocks,
        norm=nn.LayerNorm(dim),
        mean=Mean(),
        fc=nn.Linear(dim, classes),
    )


def _stack(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


def _check_image(input_shape: Shape, smallest: int) -> None:
    if len(input_shape) != 3 or min(input_shape) < 1 or min(input_shape[1:]) < smallest:
        raise ValueError(
            f"input_shape must be (channels, height, width) of at least {smallest}×{smallest} pixels, got {input_shape}"
        )


def _check_numbers(**sizes: int) -> None:
    for field, value in sizes.items():
        if value < 1:
            raise ValueError(f"{field} must be at least 1, got {value}")
