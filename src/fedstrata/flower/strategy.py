"""`Strategy`: any algorithm of fedstrata in the place of a strategy of Flower's.

Flower's base class makes a round out of two calls, `configure_train` and `aggregate_train`, and knows nodes by ids
that come and go. What has to be remembered for that is remembered here and nowhere else: the round under way, and
which row of the weighting's tables is which node's. The rules and the equation are those of `rounds.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from flwr.supercore import log
from torch import Tensor

from fedstrata.algorithms import AXES
from fedstrata.core.axes import Algorithm, State
from fedstrata.core.checks import require
from fedstrata.core.determinism import steady
from fedstrata.core.errors import ClientAppError, RecipeError, ReplyError, printable
from fedstrata.core.grouping import Grouping
from fedstrata.core.layers import Layers
from fedstrata.core.rounds import RoundRecord, conclude, initial_state, layer_figures, settle
from fedstrata.flower.callers import DEFAULT_TIMEOUT, strategies_around, timeout_of_start
from fedstrata.flower.grid import OneByOne
from fedstrata.flower.privacy import check_noise, is_noisy
from fedstrata.flower.replies import read_size, told
from fedstrata.flower.round import RoundUnderWay, Server
from fedstrata.flower.wire import Ask, Packing, names, rule_to_json
from fedstrata.objectives import Plain


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
        if not isinstance(algorithm, Algorithm):
            raise RecipeError("algorithm", algorithm, "must be an Algorithm, like fedstrata.fedlayerwise()")
        require(min_replies >= 1, "min_replies", min_replies, "must be at least 1")
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
        self._server: Server | None = None
        self._round: tuple[RoundUnderWay, Grid] | None = None
        self._timeout: float | None = DEFAULT_TIMEOUT
        self._noisy = False

    @property
    def layers(self) -> Layers:
        """The model's layers; known when the first round begins."""
        if self._server is None:
            raise RuntimeError("the layers are known when the first round begins")
        return self._server.packing.layers

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
        return super().start(
            OneByOne.of(grid), initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample nodes as FedAvg does, and tell them what the algorithm asks for. Round 1 begins anew."""
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._round = None
        if not messages:
            return []
        if server_round == 1:
            self._server, self.records = None, []
        self._server = self._prepared(server_round, arrays, [message.metadata.dst_node_id for message in messages])
        if not self.records:
            log(INFO, "configure_train: %s layers: %s", len(self.layers), names(self.layers.names, limit=12))
        wrappers = [strategy for strategy in strategies_around() if is_noisy(strategy)]
        for wrapper in wrappers:
            check_noise(wrapper, self.algorithm, self._server.packing)
        self._noisy, self._timeout = bool(wrappers), timeout_of_start()
        under_way = RoundUnderWay(
            server_round, self._server, self._ask, messages, self.seed, config_key=self.configrecord_key
        )
        self._round = (under_way, grid)
        return under_way.messages

    def _prepared(self, server_round: int, arrays: ArrayRecord, nodes: Sequence[int]) -> Server:
        """The server at the beginning of a round: with this model, and a row for every node that it has seen."""
        packing, before = Packing.of(arrays, self._grouping, self._buffers), self._server
        try:
            model = packing.flatten(arrays)
        except ReplyError as problem:
            raise RecipeError("arrays", f"round {server_round}", f"the global model: {problem}") from None
        rows = dict(before.rows) if before else {}
        for node in sorted(nodes):
            rows.setdefault(node, len(rows))
        algorithm = before.algorithm if before else settle(self.algorithm, len(nodes))
        state = initial_state(model, algorithm, len(rows), packing.layers)
        if before:
            if packing != before.packing:
                raise RecipeError("arrays", f"round {server_round}", "has other names, shapes or dtypes than before")
            state = replace(before.state, model=model, weighting=_grown(before.state.weighting, state.weighting))
        return Server(algorithm, packing, state, arrays, rows)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Weigh and aggregate the usable replies; the others are set aside, each with a line in the log."""
        if self._round is None or self._round[0].number != server_round or self._server is None:
            if list(replies):
                raise RuntimeError(f"round {server_round} has replies, but was not configured")
            return None, None
        (under_way, grid), self._round = self._round, None
        replies = list(replies)
        under_way.receive(replies, self.weighted_by_key, grid, self._timeout)
        log(INFO, "aggregate_train: %s of %s replies usable", under_way.usable(), len(under_way.messages))
        # A wrapper has counted the replies, and adds noise for a mean over all of them.
        needed = max(self.min_replies, len(replies) if self._noisy else 0)
        if not under_way.uploads or under_way.usable() < needed:
            log(WARNING, "\t> the model stays as it is: %s replies are needed", needed)
            self.records.append(under_way.record({}))
            if self._server.state.round == 0 and (reason := under_way.hopeless()) is not None:
                raise ClientAppError(reason)
            return None, None
        with steady():
            cohort = under_way.cohort()
            state, weights = conclude(self._server.state, self._server.algorithm, cohort)
            figures: dict[str, np.ndarray] = {}
            if self.record:
                first = {at: answer.reply for at, answer in under_way.trained.items()}
                rows = list(under_way.uploads)
                figures = layer_figures(len(under_way.nodes), rows, cohort, weights, state.weighting, first)
        self._server = replace(self._server, state=state)
        self.records.append(under_way.record(figures))
        arrays = self._server.packing.unflatten(state.model, under_way.passed())
        return arrays, self._metrics([answer.content for answer in under_way.trained.values()], figures)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the clients' metrics as FedAvg does; a reply without any is set aside, and does not end the run."""
        usable = []
        for reply in replies:
            word, size = told(reply, lambda content: read_size(content, self.weighted_by_key))
            if size is None:
                log(WARNING, "\t> node %s: %s", reply.metadata.src_node_id, word)
            else:
                usable.append(reply.content)
        log(INFO, "aggregate_evaluate: %s replies usable", len(usable))
        if not usable:
            return None
        return self.evaluate_metrics_aggr_fn(_with_common_metrics(usable), self.weighted_by_key)

    def _metrics(self, contents: Sequence[RecordDict], figures: Mapping[str, np.ndarray]) -> MetricRecord:
        """The clients' metrics, averaged as by FedAvg, and the mean angle of each layer in degrees."""
        metrics = self.train_metrics_aggr_fn(_with_common_metrics(contents), self.weighted_by_key)
        if figures:
            angles = np.ma.masked_invalid(np.degrees(figures["angle"])).mean(0).filled(math.nan)
            metrics["layer-angles"] = [round(float(angle), 1) for angle in angles]
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
