"""What a node's client remembers: a file for each version, below a folder of the run that it belongs to.

A version is on the disk before the reply leaves that makes the server name it. A file also says which version it was
made from, so that the node can tell what the server may still come back to, and forget the rest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from fedstrata.core.errors import MemoryLost, MessageError
from fedstrata.core.memory import Tag, Version
from fedstrata.core.messages import Order
from fedstrata.nodes.environment import MEMORY

_NAME = re.compile(r"([0-9]{1,9})\.([0-9]{1,6})\.safetensors")
_RUN = re.compile(r"[0-9a-f]{1,64}")


class NodeMemory:
    """The versions of one client in one run."""

    def __init__(self, folder: Path, run: str, client: int) -> None:
        if not _RUN.fullmatch(run):
            raise MessageError("the order does not say which run it belongs to")
        self.client, self._folder = client, folder / run / str(client)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def of(self, order: Order) -> Version:
        """The version that an order starts from; `MemoryLost`, if it is not here."""
        assert order.base is not None
        there = self.tags()
        if order.base not in there:
            raise MemoryLost(self.client, order.base, there)
        return load_file(self._file(order.base))

    def put(self, order: Order, version: Version) -> None:
        """Keep the version that an order made, and forget what nobody comes back to."""
        base = "" if order.base is None else f"{order.base[0]}.{order.base[1]}"
        content = {name: value.contiguous() for name, value in version.items()}
        _write(self._file((order.round, order.attempt)), save(content, {"base": base}))
        self._forget(order)

    def tags(self) -> list[Tag]:
        """The versions that are here."""
        found = (_NAME.fullmatch(file.name) for file in self._folder.iterdir())
        return sorted((int(one[1]), int(one[2])) for one in found if one)

    def _forget(self, order: Order) -> None:
        """The server may come back to round `since`, and to no earlier one: so to what had been accepted by then."""
        needed: set[Tag] = {(order.round, order.attempt)}
        tag = order.base
        while tag is not None and tag not in needed:
            needed.add(tag)
            tag = self._base_of(tag) if tag[0] > order.since else None
        for other in self.tags():
            if other not in needed and other < (order.round, order.attempt):
                self._file(other).unlink(missing_ok=True)

    def _base_of(self, tag: Tag) -> Tag | None:
        try:
            with safe_open(self._file(tag), framework="pt") as file:
                metadata = file.metadata() or {}
        except (OSError, SafetensorError):
            return None
        found = _NAME.fullmatch(f"{metadata.get('base', '')}.safetensors")
        return (int(found[1]), int(found[2])) if found else None

    def _file(self, tag: Tag) -> Path:
        return self._folder / f"{tag[0]}.{tag[1]}.safetensors"


def _write(path: Path, content: bytes) -> None:
    """A file that is there whole or not at all, also after the power went."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def folder_of(config: Mapping[str, object]) -> Path | None:
    """Where a node keeps its memory, by its own configuration or environment."""
    value = config.get("memory") or os.environ.get(MEMORY)
    return Path(str(value)).expanduser() if value else None
