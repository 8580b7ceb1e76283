"""SGD with momentum, under a spring in as many passes over memory as without one.

The displacement D from the anchor and the velocity V begin a round at zero, and a step is

    V ← β V + g + c D,      D ← D − η V.

The spring's pull c D is a pass of its own. But D also moves as if it were drawn towards a point R,

    R ← β/(1 − ηh) R − g/h,      D ← D + ηh (R − D),      with h the smaller root of ηh² − (1 − β + ηc) h + c = 0,

where V = −h/(1 − ηh) (R − D): put that into the first line, and the second one follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WEAKEST = 1e-8
"""Below this stiffness, g/h would become too large a number."""


@dataclass(frozen=True)
class Motion:
    """M ← keep M + share g, and then D ← D + draw (M − D), or D ← D − η M if nothing draws it."""

    keep: float
    share: float = 1.0
    draw: float | None = None


def drawn(c: float, beta: float, lr: float) -> Motion | None:
    """The motion under a spring; None where it has not this form: D swings about the anchor, or hardly feels it."""
    middle = 1 - beta + lr * c
    discriminant = middle**2 - 4 * lr * c
    if c < WEAKEST or discriminant < 0:
        return None
    h = 2 * c / (middle + math.sqrt(discriminant))
    return Motion(keep=beta / (1 - lr * h), share=-1 / h, draw=lr * h) if lr * h < 1 else None
