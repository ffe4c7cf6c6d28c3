"""What the core reports, in words: who did what where, and what that means for this rank."""

from __future__ import annotations

import os
import signal
import socket
from typing import TYPE_CHECKING

from phalanx.backend.dtypes import NAMES, OP_NAMES
from phalanx.errors import (
    Aborted,
    CollectiveMismatch,
    CollectiveTimeout,
    PeerLost,
    PhalanxError,
)

if TYPE_CHECKING:
    from phalanx import _native


def error_for(
    status: _native.Status,
    group: _native.Group,
    place: str,
    operation: str,
    timeout: float,
) -> PhalanxError:
    """The exception for a status.

    Args:
        status: What the core reports.
        group: The group, asked for pids and how processes ended.
        place: This rank, as in "rank 2/8".
        operation: The operation of this rank with its call site, in words.
        timeout: The seconds that this operation had.
    """
    kind, text = _explain(status, group, timeout)
    return kind(f"[{place} on {socket.gethostname()}] {operation}: {text}")


def left_behind(place: str, what: str) -> Aborted:
    """The exception for what was under way when this rank left the group."""
    return Aborted(
        f"[{place} on {socket.gethostname()}] {what}: this rank has left the group "
        "(destroy_process_group) before the operation ended: wait for its work first"
    )


def other_end(kind: str, peer: int, tag: int) -> str:
    """Whom a message is for or from, in words; a `peer` below zero is any rank."""
    rank = f"rank {peer}" if peer >= 0 else "any rank"
    return f"{'to' if kind == 'send' else 'from'} {rank} tag {tag}"


def _explain(
    status: _native.Status, group: _native.Group, timeout: float
) -> tuple[type[PhalanxError], str]:
    peer, reporter = status.peer, status.reporter
    match status.code:
        case "peer_lost":
            return PeerLost, f"{_name(group, peer)} {_ending(group, peer)}"
        case "mismatch" if status.mine.kind == "all_to_all" and status.mine.root >= 0:
            return CollectiveMismatch, (
                f"split sizes disagree in all_to_all #{status.mine.sequence}: rank {peer} gives "
                f"rank {reporter} {status.theirs.count} elements, which expects "
                f"{status.mine.count}"
            )
        case "mismatch":
            return CollectiveMismatch, (
                f"ranks disagree: rank {reporter} is in {_operation(status.mine)}, "
                f"rank {peer} in {_operation(status.theirs)}"
            )
        case "left":
            return CollectiveMismatch, (
                f"{_name(group, peer)} has left the group (destroy_process_group) "
                f"while rank {reporter} is in {_operation(status.mine)}"
            )
        case "timeout":
            late = _late(status, group)
            names = ", ".join(_name(group, rank) for rank in late) or "any rank"
            alive = "the processes are alive" if len(late) > 1 else "the process is alive"
            return CollectiveTimeout, (
                f"rank {reporter} waited for {names} in {_operation(status.mine)} until the "
                f"timeout of {timeout:g} s on this rank; {alive}"
            )
        case "aborted":
            return Aborted, f"the group was aborted by rank {reporter}"
        case "interrupted":
            return Aborted, f"rank {reporter} was interrupted in {_operation(status.mine)}"
        case "out_of_memory":
            return PhalanxError, (
                f"rank {reporter} could not get memory for its part of the segment "
                f"({os.strerror(status.error)}): free memory, or use fewer ranks or groups"
            )
        case _:
            return PhalanxError, f"system error on rank {reporter}: {os.strerror(status.error)}"


def _name(group: _native.Group, peer: int) -> str:
    # Another thread may have left the group meanwhile, and the pids with it.
    return f"rank {peer}" if group.closed else f"rank {peer} (pid {group.pid(peer)})"


def _late(status: _native.Status, group: _native.Group) -> list[int]:
    """Whom a rank waited for until its deadline: all who have not come, in a collective."""
    if status.mine.kind not in ("send", "recv") and not group.closed:
        late = group.behind(status.reporter)
        if late:
            return late
    return [status.peer] if status.peer >= 0 else []


def _ending(group: _native.Group, peer: int) -> str:
    """How a process ended, as far as the kernel tells those who are not its parent."""
    wait_status = None if group.closed else group.wait_status(peer)
    if wait_status is None:
        return "has died"
    code = os.waitstatus_to_exitcode(wait_status)
    if code < 0:
        return f"was killed by {_signal_name(-code)}"
    return f"exited with code {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _operation(fingerprint: _native.Fingerprint) -> str:
    """An operation in words: "all_reduce #41 float32[1024] SUM"."""
    kind = fingerprint.kind
    if kind == "none":
        return "no operation"
    shape = f"{NAMES[fingerprint.dtype]}[{fingerprint.count}]"
    if kind in ("send", "recv"):
        # What counts collectives is the tag here.
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
