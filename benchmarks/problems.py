"""Problems of the benchmarks' own: models and their data, made from a seed. Needs torch and NumPy only.

fedstrata takes them as tasks (`benchmarks.workloads`), the opponents as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Pair = tuple[Tensor, Tensor]
SEED = 0
"""Of all data made here."""


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of right answers."""
    return (outputs.argmax(-1) == targets).double().mean()


@dataclass(frozen=True)
class Problem:
    """A model, every client's inputs and targets, those of the test, and what is minimised."""

    model: Callable[[], nn.Module]
    clients: list[Pair]
    test: Pair
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy


# --- a small GPT ------------------------------------------------------------------------------------------------------

LETTERS = "abcdefghijklmnopqrstuvwxyz "
CONTEXT = 64


class Block(nn.Module):
    """Causal self-attention and a perceptron, each behind a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] to the same."""
        parts = self.attention(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        return x + self.perceptron(self.norm2(x))


class Decoder(nn.Module):
    """A causal decoder over letters: 0.8 million parameters."""

    def __init__(self, width: int = 128, heads: int = 4, blocks: int = 4) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), width)
        self.places = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(LETTERS))

    def forward(self, x: Tensor) -> Tensor:
        """What comes after each letter: [batch, time] to [batch, time, letters]."""
        return self.head(self.norm(self.blocks(self.letters(x) + self.places[: x.shape[1]])))


def next_letter_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over all letters."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def gpt() -> Problem:
    """Sixteen clients who write with the same three hundred words, each with favourites of its own."""
    draw = np.random.default_rng(SEED)
    words = ["".join(draw.choice(list(LETTERS[:-1]), draw.integers(2, 8))) for _ in range(300)]

    def text(favour: np.ndarray, lines: int) -> Pair:
        length = lines * CONTEXT + 1
        chosen = draw.choice(words, length // 3 + 1, p=favour)  # of three letters at least, with the space
        written = " ".join(chosen)[:length]
        letters = torch.tensor([LETTERS.index(letter) for letter in written])
        return letters[:-1].view(lines, CONTEXT), letters[1:].view(lines, CONTEXT)

    favours = draw.dirichlet(np.full(len(words), 0.1), 16)
    clients = [text(favour, 64) for favour in favours]
    return Problem(Decoder, clients, text(favours.mean(0), 512), next_letter_loss)


# --- a large frozen part ----------------------------------------------------------------------------------------------

VOCABULARY, TOPICS, TOKENS = 32_768, 20, 32
OWN = 50
"""Words that belong to a topic."""


class FrozenBase(nn.Module):
    """An encoder of texts with 20 million parameters that stay as they are, and a head for the topic."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(VOCABULARY, 512, mode="mean")
        self.encoder = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 1024), nn.LayerNorm(1024))
        self.requires_grad_(False)
        self.head = nn.Linear(1024, TOPICS)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens] to [batch, topics]."""
        return self.head(self.encoder(self.words(x)))


def frozen() -> Problem:
    """Fifty clients with two hundred texts of four topics each; every third word is one of its topic's own."""
    draw = np.random.default_rng(SEED)

    def texts(topics: np.ndarray) -> Pair:
        shape = (len(topics), TOKENS)
        own = topics[:, None] * OWN + draw.integers(OWN, size=shape)
        tokens = np.where(draw.random(shape) < 1 / 3, own, draw.integers(VOCABULARY, size=shape))
        return torch.from_numpy(tokens), torch.from_numpy(topics)

    clients = [texts(draw.choice(draw.choice(TOPICS, 4, replace=False), 200)) for _ in range(50)]
    return Problem(FrozenBase, clients, texts(draw.integers(TOPICS, size=2000)))


# --- many layers ------------------------------------------------------------------------------------------------------

CLASSES = 10


class Deep(nn.Module):
    """A million parameters in so many equal layers, each beside a shortcut, so that a thousand can be trained."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        width = side(layers)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width] to [batch, classes]: the first of the last layer's outputs."""
        for layer in self.layers:
            x = x + layer(torch.tanh(x)) / len(self.layers) ** 0.5
        return x[:, :CLASSES]


def side(layers: int) -> int:
    """The width with which so many square layers have a million weights."""
    return round((1e6 / layers) ** 0.5)


def deep(layers: int) -> Problem:
    """Ten clients with 64 samples each; the class is the largest of ten linear functions."""
    draw = torch.Generator().manual_seed(SEED)
    width = side(layers)
    x = torch.randn(11, 64, width, generator=draw)
    y = (x @ torch.randn(width, CLASSES, generator=draw)).argmax(-1)
    return Problem(lambda: Deep(layers), list(zip(x[:-1], y[:-1], strict=True)), (x[-1], y[-1]))
