"""Measures the phases of a start, one after the other, each in seconds."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Phases:
    """The phases so far. The first begins now, or with the process.

    Attributes:
        seconds: those of each phase that has ended, by its name.
    """

    def __init__(self, *, of_process: bool = False) -> None:
        """Begin the first phase; with `of_process` it begins with the process, so that imports count."""
        self.seconds: dict[str, float] = {}
        self._began = _process_start() if of_process else _now()

    def end(self, name: str) -> None:
        """End a phase, and begin the next one."""
        now = _now()
        self.seconds[name] = now - self._began
        self._began = now

    @property
    def total(self) -> float:
        """Seconds from the beginning of the first phase to the end of the last one."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        """Return the phases and their sum in one line."""
        phases = [f"{name} {seconds:.2f}" for name, seconds in self.seconds.items()]
        return f"{', '.join(phases)}: {self.total:.2f} s"


def _now() -> float:
    """Return the seconds since the machine started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _process_start() -> float:
    """Return when this process started, in seconds since the machine did.

    psutil gives the time of day, for which Linux knows the machine's start in whole seconds only.
    """
    # The name of the program, in brackets, may hold spaces. The 22nd field is the 20th after it.
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")
