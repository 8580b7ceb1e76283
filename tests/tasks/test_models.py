from __future__ import annotations

import pytest
import torch

from fedstrata.tasks.models import MODELS

MNIST, CIFAR = (1, 28, 28), (3, 32, 32)


@pytest.mark.parametrize(
    ("name", "shape", "options", "parameters"),
    [
        ("logreg", MNIST, {}, 784 * 10 + 10),
        ("mlp", MNIST, {}, 784 * 200 + 200 + 200 * 10 + 10),
        ("mlp", MNIST, {"hidden": 3}, 784 * 3 + 3 + 3 * 10 + 10),
        ("cnn", MNIST, {}, 582_026),
        ("cnn_padded", MNIST, {}, 1_663_370),
        ("tf_cnn", CIFAR, {}, 122_570),
        # 9·(3·2 + 2·2 + 2·4 + 4·4 + 4·8 + 8·8 + 8·16 + 16·16) weights, 2·60 of BatchNorm, 16·2·2 features to 10 classes
        ("vgg9", CIFAR, {"width": 2}, 9 * 514 + 2 * 60 + 64 * 10 + 10),
    ],
)
def test_parameter_counts_and_output_shapes(name, shape, options, parameters):
    model = MODELS[name](shape, 10, **options)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model(torch.zeros(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (2, 33, 47)])
def test_every_model_takes_every_reasonable_shape(name, shape):
    options = {"width": 2} if name == "vgg9" else {}
    assert MODELS[name](shape, 3, **options)(torch.zeros(2, *shape)).shape == (2, 3)


def test_layer_names_read_well():
    layers = {name.split(".")[0] for name, _ in MODELS["cnn"](MNIST, 10).named_parameters()}
    assert layers == {"conv1", "conv2", "fc1", "fc2"}
    names = [name for name, _ in MODELS["vgg9"](CIFAR, 10, width=1).named_parameters()]
    assert names[:4] == ["conv1.weight", "norm1.weight", "norm1.bias", "conv2.weight"]
    assert names[-2:] == ["fc.weight", "fc.bias"]


@pytest.mark.parametrize(("name", "smallest"), [("cnn", 16), ("cnn_padded", 4), ("tf_cnn", 18), ("vgg9", 16)])
def test_images_that_are_too_small(name, smallest):
    options = {"width": 2} if name == "vgg9" else {}
    assert MODELS[name]((1, smallest, smallest), 2, **options)(torch.zeros(2, 1, smallest, smallest)).shape == (2, 2)
    with pytest.raises(ValueError, match=rf"input_shape .* got \(1, {smallest - 1}, {smallest}\)"):
        MODELS[name]((1, smallest - 1, smallest), 2, **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mlp", {"hidden": 0}, "hidden must be at least 1, got 0"),
        ("vgg9", {"width": -1}, "width must be at least 1, got -1"),
        ("logreg", {"classes": 0}, "classes must be at least 1, got 0"),
    ],
)
def test_bad_options_name_the_field(name, options, message):
    with pytest.raises(ValueError, match=message):
        MODELS[name](CIFAR, **{"classes": 10, **options})


@pytest.mark.parametrize(
    ("name", "shape"), [("cnn", (28, 28)), ("vgg9", (0, 28, 28)), ("logreg", (0, 28)), ("mlp", ())]
)
def test_bad_shapes_name_the_field(name, shape):
    with pytest.raises(ValueError, match="input_shape"):
        MODELS[name](shape, 10)


@pytest.mark.parametrize("name", ["logreg", "mlp"])
def test_whatever_has_no_convolutions_takes_inputs_of_any_shape(name):
    assert MODELS[name]((5,), 3)(torch.zeros(2, 5)).shape == (2, 3)
    assert MODELS[name]((2, 4), 3)(torch.zeros(2, 2, 4)).shape == (2, 3)
