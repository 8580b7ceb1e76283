"""The networks of the papers, as plain named stacks of modules: the names are the layer names of every report.

A ReLU stands behind its pooling: it commutes with the maximum, gradients included, and has a quarter of the work there.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

from fedstrata.core.lazy import nn

Shape = tuple[int, ...]
"""Of one input; of an image: channels, height, width."""


def logreg(input_shape: Shape, classes: int) -> nn.Module:
    """Multinomial logistic regression: one linear layer over all inputs."""
    _check_numbers(input_shape=min(input_shape, default=0), classes=classes)
    return _stack(flatten=nn.Flatten(), fc=nn.Linear(math.prod(input_shape), classes))


def mlp(input_shape: Shape, classes: int, hidden: int = 200) -> nn.Module:
    """A two-layer network with ReLU."""
    _check_numbers(input_shape=min(input_shape, default=0), classes=classes, hidden=hidden)
    return _stack(
        flatten=nn.Flatten(),
        fc1=nn.Linear(math.prod(input_shape), hidden),
        relu1=nn.ReLU(),
        fc2=nn.Linear(hidden, classes),
    )


def cnn(input_shape: Shape, classes: int) -> nn.Module:
    """Two 5×5 convolutions without padding and two linear layers: 582,026 parameters on 1×28×28 with 10 classes."""
    return _two_convolutions(input_shape, classes, padding=0, smallest=16)


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


MODELS: dict[str, Callable[..., nn.Module]] = {
    "logreg": logreg,
    "mlp": mlp,
    "cnn": cnn,
    "cnn_padded": cnn_padded,
    "tf_cnn": tf_cnn,
    "vgg9": vgg9,
}
"""Every network by name: a factory (input_shape, classes, **options)."""
