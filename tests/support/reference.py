"""A slow, separate implementation of the whole system, for the tests: plain loops over NumPy float64 arrays.

It is written from the papers' equations and calls none of fedstrata's rules. What it shares with the code under test
is the *sampling*: which clients take part, the order of the samples, and the masks that are drawn at random. PyTorch
gives the gradient of the task loss (and BatchNorm's running statistics); the update loop, the springs, the scores, the
angles and the aggregation are all done here.

A model is a dict from tensor names to arrays, a grouping a dict from layer names to tensor names, written out by hand
for each test model. All tensors of one layer have the same first dimension in these models: unit j of a layer is row j
of each.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from fedstrata.core import rng
from fedstrata.recipes.schema import Training
from fedstrata.tasks.task import Task

Model = dict[str, np.ndarray]
Grouping = dict[str, list[str]]


@dataclass
class Rules:
    """The three axes, by name and with plain numbers."""

    objective: str = "plain"
    selection: str = "all"
    weighting: str = "sample_size"
    mu: float = 0.01
    a: float = 0.5
    q: float = 0.5
    form: str = "factor"
    units: str = "input"
    refresh: str = "epoch"
    through: bool = False
    n: int = 1
    share: float = 0.2
    alpha: float = 5.0
    smoothing: str = "participation"
    draw: Any = None
    """The random selections' `draw`: which masks come up is sampling, and shared."""


@dataclass
class Round:
    """What the reference knows after a round; rows are the round's clients."""

    clients: list[int]
    model: Model
    mask: np.ndarray
    """Which layers were sent, [K, L]."""
    weight: np.ndarray
    """Normalised over each layer's senders, [K, L]."""
    angle: np.ndarray
    """Angle to the senders' average, layer by layer, [K, L]; NaN where nothing was sent."""
    model_angle: np.ndarray
    """The same over all layers that the client sent, [K]."""
    divergence: np.ndarray
    smoothed: dict[Any, float]
    mu: dict[str, float]
    losses: list[float] = field(default_factory=list)


# --- the client --------------------------------------------------------------------------------------------------


def train(
    module: nn.Module,
    anchor: Model,
    data: tuple[torch.Tensor, torch.Tensor],
    rules: Rules,
    mu_of: dict[str, float],
    training: Training,
    order: tuple[int, int, int, int],
    loss_function: Any = nn.functional.cross_entropy,
) -> tuple[Model, float]:
    """E epochs of SGD on task loss + spring. `order` is (seed, round, attempt, client)."""
    seed, number, attempt, client = order
    net = copy.deepcopy(module).double()
    net.train()
    tensors = dict(net.named_parameters()) | dict(net.named_buffers())
    with torch.no_grad():
        for name, value in anchor.items():
            tensors[name].copy_(torch.from_numpy(value))
    names = [name for name, p in net.named_parameters() if p.requires_grad]
    parameters = [tensors[name] for name in names]
    neuron_of = neurons(net, rules.units) if rules.objective == "fedlap" and rules.q > 0 else {}
    velocity: dict[str, np.ndarray] = {}
    rate = training.lr * training.lr_decay ** (number - 1)
    inputs, targets = data
    generator = rng.generator(seed, "batches", round=number, attempt=attempt, client=client)
    stiffness: dict[str, np.ndarray] = {}
    first_step, total, seen = True, 0.0, 0
    for _epoch in range(training.epochs):
        samples = generator.permutation(len(inputs))
        new_epoch = True
        for begin in range(0, len(samples), training.batch_size):
            at = torch.from_numpy(samples[begin : begin + training.batch_size])
            loss = loss_function(net(inputs[at].double()), targets[at])
            gradients = torch.autograd.grad(loss, parameters)
            local = {name: tensors[name].detach().numpy().copy() for name in names}
            if first_step or rules.refresh == "step" or rules.through or (rules.refresh == "epoch" and new_epoch):
                stiffness = {
                    name: spring(local[name], anchor[name], neuron_of.get(name), rules, mu_of.get(name))
                    for name in names
                }
            first_step = new_epoch = False
            for name, gradient in zip(names, gradients, strict=True):
                g = gradient.numpy().copy()
                away = local[name] - anchor[name]
                g = g + stiffness[name] * away
                if name in neuron_of and rules.through:
                    g = g + half_distance_times_slope(local[name], anchor[name], neuron_of[name], rules)
                g = g + training.weight_decay * local[name]
                velocity[name] = g if name not in velocity else training.momentum * velocity[name] + g
                with torch.no_grad():
                    tensors[name].copy_(torch.from_numpy(local[name] - rate * velocity[name]))
            total += float(loss.detach()) * len(at)
            seen += len(at)
    return {name: tensors[name].detach().numpy().copy() for name in anchor}, total / seen


def spring(w: np.ndarray, a: np.ndarray, neuron: np.ndarray | None, rules: Rules, mu: float | None) -> np.ndarray:
    """The stiffness c of every single weight."""
    if rules.objective == "fedprox":
        return np.full(w.shape, rules.mu)
    if rules.objective == "adaptive_mu":
        assert mu is not None
        return np.full(w.shape, mu)
    c = np.zeros(w.shape)
    if neuron is not None:
        for j in range(neuron.max() + 1):
            at = neuron == j
            turn = one_minus_cosine(w[at], a[at])
            c[at] = rules.q * turn if rules.form == "factor" else turn ** ((1 - rules.q) / rules.q)
    return c


def neurons(net: nn.Module, units: str) -> dict[str, np.ndarray]:
    """The number of the neuron that each single weight leaves (`input`) or enters (`output`); no word of the others."""
    return {
        f"{path}.weight".lstrip("."): neuron_of_each_weight(module, units)
        for path, module in net.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding | nn.modules.conv._ConvNd)
    }


def neuron_of_each_weight(module: Any, units: str) -> np.ndarray:
    """Found out by trying: the weights that matter when one input alone is on, or for one output alone."""
    dtype = module.weight.dtype
    if isinstance(module, nn.Embedding):
        each = list(torch.arange(module.num_embeddings)[:, None])
        at_once = torch.arange(module.num_embeddings)
    elif isinstance(module, nn.Linear):
        each = list(torch.eye(module.in_features, dtype=dtype)[:, None])
        at_once = torch.ones(1, module.in_features, dtype=dtype)
    else:
        picture = torch.ones(*module.kernel_size, dtype=dtype)
        each = [torch.stack([on * picture for on in one]) for one in torch.eye(module.in_channels, dtype=dtype)]
        at_once = sum(each)
    if units == "input":
        results = [module(one).sum() for one in each]
    else:
        channel = 0 if isinstance(module, nn.modules.conv._ConvNd) else 1
        results = [part.sum() for part in module(at_once).unbind(channel)]
    matters = np.array(
        [torch.autograd.grad(result, module.weight, retain_graph=True)[0].numpy() != 0 for result in results]
    )
    assert (matters.sum(0) == 1).all(), "each weight has one neuron on either side"
    return matters.argmax(0)


def one_minus_cosine(w: np.ndarray, a: np.ndarray) -> float:
    """λ of one neuron."""
    if np.array_equal(w, a):
        return 0.0  # by construction, not 1 − 0.999…
    long_w, long_a = math.sqrt(sum(x * x for x in w)), math.sqrt(sum(x * x for x in a))
    if long_w == 0 or long_a == 0:
        return 1.0
    return min(2.0, max(0.0, 1 - sum(x * y for x, y in zip(w, a, strict=True)) / (long_w * long_a)))


def half_distance_times_slope(w: np.ndarray, a: np.ndarray, neuron: np.ndarray, rules: Rules) -> np.ndarray:
    """½ d_j ∂c_j/∂w: what the gradient through λ adds, with ∂λ/∂w = cos · w/‖w‖² − a/(‖w‖‖a‖)."""
    extra = np.zeros(w.shape)
    for j in range(neuron.max() + 1):
        at = neuron == j
        x, y = w[at], a[at]
        turn = one_minus_cosine(x, y)
        if turn == 0 or not x.any() or not y.any():
            continue
        slope = (1 - turn) * x / (x @ x) - y / (np.linalg.norm(x) * np.linalg.norm(y))
        power = (1 - rules.q) / rules.q
        slope = rules.q * slope if rules.form == "factor" else power * turn ** (power - 1) * slope
        extra[at] = 0.5 * ((x - y) @ (x - y)) * slope
    return extra


# --- the server --------------------------------------------------------------------------------------------------


def run(
    task: Task,
    module: nn.Module,
    grouping: Grouping,
    rules: Rules,
    training: Training,
    *,
    seed: int = 0,
) -> list[Round]:
    """All rounds; every client answers."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    model: Model = {
        name: tensors[name].detach().numpy().astype(np.float64) for names in grouping.values() for name in names
    }
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    mu = dict.fromkeys(grouping, rules.mu)
    angles: dict[Any, float] = {}
    counts: dict[Any, int] = {}
    sizes = task.sizes()
    rounds: list[Round] = []
    for number in range(1, training.rounds + 1):
        clients = [int(k) for k in training.participation.sample(sizes, seed, number, 0)]
        masks = None
        if rules.draw is not None:
            masks = rules.draw(len(clients), grouping, rng.generator(seed, "selection", round=number, attempt=0))
        mu_of = {name: mu[layer] for layer, names in grouping.items() for name in names}
        updates, losses = [], []
        for client in clients:
            local, loss = train(
                module, model, task.clients[client], rules, mu_of, training, (seed, number, 0, client), task.loss
            )
            updates.append({name: local[name] - model[name] for name in model})
            losses.append(loss)
        sent = select(updates, grouping, trainable, rules, masks)
        n = {k: int(sizes[client]) for k, client in enumerate(clients)}
        weights = weigh(updates, sent, n, clients, grouping, trainable, rules, number, angles, counts)
        new = aggregate(model, updates, sent, weights, grouping)
        record = describe(updates, sent, weights, n, clients, grouping, trainable)
        if rules.objective == "adaptive_mu":
            drift = {
                layer: math.sqrt(
                    sum(float(np.sum((new[name] - model[name]) ** 2)) for name in names if name in trainable)
                )
                for layer, names in grouping.items()
            }
            largest = max(drift.values())
            if largest > 0:
                mu = {la: (1 - rules.a) * mu[la] + rules.a * (drift[la] / largest) * rules.mu for la in mu}
        model = new
        record.model, record.smoothed, record.mu, record.losses = model, dict(angles), dict(mu), losses
        rounds.append(record)
    return rounds


Sent = list[dict[str, np.ndarray]]
"""For every client and layer, which of the layer's units it sent (bool per unit)."""


def rows_of(layer: str, grouping: Grouping, update: Model) -> int:
    rows = {update[name].shape[0] for name in grouping[layer]}
    assert len(rows) == 1, "the reference wants layers whose tensors share their first dimension"
    return rows.pop()


def flat(update: Model, names: list[str], trainable: set[str]) -> np.ndarray:
    return np.concatenate([update[name].ravel() for name in names if name in trainable])


def select(updates: list[Model], grouping: Grouping, trainable: set[str], rules: Rules, masks: Any) -> Sent:
    """Who sends which units of which layer."""
    sent: Sent = []
    chosen: dict[str, list[int]] = {}
    if rules.selection == "fedldf":
        for layer, names in grouping.items():
            scores = [np.float32(np.linalg.norm(flat(update, names, trainable))) for update in updates]
            ranking = sorted((-score, k) for k, score in enumerate(scores))
            chosen[layer] = [k for _, k in ranking[: rules.n]]
    for k, update in enumerate(updates):
        row: dict[str, np.ndarray] = {}
        for at, (layer, names) in enumerate(grouping.items()):
            units = rows_of(layer, grouping, update)
            row[layer] = np.zeros(units, dtype=bool)
            if rules.selection == "neuron_pruning":
                change = [
                    math.sqrt(sum(float(np.sum(update[name][j] ** 2)) for name in names if name in trainable))
                    for j in range(units)
                ]
                best = sorted((-size, j) for j, size in enumerate(change))
                row[layer][[j for _, j in best[: max(1, math.floor(rules.share * units + 1e-9))]]] = True
            elif rules.selection == "fedldf":
                row[layer][:] = k in chosen[layer]
            else:
                row[layer][:] = True if masks is None else bool(masks[k, at])
        sent.append(row)
    return sent


def seen_by_server(updates: list[Model], sent: Sent, grouping: Grouping) -> list[Model]:
    """The updates with zeros where nothing was sent."""
    arrived = []
    for update, row in zip(updates, sent, strict=True):
        arrived.append(
            {
                name: update[name] * row[layer].reshape(-1, *[1] * (update[name].ndim - 1))
                for layer, names in grouping.items()
                for name in names
            }
        )
    return arrived


def average_update(
    layer: str, arrived: list[Model], sent: Sent, n: dict[int, int], grouping: Grouping, trainable: set[str]
) -> np.ndarray:
    """G_l: layer l's senders, each by its share of their samples."""
    senders = [k for k, row in enumerate(sent) if row[layer].any()]
    total = sum(n[k] for k in senders)
    vectors = {k: flat(arrived[k], grouping[layer], trainable) for k in senders}
    return sum((n[k] / total) * vectors[k] for k in senders)  # type: ignore[return-value]


def angle_between(x: np.ndarray, y: np.ndarray) -> float:
    long_x, long_y = math.sqrt(float(x @ x)), math.sqrt(float(y @ y))
    if long_x == 0 or long_y == 0:
        return math.pi / 2
    return math.acos(min(1.0, max(-1.0, float(x @ y) / (long_x * long_y))))


def weigh(
    updates: list[Model],
    sent: Sent,
    n: dict[int, int],
    clients: list[int],
    grouping: Grouping,
    trainable: set[str],
    rules: Rules,
    number: int,
    angles: dict[Any, float],
    counts: dict[Any, int],
) -> np.ndarray:
    """ψ for every client and layer, not yet normalised; `angles` and `counts` are the memory, changed in place."""
    arrived = seen_by_server(updates, sent, grouping)
    weights = np.zeros((len(clients), len(grouping)))
    if rules.weighting in ("sample_size", "uniform"):
        for k in range(len(clients)):
            weights[k] = n[k] if rules.weighting == "sample_size" else 1.0
        return weights
    means = {
        layer: average_update(layer, arrived, sent, n, grouping, trainable)
        for layer in grouping
        if any(row[layer].any() for row in sent)
    }

    def remember(key: Any, theta: float) -> None:
        if key not in counts:
            angles[key], counts[key] = theta, 1
            return
        t = counts[key] + 1 if rules.smoothing == "participation" else number
        angles[key] = ((t - 1) * angles[key] + theta) / t
        counts[key] += 1

    def gompertz(theta: float) -> float:
        return rules.alpha * (1 - math.exp(-math.exp(-rules.alpha * (theta - 1))))

    for k, client in enumerate(clients):
        mine = [layer for layer in grouping if sent[k][layer].any()]
        if rules.weighting == "fedadp" and mine:
            own = np.concatenate([flat(arrived[k], grouping[layer], trainable) for layer in mine])
            all_of = np.concatenate([means[layer] for layer in mine])
            remember(client, angle_between(own, all_of))
            weights[k] = n[k] * math.exp(gompertz(angles[client]))
        if rules.weighting == "fedlayerwise":
            for at, layer in enumerate(grouping):
                if layer in mine:
                    theta = angle_between(flat(arrived[k], grouping[layer], trainable), means[layer])
                    remember((client, layer), theta)
                    weights[k, at] = n[k] * math.exp(gompertz(angles[client, layer]))
    return weights


def aggregate(model: Model, updates: list[Model], sent: Sent, weights: np.ndarray, grouping: Grouping) -> Model:
    """θ_u ← θ_u + Σ_k m_ku w_kl Δ_ku / Σ_j m_ju w_jl, unit by unit."""
    new = {name: value.copy() for name, value in model.items()}
    for at, (layer, names) in enumerate(grouping.items()):
        for name in names:
            for u in range(model[name].shape[0]):
                senders = [k for k in range(len(updates)) if sent[k][layer][u]]
                mass = sum(weights[k, at] for k in senders)
                if senders:
                    new[name][u] = model[name][u] + sum(weights[k, at] * updates[k][name][u] for k in senders) / mass
    return new


def describe(
    updates: list[Model],
    sent: Sent,
    weights: np.ndarray,
    n: dict[int, int],
    clients: list[int],
    grouping: Grouping,
    trainable: set[str],
) -> Round:
    """The figures of a round, from explicit vectors."""
    arrived = seen_by_server(updates, sent, grouping)
    mask = np.array([[row[layer].any() for layer in grouping] for row in sent])
    share = np.zeros(mask.shape)
    theta = np.full(mask.shape, np.nan)
    whole = np.full(len(clients), np.nan)
    divergence = np.zeros(mask.shape)
    means = {}
    for at, (layer, names) in enumerate(grouping.items()):
        senders = [k for k in range(len(clients)) if mask[k, at]]
        if senders:
            means[layer] = average_update(layer, arrived, sent, n, grouping, trainable)
        for k in range(len(clients)):
            divergence[k, at] = np.linalg.norm(flat(updates[k], names, trainable))
        for k in senders:
            share[k, at] = weights[k, at] / sum(weights[j, at] for j in senders)
            theta[k, at] = angle_between(flat(arrived[k], names, trainable), means[layer])
    for k in range(len(clients)):
        mine = [layer for at, layer in enumerate(grouping) if mask[k, at]]
        if mine:
            whole[k] = angle_between(
                np.concatenate([flat(arrived[k], grouping[layer], trainable) for layer in mine]),
                np.concatenate([means[layer] for layer in mine]),
            )
    return Round(clients, {}, mask, share, theta, whole, divergence, {}, {})
