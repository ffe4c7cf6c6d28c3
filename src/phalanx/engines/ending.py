"""What engines do when the process ends: after its groups have left, whoever was loaded first.

Groups leave in a function of `atexit`, which calls the last that was registered first. This module
is below them, so what it registers runs after theirs.
"""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["at_the_end"]

_calls: list[Callable[[], None]] = []


def at_the_end(call: Callable[[], None]) -> None:
    """Have something called at the end of this process, when its groups need no engine more."""
    _calls.append(call)


@atexit.register
def _end() -> None:
    for call in _calls:
        call()
