"""Tables that Python objects show of themselves: as text, and as HTML in a notebook.

Names come from files and machines that are not ours, so whatever a table holds is text, and never markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from fedstrata.core.errors import visible


@dataclass(frozen=True, repr=False)
class Table:
    """A heading, the names of the columns, and rows of text. `print` it, or let a notebook show it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __repr__(self) -> str:
        lines = [[visible(cell) for cell in row] for row in (self.columns, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        texts = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([visible(self.title), *texts] if self.title else texts)

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr>{_cells('td', row)}</tr>" for row in self.rows)
        head = f"<thead><tr>{_cells('th', self.columns)}</tr></thead>" if any(self.columns) else ""
        caption = f"<caption>{_text(self.title)}</caption>" if self.title else ""
        return f"<table>{caption}{head}<tbody>{rows}</tbody></table>"


def html(tables: Iterable[Table]) -> str:
    """Several tables, one below the other, for a notebook."""
    return "".join(table._repr_html_() for table in tables)


def _cells(tag: str, texts: Sequence[str]) -> str:
    return "".join(f"<{tag}>{_text(text)}</{tag}>" for text in texts)


def _text(text: str) -> str:
    return escape(visible(text))
