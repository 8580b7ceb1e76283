"""The parts of a view, as a page reads them: slowly, and with exact decimals."""

from __future__ import annotations

import base64
import json
import math
import re
from decimal import Decimal
from typing import Any

import numpy as np


def unpacked(block: Any, count: int) -> list[float]:
    """The inverse of `pack`."""
    if not isinstance(block, str):
        return [math.nan if block is None else block] * count
    raw = base64.b64decode(block)
    assert len(raw) == 3 * count
    values = []
    for at in range(count):
        code = int.from_bytes(raw[3 * at : 3 * at + 3], "little")
        if code == 0:
            values.append(math.nan)
            continue
        power, mantissa = divmod((code - 1) // 2, 100_000)
        value = Decimal(mantissa).scaleb(power - 44)
        values.append(float(-value if (code - 1) % 2 else value))
    return values


def columns(part: dict[str, Any]) -> dict[str, list[Any]]:
    """The columns of a table of pictures."""
    found = {}
    for name, column in part["columns"].items():
        if isinstance(column, dict) and "each" in column:
            of, each = column["of"], column["each"]
            found[name] = [of[row // each % len(of)] for row in range(part["count"])]
        elif isinstance(column, dict):
            found[name] = [column["of"][at] for at in column["at"]]
        else:
            found[name] = unpacked(column, part["count"])
    return found


def cells(part: dict[str, Any]) -> np.ndarray:
    """A block of clients and layers: rows × layers."""
    layers = len(part["layers"])
    return np.array(unpacked(part["values"], part["count"] * layers)).reshape(part["count"], layers)


def texts(part: dict[str, Any]) -> list[list[str]]:
    """The rows of a table of words, as they are read."""
    return [[cell if isinstance(cell, str) else cell["text"] for cell in row] for row in part["rows"]]


def on_page(page: str) -> dict[str, Any]:
    """What a page holds."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def until(page: Any, function: str, *arguments: Any) -> None:
    """Wait; Playwright's own way to do so needs `eval`, which these pages do not have."""
    for _ in range(300):
        if page.evaluate(function, *arguments):
            return
        page.wait_for_timeout(50)
    raise AssertionError(function)
