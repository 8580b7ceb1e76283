"""The `[task]` table of a recipe."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from fedstrata.core.errors import require
from fedstrata.tasks.augment import AUGMENTATIONS
from fedstrata.tasks.parquet import LABEL
from fedstrata.tasks.partitions import build_partition

PYTHON_TASK = "python"
"""What `task.function` says when the Task was handed over in Python."""

NODES = "nodes"
"""What `task.dataset` says when each client's data is on its own node."""


FILES = "files"
"""What it says when each client has a file on this machine."""

_PARTITION = {"name": "iid", "clients": 10}


def _given(value: Any, field: str = "") -> Any:
    """Refuse None in a table of options: a function may tell it from an option left out, and TOML cannot say it."""
    require(value is not None, field, value, "is nothing that a recipe can say; leave it out")
    if isinstance(value, dict):
        for key, inner in value.items():
            _given(inner, f"{field}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for inner in value:
            _given(inner, field)
    return value


Options = Annotated[dict[str, Any], AfterValidator(_given)]
"""A table that is somebody else's to check: options of a rule, a model or a user's own function."""


class NodesConfig(BaseModel):
    """The `[task.nodes]` table of a recipe: what every node's data looks like."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    clients: int = Field(ge=1, le=100_000_000, description="how many nodes there are")
    shape: list[int] = Field(min_length=1, description="of one input; of an image: channels, height, width")
    classes: int | list[str] = Field(description="how many there are, or their names")
    mean: list[float] | None = Field(
        None, description="per channel, for task.inputs = 'normalised'; of images in [0, 1]"
    )
    std: list[float] | None = Field(None, description="per channel, likewise")

    @model_validator(mode="after")
    def _check(self) -> NodesConfig:
        require(min(self.shape) >= 1, "shape", self.shape, "must be of numbers from 1")
        if isinstance(self.classes, int):
            require(self.classes <= 1_000_000, "classes", self.classes, "must be at most 1000000")
        names = self.class_names
        require(len(names) >= 2, "classes", self.classes, "must be at least 2")
        require(len(set(names)) == len(names), "classes", self.classes, "has a name twice")
        for name, values in (("mean", self.mean), ("std", self.std)):
            fits = values is None or len(values) == self.shape[0]
            require(fits, name, values, f"must have a number for each of the {self.shape[0]} channels")
        require(self.std is None or min(self.std) > 0, "std", self.std, "must be positive")
        return self

    @property
    def class_names(self) -> tuple[str, ...]:
        """A name for each class, its number if it has no other."""
        return tuple(map(str, range(self.classes))) if isinstance(self.classes, int) else tuple(self.classes)


class FilesConfig(BaseModel):
    """The `[task.files]` table of a recipe: a file for each client, all of them on this machine."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    clients: str = Field(description="a pattern: hospitals/*.csv; each file, or folder, is a client's, by its name")
    target: str = Field(LABEL, description="the column with the classes")
    test: str | None = Field(None, description="a file with the server's evaluation set")
    classes: list[str] | None = Field(None, description="their names; those that are in the files, if not given")
    shape: list[int] | None = Field(None, description="of one input, where clients have folders: nodes.shape")

    @field_validator("clients", "test")
    @classmethod
    def _absolute(cls, path: str | None) -> str | None:
        return None if path is None else str(Path(path).expanduser().absolute())  # a run may be resumed from elsewhere

    @model_validator(mode="after")
    def _check(self) -> FilesConfig:
        names = self.classes
        require(names is None or len(set(names)) == len(names) >= 2, "classes", names, "must be two names or more")
        require(self.shape is None or min(self.shape, default=0) >= 1, "shape", self.shape, "must be of numbers from 1")
        return self


class TaskConfig(BaseModel):
    """The `[task]` table of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dataset: str = Field(
        "mnist-mini",
        description="a name; module:function giving ((x, y), (x, y)), train and test; files; or nodes, each its own",
    )
    inputs: Literal["normalised", "unit"] = Field("normalised", description="images as (x − mean)/std, or in [0, 1]")
    validation: int = Field(0, ge=0, description="training samples set apart as an evaluation set")
    partition: Options = Field(default_factory=lambda: dict(_PARTITION), description="a name and its options")
    nodes: NodesConfig | None = Field(None, description="what the clients' own data looks like, for dataset = nodes")
    files: FilesConfig | None = Field(None, description="where the clients' files are, for dataset = files")
    augment: list[str] | None = Field(
        None, description="crop, flip, module:function: how images are changed at random in training"
    )
    model: Options = Field(default_factory=lambda: {"name": "cnn"}, description="a name and its options")
    function: str | None = Field(None, description="module:function that builds the whole Task, instead of the above")
    options: Options = Field(default_factory=dict, description="arguments of that function")

    @cached_property
    def built_partition(self) -> Any:
        """The scheme that `[task.partition]` describes: built once, when it is first asked for."""
        return build_partition(self.partition)

    @model_validator(mode="after")
    def _check(self) -> TaskConfig:
        if self.function is not None:
            return self
        for name in self.augment or ():
            require(name in AUGMENTATIONS or ":" in name, "augment", name, f"is none of {', '.join(AUGMENTATIONS)}")
        require((self.dataset == NODES) == (self.nodes is not None), "nodes", self.nodes, "goes with dataset = 'nodes'")
        require((self.dataset == FILES) == (self.files is not None), "files", self.files, "goes with dataset = 'files'")
        if self.files is not None:
            problem = "means nothing for dataset = 'files': every file is a client"
            require(self.partition == _PARTITION, "partition", self.partition, problem)
        if self.nodes is not None:
            require(self.validation == 0, "validation", self.validation, "the server has no data of dataset = 'nodes'")
            for name, given in (("mean", self.nodes.mean), ("std", self.nodes.std)):
                fits = (given is not None) == (self.inputs == "normalised")
                require(fits, f"nodes.{name}", given, f"goes with inputs = 'normalised', which is {self.inputs!r}")
        return self
