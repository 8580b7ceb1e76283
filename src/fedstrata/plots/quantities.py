"""What a run records of each client and layer, and how it is shown."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Quantity:
    """A recorded quantity: its name in the record, and its title, unit and number format for people."""

    name: str
    title: str
    about: str
    over: str = "median"
    """What stands for all clients where there is one number for a round and layer."""
    unit: str = ""
    factor: float = 1.0
    """From the recorded number to the shown one."""
    linear: bool = False
    """Whether its scale never is logarithmic."""
    recorded_as: str = ""

    @property
    def source(self) -> str:
        """The array of the record that it comes from."""
        return self.recorded_as or self.name

    @property
    def titled(self) -> str:
        """With its unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


_DEGREES = 180 / math.pi

_LAYERED = (
    Quantity(
        "angle",
        "angle",
        "between a client's update of a layer and the mean update of all who sent it. Near 0° clients agree; at 90° "
        "their updates have nothing in common.",
        unit="°",
        factor=_DEGREES,
        linear=True,
    ),
    Quantity(
        "smoothed_angle",
        "smoothed angle",
        "the running mean of the angle, from which weights are made.",
        unit="°",
        factor=_DEGREES,
        linear=True,
    ),
    Quantity(
        "relative",
        "relative divergence",
        "the length of a client's update in percent of the layer's length after training: how far it moved for its "
        "size.",
        unit="%",
        factor=100.0,
    ),
    Quantity("divergence", "divergence", "the length of a client's update."),
    Quantity("norm", "norm", "the length of a client's layer after training."),
    Quantity(
        "weight", "weight", "a client's share in the average of a layer. All shares of a layer sum to 1.", over="max"
    ),
    Quantity("mu", "μ", "how strongly a client's layer was held near the global one when its training ended."),
    Quantity(
        "mask",
        "sent",
        "how much of a layer a client sent: all of it, nothing, or a share of its units.",
        over="mean",
        unit="%",
        factor=100.0,
        linear=True,
    ),
)

LAYERED = {quantity.name: quantity for quantity in _LAYERED}
"""Per client and layer."""

_OF_CLIENTS = (
    Quantity("loss", "training loss", "the mean loss of a client's training, on its own data."),
    Quantity(
        "model_angle",
        "angle of the whole update",
        "between a client's update and the mean update, over all layers that it sent.",
        unit="°",
        factor=_DEGREES,
        linear=True,
    ),
    Quantity(
        "weight_share",
        "weight",
        "a client's share in the average, mean over layers.",
        linear=True,
        recorded_as="weight",
    ),
    Quantity(
        "work", "work", "the epochs (or steps) that a client was asked for; 0 if it was not selected.", linear=True
    ),
)

HARM = Quantity(
    "harm",
    "harm to the loss",
    "how much lower the loss would be without the client's update of the layer; below 0, it helps.",
    linear=True,
)
"""What a probe has found."""

OF_CLIENTS = {quantity.name: quantity for quantity in _OF_CLIENTS}
"""One number per client and round."""
