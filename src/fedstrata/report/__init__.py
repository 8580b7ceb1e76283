"""A report: runs and comparisons as one HTML page that needs nothing else (docs/report.md).

`content` turns run directories into plain content, `page` puts them into the template; `page.html`, `page.css` and the
scripts are what the browser runs.
"""

from fedstrata.report.content import collect
from fedstrata.report.page import render, write

__all__ = ["collect", "render", "write"]
