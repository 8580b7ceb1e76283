"""What the server needs besides the updates and the model it has: one new model, and little else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own, where nothing else is freed or allocated, and on one core: each has buffers of its own.
SCRIPT = """
import os, sys
import numpy as np, torch
from torch import nn
from fedstrata.algorithms import named
from fedstrata.core.layers import Layers
from fedstrata.core.messages import Reply, layers_with_units
from fedstrata.core.fit import Plan, fit
from fedstrata.core.state import initial_state

class Ready:
    "An engine whose clients have answered already."
    sizes = np.arange(1, 4)
    def __init__(self, side):
        self.layers = Layers.of(nn.Sequential(*(nn.Linear(side, side) for _ in range(2))))
        self.units = torch.arange(self.layers.units) % 2 == 0
        self.updates = [torch.empty(self.layers.numel).normal_() for _ in self.sizes]
        if name == "neuron_pruning":
            for update in self.updates:
                for entry in (entry for layer in self.layers.layers for entry in layer.entries):
                    update[entry.start : entry.stop].view(entry.units, -1)[1::2] = 0
    def exchange(self, orders):
        for order, update in zip(orders, self.updates):
            units = self.units if order.answer == "units" else None
            sent = order.mask if units is None else layers_with_units(units, self.layers)
            yield order, Reply(size=order.client + 1, update=update, sent=sent, units=units)

def forget_the_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")

def peak():
    "In kB, since it was forgotten, and of this program alone: getrusage begins with the peak of whoever started it."
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1])

def one_round(engine):
    algorithm = named(name)
    state = initial_state(torch.ones(engine.layers.numel), algorithm, len(engine.sizes), engine.layers)
    forget_the_peak()
    before = peak()
    new, record = next(fit(state, algorithm, engine, Plan(engine.layers, 1)))
    assert {status.kind for status in record.status} == {"ok"} and new.model.any() and record.layers
    return (peak() - before) * 1024 / (4 * engine.layers.numel)

name = sys.argv[1]
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
one_round(Ready(50))  # whatever is loaded or set up the first time
print(one_round(Ready(4000)))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/self is of Linux")
@pytest.mark.parametrize("algorithm", ["fedavg", "fedlayerwise", "neuron_pruning"])
def test_a_round_needs_one_model_more(algorithm: str) -> None:
    """With 3 updates of 128 MB: one model more, and buffers of a few MB. A second temporary would make it two."""
    path = os.pathsep.join([str(Path(__file__).parents[2] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, algorithm],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert 0.9 < float(done.stdout) < 1.5
