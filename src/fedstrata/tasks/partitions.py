"""Who holds which training samples: the partitions of the papers, and the usual ones.

A scheme is a frozen dataclass of hyperparameters. `split` draws from the generator it is given and from nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fedstrata.core import rng
from fedstrata.core.errors import MISSING, RecipeError, require
from fedstrata.registry import build, find

Ints = NDArray[np.int64]


class Scheme(Protocol):
    """Shares samples out: `labels` are those of all samples, and nothing is drawn but from `generator`."""

    def split(self, labels: NDArray[Any], generator: np.random.Generator) -> Any:
        """A `Partition`, or an array of sample indices for each client."""


@dataclass(frozen=True, eq=False)
class Partition:
    """The sample indices of every client in one array: client k holds `indices[offsets[k] : offsets[k + 1]]`."""

    indices: Ints
    offsets: Ints

    @classmethod
    def from_lists(cls, lists: Sequence[NDArray[Any]]) -> Partition:
        """Build it from one array of indices per client."""
        sizes = [len(own) for own in lists]
        indices = np.concatenate([np.empty(0, np.int64), *lists]).astype(np.int64)
        return cls(indices, _offsets(sizes))

    @classmethod
    def from_owners(cls, indices: Ints, owners: Ints, clients: int) -> Partition:
        """Build it from the owner of each index."""
        order = np.argsort(owners, kind="stable")
        return cls(indices[order], _offsets(np.bincount(owners, minlength=clients)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> Ints:
        if not 0 <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    @property
    def sizes(self) -> Ints:
        """The number of samples of each client."""
        return np.diff(self.offsets)

    def table(self, labels: NDArray[Any], classes: int) -> Ints:
        """The number of samples by client and class."""
        owners = np.repeat(np.arange(len(self)), self.sizes)
        cells = owners * classes + labels[self.indices]
        return np.bincount(cells, minlength=len(self) * classes).reshape(len(self), classes)


@dataclass(frozen=True)
class Iid:
    """Disjoint random shares: `samples` each, or else all of the data in nearly equal parts."""

    clients: int
    samples: int | None = None

    def __post_init__(self) -> None:
        _at_least(1, clients=self.clients)
        if self.samples is not None:
            _at_least(1, samples=self.samples)

    def split(self, labels: NDArray[Any], generator: np.random.Generator) -> Partition:
        """Shuffle, then cut."""
        steps = np.arange(self.clients + 1, dtype=np.int64)
        if self.samples is None:
            offsets = steps * len(labels) // self.clients
        else:
            _enough("samples", self.samples, self.clients * self.samples, len(labels))
            offsets = steps * self.samples
        return Partition(generator.permutation(len(labels))[: offsets[-1]], offsets)


@dataclass(frozen=True)
class IidMix:
    """FedAdp's nodes: first `iid` ones drawn from all classes, then `non_iid` ones drawn from `classes` random classes.

    A node never holds a sample twice; two nodes may hold the same one.
    """

    iid: int
    non_iid: int
    classes: int
    samples: int = 600

    def __post_init__(self) -> None:
        _at_least(0, iid=self.iid, non_iid=self.non_iid)
        _at_least(1, classes=self.classes, samples=self.samples)
        if self.iid + self.non_iid == 0:
            raise ValueError("iid + non_iid must be at least 1, got 0")

    def split(self, labels: NDArray[Any], generator: np.random.Generator) -> Partition:
        """Draw the nodes one after the other."""
        _enough("samples", self.samples, self.samples, len(labels))
        iid = [generator.choice(len(labels), self.samples, replace=False) for _ in range(self.iid)]
        non_iid = _x_class_nodes([self.classes] * self.non_iid, self.samples, labels, generator)
        return Partition.from_lists([*iid, *non_iid])


@dataclass(frozen=True)
class XClass:
    """FedAdp's nodes one by one: node i draws from `classes[i]` random classes; all classes make it an IID node."""

    classes: list[int]
    samples: int = 600

    def __post_init__(self) -> None:
        require(len(self.classes) > 0, "classes", self.classes, "must name at least one node")
        require(min(self.classes) >= 1, "classes", self.classes, "must be at least 1 each")
        _at_least(1, samples=self.samples)

    def split(self, labels: NDArray[Any], generator: np.random.Generator) -> Partition:
        """Draw the nodes one after the other."""
        return Partition.from_lists(_x_class_nodes(self.classes, self.samples, labels, generator))


@dataclass(frozen=True)
class FedAdpCase1:
    """FedAdp's first general case: the nodes' numbers of classes are 1, 2, …, `clients` in random order."""

    clients: int = 10
    samples: int = 600

    def __post_init__(self) -> None:
        _at_least(1, clients=self.clients, samples=self.samples)

    def split(self, labels: NDArray[Any], generator: np.random.Generator) -> Partition:
        """Permute the numbers of classes, then draw the nodes."""
        classes = len(np.unique(labels))
        require(self.clients == classes, "clients", self.clients, f"must be the number of classes, {classes}")
        numbers = generator.permutation(classes) + 1
        return Partition.from_lists(_x_class_nodes(numbers.tolist(), self.samples, labels, generator))


@dataclass(frozen=True)
class FedAdpCase2:
    """FedAdp's second general case: half of the nodes draw their number of classes from 1…5, the others from 6…10.

    With another number of classes C, from 1…C/2 and from the rest.
    """

    clients: int = 10
    samples: int = 600

    def __post_init__(self) -> None:
        _at_least(2, clients=self.clients)
        _at_least(1, samples=self.samples)

    def split(self, labels: NDArray[Any], generator: np.random.Generator) -> Partition:
        """Draw the numbers of classes, then the nodes."""
        classes, few = len(np.unique(labels)), self.clients // 2
        if classes < 2:
            raise ValueError(f"fedadp_case2 needs at least 2 classes in the data, got {classes}")
        low = generator.integers(1, classes // 2, few, endpoint=True)
        high = generator.integers(classes // 2 + 1, classes, self.clients - few, endpoint=True)
        return Partition.from_lists(_x_class_nodes([*low.tolist(), *high.tolist()], self.samples, labels, generator))


@dataclass(frozen=True)
class Shards:
    """Sort by label, cut into equal chunks, deal `per_client` random chunks to each client.

    With `shard_size`, chunks of that size out of a random part of the data, so that no class is left out.
    """

    clients: int = 100
    per_client: int = 2
    shard_size: int | None = None

    def __post_init__(self) -> None:
        _at_least(1, clients=self.clients, per_client=self.per_client)
        if self.shard_size is not None:
            _at_least(1, shard_size=self.shard_size)

    def split(self, labels: NDArray[Any], generator: np.random.Generator) -> Partition:
        """Sort, cut, deal."""
        chunks = self.clients * self.per_client
        if self.shard_size is None:
            _enough("clients × per_client", chunks, chunks, len(labels))
        size = self.shard_size or len(labels) // chunks
        _enough("shard_size", size, chunks * size, len(labels))
        used = generator.permutation(len(labels))[: chunks * size]
        by_label = used[np.argsort(labels[used], kind="stable")].reshape(chunks, size)
        dealt = generator.permutation(by_label)
        return Partition(dealt.reshape(-1), np.arange(self.clients + 1, dtype=np.int64) * (self.per_client * size))


@dataclass(frozen=True)
class Dirichlet:
    """Each class is shared out over all clients by Dirichlet(alpha), so sizes and mixtures differ.

    The shares are drawn again until every client has `min_samples`, a hundred times at most.
    """

    clients: int
    alpha: float
    min_samples: int = 1

    def __post_init__(self) -> None:
        _at_least(1, clients=self.clients)
        _at_least(0, min_samples=self.min_samples)
        _positive(alpha=self.alpha)

    def split(self, labels: NDArray[Any], generator: np.random.Generator) -> Partition:
        """Draw shares class by class."""
        _enough("min_samples", self.min_samples, self.clients * self.min_samples, len(labels))
        classes = len(np.unique(labels))
        for _ in range(100):
            shares = generator.dirichlet(np.full(self.clients, self.alpha), classes)
            partition = _share_out(shares, labels, generator)
            if partition.sizes.min() >= self.min_samples:
                return partition
        raise ValueError(
            f"min_samples = {self.min_samples} was not reached in 100 draws with clients = {self.clients}, "
            f"alpha = {self.alpha}; 0 allows empty clients"
        )


@dataclass(frozen=True)
class TwoClassDirichlet:
    """Adaptive μ's: each client has `classes` random classes; a class goes to its holders by Dirichlet(alpha) shares.

    The paper's sentence has two readings. `over="holders"`: the shares are drawn for each class over its holders, so
    sizes differ widely. `over="classes"`: they are drawn for each client over its classes, and a class is cut in
    proportion to them, so sizes are alike and mixtures differ. The samples of a class that nobody holds are not used,
    and a small share may come to no sample at all.
    """

    clients: int = 250
    alpha: float = 0.5
    classes: int = 2
    over: Literal["holders", "classes"] = "holders"

    def __post_init__(self) -> None:
        _at_least(1, clients=self.clients, classes=self.classes)
        _positive(alpha=self.alpha)
        require(self.over in ("holders", "classes"), "over", self.over, "must be holders or classes")

    def split(self, labels: NDArray[Any], generator: np.random.Generator) -> Partition:
        """Draw each client's classes and shares, then cut each class accordingly."""
        present = len(np.unique(labels))
        _enough_classes(self.classes, present)
        # The first columns of a sorted random row are a random subset: one draw for all clients.
        held = np.argsort(generator.random((self.clients, present)), axis=1)[:, : self.classes]
        # Gamma draws, divided by their sum, are Dirichlet shares.
        drawn = generator.gamma(self.alpha, size=held.shape)
        if drawn.min() < _TINY:
            return _share_out(self._tiny_shares(drawn, held, present, generator).T, labels, generator)
        if self.over == "classes":
            drawn /= drawn.sum(axis=1, keepdims=True)
        shares = np.zeros((self.clients, present))
        np.put_along_axis(shares, held, drawn, axis=1)
        return _share_out(shares.T, labels, generator)

    def _tiny_shares(
        self, drawn: NDArray[np.float64], held: Ints, present: int, generator: np.random.Generator
    ) -> NDArray[np.float64]:
        """The same by logarithms, with the largest share of each class as 1: a tiny alpha gives numbers beyond a float.

        The logarithms are times alpha, which keeps them finite.
        """
        with np.errstate(over="ignore"):  # two that are infinitely far apart
            logs = _log_gammas(drawn, self.alpha, generator)
            if self.over == "classes":
                logs -= logs.max(axis=1, keepdims=True)
                logs -= self.alpha * np.log(np.exp(logs / self.alpha).sum(axis=1, keepdims=True))
            shares = np.full((self.clients, present), -np.inf)
            np.put_along_axis(shares, held, logs, axis=1)
            largest = shares.max(axis=0)
            return np.exp((shares - np.where(np.isfinite(largest), largest, 0)) / self.alpha)


iid, iid_mix, x_class = Iid, IidMix, XClass
fedadp_case1, fedadp_case2 = FedAdpCase1, FedAdpCase2
shards = Shards
dirichlet, two_class_dirichlet = Dirichlet, TwoClassDirichlet

PARTITIONS: dict[str, type] = {
    name: found for name, found in list(globals().items()) if name.islower() and isinstance(found, type)
}
"""Every scheme by name, as above: `partitions.dirichlet(clients=100, alpha=0.1)` is what a recipe's table makes."""


def build_partition(table: Mapping[str, Any]) -> Any:
    """The partition scheme that a recipe's `[task.partition]` names."""
    options = dict(table)
    if "name" not in options:
        raise RecipeError("task.partition.name", MISSING, f"is missing; there are: {', '.join(PARTITIONS)}")
    scheme = find("task.partition.name", options.pop("name"), PARTITIONS)
    if not isinstance(scheme, type):  # a function of labels and generator
        return _FunctionPartition(scheme, options)
    built = build(scheme, options, "task.partition")
    if not hasattr(built, "split"):
        raise RecipeError("task.partition.name", scheme.__name__, "is no partition: it lacks split")
    return built


@dataclass(frozen=True)
class _FunctionPartition:
    """A user's partition that is a function: (labels, generator, **options) -> one array of indices per client."""

    function: Callable[..., Any]
    options: dict[str, Any]

    def split(self, labels: np.ndarray, generator: np.random.Generator) -> Any:
        try:
            return self.function(labels, generator, **self.options)
        except TypeError as error:
            raise ValueError(str(error)) from None


# --- how they deal ---------------------------------------------------------------------------------------------------


def _x_class_nodes(
    numbers: Sequence[int], samples: int, labels: NDArray[Any], generator: np.random.Generator
) -> list[Ints]:
    """One node for each number x: `samples` of x random classes, without repetition within the node."""
    members = _members(labels)
    nodes = []
    for number in numbers:
        _enough_classes(number, len(members))
        chosen = generator.choice(len(members), number, replace=False)
        pool = np.concatenate([members[position] for position in chosen])
        _enough("samples", samples, samples, len(pool), f"in {number} random class{'es' if number > 1 else ''}")
        nodes.append(generator.choice(pool, samples, replace=False))
    return nodes


_TINY = np.finfo(np.float64).tiny


def _log_gammas(drawn: NDArray[np.float64], alpha: float, generator: np.random.Generator) -> NDArray[np.float64]:
    """alpha · log x of Gamma(alpha) draws x, some of which were too small for a float.

    Those are distributed like tiny · U^(1/alpha); U is drawn apart, so that what is drawn next does not depend on it.
    """
    apart = np.random.Generator(generator.bit_generator.jumped())  # type: ignore[attr-defined]
    below = np.where(drawn < _TINY, np.log1p(-apart.random(drawn.shape)), 0.0)
    return alpha * np.log(np.maximum(drawn, _TINY)) + below


def _share_out(shares: NDArray[np.float64], labels: NDArray[Any], generator: np.random.Generator) -> Partition:
    """Give each class (a row) to the clients (the columns) in proportion to their shares; a row of zeros to nobody."""
    clients = shares.shape[1]
    indices, owners = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for members, share in zip(_members(labels), shares, strict=True):
        upto = np.cumsum(share)
        if upto[-1] > 0:
            cuts = np.round(upto / upto[-1] * len(members)).astype(np.int64)
            indices.append(generator.permutation(members))
            owners.append(np.repeat(np.arange(clients), np.diff(cuts, prepend=0)))
    return Partition.from_owners(np.concatenate(indices), np.concatenate(owners), clients)


def _members(labels: NDArray[Any]) -> list[Ints]:
    return [np.flatnonzero(labels == label) for label in np.unique(labels)]


def _offsets(sizes: Sequence[int] | Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


_MOST = 100_000_000
"""Clients, samples and classes beyond which nobody has the memory."""


def _at_least(least: int, **fields: int) -> None:
    for field, value in fields.items():
        require(isinstance(value, Integral) and value >= least, field, value, f"must be at least {least}")
        require(value <= _MOST, field, value, f"must be at most {_MOST}")


def _positive(**fields: float) -> None:
    for field, value in fields.items():
        require(isinstance(value, Real) and 0 < value < math.inf, field, value, "must be > 0 and finite")


def _enough(field: str, value: int, needed: int, available: int, where: str = "in the data") -> None:
    if needed > available:
        raise ValueError(f"{field} = {value} needs {needed} samples, but there are {available} {where}")


def _enough_classes(classes: int, present: int) -> None:
    require(classes <= present, "classes", classes, f"must be at most {present}, the number of classes in the data")


# --- a client's own part for evaluation -------------------------------------------------------------------------------


def split(rows: np.ndarray, held_out: float, seed: int, client: int) -> tuple[np.ndarray, np.ndarray]:
    """A client's samples for training and, a share of them, at random and for good, for evaluation."""
    rows = rng.generator(seed, "held-out", client=client).permutation(rows)
    count = int(held_out_sizes(np.array([len(rows)]), held_out)[0])
    return rows[count:], rows[:count]


def held_out_sizes(sizes: np.ndarray, held_out: float) -> np.ndarray:
    """The share, rounded, but at least one sample on either side where there are two."""
    return np.where(sizes >= 2, np.clip(np.round(sizes * held_out), 1, np.maximum(sizes - 1, 1)), 0).astype(np.int64)
