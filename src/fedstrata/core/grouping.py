"""Which tensors are one layer, in words that recipes can say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Grouping = str | Mapping[str, Sequence[str]]
"""`module`, `tensor`, `block`, or a mapping from a layer's name to patterns of tensor names ("conv1.*")."""

GROUPINGS = ("module", "tensor", "block")
