"""Local training: what a client knows before its first order, its batches, the pull of the objective, its steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.sgd import sgd

from fedstrata.clients.modules import is_writable
from fedstrata.core import rng
from fedstrata.core.axes import Compares, MovesSome, Moving, Objective, Remembers, Selection, State, Tensors
from fedstrata.core.layers import Layers
from fedstrata.core.memory import Version
from fedstrata.core.messages import Order
from fedstrata.core.training import LocalTraining
from fedstrata.tasks.nests import moved
from fedstrata.tasks.task import Data, Task


@dataclass(frozen=True)
class Setup:
    """It is configured on the client's own side and never sent."""

    task: Task
    layers: Layers
    objective: Objective
    selection: Selection
    training: LocalTraining
    seed: int
    build: Callable[[], nn.Module]
    """Builds a model; its frozen parameters and all else that does not travel are part of the setup."""
    device: str = "cpu"
    record: bool = True
    evaluation_batch: int | None = None
    fine_tune: int = 0
    """The most epochs of training before an evaluation."""

    def to_device(self, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        """Inputs and targets where the model is, floating-point ones in its dtype."""
        dtype, device = self.layers.dtype, torch.device(self.device)
        return moved(batch[0], device, dtype), moved(batch[1], device, dtype)


def build_model(task: Task, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A fresh model, the same for everyone with this seed; single and double precision become `dtype`."""
    with rng.global_scope(seed, "model"):
        model = task.model()
    for tensor in (*model.parameters(), *model.buffers()):
        if is_lazy(tensor):
            continue
        if tensor.dtype in (torch.float32, torch.float64):
            tensor.data = tensor.data.to(dtype)
        if not is_writable(tensor):
            tensor.data = tensor.data.contiguous()
    return model


@dataclass(frozen=True)
class Schedule:
    """A client's batches: positions among its samples, int64 [steps, B], with −1 where a batch is shorter than B."""

    positions: np.ndarray
    steps_per_epoch: int

    def __len__(self) -> int:
        return len(self.positions)

    def batch(self, step: int) -> np.ndarray:
        """The positions of one step's samples."""
        row: np.ndarray = self.positions[step]
        return row[row >= 0]

    def first(self, steps: int) -> Schedule:
        """Its beginning."""
        return replace(self, positions=self.positions[:steps])

    def opens_epoch(self, step: int) -> bool:
        """Whether an epoch begins with this step."""
        return step % self.steps_per_epoch == 0


def draw_schedule(samples: int, order: Order, training: LocalTraining, seed: int) -> Schedule:
    """`work` epochs, each in an order of its own, or as many of them as hold `work` steps."""
    generator = rng.generator(seed, "batches", round=order.round, attempt=order.attempt, client=order.client)
    size = min(training.batch_size, max(1, samples))
    per_epoch = -(-samples // size)
    steps = order.work * per_epoch if training.steps is None else order.work
    epochs = np.full((-(-steps // max(1, per_epoch)), per_epoch * size), -1, dtype=np.int64)
    for epoch in epochs:
        epoch[:samples] = generator.permutation(samples)
    return Schedule(epochs.reshape(-1, size)[:steps], max(1, per_epoch))


def is_due(objective: Objective, first_of_epoch: bool, *, first_of_round: bool) -> bool:
    """Whether the stiffness is to be computed anew before this step."""
    return objective.refresh == "step" or first_of_round or (objective.refresh == "epoch" and first_of_epoch)


class Spring:
    """The spring of one client's round."""

    def __init__(
        self, objective: Objective, state: State, layers: Layers, local: Mapping[str, Tensor], anchor: Tensors
    ) -> None:
        self.objective, self.state, self.layers, self.local, self.anchor = objective, state, layers, local, anchor
        self.stiffness: Tensors = {}
        self.force: Tensor | None = None
        """b, for the numbers that travel."""

    def refresh(self) -> None:
        """Compute the stiffness; unless it is differentiable, it is a constant for the gradient."""
        through = self.objective.differentiable
        local = self.local if through else {name: w.detach() for name, w in self.local.items()}
        self.stiffness = self.objective.stiffness(local, self.anchor, self.state, self.layers)

    def energy(self) -> Tensor | float:
        """The value, for an objective whose gradient flows through c."""
        return sum(
            ((c * (self.local[name] - self.anchor[name]).square()).sum() / 2 for name, c in self.stiffness.items()), 0.0
        )

    @torch.no_grad()
    def pull(self) -> None:
        """Add c (w − a) to the gradients; a tensor without stiffness is left alone, so no spring *is* plain."""
        for name, c in self.stiffness.items():
            w = self.local[name]
            if not w.requires_grad:
                continue  # frozen by the model itself while it trains
            force = c * (w - self.anchor[name])
            w.grad = force if w.grad is None else w.grad.add_(force)

    @torch.no_grad()
    def push(self) -> None:
        """Add b to the gradients."""
        for name, b in {} if self.force is None else self.layers.views(self.force, trainable_only=True).items():
            w = self.local[name]
            if w.requires_grad:
                w.grad = b.clone() if w.grad is None else w.grad.add_(b)


def mean_per_layer(stiffness: Tensors, layers: Layers) -> Tensor:
    """The mean of c over each layer's trainable numbers, float64 [L]."""
    means = torch.zeros(len(layers), dtype=torch.float64)
    if not stiffness:
        return means
    for at, layer in enumerate(layers.layers):
        for entry in layer.entries:
            if entry.name in stiffness:
                means[at] += float(stiffness[entry.name].detach().double().mean()) * (entry.stop - entry.start)
        means[at] /= max(1, layer.trainable_stop - layer.start)
    return means


class Optimizer(Protocol):
    """As torch's optimisers are used here."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def step(self) -> object:
        """Move the weights."""


class Sgd:
    """SGD with momentum in torch's functional form.

    The class `torch.optim.SGD` does the same, but imports torch's compiler first: a second or two for every worker.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        self.parameters = list(parameters)
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.velocities: list[Tensor | None] = [None] * len(self.parameters)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move the weights that have a gradient; a weight may get its first one later than others."""
        moved = [(at, weight, weight.grad) for at, weight in enumerate(self.parameters) if weight.grad is not None]
        for has_begun in (True, False):
            group = [one for one in moved if (self.velocities[one[0]] is not None) is has_begun]
            velocities = [self.velocities[at] for at, _, _ in group]
            sgd(
                [weight for _, weight, _ in group],
                [gradient for _, _, gradient in group],
                velocities,  # torch puts the first ones into this list
                fused=True,
                lr=self.lr,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                dampening=0,
                nesterov=False,
                maximize=False,
            )
            for (at, _, _), velocity in zip(group, velocities, strict=True):
                self.velocities[at] = velocity


def make_dense(weights: Iterable[Tensor]) -> None:
    """Gradients of sparse embeddings as others are: neither springs nor all optimisers can take them."""
    for weight in weights:
        gradient = weight.grad
        if gradient is not None and gradient.layout is not torch.strided:
            weight.grad = gradient.to_dense()


def local_optimizer(training: LocalTraining, parameters: Iterable[Tensor], round: int) -> Optimizer:
    """A fresh optimiser for one client's round."""
    lr, decay = training.learning_rate(round), training.weight_decay
    if training.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=lr, weight_decay=decay, fused=True)
    return Sgd(parameters, lr, training.momentum, decay)


Function = TypeVar("Function", bound=Callable[..., Any])


def own_copy(function: Function) -> Function:
    """A loss or metric may count, too: every order has one that was never called."""
    try:
        return copy.deepcopy(function)
    except Exception:  # whatever a user's object raises when it is copied
        return function


class Steps(Protocol):
    """How one client's weights are moved by its batches."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The trainable ones by name; a step leaves its gradients on them."""
        ...

    def take(self, step: int, spring: Spring) -> None:
        """Find the gradient on the step's batch, let the spring pull, and move the weights."""
        ...

    def hold(self, moving: Moving) -> None:
        """From now on, move only these."""
        ...

    def loss(self) -> float:
        """The mean task loss over the samples seen."""
        ...


def train(
    setup: Setup, order: Order, schedule: Schedule, steps: Steps, anchor: Tensor, memory: Version
) -> tuple[float, Tensor | None]:
    """Take the steps of the schedule; return the mean task loss, and the stiffness in the end, if it is recorded."""
    layers, objective, weights = setup.layers, setup.objective, steps.weights
    if layers.private:  # nothing holds them back: there are no global ones
        weights = {name: w for name, w in weights.items() if name in layers.entries}
    anchors = layers.views(anchor[: layers.numel], trainable_only=True)
    spring = Spring(objective, order.objective_state, layers, weights, anchors)
    if isinstance(objective, Remembers):
        force = objective.force(memory, order.objective_state, layers)
        spring.force = None if force is None else force.to(anchor.device)
    stays = objective.refresh == "round"
    for step in range(len(schedule)):
        if isinstance(objective, MovesSome) and schedule.opens_epoch(step):
            steps.hold(objective.moves(step // schedule.steps_per_epoch))
        if not (stays and step) and is_due(objective, schedule.opens_epoch(step), first_of_round=step == 0):
            spring.refresh()
        steps.take(step, spring)
    stiffness = mean_per_layer(spring.stiffness, layers) if setup.record else None
    return steps.loss(), stiffness


class AutogradSteps:
    """With autograd and torch's optimisers, for any model."""

    def __init__(self, setup: Setup, model: nn.Module, data: Data, schedule: Schedule, round: int) -> None:
        self.setup, self.model, self.data, self.schedule = setup, model, data, schedule
        self.weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.task_loss = own_copy(setup.task.loss)
        model.train()
        self.optimizer = local_optimizer(setup.training, self.weights.values(), round)
        self.total, self.seen = torch.zeros((), dtype=torch.float64), 0
        self.comparison: Comparison | None = None

    def take(self, step: int, spring: Spring) -> None:
        """Forward, backward, pull, move."""
        indices = self.schedule.batch(step)
        inputs, targets = self.setup.to_device(self.data.batch(indices))
        self.optimizer.zero_grad()
        loss = whole = self.task_loss(self.model(inputs), targets)
        if self.comparison is not None:
            whole = loss + self.comparison(inputs)
        if self.setup.objective.differentiable:
            (whole + spring.energy()).backward()  # type: ignore[no-untyped-call]
            make_dense(self.weights.values())
        else:
            whole.backward()  # type: ignore[no-untyped-call]
            make_dense(self.weights.values())
            spring.pull()
        spring.push()
        self.optimizer.step()
        self.total += loss.detach().double().cpu() * len(indices)
        self.seen += len(indices)

    def hold(self, moving: Moving) -> None:
        """What has no gradient does not move."""
        shared = self.setup.layers.entries
        for name, weight in self.weights.items():
            weight.requires_grad_(moving == "all" or (moving == "shared") == (name in shared))

    def compare_with(self, anchor: Tensor, before: Tensor) -> None:
        """Have the objective compare what the model makes of a batch with what these weights make of it."""
        self.comparison = Comparison(self.setup, self.model, anchor, before)

    def loss(self) -> float:
        """Over every sample as often as it was seen."""
        return float(self.total) / max(1, self.seen)


class Comparison:
    """What the model makes of a batch, beside what other weights make of it: the input of its last module with some.

    The model's own is looked at while it is trained, and so computed once; the others are in evaluation mode.
    """

    def __init__(self, setup: Setup, model: nn.Module, anchor: Tensor, before: Tensor) -> None:
        assert isinstance(setup.objective, Compares)
        self.compare = setup.objective.compare
        self.others = [copy.deepcopy(model).eval() for _ in range(2)]
        for other, weights in zip(self.others, (anchor, before), strict=True):
            setup.layers.whole.load(other, weights)
        self.live, *self.listeners = map(_Listener, (model, *self.others))

    def __call__(self, inputs: Any) -> Tensor:
        """The loss that is added to the task's, after a forward of the model on these inputs."""
        with torch.no_grad():
            for other in self.others:
                other(inputs)
        anchor, before = (listener.heard().detach() for listener in self.listeners)
        return self.compare(self.live.heard(), anchor, before)


class _Listener:
    """Hears what enters a model's last module with parameters."""

    def __init__(self, model: nn.Module) -> None:
        last = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))][-1]
        self._heard: Tensor | None = None
        last.register_forward_pre_hook(self._hear)

    def _hear(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._heard = inputs[0]

    def heard(self) -> Tensor:
        """In the last forward."""
        assert self._heard is not None
        return self._heard
