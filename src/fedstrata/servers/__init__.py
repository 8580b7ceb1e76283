"""What the server does with the aggregate. One rule a file; a new one is a file, a line here, and a test."""

from __future__ import annotations

from fedstrata.core.axes import Adopt
from fedstrata.servers.fedadagrad import FedAdagrad
from fedstrata.servers.fedadam import FedAdam
from fedstrata.servers.fedavgm import FedAvgM
from fedstrata.servers.feddyn import FedDynStep
from fedstrata.servers.fedyogi import FedYogi

SERVERS = {
    "adopt": Adopt,
    "fedavgm": FedAvgM,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "feddyn": FedDynStep,
}

__all__ = ["SERVERS", "Adopt", "FedAdagrad", "FedAdam", "FedAvgM", "FedDynStep", "FedYogi"]
