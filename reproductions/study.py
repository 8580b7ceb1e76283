"""A study: one table or figure of a paper as a TOML file in `studies/`, with the values the paper reports.

    recipe, settings        the paper's setting, a recipe by name and what is changed in it
    [arms]                  what is compared: a name and an algorithm, perhaps with settings of its own
    [[cells]]               the table's cells or the figure's panels: settings, and what the paper reports there
    [measures]              the numbers taken from each run
    [[claims]]              what the paper says of these numbers, in a form that can be checked
    [[plots]]               the pictures: curves of series, dots of measures, heat maps of layers
    [quick]                 what is cut for a first impression

Every arm runs in every cell with every seed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedstrata.core.errors import RecipeError, require
from fedstrata.recipes.catalog import Library
from fedstrata.recipes.schema import Recipe, check_accuracy_target, explain, load
from fedstrata.runs.comparison import Job

_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)
STUDIES = Library("study", files("reproductions").joinpath("studies"), "python -m reproductions list")

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._+-]*$"

CHECKPOINT_EVERY = 10
"""Rounds that a killed run may lose."""


class Measure(BaseModel):
    """One number of a run, out of what was recorded in every round."""

    model_config = _STRICT

    title: str
    kind: Literal["rounds_to", "upload_to", "final", "best", "at", "mean", "deviation", "at_equal_upload", "upload"]
    series: str | list[str] = Field("test.accuracy", description="or a list, whose mean is taken")
    target: float | None = Field(None, description="of rounds_to and upload_to; the recipe's if not given")
    round: int | None = Field(None, ge=1, description="of at")
    first: int = Field(1, ge=1, description="of mean: the first round that counts")
    last: int | None = Field(None, ge=1, description="of mean: the last one; of deviation: how many last rounds")
    better: Literal["higher", "lower"] | None = Field(None, description="higher for accuracies, else lower")

    @model_validator(mode="after")
    def _check(self) -> Measure:
        require((self.kind == "at") == (self.round is not None), "round", self.round, f"kind is {self.kind}")
        way = self.kind in ("rounds_to", "upload_to")
        require(not way or len(self.names) == 1, "series", self.series, f"{self.kind} is of one")
        require(self.kind != "deviation" or self.last is not None, "last", self.last, "deviation needs it")
        return self

    @property
    def names(self) -> list[str]:
        """The series it reads."""
        return [self.series] if isinstance(self.series, str) else self.series

    @property
    def rises(self) -> bool:
        """Whether larger values are better."""
        return self.better == "higher" if self.better else self.names[0].endswith("accuracy")

    @property
    def heading(self) -> str:
        """Its title, with the unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    @property
    def unit(self) -> Literal["", "%", "points", "°"]:
        """What its numbers are in, if anything."""
        if self.kind in ("rounds_to", "upload_to", "upload"):
            return ""
        if self.names[0].rpartition(".")[2] in ("accuracy", "error"):
            return "points" if self.kind == "deviation" else "%"
        return "°" if self.names[0].startswith("angle.") else ""


class Arm(BaseModel):
    """One of the things compared."""

    model_config = _STRICT

    algorithm: str | dict[str, Any]
    settings: dict[str, Any] = Field(default_factory=dict)


class StudyCell(BaseModel):
    """One setting in which all arms run."""

    model_config = _STRICT

    name: str = Field(pattern=_NAME)
    title: str
    recipe: str | None = Field(None, description="another recipe than the study's")
    settings: dict[str, Any] = Field(default_factory=dict)
    reported: dict[str, dict[str, float]] = Field(default_factory=dict, description="measure → arm → value")
    seconds_per_round: float | None = Field(None, gt=0)


class Claim(BaseModel):
    """A statement of the paper about measures: `arm` is lower than, higher than or similar to `than` or `value`.

    Or it is so, or its advantage over another arm is, in one cell compared with what it is in another cell.
    """

    model_config = _STRICT

    text: str
    paper: str = Field(description="what the paper reports, in its own figures")
    measure: str
    arm: str
    relation: Literal["lower", "higher", "similar"]
    than: list[str] = Field(default_factory=list, description="arms; each is a comparison of its own")
    together: bool = Field(False, description="one comparison, with whichever of `than` is best in a seed")
    best: bool = Field(False, description="said of all of them at once: one comparison that fails refutes it")
    than_measure: str | None = Field(None, description="the others' measure, where it is another one")
    value: float | None = Field(None, description="a number, instead of other arms")
    over: str | None = Field(None, description="with than_cells: the arm that the advantage is over")
    than_cells: dict[str, str] = Field(default_factory=dict, description="cell = the cell it is compared with")
    factor: float = Field(1.0, gt=0, description="the others' value is multiplied by this: 0.6 is “40 % lower”")
    margin: float = Field(0.0, description="lower or higher by at least this, which may be below 0; similar within it")
    cells: list[str] | None = Field(None, description="where it is said; everywhere if not given")
    why: str = Field("", description="our explanation of what was found")

    @property
    def is_question(self) -> bool:
        """Whether it is a question of ours, which is answered and not judged."""
        return self.text.endswith("?")

    @field_validator("than", mode="before")
    @classmethod
    def _one_is_a_list(cls, than: Any) -> Any:
        return [than] if isinstance(than, str) else than

    @model_validator(mode="after")
    def _check(self) -> Claim:
        given = [bool(self.than), self.value is not None, bool(self.than_cells)]
        require(sum(given) == 1, "than", self.than, "give one of than, value and than_cells")
        require(not self.together or len(self.than) > 1, "together", self.together, "needs two or more in than")
        require(not self.together or self.relation != "similar", "together", self.together, "similar has no best")
        several = len(self.than) > 1 and not self.together
        require(not self.best or several, "best", self.best, "needs two or more in than, each compared by itself")
        require(self.over is None or bool(self.than_cells), "over", self.over, "belongs to than_cells")
        require(not (self.than_cells and self.cells), "cells", self.cells, "than_cells says where")
        require(self.relation != "similar" or self.margin > 0, "margin", self.margin, "similar needs one above 0")
        return self


class Place(BaseModel):
    """A run of the study, whichever seed."""

    model_config = _STRICT

    cell: str
    arm: str


class Plot(BaseModel):
    """A picture with a panel for each cell: curves of a series, unless it is given what else to draw."""

    model_config = _STRICT

    name: str = Field(pattern=_NAME, description="of its file")
    cells: list[str] | None = Field(None, description="all of them if not given")
    arms: list[str] | None = Field(None, description="all of them if not given")
    series: str | list[str] = Field("test.accuracy", description="or several, a row of panels for each")
    against: str = Field("round", description="round, upload (so far), or another series")
    logarithmic: list[str] = Field(default_factory=list, description="the series whose axes are")
    measure: str | None = Field(None, description="dots: this measure of every arm")
    rounds: list[int] = Field(default_factory=list, description="every client's value in these rounds, arms as panels")
    clients: list[str] = Field(default_factory=list, description="of rounds: what each client is called")
    layers: Place | None = Field(None, description="heat maps of one run's layers, rounds × clients")

    @property
    def names(self) -> list[str]:
        """The series it shows."""
        return [self.series] if isinstance(self.series, str) else self.series


class Quick(BaseModel):
    """What a first impression leaves out."""

    model_config = _STRICT

    seeds: int = Field(1, ge=1)
    rounds: int = Field(ge=1)
    cells: list[str] | None = None
    arms: list[str] | None = None


class Study(BaseModel):
    """A table or figure, ready to run."""

    model_config = _STRICT

    name: str = Field(pattern=_NAME)
    title: str
    paper: str = Field(description="the paper's short name: the page is ordered by it")
    shows: str = Field(description="which table or figure")
    recipe: str
    settings: dict[str, Any] = Field(default_factory=dict)
    reduced: str = Field("", description="exactly what was reduced from the paper's setting")
    notes: str = Field("", description="how the paper was read")
    seeds: int = Field(ge=1)
    seconds_per_round: float = Field(gt=0, description="on one core of a small machine")
    figures: list[Literal["gradient_divergence", "angles"]] = Field(
        default_factory=list, description="series made from the per-layer figures, which are recorded only then"
    )
    arms: dict[str, Arm] = Field(min_length=1)
    cells: list[StudyCell] = Field(min_length=1)
    measures: dict[str, Measure] = Field(min_length=1)
    claims: list[Claim] = Field(default_factory=list)
    plots: list[Plot] = Field(default_factory=lambda: [Plot(name="accuracy")])
    quick: Quick

    @field_validator("arms", mode="before")
    @classmethod
    def _short_arms(cls, arms: Any) -> Any:
        if not isinstance(arms, Mapping):
            return arms
        return {name: {"algorithm": arm} if isinstance(arm, str) else arm for name, arm in arms.items()}

    @model_validator(mode="after")
    def _check(self) -> Study:
        names = [cell.name for cell in self.cells]
        require(len(set(names)) == len(names), "cells", names, "two have the same name")
        for claim in self.claims:
            self._known("claims.measure", [claim.measure, *filter(None, [claim.than_measure])], self.measures)
            self._known("claims.arm", [claim.arm], self.arms)
            self._known("claims.than", claim.than, self.arms)
            self._known("claims.over", filter(None, [claim.over]), self.arms)
            self._known("claims.cells", [*(claim.cells or []), *claim.than_cells, *claim.than_cells.values()], names)
        for cell in self.cells:
            self._known(f"cells.{cell.name}.reported", cell.reported, self.measures)
            for values in cell.reported.values():
                self._known(f"cells.{cell.name}.reported", values, self.arms)
        for plot in self.plots:
            self._known(f"plots.{plot.name}.cells", plot.cells or [], names)
            self._known(f"plots.{plot.name}.arms", plot.arms or [], self.arms)
            self._known(f"plots.{plot.name}.measure", filter(None, [plot.measure]), self.measures)
            if plot.layers:
                self._known(f"plots.{plot.name}.layers.cell", [plot.layers.cell], names)
                self._known(f"plots.{plot.name}.layers.arm", [plot.layers.arm], self.arms)
        plots = [plot.name for plot in self.plots]
        require(len(set(plots)) == len(plots), "plots", plots, "two have the same name")
        self._known("quick.cells", self.quick.cells or [], names)
        self._known("quick.arms", self.quick.arms or [], self.arms)
        return self

    @staticmethod
    def _known(field: str, used: Iterable[str], known: Iterable[str]) -> None:
        known = list(known)
        for name in used:
            require(name in known, field, name, f"is none of {', '.join(known)}")

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> Study:
        """Check a table and freeze it; every cell's recipe is checked as well."""
        try:
            study = cls.model_validate(dict(table))
        except ValidationError as error:
            raise explain(error, cls) from None
        for cell in study.cells:
            for arm in study.arms:
                study._check_measures(study.recipe_of(cell, arm, 0))
        return study

    def _check_measures(self, recipe: Recipe) -> None:
        """What a run will not record is known before it runs."""
        rounds, evaluation = recipe.training.rounds, recipe.evaluation
        of_clients = ["clients.worst_tenth"] if "clients" in evaluation.on else []
        evaluated = [
            f"{place}.{what}" for place in evaluation.on for what in ("loss", "accuracy", "error")
        ] + of_clients
        for name, what in self.measures.items():
            field = f"measures.{name}"
            if what.round is not None and what.round > rounds:
                raise RecipeError(f"{field}.round", what.round, f"a run has {rounds} rounds")
            if what.target is not None and what.names[0].endswith((".accuracy", ".error")):
                check_accuracy_target(what.target, f"{field}.target")
            if what.kind in ("rounds_to", "upload_to") and what.target is None and evaluation.target is None:
                raise RecipeError(f"{field}.target", None, f"{what.kind} needs one, and the recipe has none")
            own_metric, of_figures = recipe.task.function is not None, ("angle", "gradient_divergence")
            for series in () if own_metric or what.kind == "upload" else what.names:
                if series not in evaluated and series.partition(".")[0] not in of_figures:
                    problem = f"is not recorded; evaluation.on = {evaluation.on} gives {', '.join(evaluated)}"
                    raise RecipeError(f"{field}.series", series, problem)

    def recipe_of(self, cell: StudyCell, arm: str, seed: int) -> Recipe:
        """What one run does."""
        chosen = self.arms[arm]
        settings = {
            "name": self.name,
            "description": f"{self.title}: {cell.title}, {arm}",
            "record.layers": bool(self.figures) or seed == 0,  # one seed's layers are enough for pictures
            "record.checkpoint_every": CHECKPOINT_EVERY,
            **self.settings,
            **cell.settings,
            **chosen.settings,
        }
        return load(cell.recipe or self.recipe, algorithm=chosen.algorithm, settings=settings, seed=seed)

    def twins(self, cell: StudyCell) -> dict[str, str]:
        """Arms that are the same run as one before them in this cell, and that one: it is enough to run it."""
        first: dict[str, str] = {}
        digests = {arm: recipe_hash(self.recipe_of(cell, arm, 0)) for arm in self.arms}
        same = {arm: first.setdefault(digest, arm) for arm, digest in digests.items()}
        return {arm: other for arm, other in same.items() if arm != other}

    def runs(self, cell: StudyCell) -> int:
        """How many runs a cell has, over all seeds."""
        return (len(self.arms) - len(self.twins(cell))) * self.seeds

    def quickened(self) -> Study:
        """The study cut down for a first impression."""
        quick = self.quick
        cells = [cell for cell in self.cells if quick.cells is None or cell.name in quick.cells]
        arms = {name: arm for name, arm in self.arms.items() if quick.arms is None or name in quick.arms}
        cells = [
            cell.model_copy(
                update={
                    "settings": {**cell.settings, "training.rounds": min(quick.rounds, self.rounds(cell))},
                    "reported": {
                        measure: {arm: value for arm, value in values.items() if arm in arms}
                        for measure, values in cell.reported.items()
                    },
                }
            )
            for cell in cells
        ]
        changes = {"name": f"{self.name}-quick", "arms": arms, "seeds": min(quick.seeds, self.seeds)}
        claims = [claim for claim in self.claims if {claim.arm, *claim.than, claim.over or claim.arm} <= set(arms)]
        return self.model_copy(update={**changes, "claims": claims}).in_cells(cells)

    def in_cells(self, cells: list[StudyCell]) -> Study:
        """The study in these cells alone, with the claims that speak of any of them."""
        names, claims = [cell.name for cell in cells], []
        for claim in self.claims:
            if claim.than_cells:
                kept = {cell: other for cell, other in claim.than_cells.items() if {cell, other} <= set(names)}
                claims += [claim.model_copy(update={"than_cells": kept})] if kept else []
            elif chosen := [name for name in claim.cells or names if name in names]:
                claims.append(claim.model_copy(update={"cells": chosen}))
        return self.model_copy(update={"cells": cells, "claims": claims})

    def rounds(self, cell: StudyCell) -> int:
        """How many rounds a run of a cell has."""
        return self.recipe_of(cell, next(iter(self.arms)), 0).training.rounds

    def seconds(self, cores: int) -> float:
        """About how long the whole study takes, at most (a run may stop at its target)."""
        costs = {cell.name: cell.seconds_per_round or self.seconds_per_round for cell in self.cells}
        return sum(self.rounds(cell) * costs[cell.name] * self.runs(cell) for cell in self.cells) / cores

    def expected_time(self, cores: int) -> str:
        """The same in words."""
        seconds = self.seconds(cores)
        if seconds < 5400:
            text = f"{max(1, round(seconds / 60))} min"
        else:
            text = f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"
        return f"{'at most' if self.stops_early() else 'about'} {text}"

    def stops_early(self) -> bool:
        """Whether runs end when they reach the target."""
        return any(self.recipe_of(cell, arm, 0).evaluation.stop_at_target for cell in self.cells for arm in self.arms)


@dataclass(frozen=True)
class StudyRun:
    """One arm in one cell with one seed."""

    cell: str
    arm: str
    job: Job

    @property
    def seed(self) -> int:
        """Its seed."""
        return self.job.seed

    @property
    def place(self) -> tuple[str, str, int]:
        """Where its results are: cell, arm and seed."""
        return self.cell, self.arm, self.seed


def plan(study: Study, seeds: Iterable[int], out: Path) -> list[StudyRun]:
    """All runs of a study, first seed first, so that every cell has something early."""
    twins = {cell.name: study.twins(cell) for cell in study.cells}
    return [
        StudyRun(
            cell.name,
            arm,
            Job(arm, seed, study.recipe_of(cell, arm, seed), out / cell.name / arm / f"seed-{seed}"),
        )
        for seed in seeds
        for cell in study.cells
        for arm in study.arms
        if arm not in twins[cell.name]
    ]


def recipe_hash(recipe: Recipe) -> str:
    """What a stored result belongs to: a digest of the settings that are no defaults, so that new ones may be added."""
    text = json.dumps(recipe.essence(defaults=False), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def studies() -> list[str]:
    """The names of ours."""
    return list(STUDIES.names())


def load_study(name: str | Path) -> Study:
    """A study by the name of one of ours, or from a file."""
    return Study.parse(STUDIES.read(name))
