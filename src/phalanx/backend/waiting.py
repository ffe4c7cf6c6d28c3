"""How the main thread waits for what a group's thread does.

A wait that lasts is shown in the black box and looked at, since it may be part of a ring of waits
(see `ring`). The waits of blocking collectives the core looks at itself, as seldom as these.
"""

from __future__ import annotations

import contextlib
import threading
import time

from phalanx import _native
from phalanx.backend import lifetime
from phalanx.errors import UsageError

SHORT = 0.3
"""Seconds of a wait that nobody is told of."""
_FIRST_LOOK = 1.0
_SECOND_LOOK = 0.5
_GROUP = 1


def until(ended: threading.Event, native: _native.Group) -> None:
    """Block until an operation has ended, after `SHORT` seconds of doing so.

    Args:
        ended: When it has.
        native: The group whose thread does it, or what was queued there before.
    """
    if threading.current_thread() is not threading.main_thread():
        ended.wait()
        return
    waited, look = SHORT, _FIRST_LOOK
    begin = time.monotonic() - waited
    try:
        _show(ended, native)
        while not ended.wait(look - waited):
            _show(ended, native)
            suspected = _look()
            waited = time.monotonic() - begin
            look = waited + _SECOND_LOOK if suspected else 2 * waited
    finally:
        _native.main_waits(0)


def _show(ended: threading.Event, native: _native.Group) -> None:
    """Say in the black box what the main thread waits for, if nothing else can end that wait.

    What other groups have under way or queued could: a future's callback may call anything.
    """
    number = 0
    # Another thread may leave the group meanwhile.
    with contextlib.suppress(ValueError):
        number = _under_way(native)
    # What was under way before the operation had ended came before it, or is it.
    over = ended.is_set() or lifetime.busy_elsewhere(native)
    _native.main_waits(0 if over else number)


def _under_way(native: _native.Group) -> int:
    """The number of the collective that a group's thread is in; 0: none."""
    box = native.black_box(native.rank, 0)
    if box is None:
        return 0
    identities = {i: note["identity"] for i, note in enumerate(box["groups"])}
    for each in box["open"]:
        if each["thread"] == _GROUP and identities.get(each["group"]) == native.identity:
            return int(each["number"])
    return 0


def _look() -> bool:
    with contextlib.suppress(ValueError, UsageError):
        return lifetime.look_for_rings()
    return False
