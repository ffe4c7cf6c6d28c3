"""Descriptions of the ranks of a group from their flight recorders, for error messages.

A rank that is dead, stopped or busy cannot be queried. Its flight recorder can: the core copies it,
and this module describes its content. If there is no recorder (its directory could not be written,
or the file is gone), the descriptions are shorter.
"""

from __future__ import annotations

import time
from typing import Any

from phalanx import _native
from phalanx.backend.operands import DTYPE_NAMES
from phalanx.diagnosis import formatting
from phalanx.diagnosis.flight_recorders import build_rank
from phalanx.diagnosis.model import Group, Operation, Rank, select_blocking
from phalanx.recorder.exception_hook import SESSION_ENDED
from phalanx.system.escape import escape
from phalanx.system.polling import attempts
from phalanx.system.processes import StatField, read_stat

_MAX_TEXT_LENGTH = 640
"""The maximum length of a rank's own text, in characters; longer than its recorder can hold."""
_SEARCH_SECONDS = 2.0
"""The time for which to look for an operation that a rank has entered and not recorded yet."""
_MAX_COPIES = 3
"""The number of further copies in which to look for the site of a recorded operation."""
_LONG_HISTORY = 512
"""The number of a rank's last operations to search for a fingerprint."""
_SHORT_HISTORY = 8
"""The number of operations to read if only the newest matters; kept small since ranks wait."""


def format_rank(group: Any, rank: int) -> str:
    """Return text for a rank with its pid, and with its host if it is on another host."""
    if group.closed:  # another thread has left the group, so the pids are unknown
        return f"rank {rank}"
    host = "" if isinstance(group, _native.Group) else group.host(rank)
    return f"rank {rank} (pid {group.pid(rank)}{f' on {host}' if host else ''})"


def format_call_site(group: _native.Group, rank: int, operation: _native.Fingerprint) -> str:
    """Return the call site of a rank's operation, as in " at train.py:40"; empty if unknown."""
    # A copy may lack an operation that just ended. A small one is recorded when it has waited for a
    # microsecond, or has ended: that rank may have lost its core in between.
    for number, _ in enumerate(attempts(time.monotonic() + _SEARCH_SECONDS)):
        record = read_rank(group, rank, _LONG_HISTORY)
        if record is None:
            break
        match = _find_operation(record, group, operation)
        # The text of a site may be newer than the copy, too.
        if match and (match.site or number == _MAX_COPIES):
            return format_site(match.site)
        if process_state(group.pid(rank)) in ("", "Z", "T", "t"):
            break
    return ""


def format_leaving_site(group: _native.Group, rank: int) -> str:
    """Return the call site at which a rank left or aborted the group, or "": " at train.py:77"."""
    own = _read_group(group, rank)
    return format_site(own.left_at) if own else ""


def abort_reason(group: _native.Group, rank: int) -> str:
    """Return the reason that a rank gave for aborting the group; empty if it gave none."""
    own = _read_group(group, rank)
    return escape(own.abort_reason, _MAX_TEXT_LENGTH) if own else ""


def exit_exception(group: _native.Group, rank: int) -> str:
    """Return the exception that ended a rank's process or session; empty if none did."""
    own = _read_group(group, rank)
    # The end of the session takes precedence over that of the process.
    if own and own.abort_reason.startswith(SESSION_ENDED):
        return escape(own.abort_reason.removeprefix(SESSION_ENDED), _MAX_TEXT_LENGTH)
    record = read_rank(group, rank)
    if record is None or record.ending != "failed":
        return ""
    return escape(record.exception, _MAX_TEXT_LENGTH)


def format_last_operation(group: _native.Group, rank: int) -> str:
    """Return the last operation of a dead rank; empty if its recorder cannot be read.

    For example ", in all_reduce #41 at train.py:40, after step 17".
    """
    record = read_rank(group, rank)
    if record is None:
        return ""
    text = ""
    if (current := select_blocking(record.open)) is not None:
        text = f", {_format_position(current)}"
    elif record.history:
        text = f", after {_format_operation(record.history[-1])}"
    return text + _format_step(record)


def describe_activity(group: _native.Group, rank: int) -> str:
    """Describe the current activity of a late rank, in a predicate without a subject."""
    state = process_state(group.pid(rank))
    record = read_rank(group, rank)
    if state in ("T", "t"):
        return "is stopped by a signal (SIGSTOP)" + (_format_idle_time(record) if record else "")
    if record is None:
        return "is alive"
    current = select_blocking(record.open)
    if current is None:
        return "is in its own code" + _format_idle_time(record)
    is_same_group = record.is_in(current, group.identity)
    text = f"is {_format_position(current)}"
    if not is_same_group and (other_group := record.get_group(current)) is not None:
        text += f" of group '{escape(other_group.name)}'"
    text += f" for {_format_elapsed(current.begin)}"
    if (other := current.waiting_for) >= 0:
        text += (
            f", waiting for {format_rank(group, other) if is_same_group else f'rank {other}'} there"
        )
    return text + _format_step(record)


def process_state(pid: int) -> str:
    """Return the kernel's letter for a process's state; empty if there is no such process."""
    fields = read_stat(pid)
    return fields[StatField.STATE].decode() if fields is not None else ""


def read_rank(group: _native.Group, rank: int, history: int = _SHORT_HISTORY) -> Rank | None:
    """Read the flight recorder of a rank of the group; None if there is none to be read."""
    # Another thread may have left the group in the meantime.
    recorder = None if group.closed or rank < 0 else group.flight_recorder(rank, history)
    return build_rank(recorder) if recorder is not None else None


def _read_group(group: _native.Group, rank: int) -> Group | None:
    """Return the group as one of its ranks recorded it."""
    record = read_rank(group, rank)
    return record.find_group(group.identity) if record else None


def _find_operation(
    record: Rank, group: _native.Group, fingerprint: _native.Fingerprint
) -> Operation | None:
    """Return the newest operation of this group with this fingerprint; None if there is none."""
    return next(
        (
            operation
            for operation in reversed(record.records)
            if _matches(operation, fingerprint) and record.is_in(operation, group.identity)
        ),
        None,
    )


def _matches(operation: Operation, fingerprint: _native.Fingerprint) -> bool:
    if operation.sequence != fingerprint.sequence:
        return False
    if operation.kind == "plan":  # its collectives have its number, and are not recorded
        return fingerprint.kind not in ("send", "recv")
    # The number of a collective in its group identifies it.
    recorded = operation.count, operation.dtype
    return operation.kind == fingerprint.kind and (
        not operation.is_message or recorded == (fingerprint.count, DTYPE_NAMES[fingerprint.dtype])
    )


def _format_position(operation: Operation) -> str:
    text = _format_operation(operation)
    return text if operation.kind == "join" else f"in {text}"


def _format_operation(operation: Operation) -> str:
    tensor = f" {formatting.format_tensor(operation)}" if operation.dtype else ""
    return formatting.format_kind(operation) + tensor + format_site(operation.site)


def format_site(site: str) -> str:
    """Return text such as " at train.py:77"; empty without a call site."""
    return f" at {formatting.format_site(site)}" if site else ""


def _format_idle_time(record: Rank) -> str:
    if not record.history:
        return ", and has done no operation yet" + _format_step(record)
    last = record.history[-1]
    idle_time = _format_elapsed(last.end)
    return f" since {_format_operation(last)}, {idle_time} ago" + _format_step(record)


def _format_step(record: Rank) -> str:
    return f", after step {record.last_step}" if record.last_step is not None else ""


def _format_elapsed(nanoseconds: int) -> str:
    return f"{max(0.0, time.monotonic() - nanoseconds / 1e9):.1f} s"
