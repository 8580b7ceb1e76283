"""The named algorithms, a function each, and how an `[algorithm]` table becomes one.

The functions' signatures are what recipes and the command line are checked against. Every one takes the axes, too, so
that any choice can be replaced: `fedprox(0.1, weighting=FedLayerWise())`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any, TypedDict, TypeVar, Unpack, cast, get_type_hints

from fedstrata.combinations import COMBINATIONS, Median, NormBounding, TrimmedMean
from fedstrata.core.axes import Algorithm, Combination, Objective, Selection, ServerStep, Weighting
from fedstrata.core.errors import BadValue, RecipeError
from fedstrata.core.grouping import Grouping
from fedstrata.objectives import OBJECTIVES, AdaptiveMu, Ditto, FedBabu, FedDyn, FedLap, FedProx, FedRep, Moon, Scaffold
from fedstrata.objectives.fedlap import Form, Refresh, Units
from fedstrata.registry import build, check_type, did_you_mean, find, parameters
from fedstrata.selections import SELECTIONS, FedLDF, NeuronPruning, RandomClients, RandomLayers
from fedstrata.servers import SERVERS, FedAdagrad, FedAdam, FedAvgM, FedDynStep, FedYogi
from fedstrata.weightings import (
    IDA,
    WEIGHTINGS,
    FedAdp,
    FedExP,
    FedLayerWise,
    FedNova,
    Krum,
    MultiKrum,
    Uniform,
)
from fedstrata.weightings.angles import Smoothing

AXES: dict[str, Mapping[str, Any]] = {
    "objective": OBJECTIVES,
    "selection": SELECTIONS,
    "weighting": WEIGHTINGS,
    "server": SERVERS,
    "combine": COMBINATIONS,
}


class Axes(TypedDict, total=False):
    """What may be replaced in any algorithm."""

    objective: Objective
    selection: Selection
    weighting: Weighting
    server: ServerStep
    combine: Combination
    private: Sequence[str]
    grouping: Grouping


Named = TypeVar("Named", bound=Callable[..., Algorithm])

NAMED: dict[str, Callable[..., Algorithm]] = {}
"""Every named algorithm."""


def _named(function: Named) -> Named:
    """Make it known by its name, and check its arguments where it is called."""

    @wraps(function)
    def checked(*given: Any, **named: Any) -> Algorithm:
        known = _options(function)
        for key, value in named.items():
            if key not in known and key not in Axes.__annotations__:
                hint = did_you_mean(key, [*known, *Axes.__annotations__])
                raise BadValue(key, value, f"is no argument of {function.__name__}{hint}")
        for key, value in [*zip(known, given, strict=False), *named.items()]:
            if key in known:
                try:
                    check_type(key, value, known[key])
                except RecipeError as error:
                    raise BadValue(key, value, f"is wrong: {error.problem}") from None
        return function(*given, **named)

    NAMED[function.__name__] = checked
    return cast(Named, checked)


def _composed(replaced: Axes, **own: Any) -> Algorithm:
    """The algorithm's own choices, and what replaces them."""
    for axis, rule in replaced.items():
        if axis in own and own[axis] != type(own[axis])():
            raise BadValue(axis, rule, f"replaces {own[axis]!r}, whose options then mean nothing; leave one out")
    return Algorithm(**{**own, **replaced})


@_named
def fedavg(**axes: Unpack[Axes]) -> Algorithm:
    """FedAvg (McMahan et al., AISTATS 2017): θ ← θ + Σ_k n_k Δ_k / Σ_j n_j.

    >>> fedavg().weighting
    SampleSize()
    """
    return _composed(axes)


@_named
def fedprox(mu: float = 0.01, **axes: Unpack[Axes]) -> Algorithm:
    """FedProx (Li et al., MLSys 2020): clients minimise F_k(w) + (μ/2) ‖w − w_global‖².

    `mu`: the factor μ ≥ 0 of the proximal term; with 0 it is FedAvg.

    >>> fedprox(mu=0.1).objective
    FedProx(mu=0.1)
    """
    return _composed(axes, objective=FedProx(mu))


@_named
def fedadp(alpha: float = 5.0, smoothing: Smoothing = "participation", **axes: Unpack[Axes]) -> Algorithm:
    """FedAdp (Wu and Wang, IEEE TCCN 2021): a client counts n_k exp f(θ̃_k), θ̃_k its smoothed angle to the mean update.

    `alpha`: how sharply f falls with the angle. `smoothing`: the mean over the rounds a client took part in
    ("participation"), or over all rounds ("round").

    >>> fedadp(alpha=3.0).weighting
    FedAdp(alpha=3.0, smoothing='participation')
    """
    return _composed(axes, weighting=FedAdp(alpha, smoothing))


@_named
def fedlayerwise(alpha: float = 5.0, smoothing: Smoothing = "participation", **axes: Unpack[Axes]) -> Algorithm:
    """FedLayerWise: FedAdp's rule for each layer alone, with an angle θ̃_{k,l} per client and layer.

    `alpha`, `smoothing`: as FedAdp's.

    >>> fedlayerwise().weighting
    FedLayerWise(alpha=5.0, smoothing='participation')
    """
    return _composed(axes, weighting=FedLayerWise(alpha, smoothing))


@_named
def fedldf(n: int | None = None, **axes: Unpack[Axes]) -> Algorithm:
    """FedLDF: each layer is uploaded by the n clients where it diverged most, ‖w_{k,l} − w_l‖.

    `n`: how many clients; by default a fifth of the round's.

    >>> fedldf(n=4).selection
    FedLDF(n=4)
    """
    return _composed({"grouping": "block", **axes}, selection=FedLDF(n))


@_named
def random_layers(n: int | None = None, **axes: Unpack[Axes]) -> Algorithm:
    """FedLDF's baseline "random": each layer is uploaded by n clients drawn at random.

    `n`: how many clients; by default a fifth of the round's.

    >>> random_layers(n=4).selection
    RandomLayers(n=4)
    """
    return _composed({"grouping": "block", **axes}, selection=RandomLayers(n))


@_named
def hdfl(n: int | None = None, **axes: Unpack[Axes]) -> Algorithm:
    """FedLDF's baseline HDFL: n clients drawn at random upload all layers, the others none.

    `n`: how many clients; by default a fifth of the round's.

    >>> hdfl(n=4).selection
    RandomClients(n=4)
    """
    return _composed({"grouping": "block", **axes}, selection=RandomClients(n))


@_named
def neuron_pruning(share: float = 0.2, **axes: Unpack[Axes]) -> Algorithm:
    """FedLDF's baseline with pruning: each client uploads the units of each layer that changed most.

    `share`: how many of a layer's units, from 0 to 1.

    >>> neuron_pruning(share=0.5).selection
    NeuronPruning(share=0.5)
    """
    return _composed({"grouping": "block", **axes}, selection=NeuronPruning(share))


@_named
def adaptive_mu(mu0: float = 0.01, a: float = 0.5, **axes: Unpack[Axes]) -> Algorithm:
    """Adaptive-μ FedProx: μ_l ← (1 − a) μ_l + a (d_l / max_j d_j) μ₀, with d_l how far the global layer moved.

    `mu0`: the μ of the layer that moves most. `a`: how fast μ follows, from 0 (FedProx) to 1.

    >>> adaptive_mu(mu0=0.1).objective
    AdaptiveMu(mu0=0.1, a=0.5)
    """
    return _composed({"grouping": "tensor", **axes}, objective=AdaptiveMu(mu0, a))


@_named
def fedlap(
    q: float = 0.5,
    form: Form = "factor",
    units: Units = "input",
    refresh: Refresh = "epoch",
    through: bool = False,
    **axes: Unpack[Axes],
) -> Algorithm:
    """FedLap (Charteros and Koutsopoulos): each neuron is held back by q (1 − cos of the angle it has turned).

    `q`: the strength, from 0 to 1. `form`: q as a factor, or as the exponent (1 − q)/q. `units`: whether a neuron is an
    input or an output of a layer. `refresh`: when the angles are taken. `through`: the gradient flows through them.

    >>> fedlap(q=0.3).weighting
    Uniform()
    """
    return _composed({"weighting": Uniform(), **axes}, objective=FedLap(q, form, units, refresh, through))


@_named
def fedper(**axes: Unpack[Axes]) -> Algorithm:
    """FedPer (Arivazhagan et al., 2019): FedAvg whose last layer stays with each client.

    >>> fedper().private
    ('last',)
    """
    return _composed({"private": ("last",), **axes})


@_named
def lg_fedavg(**axes: Unpack[Axes]) -> Algorithm:
    """LG-FedAvg (Liang et al., 2020): FedAvg of the last layer alone; each client has its own representation below it.

    >>> lg_fedavg().private
    ('!last',)
    """
    return _composed({"private": ("!last",), **axes})


@_named
def fedbn(**axes: Unpack[Axes]) -> Algorithm:
    """FedBN (Li et al., ICLR 2021): FedAvg whose normalisations stay with each client; without any it is FedAvg.

    >>> fedbn().private
    ('norm',)
    """
    return _composed({"private": ("norm",), **axes})


@_named
def fedrep(head_epochs: int = 1, **axes: Unpack[Axes]) -> Algorithm:
    """FedRep (Collins et al., ICML 2021): local epochs for a private last layer, then for all others, which are shared.

    `head_epochs`: how many of `training.epochs` the last layer gets; the others have the rest.

    >>> fedrep(head_epochs=4).objective
    FedRep(head_epochs=4)
    """
    return _composed({"private": ("last",), **axes}, objective=FedRep(head_epochs))


@_named
def fedbabu(**axes: Unpack[Axes]) -> Algorithm:
    """FedBABU (Oh et al., ICLR 2022): the last layer stays as it began; `evaluation.fine_tune` trains it to evaluate.

    >>> fedbabu().private
    ('last',)
    """
    return _composed({"private": ("last",), **axes}, objective=FedBabu())


@_named
def feddyn(alpha: float = 0.01, **axes: Unpack[Axes]) -> Algorithm:
    """FedDyn (Acar et al., ICLR 2021): clients minimise F_k(w) − ⟨h_k, w⟩ + (α/2) ‖w − w_global‖².

    `alpha`: the factor α > 0 of the proximal term, for clients and server.

    >>> feddyn(alpha=0.1).server
    FedDynStep(alpha=0.1)
    """
    return _composed({"weighting": Uniform(), **axes}, objective=FedDyn(alpha), server=FedDynStep(alpha))


@_named
def ditto(lam: float = 1.0, **axes: Unpack[Axes]) -> Algorithm:
    """Ditto (Li et al., ICML 2021): FedAvg, and a model of each client's own that minimises F_k(v) + (λ/2) ‖v − w‖².

    `lam`: the factor λ ≥ 0; with 0 the client's own is trained alone.

    >>> ditto(lam=0.1).objective
    Ditto(lam=0.1)
    """
    return _composed(axes, objective=Ditto(lam))


@_named
def moon(mu: float = 1.0, temperature: float = 0.5, **axes: Unpack[Axes]) -> Algorithm:
    """MOON (Li et al., CVPR 2021): representations are drawn to the global model's, off the client's last.

    `mu`: the factor of that loss. `temperature`: by what the cosines are divided.

    >>> moon(mu=5.0).objective
    Moon(mu=5.0, temperature=0.5)
    """
    return _composed(axes, objective=Moon(mu, temperature))


@_named
def scaffold(**axes: Unpack[Axes]) -> Algorithm:
    """SCAFFOLD (Karimireddy et al., ICML 2020), option II: gradients are corrected by c − c_k, clients count the same.

    >>> scaffold().objective
    Scaffold()
    """
    return _composed({"weighting": Uniform(), **axes}, objective=Scaffold())


@_named
def fedavgm(lr: float = 1.0, beta: float = 0.9, **axes: Unpack[Axes]) -> Algorithm:
    """FedAvgM (Hsu, Qi and Brown, 2019): v ← β v + Δ, θ ← θ + η v, where Δ is FedAvg's step.

    `lr`: the server's learning rate η. `beta`: its momentum β; with 0, and η = 1, it is FedAvg.

    >>> fedavgm(beta=0.5).server
    FedAvgM(lr=1.0, beta=0.5)
    """
    return _composed(axes, server=FedAvgM(lr, beta))


@_named
def fedadagrad(lr: float = 0.01, beta1: float = 0.0, tau: float = 1e-3, **axes: Unpack[Axes]) -> Algorithm:
    """FedAdagrad (Reddi et al., ICLR 2021): v ← v + Δ², θ ← θ + η m / (√v + τ), from v = τ², number by number.

    `lr`: the server's learning rate η. `beta1`: the momentum β₁ of m ← β₁ m + (1 − β₁) Δ. `tau`: the smaller τ, the
    less a step depends on the size of Δ.

    >>> fedadagrad(lr=0.1).server
    FedAdagrad(lr=0.1, beta1=0.0, tau=0.001)
    """
    return _composed(axes, server=FedAdagrad(lr, beta1, tau))


@_named
def fedadam(
    lr: float = 0.01, beta1: float = 0.9, tau: float = 1e-3, beta2: float = 0.99, **axes: Unpack[Axes]
) -> Algorithm:
    """FedAdam (Reddi et al., ICLR 2021): v ← β₂ v + (1 − β₂) Δ², and the rest as in FedAdagrad.

    `lr`, `beta1`, `tau`: as FedAdagrad's. `beta2`: how slowly v forgets.

    >>> fedadam(lr=0.1).server
    FedAdam(lr=0.1, beta1=0.9, tau=0.001, beta2=0.99)
    """
    return _composed(axes, server=FedAdam(lr, beta1, tau, beta2))


@_named
def fedyogi(
    lr: float = 0.01, beta1: float = 0.9, tau: float = 1e-3, beta2: float = 0.99, **axes: Unpack[Axes]
) -> Algorithm:
    """FedYogi (Reddi et al., ICLR 2021): v ← v − (1 − β₂) Δ² sign(v − Δ²), and the rest as in FedAdagrad.

    `lr`, `beta1`, `tau`: as FedAdagrad's. `beta2`: how slowly v follows.

    >>> fedyogi(lr=0.1).server
    FedYogi(lr=0.1, beta1=0.9, tau=0.001, beta2=0.99)
    """
    return _composed(axes, server=FedYogi(lr, beta1, tau, beta2))


@_named
def fednova(**axes: Unpack[Axes]) -> Algorithm:
    """FedNova (Wang et al., NeurIPS 2020): θ ← θ + (Σ_k p_k a_k) Σ_k p_k Δ_k / a_k, a_k how far k's local steps reach.

    Where all clients take as many steps it is FedAvg.

    >>> fednova().weighting
    FedNova()
    """
    return _composed(axes, weighting=FedNova())


@_named
def fedexp(epsilon: float = 1e-3, **axes: Unpack[Axes]) -> Algorithm:
    """FedExP (Jhunjhunwala et al., ICLR 2023): FedAvg's step, max(1, Σ_k p_k ‖Δ_k‖² / 2 (‖Σ_k p_k Δ_k‖² + ε)) times.

    `epsilon`: ε ≥ 0, which keeps the step finite where updates cancel.

    >>> fedexp(epsilon=0.1).weighting
    FedExP(epsilon=0.1)
    """
    return _composed(axes, weighting=FedExP(epsilon))


@_named
def ida(**axes: Unpack[Axes]) -> Algorithm:
    """IDA (Yeganeh et al., DCL 2020): a client counts 1 / ‖Δ_k − Σ_j p_j Δ_j‖, inversely to its distance from the mean.

    >>> ida().weighting
    IDA()
    """
    return _composed(axes, weighting=IDA())


@_named
def krum(byzantine: int | None = None, **axes: Unpack[Axes]) -> Algorithm:
    """Krum (Blanchard et al., NeurIPS 2017): only the client counts that is nearest to its K − f − 2 nearest others.

    `byzantine`: how many clients f of a round may send anything; by default as many as it withstands, 2 f + 2 < K.

    >>> krum(byzantine=2).weighting
    Krum(byzantine=2)
    """
    return _composed(axes, weighting=Krum(byzantine))


@_named
def multi_krum(byzantine: int | None = None, keep: int | None = None, **axes: Unpack[Axes]) -> Algorithm:
    """Multi-Krum (Blanchard et al., NeurIPS 2017): FedAvg over the clients with the lowest scores of Krum.

    `byzantine`: as Krum's. `keep`: how many clients; by default K − f − 2.

    >>> multi_krum(byzantine=2, keep=5).weighting
    MultiKrum(byzantine=2, keep=5)
    """
    return _composed(axes, weighting=MultiKrum(byzantine, keep))


@_named
def norm_bounding(bound: float | None = None, **axes: Unpack[Axes]) -> Algorithm:
    """Norm bounding (Sun et al., 2019): FedAvg's mean of Δ_k min(1, S / ‖Δ_k‖).

    `bound`: the longest norm S; by default the median of the round's norms.

    >>> norm_bounding(bound=0.5).combine
    NormBounding(bound=0.5)
    """
    return _composed(axes, combine=NormBounding(bound))


@_named
def median(**axes: Unpack[Axes]) -> Algorithm:
    """Coordinate-wise median (Yin et al., ICML 2018): each number is the median of its clients'.

    >>> median().combine
    Median()
    """
    return _composed({"weighting": Uniform(), **axes}, combine=Median())


@_named
def trimmed_mean(trim: float = 0.2, **axes: Unpack[Axes]) -> Algorithm:
    """Coordinate-wise trimmed mean (Yin et al., ICML 2018): each number's mean without its lowest and highest values.

    `trim`: the share of clients that is left out at either end, from 0 to below 0.5; their number is rounded down.

    >>> trimmed_mean(trim=0.1).combine
    TrimmedMean(trim=0.1)
    """
    return _composed({"weighting": Uniform(), **axes}, combine=TrimmedMean(trim))


def named(name: str, **options: Any) -> Algorithm:
    """An algorithm by its name; every option goes to the function or the rule that has it: `named("fedldf", n=4)`."""
    return from_table({"name": name, **options})


# --- tables -----------------------------------------------------------------------------------------------------------


def from_table(table: Mapping[str, Any]) -> Algorithm:
    """Build what a recipe's `[algorithm]` says: a name with options, the axes, or a name with some axes replaced."""
    axes = {axis: _axis_table(axis, table[axis]) for axis in AXES if axis in table}
    options = {key: value for key, value in table.items() if key not in (*AXES, "name", "private")}
    name = table.get("name")
    if name is not None and (not isinstance(name, str) or name not in NAMED):
        return _foreign_algorithm(name, options, axes)
    function = NAMED[name or "fedavg"]
    algorithm, known, own = function(), _options(function), dict[str, Any]()
    rules = {axis: type(getattr(algorithm, axis)) for axis in AXES}
    rules |= {axis: find(f"algorithm.{axis}.name", t["name"], AXES[axis]) for axis, t in axes.items() if "name" in t}
    for key, value in options.items():
        owners = [axis for axis, rule in rules.items() if key in parameters(rule)]
        for axis in owners:
            axes.setdefault(axis, {}).setdefault(key, value)
        if not owners and (key not in known or any(key in parameters(type(getattr(algorithm, a))) for a in AXES)):
            hint = did_you_mean(key, [*known, *(option for rule in rules.values() for option in parameters(rule))])
            raise RecipeError(f"algorithm.{key}", value, f"{name or 'this algorithm'} has no such option{hint}")
        if not owners:
            check_type(f"algorithm.{key}", value, known[key])
            own[key] = value
    try:
        algorithm = function(**own)
        changes: dict[str, Any] = {a: _built(a, rules[a], getattr(algorithm, a), given) for a, given in axes.items()}
        if "private" in table:
            check_type("algorithm.private", table["private"], str | list[str])
            changes["private"] = [table["private"]] if isinstance(table["private"], str) else table["private"]
        return dataclasses.replace(algorithm, **changes)
    except BadValue as error:
        field = f"algorithm.{error.field}.name" if error.field in AXES else f"algorithm.{error.field}"
        raise RecipeError(field, error.value, error.problem) from None


@cache
def _options(function: Callable[..., Algorithm]) -> Mapping[str, Any]:
    """A named algorithm's own options and their types."""
    hints = get_type_hints(function)
    ours = [name for name, one in inspect.signature(function).parameters.items() if one.kind is not one.VAR_KEYWORD]
    return {name: hints[name] for name in ours}


def _axis_table(axis: str, given: object) -> dict[str, Any]:
    if axis == "combine" and isinstance(given, str):
        return {"name": given}
    if not isinstance(given, Mapping):
        raise RecipeError(f"algorithm.{axis}", given, 'must be a table with a name, like { name = "…" }')
    return dict(given)


def _built(axis: str, rule: Any, before: Any, given: Mapping[str, Any]) -> Any:
    """A rule from its table; the algorithm's own keeps what the table leaves open."""
    kept = {key: getattr(before, key) for key in parameters(rule)} if rule is type(before) else {}
    options = {key: value for key, value in kept.items() if value is not None}
    return build(rule, options | {key: value for key, value in given.items() if key != "name"}, f"algorithm.{axis}")


def to_table(algorithm: Algorithm) -> dict[str, Any]:
    """The `[algorithm]` table that gives an algorithm again, so that one made in Python can be stored and resumed.

    A named one with its options goes by its name. The grouping of any other is for the recipe's `[layers]` to say.
    """
    for name, function in NAMED.items():
        own, options = function(), dict[str, Any]()
        for axis in AXES:
            mine, theirs = getattr(algorithm, axis), getattr(own, axis)
            if type(mine) is type(theirs) and mine != theirs:
                options |= {k: v for k in parameters(type(mine)) if (v := getattr(mine, k)) != getattr(theirs, k)}
        if options.keys() <= _options(function).keys() and function(**options) == algorithm:
            return {"name": name, **options}
    return axes_of(algorithm) | ({"private": list(algorithm.private)} if algorithm.private else {})


def axes_of(algorithm: Algorithm) -> dict[str, dict[str, Any]]:
    """The table of each axis; where FedAvg's choice goes without saying, there is none."""
    table: dict[str, dict[str, Any]] = {}
    for axis, rules in AXES.items():
        rule = getattr(algorithm, axis)
        if axis in ("server", "combine") and rule == getattr(Algorithm(), axis):
            continue
        cls = type(rule)
        name = next((name for name, known in rules.items() if known is cls), f"{cls.__module__}:{cls.__qualname__}")
        given = {key: getattr(rule, key) for key in parameters(cls)}
        table[axis] = {"name": name, **{key: value for key, value in given.items() if value is not None}}
    return table


def _foreign_algorithm(name: object, options: dict[str, Any], axes: dict[str, dict[str, Any]]) -> Algorithm:
    """A user's own algorithm: a function that returns an `Algorithm`."""
    function = find("algorithm.name", name, NAMED)
    if any(axes.values()):
        raise RecipeError("algorithm.name", name, "a function gives all axes; remove the axis tables")
    try:
        algorithm = function(**options)
    except (TypeError, ValueError) as error:
        raise RecipeError("algorithm.name", name, str(error)) from None
    if not isinstance(algorithm, Algorithm):
        raise RecipeError("algorithm.name", name, f"gave a {type(algorithm).__name__}, not an Algorithm")
    return algorithm
