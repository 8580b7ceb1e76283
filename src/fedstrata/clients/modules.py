"""A user's module, clean for every order: what the task's function builds, with the order's numbers in it.

A forward may change anything: buffers, frozen parameters, counters, a generator of its own. So before every order the
module is put back in place, attribute by attribute. Where that cannot be right it is built anew: with hooks, with
functions that keep something to themselves, and with what cannot be copied. After training, what travels is read from
the module by name, wherever it is then.
"""

from __future__ import annotations

import copy
import enum
import functools
import gc
import types
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fedstrata.core.errors import ModelError
from fedstrata.core.layers import Entry, Layers

LARGE = 1 << 20
"""Bytes from which a tensor that does not travel is watched instead of copied for every order."""

EXACT = 8
"""So many orders of a process begin with a checksum of what is watched, the ones that are rehearsed included."""

_REGISTERED = ("_parameters", "_buffers", "_modules")
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_HOOKS = [name for name in nn.Module().__dict__ if "forward" in name or "backward" in name]


def has_hooks(model: nn.Module) -> bool:
    """Whether anything is to be called when the model, a part of it or a parameter is used."""
    everywhere: bool = _has_any_global_hook()  # type: ignore[no-untyped-call]
    of_modules = (module.__dict__.get(name) for module in model.modules() for name in _HOOKS)
    of_tensors = (getattr(p, name, None) for p in model.parameters() for name in _TENSOR_HOOKS)
    return everywhere or any(of_modules) or any(of_tensors)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaN and all."""
    if one.dtype != other.dtype or one.shape != other.shape or one.layout != other.layout:
        return False
    if one.layout != torch.strided:
        return same_bits(one.detach().to_dense(), other.detach().to_dense())
    return torch.equal(*(t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (one, other)))


class CleanModule:
    """One module for all orders of a process."""

    def __init__(self, build: Callable[[], nn.Module], layers: Layers) -> None:
        self.build, self.layers, self.model = build, layers, build()
        self.entries = [(*entry.name.rpartition(".")[::2], entry) for entry in layers.entries.values()]
        self._tensors = [tensor for _, tensor in self._places()]
        self._stranded = {name: tensor.clone() for name, tensor in self._at_home()}
        self._origin = _Origin.of(self.model, layers)
        self.channels_last = self._origin is not None
        """Whether the weights of convolutions lie as they are computed fastest; some forwards cannot take that."""

    @property
    def layout_matters(self) -> bool:
        """Whether `channels_last` makes any difference."""
        return self._origin is not None and any(name in self._origin.alone for name in self.layers.entries)

    @torch.no_grad()
    def fresh(self, flat: Tensor) -> nn.Module:
        """The module as it was built, with the numbers of `flat` in its travelling tensors."""
        if self._origin is None or not self._origin.put_back():
            self._rebuild()
        alone = self._origin.alone if self.channels_last and self._origin is not None else ()
        for tensor, (name, numbers) in zip(self._tensors, self.layers.views(flat).items(), strict=True):
            assert tensor is not None
            if name in alone:
                tensor.data = numbers.clone()
            else:
                tensor.copy_(numbers)
        return self.model

    def _rebuild(self) -> None:
        before, self.model = self._origin, self.build()
        self._tensors = [tensor for _, tensor in self._places()]
        if before is not None:
            self._origin = _Origin.of(self.model, self.layers)
            if self._origin is not None and (name := self._origin.differs_from(before)) is not None:
                problem = "is changed by training, and building the model anew does not undo it"
                raise ModelError(f"model: {name} is frozen, {problem}; copy it in the function that builds the model")

    @torch.no_grad()
    def read(self, flat: Tensor) -> None:
        """Copy the travelling tensors, as training left them, into `flat`."""
        views = self.layers.views(flat).values()
        for (entry, tensor), numbers in zip(self._places(), views, strict=True):
            if tensor is None or tensor.shape != entry.shape or not tensor.is_floating_point():
                found = "gone" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                was = f"{self.layers.dtype} {list(entry.shape)}"
                raise ModelError(f"model: {entry.name} is {found} after training, it was {was}")
            numbers.copy_(tensor)

    def _places(self) -> Iterator[tuple[Entry, Tensor | None]]:
        """Each entry and the tensor that has its name now."""
        modules = dict(self.model.named_modules())
        for path, attribute, entry in self.entries:
            module = modules.get(path)
            if module is None:
                yield entry, None
            elif attribute in module._buffers:
                yield entry, module._buffers[attribute]
            else:
                yield entry, module._parameters.get(attribute)

    def lost(self) -> str | None:
        """What training changed, and cannot travel, as a sentence."""
        for name, now in self._at_home():
            if not same_bits(now, self._stranded.get(name, now)):
                own = self.layers.dtype
                return f"model: {name} is changed by training, and cannot travel: it is {now.dtype}, not {own}"
        return None

    def _at_home(self) -> Iterator[tuple[str, Tensor]]:
        """Persistent buffers that belong to what is learned, but cannot travel: complex ones, and of another dtype."""
        for path, module in self.model.named_modules():
            for attribute, buffer in module._buffers.items():
                if buffer is None or attribute in module._non_persistent_buffers_set:
                    continue
                if buffer.is_complex() or (buffer.is_floating_point() and buffer.dtype != self.layers.dtype):
                    yield f"{path}.{attribute}" if path else attribute, buffer


class _Origin:
    """What a module was when it was built, and how to make it that again."""

    def __init__(self, model: nn.Module, layers: Layers) -> None:
        self.parts = [
            (
                module,
                {name: dict(module.__dict__[name]) for name in _REGISTERED},
                {k: v for k, v in module.__dict__.items() if k not in _REGISTERED and _is_fixed(v)},
            )
            for module in model.modules()
        ]
        named = {id(t): (name, t) for name, t in reversed([*model.named_parameters(), *model.named_buffers()])}
        self.known = {id(module): module for module, _, _ in self.parts} | {key: t for key, (_, t) in named.items()}
        dense = [t for _, t in named.values() if t.layout == torch.strided]
        shares = Counter(t.untyped_storage().data_ptr() for t in dense)
        self.alone = {
            name
            for name, tensor in named.values()
            if len(tensor.shape) == 4 and is_whole(tensor) and shares[tensor.untyped_storage().data_ptr()] == 1
        }
        """The tensors whose numbers may lie in another order."""
        self.tensors: list[tuple[Tensor, Tensor, bool, Tensor | None]] = []
        """Each tensor, where its numbers are, whether it needs a gradient, and its numbers, if it stays."""
        self.watched: dict[str, _Watched] = {}
        self.put_back_so_far = 0
        for name, tensor in named.values():
            stays = name not in layers.entries
            small = tensor.layout != torch.strided or tensor.numel() * tensor.itemsize < LARGE
            content = tensor.detach().clone() if stays and small else None
            self.tensors.append((tensor, tensor.data, tensor.requires_grad, content))
            if stays and not small:
                self.watched[name] = _Watched(tensor)
        own = [
            {k: v for k, v in module.__dict__.items() if k not in _REGISTERED and not (k in _EMPTY and not v)}
            for module, _, _ in self.parts
        ]
        if has_hooks(model) or any(map(_keeps_to_itself, {type(module) for module in model.modules()})):
            raise _CannotBePutBackError
        if any(vars(tensor) for _, tensor in named.values()):
            raise _CannotBePutBackError  # attributes of tensors
        _require_no_secrets(own, self.known, set(shares))
        changing = [{k: v for k, v in o.items() if k not in part[2]} for o, part in zip(own, self.parts, strict=True)]
        self.changing, self.changes = changing, any(changing)
        self.names = [{*_REGISTERED, *_EMPTY, *part[2], *own} for part, own in zip(self.parts, changing, strict=True)]
        try:
            self.changing = self._copies()
        except Exception as error:  # whatever a user's object raises when it is copied
            raise _CannotBePutBackError from error

    @classmethod
    def of(cls, model: nn.Module, layers: Layers) -> _Origin | None:
        """None, if the module cannot be put back."""
        try:
            return cls(model, layers)
        except _CannotBePutBackError:
            return None

    def _copies(self) -> list[dict[str, Any]]:
        """Of everything that can be changed in place; modules and tensors of the model stay what they are."""
        return copy.deepcopy(self.changing, dict(self.known)) if self.changes else self.changing

    def put_back(self) -> bool:
        """Undo what training changed; False, if a large tensor was."""
        exactly = self.put_back_so_far < EXACT
        if any(tensor.has_changed(exactly) for tensor in self.watched.values()):
            return False
        self.put_back_so_far += 1
        for (module, registered, fixed), names, changing in zip(self.parts, self.names, self._copies(), strict=True):
            own = module.__dict__
            for name in own.keys() - names:
                del own[name]
            for name in _EMPTY:
                if own.get(name):
                    own[name].clear()
            own.update(fixed)
            own.update(changing)
            for name, members in registered.items():
                if own[name] or members:
                    own[name].clear()
                    own[name].update(members)
        for tensor, numbers, needs_gradient, content in self.tensors:
            if not tensor.is_leaf:
                tensor.detach_()
            tensor.data = numbers
            if tensor.requires_grad != needs_gradient:
                tensor.requires_grad_(needs_gradient)
            for name in ("grad", *_TENSOR_HOOKS):
                setattr(tensor, name, None)
            vars(tensor).clear()
            if content is not None:
                tensor.data = numbers.copy_(content)
        return True

    def differs_from(self, other: _Origin) -> str | None:
        """The first large tensor that has other numbers than there."""
        pairs = ((name, tensor.checksum, other.watched[name].checksum) for name, tensor in self.watched.items())
        return next((name for name, here, there in pairs if here != there), None)


_EMPTY = {name for name, value in nn.Module().__dict__.items() if isinstance(value, dict | set)} - {*_REGISTERED}
"""Where every module keeps its hooks and the like: empty, unless it has some."""

_FIXED = (
    bool | int | float | complex | str | bytes | None | enum.Enum | type
    | types.FunctionType | types.BuiltinFunctionType | types.ModuleType
    | torch.dtype | torch.device | torch.Size | torch.memory_format | torch.layout
)  # fmt: skip
"""Kinds of values that can be replaced, but not changed."""


def _is_fixed(value: Any) -> bool:
    return isinstance(value, _FIXED) or (type(value) is tuple and all(map(_is_fixed, value)))


class _CannotBePutBackError(Exception):
    pass


def _keeps_to_itself(kind: type) -> bool:
    """Whether a class has state that is no attribute of its objects: slots, caches, or what is around it."""
    return any(
        "__slots__" in vars(base)
        or "<locals>" in base.__qualname__
        or any(isinstance(member, _CACHE) for member in vars(base).values())
        for base in kind.__mro__
        if not base.__module__.startswith("torch.")
    )


_CACHE = type(functools.cache(id))


def _require_no_secrets(roots: Iterable[Any], known: dict[int, Any], storages: set[int]) -> None:
    """Go through all that can be reached, and stop where a copy would not do what the original does.

    That is a function that closes over anything but parts of the model, or has a changeable default; a method of a
    built-in type, which stays with the object it was made of; a reference to what is copied; an object with its own
    idea of a copy; and a tensor or array that shares its numbers with others.
    """
    todo, seen = list(roots), set(known)
    while todo:
        found = todo.pop()
        if id(found) in seen or isinstance(found, type | types.ModuleType | str | int | float | torch.Generator):
            continue
        seen.add(id(found))
        if isinstance(found, types.FunctionType):
            around = [cell.cell_contents for cell in found.__closure__ or ()]
            defaults = [*(found.__defaults__ or ()), *(found.__kwdefaults__ or {}).values()]
            is_open = all(id(content) in known or isinstance(content, types.FunctionType | type) for content in around)
            secret = not is_open or not all(map(_is_fixed, defaults))
            todo += [*around, *defaults]
        elif isinstance(found, Tensor):
            secret = found.layout == torch.strided and found.untyped_storage().data_ptr() in storages
        elif isinstance(found, np.ndarray):
            secret = found.base is not None or found.dtype.hasobject
        elif isinstance(found, weakref.ref):
            secret = id(found()) not in known
        else:
            of = getattr(found, "__self__", None) if isinstance(found, types.BuiltinFunctionType) else None
            secret = not isinstance(of, types.ModuleType | type | None)
            secret |= hasattr(found, "__deepcopy__") or isinstance(found, _CACHE) or _keeps_to_itself(type(found))
            todo += gc.get_referents(found)
        if secret:
            raise _CannotBePutBackError


def is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is all that there is in its memory."""
    if tensor.layout != torch.strided:
        return False
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize


def is_writable(tensor: Tensor) -> bool:
    """Whether each of its numbers has a place of its own (`expand` gives several the same)."""
    if tensor.layout != torch.strided:
        return True
    return all(stride > 0 for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


class _Watched:
    """A large tensor that stays. Every operation on it shows in its version; what is written past that, in its numbers.

    They are looked at by a checksum in the first orders of a process, and later by sums, which take a fifth of the time
    and miss only numbers that change places within some kilobytes.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.place, self.checksum, self.sums = (
            tensor,
            self._place(tensor),
            _checksum(tensor),
            _sums(tensor),
        )

    @staticmethod
    def _place(tensor: Tensor) -> tuple[int, int]:
        return tensor.data_ptr(), tensor._version

    def has_changed(self, exactly: bool) -> bool:
        """Whether it is no longer what it was."""
        if self._place(self.tensor) != self.place:
            return True
        return _sums(self.tensor) != self.sums or (exactly and _checksum(self.tensor) != self.checksum)


def _bytes_of(tensor: Tensor) -> np.ndarray:
    found: np.ndarray = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return found


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(_bytes_of(tensor).data)


def _sums(tensor: Tensor) -> int:
    content = _bytes_of(tensor)
    whole = len(content) // _SUMMED * _SUMMED
    sums = content[:whole].view(np.int64).reshape(-1, _SUMMED // 8).sum(1)
    return zlib.crc32(content[whole:].data, zlib.crc32(sums.data))


_SUMMED = 1 << 12
"""Bytes of which there is one sum."""
