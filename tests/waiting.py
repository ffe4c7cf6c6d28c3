"""Waiting for what another thread or process brings about: looking, with a bound."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["wait_for"]


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until a condition holds; a test that waits longer than this fails."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"still waiting after {seconds:g} s"
        time.sleep(0.005)
