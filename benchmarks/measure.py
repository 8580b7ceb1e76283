"""What the machine can do, and how much arithmetic a round is."""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedstrata.runs.environment import processor

PACKAGES = ("fedstrata", "torch", "numpy", "flwr", "ray", "pfl", "fedlab")


def slug(text: str) -> str:
    """A name that can be part of a file's name."""
    text = re.sub(r"\((r|tm)\)|\bcpu\b|@.*$|\bprocessor\b", " ", text.lower())
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-") or "unknown"


def machine() -> dict[str, Any]:
    """What the numbers were measured on and with."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
    }


def fastest(work: Callable[[], Any], repetitions: int = 7) -> float:
    """The best time of several: what the machine can do when nothing disturbs it."""
    work()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def peak_gflops(size: int = 2048, threads: int = 2) -> float:
    """Speed of a float32 matrix product on two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    a, b = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)
    seconds = fastest(lambda: torch.mm(a, b, out=out))
    torch.set_num_threads(before)
    return 2 * size**3 / seconds / 1e9


def copy_gbs(megabytes: int = 400) -> float:
    """Memory bandwidth of a copy, read and written bytes together."""
    source = torch.ones(megabytes * 250_000)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / fastest(lambda: target.copy_(source)) / 1e9


def training_flops(model: nn.Module, inputs: Tensor, targets: Tensor, loss: Any = nn.functional.cross_entropy) -> float:
    """Floating-point operations of one training step (forward and backward), per sample."""
    with FlopCounterMode(display=False) as counter:
        loss(model(inputs), targets).backward()
    return counter.get_total_flops() / len(inputs)


def flops_per_round(work: Any, cohorts: Sequence[Sequence[int]]) -> float:
    """The mean over these rounds."""
    inputs, targets = work.client(cohorts[0][0])
    batch = work.training.batch_size
    each = training_flops(work.model(), inputs[:batch], targets[:batch], work.loss)
    local = work.training
    seen = [local.steps * batch if local.steps else local.epochs * size for size in work.sizes.tolist()]
    return each * statistics.mean(float(sum(seen[client] for client in cohort)) for cohort in cohorts)
