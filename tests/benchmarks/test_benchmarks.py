import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import growth, loop, measure, page, problems, rounds, turns, whole
from benchmarks.workloads import LAYERS, QUICK, WORKLOADS, Work
from fedstrata.tasks.models import logreg, mlp


def turn(seconds, accuracy=0.8, cpu=1.0, marked=False):
    """A turn of rounds; the first two warm up."""
    neighbours = 0.5 if marked else 0.02
    return {
        "startup": 3.0,
        "seconds": [9.0, 9.0, *seconds],
        "cpu": cpu,
        "accuracy": accuracy,
        "neighbours": neighbours,
        "marked": marked,
    }


def whole_turn(wall, cpu, accuracy=0.9):
    return {"wall": wall, "cpu": cpu, "accuracy": accuracy, "loss": 0.3, "neighbours": 0.0, "marked": False}


@pytest.fixture
def results():
    like = {"cosine": 0.97, "length": 1.01}

    def system(*turns, **more):
        return {"settings": "as it comes", "variant": "", "turns": [*turns], "similarity": like, **more}

    compared = {
        "fedstrata": system(turn([1.0, 1.2, 1.1], cpu=2.0)),
        "fedstrata (1 worker)": system(turn([1.65], cpu=1.6)),
        "loop (1 thread)": system(turn([4.4], cpu=4.0)),
        "pfl": system(
            turn([2.0, 2.2, 2.4], 0.81, cpu=3.0), variants={"1 thread": turn([2.2]), "2 threads": turn([3.0])}
        ),
        "Flower": {"settings": "y", "variant": "", "turns": [], "error": "exit code 1: no Ray"},
    }
    about = {"made": "2026-01-02T03:04:05", "description": "a test", "rounds": 5}
    workload = {**about, "warm_up": 2, "parameters": 7850, "flops_per_round": 1.1e9, "systems": compared}
    deep = {label: compared[label] for label in ("fedstrata (1 worker)", "loop (1 thread)")}
    run = {
        "loop (1 thread)": {"turns": [whole_turn(11.0, 10.0), whole_turn(13.0, 12.0)]},
        "fedstrata (1 worker)": {"turns": [whole_turn(6.0, 5.0), whole_turn(7.0, 6.0)]},
        "fedstrata": {"turns": [whole_turn(3.0, 5.5), whole_turn(5.0, 6.5)]},
    }
    point = {"point": 10, "median": 0.1, "load": 1.0, "peak_mb": 500, "worker_memory_mb": 400, "marked": False}
    server = {"numbers": 10_000, "median": {"fedavg": 0.02, "fedlayerwise": 0.03}, "floor": 0.01, "marked": False}
    return {
        "made": "2026-01-02T03:04:05",
        "quick": False,
        "machine": {"cpu": "A CPU", "cores": 2, "memory_gb": 8, "python": "3.11", "versions": {"torch": "2.13.0"}},
        "peak_gflops": 100.0,
        "copy_gbs": 10.0,
        "whole": {"logreg-250": {**about, "systems": run}},
        "rounds": {"logreg-250": workload},
        "layers": {"layers-10-steps-2": {**workload, "systems": deep}},
        "overheads": {
            "cnn-10": {"seconds": {"fedavg": [1.0, 2.0], "fedadp": [1.1, 2.4]}, "marked": True},
            "mlp-100": {"error": "exit code 1", "marked": False},
        },
        "growth": {
            "cohort": {"10": point},
            "clients": {"10": point, "100": {"error": "exit code 1", "marked": False}},
            "parameters": {"10000": server},
        },
    }


def test_medians_are_of_the_timed_rounds_only(results):
    workload = results["rounds"]["logreg-250"]
    assert page.wall(workload, "pfl") == pytest.approx(2.2)
    assert page.wall(workload, "Flower") is None
    assert page.cpu(workload, "Flower") is None
    assert page.share_of_peak(workload, "fedstrata", 100.0) == pytest.approx(0.01)
    assert page.wall(results["whole"]["logreg-250"], "fedstrata") == pytest.approx(4.0)


def test_the_page_holds_every_table(results):
    template = (Path(page.HERE) / "page.md.in").read_text(encoding="utf-8")
    text = page.build(results, template, "2026-01-02-a-cpu")
    assert "{{" not in text
    assert "from benchmarks/results/2026-01-02-a-cpu.json;" in text
    # CPU: 11 of the loop over 5.5 of one worker; by the clock: 12 over the 4 of all cores.
    assert "| logreg-250, 5 | 11 / 12 | 5.5 / 6.5 | 6 / 4 | 2× | 3× | 0 of 6 |" in text
    # 1.65 s of one worker over 1.1 s of two; 4.0 s of the loop's CPU over 1.6 s of one worker's, and so on.
    assert "| logreg-250 | 2 / 1.1 | 1% | 1.5× | 2.5× | 2× / 4× | 1.5× / 2× | – | 0 of 4 |" in text
    assert "| steps | 10 layers | marked turns |" in text
    assert "| 2 | 0.4× (1.6 / 4) | 0 of 2 |" in text
    assert "| cnn-10 | +15% (+13% … +18%) |" in text
    assert "| clients a round, of 100,000 | 10 |" in text
    assert "| FedAvg | 0.02 s (2×) |" in text
    assert "**Not so: rounds, logreg-250: Flower: exit code 1: no Ray; overheads: exit code 1; growth: exit " in text


def test_a_disturbed_turn_is_counted(results):
    results["rounds"]["logreg-250"]["systems"]["pfl"]["turns"][0]["marked"] = True
    text = page.machine(results)
    assert "2 of 18 turns are marked" in text, "this one and an overhead's; variants are turns again"
    assert page.rounds(results).endswith("| 1 of 4 |")


def test_peak_memory_is_that_of_this_program_alone():
    """The child has a few MB; what started it has PyTorch loaded, and `ru_maxrss` would say at least as much."""
    code = "from benchmarks.memory import peak_mb; a = peak_mb(); b'x' * (30 << 20); print(a, peak_mb())"
    done = subprocess.run([sys.executable, "-c", code], cwd=page.HERE.parent, stdout=subprocess.PIPE, check=True)
    if done.stdout.split()[0] == b"None":
        pytest.skip("the kernel does not say")
    before, after = map(int, done.stdout.split())
    assert before < 60
    assert 29 <= after - before < 60


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
    assert len(stored.splitlines()) <= 100


def test_flops_are_counted_forward_and_backward():
    inputs, targets = torch.randn(20, 1, 28, 28), torch.zeros(20, dtype=torch.long)
    # A product of the forward pass has one for the weights in the backward pass, and one for the inputs but in layer 1.
    assert measure.training_flops(logreg((1, 28, 28), 10), inputs, targets) == 2 * 2 * 784 * 10
    assert measure.training_flops(mlp((1, 28, 28), 10, 200), inputs, targets) == 2 * 2 * 784 * 200 + 3 * 2 * 200 * 10


def test_flops_of_a_round_are_those_of_the_steps_taken():
    """One client of deep takes two steps of 32: nine of ten layers have products forward, for weights and for inputs,
    and the first has no inputs to find a gradient for: tanh stands before it, but on the data."""
    work = Work.load("layers-10-steps-2", 1)
    side = problems.side(10)
    assert measure.flops_per_round(work, [[0]]) == 2 * 32 * (9 * 3 + 2) * 2 * side * side


def test_the_fastest_variant_wins_and_a_failed_one_loses():
    tried = {"1": turn([3.0]), "2": turn([2.0]), "3": {"seconds": [], "error": "no"}}
    assert rounds.fastest(tried) == "2"


def test_other_work_is_noticed():
    reference = np.array([3.0, 4.0])
    assert rounds.similarity(reference * 2, reference) == pytest.approx({"cosine": 1.0, "length": 2.0})
    like, half = {"cosine": 0.97, "length": 1.02}, {"cosine": 0.97, "length": 0.5}
    systems: dict[str, dict[str, Any]] = {
        "fedstrata": {"turns": [turn([1.0], 0.80)], "similarity": {"cosine": 1.0, "length": 1.0}},
        "a": {"turns": [turn([1.0], 0.82)] * 2, "similarity": like},
        "b": {"turns": [turn([1.0], 0.70)] * 2, "similarity": half},
    }
    assert [text.split(":")[0] for text in page.disagreements(systems)] == ["b", "b"]
    for system in systems.values():
        del system["turns"][1:]
    assert [text.split()[1] for text in page.disagreements(systems)] == ["weights"], (
        "one turn does not say how noisy it is"
    )


def test_noise_of_the_batches_widens_what_is_allowed():
    like = {"cosine": 0.65, "length": 1.05}
    systems = {
        "fedstrata": {"turns": [turn([1.0])], "similarity": {"cosine": 1.0, "length": 1.0}},
        "loop (1 thread)": {"turns": [turn([1.0])], "similarity": like},
    }
    assert len(page.disagreements(systems)) == 1
    systems["loop (1 thread)"]["self_similarity"] = {"cosine": 0.68, "length": 0.97}
    assert page.disagreements(systems) == []


def test_noise_of_the_accuracy_is_that_of_the_peers_turns():
    """Six turns with the deviation 0.02: five degrees of freedom, so three deviations are 5.2 to 5.5 (Student)."""
    off = 0.02 * (5 / 6) ** 0.5
    others = [turn([1.0], 0.50 + sign * off) for sign in (1, -1) * 3]
    systems = {"fedstrata": {"turns": [turn([1.0], 0.40)]}, "pfl": {"turns": others}}
    assert page.disagreements(systems) == []
    systems["fedstrata"] = {"turns": [turn([1.0], 0.38)]}
    (problem,) = page.disagreements(systems)
    allowed = float(problem.removeprefix("pfl: accuracy differs by +0.120 (allowed: ").removesuffix(")"))
    assert allowed == pytest.approx(5.507 * 0.02 * (7 / 6) ** 0.5, rel=0.06)


@pytest.mark.parametrize("name", WORKLOADS | LAYERS)
def test_every_workload_is_a_valid_recipe(name):
    recipe = (WORKLOADS | LAYERS)[name].as_recipe("name", 7)
    assert recipe.training.optimizer == "sgd"
    assert recipe.training.rounds == 7
    assert recipe.record.layers
    assert set(QUICK) <= set(WORKLOADS)


def test_workloads_of_our_own_are_what_they_say():
    def numbers(parameters):
        return sum(parameter.numel() for parameter in parameters)

    assert numbers(problems.Decoder().parameters()) == 808_475
    assert numbers(p for p in problems.FrozenBase().parameters() if p.requires_grad) == 20_500
    assert round(numbers(problems.FrozenBase().parameters()), -6) == 20_000_000
    for layers in (10, 100, 1000):
        work = Work.load(f"layers-{layers}-steps-2", 1)
        assert len(work.experiment.layers) == layers
        assert numbers(work.model().parameters()) == pytest.approx(1e6, rel=0.06)


def test_a_decoder_does_not_see_what_comes():
    torch.manual_seed(0)
    model, lines = problems.Decoder(), torch.randint(27, (2, problems.CONTEXT))
    other = lines.clone()
    other[:, 40:] = (other[:, 40:] + 1) % 27
    with torch.no_grad():
        first, second = model(lines), model(other)
    torch.testing.assert_close(first[:, :40], second[:, :40])
    assert (first[:, 40:] != second[:, 40:]).any()


def test_what_follows_a_letter_in_the_text_is_its_target():
    for inputs, targets in (*problems.gpt().clients, problems.gpt().test):
        assert torch.equal(inputs.flatten()[1:], targets.flatten()[:-1])


def test_batches_hold_every_sample_once():
    batches = list(loop.batches(torch.arange(7), torch.arange(7), 3))
    assert [len(x) for x, _ in batches] == [3, 3, 1]
    assert sorted(torch.cat([x for x, _ in batches]).tolist()) == list(range(7))


@pytest.mark.parametrize(("work", "seen"), [({"epochs": 2}, [3, 2, 3, 2]), ({"epochs": 1, "steps": 3}, [3, 2, 3])])
def test_the_loop_takes_its_epochs_or_steps(work, seen):
    sizes = []

    def loss(outputs, targets):
        sizes.append(len(targets))
        return outputs.sum()

    x = torch.zeros(5, 1)
    loop.train_locally(nn.Linear(1, 1), loss, x, x, lr=0.1, momentum=0.0, batch_size=3, **work)
    assert sizes == seen


def test_the_loop_averages_by_size():
    """From w = 1 with rate 0.1: one sample with x = 1 has the gradient 2, so 0.8; three with x = 2 have 8, so 0.2."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    training = {"lr": 0.1, "momentum": 0.0, "batch_size": 10, "epochs": 1}
    federation = loop.Federation(model, nn.functional.mse_loss, training)
    cohort = [(torch.ones(1, 1), torch.zeros(1, 1)), (torch.full((3, 1), 2.0), torch.zeros(3, 1))]
    federation.round(cohort)
    assert float(federation.weights[0]) == pytest.approx((1 * 0.8 + 3 * 0.2) / 4)


def test_the_loop_measures_loss_and_accuracy(monkeypatch):
    """Logits of (x, 0) for the classes 0 and 1, shown in batches of two and one."""
    monkeypatch.setattr(loop, "SHOWN", 2)
    model = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0], [0.0]]))
    federation = loop.Federation(model, nn.functional.cross_entropy, {})
    loss, right = federation.evaluate(torch.tensor([[3.0], [-1.0], [2.0]]), torch.tensor([0, 0, 0]))
    assert right == pytest.approx(2 / 3)
    assert loss == pytest.approx(np.log1p(np.exp([-3.0, 1.0, -2.0])).mean(), rel=1e-6)


def test_the_loop_reads_a_data_set(tmp_path):
    pixels, labels = np.arange(16, dtype=np.uint8), np.array([3, 1, 2, 0], np.uint8)
    files = [tmp_path / name for name in ("images.gz", "labels", "test-images", "test-labels.gz")]
    for path, array, header in zip(files, (pixels, labels) * 2, (16, 8) * 2, strict=True):
        content = bytes(header) + array.tobytes()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    spec = {"files": list(map(str, files)), "shape": [1, 2, 2], "classes": 4, "mean": 2.0, "std": 4.0}
    problem = loop.images(
        {"rows": np.array([3, 1, 0]), "sizes": np.array([1, 2])}, {**spec, "model": {"name": "mlp", "hidden": 5}}
    )
    assert [targets.tolist() for _, targets in problem.clients] == [[0], [1, 3]]
    assert problem.clients[1][0][0, 0].tolist() == [[0.5, 0.75], [1.0, 1.25]]
    assert problem.test[0].shape == (4, 1, 2, 2)
    assert problem.test[1].tolist() == [3, 1, 2, 0]
    assert problem.model()(problem.test[0]).shape == (4, 4)


@pytest.mark.slow
def test_both_programs_do_the_same_work(tmp_path):
    """From the same weights, with the same clients, and each says what came out."""
    work = Work.load("layers-10-steps-2", 2)
    prepared, recipe = tmp_path / "prepared.npz", tmp_path / "recipe.toml"
    recipe.write_text(work.experiment.recipe.to_toml(), encoding="utf-8")
    whole.prepare_loop(prepared, work, None)
    with np.load(prepared) as file:
        assert file["cohorts"].tolist() == work.cohorts
        spec = json.loads(str(file["spec"]))
    torch.manual_seed(spec["model_seed"])
    first = problems.deep(**spec["options"]).model()
    for built, same in zip(work.model().parameters(), first.parameters(), strict=True):
        assert torch.equal(built, same)
    ours = whole.take_turn([*whole.FEDSTRATA, str(recipe), "--out", str(tmp_path / "run"), "--workers", "1"])
    theirs = whole.take_turn([*whole.LOOP, str(prepared), "--threads", "1"])
    assert "error" not in ours | theirs
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.02)
    broken = whole.take_turn([*whole.LOOP, str(tmp_path / "nothing.npz")])
    assert broken["error"].startswith("exit code 1: FileNotFoundError")


BUSY = """
import os, sys, time
there, here = os.pipe()
child = os.fork()
while time.process_time() < 0.3: pass
if child == 0:
    os.write(here, b"done")
    time.sleep(60)
os.read(there, 4)
print(flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
os.kill(child, 9)
os.wait()
"""


def test_the_processor_is_counted_while_children_run_and_when_they_have_ended(tmp_path):
    """A process and its child work 0.3 s each; clocks of what has ended go by hundredths of a second."""
    one, running = turns.Turn([sys.executable, "-c", BUSY, str(tmp_path / "seen")]), []

    def look(line):
        running.append(one.used()["cpu"])
        (tmp_path / "seen").touch()

    assert one.follow(look) is None
    assert running[0] >= 0.6
    assert one.used()["cpu"] >= running[0] - 0.04


def test_what_others_use_meanwhile_marks_a_turn(monkeypatch):
    clock = iter([100.0, 100.0, 100.0, 1e6])
    monkeypatch.setattr(turns, "machine_seconds", lambda: next(clock))
    quiet, loud = (turns.Turn([sys.executable, "-c", ""]) for _ in range(2))
    for one in (quiet, loud):
        one.follow(print)
    assert quiet.used()["neighbours"] == 0
    used = loud.used()
    assert used["marked"]
    assert used["neighbours"] == pytest.approx((1e6 - 100) / (used["wall"] * os.cpu_count()), rel=1e-3)


def test_any_number_of_clients_can_be_drawn():
    partition = growth.draws(np.zeros(10), np.random.default_rng(0), clients=1000, samples=6)
    assert len(partition) == 1000
    assert set(partition.sizes) == {6}


def test_a_cpu_becomes_part_of_a_file_name():
    assert measure.slug("Intel(R) Xeon(R) CPU E5-2680 v4 @ 2.40GHz") == "intel-xeon-e5-2680-v4"
    assert measure.slug("AMD EPYC 7B13") == "amd-epyc-7b13"
