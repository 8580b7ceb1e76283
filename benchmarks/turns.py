"""One process from start to end: its seconds, the processor's seconds, and what other processes used meanwhile."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TIMEOUT = 1800
QUIET = 0.1
"""A turn is marked where others had more than this share of the machine."""


def family_seconds(pid: int) -> float:
    """The processor's seconds, user and system, of a running process and all that it started."""
    children: dict[int, list[int]] = {}
    reaped: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            fields = path.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
            reaped[int(path.parent.name)] = sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")
    total, members = 0.0, [pid]
    for member in members:
        members += children.get(member, [])
        with suppress(OSError):
            total += time.clock_gettime((~member << 3) | 2) + reaped.get(member, 0.0)  # Linux's clock of a process
    return total


def reaped_seconds() -> float:
    """The processor's seconds of all processes of ours that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def machine_seconds() -> float:
    """What all cores have worked since the machine started, for us, for others, and for other machines on the host."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class Turn:
    """A process that is measured from its start on."""

    def __init__(self, command: Iterable[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in `follow`
        self._reaped, self._machine, self._own = reaped_seconds(), machine_seconds(), time.process_time()
        self._start = time.perf_counter()
        self.process = subprocess.Popen(
            [*command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )

    def used(self) -> dict[str, Any]:
        """Seconds so far by the clock and of the processor, and the share of the machine that others had."""
        wall, everybody = time.perf_counter() - self._start, machine_seconds() - self._machine
        cpu = reaped_seconds() - self._reaped + family_seconds(self.process.pid)
        others = (everybody - cpu - (time.process_time() - self._own)) / (wall * (os.cpu_count() or 1))
        neighbours = round(max(0.0, others), 3)
        return {"wall": wall, "cpu": cpu, "neighbours": neighbours, "marked": neighbours > QUIET}

    def go_on(self) -> None:
        """Answer a process that waits for a line."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def follow(self, on_line: Callable[[str], None]) -> str | None:
        """Hand over every line it prints, until it ends. What went wrong, if anything."""
        timer = threading.Timer(TIMEOUT, os.killpg, (self.process.pid, signal.SIGTERM))
        timer.start()
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                on_line(line)
        code = self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        timer.cancel()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        self._errors.close()
        return f"exit code {code}: {lines[-1] if lines else 'no message'}" if code else None


def say(workload: str, system: str, turn: dict[str, Any], text: str) -> None:
    """One turn as a line in the terminal."""
    if turn.get("marked"):
        text += f" (MARKED: others used {turn['neighbours']:.0%} of the machine)"
    print(f"{workload:18s} {system.strip():22s} {turn.get('error') or text}", flush=True)
