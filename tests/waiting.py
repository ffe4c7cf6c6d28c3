"""Waiting for a condition that another thread or process fulfils, by polling with a limit."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["stop", "stopped", "wait_for"]


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until a condition holds; fail the test after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"still waiting after {seconds:g} s"
        time.sleep(0.005)


def stop(pid: int) -> None:
    """Stop a process; return when all of its threads are stopped, a moment after the signal."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: _thread_states(pid) == {"T"})


def _thread_states(pid: int) -> set[str]:
    states = set()
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            states.add(thread.read_text().rsplit(") ", 1)[1][0])
    return states


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process within the block."""
    try:
        stop(pid)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
