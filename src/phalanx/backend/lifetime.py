"""Groups at the end of their process, and in processes that are forked from it.

A script that ends without `destroy_process_group()` must end cleanly: the threads are stopped while
the interpreter still runs. The group is not left then: when peers still need this rank, its death
tells them so, with the exit code for a reason. A forked child (a DataLoader's worker) inherits the
object, but not the membership.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from phalanx import _native
from phalanx.backend import ring
from phalanx.errors import UsageError
from phalanx.hosts import HostsGroup
from phalanx.observe import last_words, recording

if TYPE_CHECKING:
    from phalanx.backend.membership import Membership

_groups: weakref.WeakSet[Membership] = weakref.WeakSet()
_parents_groups: list[_native.Group] = []


def register(group: Membership) -> None:
    """Look after a group until its end."""
    _groups.add(group)


class Unusable:
    """Stands where a group has its native part, once this process can't use that any more."""

    closed = True

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(self._reason)


def left() -> Unusable:
    """For a group that this rank has left."""
    return Unusable(
        "this rank has left the process group (destroy_process_group, shutdown or abort): "
        "form another one with init_process_group or new_group"
    )


def _inherited(parent: int) -> Unusable:
    return Unusable(
        f"this process group belongs to process {parent}; process {os.getpid()}, forked "
        "from it, can't use it: communicate in the parent, or start ranks with phalanx.launch"
    )


def _at_exit() -> None:
    # After an uncaught exception, peers should hear of this rank's end and not wait for it.
    patience = 0.0 if hasattr(sys, "last_value") else None
    for group in list(_groups):
        if not group._native.closed:
            group.quiesce(patience)
            native: Any = group._native
            if isinstance(native, HostsGroup):
                native.disconnect(abrupt=patience is not None)
    recording.close()


def fail(error: BaseException) -> None:
    """Have the peers in all groups of this process lose it, though it may live on."""
    why = last_words.SESSION_ENDED + last_words.words_of(error)
    _fail(why)
    for native in _natives():
        native.abort(why)  # for what its own threads have under way


def _fail(why: str = "") -> None:
    # An exception ends this process: peers that wait for it need not wait for its end. All groups
    # are told before anybody is woken: who hears of it may leave its other groups at once, and
    # their ranks must see who is to blame.
    natives = _natives()
    for wake in (False, True):
        for native in natives:
            native.fail(wake, why)


def _natives() -> list[_native.Group]:
    return [group._native for group in list(_groups) if not group._native.closed]


def busy_elsewhere(native: _native.Group) -> bool:
    """Whether the thread of another group than this one has something to do."""
    return any(group._collectives.pending for group in list(_groups) if group._native is not native)


def look_for_rings() -> bool:
    """As `ring.look`, at all groups of this process."""
    return ring.look(_natives())


def failed(native: _native.Group) -> None:
    """Tell others what they can't see, before this rank raises why its operation has failed."""
    # Another thread may leave a group meanwhile.
    with contextlib.suppress(ValueError, UsageError):
        ring.pass_on(native, _natives())


def _in_child() -> None:
    parent = os.getppid()
    _native.forget_black_box()
    for group in list(_groups):
        _parents_groups.append(group._native)
        group.replace_native(_inherited(parent))


last_words.on_failure(_fail)
_native.set_watcher(look_for_rings)
atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)
