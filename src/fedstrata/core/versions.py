"""The versions of many clients' memory, where one process keeps them."""

from __future__ import annotations

from dataclasses import replace

from fedstrata.core.errors import MemoryLost
from fedstrata.core.memory import OWN, PRIVATE, Tag, Version
from fedstrata.core.messages import Answer, Order
from fedstrata.core.status import Status


class Versions:
    """The versions of many clients, as far as this process keeps them. It grows with the clients that took part."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[Tag, Version]] = {}

    def of(self, client: int, tag: Tag) -> Version:
        """A version; `MemoryLost`, if it is not here."""
        kept = self._kept.get(client, {})
        if tag not in kept:
            raise MemoryLost(client, tag, kept)
        return kept[tag]

    def put(self, client: int, tag: Tag, version: Version) -> None:
        """Keep a version."""
        self._kept.setdefault(client, {})[tag] = version

    def attached(self, order: Order) -> Order:
        """An order with the version that it names. A client that trains from it needs none that are older."""
        if order.base is None:
            return order
        version = self.of(order.client, order.base)
        if order.kind == "train":
            self._kept[order.client] = {order.base: version}
        elif order.kind == "evaluate":
            version = {name: version[name] for name in (PRIVATE, OWN) if name in version}
        return replace(order, memory=version)

    def detached(self, order: Order, answer: Answer) -> Answer:
        """An answer without the new version, which stays here."""
        if isinstance(answer, Status) or answer.memory is None:
            return answer
        self.put(order.client, (order.round, order.attempt), answer.memory)
        return replace(answer, memory=None, candidate=None)
