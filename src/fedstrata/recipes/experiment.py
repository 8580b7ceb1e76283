"""An experiment: a recipe with its task loaded and its model built, checked as far as can be before round 1."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE

from fedstrata.clients.modules import is_whole, same_bits
from fedstrata.clients.training import Setup, build_model, local_optimizer
from fedstrata.core.axes import Algorithm, Compares, MovesSome, TrainsTwice
from fedstrata.core.errors import MissingExtra, RecipeError, printable
from fedstrata.core.fit import Plan
from fedstrata.core.layers import Layers, unmatched
from fedstrata.core.memory import OWN, PRIVATE, Version
from fedstrata.core.round import check_cohort
from fedstrata.core.state import ServerState, initial_state
from fedstrata.core.training import LocalTraining
from fedstrata.recipes.schema import Recipe, check_accuracy_target
from fedstrata.tasks.config import NODES, PYTHON_TASK
from fedstrata.tasks.held_out import with_held_out
from fedstrata.tasks.metric import ACCURACY
from fedstrata.tasks.nodes import RemoteData
from fedstrata.tasks.seeded import SeededTask
from fedstrata.tasks.task import MOST_COUNTED, Task

_log = logging.getLogger("fedstrata")


@dataclass(frozen=True)
class Experiment:
    """What is run: a recipe, its task loaded, its model understood."""

    recipe: Recipe
    task: Task
    algorithm: Algorithm
    build: Callable[[], nn.Module]
    """A new model with the first weights."""
    layers: Layers
    initial: Tensor
    """The first weights, as a flat vector."""
    data: Path | None = None
    """Where its data sets were looked for, if not in the usual place."""

    @property
    def cohort_size(self) -> int:
        """How many clients take part in a round."""
        return self.recipe.training.participation.cohort_size(int((self.task.sizes() > 0).sum()))

    @property
    def plan(self) -> Plan:
        """What `fit` needs."""
        recipe, table = self.recipe, self.recipe.training
        record = recipe.record
        return Plan(
            self.layers,
            table.rounds,
            table.participation,
            table.local,
            recipe.seed,
            record.layers,
            record.checkpoint_every,
            reports_steps=self.task.train is not None,
        )

    @property
    def setup(self) -> Setup:
        """What a client needs."""
        return Setup(
            task=self.task,
            layers=self.layers,
            objective=self.algorithm.objective,
            selection=self.algorithm.selection,
            training=self.recipe.training.local,
            seed=self.recipe.seed,
            build=self.build,
            device=self.recipe.engine.device,
            record=self.recipe.record.layers,
            evaluation_batch=self.recipe.evaluation.batch_size,
            fine_tune=self.recipe.evaluation.fine_tune or 0,
        )

    @property
    def agreement(self) -> str:
        """A digest of what a client must have in common with its server, wherever each has its recipe from."""
        common = {
            "seed": self.recipe.seed,
            "algorithm": self.recipe.algorithm,
            "training": self.recipe.training.local.agreed(),
            "layers": [(layer.name, layer.numel) for layer in self.layers.layers],
            "dtype": str(self.layers.dtype),
        }
        if self.recipe.task.nodes is not None:
            common["data"] = self.recipe.task.model_dump(mode="json", include={"inputs", "nodes"})
        if self.recipe.task.augment:
            common["augment"] = self.recipe.task.augment
        return hashlib.sha256(json.dumps(common, sort_keys=True).encode()).hexdigest()[:16]

    def require_data(self) -> None:
        """Refuse to compute here what only the clients' nodes can."""
        if isinstance(self.task.clients, RemoteData):
            problem = "the clients' data is on their own nodes; deploy it with `fedstrata flower init`"
            raise RecipeError("task.dataset", NODES, problem)

    def warn(self) -> None:
        """Say so if the objective comes to nothing: it is refreshed with each epoch, and there is no second one."""
        objective, training = self.algorithm.objective, self.recipe.training.local
        sizes = self.task.sizes()
        if training.steps is None:
            field, one_epoch = "training.epochs", training.epochs == 1
        else:
            steps_per_epoch = -(-sizes[sizes > 0] // training.batch_size)
            field, one_epoch = "training.steps", bool((training.steps <= steps_per_epoch).all())
        if objective.refresh != "epoch" or not one_epoch:
            return
        start = self.layers.views(self.initial, trainable_only=True)
        if not objective.stiffness(start, start, objective.init(self.layers), self.layers):
            name = type(objective).__name__
            problem = (
                f"{name} is refreshed when a local epoch begins, and in the first nothing has moved yet. There is no "
                f"second one, so it never pulls: clients train as in FedAvg. More epochs, or refresh = 'step', help"
            )
            _log.warning("%s", printable(f"{field} = {training.full_work}: {problem}"))

    def described(self) -> dict[str, Any]:
        """What a run directory says of it besides the recipe."""
        task = self.task
        notes = task.described(here=not isinstance(task.clients, RemoteData))
        for key in ("table", "client_names"):
            if len(notes.get(key, ())) > MOST_COUNTED:
                del notes[key]
        return {
            "resolved": {"threads": 1, "dtype": self.recipe.engine.dtype},
            "metric": {"name": task.metric.name, "direction": task.metric.direction},
            "clients": len(task.clients),
            "layers": [
                {
                    "name": layer.name,
                    "tensors": [entry.name for entry in layer.entries],
                    "trainable": layer.trainable_stop - layer.start,
                    "numbers": layer.numel,
                    "units": layer.units,
                    "bytes": layer.numel * self.layers.itemsize,
                }
                for layer in self.layers.layers
            ],
            "data": notes,
        } | ({"private": private} if (private := self._private_names()) else {})

    def _private_names(self) -> list[str]:
        """The tensors that stay with the clients."""
        return [entry.name for layer in self.layers.private for entry in layer.entries]

    def module(self, state: ServerState, memory: Version | None = None) -> nn.Module:
        """The global model as a module of its own, all of it contiguous, as files and `view` want it.

        With what a client remembers it is that client's: with its private layers, or the model that is its own.
        """
        model, memory = self.build(), memory or {}
        self.layers.load(model, state.model)
        if OWN in memory and isinstance(self.algorithm.objective, TrainsTwice):
            self.layers.whole.load(model, memory[OWN])
        elif PRIVATE in memory:
            self.layers.whole.load(model, torch.cat([state.model, memory[PRIVATE]]))
        for tensor in (*model.parameters(), *model.buffers()):
            if is_whole(tensor):  # and not a part of another
                tensor.data = tensor.data.contiguous()
        return model.eval()

    def first_state(self) -> ServerState:
        """The server before round 1."""
        return initial_state(self.initial.clone(), self.algorithm, len(self.task.clients), self.layers)


def build_experiment(recipe: Recipe, task: Task | SeededTask | None = None, data: Path | None = None) -> Experiment:
    """Load the data and build the model; everything that can be wrong before the first round is found here."""
    evaluation = recipe.evaluation
    if recipe.engine.name == "flower":
        if find_spec("flwr") is None:
            raise MissingExtra("flwr", "flower", "engine.name = 'flower'")
        if recipe.task.function == PYTHON_TASK:
            problem = "its clients build the task on their own; name it as task.function instead of giving it in Python"
            raise RecipeError("engine.name", "flower", problem)
    if not isinstance(task, Task):
        seeded = task or SeededTask(recipe.task)
        task = seeded.build(recipe.seed, evaluation.held_out if "clients" in evaluation.on else 0.0, data)
    if task.metric is ACCURACY and evaluation.target is not None:
        check_accuracy_target(evaluation.target)
    if "clients" in evaluation.on and task.held_out is None:
        what = f"task {task.name!r} has no held-out data of clients: of each client's samples"
        _log.warning("%s", printable(f"{what}, {evaluation.held_out:g} are held out (evaluation.held_out)"))
        task = with_held_out(task, evaluation.held_out, recipe.seed)
    for name in evaluation.on:
        if name != "clients" and name not in task.evaluation:
            known = ", ".join([*task.evaluation, *(["clients"] if task.held_out is not None else [])])
            raise RecipeError("evaluation.on", evaluation.on, f"{name!r} is none of the task's sets: {known}")
    device = recipe.engine.device
    if device != "cpu":
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(device.partition(":")[2] or 0) >= devices:
            problem = f"there are {devices}, counted from 0" if devices else "this machine has none that torch can use"
            raise RecipeError("engine.device", device, f"no such CUDA device: {problem}")
    build = partial(_build, task, recipe)
    model = build()
    wanted, holders = recipe.training.clients_per_round, int((task.sizes() > 0).sum())
    if wanted is not None and wanted > len(task.clients):
        raise RecipeError("training.clients_per_round", wanted, f"there are only {len(task.clients)} clients")
    algorithm = recipe.built_algorithm
    check_cohort(algorithm, recipe.training.participation.cohort_size(holders))
    _check_epochs(recipe, algorithm)
    layers = _layers(model, recipe, algorithm)
    _check_builder(model, build(), layers)
    _check_loop(task, algorithm, recipe.training.local, model)
    return Experiment(recipe, task, algorithm, build, layers, layers.flatten(model), data)


def _check_epochs(recipe: Recipe, algorithm: Algorithm) -> None:
    """Refuse so few local epochs that clients would have nothing to send."""
    training, objective = recipe.training.local, algorithm.objective
    if not algorithm.private or not isinstance(objective, MovesSome) or training.steps is not None:
        return
    if all(objective.moves(epoch) == "private" for epoch in range(training.epochs)):
        problem = f"{objective!r} comes to no epoch in which shared layers move: more epochs"
        raise RecipeError("training.epochs", training.epochs, problem)


def _layers(model: nn.Module, recipe: Recipe, algorithm: Algorithm) -> Layers:
    """The model's layers. A pattern of private ones that a recipe has must fit; a named algorithm's own need not."""
    for pattern in unmatched(model, algorithm.private):
        problem = "matches no tensor of the model"
        if "private" in recipe.algorithm:
            raise RecipeError("algorithm.private", pattern, problem)
        _log.warning(
            "%s", printable(f"{recipe.label}: private = {pattern!r} {problem}: nothing stays on clients by it")
        )
    layers = Layers.of(model, recipe.grouping(), algorithm.private)
    evaluation = recipe.evaluation
    if layers.private and evaluation.private == "mean" and recipe.engine.name == "flower":
        raise RecipeError("evaluation.private", "mean", "on flower private layers are on the nodes, and stay there")
    if layers.private and evaluation.private is None and (servers := [n for n in evaluation.on if n != "clients"]):
        problem = "the server has no private layers; evaluate on clients, or say evaluation.private = 'initial'"
        raise RecipeError("evaluation.on", servers[0], problem)
    return layers


def _build(task: Task, recipe: Recipe) -> nn.Module:
    """A model as every client has it before its first order."""
    model = build_model(task, recipe.seed, getattr(torch, recipe.engine.dtype))
    if recipe.training.initial_weights is not None:
        _load_weights(model, recipe.training.initial_weights)
    return model


def _check_builder(model: nn.Module, again: nn.Module, layers: Layers) -> None:
    """Refuse a function that gives the same tensors twice, so that runs share them, or other numbers each time."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            problem = "TorchScript optimises itself while it runs, so that its numbers depend on how often it did"
            raise RecipeError("task.model", name or type(module).__name__, f"{problem}; build a plain module")
    tensors, others = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (model, again))
    if tensors.keys() != others.keys():
        name = min(tensors.keys() ^ others.keys())
        raise RecipeError("task.model", name, "the function that builds the model gives it only sometimes")
    for (path, module), (_, other) in zip(model.named_modules(), again.named_modules(), strict=True):
        for attribute, value in module.__dict__.items():
            if not attribute.startswith("_") and not _repeats(value, other.__dict__.get(attribute)):
                name, problem = f"{path}.{attribute}".lstrip("."), "the function gives another one each time"
                raise RecipeError("task.model", name, f"{problem}, with the same seed (a generator of its own?)")
    for name, tensor in tensors.items():
        if name in layers.entries and tensor.numel() and tensor.data_ptr() == others[name].data_ptr():
            problem = "the function gives the same tensor each time it is called, so runs would go on from each other"
            raise RecipeError("task.model", name, f"{problem}; build the model in it, or copy.deepcopy it")
        if not same_bits(tensor, others[name]):
            problem = "the function gives other numbers the second time with the same seed (a generator of its own?)"
            raise RecipeError("task.model", name, problem)


def _check_loop(task: Task, algorithm: Algorithm, training: LocalTraining, model: nn.Module) -> None:
    """Refuse an optimizer that cannot take the model's weights, and what a training function would not use or know."""
    if task.train is None:
        if not training.names_an_optimizer:
            return
        try:
            local_optimizer(training, [weight for weight in model.parameters() if weight.requires_grad], 1)
        except (ValueError, TypeError) as error:
            raise RecipeError("training.optimizer", training.optimizer, str(error)) from None
        return
    for name in ("optimizer", "optimizer_options", "momentum", "weight_decay", "clip_norm", "clip_value"):
        if (value := getattr(training, name)) != getattr(LocalTraining(), name):
            raise RecipeError(f"training.{name}", value, "the task has a training function, which would not use it")
    for axis in ("objective", "weighting", "server"):
        rule = getattr(algorithm, axis)
        if getattr(rule, "needs_reach", False) or isinstance(rule, Compares):
            needs = "a loss of its own in every step" if isinstance(rule, Compares) else "how far local steps reach"
            problem = f"needs {needs}, which a task's training function cannot give"
            raise RecipeError(f"algorithm.{axis}", type(rule).__name__, problem)


def _repeats(value: Any, other: Any) -> bool:
    """Whether two models' attributes are equal, as far as that can be told: numbers, texts, tensors and arrays."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return same_bits(value, other)
    if isinstance(value, np.ndarray) and isinstance(other, np.ndarray):
        return value.dtype.hasobject or value.tobytes() == other.tobytes()
    return not isinstance(value, int | float | str) or value == other or value != value


def _load_weights(model: nn.Module, path: Path) -> None:
    try:
        missing, unknown = model.load_state_dict(load_file(path), strict=False)
        missing = [name for name in missing if not name.endswith(EXTRA_STATE)]  # which is no tensor, so in no such file
        if missing or unknown:
            found = f"{', '.join(missing)} missing" if missing else f"{', '.join(unknown)} unknown"
            raise RecipeError("training.initial_weights", str(path), f"does not fit the model: {found}")
    except (OSError, SafetensorError) as error:
        raise RecipeError("training.initial_weights", str(path), f"cannot be read: {error}") from None
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise RecipeError("training.initial_weights", str(path), f"does not fit the model: {reason}") from None
