"""Peak memory of the process that asks; needs nothing but the standard library."""

from __future__ import annotations

import re
from pathlib import Path


def peak_mb() -> int | None:
    """The most memory this program ever had, in MB; None where the kernel does not say.

    `getrusage` would not do: a process keeps its `ru_maxrss` when it becomes another program, and so what is started by
    a large process begins with that one's peak. `VmHWM` begins anew.
    """
    try:
        found = re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return int(found[1]) // 1024 if found else None
