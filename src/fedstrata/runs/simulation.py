"""`simulate`: rounds in this process, without a directory, a recipe or a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor, nn

from fedstrata.core.axes import Algorithm
from fedstrata.core.record import RoundRecord
from fedstrata.core.state import ServerState
from fedstrata.recipes.experiment import Experiment, build_experiment
from fedstrata.recipes.settings import Settings, What, resolved
from fedstrata.runs.engine import open_engine
from fedstrata.runs.runner import evaluated_rounds


@dataclass(frozen=True)
class Simulated:
    """The federation after a round. It stays as it is, whatever later rounds do."""

    server: ServerState
    """The model, and all that the algorithm remembers."""
    experiment: Experiment

    @property
    def round(self) -> int:
        """How many rounds it has had."""
        return self.server.round

    @property
    def model(self) -> Tensor:
        """The global model as a flat vector."""
        return self.server.model

    def module(self) -> nn.Module:
        """The global model as a module of its own."""
        return self.experiment.module(self.server)

    def state_dict(self) -> dict[str, Any]:
        """The global model, for `load_state_dict`."""
        return self.module().state_dict()


def simulate(
    what: What,
    algorithm: str | Mapping[str, Any] | Algorithm | None = None,
    *,
    seed: int | None = None,
    data: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    **more: Unpack[Settings],
) -> Iterator[tuple[Simulated, RoundRecord]]:
    """Run an experiment round by round, and keep nothing: yields the state and the record after every round.

    `what`: a task, or a recipe by name, path, table or as a `Recipe`. `algorithm`: an `Algorithm`, or its name with
    options ("fedldf:n=4"). All else is a setting by its name (`rounds=20, lr=0.1`), or by its place in a recipe
    (`settings={"evaluation.clients": 5}`). What is wrong is told by the call, not by the first round.

    >>> for state, record in fedstrata.simulate("quickstart", fedstrata.fedlayerwise(), rounds=5):  # doctest: +SKIP
    ...     print(state.round, record.metrics["test"]["accuracy"])
    """
    recipe, task = resolved(what, algorithm, more, settings or {}, seed)
    experiment = build_experiment(recipe, task, Path(data) if data is not None else None)
    experiment.require_data()
    experiment.warn()
    return _rounds(experiment)


def _rounds(experiment: Experiment) -> Iterator[tuple[Simulated, RoundRecord]]:
    with open_engine(experiment) as engine:
        for state, record in evaluated_rounds(experiment.first_state(), experiment, engine):
            yield Simulated(state, experiment), record
