"""How a model's named arrays become one flat vector, and arrays again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstrata.core.errors import NotFinite, RecipeError, ReplyError
from fedstrata.core.grouping import Grouping
from fedstrata.core.layers import Layers
from fedstrata.core.messages import keep_layers

Arrays = Mapping[str, np.ndarray]
"""A model of any framework."""

Kind = tuple[np.dtype[Any], tuple[int, ...]]
"""Dtype and shape."""


@dataclass(frozen=True)
class Packing:
    """Which arrays a model has, and where each lies in the flat vector.

    Floating-point arrays are grouped into layers; they lie in the flat vector in the widest of their dtypes, at least
    float32. All others (integers, booleans) only pass through.
    """

    layers: Layers
    dtypes: Mapping[str, np.dtype[Any]]
    passing: Mapping[str, Kind]
    order: tuple[str, ...]

    @classmethod
    def of(cls, model: Mapping[str, Kind], grouping: Grouping, buffers: list[str] | None) -> Packing:
        """From dtypes and shapes."""
        floats = {name: dtype for name, (dtype, _) in model.items() if dtype.kind == "f"}
        passing = {name: kind for name, kind in model.items() if name not in floats}
        for name, (dtype, _) in model.items():
            if dtype.kind not in "iub" and dtype not in (np.float16, np.float32, np.float64):
                problem = "must be float16, float32, float64, an integer or a boolean"
                raise RecipeError(f"arrays.{name}", str(dtype), problem)
        widest = np.result_type(np.float32, *floats.values())
        layers = Layers.of_shapes(
            {name: model[name][1] for name in floats},
            grouping,
            buffers=buffers,
            dtype=torch.float64 if widest == np.float64 else torch.float32,
        )
        return cls(layers, floats, passing, tuple(model))

    @property
    def kinds(self) -> dict[str, Kind]:
        """Dtypes and shapes, in the model's own order."""
        shapes = {name: entry.shape for name, entry in self.layers.entries.items()}
        return {n: self.passing[n] if n in self.passing else (self.dtypes[n], shapes[n]) for n in self.order}

    @cached_property
    def bytes_per_layer(self) -> Tensor:
        """What each layer weighs in the arrays' own dtypes, int64 [L]."""
        sizes = [
            sum((entry.stop - entry.start) * self.dtypes[entry.name].itemsize for entry in layer.entries)
            for layer in self.layers.layers
        ]
        return torch.tensor(sizes, dtype=torch.int64)

    def arrays_of(self, mask: Tensor) -> tuple[str, ...]:
        """The names of the arrays in the layers of a mask, bool [L]."""
        chosen = zip(self.layers.layers, mask.tolist(), strict=True)
        return tuple(entry.name for layer, keep in chosen if keep for entry in layer.entries)

    def flatten(self, arrays: Arrays) -> Tensor:
        """The floating-point arrays as one vector; zero where there are none. Nothing in them is trusted."""
        flat = torch.zeros(self.layers.numel, dtype=self.layers.dtype)
        for name, view in self.layers.views(flat).items():
            if name not in arrays:
                continue
            array = arrays[name]
            if array.dtype.kind != "f":
                raise ReplyError(f"{name} has dtype {array.dtype}, expected {self.dtypes[name]}")
            if array.shape != tuple(view.shape):
                raise ReplyError(f"{name} has shape {list(array.shape)}, expected {list(view.shape)}")
            with np.errstate(over="ignore"):
                array = array.astype(self.dtypes[name])  # a copy, in the dtype that the model has
            if not np.isfinite(array).all():
                raise NotFinite(name)
            view.copy_(torch.from_numpy(array))
        return flat

    def difference(self, arrays: Arrays, model: Tensor, mask: Tensor) -> Tensor:
        """How far the layers of a mask went from the model; zero in the others."""
        update = self.flatten(arrays).sub_(model)
        keep_layers(update, mask, self.layers)
        return update

    def passed(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """The arrays that only pass through."""
        for name, (dtype, shape) in self.passing.items():
            found = arrays[name]
            if (found.dtype, found.shape) != (dtype, shape):
                raise ReplyError(f"{name} is {found.dtype} {list(found.shape)}, expected {dtype} {list(shape)}")
        return {name: arrays[name] for name in self.passing}

    def unflatten(self, flat: Tensor, passed: Arrays) -> dict[str, np.ndarray]:
        """The arrays of a flat vector, in the model's own dtypes and order."""
        views = self.layers.views(flat)
        return {
            name: passed[name] if name in passed else np.array(views[name].numpy(), self.dtypes[name], order="C")
            for name in self.order
        }


def kinds_of(arrays: Arrays) -> dict[str, Kind]:
    """Dtypes and shapes."""
    return {name: (array.dtype, tuple(array.shape)) for name, array in arrays.items()}
