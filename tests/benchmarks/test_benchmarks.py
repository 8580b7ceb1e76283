"""The benchmarks' own arithmetic and page; no peer is needed, and nothing is timed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import growth, measure, page, run
from benchmarks.workloads import QUICK, WORKLOADS, Batches
from fedstrata.recipes.schema import load
from fedstrata.tasks.models import logreg, mlp


def turn(seconds, accuracy=0.8, busy=0.0):
    return {"startup": 3.0, "seconds": [9.0, 9.0, *seconds], "accuracy": accuracy, "busy": busy}


@pytest.fixture
def results():
    like = {"cosine": 0.97, "length": 1.01}
    systems = {
        "fedstrata": {"settings": "as installed", "variant": "", "turns": [turn([1.0, 1.2, 1.1])], "similarity": like},
        "pfl": {"settings": "x", "variant": "1 thread", "turns": [turn([2.0, 2.2, 2.4], 0.81)], "similarity": like},
        "Flower": {"settings": "y", "variant": "", "turns": [], "error": "exit code 1: no Ray"},
    }
    workload = {
        "made": "2026-01-02T03:04:05",
        "description": "a test",
        "rounds": 5,
        "warm_up": 2,
        "parameters": 7850,
        "flops_per_round": 1.1e9,
        "systems": systems,
    }
    point = {"point": 10, "median": 0.1, "load": 1.0, "peak_mb": 500, "worker_memory_mb": 400}
    steps = {"check": 0.004, "angles": 0.006, "aggregate": 0.005, "read": 0.003}
    server = {"numbers": 10_000, "median": {"fedavg": 0.02, "fedlayerwise": 0.03}, "floor": 0.01, "steps": steps}
    server |= {"peak_mb": 300, "held_mb": 1}
    return {
        "made": "2026-01-02T03:04:05",
        "quick": False,
        "repetitions": 1,
        "machine": {"cpu": "A CPU", "cores": 2, "memory_gb": 8, "python": "3.11", "versions": {"torch": "2.13.0"}},
        "peak_gflops": 100.0,
        "copy_gbs": 10.0,
        "workloads": {"logreg-250": workload},
        "growth": {"cohort": [point], "clients": [point, {"error": "exit code 1"}], "parameters": [server]},
        "overheads": {"cnn-10": {"fedavg": [1.0, 2.0], "fedadp": [1.1, 2.4]}, "mlp-100": {"error": "exit code 1"}},
    }


def test_ratios_use_the_timed_rounds_only(results):
    workload = results["workloads"]["logreg-250"]
    assert page.ratio(workload, "pfl") == pytest.approx(2.0)
    assert page.ratio(workload, "Flower") is None
    assert page.share_of_peak(workload, "fedstrata", 100.0) == pytest.approx(0.01)


def test_the_page_holds_every_table(results):
    template = (Path(page.HERE) / "page.md.in").read_text(encoding="utf-8")
    text = page.build(results, template, "2026-01-02-a-cpu")
    assert "{{" not in text
    assert "| logreg-250 | 1.1 | 1.0% | 2× | – |" in text
    assert "did not run: exit code 1: no Ray" in text
    assert "pfl (1 thread)" in text
    assert "| fedadp on cnn-10 | 1.75 | 1.5 | +15.0% | +12.5% … +17.5% |" in text
    assert "| 10 | 0.1 | 1 | 500 | 400 |" in text
    assert "| 10,000 | 0.02 (2×) | 0.03 (3×) | 0.01 | 0.004 | 0.006 | 0.005 | 0.003 | 300 (1) |" in text
    assert "2026-01-02-a-cpu-growth.svg" in text
    assert "not quiet" not in text
    assert "1 turn of each system" in text
    assert "from before that" not in text


def test_a_disturbed_run_says_so(results):
    results["workloads"]["logreg-250"]["systems"]["pfl"]["turns"][0]["busy"] = 0.5
    assert "not quiet**: before 1 of 2 turns" in page.machine(results)


def test_peak_memory_is_that_of_this_program_alone():
    """The child has a few MB; what started it has PyTorch loaded, and `ru_maxrss` would say at least as much."""
    code = "from benchmarks.memory import peak_mb; a = peak_mb(); b'x' * (30 << 20); print(a, peak_mb())"
    done = subprocess.run([sys.executable, "-c", code], cwd=page.HERE.parent, stdout=subprocess.PIPE, check=True)
    if done.stdout.split()[0] == b"None":
        pytest.skip("the kernel does not say")
    before, after = map(int, done.stdout.split())
    assert before < 60
    assert 29 <= after - before < 60


def test_peak_memory_measured_the_old_way_is_not_shown(results):
    for axis in results["growth"].values():
        for point in axis:
            if "error" not in point:
                point["memory_mb"] = point.pop("peak_mb", 1005)
    text = page.growth(results)
    assert "1005" not in text
    assert "1,005" not in text
    assert "shown for workers only" in text
    assert "| 10 | 0.1 | 1 | 400 |" in text
    assert "| 10,000 | 0.02 (2×) | 0.03 (3×) | 0.01 | 0.004 | 0.006 | 0.005 | 0.003 |" in text


def test_the_page_says_where_accuracy_is_not_among_those_of_peers(results):
    systems = results["workloads"]["logreg-250"]["systems"]
    assert page.outside(systems) is None, "one turn of a peer is no range"
    systems["pfl"]["turns"] = [turn([2.0], accuracy) for accuracy in (0.81, 0.83)]
    assert "below those of all 2 turns of peers (0.810 … 0.830)" in page.details(results)
    assert page.sides(results) == "below it on logreg-250"
    systems["pfl"]["turns"][0]["accuracy"] = 0.79
    assert page.outside(systems) is None
    assert page.sides(results) == "within it on logreg-250"


def test_the_page_says_where_pfl_kept_its_order(results):
    first = results["workloads"]["logreg-250"]
    old = {key: value for key, value in first.items() if key != "made"}
    results["workloads"] |= {"cnn-10": old, "flute-lr": old, "mlp-100": old}
    assert "The results of cnn-10, flute-lr and mlp-100 are from before that" in page.pfl_order(results)


def test_steps_on_the_page_are_those_of_the_workloads(results):
    def steps(name, samples):
        training = WORKLOADS[name].recipe["training"]
        return training["clients_per_round"] * training["epochs"] * samples // training["batch_size"]

    assert steps("mlp-100", 600) == page.MLP_STEPS
    assert steps("flute-lr", 60) == 10 * 6
    results["workloads"]["mlp-100"] = results["workloads"]["logreg-250"]
    assert "1.1 s for a round's 6,000 steps on 2 cores are 367 µs each" in page.mlp_step(results)


def test_the_page_is_made_of_the_newest_full_result(tmp_path, results):
    for name, made, quick in (("old", "2026-01-01", False), ("new", "2026-01-02", False), ("q", "2026-01-03", True)):
        (tmp_path / f"{name}.json").write_text(json.dumps({**results, "made": made, "quick": quick}))
    assert page.newest(tmp_path).stem == "new"
    with pytest.raises(SystemExit, match="make bench"):
        page.newest(tmp_path / "nothing")


def test_the_page_is_that_of_the_stored_results_it_names():
    stored = page.PAGE.read_text(encoding="utf-8")
    path = page.HERE.parent / re.search(r"from (\S+\.json);", stored)[1]
    results, template = json.loads(path.read_text(encoding="utf-8")), page.HERE / "page.md.in"
    assert stored == page.build(results, template.read_text(encoding="utf-8"), path.stem), "python -m benchmarks.page"


def test_flops_are_counted_forward_and_backward():
    inputs, targets = torch.randn(20, 1, 28, 28), torch.zeros(20, dtype=torch.long)
    # A product of the forward pass has one for the weights in the backward pass, and one for the inputs but in layer 1.
    assert measure.training_flops(logreg((1, 28, 28), 10), inputs, targets) == 2 * 2 * 784 * 10
    assert measure.training_flops(mlp((1, 28, 28), 10, 200), inputs, targets) == 2 * 2 * 784 * 200 + 3 * 2 * 200 * 10


def test_the_fastest_variant_wins_and_a_failed_one_loses():
    turns = {"1": turn([3.0]), "2": turn([2.0]), "3": {"seconds": [], "error": "no"}}
    assert run.fastest(turns) == "2"


def test_other_work_is_noticed():
    reference = np.array([3.0, 4.0])
    assert run.similarity(reference * 2, reference) == pytest.approx({"cosine": 1.0, "length": 2.0})
    like, half = {"cosine": 0.97, "length": 1.02}, {"cosine": 0.97, "length": 0.5}
    systems = {
        "fedstrata": {"turns": [turn([1.0], 0.80)], "similarity": {"cosine": 1.0, "length": 1.0}},
        "a": {"turns": [turn([1.0], 0.82)], "similarity": like},
        "b": {"turns": [turn([1.0], 0.70)], "similarity": half},
    }
    assert [text.split(":")[0] for text in page.disagreements(systems)] == ["b", "b"]


def test_noise_of_the_batches_widens_what_is_allowed():
    like = {"cosine": 0.65, "length": 1.05}
    systems = {
        "fedstrata": {"turns": [turn([1.0])], "similarity": {"cosine": 1.0, "length": 1.0}},
        "plain loop": {"turns": [turn([1.0])], "similarity": like},
    }
    assert len(page.disagreements(systems)) == 1
    systems["plain loop"]["self_similarity"] = {"cosine": 0.68, "length": 0.97}
    assert page.disagreements(systems) == []


def test_noise_of_the_accuracy_is_that_of_the_peers_turns():
    """Six turns with the deviation 0.02: five degrees of freedom, so three deviations are 5.2 to 5.5 (Student)."""
    off = 0.02 * (5 / 6) ** 0.5
    loop = [turn([1.0], 0.50 + sign * off) for sign in (1, -1) * 3]
    systems = {"fedstrata": {"turns": [turn([1.0], 0.40)]}, "plain loop": {"turns": loop}}
    assert page.disagreements(systems) == []
    systems["fedstrata"] = {"turns": [turn([1.0], 0.38)]}
    (problem,) = page.disagreements(systems)
    allowed = float(problem.removeprefix("plain loop: accuracy differs by +0.120 (allowed: ").removesuffix(")"))
    assert allowed == pytest.approx(5.507 * 0.02 * (7 / 6) ** 0.5, rel=0.06)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_is_a_valid_recipe(name):
    assert load(WORKLOADS[name].recipe).training.optimizer == "sgd"
    assert set(QUICK) <= set(WORKLOADS)


def test_batches_hold_every_sample_once():
    batches = list(Batches(torch.arange(7), torch.arange(7), 3))
    assert [len(x) for x, _ in batches] == [3, 3, 1]
    assert sorted(torch.cat([x for x, _ in batches]).tolist()) == list(range(7))


def test_any_number_of_clients_can_be_drawn():
    partition = growth.draws(np.zeros(10), np.random.default_rng(0), clients=1000, samples=6)
    assert len(partition) == 1000
    assert set(partition.sizes) == {6}


def test_a_cpu_becomes_part_of_a_file_name():
    assert measure.slug("Intel(R) Xeon(R) CPU E5-2680 v4 @ 2.40GHz") == "intel-xeon-e5-2680-v4"
    assert measure.slug("AMD EPYC 7B13") == "amd-epyc-7b13"
