"""Runs that are looked at together. Those that differ in nothing but the seed are one arm: one colour, one name."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from fedstrata.core.errors import FedstrataError, RunDirectoryError
from fedstrata.recipes.schema import Recipe
from fedstrata.runs.comparison import begun_runs
from fedstrata.runs.formats import LayerRecord, Line
from fedstrata.runs.reader import Run

_MOST_TOLD = 2  # settings in the name of an arm


@dataclass(frozen=True)
class Source:
    """A run that was read once, and what its arm is called if it stands alone."""

    run: Run
    name: str
    history: list[Line] = field(repr=False)
    required: bool = False
    """Whether it was asked for by the name of its directory: then it must be whole."""
    _records: dict[int, LayerRecord] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, run: Run, name: str | None = None, required: bool = False) -> Source:
        """Read a run; its name is that of its algorithm if there is no other."""
        return cls(run, name or run.recipe.label, run.history(), required)

    def gone_on(self, run: Run, history: list[Line]) -> Source:
        """The same run some rounds later; the records that were read are kept."""
        return Source(run, self.name, history, self.required, self._records)

    @cached_property
    def finished(self) -> bool:
        """Whether nothing is left to run."""
        return self.run.finished(self.history)

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """The run in a few numbers."""
        return self.run.summary(self.history)

    @property
    def seed(self) -> int:
        """What tells it from the other runs of its arm."""
        return self.run.recipe.seed

    @property
    def layers(self) -> list[str]:
        """Their names, from the input on."""
        return self.run.layer_names

    @property
    def recorded(self) -> bool:
        """Whether there is a record of every client and layer."""
        return self.run.recipe.record.layers and bool(self.history)

    def record(self, round: int) -> LayerRecord:
        """What a round was for each client and layer; read once."""
        if round not in self._records:
            self._records[round] = self.run.layers(round)
        return self._records[round]


@dataclass(frozen=True)
class Arm:
    """The runs of one experiment, a seed each."""

    name: str
    sources: tuple[Source, ...]

    @property
    def first(self) -> Source:
        """Any of them: they share all but the seed."""
        return self.sources[0]


def arms_of(sources: Sequence[Source]) -> list[Arm]:
    """The arms, with names that tell them apart."""
    groups = _group(sources)
    return [Arm(name, tuple(group)) for name, group in zip(_names(groups), groups, strict=True)]


def find(path: Path, problems: list[str] | None = None) -> Iterator[Source]:
    """The runs of a directory: itself, a comparison's, or all that it holds, such as those of a study.

    A run that was asked for by its own name must be whole; of others, what is wrong goes to `problems`.
    """
    if (path / "compare.json").exists():
        begun: list[tuple[Path, str | None]] = [(at, algorithm) for algorithm, _, at in begun_runs(path)]
        if not begun:
            raise RunDirectoryError(f"{path}: no run of this comparison has begun yet")
    elif (path / "run.json").exists() or not (inside := sorted(path.rglob("run.json"), key=_number_by_number)):
        yield Source.of(Run(path), required=True)
        return
    else:
        begun = [(found.parent, None) for found in inside]
    for at, name in begun:
        try:
            source = Source.of(Run(at), name)
        except (FedstrataError, OSError) as error:
            if problems is None:
                raise
            problems.append(str(error))
        else:
            yield source


def _number_by_number(path: Path) -> list[tuple[int, str]]:
    """What sorts seed-10 behind seed-9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path.parent))]


def _group(sources: Sequence[Source]) -> list[list[Source]]:
    """Runs of one experiment with different seeds; the same seed a second time begins another arm."""
    groups: dict[tuple[str, str, int], list[Source]] = {}
    seen: Counter[tuple[str, str, int]] = Counter()
    for source in sources:
        model = f"{source.run.about.clients} {source.run.about.layers}"
        key = (json.dumps(source.run.recipe.essence()), model)
        again = seen[*key, source.seed]
        seen[*key, source.seed] += 1
        groups.setdefault((*key, again), []).append(source)
    return list(groups.values())


def _names(groups: Sequence[Sequence[Source]]) -> list[str]:
    """The algorithm, on its recipe if there are several; if not enough, with settings that differ, or the directory."""
    runs = [group[0].run for group in groups]
    tables = [flat(run.recipe.essence()) for run in runs]
    several = len({run.recipe.name for run in runs}) > 1
    names = [f"{g[0].name} on {r.recipe.name}" if several else g[0].name for g, r in zip(groups, runs, strict=True)]
    for name in [name for name, count in Counter(names).items() if count > 1]:
        same = [at for at, other in enumerate(names) if other == name]
        keys = dict.fromkeys(key for at in same for key in tables[at])
        told_apart = [key for key in keys if len({tables[at].get(key) for at in same}) > 1]
        for at, place in zip(same, _where_they_differ([runs[at].path for at in same]), strict=True):
            if len(told_apart) <= _MOST_TOLD:
                names[at] = ", ".join([name, *(f"{key} = {tables[at].get(key, '–')}" for key in told_apart)])
            else:
                names[at] = f"{name} in {place}"
    taken: Counter[str] = Counter()
    for at, name in enumerate(names):
        taken[name] += 1
        names[at] = f"{name} ({taken[name]})" if taken[name] > 1 else name
    return names


def _where_they_differ(paths: Sequence[Path]) -> list[str]:
    """The parts of paths between what all begin and what all end with: of a/fedavg/0 and a/fedldf/0 the middle."""
    parts = [path.resolve().parts for path in paths]

    def common(rows: Iterable[tuple[str, ...]]) -> int:
        return len(list(takewhile(lambda row: len(set(row)) == 1, rows)))

    first, last = common(zip(*parts, strict=False)), common(zip(*map(reversed, parts), strict=False))
    return ["/".join(of[first : len(of) - last]) or of[-1] for of in parts]


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A table of tables with dotted keys."""
    found: dict[str, str] = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: str(value)}
    return found


def settings_of(recipe: Recipe) -> dict[str, str]:
    """The recipe as dotted keys, without what changes from seed to seed or changes nothing."""
    table = flat(recipe.to_table())
    return {key: value for key, value in table.items() if key not in ("seed", "format", "engine.workers")}
