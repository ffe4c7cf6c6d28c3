"""The handling of groups at process exit and in forked children.

A script that ends without `destroy_process_group()` must end cleanly, so the threads are stopped
while the interpreter still runs. The group is not left: peers that still need this rank learn of
its death, with the exit code as the reason. A forked child (a DataLoader's worker) inherits the
object, but not the membership.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from phalanx import _native
from phalanx.backend import deadlock_detector
from phalanx.errors import UsageError
from phalanx.observe import exception_hook, recorder

if TYPE_CHECKING:
    from phalanx._native import Group as NativeGroup
    from phalanx.backend.progress import CollectiveThread


class ManagedGroup(Protocol):
    """A process group as this module sees it."""

    hosts: tuple[tuple[int, ...], ...]
    _native: NativeGroup
    _collective_thread: CollectiveThread

    def stop_threads(self, grace_seconds: float | None = None) -> None:
        """End the group's threads; operations that do not end in time abort the group."""

    def replace_native(self, native: Any) -> None:
        """Replace the native group by another object."""


_groups: weakref.WeakSet[ManagedGroup] = weakref.WeakSet()
_inherited_groups: list[_native.Group] = []


def register(group: ManagedGroup) -> None:
    """Handle a group at process exit and in forked children, until the group is gone."""
    _groups.add(group)


class UnusableGroup:
    """A substitute for the native part of a group that this process can no longer use."""

    closed = True

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(self._reason)


def left_group() -> UnusableGroup:
    """Return the substitute for a group that this rank has left."""
    return UnusableGroup(
        "this rank has left the process group (destroy_process_group, shutdown or abort): "
        "form another one with init_process_group or new_group"
    )


def _inherited_group(parent: int) -> UnusableGroup:
    return UnusableGroup(
        f"this process group belongs to process {parent}; process {os.getpid()}, forked "
        "from it, can't use it: communicate in the parent, or start ranks with phalanx.launch"
    )


def _stop_at_exit() -> None:
    # After an uncaught exception, peers should learn of this rank's end at once.
    grace_seconds = 0.0 if hasattr(sys, "last_value") else None
    for group in list(_groups):
        if not group._native.closed:
            group.stop_threads(grace_seconds)
            if len(group.hosts) > 1:
                native: Any = group._native
                native.disconnect(abrupt=grace_seconds is not None)
    recorder.close()


def fail_all_groups(error: BaseException) -> None:
    """Report this process as lost to its peers in all its groups, though it may continue."""
    reason = exception_hook.SESSION_ENDED + exception_hook.format_exception(error)
    _mark_failed(reason)
    for native in _native_groups():
        native.abort(reason)  # ends operations of its own threads


def _mark_failed(reason: str = "") -> None:
    # An exception ends this process, so peers need not wait for its exit. All groups are marked
    # before any peer is woken: a woken peer may leave its other groups at once, and the ranks of
    # those must see this rank as the cause.
    natives = _native_groups()
    for wake in (False, True):
        for native in natives:
            native.fail(wake, reason)


def _native_groups() -> list[_native.Group]:
    return [group._native for group in list(_groups) if not group._native.closed]


def has_collectives_elsewhere(native: _native.Group) -> bool:
    """Return whether the collective thread of a group other than `native` has pending calls."""
    return any(
        group._collective_thread.pending for group in list(_groups) if group._native is not native
    )


def detect_deadlocks() -> bool:
    """Call `deadlock_detector.detect_deadlock` with all groups of this process."""
    return deadlock_detector.detect_deadlock(_native_groups())


def propagate_deadlock(native: _native.Group) -> None:
    """Pass a deadlock that broke `native` on to other ranks, before this rank raises the error."""
    # Another thread may leave a group in the meantime.
    with contextlib.suppress(ValueError, UsageError):
        deadlock_detector.propagate_deadlock(native, _native_groups())


def _replace_in_child() -> None:
    parent = os.getppid()
    _native.detach_flight_recorder()
    for group in list(_groups):
        _inherited_groups.append(group._native)
        group.replace_native(_inherited_group(parent))


exception_hook.on_failure(_mark_failed)
_native.set_watcher(detect_deadlocks)
atexit.register(_stop_at_exit)
os.register_at_fork(after_in_child=_replace_in_child)
