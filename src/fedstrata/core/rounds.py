"""One round, the one equation, and `fit()`.

`fit` is a generator of (state, record): evaluation, history, checkpoints and reports consume it. It knows nothing of
how orders reach clients; that is `engine.exchange`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedstrata.core import rng
from fedstrata.core.axes import Algorithm, SelectsAfterScores, SelectsBefore, State
from fedstrata.core.checks import BadValue
from fedstrata.core.cohort import Cohort, cut
from fedstrata.core.determinism import in_threads, steady
from fedstrata.core.errors import RecipeError, ReplyError, RoundFailed, RuleError
from fedstrata.core.layers import Layers
from fedstrata.core.messages import NOT_FINITE, SCORE_DTYPE, Answer, Order, Reply, check_reply
from fedstrata.core.training import LocalTraining, Participation

ANSWERS: dict[str, Answer] = {
    "before": "layers",
    "after_scores": "scores",
    "on_client": "units",
}
"""What a client is asked for after training, by when the selection decides."""


class Engine(Protocol):
    """Carries orders to clients and replies back: the only difference between engines."""

    @property
    def sizes(self) -> np.ndarray:
        """How many training samples each existing client has, int64 [N]."""
        ...

    def exchange(self, orders: Sequence[Order]) -> Iterator[Reply]:
        """Replies in any order; a client that does not answer has none."""
        ...


@dataclass(frozen=True)
class Plan:
    """What `fit` needs to know besides the algorithm."""

    layers: Layers
    rounds: int
    participation: Participation = field(default_factory=Participation)
    training: LocalTraining = field(default_factory=LocalTraining)
    seed: int = 0
    record: bool = True
    """Whether to keep the per-layer figures of every round."""


@dataclass(frozen=True)
class ServerState:
    """Everything that a later round depends on."""

    round: int
    model: Tensor
    objective: State = field(default_factory=dict)
    weighting: State = field(default_factory=dict)
    server: State = field(default_factory=dict)


@dataclass
class Ledger:
    """Bytes of one round, failed attempts included."""

    up: Tensor  # int64 [L]
    down: Tensor  # int64 [L]
    feedback_numbers: int = 0
    control: int = 0

    @property
    def feedback(self) -> int:
        """Bytes of the scores that clients report."""
        return self.feedback_numbers * SCORE_DTYPE.itemsize

    @property
    def upload(self) -> int:
        """All that goes up: layers and feedback."""
        return int(self.up.sum()) + self.feedback

    @property
    def download(self) -> int:
        """All that goes down: the model, the objective's state, masks."""
        return int(self.down.sum()) + self.control


@dataclass(frozen=True)
class RoundRecord:
    """What happened in a round; rows are the sampled clients in order, NaN where nothing is known."""

    round: int
    attempt: int
    clients: np.ndarray  # int64 [K]
    status: tuple[str, ...]  # "ok", or why there is no update
    sizes: np.ndarray  # int64 [K]
    work: np.ndarray  # int64 [K], epochs or steps
    losses: np.ndarray  # float64 [K], mean task loss while training
    ledger: Ledger
    seconds: float
    layers: dict[str, np.ndarray] = field(default_factory=dict)
    """Per client and layer [K, L]: angle, smoothed_angle, divergence, weight, mask, mu, norm; and model_angle [K]."""
    earlier: tuple[tuple[int, int, str], ...] = ()
    """What was lost in attempts before this one: attempt, client and why."""

    @property
    def lost(self) -> list[tuple[int, str]]:
        """Who has no usable reply in the attempt that counts, and why."""
        return lost(self.clients, self.status)

    @property
    def train_loss(self) -> float:
        """The clients' training losses, weighted by size."""
        known = np.isfinite(self.losses)
        return float(np.average(self.losses[known], weights=self.sizes[known])) if known.any() else float("nan")


def aggregate(model: Tensor, cohort: Cohort, weights: Tensor) -> Tensor:
    """The one equation: θ_u ← θ_u + Σ_k m_ku w_kl Δ_ku / Σ_j m_ju w_jl; what nobody sent stays as it is.

    Every update is read once, and the new model is all the memory it takes. The sum over clients is taken in the
    model's own precision, to which the result is rounded anyway.
    """
    new = torch.empty_like(model)

    def combine(pieces: Sequence[_Piece]) -> None:
        for first, last, shares in pieces:
            step = torch.zeros(last - first, dtype=model.dtype)
            for share, update in zip(shares, cohort.updates, strict=True):
                if isinstance(share, Tensor):
                    step.view(len(share), -1).addcmul_(share, update[first:last].view(len(share), -1))
                elif share > 0:
                    step.add_(update[first:last], alpha=share)
            torch.add(model[first:last], step, out=new[first:last])

    in_threads(combine, list(_pieces(cohort, weights)), cohort.numbers)
    return new


_Piece = tuple[int, int, Sequence[float | Tensor]]
"""first:last of the flat vector, and each client's m w / Σ m w there: a number, or one for each unit [rows, 1]."""

_PIECE = 1 << 16
"""How many numbers are combined at a time: few enough for a core's cache, enough to make each call worth it."""


def _pieces(cohort: Cohort, weights: Tensor) -> Iterator[_Piece]:
    """The whole model in pieces, and who has which share in them."""
    tiny = torch.finfo(torch.float64).tiny
    layers, masses = cohort.layers.layers, [weights[:, at] * cohort.sent[:, at] for at in range(len(cohort.layers))]
    if cohort.units is None:
        shares = [(mass / mass.sum().clamp_min(tiny)).tolist() for mass in masses]
        for alike, neighbours in groupby(zip(layers, shares, strict=True), key=itemgetter(1)):
            run = [layer for layer, _ in neighbours]
            yield from ((first, last, alike) for first, last in cut(run[0].start, run[-1].stop, _PIECE))
        return
    for layer, mass in zip(layers, masses, strict=True):
        for entry in layer.entries:
            by_unit = mass[:, None] * cohort.units[:, entry.first_unit : entry.first_unit + entry.units]
            by_unit = (by_unit / by_unit.sum(0).clamp_min(tiny)).to(cohort.layers.dtype)
            length = (entry.stop - entry.start) // entry.units
            for top, bottom in cut(0, entry.units, max(1, _PIECE // length)):
                first, last = entry.start + top * length, entry.start + bottom * length
                yield first, last, list(by_unit[:, top:bottom, None])


def initial_state(model: Tensor, algorithm: Algorithm, clients: int, layers: Layers) -> ServerState:
    """The server before its first round."""
    return ServerState(
        round=0,
        model=model,
        objective=algorithm.objective.init(layers),
        weighting=algorithm.weighting.init(clients, layers),
        server=algorithm.server.init(layers),
    )


def fit(
    state: ServerState, algorithm: Algorithm, engine: Engine, plan: Plan
) -> Iterator[tuple[ServerState, RoundRecord]]:
    """Run the rounds that are left, and yield the state and the record after each."""
    algorithm = settle(algorithm, plan.participation.cohort_size(int((engine.sizes > 0).sum())))
    while state.round < plan.rounds:
        state, record = _round(state, algorithm, engine, plan)
        yield state, record


def settle(algorithm: Algorithm, cohort: int) -> Algorithm:
    """Let a selection that depends on K settle for it (FedLDF's n), or refuse it."""
    settled = getattr(algorithm.selection, "for_cohort", None)
    if settled is None:
        return algorithm
    try:
        return replace(algorithm, selection=settled(cohort))
    except BadValue as error:
        raise RecipeError(f"algorithm.selection.{error.field}", error.value, error.problem) from None


def _round(state: ServerState, algorithm: Algorithm, engine: Engine, plan: Plan) -> tuple[ServerState, RoundRecord]:
    started = time.perf_counter()
    number, layers = state.round + 1, plan.layers
    nothing = torch.zeros(len(layers), dtype=torch.int64)
    ledger = Ledger(up=nothing.clone(), down=nothing.clone())
    earlier: list[tuple[int, int, str]] = []
    for attempt in range(plan.participation.attempts):
        trial = _Attempt(state, algorithm, engine, plan, number, attempt, ledger)
        trial.run()
        if trial.enough():
            break
        earlier += [(attempt, client, why) for client, why in trial.lost()]
        if trial.hopeless() or attempt + 1 == plan.participation.attempts:
            tried = "1 attempt" if attempt == 0 else f"{attempt + 1} attempts"
            problems = [why for _, why in trial.lost()]
            raise RoundFailed(
                f"round {number}: {trial.usable()} of {len(trial.clients)} replies usable after {tried}; "
                f"{trial.first_problem()}",
                diverged=bool(problems) and all(why.endswith(NOT_FINITE) for why in problems),
            )
    with steady():
        cohort = trial.cohort()
        state, weights = conclude(state, algorithm, cohort)
        rows = list(trial.uploads)
        figures = (
            layer_figures(len(trial.clients), rows, cohort, weights, state.weighting, trial.trained)
            if plan.record
            else {}
        )
    record = RoundRecord(
        round=number,
        attempt=attempt,
        clients=trial.clients,
        status=tuple(trial.status),
        sizes=engine.sizes[trial.clients],
        work=trial.work,
        losses=trial.losses,
        ledger=ledger,
        seconds=time.perf_counter() - started,
        layers=figures,
        earlier=tuple(earlier),
    )
    return state, record


def conclude(state: ServerState, algorithm: Algorithm, cohort: Cohort) -> tuple[ServerState, Tensor]:
    """The server's end of a round: weigh the accepted updates, aggregate, step. The next state, and the weights."""
    weights, weighting = algorithm.weighting.weigh(cohort, state.weighting)
    _check_weights(weights, cohort, algorithm)
    combined = aggregate(state.model, cohort, weights)
    new, server = algorithm.server.step(state.model, combined, state.server, cohort.layers)
    objective = algorithm.objective.after_round(new, state.model, state.objective, cohort.layers)
    return ServerState(cohort.round, new, objective, weighting, server), weights


def _check_weights(weights: Tensor, cohort: Cohort, algorithm: Algorithm) -> None:
    """A rule that answers nonsense is stopped here, and not by a model that silently stands still."""
    name, shape = type(algorithm.weighting).__name__, (len(cohort), len(cohort.layers))
    if tuple(weights.shape) != shape:
        raise RuleError(f"weighting {name} gave weights of shape {list(weights.shape)}, expected {list(shape)}")
    if not bool((torch.isfinite(weights) & (weights >= 0)).all()):
        raise RuleError(f"weighting {name} gave a weight that is negative or not finite in round {cohort.round}")


def checked_mask(mask: Tensor, shape: tuple[int, int], algorithm: Algorithm) -> Tensor:
    """A selection's answer, unless it is nonsense."""
    if tuple(mask.shape) != shape or mask.dtype != torch.bool:
        name = type(algorithm.selection).__name__
        found = f"{mask.dtype} {list(mask.shape)}"
        raise RuleError(f"selection {name} gave a mask of {found}, expected torch.bool {list(shape)}")
    return mask


class _Attempt:
    """One try at a round: sample, order, collect, check."""

    def __init__(
        self,
        state: ServerState,
        algorithm: Algorithm,
        engine: Engine,
        plan: Plan,
        number: int,
        attempt: int,
        ledger: Ledger,
    ) -> None:
        self.state, self.algorithm, self.engine, self.plan = state, algorithm, engine, plan
        self.number, self.attempt, self.ledger = number, attempt, ledger
        part, seed = plan.participation, plan.seed
        self.clients = part.sample(engine.sizes, seed, number, attempt)
        self.position = {int(client): at for at, client in enumerate(self.clients)}
        self.work = np.full(len(self.clients), plan.training.full_work, dtype=np.int64)
        self.losses = np.full(len(self.clients), np.nan)
        self.status = ["no reply"] * len(self.clients)
        self.mask: Tensor | None = None
        if isinstance(algorithm.selection, SelectsBefore):
            generator = rng.generator(seed, "selection", round=number, attempt=attempt)
            mask = algorithm.selection.draw(len(self.clients), plan.layers, generator)
            self.mask = checked_mask(mask, (len(self.clients), len(plan.layers)), algorithm)
        self.slow = part.draw_stragglers(len(self.clients), seed, number, attempt, plan.training.full_work)
        for at, work in self.slow.items():
            self.work[at] = work
        self.trained: dict[int, Reply] = {}
        self.uploads: dict[int, Reply] = {}

    def run(self) -> None:
        """Exchange once, or, for a selection that wants scores first, twice."""
        orders = [order for at in range(len(self.clients)) if (order := self._train_order(at)) is not None]
        self.trained = self._collect([order for order in orders if self._arrives(order)])
        for at, reply in self.trained.items():
            self.losses[at] = reply.metrics.get("loss", np.nan)
        selection = self.algorithm.selection
        if not isinstance(selection, SelectsAfterScores):
            self.uploads = self.trained
            return
        if self.trained:
            ranked = sorted(self.trained)
            scores = [reply.scores for _, reply in sorted(self.trained.items()) if reply.scores is not None]
            shape = (len(ranked), len(self.plan.layers))
            chosen = checked_mask(selection.choose(torch.stack(scores)), shape, self.algorithm)
            for at, row in zip(ranked, chosen, strict=True):
                self.status[at] = "ok" if row.any() else "ok, nothing chosen"
            self.uploads = self._collect(
                [
                    Order("upload", self.number, self.attempt, int(self.clients[at]), mask=row)
                    for at, row in zip(ranked, chosen, strict=True)
                    if row.any()
                ]
            )

    def _train_order(self, at: int) -> Order | None:
        row = None if self.mask is None else self.mask[at]
        if row is not None and not row.any():
            self.status[at] = "not selected"  # decided before training: nothing is sent to it and it does nothing
            self.work[at] = 0
            return None
        order = Order(
            "train",
            self.number,
            self.attempt,
            int(self.clients[at]),
            model=self.state.model,
            objective_state=self.state.objective,
            answer=ANSWERS[self.algorithm.selection.decides],
            mask=row,
            work=int(self.work[at]),
        )
        self.ledger.down += self.plan.layers.bytes_per_layer()
        return order

    def _arrives(self, order: Order) -> bool:
        """Whether the client's answer will be used; what is lost on the way was sent down all the same."""
        at, part = self.position[order.client], self.plan.participation
        if part.drops_out(self.plan.seed, self.number, self.attempt, order.client):
            self.status[at] = "dropped out"
        elif at in self.slow and not part.keep_stragglers:
            self.status[at] = "straggler, not waited for"
        else:
            return True
        self.ledger.control += order.control_bytes()
        return False

    def _collect(self, orders: Sequence[Order]) -> dict[int, Reply]:
        """Exchange, check every reply, and keep the good ones by position."""
        by_client = {order.client: order for order in orders}
        self.ledger.control += sum(order.control_bytes() for order in orders)
        for order in orders:
            self.status[self.position[order.client]] = "no reply"
        good: dict[int, Reply] = {}
        with steady():  # more threads would wait for the workers' cores
            for reply in self.engine.exchange(orders):
                if reply.client not in by_client:
                    continue  # nobody asked it, or it has answered already
                order, at = by_client.pop(reply.client), self.position[reply.client]
                try:
                    check_reply(reply, order, self.plan.layers, int(self.engine.sizes[order.client]))
                except ReplyError as problem:
                    self.status[at] = f"{'refused' if reply.error is None else reply.fault}: {problem}"
                    continue
                self.status[at] = "ok"
                self.ledger.up += reply.upload_bytes(self.plan.layers)
                self.ledger.feedback_numbers += reply.feedback_numbers()
                good[at] = reply
        return dict(sorted(good.items()))

    def usable(self) -> int:
        """How many clients' work counts (a client whose layers were not chosen did its part)."""
        return sum(status.startswith("ok") for status in self.status)

    def enough(self) -> bool:
        """Whether the round can go on."""
        asked = sum(status != "not selected" for status in self.status)
        needed = self.plan.participation.min_replies * asked - 1e-9  # 0.07 · 100 is 7.000000000000001
        return bool(self.uploads) and self.usable() >= needed

    def hopeless(self) -> bool:
        """Whether everyone failed in the same way, which another attempt would not change."""
        return len(set(self.status)) == 1 and self.status[0].startswith("failed")

    def lost(self) -> list[tuple[int, str]]:
        """The clients without a usable reply, and why."""
        return lost(self.clients, self.status)

    def first_problem(self) -> str:
        """For the error message."""
        return next((f"client {client}: {why}" for client, why in self.lost()), "nobody sent a layer")

    def cohort(self) -> Cohort:
        """The accepted updates, in client order."""
        rows = list(self.uploads.items())
        units = [reply.units for _, reply in rows if reply.units is not None]
        return Cohort(
            round=self.number,
            clients=torch.from_numpy(self.clients[[at for at, _ in rows]]),
            sizes=torch.tensor([float(reply.size) for _, reply in rows], dtype=torch.float64),
            layers=self.plan.layers,
            updates=tuple(reply.update for _, reply in rows if reply.update is not None),
            sent=torch.stack([reply.sent for _, reply in rows if reply.sent is not None]),
            model=self.state.model,
            units=torch.stack(units) if units else None,
        )


def lost(clients: np.ndarray, status: Sequence[str]) -> list[tuple[int, str]]:
    """The clients that were asked and have no usable reply, and why."""
    pairs = zip(clients.tolist(), status, strict=True)
    return [(client, why) for client, why in pairs if not why.startswith("ok") and why != "not selected"]


def layer_figures(
    clients: int,
    rows: Sequence[int],
    cohort: Cohort,
    weights: Tensor,
    weighting_state: State,
    trained: Mapping[int, Reply],
) -> dict[str, np.ndarray]:
    """The per-layer record: what the server can tell of every sampled client and layer.

    `rows` says which of the sampled clients the cohort's are; `trained` has their first replies, by the same count.
    """
    shape = (clients, len(cohort.layers))
    sent = cohort.sent

    def spread(values: Tensor, known: Tensor) -> np.ndarray:
        full = np.full(shape, np.nan)
        full[rows] = torch.where(known, values, torch.nan).numpy()
        return full

    mass = weights * sent
    figures = {
        "angle": spread(cohort.layer_angles, sent),
        "divergence": spread(cohort.update_squared.sqrt(), sent),
        "norm": spread(cohort.local_norms, sent),
        "weight": spread(mass / mass.sum(0).clamp_min(torch.finfo(torch.float64).tiny), torch.ones_like(sent)),
        "mask": np.zeros(shape),
        "smoothed_angle": np.full(shape, np.nan),
        "mu": np.full(shape, np.nan),
        "model_angle": np.full(shape[0], np.nan),
    }
    figures["mask"][rows] = _sent_share(cohort).numpy()
    figures["model_angle"][rows] = cohort.model_angles.numpy()
    if "smoothed_angle" in weighting_state:  # a table over all clients, [N] or [N, L]
        smoothed = weighting_state["smoothed_angle"][cohort.clients]
        figures["smoothed_angle"][rows] = smoothed.reshape(len(rows), -1).expand(-1, shape[1]).numpy()
    for at, reply in trained.items():
        if at not in rows:  # it answered, and no layer of it was averaged
            figures["weight"][at] = 0.0
        if reply.stiffness is not None:
            figures["mu"][at] = reply.stiffness.numpy()
        if reply.scores is not None:  # everyone's divergence is known, also of layers that were not chosen
            figures["divergence"][at] = reply.scores.double().numpy()
    return figures


def _sent_share(cohort: Cohort) -> Tensor:
    """How much of each layer a client sent: 0 or 1, or the share of its units."""
    if cohort.units is None:
        return cohort.sent.double()
    shares = [cohort.units[:, la.first_unit : la.last_unit].double().mean(1) for la in cohort.layers.layers]
    return torch.stack(shares, dim=1)
