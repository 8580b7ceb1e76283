"""Rules by which clients remember something, against a slow implementation of its own: dicts of tensors, plain loops.

It shares the sampling of clients and batches with the code under test, and torch's gradients of the task loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedstrata import algorithms
from fedstrata.core import rng
from fedstrata.core.axes import Algorithm
from fedstrata.core.determinism import steady
from fedstrata.core.fit import fit
from fedstrata.core.layers import Layers
from fedstrata.core.memory import PRIVATE, merged, tags
from fedstrata.core.state import ServerState
from fedstrata.engines.local import LocalEngine
from fedstrata.objectives import FedProx
from fedstrata.recipes.schema import Training
from fedstrata.selections import Everything, FedLDF, NeuronPruning, RandomLayers
from fedstrata.tasks.task import Task
from fedstrata.weightings import FedLayerWise, Uniform
from tests.support.math import Tiny, image_task, prepare

SIZES = [9, 4, 0, 14, 7, 11]
TRAINING = Training(
    rounds=5, clients_per_round=3, epochs=2, batch_size=4, lr=0.1, lr_decay=0.9, momentum=0.5, weight_decay=0.01
)
Model = dict[str, Tensor]
BN = {"bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"}
HEAD, BODY = {"fc.weight", "fc.bias"}, {"conv.weight", "conv.bias", *BN}
TRAINABLE = [name for name, _ in Tiny().named_parameters()]


# --- the slow one ----------------------------------------------------------------------------------------------------


@dataclass
class Slow:
    """What it knows between rounds, with plain numbers."""

    rule: str
    private: set[str]
    options: Mapping[str, float] = field(default_factory=dict)
    model: Model = field(default_factory=dict)
    first: Model = field(default_factory=dict)
    own: dict[int, Model] = field(default_factory=dict)
    """Private layers; of Ditto and MOON, the client's own model."""
    variates: dict[int, Model] = field(default_factory=dict)
    """c_k of SCAFFOLD, h_k of FedDyn."""
    variate: Model = field(default_factory=dict)


def zeros(model: Model) -> Model:
    return {name: torch.zeros_like(model[name]) for name in TRAINABLE}


def set_model(net: nn.Module, model: Model) -> None:
    tensors = dict(net.named_parameters()) | dict(net.named_buffers())
    with torch.no_grad():
        for name, value in model.items():
            tensors[name].copy_(value)


def get_model(net: nn.Module, names: Any) -> Model:
    tensors = dict(net.named_parameters()) | dict(net.named_buffers())
    return {name: tensors[name].detach().clone() for name in names}


def features(net: Any, x: Tensor) -> Tensor:
    return torch.relu(net.bn(net.conv(x))).flatten(1)


def descend(
    start: Model,
    data: tuple[Tensor, Tensor],
    order: tuple[int, int, int],
    pull: Callable[[Model], Model],
    moving: Callable[[int], set[str]] | None = None,
    extra: Callable[[Any, Tensor], Tensor] | None = None,
) -> tuple[Model, int]:
    """SGD by hand from a model; `pull` is added to the gradient. Where it came, and in how many steps."""
    seed, round, client = order
    net: Any = Tiny().double().train()
    set_model(net, start)
    rate = TRAINING.lr * TRAINING.lr_decay ** (round - 1)
    generator = rng.generator(seed, "batches", round=round, client=client)
    velocity: Model = {}
    steps = 0
    for epoch in range(TRAINING.epochs):
        samples = generator.permutation(len(data[0]))
        for at in range(0, len(samples), TRAINING.batch_size):
            rows = torch.from_numpy(samples[at : at + TRAINING.batch_size])
            x, y = data[0][rows].double(), data[1][rows]
            z = features(net, x)
            loss = nn.functional.cross_entropy(net.fc(z), y)
            if extra is not None:
                loss = loss + extra(z, x)
            parameters = dict(net.named_parameters())
            gradients = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
            now = get_model(net, TRAINABLE)
            added = pull(now)
            with torch.no_grad():
                for name in TRAINABLE if moving is None else moving(epoch):
                    g = gradients[name] + added.get(name, 0) + TRAINING.weight_decay * now[name]
                    velocity[name] = TRAINING.momentum * velocity.get(name, 0) + g
                    parameters[name].copy_(now[name] - rate * velocity[name])
            steps += 1
    return get_model(net, start), steps


def reach(steps: int) -> float:
    total = velocity = 0.0
    for _ in range(steps):
        velocity = TRAINING.momentum * velocity + 1
        total += velocity
    return total


def play(slow: Slow, task: Task, round: int, seed: int, sizes: Any) -> None:
    """A round."""
    rate = TRAINING.lr * TRAINING.lr_decay ** (round - 1)
    shared = [name for name in slow.model if name not in slow.private]
    updates: dict[int, Model] = {}
    alpha = slow.options.get("alpha", 0.0)
    changes = []
    for client in TRAINING.participation.sample(sizes, seed, round, 0).tolist():
        data, order = task.clients[client], (seed, round, client)
        anchor = slow.model
        private = slow.own.get(client, slow.first) if slow.private else {}
        start = {**anchor, **{name: private[name] for name in slow.private}}
        known = slow.variates.get(client, zeros(anchor))
        pull, moving, extra = partial(pulled, slow.model, 0.0, {}), partial(moved_in, slow.rule), None
        if slow.rule == "scaffold":
            pull = partial(pulled, anchor, 0.0, {n: slow.variate[n] - known[n] for n in TRAINABLE})
        elif slow.rule == "feddyn":
            pull = partial(pulled, anchor, alpha, {name: -h for name, h in known.items()})
        elif slow.rule == "moon":
            others: list[Any] = [Tiny().double().eval(), Tiny().double().eval()]
            set_model(others[0], anchor)
            set_model(others[1], slow.own.get(client, slow.first))
            extra = partial(contrast, slow, others)
        after, steps = descend(start, data, order, pull, moving, extra)
        delta = {name: after[name] - anchor[name] for name in shared}
        if slow.rule == "scaffold":
            new = {n: known[n] - slow.variate[n] - delta[n] / (reach(steps) * rate) for n in TRAINABLE}
            changes.append({name: new[name] - known[name] for name in TRAINABLE})
            slow.variates[client] = new
        elif slow.rule == "feddyn":
            slow.variates[client] = {name: known[name] - alpha * delta[name] for name in TRAINABLE}
        elif slow.rule == "ditto":
            towards = partial(pulled, anchor, slow.options["lam"], {})
            slow.own[client], _ = descend(slow.own.get(client, slow.first), data, order, towards)
        elif slow.rule == "moon":
            slow.own[client] = after
        if slow.private:
            slow.own[client] = {name: after[name] for name in slow.private}
        updates[client] = delta
    equal = slow.rule in ("scaffold", "feddyn")
    weights = {client: 1 if equal else int(sizes[client]) for client in updates}
    mean = {n: sum(w * updates[k][n] for k, w in weights.items()) / sum(weights.values()) for n in shared}
    new_model: Any = {name: slow.model[name] + mean.get(name, 0) for name in slow.model}
    population = sum(size > 0 for size in sizes)
    if slow.rule == "scaffold":
        slow.variate = {n: slow.variate[n] + sum(c[n] for c in changes) / population for n in TRAINABLE}
    elif slow.rule == "feddyn":
        for name in TRAINABLE:
            moved = sum(update[name] for update in updates.values())
            slow.variate[name] = slow.variate[name] - alpha * moved / population
            new_model[name] = new_model[name] - slow.variate[name] / alpha
    slow.model = new_model


def pulled(anchor: Model, factor: float, force: Model, now: Model) -> Model:
    """What is added to the gradient."""
    return {name: factor * (now[name] - anchor[name]) + force.get(name, 0) for name in TRAINABLE}


def moved_in(rule: str, epoch: int) -> set[str]:
    if rule == "fedrep":
        return (HEAD if epoch < 1 else BODY) & set(TRAINABLE)
    return (BODY if rule == "fedbabu" else BODY | HEAD) & set(TRAINABLE)


def contrast(slow: Slow, others: list[Any], z: Tensor, x: Tensor) -> Tensor:
    """ℓ_con sample by sample, as the paper writes it."""
    near, far = (features(net, x).detach() for net in others)
    total = torch.zeros((), dtype=torch.float64)
    for one, other, before in zip(z, near, far, strict=True):
        to = [torch.exp((one @ v) / (one.norm() * v.norm()) / slow.options["temperature"]) for v in (other, before)]
        total = total - torch.log(to[0] / (to[0] + to[1]))
    return slow.options["mu"] * total / len(z)


# --- both ------------------------------------------------------------------------------------------------------------


RULES: dict[str, tuple[Algorithm, Slow]] = {
    "fedper": (algorithms.fedper(), Slow("fedper", HEAD)),
    "lg_fedavg": (algorithms.lg_fedavg(), Slow("lg_fedavg", BODY)),
    "fedbn": (algorithms.fedbn(), Slow("fedbn", BN)),
    "fedrep": (algorithms.fedrep(), Slow("fedrep", HEAD)),
    "fedbabu": (algorithms.fedbabu(), Slow("fedbabu", HEAD)),
    "scaffold": (algorithms.scaffold(), Slow("scaffold", set())),
    "feddyn": (algorithms.feddyn(alpha=0.3), Slow("feddyn", set(), {"alpha": 0.3})),
    "ditto": (algorithms.ditto(lam=0.7), Slow("ditto", set(), {"lam": 0.7})),
    "moon": (algorithms.moon(mu=2.0), Slow("moon", set(), {"mu": 2.0, "temperature": 0.5})),
    "local": (Algorithm(private=("*",)), Slow("local", BODY | HEAD)),
}


def rounds_of(
    algorithm: Algorithm, training: Training = TRAINING, seed: int = 4
) -> tuple[Layers, list[ServerState], LocalEngine, Any]:
    task = image_task(SIZES)
    setup, plan, state = prepare(task, algorithm, training, seed=seed)
    with LocalEngine(setup, workers=1) as engine:
        states = [state, *(after for after, _ in fit(state, algorithm, engine, plan))]
    return setup.layers, states, engine, setup.build


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_its_slow_self(name: str) -> None:
    """Five rounds with three of five clients: models after every round, and all that is remembered after the last."""
    algorithm, slow = RULES[name][0], copy.deepcopy(RULES[name][1])
    layers, states, engine, build = rounds_of(algorithm)
    task = image_task(SIZES)
    names = list(layers.whole.entries)
    slow.first = slow.model = get_model(build(), names)
    slow.variate = zeros(slow.model)
    near: Any = {"rtol": 1e-9, "atol": 1e-10}
    for round, state in enumerate(states[1:], start=1):
        with steady():
            play(slow, task, round, 4, task.sizes())
        ours = layers.views(state.model)
        assert set(ours) == set(names) - slow.private
        for tensor, value in ours.items():
            torch.testing.assert_close(value, slow.model[tensor], **near)
    found = {client: engine.versions.of(client, tag) for client, tag in tags(states[-1].memory).items()}
    took_part = {**slow.own, **slow.variates}
    assert set(found) == set(took_part)
    assert len(found) > 3
    for client, version in found.items():
        if slow.private:
            tail = layers.whole.views(torch.cat([states[-1].model, version[PRIVATE]]))
            for tensor in slow.private:
                torch.testing.assert_close(tail[tensor], slow.own[client][tensor], **near)
        elif "own" in version:
            for tensor, value in layers.views(version["own"]).items():
                torch.testing.assert_close(value, slow.own[client][tensor], **near)
        else:
            remembered = layers.views(next(iter(version.values())))
            for tensor, value in slow.variates[client].items():
                torch.testing.assert_close(remembered[tensor], value, **near)


# --- identities ------------------------------------------------------------------------------------------------------

RETRIED = {"dropouts": 0.3, "min_replies": 0.6, "attempts": 20, "stragglers": 0.5, "momentum": 0.5}
SENDING: dict[str, Any] = {
    "all": Everything(),
    "random_layers": RandomLayers(n=2),
    "fedldf": FedLDF(n=2),
    "units": NeuronPruning(share=0.5),
}


@pytest.mark.parametrize("selection", SENDING)
@pytest.mark.parametrize("workers", [1, 2])
def test_scaffolds_c_is_the_mean_of_all_c_k(selection: str, workers: int) -> None:
    """Whoever takes part, whatever is sent, however often a round is tried: both sides come to the same."""
    algorithm = algorithms.scaffold(selection=SENDING[selection])
    training = Training(rounds=6, clients_per_round=3, epochs=2, batch_size=4, lr=0.1, **RETRIED)
    task = image_task(SIZES)
    setup, plan, state = prepare(task, algorithm, training, seed=2)
    with LocalEngine(setup, workers=workers) as engine:
        for after, _ in fit(state, algorithm, engine, plan):
            total = torch.zeros_like(after.model)
            for client, tag in tags(after.memory).items():
                total += engine.versions.of(client, tag)["c"]
            torch.testing.assert_close(after.objective["c"], total / 5, rtol=1e-9, atol=1e-12)
    assert float(after.objective["c"].norm()) > 0.01


def weights_of(algorithm: Algorithm, **training: Any) -> list[Tensor]:
    plan = Training(**{"rounds": 3, "clients_per_round": 3, "batch_size": 4, "lr": 0.1, **training})
    return [state.model for state in rounds_of(algorithm, plan)[1]]


def test_scaffolds_first_round_is_fedavgs_with_uniform_weights() -> None:
    ours, plain = weights_of(algorithms.scaffold()), weights_of(Algorithm(weighting=Uniform()))
    assert torch.equal(ours[1], plain[1])
    assert not torch.equal(ours[3], plain[3])


def test_scaffolds_upload_is_fedavgs_and_its_download_has_c() -> None:
    ledgers = []
    for algorithm in (algorithms.scaffold(), algorithms.fedavg()):
        setup, plan, state = prepare(image_task(SIZES), algorithm, TRAINING, seed=4)
        with LocalEngine(setup, workers=1) as engine:
            ledgers.append([record.ledger for _, record in fit(state, algorithm, engine, plan)])
    for ours, plain in zip(*ledgers, strict=True):
        assert ours.upload == plain.upload
        assert ours.download - plain.download == 3 * 81 * 8  # the model's numbers, for three clients


def test_dittos_global_model_is_fedavgs() -> None:
    for ours, plain in zip(weights_of(algorithms.ditto()), weights_of(algorithms.fedavg()), strict=True):
        assert torch.equal(ours, plain)


def test_moon_without_mu_is_fedavg() -> None:
    for ours, plain in zip(weights_of(algorithms.moon(mu=0)), weights_of(algorithms.fedavg()), strict=True):
        assert torch.equal(ours, plain)


def test_feddyns_first_round_goes_further_than_the_mean() -> None:
    """h = −α Σ Δ / N, so the parameters go Σ Δ (1/|S| + 1/N): with three of five clients 1 + 3/5 times as far."""
    first = [weights_of(a)[:2] for a in (algorithms.feddyn(alpha=0.3), Algorithm(FedProx(0.3), weighting=Uniform()))]
    (start, ours), (_, plain) = first
    parameters = slice(0, 30)  # the convolution's
    torch.testing.assert_close((ours - start)[parameters], 1.6 * (plain - start)[parameters])


def test_a_layer_that_was_not_sent_leaves_c_k_as_it_was() -> None:
    """By hand: one parameter a layer, two layers, the second is not sent."""
    layers = Layers.of_shapes({"a.weight": (1,), "b.weight": (1,)}, dtype=torch.float64)
    before, after = {"c": torch.tensor([1.0, 2.0])}, {"c": torch.tensor([10.0, 20.0])}
    found = merged(before, after, layers, torch.tensor([True, False]))
    assert found["c"].tolist() == [10, 2]
    assert merged(before, after, layers, torch.tensor([True, True])) is after


def test_scaffold_by_hand() -> None:
    """One number, F_k(w) = ½ (w − t_k)², t = 0 and 8, w = 2, η = ½, one step each.

    Round 1: g = 2 and −6, so y = 1 and 5, w = 3; c_k = −Δ/η = 2 and −6, c = −2.
    Round 2 from 3: g = 3 + (−2 − 2) = −1 and −5 + (−2 + 6) = −1, so y = 3.5 for both: w = 3.5. Then
    c_1 = 2 + 2 − 0.5/0.5 = 3 and c_2 = −6 + 2 − 1 = −5: the gradients at 3, and c = −1.
    """

    class Number(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.w.expand(len(x), 1)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean() / 2

    clients = [(torch.zeros(1, 1, dtype=torch.float64), torch.tensor([[t]], dtype=torch.float64)) for t in (0.0, 8.0)]
    algorithm = algorithms.scaffold()
    setup, plan, state = prepare(Task(Number, clients, loss=loss), algorithm, Training(rounds=2, lr=0.5))
    with LocalEngine(setup, workers=1) as engine:
        first, second = [after for after, _ in fit(state, algorithm, engine, plan)]
    assert (first.model.tolist(), first.objective["c"].tolist()) == ([3], [-2])
    assert (second.model.tolist(), second.objective["c"].tolist()) == ([3.5], [-1])
    assert [engine.versions.of(k, (2, 0))["c"].tolist() for k in (0, 1)] == [[3], [-5]]


def test_memory_grows_with_those_who_took_part() -> None:
    """Of a table of five clients two per round; each has one or two versions, never more."""
    _, states, engine, _ = rounds_of(algorithms.scaffold(), Training(rounds=8, clients_per_round=2, lr=0.1))
    known = tags(states[-1].memory)
    assert set(engine.versions._kept) == set(known)
    for client, versions in engine.versions._kept.items():
        assert known[client] in versions
        assert len(versions) <= 2


@pytest.mark.parametrize("selection", ["random_layers", "fedldf", "units"])
@pytest.mark.parametrize("name", ["fedper", "fedbn", "fedrep", "scaffold", "feddyn", "ditto", "moon"])
def test_every_selection_and_any_number_of_workers(name: str, selection: str) -> None:
    """With angles as weights, stragglers and retried rounds: one process and two come to the same bits, memory too."""
    found = []
    for workers in (1, 2):
        algorithm = algorithms.named(name)
        algorithm = replace(algorithm, selection=SENDING[selection], weighting=FedLayerWise())
        training = Training(rounds=3, clients_per_round=4, epochs=2, batch_size=4, lr=0.1, **RETRIED)
        setup, plan, state = prepare(image_task(SIZES), algorithm, training, seed=1)
        with LocalEngine(setup, workers=workers) as engine:
            last = [after for after, _ in fit(state, algorithm, engine, plan)][-1]
        assert float((last.model - state.model).norm()) > 0.01
        known = {client: engine.versions.of(client, tag) for client, tag in tags(last.memory).items()}
        found.append((last, known))
    (one, versions), (two, others) = found
    assert torch.equal(one.model, two.model)
    assert torch.equal(one.memory["tag"], two.memory["tag"])
    assert versions.keys() == others.keys()
    for client, version in versions.items():
        assert all(torch.equal(value, others[client][key]) for key, value in version.items())
