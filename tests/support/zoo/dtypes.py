"""Numbers of all types."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from tests.support.zoo.animals import CLASSES, FEATURES, Animal, register
from tests.support.zoo.ordinary import Net

DTYPES: dict[str, Animal] = {}
add = partial(register, DTYPES)


class ComplexParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(FEATURES // 2 + 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=FEATURES))


class ComplexBuffer(Net):
    turns: Tensor

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        turns = torch.polar(torch.ones(FEATURES), torch.linspace(0, 3, FEATURES))
        self.register_buffer("turns", turns, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if "turns" in self._non_persistent_buffers_set:
            self.turns = self.turns * self.turns[1]
        return self.fc((x * self.turns * self.turns).real)


class HalfBase(Net):
    """A frozen part in bfloat16: its rounding is part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(FEATURES, FEATURES).bfloat16().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.base(x.to(self.base.weight.dtype)).to(x.dtype))


class MixedTypes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(CLASSES, CLASSES).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fc(x).to(self.head.weight.dtype)).to(x.dtype)


add("complex parameters", ComplexParameter, dtype="float32", refused="filter", or_right=True)
add("a complex buffer", lambda: ComplexBuffer(True), dtype="float32", refused="turns", or_right=True)
add("a complex buffer that changes", lambda: ComplexBuffer(False), dtype="float32", refused="turns", or_right=True)
add("a frozen bfloat16 part", HalfBase, dtype="float32")
add("travelling dtypes that differ", MixedTypes, dtype="float32", refused=r"head\.(weight|bias)")
