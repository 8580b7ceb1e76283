"""Your own weighting: a client's layer counts less the further it moved, relative to the other clients' layers.

Run it with `python examples/own_rule.py`, or from this folder, with nothing but the command line:

    fedstrata run quickstart --set algorithm.weighting.name=own_rule:Cautious --set algorithm.weighting.power=2.0
    fedstrata compare quickstart --algorithms fedavg,own_rule:cautious:power=2.0 --seeds 0..4
"""

from dataclasses import dataclass

from torch import Tensor

import fedstrata
from fedstrata.core.axes import Algorithm, State
from fedstrata.core.cohort import Cohort
from fedstrata.core.errors import require
from fedstrata.core.layers import Layers
from fedstrata.objectives import Plain
from fedstrata.selections import Everything


@dataclass(frozen=True)
class Cautious:
    """w_kl = n_k / ‖Δ_kl‖^power; power 0 is FedAvg's weighting."""

    power: float = 1.0

    def __post_init__(self) -> None:
        require(self.power >= 0, "power", self.power, "must be ≥ 0")

    def init(self, clients: int, layers: Layers) -> State:
        """Nothing to remember from round to round."""
        return {}

    def weigh(self, cohort: Cohort, state: State) -> tuple[Tensor, State]:
        """Weights on any scale, float64 [K, L]; they are normalised over each layer's senders."""
        moved = cohort.update_squared.sqrt().clamp_min(1e-12)
        return cohort.sizes[:, None] / moved**self.power, state


def cautious(power: float = 1.0) -> Algorithm:
    """The same as a whole algorithm, with the other two axes filled in."""
    return Algorithm(Plain(), Everything(), Cautious(power))


if __name__ == "__main__":
    run = fedstrata.run("quickstart", algorithm="own_rule:cautious:power=2.0", settings={"training.rounds": 5})
    for line in run.history():
        print(line["round"], line["metrics"]["test"]["accuracy"])
    weights = run.layers(5)["weight"]
    for at, name in enumerate(run.layer_names):
        print(f"{name}: a client's share goes from {weights[:, at].min():.3f} to {weights[:, at].max():.3f}")

    # Five more rounds, in the same directory: the result is that of a run of ten.
    run = fedstrata.resume(run.path, settings={"training.rounds": 10})
    print(run.summary()["accuracy"])
