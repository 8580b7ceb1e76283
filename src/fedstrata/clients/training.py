"""Local training: what a client knows before its first order, its optimizer, and the loop over its batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.sgd import sgd

from fedstrata.clients.local import Local
from fedstrata.clients.modules import is_writable
from fedstrata.core import rng
from fedstrata.core.axes import Compares, Objective, Selection
from fedstrata.core.layers import Layers
from fedstrata.core.optimizers import make_optimizer
from fedstrata.core.training import LocalTraining
from fedstrata.tasks.nests import moved
from fedstrata.tasks.task import Task


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
    """Gradients of sparse embeddings as others are: neither proximal terms nor all optimisers can take them."""
    for weight in weights:
        gradient = weight.grad
        if gradient is not None and gradient.layout is not torch.strided:
            weight.grad = gradient.to_dense()


def local_optimizer(training: LocalTraining, parameters: Iterable[Tensor], round: int) -> Optimizer:
    """A fresh optimiser for one client's round."""
    if training.names_an_optimizer:
        own = training.optimizer_arguments(round)
        return make_optimizer(training.optimizer, parameters, own, training.optimizer_options)
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


def train(setup: Setup, model: nn.Module, local: Local, compare: Comparison | None) -> None:
    """Local training as a recipe describes it, for any model: with autograd and torch's optimizers."""
    training, objective, task_loss = setup.training, setup.objective, own_copy(setup.task.loss)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = local_optimizer(training, weights, local.round)
    for inputs, targets in local.batches():
        optimizer.zero_grad()
        loss = whole = task_loss(model(inputs), targets)
        if compare is not None:
            whole = loss + compare(inputs)
        if objective.differentiable:
            (whole + local.term.energy()).backward()  # type: ignore[no-untyped-call]
            make_dense(weights)
            local.term.push()
        else:
            whole.backward()  # type: ignore[no-untyped-call]
            make_dense(weights)
            local.pull()
        if training.clip_value is not None:
            nn.utils.clip_grad_value_(weights, training.clip_value)
        if training.clip_norm is not None:
            nn.utils.clip_grad_norm_(weights, training.clip_norm)
        optimizer.step()
        local.log(loss=loss)


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
