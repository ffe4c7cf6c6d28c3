"""Waiting for a condition that another thread or process fulfils, by polling with a limit."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["wait_for"]


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until a condition holds; fail the test after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"still waiting after {seconds:g} s"
        time.sleep(0.005)
