"""A report: runs and comparisons as one HTML page that needs nothing else (docs/report.md).

`view` has the parts of the page, `sections` says what is where, and `page` puts them into the template; `page.html`,
`page.css` and `page.js` are what the browser runs, with the charts of `fedstrata.plots`.
"""

from fedstrata.report.page import collect, render, write
from fedstrata.report.view import View

__all__ = ["View", "collect", "render", "write"]
