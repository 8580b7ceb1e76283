"""Six hospitals learn a diagnosis together, and in one of them half of the labels are wrong. Which one?

python examples/hospitals.py [DIR]

`fedstrata show DIR` says which one, from what was recorded while the run went on; `fedstrata probe DIR` asks what the
model would be without each of them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import fedstrata

HOSPITALS = ("Aalborg", "Bergen", "Cork", "Dover", "Evora", "Faro")
WRONG = 3
"""The hospital whose labels are wrong."""
DIAGNOSES = 3
SETTINGS = {"training": {"rounds": 20, "epochs": 2, "batch_size": 16, "lr": 0.05}, "engine": {"workers": 1}}


def patients(count: int, seed: int, age: float = 0.0) -> tuple[Tensor, Tensor]:
    """Twelve measurements of each patient, and one of three diagnoses; `age` is what hospitals differ in."""
    generator = torch.Generator().manual_seed(seed)
    measured = torch.randn(count, 12, generator=generator)
    measured[:, 0] += age
    linear, product = measured @ torch.linspace(-1, 1, 12), 2 * measured[:, 0] * measured[:, 1]
    return measured, torch.stack([linear, product, 2 * measured[:, 2].abs() - 1.5], dim=1).argmax(1)


def hospital(number: int) -> tuple[Tensor, Tensor]:
    """A hospital's patients. In one of them, half of the diagnoses are another one."""
    measured, diagnosis = patients(240 + 40 * number, seed=number, age=0.3 * number - 0.75)
    if number == WRONG:
        diagnosis[::2] = (diagnosis[::2] + 1) % DIAGNOSES
    return measured, diagnosis


def build_model() -> nn.Module:
    """A small network."""
    return nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, DIAGNOSES))


def task() -> fedstrata.Task:
    """In a recipe: `[task]`, `function = "hospitals:task"`."""
    return fedstrata.Task(
        model=build_model,
        clients=[hospital(number) for number in range(len(HOSPITALS))],
        evaluation={"test": patients(1000, seed=100)},
        name="hospitals",
        notes={"client_names": list(HOSPITALS)},
    )


def main() -> None:
    """Run it where the recipe names this file, so that the run can be probed; then say what stands out."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()) / "hospitals"
    recipe = {"name": "hospitals", "task": {"function": "hospitals:task"}, **SETTINGS}
    run = fedstrata.run(recipe, out=folder)
    print(f"accuracy {run.summary()['accuracy']:.3f}")
    for finding in run.findings():
        print(f"{finding.kind}: {finding.sentence}")
    print(f"fedstrata show {run.path}")


if __name__ == "__main__":
    main()
