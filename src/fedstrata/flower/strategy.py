"""`Strategy`: any algorithm of fedstrata in the place of a strategy of Flower's.

Flower's base class makes a round out of two calls, `configure_train` and `aggregate_train`, and knows nodes by ids
that come and go. The round and all that lasts between rounds are `fedstrata.Server`'s; here is what carries its orders
to Flower's nodes, and reads what they reply.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from flwr.supercore import log

from fedstrata.algorithms import AXES
from fedstrata.core.axes import Algorithm
from fedstrata.core.errors import ClientAppError, RecipeError, ReplyError, printable, require
from fedstrata.core.grouping import Grouping
from fedstrata.core.layers import Layers
from fedstrata.core.messages import Answer, Order, Reply
from fedstrata.core.packing import Arrays, Packing
from fedstrata.core.record import RoundFailed, RoundRecord
from fedstrata.core.round import Round
from fedstrata.core.status import Status
from fedstrata.core.training import check_training
from fedstrata.engines.flower.grid import OneByOne
from fedstrata.flower.callers import DEFAULT_TIMEOUT, strategies_around, timeout_of_start
from fedstrata.flower.privacy import check_noise, is_noisy
from fedstrata.flower.replies import read_arrays, read_receipt, read_reply, read_scores, read_size
from fedstrata.flower.wire import FIRST_MOD, Ask, Decoded, encoded, names, packing_of, rule_to_json
from fedstrata.objectives import Plain
from fedstrata.server import Server


class Strategy(FedAvg):
    """An algorithm of fedstrata as a Flower strategy: `Strategy(fedlayerwise(), fraction_evaluate=0.5)`.

    Parameters
    ----------
    algorithm
        Whatever only the server decides works with stock ClientApps. An objective needs `fedstrata.flower.Local` in
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
        Whether `records` keeps the numbers per node and layer.
    seed
        For selections that draw layers or clients at random.
    checkpoint
        A file for the server's state after every round. If it is there when training starts, that goes on from it.
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
        checkpoint: str | Path | None = None,
        **fedavg: Any,
    ) -> None:
        super().__init__(**fedavg)
        if not isinstance(algorithm, Algorithm):
            raise RecipeError("algorithm", algorithm, "must be an Algorithm, like fedstrata.fedlayerwise()")
        require(min_replies >= 1, "min_replies", min_replies, "must be at least 1")
        check_training(algorithm, None)
        decides = algorithm.selection.decides
        if decides == "on_client":
            found = type(algorithm.selection).__name__
            raise RecipeError("algorithm.selection", found, "picks units on the client, for which Flower has no reply")
        self.algorithm, self.seed, self.record, self.min_replies = algorithm, seed, record, min_replies
        self.records: list[RoundRecord] = []
        """What happened in each round, as `fedstrata.fit` tells it; `clients` are node ids."""
        self._grouping: Grouping = algorithm.grouping if layers is None else layers
        self._buffers = None if buffers is None else list(buffers)
        self._ask = Ask(
            round=0,
            model=self.arrayrecord_key,
            objective="" if isinstance(algorithm.objective, Plain) else rule_to_json("objective", algorithm.objective),
            selection=rule_to_json("selection", algorithm.selection) if decides == "after_scores" else "",
            layers=json.dumps(self._grouping),
            buffers=json.dumps(self._buffers),
        )
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._server: Server | None = None
        self._round: _UnderWay | None = None
        self._done = 0  # rounds before Flower's first
        self._asked: list[Message] = []
        self._timeout: float | None = DEFAULT_TIMEOUT
        self._noisy = False

    @property
    def server(self) -> Server:
        """What lasts between rounds; it is there when the first one begins."""
        if self._server is None:
            raise RuntimeError("the layers are known when the first round begins")
        return self._server

    @property
    def layers(self) -> Layers:
        """The model's layers; known when the first round begins."""
        return self.server.layers

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
        """Run the rounds, as Flower's strategies do; a reply that Flower cannot read does not end them."""
        if self._checkpoint is not None and self._checkpoint.exists():
            initial_arrays = encoded(self._opened(1, initial_arrays).arrays())
        return super().start(
            OneByOne.of(grid), initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn
        )

    # --- a round ----------------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample nodes as FedAvg does, and tell them what the algorithm asks for.

        Round 1 begins anew, or where the checkpoint is.
        """
        if server_round == 1 or self._server is None:
            self._server, self.records = self._opened(server_round, arrays), []
            self._done = self._server.state.round
            if self._done:
                arrays = encoded(self._server.arrays())
            log(INFO, "configure_train: %s layers: %s", len(self.layers), names(self.layers.names, limit=12))
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._round = None
        if not messages:
            return []
        if packing_of(arrays, self._grouping, self._buffers) != self._server.packing:
            raise RecipeError("arrays", f"round {server_round}", "has other names, shapes or dtypes than before")
        wrappers = [strategy for strategy in strategies_around() if is_noisy(strategy)]
        for wrapper in wrappers:
            check_noise(wrapper, self.algorithm, self._server.packing)
        self._noisy, self._timeout = bool(wrappers), timeout_of_start()
        rows = self._server.rows
        nodes = sorted(message.metadata.dst_node_id for message in messages)
        nodes.sort(key=lambda node: rows.get(node, len(rows)))  # new ones come last, and get their rows in this order
        round = self._server.begin(
            server_round + self._done,
            nodes,
            names=np.array(nodes, dtype=np.uint64),
            model=_numbers(server_round, arrays),
            in_order=False,  # ids of nodes are drawn anew whenever they are started
            spells_out_whole=False,  # a stock ClientApp that is to send everything is not told of it
        )
        self._round = _UnderWay(server_round, round, self._server.packing, self._ask, grid, self.configrecord_key)
        return self._round.address(messages)

    def _opened(self, server_round: int, arrays: ArrayRecord) -> Server:
        """A server for this model, as the checkpoint has it, if there is one."""
        packing_of(arrays, self._grouping, self._buffers)  # which says what is wrong with arrays that cannot be read
        server = Server(
            _numbers(server_round, arrays),
            self.algorithm,
            layers=self._grouping,
            buffers=self._buffers,
            min_replies=self.min_replies,
            record=self.record,
            seed=self.seed,
        )
        if self._checkpoint is not None and self._checkpoint.exists():
            server.restore(self._checkpoint)
        return server

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Weigh and aggregate the usable replies; the others are set aside, each with a line in the log."""
        replies = list(replies)
        under_way, self._round = self._round, None
        if under_way is None or under_way.number != server_round:
            if replies:
                raise RuntimeError(f"round {server_round} has replies, but was not configured")
            return None, None
        if self._noisy:  # a wrapper has counted the replies, and adds noise for a mean over all of them
            under_way.round.min_replies = max(self.min_replies, len(replies))
        under_way.receive(replies, self.weighted_by_key, self._timeout)
        try:
            record = self.server.conclude(under_way.round, under_way.passed())
        except RoundFailed as failed:
            self.records.append(failed.record)
            needed = max(under_way.round.min_replies, 1)
            log(WARNING, "\t> the model stays as it is: %s replies usable, %s needed", failed.record.replies, needed)
            if self.server.state.round == 0 and (reason := under_way.hopeless(failed.record)) is not None:
                raise ClientAppError(reason) from None
            return None, None
        log(INFO, "aggregate_train: %s of %s replies usable", record.replies, record.asked)
        self.records.append(record)
        if self._checkpoint is not None:
            self.server.save(self._checkpoint)
        return encoded(self.server.arrays()), self._metrics(under_way.contents(), record)

    # --- metrics ----------------------------------------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask nodes as FedAvg does, and remember whom."""
        self._asked = list(super().configure_evaluate(server_round, arrays, config, grid))
        return self._asked

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the clients' metrics as FedAvg does; a reply without any is set aside, and does not end the run."""
        nodes = {message.metadata.message_id: message.metadata.dst_node_id for message in self._asked}
        usable = []
        for reply in replies:
            size = read_reply(reply, lambda content: read_size(content, self.weighted_by_key))
            if isinstance(size, Status):  # an error that Flower makes does not name its node
                node = nodes.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
                log(WARNING, "\t> node %s: %s", node, size)
            else:
                usable.append(reply.content)
        log(INFO, "aggregate_evaluate: %s replies usable", len(usable))
        if not usable:
            return None
        return self.evaluate_metrics_aggr_fn(_with_common_metrics(usable), self.weighted_by_key)

    def _metrics(self, contents: Sequence[RecordDict], record: RoundRecord) -> MetricRecord | None:
        """The clients' metrics, averaged as by FedAvg, and the mean angle of each layer in degrees."""
        metrics: MetricRecord | None = self.train_metrics_aggr_fn(_with_common_metrics(contents), self.weighted_by_key)
        if record.layers:
            angles = np.ma.masked_invalid(np.degrees(record.layers["angle"])).mean(0).filled(math.nan)
            metrics = MetricRecord() if metrics is None else metrics
            metrics["layer-angles"] = [round(float(angle), 1) for angle in angles]
        return metrics


class _UnderWay:
    """Between `configure_train` and `aggregate_train`: which message carries which order."""

    def __init__(self, number: int, round: Round, packing: Packing, ask: Ask, grid: Grid, config_key: str) -> None:
        self.number, self.round, self._packing, self._grid = number, round, packing, grid
        self._config_key = config_key
        self._ask = Ask(**{**vars(ask), "round": round.number})
        self._configs: dict[int, ConfigRecord] = {}
        self._sent: list[tuple[Message, Order]] = []
        self._contents: dict[int, RecordDict] = {}
        """By node: what came with first replies, …"""
        self._passed: dict[int, tuple[float, Arrays]] = {}
        """… and of whole models, the number of examples and what only passes through. The round may refuse some."""

    def address(self, messages: Sequence[Message]) -> list[Message]:
        """Put what the algorithm asks for into the nodes' messages; a node that is to send nothing gets none."""
        of_node = {message.metadata.dst_node_id: message for message in messages}
        for node, message in of_node.items():
            self._configs[node] = message.content.config_records.get(self._config_key, ConfigRecord())
        for order in self.round.next_orders():
            message = of_node[order.client]
            self._sent.append((message, order))
            if not (self._ask.objective or order.answer == "scores" or order.mask is not None):
                continue
            answer = "scores" if order.answer == "scores" else "all" if order.mask is None else "arrays"
            arrays = () if order.mask is None else self._packing.arrays_of(order.mask)
            ask = Ask(**{**vars(self._ask), "answer": answer, "arrays": arrays})
            config = ask.added_to(self._configs[order.client], order.objective_state)
            message.content = RecordDict({**message.content, self._config_key: config})  # FedAvg gives all the same
        return [message for message, _ in self._sent]

    def receive(self, replies: Iterable[Message], weighted_by: str, timeout: float | None) -> None:
        """Read the replies and, for a selection that wanted scores first, fetch what was chosen."""
        self._collect(replies, lambda order, content: self._read_trained(order, content, weighted_by))
        while orders := self.round.next_orders():
            self._sent = [(self._second(order), order) for order in orders]
            messages = [message for message, _ in self._sent]
            self._collect(OneByOne.of(self._grid).send_and_receive(messages, timeout=timeout), self._read_chosen)

    def _collect(self, replies: Iterable[Message], read: Callable[[Order, RecordDict], Answer]) -> None:
        """Hand the round every reply, and say in the log whose cannot be used."""
        # Only the message that it answers says whose a reply is: an error that Flower makes does not name its node, and
        # whatever else a reply says of its origin, the node has written itself.
        waiting = {message.metadata.message_id: order for message, order in self._sent}
        for reply in replies:
            order = waiting.pop(reply.metadata.reply_to_message_id, None)
            if order is None:
                continue  # nobody asked it, or it has answered already
            status = self.round.receive(order, read_reply(reply, partial(read, order)))
            if status is not None and not status.counts:
                log(WARNING, "\t> node %s: %s", order.client, status)
        for order in waiting.values():
            log(WARNING, "\t> node %s: no reply", order.client)

    def _read_trained(self, order: Order, content: RecordDict, weighted_by: str) -> Reply:
        """A first reply, with everything that was asked for."""
        packing, size = self._packing, read_size(content, weighted_by)
        count = len(packing.layers)
        stiffness = read_receipt(content, self._ask, count) if self._ask.objective else None
        if order.answer == "scores":
            scores = read_scores(content, self._ask, count)
            self._contents[order.client] = content
            return Reply(size=size, scores=scores, stiffness=stiffness)
        sent = torch.ones(count, dtype=torch.bool) if order.mask is None else order.mask
        wanted = packing.order if order.mask is None else packing.arrays_of(order.mask)
        arrays = Decoded(read_arrays(content, wanted, packing))
        passed = packing.passed(arrays) if order.mask is None else None
        update = packing.difference(arrays, self.round.state.model, sent)
        self._contents[order.client] = content
        if passed is not None:
            self._passed[order.client] = (size, passed)
        return Reply(size=size, update=update, sent=sent, stiffness=stiffness)

    def _second(self, order: Order) -> Message:
        assert order.mask is not None
        arrays = self._packing.arrays_of(order.mask)
        ask = Ask(self.round.number, self._ask.model, answer="kept", arrays=arrays)
        content = RecordDict({self._config_key: ask.added_to(self._configs[order.client], {})})
        return Message(content, dst_node_id=order.client, message_type=MessageType.TRAIN)

    def _read_chosen(self, order: Order, content: RecordDict) -> Reply:
        packing, mask = self._packing, order.mask
        assert mask is not None
        arrays = Decoded(read_arrays(content, packing.arrays_of(mask), packing))
        return Reply(update=packing.difference(arrays, self.round.state.model, mask), sent=mask)

    def contents(self) -> list[RecordDict]:
        """What came with usable first replies, in an order that does not depend on the ids of nodes."""
        found = [self._contents[node] for node in self._usable()]
        return sorted(found, key=lambda content: repr([sorted(r.items()) for r in content.metric_records.values()]))

    def passed(self) -> Arrays | None:
        """Integers have no mean: they come from the node with the most examples, or stay if only layers were sent."""

        def rank(one: tuple[float, Arrays]) -> tuple[float, list[bytes]]:
            return one[0], [array.tobytes() for array in one[1].values()]

        found = max((self._passed[node] for node in self._usable() if node in self._passed), key=rank, default=None)
        return None if found is None else found[1]

    def _usable(self) -> list[int]:
        """The nodes whose first reply can be used."""
        return [int(self.round.participants.clients[at]) for at in self.round.trained]

    def hopeless(self, record: RoundRecord) -> str | None:
        """Why nobody's answer can be used, though everyone who was asked has answered: the first reason."""
        if self.round.uploads or any(status.kind == "no reply" for status in record.status):
            return None
        if not record.lost:
            return None
        node, status = record.lost[0]
        selects = self.round.algorithm.selection.decides != "before" or self._asks_for_some()
        doubt = selects and status.kind == "failed" and FIRST_MOD not in status.reason
        hint = f"; if a mod has failed, {FIRST_MOD}" if doubt else ""
        reason = f"node {node}: {status}{hint}"
        return f"round {self.number}: all {record.asked} nodes answered, and no answer can be used; {reason}"

    def _asks_for_some(self) -> bool:
        return any(order.mask is not None for _, order in self._sent)


def _numbers(server_round: int, arrays: ArrayRecord) -> Arrays:
    try:
        return dict(Decoded(arrays))
    except ReplyError as problem:
        raise RecipeError("arrays", f"round {server_round}", f"the global model: {problem}") from None


def _with_common_metrics(contents: Sequence[RecordDict]) -> list[RecordDict]:
    """The contents with only those metrics that all of them have, in the same form: the rest has no mean."""

    def form(value: object) -> int | None:
        return len(value) if isinstance(value, list) else None

    metrics = [next(iter(content.metric_records.items())) for content in contents]
    common = {
        key
        for key, value in metrics[0][1].items()
        if all(key in record and form(record[key]) == form(value) for _, record in metrics)
    }
    if all(set(record) == common for _, record in metrics):
        return list(contents)
    log(WARNING, "\t> clients report different metrics; averaged are: %s", printable(names(sorted(common), limit=12)))
    return [
        RecordDict({**content, name: MetricRecord({key: record[key] for key in common})})
        for content, (name, record) in zip(contents, metrics, strict=True)
    ]
