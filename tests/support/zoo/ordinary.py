"""Ordinary modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedstrata.tasks.models import resnet20, vit
from tests.support.zoo.animals import (
    CLASSES,
    CROSS_ENTROPY,
    FEATURES,
    LENGTH,
    MSE,
    WORDS,
    WORDS_RIGHT,
    Animal,
    Changed,
    images,
    of_every_word,
    points,
    register,
    sequences,
    texts,
    themselves,
    with_ignored_targets,
    with_soft_targets,
    words,
)

ORDINARY: dict[str, Animal] = {}
add = partial(register, ORDINARY)


class Net(nn.Module):
    """A linear layer, for animals that are odd elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def mlp(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 5, bias=bias), nn.ReLU(), nn.Linear(5, CLASSES, bias=bias))


def linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, CLASSES))


def one_relu_for_all() -> nn.Sequential:
    relu = nn.ReLU()
    return nn.Sequential(nn.Linear(FEATURES, 5), relu, nn.Linear(5, 5), relu, nn.Linear(5, CLASSES))


def one_layer_twice() -> nn.Sequential:
    middle = nn.Linear(5, 5)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), middle, nn.ReLU(), middle, nn.ReLU(), nn.Linear(5, CLASSES))


def frozen(names: Sequence[str], model: nn.Module) -> nn.Module:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def after(layer: nn.Module, features: int = 5) -> nn.Sequential:
    """A layer between two linear ones."""
    return nn.Sequential(nn.Linear(FEATURES, features), layer, nn.Tanh(), nn.Linear(features, CLASSES))


def cnn(*layers: nn.Module, channels: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 3), *layers, nn.ReLU(), nn.Flatten(), nn.Linear(channels * 16, CLASSES))


def autoencoder() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 3, 3, stride=2), nn.Tanh(), nn.ConvTranspose2d(3, 2, 4, stride=2))


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(4, 5, batch_first=True)
        self.fc = nn.Linear(5, CLASSES)

    def forward(self, x: Any) -> Tensor:
        hidden = self.rnn(x)[1]
        return self.fc((hidden[0] if isinstance(hidden, tuple) else hidden)[-1])


class Embeds(nn.Module):
    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found = self.embedding(x)
        return self.fc(found.mean(1) if found.ndim == 3 else found)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, dropout=0.2, batch_first=True)
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.encoder(x).mean(1))


class TinyGPT(nn.Module):
    """Tied embeddings, and the causal mask as PyTorch makes it: a persistent buffer with −inf."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(WORDS, 4), nn.Embedding(LENGTH, 4)
        self.norm, self.attention = nn.LayerNorm(4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        hidden = self.embedding(x) + self.positions.weight[:length]
        normed = self.norm(hidden)
        mask = self.mask[:length, :length]
        return self.head(hidden + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


add("logistic regression", linear, training={"momentum": 0.0, "weight_decay": 0.0})
add("perceptron", mlp, training={"momentum": 0.0, "weight_decay": 0.0, "epochs": 2})
add("perceptron, float32", mlp, dtype="float32")
add("perceptron, Adam", mlp, training={"optimizer": "adam", "momentum": 0.0, "lr": 0.01})
add("perceptron without bias", lambda: mlp(bias=False))
add("perceptron, a frozen bias", lambda: frozen(["0.bias"], mlp()))
add("perceptron, a frozen first layer", lambda: frozen(["0.weight", "0.bias"], mlp()))
add("perceptron on images", lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 5), nn.ReLU(), nn.Linear(5, 3)), images)
add("perceptron, one ReLU for all", one_relu_for_all)
add("perceptron, one layer twice", one_layer_twice)
add("perceptron, ignored targets", mlp, with_ignored_targets)
add("perceptron, soft targets", mlp, with_soft_targets, metric=CROSS_ENTROPY)
add("perceptron, a Dataset", mlp, lambda: [Changed(pair) for pair in points()])
add("float64 model", lambda: mlp().double())
add("convolutions", cnn, images)
add("convolutions, float32", lambda: cnn(nn.Conv2d(4, 4, 3, padding=1)), images, dtype="float32")
add(
    "depthwise and grouped convolutions",
    lambda: cnn(nn.Conv2d(4, 4, 1, groups=4), nn.Conv2d(4, 4, 1, groups=2)),
    images,
)
add("channels-last convolutions", lambda: cnn().to(memory_format=torch.channels_last), images)  # type: ignore[call-overload]
add("ConvTranspose autoencoder", autoencoder, themselves, loss=F.mse_loss, metric=MSE)
add("BatchNorm1d", lambda: after(nn.BatchNorm1d(5)))
add("BatchNorm2d", lambda: cnn(nn.BatchNorm2d(4)), images)
add("BatchNorm, cumulative average", lambda: after(nn.BatchNorm1d(5, momentum=None)), training={"epochs": 2})
add("GroupNorm", lambda: cnn(nn.GroupNorm(2, 4)), images)
add("LayerNorm", lambda: after(nn.LayerNorm(5)))
add("InstanceNorm with statistics", lambda: cnn(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)), images)
add("Dropout", lambda: after(nn.Dropout(0.4)))
add("AlphaDropout", lambda: after(nn.AlphaDropout(0.3)))
add("Embedding", lambda: Embeds(nn.Embedding(WORDS, 4)), words)
add("EmbeddingBag", lambda: Embeds(nn.EmbeddingBag(WORDS, 4)), words)
add(
    "Embedding, sparse",
    lambda: Embeds(nn.Embedding(WORDS, 4, sparse=True)),
    words,
    training={"momentum": 0.0, "weight_decay": 0.0},
)
add(
    "Embedding, sparse, with momentum",
    lambda: Embeds(nn.Embedding(WORDS, 4, sparse=True)),
    words,
    training={"weight_decay": 0.0},
)
add("LSTM", lambda: Recurrent(nn.LSTM), sequences)
add("GRU", lambda: Recurrent(nn.GRU), sequences)
add("RNN", lambda: Recurrent(nn.RNN), sequences)
add("MultiheadAttention", Attends, sequences)
add("TransformerEncoderLayer", Transformer, sequences)
add("GPT, tied, with an infinite mask", TinyGPT, texts, loss=of_every_word, metric=WORDS_RIGHT)
add("residual net", Residual)
add("ResNet-20", lambda: resnet20((2, 6, 6), CLASSES), images)
add("ResNet-20, GroupNorm", lambda: resnet20((2, 6, 6), CLASSES, norm="group"), images)
add("ViT", lambda: vit((2, 6, 6), CLASSES, patch=2, dim=8, depth=2, heads=2), images)
