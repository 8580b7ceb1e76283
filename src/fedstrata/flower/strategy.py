"""`Strategy`: any algorithm of fedstrata in the place of a strategy of Flower's.

Flower's base class makes a round out of two calls, `configure_train` and `aggregate_train`, and knows nodes by ids
that come and go. What has to be remembered for that lives in this file: the round under way, and which row of the
weighting's tables is which node's. The rules and the equation are those of `rounds.py`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from flwr.supercore import log
from torch import Tensor

from fedstrata import rng
from fedstrata.algorithm import Algorithm, SelectsAfterScores, SelectsBefore, State
from fedstrata.algorithms import AXES
from fedstrata.checks import require
from fedstrata.client import keep_layers, one_thread
from fedstrata.cohort import Cohort
from fedstrata.errors import RecipeError, ReplyError
from fedstrata.flower.wire import (
    ASK,
    RECEIPT,
    SCORES,
    STATE,
    Ask,
    Packing,
    decoded,
    names,
    rule_to_json,
    state_to_record,
)
from fedstrata.layers import Grouping, Layers
from fedstrata.messages import Order, Reply
from fedstrata.objectives import Plain
from fedstrata.rounds import (
    Ledger,
    RoundRecord,
    ServerState,
    checked_mask,
    conclude,
    initial_state,
    layer_figures,
    settle,
)

Read = TypeVar("Read")


@dataclass(frozen=True)
class _Trained:
    """A usable reply to the first message."""

    reply: Reply
    size: float
    content: RecordDict
    passed: Mapping[str, Array]


@dataclass
class _Round:
    """The round between `configure_train` and the end of `aggregate_train`; positions are its nodes, in row order."""

    number: int
    grid: Grid
    model: ArrayRecord
    nodes: list[int]
    status: list[str]
    masks: dict[int, Tensor]
    messages: list[Message]
    ledger: Ledger
    started: float


class Strategy(FedAvg):
    """An algorithm of fedstrata as a Flower strategy: `Strategy(fedlayerwise(), fraction_evaluate=0.5)`.

    Parameters
    ----------
    algorithm
        Whatever only the server decides works with stock ClientApps. An objective needs `fedstrata.flower.Spring` in
        the client's training loop, a selection of layers `fedstrata.flower.selection_mod`; a reply of a client that
        has not got it is refused.
    layers
        `module` (arrays with the same dotted prefix; those without a dot singly), `block`, `tensor`, or a mapping from
        a layer's name to patterns of array names. By default what the algorithm's paper calls a layer.
    buffers
        Patterns of arrays that are averaged but not measured. By default `*running_mean` and `*running_var`.
    min_replies
        With fewer usable replies the round changes nothing.
    record
        Whether `records` keeps the figures per node and layer.
    seed
        For selections that draw layers or clients at random.
    **fedavg
        The options of `flwr.serverapp.strategy.FedAvg`: sampling, keys of records, aggregation of metrics.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        layers: Grouping | None = None,
        buffers: Sequence[str] | None = None,
        min_replies: int = 1,
        record: bool = True,
        seed: int = 0,
        **fedavg: Any,
    ) -> None:
        super().__init__(**fedavg)
        require(min_replies >= 1, "min_replies", min_replies, "must be at least 1")
        decides = algorithm.selection.decides
        if decides == "on_client":
            found = type(algorithm.selection).__name__
            raise RecipeError("algorithm.selection", found, "picks units on the client, for which Flower has no reply")
        self.algorithm, self.seed, self.record, self.min_replies = algorithm, seed, record, min_replies
        self._grouping: Grouping = algorithm.grouping if layers is None else layers
        self._buffers = None if buffers is None else list(buffers)
        plain = isinstance(algorithm.objective, Plain)
        self._objective = "" if plain else rule_to_json("objective", algorithm.objective)
        self._selection = rule_to_json("selection", algorithm.selection) if decides == "after_scores" else ""
        self.records: list[RoundRecord] = []
        """What happened in each round, as `fedstrata.fit` tells it; `clients` are node ids, in the order of rows."""
        self._packing: Packing | None = None
        self._settled = algorithm
        self._state: ServerState | None = None
        self._rows: dict[int, int] = {}  # of a node, in the weighting's tables; in the order of their first rounds
        self._round: _Round | None = None
        self._timeout: float = 3600

    @property
    def layers(self) -> Layers:
        """The model's layers; known when the first round begins."""
        return self._known_packing.layers

    @property
    def _known_packing(self) -> Packing:
        if self._packing is None:
            raise RuntimeError("the layers are known when the first round begins")
        return self._packing

    def summary(self) -> None:
        """Log what will be run."""
        axes = ", ".join(repr(getattr(self.algorithm, axis)) for axis in AXES)
        log(INFO, "\t├──> Algorithm: %s", axes)
        super().summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds, as Flower's strategies do; a second exchange is given the same time as the first."""
        self._timeout = timeout
        return super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)

    # --- before training ----------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample nodes as FedAvg does, and tell them what the algorithm asks for. Round 1 begins anew."""
        started = time.perf_counter()
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._round = None
        if not messages:
            return []
        self._enter(server_round, arrays, [message.metadata.dst_node_id for message in messages])
        messages.sort(key=lambda message: self._rows[message.metadata.dst_node_id])
        nodes = [message.metadata.dst_node_id for message in messages]
        nothing = torch.zeros(len(self.layers), dtype=torch.int64)
        self._round = _Round(
            number=server_round,
            grid=grid,
            model=arrays,
            nodes=nodes,
            status=["no reply"] * len(nodes),
            masks=self._draw(server_round, len(nodes)),
            messages=[],
            ledger=Ledger(up=nothing.clone(), down=nothing.clone()),
            started=started,
        )
        for at, message in enumerate(messages):
            self._address(self._round, at, message)
        return self._round.messages

    def _enter(self, server_round: int, arrays: ArrayRecord, nodes: Sequence[int]) -> None:
        """Take over the model, and give new nodes their rows."""
        packing = Packing.of(arrays, self._grouping, self._buffers)
        try:
            model = packing.flatten(arrays)
        except ReplyError as problem:
            raise RecipeError("arrays", f"round {server_round}", f"the global model: {problem}") from None
        begins = server_round == 1 or self._state is None
        if begins:
            self._packing, self._rows, self.records = packing, {}, []
            self._settled = settle(self.algorithm, len(nodes))
        elif packing != self._packing:
            raise RecipeError("arrays", f"round {server_round}", "has other names, shapes or dtypes than in round 1")
        for node in sorted(nodes):
            self._rows.setdefault(node, len(self._rows))
        fresh = initial_state(model, self._settled, len(self._rows), packing.layers)
        if begins or self._state is None:
            self._state = fresh
        else:
            self._state = replace(self._state, model=model, weighting=_grown(self._state.weighting, fresh.weighting))

    def _draw(self, server_round: int, clients: int) -> dict[int, Tensor]:
        """Which layers each node is to send, bool [L], by position; all, where that is not decided before training."""
        shape, selection = (clients, len(self.layers)), self._settled.selection
        mask = torch.ones(shape, dtype=torch.bool)
        if isinstance(selection, SelectsBefore):
            generator = rng.generator(self.seed, "selection", round=server_round)
            mask = checked_mask(selection.draw(clients, self.layers, generator), shape, self._settled)
        return dict(enumerate(mask))

    def _address(self, under_way: _Round, at: int, message: Message) -> None:
        """Put what the algorithm asks for into a node's message; a node that is to send nothing gets none."""
        assert self._state is not None
        row, state = under_way.masks[at], self._state.objective
        if not row.any():
            under_way.status[at] = "not selected"
            return
        some = not bool(row.all())
        if self._objective or self._selection or some:
            ask = Ask(
                round=under_way.number,
                model=self.arrayrecord_key,
                answer="scores" if self._selection else "arrays" if some else "all",
                arrays=self._known_packing.arrays_of(row) if some else (),
                objective=self._objective,
                selection=self._selection,
                layers=json.dumps(self._grouping),
                buffers=json.dumps(self._buffers),
            )
            content = RecordDict({**message.content, ASK: ask.record()})
            if state:
                content[STATE] = state_to_record(state)
            message.content = content
        order = Order("train", under_way.number, 0, at, objective_state=state, mask=row if some else None)
        under_way.ledger.control += order.control_bytes()
        under_way.ledger.down += self._known_packing.bytes_per_layer
        under_way.messages.append(message)

    # --- after training -----------------------------------------------------------------------------------------

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Weigh and aggregate the usable replies; the others are set aside, each with a line in the log."""
        under_way, self._round = self._round, None
        if under_way is None or under_way.number != server_round:
            if list(replies):
                raise RuntimeError(f"round {server_round} has replies, but was not configured")
            return None, None
        trained = self._collect(under_way, under_way.messages, replies, self._read_trained)
        if self._selection:
            uploads = self._fetch_chosen(under_way, trained)
        else:
            uploads = {at: answer.reply for at, answer in trained.items()}
        usable = sum(status.startswith("ok") for status in under_way.status)
        log(INFO, "aggregate_train: %s of %s replies usable", usable, len(under_way.messages))
        if not uploads or usable < self.min_replies:
            log(WARNING, "\t> the model stays as it is: min_replies = %s", self.min_replies)
            self._note(under_way, trained, {})
            return None, None
        with one_thread():
            arrays, cohort, weights = self._conclude(under_way, trained, uploads)
            figures: dict[str, np.ndarray] = {}
            if self.record:
                assert self._state is not None
                first = {at: answer.reply for at, answer in trained.items()}
                figures = layer_figures(
                    len(under_way.nodes), list(uploads), cohort, weights, self._state.weighting, first
                )
        self._note(under_way, trained, figures)
        return arrays, self._metrics([answer.content for answer in trained.values()], figures)

    def _collect(
        self,
        under_way: _Round,
        messages: Sequence[Message],
        replies: Iterable[Message],
        read: Callable[[_Round, int, RecordDict], Read],
    ) -> dict[int, Read]:
        """Read every reply, and keep the usable ones by position."""
        position = {node: at for at, node in enumerate(under_way.nodes)}
        awaited = {position[message.metadata.dst_node_id] for message in messages}
        # An error that Flower itself makes does not name its node, so the message that it answers has to.
        asked = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
        good: dict[int, Read] = {}
        for reply in replies:
            node = asked.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
            at = position.get(node)
            if at not in awaited:
                continue  # nobody asked it, or it has answered already
            awaited.remove(at)
            try:
                if reply.has_error():
                    under_way.status[at] = f"failed: {reply.error.reason}"
                else:
                    good[at] = read(under_way, at, reply.content)
                    under_way.status[at] = "ok"
            except ReplyError as problem:
                under_way.status[at] = f"refused: {problem}"
        for at in awaited:
            under_way.status[at] = "no reply"
        for message in messages:
            at = position[message.metadata.dst_node_id]
            if at not in good:
                log(WARNING, "\t> node %s: %s", under_way.nodes[at], under_way.status[at])
        return dict(sorted(good.items()))

    def _read_trained(self, under_way: _Round, at: int, content: RecordDict) -> _Trained:
        """A first reply, as far as it can be believed."""
        if len(content.metric_records) != 1:
            raise ReplyError(f"{len(content.metric_records)} MetricRecords, expected 1")
        size = next(iter(content.metric_records.values())).get(self.weighted_by_key)
        if not isinstance(size, int | float) or not 0 < size < math.inf:
            raise ReplyError(f"{self.weighted_by_key} = {size!r}, must be a positive number")
        reply = Reply("train", under_way.number, 0, at, stiffness=self._read_receipt(under_way, content))
        if self._selection:
            return _Trained(replace(reply, scores=self._read_scores(under_way, content)), size, content, {})
        row = under_way.masks[at]
        whole = bool(row.all())
        packing = self._known_packing
        record = self._read_arrays(content, packing.order if whole else packing.arrays_of(row))
        passed = packing.passed(record) if whole else {}
        return _Trained(self._with_update(under_way, reply, record, row), size, content, passed)

    def _read_receipt(self, under_way: _Round, content: RecordDict) -> Tensor | None:
        """How stiff the client's spring was; that it had one is what the receipt says."""
        if not self._objective:
            return None
        name = json.loads(self._objective)["name"]
        receipt = content.config_records.get(RECEIPT)
        if receipt is None:
            raise ReplyError(f"the client did not apply {name}: no acknowledgement by fedstrata.flower.Spring")
        if (receipt.get("round"), receipt.get("objective")) != (under_way.number, self._objective):
            raise ReplyError(f"the client did not apply {name}: it acknowledged {receipt.get('objective')!r}")
        pulls, stiffness = receipt.get("pulls"), receipt.get("stiffness")
        if not isinstance(pulls, int) or pulls < 1:
            raise ReplyError(f"the client did not apply {name}: Spring.pull was not called")
        if not isinstance(stiffness, list) or len(stiffness) != len(self.layers):
            raise ReplyError(f"stiffness = {stiffness!r}, expected {len(self.layers)} numbers")
        return torch.tensor([value if isinstance(value, float) else math.nan for value in stiffness]).double()

    def _read_scores(self, under_way: _Round, content: RecordDict) -> Tensor:
        record = content.array_records.get(SCORES)
        if record is None or "scores" not in record:
            name = json.loads(self._selection)["name"]
            raise ReplyError(f"no scores for {name}: the client lacks fedstrata.flower.selection_mod")
        scores = decoded("scores", record["scores"])
        if scores.dtype != np.float32 or scores.shape != (len(self.layers),):
            raise ReplyError(f"scores are {scores.dtype} {list(scores.shape)}, expected float32 [{len(self.layers)}]")
        if not np.isfinite(scores).all():
            raise ReplyError("scores are not finite")
        under_way.ledger.feedback_numbers += len(scores)
        return torch.from_numpy(scores.copy())

    def _read_arrays(self, content: RecordDict, wanted: Sequence[str]) -> ArrayRecord:
        if len(content.array_records) != 1:
            raise ReplyError(f"{len(content.array_records)} ArrayRecords, expected 1")
        record = next(iter(content.array_records.values()))
        missing, extra = [n for n in wanted if n not in record], [n for n in record if n not in set(wanted)]
        if missing:
            raise ReplyError(f"arrays {names(missing)} are missing")
        if extra:
            hint = "" if len(wanted) == len(self._known_packing.order) else " (has the client selection_mod?)"
            raise ReplyError(f"arrays {names(extra)} were not asked for{hint}")
        return record

    def _with_update(self, under_way: _Round, reply: Reply, record: ArrayRecord, row: Tensor) -> Reply:
        assert self._state is not None
        update = self._known_packing.flatten(record).sub_(self._state.model)
        keep_layers(update, row, self.layers)
        under_way.ledger.up += self._known_packing.bytes_per_layer * row
        return replace(reply, update=update, sent=row)

    def _fetch_chosen(self, under_way: _Round, trained: Mapping[int, _Trained]) -> dict[int, Reply]:
        """The second exchange: choose by the scores, and ask for what was chosen."""
        selection = self._settled.selection
        if not trained:
            return {}
        assert isinstance(selection, SelectsAfterScores)
        scores = torch.stack([answer.reply.scores for answer in trained.values() if answer.reply.scores is not None])
        chosen = checked_mask(selection.choose(scores), (len(trained), len(self.layers)), self._settled)
        messages = []
        for at, row in zip(trained, chosen, strict=True):
            under_way.masks[at] = row
            if not row.any():
                under_way.status[at] = "ok, nothing chosen"
                continue
            ask = Ask(under_way.number, self.arrayrecord_key, "kept", self._known_packing.arrays_of(row))
            content = RecordDict({ASK: ask.record()})
            messages.append(Message(content, dst_node_id=under_way.nodes[at], message_type=MessageType.TRAIN))
            under_way.ledger.control += Order("upload", under_way.number, 0, at, mask=row).control_bytes()

        def read(under_way: _Round, at: int, content: RecordDict) -> Reply:
            row = under_way.masks[at]
            record = self._read_arrays(content, self._known_packing.arrays_of(row))
            return self._with_update(under_way, Reply("upload", under_way.number, 0, at), record, row)

        replies = under_way.grid.send_and_receive(messages, timeout=self._timeout)
        return self._collect(under_way, messages, replies, read)

    # --- the end of a round -------------------------------------------------------------------------------------

    def _conclude(
        self, under_way: _Round, trained: Mapping[int, _Trained], uploads: Mapping[int, Reply]
    ) -> tuple[ArrayRecord, Cohort, Tensor]:
        """From the accepted updates to the new model."""
        assert self._state is not None
        cohort = Cohort(
            round=under_way.number,
            clients=torch.tensor([self._rows[under_way.nodes[at]] for at in uploads]),
            sizes=torch.tensor([float(trained[at].size) for at in uploads], dtype=torch.float64),
            layers=self.layers,
            updates=tuple(reply.update for reply in uploads.values() if reply.update is not None),
            sent=torch.stack([reply.sent for reply in uploads.values() if reply.sent is not None]),
            model=self._state.model,
        )
        self._state, weights = conclude(self._state, self._settled, cohort)
        # An integer has no mean: it comes from the node with the most examples, the first of them if there are several.
        whole = [answer for answer in trained.values() if answer.passed]
        passed = max(whole, key=lambda answer: answer.size).passed if whole else {}
        kept = {name: under_way.model[name] for name in self._known_packing.passing}
        return self._known_packing.unflatten(self._state.model, {**kept, **passed}), cohort, weights

    def _note(self, under_way: _Round, trained: Mapping[int, _Trained], figures: dict[str, np.ndarray]) -> None:
        nodes = len(under_way.nodes)
        self.records.append(
            RoundRecord(
                round=under_way.number,
                attempt=0,
                clients=np.array(under_way.nodes, dtype=np.uint64),
                status=tuple(under_way.status),
                sizes=np.array([trained[at].size if at in trained else 0 for at in range(nodes)]),
                work=np.zeros(nodes, dtype=np.int64),  # a Flower client decides for itself how long it trains
                losses=np.full(nodes, np.nan),
                ledger=under_way.ledger,
                seconds=time.perf_counter() - under_way.started,
                layers=figures,
            )
        )

    def _metrics(self, contents: Sequence[RecordDict], figures: Mapping[str, np.ndarray]) -> MetricRecord:
        """The clients' metrics, averaged as by FedAvg, and the mean angle of each layer in degrees."""
        metrics = self.train_metrics_aggr_fn(_with_common_metrics(contents), self.weighted_by_key)
        if figures:
            angles = np.ma.masked_invalid(np.degrees(figures["angle"])).mean(0).filled(math.nan)
            metrics["layer-angles"] = [float(angle) for angle in angles]
        return metrics


def _grown(state: State, fresh: State) -> State:
    """A state with room for more clients: what was known lies in the leading corner of what a new state would have."""

    def grow(old: Tensor, new: Tensor) -> Tensor:
        if old.shape == new.shape:
            return old
        grown = new.clone()
        grown[tuple(slice(0, size) for size in old.shape)] = old
        return grown

    return {name: grow(old, fresh[name]) for name, old in state.items()}


def _with_common_metrics(contents: Sequence[RecordDict]) -> list[RecordDict]:
    """The contents with those metrics only that all of them have, in the same form; elsewise a mean is none."""

    def form(value: object) -> int | None:
        return len(value) if isinstance(value, list) else None

    metrics = [next(iter(content.metric_records.values())) for content in contents]
    common = {
        key
        for key, value in metrics[0].items()
        if all(key in other and form(other[key]) == form(value) for other in metrics)
    }
    if all(set(record) == common for record in metrics):
        return list(contents)
    log(WARNING, "\t> clients report different metrics; averaged are: %s", ", ".join(sorted(common)))
    return [RecordDict({"metrics": MetricRecord({key: record[key] for key in common})}) for record in metrics]
