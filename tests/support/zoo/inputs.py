"""Data and what it comes in."""

from __future__ import annotations

import random
from collections import namedtuple
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.support.zoo.animals import Animal, changed, dicts_of_tensors, lists_of_samples, packed, register
from tests.support.zoo.ordinary import Net, Recurrent, mlp

INPUTS: dict[str, Animal] = {}
add = partial(register, INPUTS)


class OfTwo(Net):
    def forward(self, x: Any) -> Tensor:
        left, right = (x["left"], x["right"]) if isinstance(x, dict) else (x.left, x.right)
        return self.fc(left - right)


Two = namedtuple("Two", ["left", "right"])

add("augmentation by torch", mlp, changed(lambda x: x + 0.5 * torch.randn(x.shape)))
add("augmentation by NumPy and random", mlp, changed(lambda x: x + float(np.random.normal()) + random.random()))
add("dict inputs", OfTwo, changed(lambda x: {"left": x, "right": x.flip(0)}))
add("namedtuple inputs", OfTwo, changed(lambda x: Two(x, x.flip(0))))
add("PackedSequence inputs", lambda: Recurrent(nn.GRU), packed)
add("dict of tensors", OfTwo, dicts_of_tensors)
add("a list of two samples", Net, lists_of_samples)
add("a list of two samples, perceptron", mlp, lists_of_samples)
