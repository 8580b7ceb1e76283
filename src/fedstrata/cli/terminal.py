"""The only way to the terminal.

Names, paths and reasons come from files and machines that are not ours. So no string is markup, what would steer a
terminal is written out (an escape is shown as \\x1b), and where the encoding is not UTF-8 everything is ASCII.
"""

from __future__ import annotations

import codecs
import io
import sys
import traceback
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from fedstrata.core.errors import visible

_LETTERS = """
    – -  − -  … ...  · .  × x  ° deg  ± +-  ½ 1/2  “ "  ” "  ≤ <=  ≥ >=  ∞ inf  ∝ ~  → ->  ← <-  ‖ ||  ⟨ <  ⟩ >  ∇ grad
    Δ Delta  Σ sum  α alpha  β beta  η eta  θ theta  λ lambda  ℓ l  μ mu  π pi  τ tau  ψ psi  ² ^2  ᵀ ^T  ⁺ ^+  ⁻ ^-
    ₀ 0  ₁ 1  ₂ 2  \u0303 ~  ε eps  √ sqrt  ─ -  │ |  ├ +  └ +
"""
"""What fedstrata itself prints that is not ASCII, and how it is written in ASCII."""

_ASCII = str.maketrans(dict(zip(_LETTERS.split()[::2], _LETTERS.split()[1::2], strict=True)))

_ASCII_CELLS = _ASCII | {ord("…"): "~"}
"""After layout an ellipsis is rich's, in the one cell that was left."""

_TO_ASCII = "fedstrata.ascii"


class Console(rich.console.Console):
    """rich's, on stdout or stderr, for text that may be anybody's: strings are shown as they are, in one line each.

    What has a style gets it by `style=`, or by rich.styled.Styled inside of other things.
    """

    def __init__(self, *, stderr: bool = False, **options: Any) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Every string passes here before it is measured and laid out: lines, cells, headings, titles, captions."""
        shown = visible(text)
        return super().render_str(shown if self._speaks_unicode() else _ascii(shown, _ASCII), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Everything else passes here, such as a Text that somebody made, and what rich adds of its own."""
        unicode = self._speaks_unicode()
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                shown = "\n".join(map(visible, segment.text.split("\n")))
                yield segment._replace(text=shown if unicode else _ascii(shown, _ASCII_CELLS))

    def _speaks_unicode(self) -> bool:
        return self.encoding.startswith("utf")


def say(text: str, *, stderr: bool = False) -> None:
    """Write one line, however long it is."""
    Console(stderr=stderr).print(text, soft_wrap=True)


def prepare() -> None:
    """For what others write, such as typer's help: all of it can be encoded, and tracebacks steer no terminal."""
    codecs.register_error(_TO_ASCII, _replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            if stream.encoding.lower().startswith("utf"):
                stream.reconfigure(errors="backslashreplace")  # half a surrogate pair is in no encoding
            else:
                stream.reconfigure(encoding="ascii", errors=_TO_ASCII)
    sys.excepthook = _show_traceback


def _ascii(text: str, letters: dict[int, str]) -> str:
    return text if text.isascii() else text.translate(letters).encode("ascii", "backslashreplace").decode("ascii")


def _replace(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return _ascii(error.object[error.start : error.end], _ASCII_CELLS), error.end


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    for line in "".join(traceback.format_exception(kind, error, trace)).rstrip("\n").split("\n"):
        say(line, stderr=True)
