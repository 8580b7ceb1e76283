"""What the server does with the aggregate. One rule a file; a new one is a file, a line here, and a test."""

from __future__ import annotations

from fedstrata.core.axes import Adopt
from fedstrata.servers.feddyn import FedDynStep

SERVERS = {
    "adopt": Adopt,
    "feddyn": FedDynStep,
}

__all__ = ["SERVERS", "Adopt", "FedDynStep"]
