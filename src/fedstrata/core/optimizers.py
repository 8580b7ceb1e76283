"""Any optimizer of `torch.optim` by name, and its options, checked against the class's signature.

Nothing here is called for plain SGD and Adam, so that a recipe with these is checked without torch.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fedstrata.core.errors import BadValue, require
from fedstrata.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

_REFUSED = {
    "lbfgs": "needs a closure that computes the loss again, and local training has none",
    "sparseadam": "takes sparse gradients only, and local training makes them dense",
}


def make_optimizer(
    name: str, parameters: Iterable[Tensor], own: Mapping[str, float], options: Mapping[str, Any]
) -> Optimizer:
    """One of them. Of `own` (lr, momentum, weight_decay) it is given what its class takes; the options go with it."""
    make: Any = _class(name)
    made: Optimizer = make(parameters, **{key: own[key] for key in own if key in _signature(name)} | dict(options))
    return made


def check_optimizer(name: str, own: Mapping[str, float], options: Mapping[str, Any]) -> None:
    """Raise `BadValue` if there is no such optimizer, or it cannot be made and take a step with these arguments."""
    cls, known = _class(name).__name__, _signature(name)
    for key, value in own.items():
        require(key in known or not value, key, value, f"is no option of {cls}")
    for key, value in options.items():
        field = f"optimizer_options.{key}"
        require(key not in own, field, value, f"has a key of its own: write training.{key}")
        require(key in known, field, value, f"{cls} has no such option{_guess(key, known)}")
        default = known[key].default
        is_right = default is None or isinstance(value, bool) is isinstance(default, bool)
        require(is_right, field, value, f"must {'' if isinstance(default, bool) else 'not '}be true or false")
        _try(name, own, {key: value}, field, value)
    _try(name, own, options, "optimizer_options", dict(options))


def _class(name: str) -> type[Optimizer]:
    """The class of `torch.optim` with this name, whatever its case."""
    require(name not in _REFUSED, "optimizer", name, _REFUSED.get(name, ""))
    classes = [cls for cls in vars(torch.optim).values() if isinstance(cls, type)]
    classes = [cls for cls in classes if issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer]
    known = {cls.__name__.lower(): cls for cls in classes if cls.__name__.lower() not in _REFUSED}
    there_are = f"is no class of torch.optim{_guess(name, known)}; there are: {', '.join(sorted(known))}"
    require(name in known, "optimizer", name, there_are)
    return known[name]


def _signature(name: str) -> dict[str, inspect.Parameter]:
    _, *parameters = inspect.signature(_class(name)).parameters.values()  # the first one is what it moves
    return {parameter.name: parameter for parameter in parameters}


def _try(name: str, own: Mapping[str, float], options: Mapping[str, Any], field: str, value: object) -> None:
    """Make one, and take a step: torch looks at some values only then."""
    weight = torch.zeros(2, 2, requires_grad=True)
    weight.grad = torch.zeros(2, 2)
    try:
        make_optimizer(name, [weight], own, options).step()
    except Exception as error:  # of whatever kind torch raises
        raise BadValue(field, value, f"is refused by {_class(name).__name__}: {error}") from None


def _guess(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
