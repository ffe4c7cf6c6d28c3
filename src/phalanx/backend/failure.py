"""Exceptions and their messages for the failures that the core reports."""

from __future__ import annotations

import functools
import os
import re
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from phalanx import _native
from phalanx.backend import peer_state
from phalanx.backend.operands import DTYPE_NAMES, OP_NAMES
from phalanx.diagnosis import formatting
from phalanx.diagnosis.model import Operation
from phalanx.errors import (
    Aborted,
    CollectiveMismatch,
    CollectiveTimeout,
    PeerLost,
    PhalanxError,
)
from phalanx.recorder import flight_recorder
from phalanx.system.processes import describe_exit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from phalanx.backend.membership import Membership
    from phalanx.hierarchical.failure import GroupFailure

P = ParamSpec("P")
T = TypeVar("T")

_MAX_DESCRIBED_RANKS = 8
"""The maximum number of late ranks that an error describes; `phalanx explain` describes all."""
_ENDED_STATES = ("", "Z", "X")
"""The states of a process that has ended, as `peer_state.process_state` returns them."""

_ERROR_CLASSES = {
    "peer_lost": PeerLost,
    "mismatch": CollectiveMismatch,
    "deadlock": CollectiveMismatch,
    "left": CollectiveMismatch,
    "timeout": CollectiveTimeout,
    "aborted": Aborted,
    "interrupted": Aborted,
}
_LOSSES = (PeerLost, CollectiveTimeout, Aborted)
"""The errors after which the remaining ranks can continue: the program is not at fault."""
_OPERATION_NAME = re.compile(r"(?:queued |a )?(\w+(?: #\d+)?)")
_FORWARDED_CODES = {
    "PeerLost": "peer_lost",
    "CollectiveMismatch": "mismatch",
    "CollectiveTimeout": "timeout",
}
"""Native codes by exception class name, the prefix of an abort reason from another group."""


def find_loss(error: BaseException, failure: Any, group: str) -> PhalanxError | None:
    """Return the loss of a rank that an exception reports; None if it reports something else.

    Args:
        error: The exception: one of Phalanx, or a RuntimeError that PyTorch's C++ code made of it.
        failure: The status of a broken native group; None if it is not broken.
        group: The name of the group.
    """
    if isinstance(error, _LOSSES):
        return error
    if type(error) is not RuntimeError or failure is None:
        return None
    kind = _ERROR_CLASSES.get(failure.code)
    if kind not in _LOSSES:
        return None
    # "Cannot extract tensors from value: PeerLost: ...", and a stack
    text = str(error).rpartition(f"{kind.__name__}: ")[2]
    return kind(text.split("\n")[0], group=group)


def _while_others_leave(describe: Callable[P, T]) -> Callable[P, T]:
    """Let a description of a group end though another thread leaves the group meanwhile.

    A read of a group that has just been closed raises ValueError. The second call finds the group
    closed from its beginning, and then no description reads anything of it.
    """

    @functools.wraps(describe)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return describe(*args, **kwargs)
        except ValueError:
            return describe(*args, **kwargs)

    return run


class FailureFormatter:
    """The error messages of a group that spans hosts: a `hierarchical.failure.Formatter`."""

    def __init__(self, group: Any) -> None:
        self._group = group

    format_site = staticmethod(peer_state.format_site)

    @_while_others_leave
    def explain(self, status: Any, timeout: float) -> tuple[str, str]:
        """Return the kind of the failure, as a native code, and the text of its error."""
        group = self._group
        if status.code == "aborted":
            name, _, text = peer_state.abort_reason(group, status.reporter).partition(": ")
            if name in _FORWARDED_CODES:
                return _FORWARDED_CODES[name], text
        return status.code, _describe_status(status, group, timeout)[1]

    def abort_reason(self, failure: GroupFailure) -> str:
        """Return the reason with which to abort this host's group, as `explain` interprets it."""
        name = _ERROR_CLASSES.get(failure.code, PhalanxError).__name__
        return f"{name}: {failure.message}" if name in _FORWARDED_CODES else failure.message

    def format_operation(self, fingerprint: Any, site: str) -> str:
        """Return the text for an operation and its call site."""
        return _format_operation(fingerprint) + self.format_site(site)


@_while_others_leave
def status_error(
    status: _native.Status | GroupFailure,
    group: _native.Group,
    membership: Membership,
    operation: str,
    timeout: float,
) -> PhalanxError:
    """Return the exception for a status.

    Args:
        status: The failure that the core, or a group that spans hosts, reports.
        group: The group, which knows the pids of its ranks and how processes ended.
        membership: The membership of this rank in the group.
        operation: The operation of this rank with its call site, as text.
        timeout: The timeout of this operation in seconds.
    """
    reported = getattr(status, "message", None)
    if reported is None:
        error_class, text = _describe_status(status, group, timeout)  # type: ignore[arg-type]
    else:  # the text comes from a rank of this host or of another one
        error_class, text = _ERROR_CLASSES.get(status.code, PhalanxError), reported
    message = f"[{membership.rank_label} on {socket.gethostname()}] {operation}: {text}"
    seconds = timeout if issubclass(error_class, CollectiveTimeout) else None
    ranks = _ranks_at_fault(status, group)
    return error_class(message, **_attributes(membership, ranks, operation, seconds))


@_while_others_leave
def wait_timeout_error(
    membership: Membership, operation: str, seconds: float, call_time: float
) -> CollectiveTimeout:
    """Return the exception for a wait that timed out while its operation continues.

    Args:
        membership: The membership of this rank in the group.
        operation: The operation with its call site, as text.
        seconds: The timeout of the wait, in seconds.
        call_time: The time at which the operation was called, in monotonic seconds.
    """
    group, rank = membership.native, membership.rank
    late = [] if group.closed else group.ranks_behind(rank)
    names = ", ".join(peer_state.format_rank(group, other) for other in late) or "its peers"
    attributes = _attributes(membership, late, operation, seconds)
    return CollectiveTimeout(
        f"[{membership.rank_label} on {socket.gethostname()}] {operation}: rank {rank} waited for "
        f"{names} until the timeout of {seconds:g} s of this wait, "
        f"{time.monotonic() - call_time:.1f} s after the call{_describe_late_ranks(group, late)}; "
        "the operation continues, and can be waited for again",
        **attributes,
    )


def left_group_error(membership: Membership, operation: str) -> Aborted:
    """Return the exception for an operation that was in progress when this rank left the group."""
    return Aborted(
        f"[{membership.rank_label} on {socket.gethostname()}] {operation}: this rank has left the "
        "group (destroy_process_group) before the operation ended: wait for its work first",
        **_attributes(membership, [membership.rank], operation),
    )


def _attributes(
    membership: Membership, ranks: Iterable[int], operation: str, seconds: float | None = None
) -> dict[str, Any]:
    """Return the attributes of an error.

    Args:
        membership: The membership of this rank in the group.
        ranks: The ranks at fault, as numbers in the group.
        operation: The operation as text; its name and number begin it.
        seconds: The timeout that passed, in seconds.
    """
    name = _OPERATION_NAME.match(operation)
    return {
        "ranks": [membership.members[rank] for rank in sorted({*ranks})],
        "operation": name[1] if name else None,
        "group": membership.name,
        "seconds": seconds,
        "job": flight_recorder.get_job_name(),
    }


def _ranks_at_fault(status: _native.Status | GroupFailure, group: _native.Group) -> list[int]:
    """Return the ranks that a failure is about, as numbers in the group."""
    peers = [status.peer] if status.peer >= 0 else []
    match status.code:
        case "peer_lost" | "left":
            return peers
        case "mismatch" | "deadlock":
            return [status.reporter, *peers]
        case "timeout":
            # A failure that another host reports has no fingerprints, but the rank waited for.
            is_native = hasattr(status, "mine") and status.peer != status.reporter
            return _late_ranks(status, group) if is_native else peers  # type: ignore[arg-type]
        case _:
            return [status.reporter]


def describe_missing_rank(default_group: Any, member: int, claimant: str) -> str:
    """Describe a rank that is missing while a group is formed, in a predicate without a subject.

    Args:
        default_group: The default group, which the rank is in already; None if that is not a group
            of Phalanx.
        member: The rank's number in the default group.
        claimant: The process that has claimed the rank, as in "pid 812 on node-a", or empty.
    """
    is_single_host = default_group is None or isinstance(default_group, _native.Group)
    host = "" if is_single_host else default_group.host(member)
    if host:
        return f"(pid {default_group.pid(member)} on {host}) has not arrived yet"
    if default_group is not None:
        has_ended = peer_state.process_state(default_group.pid(member)) in _ENDED_STATES
        text = (
            _describe_exit(default_group, member)
            if has_ended
            else peer_state.describe_activity(default_group, member)
        )
        return f"(pid {default_group.pid(member)}) {text}"
    if not claimant:
        return "has not arrived yet"
    _, pid, _, host = claimant.split(" ", 3)
    state = peer_state.process_state(int(pid)) if host == socket.gethostname() else "?"
    if state in _ENDED_STATES:
        return f"({claimant}) arrived, and has ended"
    is_stopped = state in ("T", "t")
    return (
        f"({claimant}) arrived, and {'is stopped by a signal' if is_stopped else 'is not in yet'}"
    )


def _describe_status(
    status: _native.Status, group: _native.Group, timeout: float
) -> tuple[type[PhalanxError], str]:
    peer, reporter = status.peer, status.reporter
    match status.code:
        case "peer_lost":
            return PeerLost, (
                f"{peer_state.format_rank(group, peer)} {_describe_exit(group, peer)}"
                f"{peer_state.format_last_operation(group, peer)}"
            )
        case "mismatch" if status.mine.kind == "all_to_all" and status.mine.root >= 0:
            return CollectiveMismatch, (
                f"split sizes disagree in all_to_all #{status.mine.sequence}: rank {peer} gives "
                f"rank {reporter} {status.theirs.count} elements"
                f"{peer_state.format_call_site(group, peer, status.theirs)}, which expects "
                f"{status.mine.count}{peer_state.format_call_site(group, reporter, status.mine)}"
            )
        case "mismatch":
            return CollectiveMismatch, (
                f"ranks disagree: rank {reporter} is in "
                f"{_format_operation_and_site(status.mine, group, reporter)}, rank {peer} in "
                f"{_format_operation_and_site(status.theirs, group, peer)}"
            )
        case "deadlock":
            return CollectiveMismatch, peer_state.abort_reason(group, reporter) or (
                f"rank {reporter} found that ranks wait for each other in several groups"
            )
        case "left":
            return CollectiveMismatch, (
                f"{peer_state.format_rank(group, peer)} has left the group (destroy_process_group)"
                f"{peer_state.format_leaving_site(group, peer)} "
                f"while rank {reporter} is in "
                f"{_format_operation_and_site(status.mine, group, reporter)}"
            )
        case "timeout":
            return CollectiveTimeout, _describe_timeout(status, group, timeout)
        case "aborted":
            site, reason = (
                peer_state.format_leaving_site(group, reporter),
                peer_state.abort_reason(group, reporter),
            )
            return Aborted, (
                f"the group was aborted by rank {reporter}{site}{': ' + reason if reason else ''}"
            )
        case "interrupted":
            error = "" if group.closed else peer_state.exit_exception(group, reporter)
            cause = f" ({error})" if error else ""
            return Aborted, (
                f"rank {reporter} was interrupted{cause} in "
                f"{_format_operation_and_site(status.mine, group, reporter)}"
            )
        case "out_of_memory":
            return PhalanxError, (
                f"rank {reporter} could not get memory for its part of the segment "
                f"({os.strerror(status.error)}): free memory, or use fewer ranks or groups"
            )
        case _:
            return PhalanxError, f"system error on rank {reporter}: {os.strerror(status.error)}"


def _describe_timeout(status: _native.Status, group: _native.Group, timeout: float) -> str:
    if status.peer == status.reporter:
        return (
            f"rank {status.reporter} waited for its own turn until the timeout of {timeout:g} s: "
            "another of its threads is in an operation of this group"
        )
    late = _late_ranks(status, group)
    names = ", ".join(peer_state.format_rank(group, rank) for rank in late) or "any rank"
    operation = _format_operation_and_site(status.mine, group, status.reporter)
    text = (
        f"rank {status.reporter} waited for {names} in {operation} until the timeout of "
        f"{timeout:g} s on this rank"
    )
    return text + _describe_late_ranks(group, late)


def _describe_late_ranks(group: _native.Group, late: list[int]) -> str:
    """Return text on the activity of late ranks."""
    text = ""
    for rank in late[:_MAX_DESCRIBED_RANKS]:
        if not group.closed:
            text += f"; rank {rank} {peer_state.describe_activity(group, rank)}"
    if (others := len(late) - _MAX_DESCRIBED_RANKS) > 0:
        text += f"; {others} more are late: see phalanx explain"
    return text


def _late_ranks(status: _native.Status, group: _native.Group) -> list[int]:
    """Return the ranks that a rank waited for until its deadline: all late ones in a collective."""
    if status.mine.kind not in ("send", "recv") and not group.closed:
        late = group.ranks_behind(status.reporter)
        if late:
            return late
    return [status.peer] if status.peer >= 0 else []


def _describe_exit(group: _native.Group, peer: int) -> str:
    """Describe the end of a process, as far as a process that is not its parent can know it."""
    error = peer_state.exit_exception(group, peer)
    if error:
        return f"failed with {error}"
    wait_status = None if group.closed else group.wait_status(peer)
    if wait_status is None:
        is_failing = not group.closed and group.is_failing(peer)
        return "failed with an uncaught exception" if is_failing else "has died"
    return describe_exit(os.waitstatus_to_exitcode(wait_status))


def _format_operation_and_site(
    fingerprint: _native.Fingerprint, group: _native.Group, rank: int
) -> str:
    return _format_operation(fingerprint) + peer_state.format_call_site(group, rank, fingerprint)


def _format_operation(fingerprint: _native.Fingerprint) -> str:
    """Format an operation, as in "all_reduce #41 float32[1024] SUM"."""
    kind = fingerprint.kind
    if kind == "none":
        return "no operation"
    has_tensor = kind not in ("barrier", "plan")
    operation = Operation(
        0,
        kind,
        group=-1,
        sequence=fingerprint.sequence,
        dtype=DTYPE_NAMES[fingerprint.dtype] if has_tensor else "",
        count=fingerprint.count,
        op=OP_NAMES[fingerprint.op] if fingerprint.op else "",
    )
    if kind == "plan":
        return f"{formatting.format_kind(operation)} of {fingerprint.count} operations"
    if kind == "all_to_all":  # its sizes differ from rank to rank
        return f"{formatting.format_kind(operation)} {operation.dtype}"
    return formatting.format_call(operation, fingerprint.root)
