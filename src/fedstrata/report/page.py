"""The page: a template with its style, its script and its content. It asks nothing of any network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from fedstrata.core.errors import UserError
from fedstrata.report.content import collect
from fedstrata.runs.files import write_whole

_SCRIPTS = ("data.js", "draw.js", "page.js")
_OPENING = "<!doctype html>\n<!-- fedstrata report -->"


def write(paths: Sequence[Path], out: Path) -> tuple[int, list[str]]:
    """Write a report on run and comparison directories; how many bytes it has, and what is wrong with runs left out."""
    if out.exists() and not (out.is_file() and out.read_bytes().startswith(_OPENING.encode())):
        raise UserError(f"--out = {str(out)!r}: exists and is no report; it is not overwritten")
    content = collect(paths)
    page = render(content).encode("utf-8", errors="replace")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, page)
    return len(page), content["leftOut"]


def render(content: dict[str, Any]) -> str:
    """The page as text. The browser is told to run this script and no other, and to load nothing."""
    style, script = _file("page.css"), "".join(map(_file, _SCRIPTS))
    policy = f"default-src 'none'; img-src data:; style-src {_source(style)}; script-src {_source(script)}"
    parts = {
        "policy": policy,
        "title": html.escape(content["title"]),
        "style": style,
        "data": _json(content),
        "script": script,
    }
    # In one pass, so that no part is searched for the name of another.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _file("page.html"))


def _json(content: dict[str, Any]) -> str:
    """JSON in which no name, whoever chose it, can end the script element it stands in."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _file(name: str) -> str:
    return resources.files("fedstrata.report").joinpath(name).read_text(encoding="utf-8")
