"""The networks of `models.py` that are more than a stack of torch's own modules."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Two 3×3 convolutions with norms, and a shortcut without parameters (He et al. 2016, option A).

    Where the channels become more, every second pixel is left out, and zeros stand for the channels that the shortcut
    lacks.
    """

    def __init__(self, channels: int, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stride, self.missing = 1 if width == channels else 2, width - channels
        self.conv1 = nn.Conv2d(channels, width, 3, self.stride, padding=1, bias=False)
        self.norm1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = norm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Residual + shortcut, then ReLU."""
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        return F.relu(out + F.pad(shortcut, (0, 0, 0, 0, 0, self.missing)))


class Patches(nn.Module):
    """An image as a sequence of square patches, each a vector with its position added."""

    def __init__(self, channels: int, height: int, width: int, patch: int, dim: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, dim, patch, stride=patch)
        self.position = nn.Parameter(torch.empty((height // patch) * (width // patch), dim))
        nn.init.normal_(self.position, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        """[B, C, H, W] to [B, patches, dim]."""
        return self.project(images).flatten(2).transpose(1, 2) + self.position  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """Self-attention and a two-layer network, each behind a LayerNorm and around a shortcut."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, 2 * dim)
        self.fc2 = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, tokens, dim] to the same."""
        batch, tokens, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, dim))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))  # type: ignore[no-any-return]


class Mean(nn.Module):
    """The mean over a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, tokens, dim] to [B, dim]."""
        return x.mean(1)
