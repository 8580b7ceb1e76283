from __future__ import annotations

import math

import numpy as np
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
        ("resnet20", CIFAR, {}, 269_722),
        ("resnet20", CIFAR, {"norm": "group"}, 269_722),
        ("vit", CIFAR, {}, 141_898),
        # 14·14 positions and 4·1·2·2 + 4 of the patches, one block, the last norm, 4 features to 10 classes
        ("vit", MNIST, {"patch": 2, "dim": 4, "depth": 1, "heads": 2}, 14 * 14 * 4 + 20 + 172 + 8 + 50),
    ],
)
def test_parameter_counts_and_output_shapes(name, shape, options, parameters):
    model = MODELS[name](shape, 10, **options)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model(torch.zeros(2, *shape)).shape == (2, 10)


def test_the_parameters_of_a_resnet_are_those_of_the_paper_layer_by_layer():
    """19 convolutions without bias, a weight and a bias per channel of each one's norm, and 64 features to 10 classes.

    3·16, then six of 16·16; 16·32 and five of 32·32; 32·64 and five of 64·64, each 9 times. The channels are 7·16 +
    6·32 + 6·64 = 688. In all 9·29,744 + 2·688 + 650 = 269,722.
    """
    convolutions = 3 * 16 + 6 * 16 * 16 + 16 * 32 + 5 * 32 * 32 + 32 * 64 + 5 * 64 * 64
    assert 9 * convolutions + 2 * 688 + 650 == 269_722
    for norm in ("batch", "group"):
        sizes = {name: tensor.numel() for name, tensor in MODELS["resnet20"](CIFAR, 10, norm=norm).named_parameters()}
        assert sum(size for name, size in sizes.items() if "conv" in name) == 9 * convolutions
        assert sum(size for name, size in sizes.items() if "norm" in name) == 2 * 688
        assert sizes["block4.conv1.weight"] == 9 * 16 * 32
        assert sum("conv" in name for name in sizes) == 19


def test_the_parameters_of_a_transformer_part_by_part():
    """Patches 3·4·4·64 + 64 and positions 8·8·64; a block's norms 4·64, attention 64·192 + 192 + 64·64 + 64, network
    64·128 + 128 + 128·64 + 64; after four of them a norm 2·64, and 64 features to 10 classes.
    """
    block = 4 * 64 + 64 * 192 + 192 + 64 * 64 + 64 + 64 * 128 + 128 + 128 * 64 + 64
    assert 3 * 16 * 64 + 64 + 64 * 64 + 4 * block + 2 * 64 + 650 == 141_898
    assert 4 * 4 + 4 * 12 + 12 + 4 * 4 + 4 + 4 * 8 + 8 + 8 * 4 + 4 == 172


def test_the_shortcut_of_a_block_that_adds_nothing_is_every_second_pixel_and_zeros():
    model = MODELS["resnet20"](CIFAR, 10)
    for block, width, side in ((model.block2, 16, 8), (model.block4, 32, 4)):
        torch.nn.init.zeros_(block.get_parameter("norm2.weight"))
        images = torch.rand(2, 16, 8, 8)
        out = block(images)
        assert out.shape == (2, width, side, side)
        assert torch.equal(out[:, :16], images[:, :, :: 8 // side, :: 8 // side])
        assert not out[:, 16:].any()


def test_group_norm_keeps_no_statistics_and_takes_groups_of_eight_channels():
    model = MODELS["resnet20"](CIFAR, 10, norm="group")
    assert not list(model.buffers())
    assert {m.num_channels // m.num_groups for m in model.modules() if isinstance(m, torch.nn.GroupNorm)} == {8}
    assert len([m for m in MODELS["resnet20"](CIFAR, 10).modules() if isinstance(m, torch.nn.BatchNorm2d)]) == 19


def test_attention_is_the_softmax_of_products_of_each_head():
    """Written out in NumPy for one image, as the paper has it."""
    model = MODELS["vit"]((1, 6, 6), 3, patch=3, dim=6, depth=1, heads=2).double()
    x = torch.rand(1, 4, 6, dtype=torch.float64)
    block = model.block1

    def norm(x, layer):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * layer.weight.detach().numpy() + layer.bias.detach().numpy()

    def linear(x, layer):
        return x @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()

    tokens = x[0].numpy()
    query, key, value = np.split(linear(norm(tokens, block.norm1), block.qkv), 3, axis=1)
    heads = []
    for own in (slice(0, 3), slice(3, 6)):
        weights = np.exp(query[:, own] @ key[:, own].T / np.sqrt(3))
        heads.append(weights / weights.sum(1, keepdims=True) @ value[:, own])
    tokens = tokens + linear(np.concatenate(heads, axis=1), block.out)
    hidden = linear(norm(tokens, block.norm2), block.fc1)
    hidden = hidden * np.vectorize(lambda z: (1 + math.erf(z / math.sqrt(2))) / 2)(hidden)
    np.testing.assert_allclose(block(x)[0].detach().numpy(), tokens + linear(hidden, block.fc2), rtol=1e-9)


def test_a_transformer_sees_where_a_patch_is_and_a_mean_alone_would_not():
    model = MODELS["vit"]((1, 8, 8), 3)
    images = torch.rand(2, 1, 8, 8)
    swapped = torch.cat([images[:, :, 4:], images[:, :, :4]], dim=2)
    assert not torch.allclose(model(images), model(swapped), atol=1e-4)
    with torch.no_grad():
        model.patches.position.zero_()
    torch.testing.assert_close(model(images), model(swapped))


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


@pytest.mark.parametrize(
    ("name", "smallest"), [("cnn", 16), ("cnn_padded", 4), ("tf_cnn", 18), ("vgg9", 16), ("resnet20", 5), ("vit", 4)]
)
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
        ("resnet20", {"norm": "layer"}, "norm must be batch or group, got 'layer'"),
        ("vit", {"heads": 0}, "heads must be at least 1, got 0"),
        ("vit", {"dim": 6}, "dim must be a multiple of heads, got dim = 6 and heads = 4"),
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
