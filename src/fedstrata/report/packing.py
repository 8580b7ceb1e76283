"""Many numbers in few characters: five significant decimal digits in three bytes, written as base64.

A number m · 10^(e − 4), with the digits 10000 ≤ m < 100000, becomes 1 + sign + 2 · (m + 100000 · (e + 40)) as a
little-endian number of three bytes; m = 0 is zero, and the code 0 says that there is no value. Decimal digits, because
that is what a page shows: nothing changes between here and there. `unpack` in page.js is the inverse.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from fedstrata.plots.tables import Cells, Table, rounded

DIGITS = 5
_SMALLEST, _LARGEST = -40, 42  # exponents: 83 · 100000 codes with a sign fit into three bytes


def pack(values: np.ndarray) -> str | float | None:
    """The numbers in C order as base64; one number if all are that number, None if none of them is finite."""
    flat = np.asarray(values, dtype=np.float64).ravel()
    known = np.isfinite(flat)
    if not known.any():
        return None
    if known.all() and (flat == flat[0]).all():
        return rounded(flat[0])
    codes = np.zeros(len(flat), dtype=np.uint32)
    codes[known] = _codes(flat[known])
    return base64.b64encode(codes.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes()).decode("ascii")


def _codes(values: np.ndarray) -> np.ndarray:
    size = np.abs(values)
    exponent = np.floor(np.log10(np.where(size > 0, size, 1.0)))
    exponent = np.clip(exponent, _SMALLEST, _LARGEST)
    mantissa = np.rint(size / 10.0 ** (exponent - DIGITS + 1))
    carried = mantissa == 10**DIGITS  # 9.99999 is 10.000
    mantissa, exponent = np.where(carried, 10 ** (DIGITS - 1), mantissa), exponent + carried
    mantissa = np.where(exponent > _LARGEST, 10**DIGITS - 1, np.minimum(mantissa, 10**DIGITS - 1))
    exponent = np.minimum(exponent, _LARGEST)
    codes: np.ndarray = 1 + (values < 0) + 2 * (mantissa + 10**DIGITS * (exponent - _SMALLEST))
    return codes.astype(np.uint32)


def packed(table: Table) -> dict[str, Any]:
    """A table for the page. Names and whole numbers are `of` some values: so many of `each`, or by their place `at`."""
    return {"count": len(table), "columns": {name: _column(column) for name, column in table.columns.items()}}


def packed_cells(cells: Cells) -> dict[str, Any]:
    """A block of clients × layers, of which the page takes a layer or a round."""
    return {**packed(cells.index), "layers": list(cells.layers), "values": pack(cells.values)}


def _column(column: np.ndarray | list[Any]) -> Any:
    if isinstance(column, np.ndarray):
        if not len(column) or not np.isfinite(column).all() or (column % 1).any():
            return pack(column)
        column = column.astype(np.int64).tolist()
    place: dict[Any, int] = {}
    at = [place.setdefault(value, len(place)) for value in column]
    of = list(place)
    each = next((row for row, code in enumerate(at) if code), len(at))  # how often the first one comes first
    if all(code == row // each % len(of) for row, code in enumerate(at)):
        return {"of": of, "each": each}
    return {"of": of, "at": at}
