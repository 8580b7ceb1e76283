"""fedstrata: layer-aware federated learning.

`__init__.pyi` lists the public names. Each is imported when it is first used, so that the command line answers before
torch is loaded.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
