"""Waits of the main thread for operations of a group's thread.

A long wait is recorded in the flight recorder and checked for deadlocks across groups (see
`deadlock_detector`). The core checks the waits of blocking collectives itself, at the same
intervals.
"""

from __future__ import annotations

import contextlib
import threading
import time

from phalanx import _native
from phalanx.backend import lifetime
from phalanx.errors import UsageError

SHORT_SECONDS = 0.3
"""The length of a wait, in seconds, before it is recorded in the flight recorder."""
_FIRST_CHECK_SECONDS = 1.0
_CONFIRMATION_SECONDS = 0.5
_GROUP_THREAD = 1


def wait_for_event(done: threading.Event, native: _native.Group) -> None:
    """Block until an operation has ended; the caller has waited for `SHORT_SECONDS` already.

    Args:
        done: The event that is set when the operation has ended.
        native: The group whose thread runs the operation, or runs those queued before it.
    """
    if threading.current_thread() is not threading.main_thread():
        done.wait()
        return
    waited, next_check = SHORT_SECONDS, _FIRST_CHECK_SECONDS
    begin = time.monotonic() - waited
    try:
        _record_wait(done, native)
        while not done.wait(next_check - waited):
            _record_wait(done, native)
            is_suspected = _detect_deadlocks()
            waited = time.monotonic() - begin
            next_check = waited + _CONFIRMATION_SECONDS if is_suspected else 2 * waited
    finally:
        _native.set_main_thread_wait(0)


def _record_wait(done: threading.Event, native: _native.Group) -> None:
    """Record the operation that the main thread waits for, if nothing else can end that wait.

    Operations of other groups, in progress or queued, could end it: a future's callback may call
    anything.
    """
    number = 0
    # Another thread may leave the group in the meantime.
    with contextlib.suppress(ValueError):
        number = _running_collective(native)
    # Checked after `_running_collective`: if the operation has not ended yet, the number read above
    # is that of this operation or an earlier one.
    is_over = done.is_set() or lifetime.has_collectives_elsewhere(native)
    _native.set_main_thread_wait(0 if is_over else number)


def _running_collective(native: _native.Group) -> int:
    """Return the number of the collective that the group's thread is in; 0 if there is none."""
    recorder = native.flight_recorder(native.rank, 0)
    if recorder is None:
        return 0
    identities = {
        index: group_record["identity"] for index, group_record in enumerate(recorder["groups"])
    }
    for operation in recorder["open"]:
        if (
            operation["thread"] == _GROUP_THREAD
            and identities.get(operation["group"]) == native.identity
        ):
            return int(operation["number"])
    return 0


def _detect_deadlocks() -> bool:
    with contextlib.suppress(ValueError, UsageError):
        return lifetime.detect_deadlocks()
    return False
