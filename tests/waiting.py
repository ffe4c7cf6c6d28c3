"""Waiting for a condition that another thread or process fulfils, by polling with a limit."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["once_blocked", "stop", "stopped", "wait_for"]


def wait_for(condition: Callable[[], object], seconds: float = 90.0) -> None:
    """Wait until a condition holds; fail the test after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"still waiting after {seconds:g} s"
        time.sleep(0.005)


def once_blocked(action: Callable[[], object]) -> threading.Thread:
    """Call `action` in another thread as soon as the calling thread sleeps in a wait.

    That is what a signal or a death "during the wait" needs, however long the caller takes to get
    there. The kernel shows it: the thread sleeps, and has hardly run since the look before. It does
    not wait for the interpreter's lock, which is free between the looks.
    """
    task = Path(f"/proc/self/task/{threading.get_native_id()}")

    def is_asleep() -> bool:
        return task.joinpath("stat").read_text().rpartition(") ")[2][0] == "S"

    def run_time() -> float:
        return int(task.joinpath("schedstat").read_text().split()[0]) / 1e9

    def watch() -> None:
        while True:
            before, start = run_time(), time.monotonic()
            time.sleep(0.01)
            if is_asleep() and run_time() - before < 0.1 * (time.monotonic() - start):
                break
        action()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


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
