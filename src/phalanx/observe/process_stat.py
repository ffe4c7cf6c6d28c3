"""The kernel's view of a process, from one read of /proc.

psutil provides the same data, but no start time in a monotonic clock. That time is needed to
distinguish a process with a reused pid from the rank that had the pid before.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from phalanx.observe.model import Process

__all__ = ["ProcessStat", "read_process_stat"]

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
class ProcessStat:
    """The state of a process, and its age in seconds."""

    process: Process
    age: float


def read_process_stat(pid: int) -> ProcessStat | None:
    """Return the state of a process; None if it does not exist or is hidden from this user.

    If /proc hides the processes of other users (`hidepid`), a hidden pid has been reused by another
    user's process: it is no longer the rank's.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The second field is the program's name in parentheses, which may contain any character.
    fields = text[text.rindex(b")") + 2 :].split()
    ticks = os.sysconf("SC_CLK_TCK")
    state = _STATES.get(fields[0].decode(), "sleeping")
    started = int(fields[19]) / ticks
    cpu = (int(fields[11]) + int(fields[12])) / ticks
    memory = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    return ProcessStat(Process(state, cpu, memory), age)
