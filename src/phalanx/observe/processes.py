"""What the kernel says of a process: one look into /proc.

psutil would say the same, but not when a process started in the clock that black boxes use, by
which a pid that has come round is told from the rank that had it.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from phalanx.observe.model import Process

__all__ = ["Looked", "look"]

_STATES = {
    "R": "running",
    "S": "sleeping",
    "I": "sleeping",
    "T": "stopped",
    "t": "stopped",
    "D": "disk",
    "Z": "zombie",
    "X": "gone",
}


@dataclass(frozen=True)
class Looked:
    """A process: what it does, and for how many seconds it has lived."""

    process: Process
    age: float


def look(pid: int) -> Looked | None:
    """Look at a process; None if there is none, or only one that is hidden from this user.

    Where /proc hides the processes of others (`hidepid`), a pid that can't be looked at has come
    round to another user: it isn't the rank that had it.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The name of the program comes second, in parentheses, and may hold anything.
    fields = text[text.rindex(b")") + 2 :].split()
    ticks = os.sysconf("SC_CLK_TCK")
    state = _STATES.get(fields[0].decode(), "sleeping")
    started = int(fields[19]) / ticks
    cpu = (int(fields[11]) + int(fields[12])) / ticks
    memory = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    return Looked(Process(state, cpu, memory), age)
