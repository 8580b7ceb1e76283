"""What happened in a round: who did what, what it weighed on the wire, and what each layer looked like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedstrata.core.axes import State
from fedstrata.core.cohort import Cohort
from fedstrata.core.errors import FedstrataError
from fedstrata.core.messages import SCORE_DTYPE, Reply
from fedstrata.core.status import Status


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
    status: tuple[Status, ...]
    sizes: np.ndarray  # int64 [K]
    work: np.ndarray  # int64 [K], epochs or steps
    losses: np.ndarray  # float64 [K], mean task loss while training
    ledger: Ledger
    seconds: float
    layers: dict[str, np.ndarray] = field(default_factory=dict)
    """Per client and layer [K, L]: angle, smoothed_angle, divergence, weight, mask, mu, norm; and model_angle [K]."""
    logged: dict[str, np.ndarray] = field(default_factory=dict)
    """What clients' own training loops told besides the loss, by name, float64 [K]; `steps` is how many they took."""
    earlier: tuple[tuple[int, int, Status], ...] = ()
    """What was lost in attempts before this one: attempt, client and why."""
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The new model's loss and metric on each data set, in rounds that are evaluated."""
    unmeasured: tuple[tuple[int, Status], ...] = ()
    """The clients that could not be evaluated, and why."""
    each: Mapping[str, np.ndarray] = field(default_factory=dict)
    """What each evaluated client came to on its own held-out data: `client`, `samples`, `loss`, the metric, …"""

    @property
    def lost(self) -> list[tuple[int, Status]]:
        """Who was asked in the attempt that counts and has no usable reply, and why."""
        pairs = zip(self.clients.tolist(), self.status, strict=True)
        return [(client, status) for client, status in pairs if status.is_lost]

    @property
    def asked(self) -> int:
        """How many clients were asked for something."""
        return sum(status.kind != "not selected" for status in self.status)

    @property
    def replies(self) -> int:
        """How many clients did what they were asked for (one whose layers were not chosen did its part)."""
        return sum(status.counts for status in self.status)

    @property
    def train_loss(self) -> float:
        """The clients' training losses, weighted by size."""
        return self.mean(self.losses)

    def mean(self, values: np.ndarray) -> float:
        """Of what clients told, weighted by size; NaN if nobody did."""
        known = np.isfinite(values)
        return float(np.average(values[known], weights=self.sizes[known])) if known.any() else float("nan")


class RoundFailed(FedstrataError):
    """A round without a next model: too few usable replies in every attempt, or a model that is not finite.

    `record` says what became of every client; `diverged`, whether all that was lost was numbers that are none.
    """

    def __init__(self, message: str, record: RoundRecord, diverged: bool = False) -> None:
        super().__init__(message)
        self.record, self.diverged = record, diverged


def layer_record(
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
    found = {
        "angle": spread(cohort.layer_angles, sent),
        "divergence": spread(cohort.update_squared.sqrt(), sent),
        "norm": spread(cohort.local_norms, sent),
        "weight": spread(mass / mass.sum(0).clamp_min(torch.finfo(torch.float64).tiny), torch.ones_like(sent)),
        "mask": np.zeros(shape),
        "smoothed_angle": np.full(shape, np.nan),
        "mu": np.full(shape, np.nan),
        "model_angle": np.full(shape[0], np.nan),
    }
    found["mask"][rows] = _sent_share(cohort).numpy()
    found["model_angle"][rows] = cohort.model_angles.numpy()
    if "smoothed_angle" in weighting_state:  # a table over all clients, [N] or [N, L]
        smoothed = weighting_state["smoothed_angle"][cohort.clients]
        found["smoothed_angle"][rows] = smoothed.reshape(len(rows), -1).expand(-1, shape[1]).numpy()
    for at, reply in trained.items():
        if at not in rows:  # it answered, and no layer of it was averaged
            found["weight"][at] = 0.0
        if reply.stiffness is not None:
            found["mu"][at] = reply.stiffness.numpy()
        if reply.scores is not None:  # everyone's divergence is known, also of layers that were not chosen
            found["divergence"][at] = reply.scores.double().numpy()
    return found


def _sent_share(cohort: Cohort) -> Tensor:
    """How much of each layer a client sent: 0 or 1, or the share of its units."""
    if cohort.units is None:
        return cohort.sent.double()
    shares = [cohort.units[:, la.first_unit : la.last_unit].double().mean(1) for la in cohort.layers.layers]
    return torch.stack(shares, dim=1)
