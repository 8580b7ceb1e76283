"""`Server`: any algorithm for a federation of one's own, whatever carries its messages.

    server = Server(model, fedlayerwise())                       # a torch module, or named arrays
    for ...:
        trained = [...]                                          # your clients', as state dicts or named arrays
        model = server.aggregate(trained, sizes=[100, 250, 80])

It keeps what lasts between rounds: what the algorithm remembers, how arrays lie in the flat model, whose row in the
tables is whose, and the integers that only pass through. A transport of one's own plays its rounds itself:
`server.begin(…)`, the loop of `core/round.py`, `server.conclude(round)`. Flower's Strategy is such a transport.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors.numpy import save
from torch import Tensor, nn

from fedstrata.core.axes import Algorithm, MovesSome, Remembers, SelectsAfterScores, SelectsOnClient, State
from fedstrata.core.errors import (
    MISSING,
    BadValue,
    NotFinite,
    ReplyError,
    RunDirectoryError,
    UserError,
    printable,
    require,
)
from fedstrata.core.grouping import Grouping
from fedstrata.core.layers import Layers
from fedstrata.core.messages import (
    MOST_SAMPLES,
    SCORE_DTYPE,
    Answer,
    Order,
    Reply,
    keep_layers,
    keep_units,
    layers_with_units,
)
from fedstrata.core.packing import Arrays, Packing, kinds_of
from fedstrata.core.record import RoundRecord
from fedstrata.core.round import Participants, Round, Terms, check_cohort, play
from fedstrata.core.state import ServerState, grown, initial_state
from fedstrata.core.status import Status
from fedstrata.core.training import check_training
from fedstrata.objectives import Plain
from fedstrata.runs.files import Folder, write_whole

FORMAT = 2
"""Version of the file that `save` writes."""

_PARTS = ("objective", "weighting", "server")


class Server:
    """The server's side of an algorithm.

    Parameters
    ----------
    model
        A torch module, or arrays by name (NumPy or torch): the first global model.
    algorithm
        Any that the server can carry out alone; with `begin`, any whose clients do their part.
    layers
        `module` (arrays with the same dotted prefix; those without a dot singly), `block`, `tensor`, or a mapping from
        a layer's name to patterns of array names. By default what the algorithm's paper calls a layer.
    buffers
        Patterns of arrays that are averaged but not measured. By default a module's own buffers and frozen parameters,
        and of arrays `*running_mean` and `*running_var`.
    min_replies
        With fewer usable updates a round fails, and changes nothing.
    record
        Whether a round's record has the numbers per client and layer.
    seed
        For selections that draw layers or clients at random.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, Any],
        algorithm: Algorithm,
        *,
        layers: Grouping | None = None,
        buffers: Sequence[str] | None = None,
        min_replies: int = 1,
        record: bool = True,
        seed: int = 0,
    ) -> None:
        if not isinstance(algorithm, Algorithm):
            raise BadValue("algorithm", algorithm, "must be an Algorithm, like fedstrata.fedlayerwise()")
        if algorithm.private or isinstance(algorithm.objective, Remembers | MovesSome):
            what = "private" if algorithm.private else "objective"
            problem = "asks clients to keep something to themselves, which takes fedstrata's own clients: use run()"
            raise BadValue(f"algorithm.{what}", getattr(algorithm, what), problem)
        require(min_replies >= 1, "min_replies", min_replies, "must be at least 1")
        check_training(algorithm, None)
        if isinstance(model, nn.Module):
            if buffers is None:
                buffers = _unmeasured(model)
            model = model.state_dict()
        self.algorithm, self.seed, self.min_replies, self.record = algorithm, seed, min_replies, record
        self.grouping: Grouping = algorithm.grouping if layers is None else layers
        self.buffers = None if buffers is None else list(buffers)
        self._tensors = {name: value.dtype for name, value in model.items() if isinstance(value, Tensor)}
        arrays = _as_arrays(model)
        self.packing = Packing.of(kinds_of(arrays), self.grouping, self.buffers)
        self._passed: Arrays = self.packing.passed(arrays)
        self.rows: dict[Any, int] = {}
        """Each client's row in the tables of rules, by its name."""
        self.state = initial_state(self._flat(arrays), algorithm, 0, self.layers)

    @property
    def layers(self) -> Layers:
        """The model's layers."""
        return self.packing.layers

    def arrays(self) -> dict[str, Any]:
        """The global model, as its first one came: torch tensors or NumPy arrays, in their dtypes."""
        found = self.packing.unflatten(self.state.model, self._passed)
        return {name: self._as_given(name, array) for name, array in found.items()}

    # --- rounds -----------------------------------------------------------------------------------------------------

    def begin(
        self,
        number: int,
        clients: Sequence[Hashable],
        *,
        names: np.ndarray | None = None,
        model: Arrays | None = None,
        in_order: bool = True,
        spells_out_whole: bool = True,
    ) -> Round:
        """A round with these clients, to be played by whoever carries messages; see `core/round.py`.

        Orders and records call a client by its row, or, if `names` has numbers for them, by these. With a `model`, the
        global one is replaced by it first. Whoever does not know its clients again says that they are not `in_order`.
        """
        if len(set(clients)) != len(clients):
            raise BadValue("clients", list(clients), "names a client twice")
        if not self.rows:  # later rounds may have fewer clients than a selection wants, and then all of them count
            check_cohort(self.algorithm, len(clients))
        for client in clients:
            self.rows.setdefault(client, len(self.rows))
        fresh = self.algorithm.weighting.init(len(self.rows), self.layers)
        flat = self.state.model if model is None else self._flat(model)
        if model is not None:
            self._passed = self.packing.passed(model)
        self.state = replace(self.state, model=flat, weighting=grown(self.state.weighting, fresh))
        rows = np.array([self.rows[client] for client in clients], dtype=np.int64)
        who = Participants(rows if names is None else names, rows=rows, in_order=in_order)
        terms = Terms(
            self.layers,
            self.seed,
            min_replies=self.min_replies,
            record=self.record,
            population=len(self.rows),
            wire_bytes=self.packing.bytes_per_layer,
            spells_out_whole=spells_out_whole,
        )
        return Round(self.state, self.algorithm, terms, lambda attempt: who, number)

    def conclude(self, round: Round, passed: Arrays | None = None) -> RoundRecord:
        """Take in a round that was played; `passed` are its integers. `RoundFailed` changes nothing."""
        self.state, record = round.finish()
        if passed is not None:
            self._passed = passed
        return record

    def aggregate(
        self,
        trained: Sequence[Mapping[str, Any]],
        sizes: Sequence[float],
        clients: Sequence[Hashable] | None = None,
    ) -> dict[str, Any]:
        """The next global model, from what clients have trained, and how many samples each has.

        `clients` says who they are, by names of any kind; without it the positions count, and there must always be as
        many. Arrays that are not finite are set aside, as the record says; a wrong name or shape is an error.
        `last_record` has what happened.
        """
        if not isinstance(self.algorithm.objective, Plain):
            name = type(self.algorithm.objective).__name__
            problem = f"{name} pulls while clients train, which a server cannot; use `begin`"
            raise BadValue("algorithm.objective", MISSING, problem)
        if len(trained) != len(sizes) or not len(sizes):
            raise BadValue("sizes", list(sizes), f"must be as many as there are models, {len(trained)}")
        if clients is None:
            clients = range(len(trained))
            if self.rows and list(self.rows) != list(clients):
                problem = (
                    f"{len(trained)} models, and there were {len(self.rows)} before; say who is who with clients=[…]"
                )
                raise BadValue("trained", MISSING, problem)
        elif len(clients) != len(trained):
            raise BadValue("clients", list(clients), f"must be as many as there are models, {len(trained)}")
        arrays = [_as_arrays(model) for model in trained]
        updates = [self._update(f"trained[{at}]", one) for at, one in enumerate(arrays)]
        round = self.begin(self.state.round + 1, list(clients))
        at_row = {self.rows[client]: at for at, client in enumerate(clients)}

        def exchange(orders: Sequence[Order]) -> Iterator[tuple[Order, Answer]]:
            for order in orders:
                at = at_row[order.client]
                yield order, self._answer(order, updates[at], sizes[at])

        play(round, exchange)
        whole = [at_row[int(round.participants.clients[at])] for at in round.trained]
        largest = max(whole, key=lambda at: sizes[at], default=None)  # an integer has no mean
        self.last_record = self.conclude(round, None if largest is None else self.packing.passed(arrays[largest]))
        return self.arrays()

    def _update(self, where: str, arrays: Arrays) -> Tensor | Status:
        """How far a client went; a wrong name, shape or dtype is the caller's mistake."""
        self._check_names(where, arrays)
        try:
            return self.packing.flatten(arrays).sub_(self.state.model)
        except NotFinite as problem:
            return Status("not finite", problem.what)
        except ReplyError as problem:
            raise BadValue(where, MISSING, str(problem)) from None

    def _answer(self, order: Order, update: Tensor | Status, size: float) -> Answer:
        """What a client would answer, whose whole update is at hand."""
        if isinstance(update, Status):
            return update
        selection, everything = self.algorithm.selection, torch.ones(len(self.layers), dtype=torch.bool)
        if order.answer == "scores" and isinstance(selection, SelectsAfterScores):
            return Reply(size=size, scores=selection.score(update, self.layers).to(SCORE_DTYPE))
        if order.answer == "units" and isinstance(selection, SelectsOnClient):
            units = selection.pick(update, self.layers)
            keep_units(update, units, self.layers)
            return Reply(size=size, update=update, units=units, sent=layers_with_units(units, self.layers))
        sent = everything if order.mask is None else order.mask
        keep_layers(update, sent, self.layers)
        return Reply(size=size, update=update, sent=sent)

    # --- arrays -----------------------------------------------------------------------------------------------------

    def _flat(self, arrays: Arrays) -> Tensor:
        """The global model as a flat vector."""
        self._check_names("arrays", arrays)
        try:
            return self.packing.flatten(arrays)
        except ReplyError as problem:
            raise BadValue("arrays", MISSING, f"the global model: {problem}") from None

    def _check_names(self, where: str, arrays: Arrays) -> None:
        wrong = sorted(set(arrays) ^ set(self.packing.order))
        if wrong:
            problem = "is missing" if wrong[0] in self.packing.order else "is not in the model"
            raise BadValue(where, MISSING, f"{wrong[0]!r} {problem}")

    def _as_given(self, name: str, array: np.ndarray) -> Any:
        return torch.from_numpy(array).to(self._tensors[name]) if name in self._tensors else array

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write everything that later rounds depend on, as safetensors; a file that is there is replaced whole."""
        arrays = {"model": self.state.model.numpy()}
        arrays |= {f"passing/{name}": np.array(array, order="C") for name, array in self._passed.items()}
        for part in _PARTS:
            arrays |= {f"{part}/{name}": value.numpy() for name, value in getattr(self.state, part).items()}
        about = {
            "format": FORMAT,
            "round": self.state.round,
            "rows": [[_as_json(name), row] for name, row in self.rows.items()],
            "what": self._fingerprint(),
            "arrays": [[name, str(dtype), list(shape)] for name, (dtype, shape) in self.packing.kinds.items()],
            "tensors": {name: str(dtype).removeprefix("torch.") for name, dtype in self._tensors.items()},
            "settings": {"layers": self.grouping, "buffers": self.buffers, "seed": self.seed}
            | {"min_replies": self.min_replies, "record": self.record},
        }
        about["sha256"] = _digest(arrays, about)
        write_whole(Path(path), save(arrays, {"server": json.dumps(about)}))

    @classmethod
    def load(cls, path: str | Path, algorithm: Algorithm) -> Self:
        """The server that was saved, which goes on with the same algorithm. The file names no code."""
        where = Path(path)
        arrays, about = _read(where)
        try:
            settings, tensors = dict(about["settings"]), dict(about["tensors"])
            kinds = {str(name): (_DTYPES[dtype], tuple(shape)) for name, dtype, shape in about["arrays"]}
            numbers = sum(math.prod(shape) for _, shape in kinds.values())
            there = sum(array.size for name, array in arrays.items() if name == "model" or name.startswith("passing/"))
            if numbers != there or not all(type(size) is int and size >= 0 for _, s in kinds.values() for size in s):
                raise ValueError("its arrays have other shapes than it says")
            model = {name: np.zeros(shape, dtype) for name, (dtype, shape) in kinds.items()}
            server = cls(model, algorithm, **settings)
            server._tensors = {str(name): _TENSORS[dtype] for name, dtype in tensors.items()}
        except (KeyError, TypeError, ValueError, AttributeError, UserError) as error:
            raise RunDirectoryError(f"{where} is damaged: {printable(str(error))}") from None
        server.restore(where)
        return server

    def restore(self, path: str | Path) -> None:
        """Go on from a file that the same algorithm for the same model has saved."""
        where = Path(path)
        arrays, about = _read(where)
        try:
            rows = dict(about["rows"])
            number, what = about["round"], about["what"]
        except (KeyError, TypeError, ValueError) as error:
            raise RunDirectoryError(f"{where} is no file that a Server has saved: {error}") from None
        if what != self._fingerprint():
            raise RunDirectoryError(f"{where} is of another algorithm, model or seed than this server")
        if type(number) is not int or not 0 <= number < MOST_SAMPLES or sorted(rows.values()) != list(range(len(rows))):
            raise RunDirectoryError(f"{where} is damaged: round = {number!r}, rows = {rows!r:.100}")
        fresh = initial_state(self.state.model, self.algorithm, len(rows), self.layers)
        wanted = {"model": fresh.model, **{f"passing/{n}": torch.from_numpy(a) for n, a in self._passed.items()}}
        for part in _PARTS:
            wanted |= {f"{part}/{name}": value for name, value in getattr(fresh, part).items()}
        if arrays.keys() != wanted.keys():
            raise RunDirectoryError(f"{where} is damaged: it has other arrays than this algorithm's state")
        for name, array in arrays.items():
            as_it_is = torch.from_numpy(array)
            if (as_it_is.shape, as_it_is.dtype) != (wanted[name].shape, wanted[name].dtype):
                raise RunDirectoryError(f"{where} is damaged: {name} is {array.dtype} {list(array.shape)}")
        parts = {part: _below(part, arrays) for part in _PARTS}
        self.state = ServerState(number, torch.from_numpy(arrays["model"]), **parts)
        self._passed = {name: value.numpy() for name, value in _below("passing", arrays).items()}
        self.rows = rows

    def _fingerprint(self) -> str:
        """What a saved state is good for."""
        kinds = [(name, str(self.packing.dtypes.get(name))) for name in self.packing.order]
        shapes = [(entry.name, entry.shape, layer.name) for layer in self.layers.layers for entry in layer.entries]
        return sha256(repr((vars(self.algorithm), self.seed, kinds, shapes)).encode()).hexdigest()


_DTYPES = {
    name: np.dtype(name)
    for name in ("float16", "float32", "float64", "bool", *(f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)))
}
_TENSORS = {name: getattr(torch, name) for name in (*_DTYPES, "bfloat16")}
"""What arrays and tensors may be in a file."""


def _read(where: Path) -> tuple[Arrays, dict[str, Any]]:
    """The arrays of a file that a Server has saved, and what it says of them."""
    try:
        arrays, metadata = Folder(where.parent).read_arrays(where.name)
        about = dict(json.loads(metadata["server"]))
        found, digest = about["format"], about.pop("sha256")
    except (KeyError, TypeError, ValueError, RecursionError, OSError) as error:
        raise RunDirectoryError(f"{where} is no file that a Server has saved: {error}") from None
    if found != FORMAT:
        raise RunDirectoryError(f"{where}: format = {found!r}, expected {FORMAT}")
    if digest != _digest(arrays, about):
        raise RunDirectoryError(f"{where} is damaged: its digest does not match")
    return arrays, about


def _below(part: str, arrays: Arrays) -> State:
    prefix = f"{part}/"
    return {n.removeprefix(prefix): torch.from_numpy(a) for n, a in arrays.items() if n.startswith(prefix)}


def _digest(arrays: Arrays, about: Mapping[str, Any]) -> str:
    digest = sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(arrays):
        digest.update(f"{name}:{arrays[name].shape}:{arrays[name].dtype};".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def _as_json(name: Any) -> Any:
    if not isinstance(name, str | int):
        raise BadValue("clients", name, "only names that are text or whole numbers can be saved")
    return name


def _as_arrays(model: Mapping[str, Any]) -> Arrays:
    """Named arrays of NumPy or torch as NumPy's; bfloat16, which that has not, as float32."""

    def array(value: Any) -> np.ndarray:
        if isinstance(value, Tensor):
            value = value.detach().cpu()
            value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
        found: np.ndarray = np.asarray(value)
        return found

    return {name: array(value) for name, value in model.items()}


def _unmeasured(model: nn.Module) -> list[str]:
    """A module's buffers and frozen parameters: they are averaged, and no part of an angle or a divergence."""
    trained = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    return [name for name, value in model.state_dict().items() if name not in trained and value.is_floating_point()]
