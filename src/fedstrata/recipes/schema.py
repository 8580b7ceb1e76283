"""A recipe: what a TOML file says, frozen, with every key, type and value checked before anything runs.

Ours live in `recipes/` and go by their name.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedstrata.algorithms import AXES, from_table
from fedstrata.core.axes import Algorithm
from fedstrata.core.errors import MISSING, BadValue, RecipeError, require
from fedstrata.core.grouping import GROUPINGS, Grouping
from fedstrata.core.schedules import SCHEDULES, Schedule
from fedstrata.core.training import LocalTraining, Participation, check_training
from fedstrata.recipes.catalog import RECIPES
from fedstrata.recipes.tables import check_values, parse_algorithm, parse_setting, set_key
from fedstrata.registry import build_dataclass, did_you_mean
from fedstrata.tasks.config import Options, TaskConfig

FORMAT = 1
"""Version of the recipe format."""

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
"""What a recipe may be called, as run directories are named by it."""

_log = logging.getLogger("fedstrata")

_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class LayersConfig(BaseModel):
    """The `[layers]` table of a recipe."""

    model_config = _STRICT

    grouping: str | dict[str, list[str]] | None = Field(
        None, description="module, tensor, block, or a table of tensor-name patterns; the algorithm's own if not given"
    )

    @model_validator(mode="after")
    def _check(self) -> LayersConfig:
        known = not isinstance(self.grouping, str) or self.grouping in GROUPINGS
        require(known, "grouping", self.grouping, f"is none of {', '.join(GROUPINGS)}")
        require(self.grouping != {}, "grouping", self.grouping, "names no layer")
        return self


class Training(BaseModel):
    """The `[training]` table of a recipe: how many rounds, who takes part in one, and what a client does locally."""

    model_config = _STRICT

    rounds: int = Field(50, ge=1, description="communication rounds")
    clients_per_round: int | None = Field(None, ge=1, description="K; all clients if not given")
    sampling: Literal["uniform", "size"] = Field("uniform", description="size: probability proportional to shard size")
    epochs: int = Field(1, ge=1, description="local epochs E")
    steps: int | None = Field(None, ge=1, description="local steps, instead of epochs")
    batch_size: int = Field(32, ge=1, description="B; the last short batch of an epoch is kept")
    optimizer: str = Field("sgd", description="any class of torch.optim: adam, adamw, …; starts fresh every round")
    optimizer_options: Options | None = Field(None, description="its other arguments, such as { nesterov = true }")
    lr: float = Field(0.01, gt=0, description="learning rate of the first round")
    lr_decay: float = Field(1.0, gt=0, le=1, description="factor per round")
    schedule: dict[str, Any] | list[dict[str, Any]] | None = Field(
        None, description='of the learning rate over rounds: { name = "cosine", rounds = 50 }, or several in a list'
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="of SGD and whatever else has it")
    weight_decay: float = Field(0.0, ge=0, description="of SGD and Adam, as an L2 penalty; of others as they have it")
    clip_norm: float | None = Field(None, gt=0, description="the largest norm of a step's gradient, of all parameters")
    clip_value: float | None = Field(None, gt=0, description="the largest size of a gradient's numbers")
    stragglers: float = Field(0.0, ge=0, le=1, description="share of a round's clients that do only part of the work")
    keep_stragglers: bool = Field(True, description="whether the server uses what stragglers send")
    dropouts: float = Field(0.0, ge=0, lt=1, description="probability that a client vanishes from a round")
    min_replies: float = Field(0.0, ge=0, le=1, description="share of replies below which a round is tried again")
    attempts: int = Field(3, ge=1, description="how often a round is tried before the run stops")
    initial_weights: Path | None = Field(None, strict=False, description="a safetensors file to start from")

    @field_validator("initial_weights")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return None if path is None else path.absolute()  # a run may be resumed from elsewhere

    @field_validator("optimizer")
    @classmethod
    def _in_one_case(cls, optimizer: str) -> str:
        return optimizer.lower()

    @model_validator(mode="after")
    def _fits_together(self) -> Training:
        _ = self.participation, self._local(only_read=True)  # each checks itself
        return self

    @property
    def participation(self) -> Participation:
        """Who takes part in a round: what the server decides."""
        return Participation(**self.model_dump(include=_names(Participation)))

    @property
    def local(self) -> LocalTraining:
        """What a client does: all that it is told of this table."""
        return self._local()

    def _local(self, only_read: bool = False) -> LocalTraining:
        """The same; while a recipe is only read, without an optimizer that torch would have to be asked about."""
        values = self.model_dump(include=_names(LocalTraining), exclude_none=True)
        if only_read and (self.optimizer not in ("sgd", "adam") or self.optimizer_options):
            values |= {"optimizer": "sgd", "optimizer_options": {}}
        tables = self.schedule if isinstance(self.schedule, list) else [self.schedule] if self.schedule else []
        return LocalTraining(**values | {"schedule": tuple(map(_schedule, tables))})


def _schedule(table: Mapping[str, Any]) -> Schedule:
    """A schedule of the learning rate, from its table."""
    options = dict(table)
    name = options.pop("name", MISSING)
    if not isinstance(name, str) or name not in SCHEDULES:
        close = did_you_mean(str(name), SCHEDULES)
        raise RecipeError("training.schedule.name", name, f"unknown{close}; there are: {', '.join(SCHEDULES)}")
    built: Schedule = build_dataclass(SCHEDULES[name], options, "training.schedule")
    return built


def _names(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


class Evaluation(BaseModel):
    """The `[evaluation]` table of a recipe."""

    model_config = _STRICT

    on: list[str] = Field(
        default_factory=lambda: ["test"],
        min_length=1,
        description="the server's sets (test, validation, train) and/or clients; the first one decides on the target",
    )
    every: int = Field(1, ge=1, description="rounds between evaluations; the last round always counts")
    held_out: float = Field(0.2, gt=0, lt=1, description="the clients' own share of data for evaluation on clients")
    clients: int | None = Field(None, ge=1, description="how many clients to evaluate on; all if not given")
    target: float | None = Field(None, description="the metric's value to reach")
    stop_at_target: bool = Field(False, description="whether to stop there")
    fine_tune: int | None = Field(None, ge=1, description="epochs a client trains a copy before it is evaluated on it")
    private: Literal["initial", "mean"] | None = Field(
        None, description="the private layers of models that are evaluated on the server; without it, none are"
    )
    batch_size: int | None = Field(
        None,
        ge=1,
        description="samples shown to the model at a time; 1000 if not given, or 100 with convolutions",
    )

    @field_validator("on", mode="before")
    @classmethod
    def _one_is_a_list(cls, on: Any) -> Any:
        return [on] if isinstance(on, str) else on

    @model_validator(mode="after")
    def _check(self) -> Evaluation:
        require(len(set(self.on)) == len(self.on), "on", self.on, "names a set twice")
        require(not self.stop_at_target or self.target is not None, "stop_at_target", True, "needs a target")
        return self


class EngineConfig(BaseModel):
    """The `[engine]` table of a recipe."""

    model_config = _STRICT

    name: Literal["local", "flower"] = Field(
        "local", description="who carries orders to clients: this machine, or Flower, simulated or deployed"
    )
    workers: int | None = Field(None, ge=1, description="processes, all cores if not given; changes no result")
    timeout: float = Field(
        600.0, gt=0, description="seconds to wait for replies; on flower, where clients can be silent"
    )
    lost_memory: Literal["afresh"] | None = Field(
        None, description="afresh: on flower, a node that lost what its client remembers starts with nothing"
    )
    device: str = Field("cpu", description="cpu, cuda or cuda:0; not cpu: one worker")
    dtype: Literal["float32", "float64"] = Field("float32", description="of weights and inputs")

    @model_validator(mode="before")
    @classmethod
    def _ignore_former_keys(cls, table: Any) -> Any:
        """Recipes of 0.1 chose a trainer, and all that it wrote say so."""
        found = [key for key in ("trainer", "stack_size") if isinstance(table, Mapping) and key in table]
        if found:
            _say_ignored(", ".join(f"engine.{key}" for key in found))
        return {key: value for key, value in table.items() if key not in found} if found else table

    @model_validator(mode="after")
    def _check(self) -> EngineConfig:
        known = re.fullmatch(r"cpu|cuda(:[0-9]+)?", self.device)
        require(known is not None, "device", self.device, "must be cpu, cuda, or one of several: cuda:0, cuda:1, …")
        return self


@cache
def _say_ignored(keys: str) -> None:
    """Once in a process, however many runs it lists, or cells of a comparison it reads."""
    _log.warning("%s: ignored; every client is trained on its own, by the same trainer on every engine", keys)


class Record(BaseModel):
    """The `[record]` table of a recipe."""

    model_config = _STRICT

    layers: bool = Field(True, description="keep every round's numbers per client and layer")
    checkpoint_every: int = Field(1, ge=1, description="rounds between checkpoints")
    keep_checkpoints: int = Field(2, ge=2, description="the last so many are kept; a round can be probed from its own")


class Recipe(BaseModel):
    """What a recipe says: everything that decides a run's result."""

    model_config = _STRICT

    format: int = FORMAT
    name: str = "experiment"
    description: str = ""
    seed: int = Field(0, ge=0, description="everything random follows from it")
    task: TaskConfig = TaskConfig()
    layers: LayersConfig = LayersConfig()
    algorithm: Options = Field(
        default_factory=lambda: {"name": "fedavg"},
        description="a name with options, tables objective, selection and weighting, or both",
    )
    training: Training = Training()
    evaluation: Evaluation = Evaluation()
    engine: EngineConfig = EngineConfig()
    record: Record = Record()
    paper: Options = Field(default_factory=dict, description="what the paper reports; not used by a run")

    @model_validator(mode="after")
    def _can_name_a_folder(self) -> Recipe:
        known = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name)
        require(known is not None, "name", self.name, "names folders: letters and digits, with . _ - between them")
        return self

    @field_validator("algorithm")
    @classmethod
    def _axes_are_tables(cls, algorithm: dict[str, Any]) -> dict[str, Any]:
        if isinstance(combine := algorithm.get("combine"), str):
            algorithm = {**algorithm, "combine": {"name": combine}}
        for axis in AXES:
            given = algorithm.get(axis, {})
            require(isinstance(given, Mapping), axis, given, 'must be a table with a name, like { name = "…" }')
        return algorithm

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> Recipe:
        """Check a table and freeze it; a bad one is a RecipeError that names field and value."""
        recipe = cls.read(table)
        try:
            training = recipe.training.local  # which may ask torch about its optimizer
        except BadValue as error:
            raise RecipeError(f"training.{error.field}", error.value, error.problem) from None
        if recipe.built_algorithm.private:
            recipe = recipe.evaluated_on_clients()
        check_training(recipe.built_algorithm, training)
        if recipe.task.function is None:
            _ = recipe.task.built_partition
            target = recipe.evaluation.target
            if target is not None:
                check_accuracy_target(target)
        return recipe

    def evaluated_on_clients(self) -> Recipe:
        """The same, evaluated on clients, unless it says on what."""
        if "on" in self.evaluation.model_fields_set:
            return self
        return self.model_copy(update={"evaluation": self.evaluation.model_copy(update={"on": ["clients"]})})

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Recipe:
        """The same of a recipe that is only looked at: nothing that it names is imported or called."""
        check_values(table)
        version = table.get("format", FORMAT)
        if version != FORMAT:
            raise RecipeError("format", version, f"this version of fedstrata reads recipes of format {FORMAT}")
        try:
            return cls.model_validate(dict(table))
        except ValidationError as error:
            raise explain(error, cls) from None

    @cached_property
    def built_algorithm(self) -> Algorithm:
        """The algorithm that `[algorithm]` describes: built once, when it is first asked for."""
        return from_table(self.algorithm)

    def grouping(self) -> Grouping:
        """What a layer is: the recipe's own grouping, or the algorithm's."""
        return self.layers.grouping or self.built_algorithm.grouping

    def named_code(self) -> list[tuple[str, str]]:
        """Where the recipe names code as `module:name`, and what: it is imported when the recipe is run."""

        def search(field: str, value: Any) -> Iterator[tuple[str, str]]:
            inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
            for key, part in inner:
                yield from search(f"{field}.{key}", part)
            if isinstance(value, str) and ":" in value:
                yield field, value

        table = self.to_table()
        return [found for part in ("task", "algorithm") for found in search(part, table[part])]

    def to_toml(self) -> str:
        """The TOML that gives this recipe again."""
        return tomli_w.dumps(self.to_table())

    def to_table(self) -> dict[str, Any]:
        """The same as a table."""
        return self.model_dump(mode="json", exclude_none=True)

    def essence(self, defaults: bool = True) -> dict[str, Any]:
        """What a result depends on apart from the seed: not what it is called, nor who computes it or what is kept."""
        table = self.model_dump(mode="json", exclude_none=True, exclude_defaults=not defaults)
        for key in ("format", "name", "description", "seed", "paper", "record"):
            table.pop(key, None)
        for key in ("workers", "timeout"):
            table.get("engine", {}).pop(key, None)
        if self.training.stragglers == 0:
            table.get("training", {}).pop("keep_stragglers", None)  # there are none to keep
        return {key: value for key, value in table.items() if value != {}}

    @property
    def label(self) -> str:
        """A short name for the algorithm."""
        name = self.algorithm.get("name")
        axes = [self.algorithm.get(axis, {}).get("name") for axis in AXES]
        return "+".join(str(part) for part in (name, *axes) if part).replace(":", ".") or "fedavg"


def check_accuracy_target(target: float, field: str = "evaluation.target") -> None:
    """An accuracy is a share: 95 is a slip for 0.95."""
    if not 0 < target <= 1:
        hint = f"; did you mean {target / 100:g}?" if 1 < target <= 100 else ""
        raise RecipeError(field, target, f"an accuracy lies in (0, 1]{hint}")


def as_table(recipe: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """A recipe as a table of its own, whichever way it is given."""
    return dict(recipe) if isinstance(recipe, Mapping) else RECIPES.read(recipe)


def load(
    recipe: str | Path | Mapping[str, Any],
    *,
    algorithm: str | Mapping[str, Any] | None = None,
    settings: Iterable[str] | Mapping[str, Any] = (),
    seed: int | None = None,
) -> Recipe:
    """A recipe with changes: another algorithm ("fedldf:n=4"), settings ("training.rounds=50"), a seed."""
    table = as_table(recipe)
    if algorithm is not None:
        table["algorithm"] = parse_algorithm(algorithm) if isinstance(algorithm, str) else dict(algorithm)
    pairs = list(settings.items() if isinstance(settings, Mapping) else map(parse_setting, settings))
    for key, value in sorted(pairs, key=lambda pair: pair[0] not in _NAMES):
        if key in _NAMES:
            _rename(table, key.removesuffix(".name"), value)
        set_key(table, key, value)
    if seed is not None:
        table["seed"] = seed
    return Recipe.parse(table)


_NAMES = (
    "task.partition.name",
    "task.model.name",
    "training.schedule.name",
    "algorithm.name",
    *(f"algorithm.{axis}.name" for axis in AXES),
)
"""The keys whose value decides what else their table may hold."""


def _rename(table: dict[str, Any], path: str, name: Any) -> None:
    """Another partition, model, algorithm or rule does not inherit the options of the one it replaces."""
    inner: Any = table
    for part in path.split("."):
        inner = inner.get(part) if isinstance(inner, Mapping) else None
    if isinstance(inner, Mapping) and inner.get("name", name) != name:
        set_key(table, path, {"name": name})


def explain(error: ValidationError, model: type[BaseModel]) -> RecipeError:
    """The first problem of a validation, in one line; an unknown key before the missing one that it may stand for."""
    problem = min(error.errors(), key=lambda found: found["type"] == "missing")
    where = [str(part) for part in problem["loc"] if not _is_union_branch(part)]
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, BadValue):
        return RecipeError(".".join([*where, cause.field]), cause.value, cause.problem)
    value = MISSING if problem["type"] == "missing" else problem["input"]
    if problem["type"] == "extra_forbidden":
        known = _fields(model, where[:-1])
        close = difflib.get_close_matches(where[-1], known, n=1)
        elsewhere = [f"{table}.{where[-1]}" for table in model.model_fields if where[-1] in _fields(model, [table])]
        guess = (elsewhere + close if len(where) == 1 else close + elsewhere)[:1]
        hint = f"did you mean {guess[0]}?" if guess else f"there are: {', '.join(known)}"
        return RecipeError(".".join(where), value, f"unknown key; {hint}")
    text = problem["msg"]
    return RecipeError(".".join(where), value, text[:1].lower() + text[1:])


def _is_union_branch(part: int | str) -> bool:
    return isinstance(part, str) and (part in ("str", "int", "float") or part.startswith(("dict[", "list[")))


def _fields(model: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        kind = model.model_fields[part].annotation if part in model.model_fields else None
        tables = [one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, BaseModel)]
        if not tables:
            return []
        model = tables[0]
    return list(model.model_fields)
