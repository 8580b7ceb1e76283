"""What cannot be copied, or does not repeat."""

from __future__ import annotations

import io
import os
import threading
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.zoo.animals import CLASSES, Animal, register, with_own_generators
from tests.support.zoo.changing import Counts
from tests.support.zoo.ordinary import Net, mlp

UNREPEATABLE: dict[str, Animal] = {}
add = partial(register, UNREPEATABLE)


class HoldsLock(Counts):
    def __init__(self) -> None:
        super().__init__(0)
        self.lock, self.log = threading.Lock(), io.StringIO()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return super().forward(x)


class RefusesCopies(Counts):
    def __init__(self) -> None:
        super().__init__(0)

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is only one of me")


class CountsForAll(Net):
    """A counter on the class: no new module is like the last one."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return self.fc(x) * (1 + 0.1 * self.calls)


class ByTheClock(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * (1 + time.perf_counter_ns() % 1_000_003 / 1e7)


class ByTheSystem(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * (1 + int.from_bytes(os.urandom(4), "little") / 2**36)


def always_the_same() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp()


add("a lock inside", HoldsLock)
add("no copy allowed", RefusesCopies)
add("Task(model=lambda: net)", always_the_same, one_instance=True, refused="model", or_right=True)
add("lazy modules", lambda: nn.Sequential(nn.LazyLinear(CLASSES)), refused=r"0\.weight.*not initialised")
add("a counter on the class", CountsForAll, refused=r"fc\.(weight|bias)")
add("the time", ByTheClock, refused=r"fc\.(weight|bias)")
add("os.urandom", ByTheSystem, refused=r"fc\.(weight|bias)")
add("a Dataset with its own generator", Net, with_own_generators, refused=r"clients\[\d\]")
