"""Stored results: what is kept, what belongs to a study as it is, and what another study lends."""

from __future__ import annotations

import json
import math
import multiprocessing as mp
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

import fedstrata
from fedstrata.recipes.schema import load
from fedstrata.runs import environment
from fedstrata.runs.reader import Run
from fedstrata.runs.runner import create_run, run_rounds
from fedstrata.runs.writer import last_state
from reproductions.jobs import run_all
from reproductions.report import measured_tables
from reproductions.results import Results, machine, same_machine, series_of, store
from reproductions.study import Study, load_study, plan
from tests.support.small_study import SMALL, run_study, small

INF = math.inf


def test_a_study_runs_is_stored_and_gone_on_with(tmp_path: Path) -> None:
    study = Study.parse(SMALL)
    events = run_study(study, tmp_path / "out", [0])
    assert sum(event.kind == "round" for event in events) == 2 * 2 * 3
    assert sum(event.kind == "finished" for event in events) == 4
    runs = plan(study, [0], tmp_path / "out")
    for cell in ("a", "b"):
        store(study, cell, runs, tmp_path / "results", {})
    results = Results.stored(study, tmp_path / "results")
    assert results.all_seeds() == [1, 1, 1, 1]
    for run in runs:
        stored = results.runs[run.cell][run.arm][0]
        history = Run(run.job.path).history()
        assert stored["upload"] == [line["upload"] for line in history]
        assert stored["test.accuracy"] == [line["metrics"]["test"]["accuracy"] for line in history]
    # Another seed is added to what is stored, also from elsewhere; what is finished is not run again.
    assert run_study(study, tmp_path / "out", [0]) == []
    run_study(study, tmp_path / "elsewhere", [1])
    store(study, "a", plan(study, [1], tmp_path / "elsewhere"), tmp_path / "results", {})
    again = Results.stored(study, tmp_path / "results")
    assert again.seeds("a", "fedavg", "fedldf") == [0, 1]
    assert again.runs["a"]["fedavg"][0] == results.runs["a"]["fedavg"][0]
    # A result of another recipe is not shown, and does not survive.
    other = Study.parse(small(settings={**SMALL["settings"], "training.lr": 0.07}))
    stale = Results.stored(other, tmp_path / "results")
    assert stale.all_seeds() == [0, 0, 1, 1]  # cell b has its own learning rate
    assert len(stale.notes) == 2


def test_a_run_that_cannot_go_on_is_kept_as_far_as_it_got(tmp_path: Path) -> None:
    study = Study.parse(small(settings={**SMALL["settings"], "training.lr": 1e30, "training.attempts": 1}))
    study = study.model_copy(update={"cells": study.cells[:1]})
    runs = plan(study, [0], tmp_path / "out")
    failed = {event.run.job.path: event.problem for event in run_all(runs, cores=2) if event.kind == "failed"}
    assert len(failed) == 2
    store(study, "a", runs, tmp_path / "results", failed)
    content = json.loads((tmp_path / "results" / "small" / "a.json").read_text())
    assert content["arms"]["fedavg"]["runs"]["0"]["failed"]
    found = Results.stored(study, tmp_path / "results")
    assert "stopped" in found.notes[0]
    assert found.values("final", "a", "fedavg", [0]) == [0.0]
    assert found.values("rounds", "a", "fedavg", [0]) == [INF]
    assert measured_tables(found)[1].rows == [["fedavg", ">3"], ["fedldf", ">3"]]


def test_a_loss_that_is_no_number_is_the_worst(tmp_path: Path) -> None:
    loss = {"title": "loss", "kind": "final", "series": "test.loss"}
    study = Study.parse(small(measures={"loss": loss}, claims=[], cells=SMALL["cells"][1:], quick={"rounds": 2}))
    runs = plan(study, [0], tmp_path / "out")
    assert all(event.kind != "failed" for event in run_all(runs, cores=2))
    history = runs[0].job.path / "history.jsonl"
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    lines[-1]["metrics"]["test"]["loss"] = None  # what a run writes for it
    history.write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = store(study, "b", runs, tmp_path / "results", {})
    assert json.loads(path.read_text())["arms"]["fedavg"]["runs"]["0"]["series"]["test.loss"][-1] == "inf"
    assert Results.stored(study, tmp_path / "results").values("loss", "b", "fedavg", [0]) == [INF]


def test_a_run_was_made_on_all_machines_that_it_was_on(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = environment.versions()
    monkeypatch.setattr(environment, "versions", lambda: here | {"processor": "A"})
    fedstrata.run(tiny({"training.rounds": 1}), out=tmp_path / "run")
    monkeypatch.setattr(environment, "versions", lambda: here | {"processor": "C"})
    fedstrata.resume(tmp_path / "run", settings={"training.rounds": 2})
    assert machine(Run(tmp_path / "run")) == machine() | {"processor": "A, then C"}


def test_what_decides_the_bits_of_a_machine() -> None:
    here = machine()
    for name in ("torch", "cpu", "processor"):
        assert not same_machine(here, here | {name: "another"})
    assert same_machine(here, here | {"fedstrata": "another"})


def test_arms_from_different_processors_are_pointed_out(tmp_path: Path) -> None:
    """Seed by seed, as they are compared; another version of ours alone makes no other digits."""
    study = Study.parse(small(cells=SMALL["cells"][:1], quick={"rounds": 1}))
    runs = plan(study, [0, 1], tmp_path / "out")
    assert all(event.kind != "failed" for event in run_all(runs, cores=2))
    path = store(study, "a", runs, tmp_path / "results", {})
    content = json.loads(path.read_text())
    content["arms"]["fedavg"]["runs"]["0"]["made"]["fedstrata"] = "0.0.1"
    path.write_text(json.dumps(content))
    assert Results.stored(study, tmp_path / "results").notes == []
    content["arms"]["fedavg"]["runs"]["1"]["made"]["cpu"] = "another"
    path.write_text(json.dumps(content))
    (note,) = Results.stored(study, tmp_path / "results").notes
    assert note.startswith("a, seed 1: arms were run on different processors")


def test_results_of_another_default_are_left_out(tmp_path: Path) -> None:
    """The hash has no defaults in it, so that new settings can be added; the settings beside it have them all."""
    study = Study.parse(small(cells=SMALL["cells"][:1]))
    runs = plan(study, [0], tmp_path / "out")
    assert all(event.kind != "failed" for event in run_all(runs, cores=2))
    path = store(study, "a", runs, tmp_path / "results", {})
    content = json.loads(path.read_text())
    settings = content["arms"]["fedavg"]["settings"]
    assert settings["training"].pop("weight_decay") == 0.0  # a setting that did not exist then is no difference
    path.write_text(json.dumps(content))
    assert Results.stored(study, tmp_path / "results").notes == []
    settings["training"]["weight_decay"] = 0.1
    path.write_text(json.dumps(content))
    found = Results.stored(study, tmp_path / "results")
    assert found.notes == ["a, fedavg: stored under another recipe, left out"]
    assert list(found.runs["a"]) == ["fedldf"]


def test_jobs_that_store_other_seeds_of_a_study_lose_nothing(tmp_path: Path) -> None:
    """Two processes store the same cell at once, again and again, each its own seed in the midst of the other's."""
    study = Study.parse(small(cells=SMALL["cells"][:1]))
    for seed in (0, 1):
        run_study(study, tmp_path / str(seed), [seed])

    def store_one(seed: int) -> None:
        runs = plan(study, [seed], tmp_path / str(seed))
        for _ in range(20):
            store(study, "a", runs, tmp_path / "results", {})

    for _ in range(3):
        shutil.rmtree(tmp_path / "results", ignore_errors=True)
        jobs = [mp.get_context("fork").Process(target=store_one, args=(seed,)) for seed in (0, 1)]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
        assert [job.exitcode for job in jobs] == [0, 0]
        assert Results.stored(study, tmp_path / "results").seeds("a", "fedavg", "fedldf") == [0, 1]
        assert sorted(path.name for path in (tmp_path / "results" / "small").iterdir()) == ["a.json"]


def test_what_an_arm_had_before_it_was_renamed_is_kept_and_said(tmp_path: Path) -> None:
    before = Study.parse(small(cells=SMALL["cells"][:1]))
    runs = plan(before, [0], tmp_path / "out")
    assert all(event.kind != "failed" for event in run_all(runs, cores=2))
    path = store(before, "a", runs, tmp_path / "results", {})
    entry = json.loads(path.read_text())["arms"]["fedldf"]
    after = before.model_copy(update={"arms": {"fedavg": before.arms["fedavg"], "ldf": before.arms["fedldf"]}})
    found = Results.stored(after, tmp_path / "results")
    assert found.notes == ["a, fedldf: stored, but no arm of the study, left out"]
    assert list(found.runs["a"]) == ["fedavg"]
    store(after, "a", plan(after, [0], tmp_path / "out"), tmp_path / "results", {})
    assert json.loads(path.read_text())["arms"]["fedldf"] == entry


def test_a_finished_run_that_contradicts_what_is_stored_is_refused(reproduce: Any, tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text(tomli_w.dumps(small(cells=SMALL["cells"][:1])), encoding="utf-8")
    command = ["run", file, "--seeds", "0", "--runs", tmp_path / "out", "--results", tmp_path / "results"]
    assert reproduce(*command).code == 0
    assert reproduce(*command).code == 0  # it agrees with itself
    path = tmp_path / "results" / "small" / "a.json"
    content = json.loads(path.read_text())
    content["arms"]["fedavg"]["runs"]["0"]["weights_sha256"] = "0" * 64
    path.write_text(json.dumps(content))
    refused = reproduce(*command)
    assert refused.code == 2
    assert "ended with other weights than" in refused.err
    assert "of fedavg, seed 0" in refused.err
    assert json.loads(path.read_text()) == content  # nothing was overwritten


def test_arms_that_are_the_same_run_are_run_once(tmp_path: Path) -> None:
    """Without stragglers there is nothing to keep or drop; with them there is."""
    drop = {"algorithm": "fedavg", "settings": {"training.keep_stragglers": False}}
    some = {"name": "b", "title": "half are slow", "settings": {"training.stragglers": 0.5}}
    arms = {"fedavg": "fedavg", "drop": drop}
    study = Study.parse(small(arms=arms, cells=[{"name": "a", "title": "nobody is slow"}, some], claims=[]))
    assert [study.twins(cell) for cell in study.cells] == [{"drop": "fedavg"}, {}]
    runs = plan(study, [0], tmp_path / "out")
    assert [(run.cell, run.arm) for run in runs] == [("a", "fedavg"), ("b", "fedavg"), ("b", "drop")]
    assert study.seconds(cores=1) == 3 * study.seeds * 3 * 0.5
    run_study(study, tmp_path / "out", [0])
    for cell in ("a", "b"):
        store(study, cell, runs, tmp_path / "results", {})
    found = Results.stored(study, tmp_path / "results")
    assert found.all_seeds() == [1, 1, 1, 1]
    assert found.runs["a"]["drop"] == found.runs["a"]["fedavg"]
    assert found.runs["b"]["drop"] != found.runs["b"]["fedavg"]
    assert found.notes == ["a, drop: the same runs as fedavg"]


def test_a_run_that_another_study_has_stored_is_taken_from_there(reproduce: Any, tmp_path: Path) -> None:
    files = []
    for name, cells in (("small", SMALL["cells"]), ("other", SMALL["cells"][:1])):
        files.append(tmp_path / f"{name}.toml")
        files[-1].write_text(tomli_w.dumps(small(name=name, cells=cells)), encoding="utf-8")
    places = ("--results", str(tmp_path / "results"))
    reproduce("run", str(files[0]), "--seeds", "0", "--runs", str(tmp_path / "one"), *places)
    answer = reproduce("run", str(files[1]), "--seeds", "0,1", "--runs", str(tmp_path / "two"), *places)
    assert "2 runs are stored by small" in answer.out
    assert not (tmp_path / "two" / "a" / "fedavg" / "seed-0").exists()
    assert "a, fedavg: runs of small, which are the same" in answer.out
    arms = json.loads((tmp_path / "results" / "other" / "a.json").read_text())["arms"]
    assert list(arms["fedavg"]["runs"]) == ["1"]  # nothing is stored twice
    one, two = (Results.stored(load_study(file), tmp_path / "results") for file in files)
    assert two.runs["a"]["fedavg"][0] == one.runs["a"]["fedavg"][0]
    assert one.seeds("a", "fedavg", "fedldf") == two.seeds("a", "fedavg", "fedldf") == [0, 1]  # either lends


def test_divergence_and_angles_are_those_of_the_updates(tmp_path: Path) -> None:
    """Figure 7's divergence from the record's norms and angles, against the updates themselves.

    One round of full-batch SGD with one client alone gives that client's update; from the record must come the same
    mean of ‖Δ_k − Σ p Δ‖ / η.
    """
    study = Study.parse(small(figures=["gradient_divergence", "angles"]))
    settings = {"task.partition": {"name": "iid", "clients": 3, "samples": 12}, "training.rounds": 1}
    settings |= {"training.batch_size": 12, "record.layers": True}
    table = load(study.recipe_of(study.cells[0], "fedavg", 0).to_table(), settings=settings)
    run, experiment = create_run(table, tmp_path / "run")
    start = experiment.first_state().model.double().numpy()
    list(run_rounds(run, experiment))
    updates = []
    for client in range(3):
        alone = fedstrata.Task(
            model=experiment.task.model,
            clients=[experiment.task.clients[client]],
            evaluation=experiment.task.evaluation,
        )
        solo = fedstrata.run(table.to_table() | {"task": {}}, task=alone, out=tmp_path / f"solo-{client}")
        updates.append(last_state(solo.directory).model.double().numpy() - start)
    deltas = np.stack(updates)
    mean = deltas.mean(0)
    expected = np.linalg.norm(deltas - mean, axis=1).mean() / table.training.lr
    series = series_of(run, ["gradient_divergence", "angles"])
    assert series["gradient_divergence"] == [pytest.approx(expected, rel=1e-4)]
    cosine = deltas[1] @ mean / np.linalg.norm(deltas[1]) / np.linalg.norm(mean)
    assert series["angle.1"] == [pytest.approx(math.acos(cosine), rel=1e-4)]
