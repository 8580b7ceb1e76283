"""How many clients upload a layer, for the selections that have an `n`."""

from __future__ import annotations

from fedstrata.checks import require


def check_n(n: int | None) -> None:
    """Refuse an n below one; that n ≤ K is checked where K is known."""
    require(n is None or n >= 1, "n", n, "must be at least 1")


def resolve_n(n: int | None, clients: int) -> int:
    """The given n, or a fifth of the round's clients (FedLDF's 4 of 20); fewer clients than that: all of them."""
    return min(n if n is not None else max(1, round(clients / 5)), clients)
