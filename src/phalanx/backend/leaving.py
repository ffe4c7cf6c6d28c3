"""The way a rank leaves a group: it completes what it has posted.

Collectives and sends are completed, as long as their peers take part and within the timeout of the
group. Then the rank announces that it posts no more. A receive is completed if its message comes,
and is given up when none can come, since all ranks that might send it have left or announced the
same; so two ranks that wait for messages of each other leave. Nobody has waited for such a receive,
so it is no failure. All other failures that nobody has seen are raised by `destroy_process_group`.

A script that ends without `destroy_process_group()` does the same, with two differences. Nobody can
use what a receive brings, so receives are given up at once. And the group is not left: peers that
still need this rank learn of its death, with the exit code as the reason. The threads are stopped
while the interpreter still runs. Only if the process must run on for other processes, as one with
their relay, the group is left after all.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import time
from collections.abc import Callable

from phalanx import _native
from phalanx.backend import known_failures
from phalanx.backend.failure import left_group_error
from phalanx.backend.membership import LEFT_ERRORS, Membership, memberships
from phalanx.backend.work import MessageWork
from phalanx.recorder import flight_recorder
from phalanx.system.polling import attempts
from phalanx.transports.shutdown_hooks import register_wait_hook

_logger = logging.getLogger("phalanx")
_LONGEST_PAUSE = 0.01
_NOTICE_SECONDS = 5.0
"""The time after which a rank that cannot leave yet says why, in seconds."""
_ANY_SOURCE = -1


class _Leaving:
    """A rank on its way out of a group.

    Args:
        membership: The membership of the rank.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._native = membership.native
        self._begin = time.monotonic()
        self._is_announced = False

    def complete_collectives(self) -> None:
        """Wait until all have ended, for as long as one after the other does."""
        membership = self._membership
        membership.collective_thread.hand_over()
        left = membership.pending
        while left and self._wait(lambda count=left: membership.pending < count):  # type: ignore[misc]
            left = membership.pending if self._native.failure() is None else 0

    def complete_sends(self) -> None:
        """Wait until all sends have ended; those that do not, break the group."""
        sends = [work for work in list(self._membership.messages) if work.is_send]
        if not self._wait(lambda: all(work.is_completed() for work in sends)):
            _fail_first(sends)

    def find_lost_sends(self) -> None:
        """Notice which sends have ended with the failure that broke the group."""
        for work in list(self._membership.messages):
            if work.is_send:
                work.is_completed()

    def complete_receives(self) -> None:
        """Wait until all receives have ended or are given up; the others break the group."""
        receives = [work for work in list(self._membership.messages) if not work.is_send]
        if receives:
            self._native.begin_leaving()
        if not self._wait(lambda: all(self._is_over(work) for work in receives)):
            _fail_first(receives)

    def _is_over(self, work: MessageWork) -> bool:
        source = work.source_rank()
        size = len(self._membership.members)
        sources = range(size) if source == _ANY_SOURCE else (source,)
        # In this order: what a rank had sent before it announced its end has come.
        is_hopeless = all(map(self._native.posts_no_more, sources))
        error = left_group_error(self._membership, "a message")
        return work.is_completed() or (is_hopeless and work.give_up(error))

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """Return True when the condition is true or the group broken; False after its timeout."""
        end = time.monotonic() + self._membership.timeout
        for _ in attempts(end, longest=_LONGEST_PAUSE):
            if self._native.failure() is not None or condition():
                return True
            if not self._is_announced and time.monotonic() - self._begin > _NOTICE_SECONDS:
                self._is_announced = True
                _logger.warning("[%s] %s", self._membership.rank_label, self._describe())
        return False

    def _describe(self) -> str:
        messages = [work for work in list(self._membership.messages) if not work.is_completed()]
        sends = sum(work.is_send for work in messages)
        counts = {
            "collectives": self._membership.pending,
            "sends": sends,
            "receives": len(messages) - sends,
        }
        parts = ", ".join(f"{kind}: {count}" for kind, count in counts.items() if count)
        return (
            f"has waited for {_NOTICE_SECONDS:g} s to leave group '{self._membership.name}', since "
            f"other ranks have not come to operations that it has begun ({parts}). It leaves when "
            "these have ended, or failed by their timeout"
        )


def complete(membership: Membership, *, at_exit: bool = False) -> None:
    """Complete the operations under way, before this rank leaves a group.

    In a broken group, they have failed. Does nothing if the program knows of a failure. Blocks for
    at most the timeout of the group after the end of each operation.

    Args:
        membership: The membership of this rank in the group.
        at_exit: True at the end of a script that does not leave its groups.
    """
    status = membership.native.failure()
    if status is not None and (status.code, status.reporter) == ("interrupted", membership.rank):
        known_failures.mark_known()
    if known_failures.is_known():
        return
    leaving = _Leaving(membership)
    with contextlib.suppress(*LEFT_ERRORS):
        if status is None:
            leaving.complete_collectives()
            leaving.complete_sends()
            if not at_exit:
                leaving.complete_receives()
        leaving.find_lost_sends()


def _fail_first(works: list[MessageWork]) -> None:
    """End the wait for the first work that has not ended, whose deadline has passed."""
    for work in works:
        if not work.is_completed():
            work.finish(0.0)
            return


def _stop_at_exit() -> None:
    # After an uncaught exception, peers should learn of this rank's end at once.
    is_failing = hasattr(sys, "last_value")
    for membership in memberships():
        if not is_failing:
            complete(membership, at_exit=True)
        membership.stop_threads(0.0 if is_failing else None)
        if not isinstance(membership.native, _native.Group):  # it has connections to other hosts
            membership.native.disconnect(abrupt=is_failing)
    if (error := known_failures.take()) is not None and not is_failing:
        sys.stderr.write(f"phalanx: an operation that nobody waited for failed: {error}\n")
    flight_recorder.close()


def _leave_before_wait() -> None:
    for membership in memberships():
        membership.leave()


register_wait_hook(_leave_before_wait)
atexit.register(_stop_at_exit)
