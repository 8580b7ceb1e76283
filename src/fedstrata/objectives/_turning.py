"""How far a neuron's weights have turned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedstrata.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def one_minus_cosine(w: Tensor, a: Tensor, unit: int, groups: int = 1) -> Tensor:
    """λ of each neuron, an index of dimension `unit`, shaped to broadcast to w.

    In grouped weights dimension 0 counts the neurons of all groups, dimension 1 those of each.
    """
    if unit == 0 or groups == 1:
        return _turning(w, a, [d for d in range(w.ndim) if d != unit])
    by_group = (groups, len(w) // groups, *w.shape[1:])
    turning = _turning(w.view(by_group), a.view(by_group), [d for d in range(len(by_group)) if d not in (0, 2)])
    return turning.repeat_interleave(len(w) // groups, 1).flatten(0, 1)


def _turning(w: Tensor, a: Tensor, dims: list[int]) -> Tensor:
    """λ = 1 − cos = ½ ‖w/‖w‖ − a/‖a‖‖²; 0 where nothing moved or both are zero, 1 where one is.

    Where the angle is small, 1 − cos cancels, and so does this difference. It is taken from w − a, which is 0 if w = a:

        ½ (‖w‖ + ‖a‖) (w/‖w‖ − a/‖a‖) = w − a − ½ (‖w‖ − ‖a‖) (w/‖w‖ + a/‖a‖),
        ‖w‖ − ‖a‖ = ⟨w − a, w + a⟩ / (‖w‖ + ‖a‖).

    It is computed before every epoch or step, and from sums of squares: norms along strides are several times slower.
    """
    square_w, square_a = w.square().sum(dims, keepdim=True), a.square().sum(dims, keepdim=True)
    has_w, has_a = square_w > 0, square_a > 0
    has_angle = has_w & has_a
    long_w, long_a = square_w.where(has_angle, 1.0).sqrt(), square_a.where(has_angle, 1.0).sqrt()
    lengths, away = long_w + long_a, w - a
    grown = (w + a).mul_(away).sum(dims, keepdim=True) / lengths
    turned = torch.addcmul(away, w, grown / long_w, value=-0.5).addcmul_(a, grown / long_a, value=-0.5)
    turning = 2 * turned.square_().sum(dims, keepdim=True) / lengths.square()
    return torch.where(has_angle, turning.clamp(max=2), (has_w ^ has_a).to(w.dtype))
