"""Your own model, data, loss and metric: regression on tables, one `torch.utils.data.Dataset` per client.

Run it with `python examples/own_model_and_data.py`. The last client has broken features (NaN): its updates are refused
with a reason, and the round goes on without it.
"""

import torch
from torch import nn
from torch.utils.data import Dataset

import fedstrata


class Station(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The measurements of one station; the stations differ in the range of their features."""

    def __init__(self, number: int, rows: int, broken: bool = False) -> None:
        generator = torch.Generator().manual_seed(number)
        self.features = torch.randn(rows, 8, generator=generator) + 0.3 * number
        noise = 0.1 * torch.randn(rows, generator=generator)
        self.target = (self.features @ torch.linspace(-1, 1, 8) + noise)[:, None]
        if broken:
            self.features[::10, 2] = float("nan")

    def __len__(self) -> int:
        return len(self.target)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.features[row], self.target[row]


def build_model() -> nn.Module:
    """A fresh model; it is called in a seeded scope, so the run's seed decides on the initial weights."""
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))


def mean_absolute_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over a batch; fedstrata weighs batches by their size."""
    return (outputs - targets).abs().mean()


def stations(clients: int = 6) -> fedstrata.Task:
    """The whole task. In a recipe: `[task]`, `function = "own_model_and_data:stations"`, `options = {clients = 6}`."""
    return fedstrata.Task(
        model=build_model,
        clients=[Station(k, 100 + 20 * k, broken=k == clients - 1) for k in range(clients)],
        held_out=[Station(100 + k, 40) for k in range(clients)],
        evaluation={"test": Station(2, 500)},
        loss=nn.functional.mse_loss,
        metric=fedstrata.Metric("mae", mean_absolute_error, direction="min"),
        name="stations",
    )


if __name__ == "__main__":
    run = fedstrata.run(
        {"name": "stations", "training": {"rounds": 10, "epochs": 2, "lr": 0.02}},
        task=stations(),
        algorithm="fedlayerwise",
        settings={"evaluation.on": ["test", "clients"], "evaluation.target": 0.6},
    )
    summary = run.summary()
    print(f"test error {summary['mae']:.3f}, target reached in round {summary['rounds_to_target']}")
    last = run.history()[-1]
    clients = last["metrics"]["clients"]
    print(f"over {clients['clients']:.0f} clients: {clients['min']:.3f} … {clients['max']:.3f}")
    print(f"lost in the last round: {last['lost']}")
    print(run.path)
