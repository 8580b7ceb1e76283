"""`check_rule`, for whoever writes a rule. A check is a function in one of these modules, with what it expects as text.

The checks call rules through what calls them in a run: `conclude` of `core/state.py`, a client's `ProximalTerm`,
`fit`, the local engine, Flower's codec, and a recipe.
"""

from __future__ import annotations

from fedstrata.testing.report import CheckFailed, Failure, Report
from fedstrata.testing.rule import check_rule

__all__ = ["CheckFailed", "Failure", "Report", "check_rule"]
