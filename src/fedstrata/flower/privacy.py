"""Flower's strategies for differential privacy around ours: where their noise is enough, and where it is not.

All four of them add Gaussian noise to the aggregate, on the server, with the standard deviation noise_multiplier ·
clipping_norm / num_sampled_clients. That hides one client only if changing its update, of a norm of at most
clipping_norm, moves the aggregate by at most clipping_norm / num_sampled_clients, as in a mean over all of them.
"""

from __future__ import annotations

from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from fedstrata.core.axes import Adopt, Algorithm, Mean
from fedstrata.core.errors import RecipeError
from fedstrata.core.packing import Packing
from fedstrata.flower.wire import names
from fedstrata.selections import Everything
from fedstrata.weightings import SampleSize, Uniform

_NOISY = (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)


def is_noisy(strategy: FlowerStrategy) -> bool:
    """Whether a strategy adds noise to what the one that it wraps has aggregated."""
    return isinstance(strategy, _NOISY)


def check_noise(wrapper: FlowerStrategy, algorithm: Algorithm, packing: Packing) -> None:
    """Refuse a wrapper whose noise is not enough for this algorithm and model."""
    # Exact classes, and not those derived from them: what a rule of somebody else's does, nobody knows here.
    if type(algorithm.selection) is not Everything:
        why = f"the selection {type(algorithm.selection).__name__} makes a mean over some of the clients only"
    elif type(algorithm.weighting) not in (SampleSize, Uniform):
        why = f"the weighting {type(algorithm.weighting).__name__} may give any client any weight"
    elif type(algorithm.server) is not Adopt:
        why = f"the server step {type(algorithm.server).__name__} may make any step of a mean"
    elif type(algorithm.combine) is not Mean:
        why = f"the combination {type(algorithm.combine).__name__} is no mean, or not of the updates as they are"
    elif packing.passing:
        why = f"integers and booleans ({names(packing.passing)}) are one client's own, and get no noise"
    else:
        return
    raise RecipeError(
        "strategy",
        type(wrapper).__name__,
        f"its noise is for a sensitivity of clipping_norm / num_sampled_clients, but {why}; wrap fedavg(), fedprox() "
        "or another algorithm whose clients send everything and count by size or equally, with floating-point arrays "
        "only, or add the noise on the clients with LocalDpMod",
    )
