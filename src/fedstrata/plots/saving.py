"""Charts as files, and what a browser needs to draw them; both come with vl-convert, and nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from fedstrata.core.errors import MissingExtra, UserError

FORMATS = ("svg", "png", "pdf")


def _converter() -> Any:
    try:
        import vl_convert
    except ImportError as error:
        raise MissingExtra("altair and vl-convert-python", "plots", "drawing pictures") from error
    return vl_convert


def written(chart: Mapping[str, Any], form: str) -> bytes:
    """A chart, as the dict that describes it, as a file of this form."""
    if form not in FORMATS:
        raise UserError(f"format = {form!r}: there are {', '.join(FORMATS)}")
    converter, text = _converter(), json.dumps(chart)
    if form == "svg":
        return str(converter.vegalite_to_svg(text)).encode()
    if form == "png":
        return bytes(converter.vegalite_to_png(text, scale=2))
    return bytes(converter.vegalite_to_pdf(text))


@lru_cache(maxsize=1)
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, with the interpreter that needs no `eval`; it defines vegaEmbed."""
    script = _converter().javascript_bundle("globalThis.vegaEmbed = vegaEmbed;")
    return f"(() => {{{script}\n}})();"  # its names are its own
