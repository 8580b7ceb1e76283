"""What the last bits of a result depend on besides the code: versions, and the processor."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np

from fedstrata._version import __version__
from fedstrata.core.lazy import torch

Versions = dict[str, str]

_DECIDE_BITS = ("torch", "numpy", "cpu", "processor")
"""The versions with which the last bits of a result may change."""


def versions() -> Versions:
    """What a run's numbers may depend on."""
    return {
        "fedstrata": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "processor": processor(),
    }


def processor() -> str:
    """What the kernel calls it, or "unknown"."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def differences(before: Versions, after: Versions) -> list[str]:
    """What bits may depend on, where it is another: "torch 2.12.0 → 2.13.0"."""
    pairs = [(name, before.get(name, "unknown"), after.get(name, "unknown")) for name in _DECIDE_BITS]
    return [f"{name} {old} → {new}" for name, old, new in pairs if old != new]
