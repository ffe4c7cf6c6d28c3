"""Pauses where threads hand over.

They are drawn from a seed. They do not decide the schedule, but a failure comes again with its seed
in most runs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from random import Random
from typing import Any

WORKERS = 3
# Seconds that what a program waits for may take.
LIMIT = 30.0
_PAUSES = (0, 0, 0, 0, 0.0002, 0.001, 0.005)

HandOvers = tuple[tuple[Any, str], ...]
"""The functions that go on with what another thread has begun: class or module, and name."""


class Pauses:
    """The pauses of a process, drawn anew for each program."""

    def __init__(self, hand_overs: HandOvers) -> None:
        self._chosen = Random(0)
        for owner, name in hand_overs:
            setattr(owner, name, self._pausing(getattr(owner, name)))

    def draw(self, seed: str) -> None:
        """Draw other pauses from now on."""
        self._chosen = Random(seed)

    def _pausing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def pause_first(*arguments: Any, **options: Any) -> Any:
            if pause := self._chosen.choice(_PAUSES):
                time.sleep(pause)
            return function(*arguments, **options)

        return pause_first
