"""How pictures look, by day and by night: colours that also colour-blind eyes tell apart (after Okabe and Ito)."""

from __future__ import annotations

from typing import Any

INKS = ("#0072b2", "#d55e00", "#008660", "#b04a86", "#3a3f47", "#9a6b00", "#2f9ad0", "#7a4fc0")
INKS_BY_NIGHT = ("#56a9e8", "#ff8b3d", "#2fc596", "#e58bbf", "#c3cad3", "#e0b040", "#9fd5f5", "#b79cf0")


def _config(paper: str, inks: tuple[str, ...], text: str, quiet: str, line: str, nothing: str) -> dict[str, Any]:
    written = {"labelColor": quiet, "titleColor": quiet, "titleFontWeight": "normal", "labelFontSize": 11}
    return {
        "background": paper,
        "font": "system-ui, sans-serif",
        "range": {"category": list(inks)},
        "title": {"color": text, "fontSize": 12, "anchor": "start"},
        "axis": {**written, "gridColor": line, "domainColor": quiet, "tickColor": line, "titleFontSize": 11},
        "legend": {**written, "titleFontSize": 11},
        "view": {"stroke": None},
        "rule": {"color": quiet},
        "text": {"color": text},
        "line": {"color": inks[0]},
        "style": {"cells": {"fill": nothing, "stroke": None}},
    }


DAY = _config("#ffffff", INKS, text="#1b2430", quiet="#556070", line="#d9dee5", nothing="#e9ecf0")
NIGHT = _config("#1a2029", INKS_BY_NIGHT, text="#e6eaf0", quiet="#a6b0bd", line="#323b47", nothing="#2a313c")
