"""The page: a template with its style, its scripts and its content. It asks nothing of any network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from fedstrata.core.errors import UserError
from fedstrata.plots import definitions
from fedstrata.plots.saving import library
from fedstrata.report.view import View
from fedstrata.runs.files import write_whole

_OPENING = "<!doctype html>\n<!-- fedstrata report -->"


def write(paths: Sequence[Path], out: Path) -> tuple[int, list[str]]:
    """Write a report on run and comparison directories; how many bytes it has, and what is wrong with runs left out."""
    if out.exists() and not (out.is_file() and out.read_bytes().startswith(_OPENING.encode())):
        raise UserError(f"--out = {str(out)!r}: exists and is no report; it is not overwritten")
    definitions()  # what is missing is told before anything is read
    view = View.of(paths)
    page = render(collect(view)).encode("utf-8", errors="replace")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, page)
    return len(page), view.left_out


def collect(view: View) -> dict[str, Any]:
    """The view with all its parts. Charts that are the same but for their data are there once."""
    specs: dict[str, int] = {}
    parts = {}
    for name in view.names():
        part = view.part(name)
        if "spec" in part:
            part = {**part, "spec": specs.setdefault(part["spec"], len(specs))}
        parts[name] = part
    return {**view.outline(), "parts": parts, "specs": list(specs)}


def render(content: Mapping[str, Any], script_name: str = "page.js", policy: str = "") -> str:
    """The page as text. The browser is told to run these scripts and no others, and to load nothing but by `policy`."""
    style, script = _file("page.css"), _file(script_name)
    drawing = library() if "sections" in content else ""
    scripts = f"{_source(drawing)} {_source(script)}"
    parts = {
        "policy": f"default-src 'none'; img-src data:; style-src {_source(style)}; script-src {scripts}{policy}",
        "title": html.escape(content.get("title", "")),
        "style": style,
        "data": as_json(content),
        "drawing": drawing,
        "script": script,
    }
    # In one pass, so that no part is searched for the name of another.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _file("page.html"))


def as_json(content: Any) -> str:
    """JSON in which no name, whoever chose it, can end the script element it stands in."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _file(name: str) -> str:
    return resources.files("fedstrata.report").joinpath(name).read_text(encoding="utf-8")
