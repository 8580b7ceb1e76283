"""What a layer is: an ordered partition of a model's travelling tensors, laid out in one flat vector.

A model travels as a flat vector of P numbers. Layer after layer lie in it, and within a layer first the trainable
parameters, which angles, divergences and penalties measure, and then the floating-point buffers, which only ride along
(BatchNorm's statistics). Frozen parameters and integer buffers do not travel; a tied parameter is kept once.

A *unit* is an output neuron: an index of a weight's first dimension, together with the entries of the bias and of the
normalisation that belong to it.

Private layers never travel. The vector that a client trains has them behind all others: `Layers` are those that travel,
its head, and `Layers.whole` goes on with the tail. Everybody but the client and its memory knows the head only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from fedstrata.core.display import Table
from fedstrata.core.errors import RecipeError, visible
from fedstrata.core.grouping import GROUPINGS, Grouping


@dataclass(frozen=True)
class Entry:
    """One tensor of the model: where it lies in the flat vector and which units its rows are."""

    name: str
    shape: tuple[int, ...]
    trainable: bool
    start: int
    stop: int
    first_unit: int
    units: int
    inputs: int | None
    """The dimension, 0 or 1, that counts the neurons which these weights leave, the other one those which they enter.

    None, if these are no weights between neurons: a bias, a normalisation, a buffer.
    """
    groups: int
    """Of a convolution. Dimension 0 counts the neurons of all groups, dimension 1 those of each."""

    def of(self, flat: Tensor) -> Tensor:
        """This tensor's part of flat vectors [..., P], as [..., *shape]; it shares their memory."""
        return self.shaped(flat[..., self.start : self.stop])

    def shaped(self, part: Tensor) -> Tensor:
        """This tensor's numbers [..., numbers] as [..., *shape].

        The weights of convolutions lie channels last, the layout in which they are computed fastest on a CPU.
        """
        if len(self.shape) == 1:
            return part
        if len(self.shape) != 4:
            return part.view((*part.shape[:-1], *self.shape))
        out, channels, height, width = self.shape
        return part.view(*part.shape[:-1], out, height, width, channels).movedim(-1, -3)

    def flatten(self, tensor: Tensor) -> Tensor:
        """The inverse of `shaped`: [..., *shape] as [..., numbers], in the order of the flat vector."""
        if len(self.shape) == 4:
            tensor = tensor.movedim(-3, -1)
        return tensor.flatten(tensor.ndim - len(self.shape)) if self.shape else tensor.unsqueeze(-1)


@dataclass(frozen=True)
class Layer:
    """One layer: `start:trainable_stop` of the flat vector is trainable, `trainable_stop:stop` rides along."""

    name: str
    entries: tuple[Entry, ...]
    start: int
    trainable_stop: int
    stop: int
    first_unit: int
    last_unit: int

    @property
    def numel(self) -> int:
        """How many numbers travel with this layer."""
        return self.stop - self.start

    @property
    def units(self) -> int:
        """How many output units this layer has."""
        return self.last_unit - self.first_unit


@dataclass(frozen=True)
class Layers:
    """The partition of a model into layers."""

    layers: tuple[Layer, ...]
    dtype: torch.dtype
    private: tuple[Layer, ...] = ()
    """What stays with the client; it lies behind the others in the vector that a client trains."""

    @classmethod
    def of(cls, model: nn.Module, grouping: Grouping = "module", private: Sequence[str] = ()) -> Layers:
        """Group the tensors of any `torch.nn.Module`.

        `private` has patterns of the tensors that do not travel, or the words `norm` (all normalisations), `bias` (all
        biases), `first` and `last` (the first and the last module with parameters); with a ! before it, a pattern is
        for all others. One that matches nothing is the caller's affair: see `unmatched`.
        """
        items = _travelling(model)
        _check_grouping(items, grouping)
        head, tail = _split(items, private)
        return _lay_out(_group(head, grouping), _group(tail, grouping), items[0].tensor.dtype)

    @classmethod
    def of_shapes(
        cls,
        shapes: Mapping[str, Sequence[int]],
        grouping: Grouping = "module",
        *,
        buffers: Sequence[str] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Layers:
        """Group named arrays of any framework, of which only names and shapes are known.

        The part of a name before its last dot is the module; an array without one is a layer by itself. `buffers` are
        patterns of the arrays that only ride along; by default PyTorch's names of BatchNorm's statistics. Every weight
        is taken for [out, in, …].
        """
        items = _named(shapes, buffers, dtype)
        _check_grouping(items, grouping)
        return _lay_out(_group(items, grouping), {}, dtype)

    @property
    def names(self) -> tuple[str, ...]:
        """The layers' names, in order."""
        return tuple(layer.name for layer in self.layers)

    @property
    def numel(self) -> int:
        """The length P of the flat vector."""
        return self.layers[-1].stop if self.layers else 0

    @property
    def units(self) -> int:
        """How many output units there are in all."""
        return self.layers[-1].last_unit if self.layers else 0

    @cached_property
    def whole(self) -> Layers:
        """With the private layers: the vector that a client trains."""
        return Layers(self.layers + self.private, self.dtype) if self.private else self

    @property
    def itemsize(self) -> int:
        """Bytes per number."""
        return self.dtype.itemsize

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Every tensor, by its name."""
        return {entry.name: entry for layer in self.layers for entry in layer.entries}

    @cached_property
    def trains_private(self) -> bool:
        """Whether there are private parameters, and not only buffers."""
        return any(layer.trainable_stop > layer.start for layer in self.private)

    @cached_property
    def has_buffers(self) -> bool:
        """Whether anything but trainable parameters travels."""
        return any(layer.trainable_stop < layer.stop for layer in self.layers)

    @cached_property
    def is_trainable(self) -> Tensor:
        """Which numbers of the flat vector are no buffers, bool [P]."""
        found = torch.zeros(self.numel, dtype=torch.bool)
        for layer in self.layers:
            found[layer.start : layer.trainable_stop] = True
        return found

    @cached_property
    def _sizes(self) -> list[int]:
        """How many numbers each entry has; they lie one behind the other."""
        return [entry.stop - entry.start for entry in self.entries.values()]

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        sizes = [f"{visible(layer.name)}: {layer.numel:,}" for layer in self.layers]
        shown = sizes if len(sizes) <= 6 else [*sizes[:3], "…", sizes[-1]]
        return f"<{len(self)} Layers ({', '.join(shown)}), {self.numel:,} numbers of {self.dtype}>"

    def _repr_html_(self) -> str:
        rows = tuple(
            (
                layer.name,
                ", ".join(f"{entry.name} {list(entry.shape)}" for entry in layer.entries),
                f"{layer.trainable_stop - layer.start:,}",
                f"{layer.stop - layer.trainable_stop:,}",
                f"{layer.units:,}",
                f"{layer.numel * self.itemsize:,}",
            )
            for layer in self.layers
        )
        title = f"{len(self)} layers, {self.numel:,} numbers of {self.dtype}"
        return Table(title, ("layer", "tensors", "trainable", "buffers", "units", "bytes"), rows)._repr_html_()

    def bytes_per_layer(self) -> Tensor:
        """What each layer weighs on the wire, int64 [L]."""
        return torch.tensor([layer.numel * self.itemsize for layer in self.layers], dtype=torch.int64)

    def views(self, flat: Tensor, *, trainable_only: bool = False) -> dict[str, Tensor]:
        """Name the pieces of a flat vector; the tensors share its memory."""
        pieces = zip(self.entries.values(), torch.split(flat, self._sizes), strict=True)
        return {entry.name: entry.shaped(piece) for entry, piece in pieces if entry.trainable or not trainable_only}

    def flatten(self, model: nn.Module) -> Tensor:
        """Copy the travelling tensors of a model into a new flat vector."""
        flat = torch.empty(self.numel, dtype=self.dtype)
        tensors = _tensors(model)
        with torch.no_grad():
            for name, view in self.views(flat).items():
                view.copy_(tensors[name])
        return flat

    @torch.no_grad()
    def load(self, model: nn.Module, flat: Tensor) -> None:
        """Copy a flat vector into the travelling tensors of a model."""
        tensors = _tensors(model)
        for name, view in self.views(flat).items():
            tensors[name].copy_(view)

    def norms(self, flat: Tensor) -> Tensor:
        """The Euclidean norm of each layer's trainable part, float64 [L]."""
        norms = [_norm(flat[layer.start : layer.trainable_stop]) for layer in self.layers]
        return torch.stack(norms) if norms else torch.empty(0, dtype=torch.float64)


_CHUNK = 1 << 18


def _norm(vector: Tensor) -> Tensor:
    """A norm in float64, in pieces: the whole vector is never copied."""
    pieces = torch.split(vector, _CHUNK)
    squares = torch.empty(len(pieces), dtype=torch.float64, device=vector.device)
    for at, piece in enumerate(pieces):
        squares[at] = piece.double().square().sum()
    return squares.sum().sqrt().cpu()


# --- from a module to its layers ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Travelling:
    module: str
    is_norm: bool
    name: str
    tensor: Tensor
    trainable: bool
    transposed: bool = False
    groups: int = 1

    @property
    def inputs(self) -> int | None:
        """`Entry.inputs`: weights are [out, in, …], or transposed."""
        is_bias = self.name.rpartition(".")[2].startswith("bias")  # attention's bias_k has three dimensions
        if not self.trainable or self.tensor.ndim < 2 or self.is_norm or is_bias:
            return None
        return 0 if self.transposed else 1


_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_TRANSPOSED = (nn.Embedding, nn.EmbeddingBag, _ConvTransposeNd)  # an index into a table is a one-hot input


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _travelling(model: nn.Module) -> list[_Travelling]:
    """The tensors that travel, in the order of the modules; a tensor that has two names is kept under its first."""
    found: list[_Travelling] = []
    seen: set[int] = set()
    for path, module in model.named_modules():
        parametrized = isinstance(module, ParametrizationList)  # has the weight of the module it belongs to
        owner = model.get_submodule(path.rpartition(".parametrizations.")[0]) if parametrized else module
        is_norm, transposed = isinstance(owner, _NORMS), isinstance(owner, _TRANSPOSED)
        groups = owner.groups if isinstance(owner, _ConvNd) else 1
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if is_lazy(parameter):
                raise RecipeError("model", prefix + name, "is not initialised; run the model once on an example input")
            if parameter.requires_grad:
                found.append(_Travelling(path, is_norm, prefix + name, parameter, True, transposed, groups))
        for name, buffer in module._buffers.items():
            if buffer is None or id(buffer) in seen or name in module._non_persistent_buffers_set:
                continue
            seen.add(id(buffer))
            if buffer.layout != torch.strided:
                problem = "is sparse, and would have to travel; register it with persistent=False"
                raise RecipeError("model", prefix + name, problem)
            if buffer.is_floating_point():
                found.append(_Travelling(path, is_norm, prefix + name, buffer, False))
    if not any(item.trainable for item in found):
        raise RecipeError("model", type(model).__name__, "has no trainable parameter")
    first = next(item for item in found if item.trainable)
    for item in found:
        dtype = item.tensor.dtype
        if item.trainable and (dtype not in (torch.float32, torch.float64) or dtype != first.tensor.dtype):
            problem = "trainable parameters need one dtype, single or double precision; freeze it, or build it so"
            raise RecipeError("model", item.name, f"is {dtype}: {problem}")
    # A buffer of another dtype stays at home, like integers: a frozen part may be in half precision.
    return [item for item in found if item.tensor.dtype == first.tensor.dtype]


BATCH_NORM_STATISTICS = ("running_mean", "running_var")


def _named(shapes: Mapping[str, Sequence[int]], buffers: Sequence[str] | None, dtype: torch.dtype) -> list[_Travelling]:
    """The same from names and shapes alone.

    A normalisation is known by its statistics, or by vectors as weight and bias; a weight alone may be PReLU's.
    """
    patterns = [f"*{name}" for name in BATCH_NORM_STATISTICS] if buffers is None else buffers
    for pattern in buffers or ():
        if not any(_matches(name, [pattern]) for name in shapes):
            raise RecipeError("buffers", pattern, "matches no array")
    modules = {name: name.rpartition(".")[0] or name for name in shapes}
    vectors = {name for name, shape in shapes.items() if len(shape) == 1}
    norms = {modules[name] for name in shapes if name.endswith(BATCH_NORM_STATISTICS)}
    norms |= {module for module in modules.values() if {f"{module}.weight", f"{module}.bias"} <= vectors}
    items = [
        _Travelling(
            module=modules[name],
            is_norm=modules[name] in norms,
            name=name,
            tensor=torch.empty(tuple(shape), dtype=dtype, device="meta"),
            trainable=not _matches(name, patterns),
        )
        for name, shape in shapes.items()
    ]
    if not any(item.trainable for item in items):
        raise RecipeError("arrays", list(shapes), "has no floating-point array that is not a buffer")
    return items


def _check_grouping(items: list[_Travelling], grouping: Grouping) -> None:
    if isinstance(grouping, str):
        if grouping not in GROUPINGS:
            raise RecipeError("layers.grouping", grouping, f"is none of {', '.join(GROUPINGS)} and not a mapping")
    else:
        _check_mapping(items, grouping)


def _group(items: list[_Travelling], grouping: Grouping) -> dict[str, list[_Travelling]]:
    """Give every tensor its layer. What has no layer of its own follows the layer before it."""
    before = "(root)"
    if (first := next((item for item in items if item.trainable), None)) is not None:
        before = _own_layer(first, grouping) or first.module or before  # what opens the model has no layer before it
    groups: dict[str, list[_Travelling]] = {}
    layer_of_module: dict[str, str] = {}  # of its last parameter
    for item in items:
        if item.trainable:
            before = layer_of_module[item.module] = _own_layer(item, grouping) or before
        else:
            before = layer_of_module.get(item.module, before)
        groups.setdefault(before, []).append(item)
    return groups


def _own_layer(item: _Travelling, grouping: Grouping) -> str | None:
    """The layer a trainable tensor asks for; None if it joins the one before."""
    if not isinstance(grouping, str):
        return next(layer for layer, patterns in grouping.items() if _matches(item.name, patterns))
    if grouping == "tensor":
        return item.name
    if grouping == "block" and item.is_norm:
        return None
    return item.module or "(root)"


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(name == p or name.startswith(f"{p}.") or fnmatchcase(name, p) for p in patterns)


def _check_mapping(items: list[_Travelling], mapping: Mapping[str, Sequence[str]]) -> None:
    names = [item.name for item in items if item.trainable]
    for name in names:
        owners = [layer for layer, patterns in mapping.items() if _matches(name, patterns)]
        if len(owners) != 1:
            problem = "belongs to no layer" if not owners else f"belongs to several layers: {', '.join(owners)}"
            raise RecipeError("layers.grouping", name, f"this parameter {problem}")
    for layer, patterns in mapping.items():
        if not any(_matches(name, patterns) for name in names):
            raise RecipeError(f"layers.grouping.{layer}", list(patterns), "matches no trainable parameter")


_WORDS: Mapping[str, Callable[[_Travelling, list[_Travelling]], bool]] = {
    "norm": lambda item, items: item.is_norm,
    "bias": lambda item, items: item.trainable and item.name.rpartition(".")[2].startswith("bias"),
    "first": lambda item, items: item.module == next(one.module for one in items if one.trainable),
    "last": lambda item, items: item.module == next(one.module for one in reversed(items) if one.trainable),
}
"""Which tensors a word among the patterns of private ones means."""


def _is_private(item: _Travelling, pattern: str, items: list[_Travelling]) -> bool:
    if pattern.startswith("!"):
        return not _is_private(item, pattern[1:], items)
    return _WORDS[pattern](item, items) if pattern in _WORDS else _matches(item.name, [pattern])


def unmatched(model: nn.Module, private: Sequence[str]) -> list[str]:
    """The patterns of private tensors that the model has none for."""
    items = _travelling(model)
    return [pattern for pattern in private if not any(_is_private(item, pattern, items) for item in items)]


def _split(items: list[_Travelling], private: Sequence[str]) -> tuple[list[_Travelling], list[_Travelling]]:
    """What travels, and what stays. A module's buffers stay if all of its parameters do."""
    stays = {item.name for item in items if any(_is_private(item, pattern, items) for pattern in private)}
    travelling = {item.module for item in items if item.trainable and item.name not in stays}
    emptied = {item.module for item in items if item.name in stays} - travelling
    stays |= {item.name for item in items if item.module in emptied or not travelling}
    return [item for item in items if item.name not in stays], [item for item in items if item.name in stays]


def _lay_out(head: dict[str, list[_Travelling]], tail: dict[str, list[_Travelling]], dtype: torch.dtype) -> Layers:
    """Give layers, entries and units their places in the flat vector: first who travels, then who stays."""
    layers, end = _placed(head, 0, 0)
    private, _ = _placed(tail, *end)
    return Layers(layers, dtype, private)


def _placed(
    groups: dict[str, list[_Travelling]], offset: int, unit_offset: int
) -> tuple[tuple[Layer, ...], tuple[int, int]]:
    """Layers one behind the other, and where the next one would begin."""
    layers: list[Layer] = []
    for layer_name, members in groups.items():
        start, first_unit = offset, unit_offset
        unit_starts: dict[tuple[str, int], int] = {}  # (module, rows) -> first unit
        unit_of_rows: dict[int, int] = {}  # rows -> first unit of the latest such group, for a normalisation after it
        entries: list[Entry] = []
        placed: list[tuple[_Travelling, int, int]] = []
        for item in members:
            rows = item.tensor.shape[0] if item.tensor.ndim else 1
            unit = unit_starts.get((item.module, rows))
            if unit is None and (item.tensor.ndim == 1 or item.is_norm):
                unit = unit_of_rows.get(rows)
            if unit is None:
                unit, unit_offset = unit_offset, unit_offset + rows
            unit_starts[item.module, rows] = unit_of_rows[rows] = unit
            placed.append((item, unit, rows))
        placed.sort(key=lambda place: not place[0].trainable)  # stable: the trainable ones first
        trainable_stop = start
        for item, unit, rows in placed:
            stop = offset + math.prod(item.tensor.shape)
            shape = tuple(item.tensor.shape)
            place = Entry(item.name, shape, item.trainable, offset, stop, unit, rows, item.inputs, item.groups)
            entries.append(place)
            offset = stop
            if item.trainable:
                trainable_stop = stop
        layers.append(Layer(layer_name, tuple(entries), start, trainable_stop, offset, first_unit, unit_offset))
    return tuple(layers), (offset, unit_offset)
