"""What the selections that take n of a round's clients have in common."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from fedstrata.core.errors import require


@dataclass(frozen=True)
class SomeClients:
    """`n` clients; by default a fifth of the round's, as FedLDF's 4 of 20."""

    n: int | None = None

    def __post_init__(self) -> None:
        require(self.n is None or self.n >= 1, "n", self.n, "must be at least 1")

    def for_cohort(self, clients: int) -> Self:
        """The selection for a round of K clients: its n, or a fifth of them."""
        return self if self.n is not None else replace(self, n=max(1, round(clients / 5)))

    def check_cohort(self, clients: int) -> None:
        """Refuse an n that no round of K clients can have."""
        require(self.n is None or self.n <= clients, "n", self.n, f"must be at most the clients of a round, {clients}")

    def count(self, clients: int) -> int:
        """How many of the clients that are left: all, if fewer than n are."""
        return clients if self.n is None else min(self.n, clients)
