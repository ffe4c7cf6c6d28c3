"""Exceptions and their messages for the failures that the core reports."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, Any

from phalanx import _native
from phalanx.backend import peer_state
from phalanx.backend.call_site import brief
from phalanx.backend.dtypes import NAMES, OP_NAMES
from phalanx.errors import (
    Aborted,
    CollectiveMismatch,
    CollectiveTimeout,
    PeerLost,
    PhalanxError,
)
from phalanx.observe.escape import escape
from phalanx.system.signals import signal_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.hierarchical.group_failure import Told


_MOST_WHEREABOUTS = 8
"""The maximum number of late ranks that an error describes; `phalanx explain` describes all."""


_ENDED = ("", "Z", "X")
"""The states of a process that has ended, as `witness.state_of` returns them."""


_KINDS = {
    "peer_lost": PeerLost,
    "mismatch": CollectiveMismatch,
    "deadlock": CollectiveMismatch,
    "left": CollectiveMismatch,
    "timeout": CollectiveTimeout,
    "aborted": Aborted,
    "interrupted": Aborted,
}


_ECHOED = {
    "PeerLost": "peer_lost",
    "CollectiveMismatch": "mismatch",
    "CollectiveTimeout": "timeout",
}
"""Native codes by exception class name, the prefix of an abort reason from another group."""


class HostsWords:
    """The error messages of a group that spans hosts (see `hosts.failing`)."""

    def __init__(self, group: Callable[[], _native.Group]) -> None:
        self._group = group

    def explained(self, status: Any, timeout: float) -> tuple[str, str]:
        """Return the kind of the failure, as a native code, and the text of its error."""
        group = self._group()
        if status.code == "aborted":
            name, _, words = peer_state.reason(group, status.reporter).partition(": ")
            if name in _ECHOED:
                return _ECHOED[name], words
        return status.code, _explain(status, group, timeout)[1]

    def reason(self, told: Told) -> str:
        """Return the reason with which to abort this host's group, as `explained` interprets it."""
        kind = _KINDS.get(told.code, PhalanxError)
        return f"{kind.__name__}: {told.words}" if kind.__name__ in _ECHOED else told.words

    def operation(self, fingerprint: Any, site: str) -> str:
        """Return the text for an operation and its call site."""
        return _operation(fingerprint) + self.ending(site)

    def ending(self, site: str) -> str:
        """Return text such as " at train.py:77", or "" without a call site."""
        return f" at {escape(brief(site))}" if site else ""


def error_for(
    status: _native.Status | Told,
    group: _native.Group,
    place: str,
    operation: str,
    timeout: float,
) -> PhalanxError:
    """Return the exception for a status.

    Args:
        status: The failure that the core, or a group that spans hosts, reports.
        group: The group, which knows the pids of its ranks and how processes ended.
        place: This rank, as in "rank 2/8".
        operation: The operation of this rank with its call site, as text.
        timeout: The timeout of this operation in seconds.
    """
    words = getattr(status, "words", None)
    if words is None:
        kind, text = _explain(status, group, timeout)  # type: ignore[arg-type]
    else:  # the text comes from a rank of this host or of another one
        kind, text = _KINDS.get(status.code, PhalanxError), words
    return kind(f"[{place} on {socket.gethostname()}] {operation}: {text}")


def unfinished(
    group: _native.Group, rank: int, place: str, operation: str, seconds: float, called: float
) -> CollectiveTimeout:
    """Return the exception for a wait that timed out while its operation continues.

    Args:
        group: The group, which knows the ranks that the operation waits for.
        rank: This rank in the group.
        place: This rank as text, as in "rank 2/8".
        operation: The operation with its call site, as text.
        seconds: The timeout of the wait, in seconds.
        called: The time at which the operation was called, in monotonic seconds.
    """
    late = [] if group.closed else group.ranks_behind(rank)
    names = ", ".join(peer_state.named(group, other) for other in late) or "its peers"
    return CollectiveTimeout(
        f"[{place} on {socket.gethostname()}] {operation}: rank {rank} waited for {names} until "
        f"the timeout of {seconds:g} s of this wait, {time.monotonic() - called:.1f} s after the "
        f"call{_places(group, late)}; the operation goes on, and can be waited for again"
    )


def left_behind(place: str, what: str) -> Aborted:
    """Return the exception for an operation that was in progress when this rank left the group."""
    return Aborted(
        f"[{place} on {socket.gethostname()}] {what}: this rank has left the group "
        "(destroy_process_group) before the operation ended: wait for its work first"
    )


def absence(world: Any, member: int, holder: str) -> str:
    """Describe a rank that is missing while a group is formed, in a predicate without a subject.

    Args:
        world: The default group, which the rank is in already; None if it is not one of Phalanx.
        member: The rank's number in the default group.
        holder: The process that has claimed the rank, as in "pid 812 on node-a", or empty.
    """
    one_host = world is None or isinstance(world, _native.Group)
    host = "" if one_host else world.host(member)
    if host:
        return f"(pid {world.pid(member)} on {host}) has given no sign yet"
    if world is not None:
        ended = peer_state.state_of(world.pid(member)) in _ENDED
        words = _ending(world, member) if ended else peer_state.whereabouts(world, member)
        return f"(pid {world.pid(member)}) {words}"
    if not holder:
        return "has given no sign yet"
    _, pid, _, host = holder.split(" ", 3)
    state = peer_state.state_of(int(pid)) if host == socket.gethostname() else "?"
    if state in _ENDED:
        return f"({holder}) has come, and ended"
    stopped = state in ("T", "t")
    return f"({holder}) has come, and {'is stopped by a signal' if stopped else 'not got in'}"


def other_end(kind: str, peer: int, tag: int) -> str:
    """Return text for the peer and tag of a message; a negative `peer` means any rank."""
    rank = f"rank {peer}" if peer >= 0 else "any rank"
    return f"{'to' if kind == 'send' else 'from'} {rank} tag {tag}"


def _explain(
    status: _native.Status, group: _native.Group, timeout: float
) -> tuple[type[PhalanxError], str]:
    peer, reporter = status.peer, status.reporter
    match status.code:
        case "peer_lost":
            return PeerLost, (
                f"{peer_state.named(group, peer)} {_ending(group, peer)}"
                f"{peer_state.last_deed(group, peer)}"
            )
        case "mismatch" if status.mine.kind == "all_to_all" and status.mine.root >= 0:
            return CollectiveMismatch, (
                f"split sizes disagree in all_to_all #{status.mine.sequence}: rank {peer} gives "
                f"rank {reporter} {status.theirs.count} elements"
                f"{peer_state.site_of(group, peer, status.theirs)}, which expects "
                f"{status.mine.count}{peer_state.site_of(group, reporter, status.mine)}"
            )
        case "mismatch":
            return CollectiveMismatch, (
                f"ranks disagree: rank {reporter} is in {_placed(status.mine, group, reporter)}, "
                f"rank {peer} in {_placed(status.theirs, group, peer)}"
            )
        case "deadlock":
            return CollectiveMismatch, peer_state.reason(group, reporter) or (
                f"rank {reporter} found that ranks wait for each other in several groups"
            )
        case "left":
            return CollectiveMismatch, (
                f"{peer_state.named(group, peer)} has left the group (destroy_process_group)"
                f"{peer_state.leaving_site(group, peer)} "
                f"while rank {reporter} is in {_placed(status.mine, group, reporter)}"
            )
        case "timeout":
            return CollectiveTimeout, _too_late(status, group, timeout)
        case "aborted":
            where, why = (
                peer_state.leaving_site(group, reporter),
                peer_state.reason(group, reporter),
            )
            return Aborted, (
                f"the group was aborted by rank {reporter}{where}{': ' + why if why else ''}"
            )
        case "interrupted":
            words = "" if group.closed else peer_state.last_words(group, reporter)
            how = f" ({words})" if words else ""
            return Aborted, (
                f"rank {reporter} was interrupted{how} in {_placed(status.mine, group, reporter)}"
            )
        case "out_of_memory":
            return PhalanxError, (
                f"rank {reporter} could not get memory for its part of the segment "
                f"({os.strerror(status.error)}): free memory, or use fewer ranks or groups"
            )
        case _:
            return PhalanxError, f"system error on rank {reporter}: {os.strerror(status.error)}"


def _too_late(status: _native.Status, group: _native.Group, timeout: float) -> str:
    if status.peer == status.reporter:
        return (
            f"rank {status.reporter} waited for its own turn until the timeout of {timeout:g} s: "
            "another thread of it is in an operation of this group"
        )
    late = _late(status, group)
    names = ", ".join(peer_state.named(group, rank) for rank in late) or "any rank"
    operation = _placed(status.mine, group, status.reporter)
    words = (
        f"rank {status.reporter} waited for {names} in {operation} until the timeout of "
        f"{timeout:g} s on this rank"
    )
    return words + _places(group, late)


def _places(group: _native.Group, late: list[int]) -> str:
    """Return text about the whereabouts of late ranks."""
    words = ""
    for rank in late[:_MOST_WHEREABOUTS]:
        if not group.closed:
            words += f"; rank {rank} {peer_state.whereabouts(group, rank)}"
    if (others := len(late) - _MOST_WHEREABOUTS) > 0:
        words += f"; where {others} more are, phalanx explain tells"
    return words


def _late(status: _native.Status, group: _native.Group) -> list[int]:
    """Return the ranks that a rank waited for until its deadline: all late ones in a collective."""
    if status.mine.kind not in ("send", "recv") and not group.closed:
        late = group.ranks_behind(status.reporter)
        if late:
            return late
    return [status.peer] if status.peer >= 0 else []


def _ending(group: _native.Group, peer: int) -> str:
    """Describe the end of a process, as far as a process that is not its parent can know it."""
    words = peer_state.last_words(group, peer)
    if words:
        return f"failed with {words}"
    wait_status = None if group.closed else group.wait_status(peer)
    if wait_status is None:
        failing = not group.closed and group.is_failing(peer)
        return "failed with an exception that nobody caught" if failing else "has died"
    code = os.waitstatus_to_exitcode(wait_status)
    if code < 0:
        return f"was killed by {signal_name(-code)}"
    return f"exited with code {code}"


def _placed(fingerprint: _native.Fingerprint, group: _native.Group, rank: int) -> str:
    return _operation(fingerprint) + peer_state.site_of(group, rank, fingerprint)


def _operation(fingerprint: _native.Fingerprint) -> str:
    """Format an operation, as in "all_reduce #41 float32[1024] SUM"."""
    kind = fingerprint.kind
    if kind == "none":
        return "no operation"
    shape = f"{NAMES[fingerprint.dtype]}[{fingerprint.count}]"
    if kind in ("send", "recv"):
        # For messages, this field is the tag.
        return f"{kind} {shape} {other_end(kind, fingerprint.root, fingerprint.sequence)}"
    number = f" #{fingerprint.sequence}" if fingerprint.sequence else ""
    if kind == "barrier":
        return f"barrier{number}"
    if kind == "all_to_all":
        return f"all_to_all{number} {NAMES[fingerprint.dtype]}"
    words = f"{kind}{number} {shape}"
    if fingerprint.op:
        words += f" {OP_NAMES[fingerprint.op]}"
    return f"{words} root {fingerprint.root}" if fingerprint.root >= 0 else words
