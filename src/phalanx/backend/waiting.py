"""Waits of the main thread for operations of a group's thread.

A long wait is shown in the flight recorder and checked for deadlocks across groups (see `ring`). The core
checks the waits of blocking collectives itself, at the same intervals.
"""

from __future__ import annotations

import contextlib
import threading
import time

from phalanx import _native
from phalanx.backend import lifetime
from phalanx.errors import UsageError

SHORT = 0.3
"""The length of a wait, in seconds, before it is shown in the flight recorder."""
_FIRST_LOOK = 1.0
_SECOND_LOOK = 0.5
_GROUP = 1


def until(ended: threading.Event, native: _native.Group) -> None:
    """Block until an operation has ended; the caller has already waited for `SHORT` seconds.

    Args:
        ended: The event that is set when the operation has ended.
        native: The group whose thread runs the operation, or runs those queued before it.
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
        _native.set_main_thread_wait(0)


def _show(ended: threading.Event, native: _native.Group) -> None:
    """Show in the flight recorder what the main thread waits for, if nothing else can end that wait.

    Operations of other groups, in progress or queued, could end it: a future's callback may call
    anything.
    """
    number = 0
    # Another thread may leave the group in the meantime.
    with contextlib.suppress(ValueError):
        number = _under_way(native)
    # Checked after `_under_way`: if the operation has not ended yet, the number read above is that
    # of this operation or an earlier one.
    over = ended.is_set() or lifetime.busy_elsewhere(native)
    _native.set_main_thread_wait(0 if over else number)


def _under_way(native: _native.Group) -> int:
    """Return the number of the collective that the group's thread is in; 0 if there is none."""
    box = native.flight_recorder(native.rank, 0)
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
