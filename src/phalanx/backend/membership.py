"""The membership of this rank in a group: the state and threads of the group, and its end.

A script that ends without `destroy_process_group()` must end cleanly, so the threads are stopped
while the interpreter still runs. The group is not left: peers that still need this rank learn of
its death, with the exit code as the reason. A forked child (a DataLoader's worker) inherits the
object, but not the membership.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from torch.distributed import Work

from phalanx import _native
from phalanx.backend import deadlock_detector
from phalanx.backend.threads import CollectiveThread, MessageThread
from phalanx.errors import UsageError
from phalanx.observe import exception_hook, recorder

_STOP_SECONDS = 2.0
"""The time that operations of a broken group have to end, in seconds."""
_LOOK_SECONDS = 0.2
_NOTICE_SECONDS = 5.0
"""The time after which a rank that cannot leave yet says why, in seconds."""
_logger = logging.getLogger("phalanx")
_Error = TypeVar("_Error", bound=BaseException)
_LEFT_ERRORS = (ValueError, UsageError)
"""Errors of a group that another thread leaves in the meantime."""


class Failures:
    """The errors of a group's operations that the user has not seen.

    The first of them is raised when the group is left. Once an error has been raised anywhere, all
    others of the group are its consequences.
    """

    def __init__(self) -> None:
        self._first: BaseException | None = None
        self._is_known = False

    def seen(self, error: _Error) -> _Error:
        """Note that the user gets an error, and return it."""
        self._is_known = True
        return error

    def unseen(self, error: BaseException) -> None:
        """Keep the error of an operation for which nobody has waited, if it is the first."""
        if self._first is None:
            self._first = error

    def take(self) -> BaseException | None:
        """Return the first error, once; None if there is none, or the user knows of a failure."""
        first, self._first = self._first, None
        return None if self._is_known else first


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
        self.failures = Failures()
        self.complete_messages: Callable[[], Callable[[], None] | None] = _nothing
        """A weak reference to the function that completes the group's messages."""
        self.coalesced_works: list[Work] | None = None
        """The works of the operations that are being coalesced."""
        self.collective_thread = CollectiveThread(f"phalanx-{name}-collectives", self)
        self.message_thread = MessageThread(f"phalanx-{name}-messages", native)
        _memberships.add(self)

    def leave(self) -> None:
        """Leave the group and notify its peers; the threads must have been stopped."""
        self.native.close()
        self.native = UnusableGroup(
            "this rank has left the process group (destroy_process_group, shutdown or abort): "
            "form another one with init_process_group or new_group"
        )

    def complete(self) -> None:
        """Wait until the operations under way have ended, each within its own deadline.

        Receives for which no message has come are given up. Does nothing if the group is broken.
        """
        begin, has_noticed = time.monotonic(), False
        if self.native.failure() is None:
            self.collective_thread.stop(0.0)
        while self.native.failure() is None and not self.collective_thread.join(_LOOK_SECONDS):
            if not has_noticed and time.monotonic() - begin > _NOTICE_SECONDS:
                has_noticed = True
                _logger.warning(
                    "[%s] leaves the group when its %d asynchronous collectives have ended, or "
                    "with their timeout",
                    self.rank_label,
                    self.pending,
                )
        if self.native.failure() is None and (complete := self.complete_messages()) is not None:
            complete()

    def stop_threads(self, grace_seconds: float = _STOP_SECONDS) -> None:
        """End the group's threads; operations that do not end in time abort the group.

        Those of a group that works have been completed before.
        """
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


def _nothing() -> None:
    return None


_memberships: weakref.WeakSet[Membership] = weakref.WeakSet()
_inherited_groups: list[_native.Group] = []


def _native_groups() -> list[_native.Group]:
    """Return all groups that this process has not left."""
    return [each.native for each in list(_memberships) if not each.native.closed]


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
    with contextlib.suppress(*_LEFT_ERRORS):
        return deadlock_detector.detect_deadlock(_native_groups())
    return False


def propagate_deadlock(native: _native.Group) -> None:
    """Pass a deadlock that broke `native` on to other ranks, before this rank raises the error."""
    with contextlib.suppress(*_LEFT_ERRORS):
        deadlock_detector.propagate_deadlock(native, _native_groups())


def _mark_failed(reason: str = "") -> None:
    # An exception ends this process, so peers need not wait for its exit. All groups are marked
    # before any peer is woken: a woken peer may leave its other groups at once, and the ranks of
    # those must see this rank as the cause.
    natives = _native_groups()
    for wake in (False, True):
        for native in natives:
            native.fail(wake, reason)


def _stop_at_exit() -> None:
    # After an uncaught exception, peers should learn of this rank's end at once.
    is_failing = hasattr(sys, "last_value")
    for membership in list(_memberships):
        native = membership.native
        if not native.closed:
            if not is_failing:
                membership.complete()
            membership.stop_threads(0.0 if is_failing else _STOP_SECONDS)
            error = membership.failures.take()
            if error is not None and not is_failing:
                sys.stderr.write(f"phalanx: {error}\n")
            if not isinstance(native, _native.Group):  # it has connections to other hosts
                native.disconnect(abrupt=is_failing)
    recorder.close()


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
atexit.register(_stop_at_exit)
os.register_at_fork(after_in_child=_replace_in_child)
