"""Studies as files: what they may say, and how settings are laid over each other."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedstrata.core.errors import RecipeError
from fedstrata.recipes.schema import load
from reproductions.study import Study, load_study, recipe_hash, studies
from tests.support.small_study import SMALL, small


@pytest.mark.parametrize("name", studies())
def test_every_study_of_ours_is_whole(name: str) -> None:
    study = load_study(name)  # parses every cell's recipe
    assert study.name == name
    assert study.seeds >= 2
    quick = study.quickened()
    assert quick.cells
    assert quick.arms
    assert quick.seconds(2) < study.seconds(2)
    assert (study.reduced != "") == name.endswith("-reduced")
    for claim in study.claims:
        assert claim.paper


def test_the_tables_of_the_papers_are_all_there() -> None:
    """FedAdp's table I has 12 cells × 2 algorithms, FedLayerWise's 2 × 3."""
    fedadp = [load_study(f"fedadp-table1-{data}") for data in ("mnist", "fashion")]
    values = [v for study in fedadp for cell in study.cells for v in cell.reported["rounds"].values()]
    assert len(values) == 24
    assert sum(math.isinf(v) for v in values) == 3  # N/A three times
    assert sum(v for v in values if not math.isinf(v)) == 133 + 99 + 120 + 104 + 81 + 187 + 61 + 58 + 75 + 59 + 52 + (
        222 + 167 + 258 + 196 + 134 + 125 + 107 + 207 + 107 + 94
    )
    layerwise = load_study("fedlayerwise-table1")
    assert [sorted(cell.reported["rounds"].values()) for cell in layerwise.cells] == [[11, 12, 12], [12, 21, 25]]
    for data in ("mnist", "fashion", "cifar10", "cifar10-reduced"):
        stragglers = [
            (study := load_study(f"fedlap-{data}")).recipe_of(cell, "fedlap", 0).training.stragglers
            for cell in load_study(f"fedlap-{data}").cells
        ]
        assert stragglers == [0.0, 0.5, 0.9]
        assert study.recipe_of(study.cells[0], "fedlap", 0).training.epochs == 10


def test_settings_are_laid_over_each_other_in_order() -> None:
    table = small(arms={"fedavg": "fedavg", "slow": {"algorithm": "fedavg", "settings": {"training.lr": 0.01}}})
    table["claims"] = []
    study = Study.parse(table)
    rates = {(c.name, arm): study.recipe_of(c, arm, 0).training.lr for c in study.cells for arm in study.arms}
    assert rates == {("a", "fedavg"): 0.05, ("a", "slow"): 0.01, ("b", "fedavg"): 0.2, ("b", "slow"): 0.01}
    assert study.recipe_of(study.cells[0], "slow", 7).seed == 7
    # 2 cells × 2 arms × 2 seeds × 3 rounds × 0.5 s on 2 cores
    assert study.seconds(2) == 6.0
    quick = study.quickened()
    assert ([c.name for c in quick.cells], quick.seeds, quick.rounds(quick.cells[0])) == (["a"], 1, 2)
    assert quick.name == "small-quick"


def test_an_unknown_key_is_named_before_the_missing_one_that_it_stands_for() -> None:
    table = small(sedes=2)
    del table["seeds"]
    with pytest.raises(RecipeError, match=r"^sedes = 2: unknown key; did you mean seeds\?"):
        Study.parse(table)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"seeds": 0}, "seeds = 0"),
        ({"sed": 1}, "did you mean seeds"),
        ({"recipe": "quickstar"}, "did you mean quickstart"),
        ({"settings": {"training.ronds": 3}}, "training.ronds"),
        ({"cells": [*SMALL["cells"], SMALL["cells"][0]]}, "two have the same name"),
        ({"claims": [{**SMALL["claims"][0], "arm": "fedadp"}]}, "fedadp"),
        ({"claims": [{**SMALL["claims"][0], "value": 1.0}]}, "one of than, value and than_cells"),
        ({"claims": [{**SMALL["claims"][0], "over": "fedavg"}]}, "over"),
        (
            {
                "claims": [
                    {
                        **{k: v for k, v in SMALL["claims"][0].items() if k != "than"},
                        "over": "fedavg",
                        "than_cells": {"a": "c"},
                    }
                ]
            },
            "is none of a, b",
        ),
        ({"claims": [{**SMALL["claims"][0], "relation": "similar"}]}, "margin"),
        ({"claims": [{**SMALL["claims"][0], "together": True}]}, "together = True: needs two or more"),
        (
            {
                "claims": [
                    {
                        **SMALL["claims"][0],
                        "than": ["fedavg", "fedldf"],
                        "together": True,
                        "relation": "similar",
                        "margin": 0.1,
                    }
                ]
            },
            "similar has no best",
        ),
        ({"claims": [{**SMALL["claims"][0], "measure": "lowest"}]}, "lowest"),
        ({"claims": [{**SMALL["claims"][0], "than": ["nobody"]}]}, "claims.than = 'nobody'"),
        ({"measures": {**SMALL["measures"], "x": {"title": "x", "kind": "at"}}}, "round"),
        ({"quick": {"rounds": 2, "cells": ["c"]}}, "quick.cells"),
    ],
    ids=str,
)
def test_mistakes_in_a_study_are_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        Study.parse(small(**changes))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"series": "train.accuracy"}, r"measures\.final\.series = 'train\.accuracy': is not recorded"),
        ({"kind": "at", "round": 9}, r"measures\.final\.round = 9: a run has 3 rounds"),
        ({"kind": "rounds_to", "target": 60.0}, r"measures\.final\.target = 60\.0: .*did you mean 0\.6"),
    ],
    ids=str,
)
def test_what_a_run_will_not_record_is_said_before_it_runs(change: dict[str, Any], problem: str) -> None:
    final = {**SMALL["measures"]["final"], **change}
    with pytest.raises(RecipeError, match=problem):
        Study.parse(small(measures={**SMALL["measures"], "final": final}))


def test_a_study_that_does_not_exist() -> None:
    with pytest.raises(RecipeError, match="did you mean adaptive-mu"):
        load_study("adaptiv-mu")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_study("nowhere.toml")


def test_the_hash_is_that_of_the_result() -> None:
    study = Study.parse(SMALL)
    recipe = study.recipe_of(study.cells[0], "fedavg", 0)

    def changed(**settings: Any) -> str:
        return recipe_hash(load(recipe.to_table(), settings={k.replace("__", "."): v for k, v in settings.items()}))

    known = recipe_hash(recipe)
    assert known == changed(seed=3) == changed(engine__workers=1) == changed(name="other")
    assert known == changed(record__layers=True) == changed(training__weight_decay=0.0)  # its default
    assert len({known, changed(training__lr=0.06), changed(training__rounds=4), changed(task__inputs="unit")}) == 4
    assert recipe.essence()["training"]["weight_decay"] == 0.0  # stored in full
    assert "seed" not in recipe.essence()
