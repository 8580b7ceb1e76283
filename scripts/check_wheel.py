"""Builds the wheel, installs it into an empty environment outside the clone, and does there what a newcomer does.

Usage: python scripts/check_wheel.py [DIRECTORY]    (a new one, which is kept; else a temporary one)

That is `make demo`'s command, the four ways in (`Server`, `simulate`, `run`, `compare`), a run that is resumed, shown,
reported and exported, and sentences instead of tracebacks where an extra is missing. It installs torch, so it wants a
network and minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

FOUR_WAYS = """
import fedstrata, numpy as np, torch
from fedstrata import fedavg, fedlayerwise, fedprox

assert "site-packages" in fedstrata.__file__, fedstrata.__file__

model = {"body": np.zeros(4), "head": np.zeros(2)}
server = fedstrata.Server(model, fedlayerwise())
north, east = ({name: value + at for name, value in model.items()} for at in (1, 3))
new = server.aggregate([north, east], sizes=[100, 100])
assert (1 < new["body"]).all() and (new["body"] < 3).all(), new
server.save("server.safetensors")
again = fedstrata.Server.load("server.safetensors", fedlayerwise())
assert (again.arrays()["body"] == new["body"]).all()

points = torch.randn(4, 60, 2, generator=torch.Generator().manual_seed(0))
labels = (points[..., 0] > 0).long()
task = fedstrata.Task(
    model=lambda: torch.nn.Linear(2, 2),
    clients=list(zip(points[1:], labels[1:])),
    evaluation={"test": (points[0], labels[0])},
)
for state, record in fedstrata.simulate(task, fedprox(0.1), rounds=5, lr=0.3):
    pass
assert record.metrics["test"]["accuracy"] > 0.7, record.metrics

run = fedstrata.run(task, fedlayerwise(), rounds=5, lr=0.3, out="runs/mine")
found = fedstrata.compare(task, [fedavg(), fedlayerwise()], seeds=range(2), rounds=3, lr=0.3, out="runs/compared")
print(run, found, *found.tables(), sep="\\n")
assert set(found.differences()) == {"fedlayerwise"}
try:
    run.frame()
except fedstrata.MissingExtra as error:
    print(error)
else:
    raise SystemExit("pandas is here, so this environment was not empty")
"""


def main() -> None:
    """Build, install, use."""
    if len(sys.argv) > 1:
        check(Path(sys.argv[1]).absolute())
    else:
        with tempfile.TemporaryDirectory() as place:
            check(Path(place))


def check(place: Path) -> None:
    """All of it, in a folder."""
    place.mkdir(parents=True, exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    here = place / "elsewhere"
    here.mkdir()

    def do(*command: object, code: int = 0) -> str:
        print("$", *command, flush=True)
        done = subprocess.run([*map(str, command)], cwd=here, env=clean, capture_output=True, text=True, check=False)
        print(done.stdout + done.stderr, flush=True)
        assert done.returncode == code, f"exit code {done.returncode}, expected {code}"
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    wheels, binaries = place / "wheels", place / "environment" / "bin"
    do(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, ROOT)
    (wheel,) = wheels.glob("fedstrata-*.whl")
    do(sys.executable, "-m", "venv", binaries.parent)
    do(binaries / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)

    program = binaries / "fedstrata"
    assert "FedAvg" in do(program, "--help")
    do(program, "compare", "demo", "--algorithms", "fedavg,fedlayerwise", "--out", "runs/demo")
    (here / "ways.py").write_text(FOUR_WAYS, encoding="utf-8")
    do(binaries / "python", "ways.py")
    do(program, "run", "quickstart", "--out", "runs/one", "--set", "training.rounds=3")
    do(program, "run", "--resume", "runs/one", "--set", "training.rounds=4")
    assert "4" in do(program, "show", "runs/one")
    do(program, "export", "runs/one", "model.safetensors")
    for command in ("report", "figures"):
        assert "fedstrata[plots]" in do(program, command, "runs", code=2)
    assert "runs/compared" in do(program, "list", "runs")
    do(program, "data", "list")
    assert "fedstrata[flower]" in do(program, "run", "quickstart", "--engine", "flower", code=2)
    assert "fedstrata[flower]" in do(program, "flower", "init", "federation", code=2)
    do(binaries / "python", "-m", "pip", "install", "--quiet", "--dry-run", "fedstrata[notebook]")
    print("the wheel works outside the clone")


if __name__ == "__main__":
    main()
