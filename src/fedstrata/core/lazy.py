"""torch, imported with the first look into it: whoever only reads recipes and runs does not wait for it.

    from fedstrata.core.lazy import torch

And `plots`, which is above runs and draws them: a run only hands itself over.

Modules that reading needs take torch from here: rules and models, which `fedstrata list` describes, randomness, run
directories. Modules that only compute import it themselves.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any


class _Lazy:
    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, attribute: str) -> Any:
        module = import_module(self.__name__)
        self.__dict__ = module.__dict__  # the module's own: found at once from now on, and never out of date
        return getattr(module, attribute)


plots: Any = _Lazy("fedstrata.plots")

if TYPE_CHECKING:
    import torch as torch
    from torch import nn as nn
else:
    torch, nn = _Lazy("torch"), _Lazy("torch.nn")
