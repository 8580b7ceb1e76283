"""What is learned: data sets, partitions, models, and a user's own. `__init__.pyi` lists the public names."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
