"""Numbers as people read them."""

from __future__ import annotations

import math


def size(count: float) -> str:
    """Bytes for people."""
    if math.isinf(count):
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"


def number(value: float | None) -> str:
    """A metric or a loss for people."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"
