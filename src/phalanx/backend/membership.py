"""The membership of this rank in a group: the state and threads of the group.

A forked child (a DataLoader's worker) inherits the object, but not the membership.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

from torch.distributed import Work

from phalanx import _native
from phalanx.backend import deadlock_detector, known_failures
from phalanx.backend.threads import CollectiveThread, MessageThread
from phalanx.errors import UsageError
from phalanx.recorder import exception_hook

_STOP_SECONDS = 2.0
"""The time that the operations of a broken group have to end, in seconds."""
LEFT_ERRORS = (ValueError, UsageError)
"""Errors of a group that another thread leaves in the meantime."""


class Membership(_native.OperationState):
    """This rank's membership in a group.

    The base class has the state that direct calls need: `native`, `timeout`, the number `pending`
    of operations in the group's thread, and `is_direct`, which allows direct calls.

    Args:
        native: The native group, or the group that takes its place if ranks are on several hosts.
        rank: This rank in the group.
        size: World size of the group.
        name: The group's name, for the names of its threads.
        timeout: The time that an operation may wait for its peers, in seconds.
        members: Ranks in the default group by rank in the group; all if empty.
    """

    def __init__(
        self,
        native: Any,
        rank: int,
        size: int,
        name: str,
        timeout: float,
        members: Sequence[int] = (),
    ) -> None:
        super().__init__(native, timeout)
        self.rank = rank
        self.name = name
        self.members = tuple(members) or tuple(range(size))
        self.rank_label = f"rank {rank}/{size}"
        self.coalesced_works: list[Work] | None = None
        """The works of the operations that are being coalesced."""
        self.messages: set[Any] = set()
        """The works of messages under way, whose memory the core uses."""
        self.collective_thread = CollectiveThread(f"phalanx-{name}-collectives", self)
        self.message_thread = MessageThread(f"phalanx-{name}-messages", native)
        _memberships.add(self)
        known_failures.begin_anew()

    def leave(self) -> None:
        """Leave the group and notify its peers; the threads must have been stopped."""
        self.native.close()
        self.native = UnusableGroup(
            "this rank has left the process group (destroy_process_group, shutdown or abort): "
            "form another one with init_process_group or new_group"
        )

    def stop_threads(self, grace_seconds: float | None = None) -> None:
        """End the group's threads; operations that do not end in time abort the group.

        Those of a group that works have been completed before (see `leaving`).

        Args:
            grace_seconds: The time that they have, in seconds; None for the usual one.
        """
        grace_seconds = _STOP_SECONDS if grace_seconds is None else grace_seconds
        if not self.collective_thread.stop(grace_seconds):
            self.native.abort("it left with an operation in progress")
            self.collective_thread.stop(_STOP_SECONDS)
        self.message_thread.stop(_STOP_SECONDS)


class UnusableGroup:
    """A substitute for the native part of a group that this process can no longer use."""

    closed = True

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(self._reason)


_memberships: weakref.WeakSet[Membership] = weakref.WeakSet()
_inherited_groups: list[_native.Group] = []


def memberships() -> list[Membership]:
    """Return the memberships in all groups that this process has not left."""
    return [each for each in list(_memberships) if not each.native.closed]


def _native_groups() -> list[_native.Group]:
    return [each.native for each in memberships()]


def fail_all_groups(error: BaseException) -> None:
    """Report this process as lost to its peers in all its groups, though it may continue."""
    reason = exception_hook.SESSION_ENDED + exception_hook.format_exception(error)
    _mark_failed(reason)
    for native in _native_groups():
        native.abort(reason)  # ends operations of its own threads


def has_collectives_elsewhere(native: _native.Group) -> bool:
    """Return whether the collective thread of a group other than `native` has pending calls."""
    return any(each.pending for each in list(_memberships) if each.native is not native)


def detect_deadlocks() -> bool:
    """Call `deadlock_detector.detect_deadlock` with all groups of this process."""
    with contextlib.suppress(*LEFT_ERRORS):
        return deadlock_detector.detect_deadlock(_native_groups())
    return False


def propagate_deadlock(native: _native.Group) -> None:
    """Pass a deadlock that broke `native` on to other ranks, before this rank raises the error."""
    with contextlib.suppress(*LEFT_ERRORS):
        deadlock_detector.propagate_deadlock(native, _native_groups())


def _mark_failed(reason: str = "") -> None:
    # An exception ends this process, so peers need not wait for its exit. All groups are marked
    # before any peer is woken: a woken peer may leave its other groups at once, and the ranks of
    # those must see this rank as the cause.
    natives = _native_groups()
    for wake in (False, True):
        for native in natives:
            native.fail(wake, reason)


def _replace_in_child() -> None:
    reason = (
        f"this process group belongs to process {os.getppid()}; process {os.getpid()}, forked "
        "from it, can't use it: communicate in the parent, or start ranks with phalanx.launch"
    )
    _native.detach_flight_recorder()
    for membership in list(_memberships):
        _inherited_groups.append(membership.native)
        membership.native = UnusableGroup(reason)


exception_hook.on_failure(_mark_failed)
_native.set_watcher(detect_deadlocks)
os.register_at_fork(after_in_child=_replace_in_child)
