"""Nests: a tensor, or a dict, tuple, namedtuple or list of nests. What a model is given, says, and should have said."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

WHOLE = (Tensor, PackedSequence)
"""What is moved whole; a PackedSequence is a tuple, but no nest."""


def map_nest(function: Callable[..., Any], nest: Any, *others: Any) -> Any:
    """A nest of the same form, with the function of each leaf; given several, of the leaves in the same place."""
    if isinstance(nest, WHOLE) or not isinstance(nest, Mapping | tuple | list):
        return function(nest, *others)
    if isinstance(nest, Mapping):
        parts = {key: map_nest(function, nest[key], *(other[key] for other in others)) for key in nest}
        if not isinstance(nest, MutableMapping):
            return type(nest)(parts)  # type: ignore[call-arg]
        filled = copy.copy(nest)  # a defaultdict, or a class of somebody's own, cannot be made of a dict alone
        for key, part in parts.items():
            filled[key] = part
        return filled
    items = [map_nest(function, *inner) for inner in zip(nest, *others, strict=True)]
    return type(nest)(*items) if hasattr(nest, "_fields") else type(nest)(items)


def leaves(nest: Any, place: str) -> Iterator[tuple[str, Any]]:
    """All leaves, each with its place, as one would write it in Python."""
    if isinstance(nest, WHOLE) or not isinstance(nest, Mapping | tuple | list):
        yield place, nest
        return
    if isinstance(nest, Mapping):
        inner = [(f"{place}[{key!r}]", part) for key, part in nest.items()]
    else:
        fields = getattr(nest, "_fields", None)
        inner = [(f"{place}.{fields[i]}" if fields else f"{place}[{i}]", part) for i, part in enumerate(nest)]
    for at, part in inner:
        yield from leaves(part, at)


def moved(nest: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The nest on a device, its floating-point tensors in a dtype. What is no tensor stays as it is."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, WHOLE):
            return leaf
        kept = dtype if leaf.data.is_floating_point() else leaf.data.dtype
        return leaf.to(device, kept)  # type: ignore[arg-type]  # torch's stub forgets that a PackedSequence takes both

    return map_nest(move, nest)


def joined(nests: Sequence[Any]) -> Any:
    """Batches of one form as one batch."""

    def join(*parts: Any) -> Any:
        return None if all(part is None for part in parts) else torch.cat(parts)

    return map_nest(join, *nests)
