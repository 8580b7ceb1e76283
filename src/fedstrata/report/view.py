"""The view of runs, the same for the live page and for the one-file report: parts, each by its name.

A part is a picture (its chart and the name of its table), a table of pictures, or a table of words. The report has all
of them in its file, the live page asks for those that somebody looks at. `sections` says which parts are where.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedstrata._version import __version__
from fedstrata.core.errors import FedstrataError, RunDirectoryError
from fedstrata.plots import definitions, tables
from fedstrata.plots.arms import Source, arms_of, find
from fedstrata.plots.quantities import LAYERED, OF_CLIENTS, Quantity
from fedstrata.plots.style import DAY, NIGHT
from fedstrata.plots.tables import Cells, Scale, Table
from fedstrata.report import words
from fedstrata.report.packing import packed, packed_cells
from fedstrata.report.sections import sections

BUDGET = 1_300_000
"""Characters for the numbers of every client and layer in a report."""

PART_BUDGET = 8_000_000
"""Characters of one part that is fetched when somebody looks at it: of one run and quantity."""

MOST_CELLS = 20_000
"""Cells that one picture has."""

_CHARACTERS = 4  # of a packed number

Part = dict[str, Any]
T = TypeVar("T")


class View:
    """Runs that are looked at together, and what is shown of them."""

    def __init__(self, sources: Sequence[Source], left_out: Sequence[str] = (), budget: int | None = BUDGET) -> None:
        """A `budget` for all numbers of clients and layers; None where each part is fetched when it is looked at."""
        self.sources, self.left_out = list(sources), list(left_out)
        self.arms = arms_of(self.sources)
        self.runs = [source for arm in self.arms for source in arm.sources]
        self.summarised, self.every = self._detail(budget)
        self._made: dict[str, Any] = {}

    @classmethod
    def of(cls, paths: Sequence[Path], budget: int = BUDGET) -> View:
        """The runs in these directories, each once, of which every file is whole."""
        problems: list[str] = []
        found = {source.run.path.resolve(): source for path in paths for source in find(path, problems)}
        whole = [source for source in found.values() if _is_whole(source, problems)]
        if not whole:
            raise RunDirectoryError(problems[0])
        return cls(whole, problems, budget)

    def _detail(self, budget: int | None) -> tuple[bool, int]:
        """Whether clients are summarised, and every how many rounds are shown: everything, if it fits."""
        price = _CHARACTERS * len(LAYERED)
        sizes = [(source, sum(line["clients"] for line in source.history)) for source in self.runs if source.recorded]
        one_by_one = sum(price * len(source.layers) * clients for source, clients in sizes)
        summarised = sum(price * len(source.layers) * len(tables.SUMMARY) * len(source.history) for source, _ in sizes)
        tall = max((max(len(s.layers), s.history[-1]["clients"]) * len(s.history) for s, _ in sizes), default=0)
        every = max(1, math.ceil(tall / MOST_CELLS))
        if budget is None:
            largest = max((_CHARACTERS * len(source.layers) * clients for source, clients in sizes), default=0)
            return False, max(every, math.ceil(largest / PART_BUDGET))
        if one_by_one / every <= budget:
            return False, every
        return True, max(every, math.ceil(summarised / budget))

    # --- what there is ------------------------------------------------------------------------------------------

    @cached_property
    def seeds(self) -> list[int]:
        """All of them."""
        return sorted({source.seed for source in self.runs})

    @cached_property
    def labels(self) -> list[str]:
        """What was measured over rounds."""
        return tables.labels(self.arms)

    @cached_property
    def quantities(self) -> list[str]:
        """What was recorded of clients and layers."""
        return [name for name, one in LAYERED.items() if any(tables.has(source, one) for source in self.runs)]

    def rounds(self, source: Source) -> list[int]:
        """Those that are shown."""
        return tables.shown_rounds(len(source.history), max(1, math.ceil(len(source.history) / self.every)))

    def names(self) -> Iterator[str]:
        """Every part there is."""
        yield from ("outcome", "settings", "shared", "directories", "notices")
        for at in range(len(self.labels)):
            yield f"measured/{at}"
            yield from (f"curves/{at}/{x}/{y}" for x in ("round", "upload", "time") for y in ("ends", "all"))
            if len(self.arms) > 1:
                yield from (f"differing/{at}", f"differences/{at}")
        for at, source in enumerate(self.runs):
            yield from (f"findings/{at}", f"people/{at}", f"partition/{at}", f"replies/{at}", f"numbers/{at}")
            if source.history:
                for way in ("up", "down"):
                    yield from (f"sent/{at}/{way}", f"bytes/{at}/{way}", f"bytes-so-far/{at}/{way}")
            if not source.recorded:
                continue
            for name in self.quantities:
                for kind in (
                    "over",
                    "layers",
                    "layer-lines",
                    "column",
                    "model",
                    "cells",
                    "cell",
                    "cell-lines",
                    "round",
                ):
                    yield f"{kind}/{at}/{name}"
            for name in OF_CLIENTS:
                yield from (f"{kind}/{at}/{name}" for kind in ("person", "clients", "client-lines"))
            yield from (f"outcomes/{at}", f"participation/{at}")
            if source.run.probes():
                yield from (f"probed/{at}", f"harm/{at}", f"probe/{at}")

    def part(self, name: str) -> Part:
        """One of them, as the page takes it."""
        kind, *rest = name.split("/")
        make = getattr(self, f"_part_{kind.replace('-', '_')}", None)
        if make is None or not all(one.replace("_", "").isalnum() for one in rest):
            raise KeyError(name)
        try:
            with np.errstate(all="ignore"):  # whatever a file may hold
                found: Part = make(*rest)
        except (TypeError, ValueError, IndexError) as error:
            raise KeyError(name) from error
        return found

    # --- words --------------------------------------------------------------------------------------------------

    def _part_outcome(self) -> Part:
        return words.outcome(self.arms)

    def _part_settings(self) -> Part:
        return words.settings(self.arms, shared=False)

    def _part_shared(self) -> Part:
        return words.settings(self.arms, shared=True)

    def _part_directories(self) -> Part:
        return words.directories(self.arms)

    def _part_notices(self) -> Part:
        return {"lines": words.notices(self.arms, self.left_out, self.summarised, self.every)}

    def _part_findings(self, run: str) -> Part:
        return {"findings": words.findings(self.runs[int(run)])}

    def _part_people(self, run: str) -> Part:
        source = self.runs[int(run)]
        return words.people(
            source, [line["round"] for line in source.history] if self.every == 1 else self.rounds(source)
        )

    def _part_partition(self, run: str) -> Part:
        return words.partition(self.runs[int(run)])

    def _part_replies(self, run: str) -> Part:
        return words.replies(self.runs[int(run)])

    def _part_numbers(self, run: str) -> Part:
        return words.layers(self.runs[int(run)], [LAYERED[name] for name in self.quantities])

    # --- curves -------------------------------------------------------------------------------------------------

    def _curves(self, label: str) -> Table:
        return self._once(f"curves {label}", lambda: tables.curves(self.arms, self.labels[int(label)]))

    def _part_measured(self, label: str) -> Part:
        return packed(self._curves(label))

    def _part_curves(self, label: str, against: str, ends: str) -> Part:
        name = self.labels[int(label)]
        measured = (tables.measurements(source) for arm in self.arms for source in arm.sources)
        better = next(found[name].better for found in measured if name in found)
        scale = tables.interesting(self._curves(label), better, whole=ends == "all")
        target = self.arms[0].first.run.recipe.evaluation.target if label == "0" else None
        chart = _drawn("curves", self._arm_names, name, scale, against, target, "container")
        return _picture(chart, f"measured/{label}", scale)

    def _part_differing(self, label: str) -> Part:
        return packed(tables.differences(self.arms, self.labels[int(label)]))

    def _part_differences(self, label: str) -> Part:
        names = self._arm_names
        chart = _drawn("differences", names, self.labels[int(label)], names[0], "container")
        return _picture(chart, f"differing/{label}")

    @property
    def _arm_names(self) -> list[str]:
        return [arm.name for arm in self.arms]

    # --- layers -------------------------------------------------------------------------------------------------

    def _over(self, run: int, quantity: Quantity) -> Table:
        source = self.runs[run]
        return self._once(
            f"over {run} {quantity.name}", lambda: tables.over_clients(source, quantity, self.rounds(source))
        )

    def _cells(self, run: int, quantity: Quantity) -> Cells:
        source = self.runs[run]
        return self._once(
            f"cells {run} {quantity.name}",
            lambda: tables.cells(source, quantity, self.rounds(source), self.summarised),
        )

    def _beside(self, run: int) -> list[int]:
        """The runs with the same seed: what is shown beside a run is on its scale."""
        seed = self.runs[run].seed
        return [at for at, other in enumerate(self.runs) if other.seed == seed and other.recorded]

    def _scale_over(self, run: str, quantity: Quantity) -> Scale:
        runs = self._beside(int(run))
        return tables.extent([self._over(at, quantity).numbers("value") for at in runs], quantity)

    def _scale_of_cells(self, run: str, quantity: Quantity) -> Scale:
        return tables.extent([self._cells(at, quantity).values for at in self._beside(int(run))], quantity)

    def _part_over(self, run: str, quantity: str) -> Part:
        return packed(self._over(int(run), LAYERED[quantity]))

    def _part_layers(self, run: str, quantity: str) -> Part:
        what, count = LAYERED[quantity], len(self.runs[int(run)].layers)
        scale = self._scale_over(run, what)
        chart = _drawn("over_rounds", "layer", count, what, scale, "container")
        return _picture(chart, f"over/{run}/{quantity}", scale)

    def _part_layer_lines(self, run: str, quantity: str) -> Part:
        what = LAYERED[quantity]
        scale = self._scale_over(run, what)
        chart = _drawn("lines_over_rounds", "layer", what, scale, "container")
        return _picture(chart, f"over/{run}/{quantity}", scale)

    def _part_column(self, run: str, quantity: str) -> Part:
        return packed(tables.model(self.runs[int(run)], LAYERED[quantity]))

    def _part_model(self, run: str, quantity: str) -> Part:
        what, count = LAYERED[quantity], len(self.runs[int(run)].layers)
        beside = [tables.model(self.runs[at], what).numbers("value") for at in self._beside(int(run))]
        scale = tables.extent(beside, what)
        return _picture(_drawn("model", count, what, scale, "container"), f"column/{run}/{quantity}", scale)

    def _part_cells(self, run: str, quantity: str) -> Part:
        return packed_cells(self._cells(int(run), LAYERED[quantity]))

    def _rows(self, run: str) -> int:
        return len(tables.SUMMARY) if self.summarised else self._people(int(run))

    def _people(self, run: int) -> int:
        """How many clients were sampled in the rounds that are shown."""
        source = self.runs[run]
        return len({who for round in self.rounds(source) for who in source.record(round)["clients"].tolist()})

    def _part_cell(self, run: str, quantity: str) -> Part:
        what = LAYERED[quantity]
        scale = self._scale_of_cells(run, what)
        chart = _drawn("over_rounds", "client", self._rows(run), what, scale, "container")
        return _picture(chart, f"cells/{run}/{quantity}", scale)

    def _part_cell_lines(self, run: str, quantity: str) -> Part:
        what = LAYERED[quantity]
        scale = self._scale_of_cells(run, what)
        chart = _drawn("lines_over_rounds", "client", what, scale, "container")
        return _picture(chart, f"cells/{run}/{quantity}", scale)

    def _part_round(self, run: str, quantity: str) -> Part:
        what = LAYERED[quantity]
        scale = self._scale_of_cells(run, what)
        source = self.runs[int(run)]
        rows = len(tables.SUMMARY) if self.summarised else max(line["clients"] for line in source.history)
        return _picture(_drawn("in_a_round", rows, what, scale, "container"), f"cells/{run}/{quantity}", scale)

    # --- clients ------------------------------------------------------------------------------------------------

    def _person(self, run: str, quantity: str) -> Table:
        source = self.runs[int(run)]
        return self._once(
            f"person {run} {quantity}",
            lambda: tables.clients(source, OF_CLIENTS[quantity], self.rounds(source)),
        )

    def _part_person(self, run: str, quantity: str) -> Part:
        return packed(self._person(run, quantity))

    def _scale_of_clients(self, run: str, quantity: str) -> Scale:
        return tables.extent([self._person(run, quantity).numbers("value")], OF_CLIENTS[quantity])

    def _part_clients(self, run: str, quantity: str) -> Part:
        scale = self._scale_of_clients(run, quantity)
        what, rows = OF_CLIENTS[quantity], self._people(int(run))
        chart = _drawn("over_rounds", "client", rows, what, scale, "container")
        return _picture(chart, f"person/{run}/{quantity}", scale)

    def _part_client_lines(self, run: str, quantity: str) -> Part:
        scale = self._scale_of_clients(run, quantity)
        chart = _drawn("lines_over_rounds", "client", OF_CLIENTS[quantity], scale, "container")
        return _picture(chart, f"person/{run}/{quantity}", scale)

    def _part_outcomes(self, run: str) -> Part:
        source = self.runs[int(run)]
        return packed(tables.participation(source, self.rounds(source)))

    def _part_participation(self, run: str) -> Part:
        return _picture(_drawn("participation", self._people(int(run)), "container"), f"outcomes/{run}")

    # --- who harms ----------------------------------------------------------------------------------------------

    def _part_probed(self, run: str) -> Part:
        source = self.runs[int(run)]
        last = source.run.probes()[-1:]
        return {"findings": [{"kind": "probe", "text": text} for r in last for text in source.run.probe(r).sentences()]}

    def _harm(self, run: str) -> Table:
        source = self.runs[int(run)]
        return tables.probe(source, source.run.probes()[-1])

    def _part_harm(self, run: str) -> Part:
        return packed(self._harm(run))

    def _part_probe(self, run: str) -> Part:
        table = self._harm(run)
        scale = tables.around_nothing(table.numbers("value"))
        rows = len(set(table.columns["client"]))
        return _picture(_drawn("probe", rows, scale, "container"), f"harm/{run}", scale)

    # --- bytes --------------------------------------------------------------------------------------------------

    def _part_sent(self, run: str, way: str) -> Part:
        source = self.runs[int(run)]
        return packed(tables.traffic(source, way, tables.shown_rounds(len(source.history))))

    def _part_bytes(self, run: str, way: str) -> Part:
        return _picture(_drawn("traffic", width="container"), f"sent/{run}/{way}")

    def _part_bytes_so_far(self, run: str, way: str) -> Part:
        return _picture(_drawn("traffic", so_far=True, width="container"), f"sent/{run}/{way}")

    # --- once -----------------------------------------------------------------------------------------------------

    def _once(self, key: str, make: Callable[[], T]) -> T:
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    # --- the whole page -----------------------------------------------------------------------------------------

    def outline(self) -> dict[str, Any]:
        """All but the parts: what is where, and what can be chosen."""
        several = len(self.arms) > 1
        recipes = ", ".join(dict.fromkeys(source.run.recipe.name for source in self.sources))
        clients = " or ".join(dict.fromkeys(str(source.run.about.clients) for source in self.sources))
        facts = [f"{len(self.arms)} experiments"] if several else []
        facts += [_many(len(self.seeds), "seed"), f"{clients} clients", f"fedstrata {__version__}"]
        at = {id(source): number for number, source in enumerate(self.runs)}
        return {
            "title": recipes if several else f"{recipes}: {self.arms[0].name}",
            "facts": facts,
            "arms": [
                {
                    "name": arm.name,
                    "runs": {str(source.seed): at[id(source)] for source in arm.sources},
                    "layers": arm.first.layers,
                }
                for arm in self.arms
            ],
            "seeds": [str(seed) for seed in self.seeds],
            "rounds": [self.rounds(source) if source.recorded else [] for source in self.runs],
            "sections": sections(self.arms, self.labels, self.quantities, any(one.run.probes() for one in self.runs)),
            "styles": {"day": DAY, "night": NIGHT},
        }


def _is_whole(source: Source, problems: list[str]) -> bool:
    """Whether every record can be read; what is wrong with a run that was asked for by its name is raised."""
    try:
        for line in source.history if source.recorded else ():
            source.run.layers(line["round"])
        _ = source.finished, source.summary
    except (FedstrataError, OSError) as error:
        if source.required:
            raise
        problems.append(str(error))
        return False
    return True


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


_ANY = (0.5, 1.0)  # the ends of a scale in a chart that is drawn by many


def _drawn(kind: str, *options: Any, **more: Any) -> str:
    """A chart for the page, the same for all scales: their ends are parameters, which the page sets."""
    fixed = (Scale(*_ANY, one.logarithmic) if isinstance(one, Scale) else one for one in options)
    plain = (tuple(one) if isinstance(one, list) else one for one in fixed)
    return _text(kind, *plain, **more)


@lru_cache(maxsize=1024)
def _text(kind: str, *options: Any, **more: Any) -> str:
    charts = definitions()
    spec = getattr(charts, kind)(charts.named(), *options, **more).to_dict(validate=False)
    return json.dumps({key: value for key, value in spec.items() if key not in ("config", "$schema", "usermeta")})


def _picture(chart: str, table: str, scale: Scale | None = None) -> Part:
    """A chart of a table; a chart is text until somebody needs it."""
    ends = {} if scale is None else {"low": scale.low, "high": scale.high}
    return {"spec": chart, "table": table, "ends": ends}
