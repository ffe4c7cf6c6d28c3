"""Descriptions of the ranks of a group from their flight recorders, for error messages.

A rank that is dead, stopped or busy cannot be queried. Its flight recorder can: the core copies it,
and this module describes its content. If there is no recorder (its directory could not be written,
or the file is gone), the descriptions are shorter.
"""

from __future__ import annotations

import time
from typing import Any

from phalanx import _native
from phalanx.backend.call_site import short_site
from phalanx.backend.operands import DTYPE_NAMES
from phalanx.observe.escape import escape
from phalanx.observe.exception_hook import SESSION_ENDED

Record = dict[str, Any]

_MAX_TEXT_LENGTH = 640
"""The maximum length of a rank's own text, in characters; longer than its recorder can hold."""
_MAX_COPIES = 3
"""The number of copies of a recorder to search; one may lack an operation that just ended."""
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
    for _ in range(_MAX_COPIES):
        recorder = _read_recorder(group, rank, _LONG_HISTORY)
        if recorder is None:
            break
        match = _find_operation(recorder, group, operation)
        if match and match["site"]:
            return format_site(match["site"])
    return ""


def format_leaving_site(group: _native.Group, rank: int) -> str:
    """Return the call site at which a rank left or aborted the group, or "": " at train.py:77"."""
    group_record = _group_record(group, rank)
    return format_site(group_record["left_at"]) if group_record else ""


def abort_reason(group: _native.Group, rank: int) -> str:
    """Return the reason that a rank gave for aborting the group; empty if it gave none."""
    group_record = _group_record(group, rank)
    return escape(group_record["abort_reason"], _MAX_TEXT_LENGTH) if group_record else ""


def exit_exception(group: _native.Group, rank: int) -> str:
    """Return the exception that ended a rank's process or session; empty if none did."""
    group_record = _group_record(group, rank)
    # The end of the session takes precedence over that of the process.
    if group_record and group_record["abort_reason"].startswith(SESSION_ENDED):
        return escape(group_record["abort_reason"].removeprefix(SESSION_ENDED), _MAX_TEXT_LENGTH)
    recorder = _read_recorder(group, rank)
    if recorder is None or recorder["ending"] != "failed":
        return ""
    return escape(recorder["exception"], _MAX_TEXT_LENGTH)


def format_last_operation(group: _native.Group, rank: int) -> str:
    """Return the last operation of a dead rank; empty if its recorder cannot be read.

    For example ", in all_reduce #41 at train.py:40, after step 17".
    """
    recorder = _read_recorder(group, rank)
    if recorder is None:
        return ""
    text = ""
    if (current := _blocking_operation(recorder)) is not None:
        text = f", in {_format_operation(current)}"
    elif recorder["done"]:
        text = f", after {_format_operation(recorder['done'][-1])}"
    return text + _format_step(recorder)


def describe_activity(group: _native.Group, rank: int) -> str:
    """Describe the current activity of a late rank, in a predicate without a subject."""
    state = process_state(group.pid(rank))
    recorder = _read_recorder(group, rank)
    if state in ("T", "t"):
        return "is stopped by a signal (SIGSTOP)" + (
            _format_idle_time(recorder) if recorder else ""
        )
    if recorder is None:
        return "is alive"
    current = _blocking_operation(recorder)
    if current is None:
        return "is in its own code" + _format_idle_time(recorder)
    text = (
        f"is in {_format_operation(current)}{_format_group(recorder, current, group)} "
        f"for {_format_elapsed(current['begin'])}"
    )
    if (other := current["waiting_for"]) >= 0:
        peer = (
            format_rank(group, other)
            if is_in_group(recorder, current, group.identity)
            else f"rank {other}"
        )
        text += f", waiting for {peer} there"
    return text + _format_step(recorder)


def process_state(pid: int) -> str:
    """Return the kernel's letter for a process's state; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _read_recorder(group: _native.Group, rank: int, history: int = _SHORT_HISTORY) -> Record | None:
    # Another thread may have left the group in the meantime.
    return None if group.closed or rank < 0 else group.flight_recorder(rank, history)


def _group_record(group: _native.Group, rank: int) -> Record | None:
    return find_group_record(_read_recorder(group, rank), group.identity)


def find_group_record(recorder: Record | None, identity: int) -> Record | None:
    """Return a group as a rank recorded it; None if it did not."""
    records = recorder["groups"] if recorder else ()
    return next((record for record in records if record["identity"] == identity), None)


def is_in_group(recorder: Record, operation: Record, identity: int) -> bool:
    """Return whether a recorded operation is one of the group with this identity."""
    index = operation["group"]
    return bool(index >= 0 and recorder["groups"][index]["identity"] == identity)


def _blocking_operation(recorder: Record) -> Record | None:
    """Return the operation that blocks a rank; None if the rank is in its own code.

    A message that nothing waits for does not count, as in `phalanx explain`: it may be posted long
    before its wait.
    """
    blocking = [
        operation
        for operation in recorder["open"]
        if operation["kind"] not in ("send", "recv")
        or operation["waiting_for"] >= 0
        or operation["peer"] < 0
    ]
    key = lambda operation: (operation["waiting_for"] < 0, operation["begin"], operation["number"])  # noqa: E731
    return min(blocking, key=key, default=None)


def _find_operation(
    recorder: Record, group: _native.Group, fingerprint: _native.Fingerprint
) -> Record | None:
    """Return the newest operation of this group with this fingerprint; None if there is none."""
    for operation in reversed([*recorder["done"], *recorder["open"]]):
        same = (
            operation["kind"] == fingerprint.kind and operation["sequence"] == fingerprint.sequence
        )
        if (
            same
            and is_in_group(recorder, operation, group.identity)
            and _matches(operation, fingerprint)
        ):
            return operation  # type: ignore[no-any-return]
    return None


def _matches(operation: Record, fingerprint: _native.Fingerprint) -> bool:
    if (operation["kind"], operation["sequence"]) != (fingerprint.kind, fingerprint.sequence):
        return False
    if fingerprint.kind not in ("send", "recv"):
        return True  # the number in the group identifies it
    recorded = operation["count"], operation["dtype"]
    return recorded == (fingerprint.count, DTYPE_NAMES[fingerprint.dtype])


def _format_operation(operation: Record) -> str:
    kind = operation["kind"]
    parts = [kind if kind in ("send", "recv", "join") else f"{kind} #{operation['sequence']}"]
    if operation["dtype"]:
        parts.append(f"{operation['dtype']}[{operation['count']}]")
    return " ".join(parts) + format_site(operation["site"])


def format_site(site: str) -> str:
    """Return text such as " at train.py:77"; empty without a call site."""
    return f" at {escape(short_site(site))}" if site else ""


def _format_group(recorder: Record, operation: Record, group: _native.Group) -> str:
    if operation["group"] < 0 or is_in_group(recorder, operation, group.identity):
        return ""
    return f" of group '{escape(recorder['groups'][operation['group']]['name'])}'"


def _format_idle_time(recorder: Record) -> str:
    if not recorder["done"]:
        return ", and has done no operation yet" + _format_step(recorder)
    last = recorder["done"][-1]
    return f" since {_format_operation(last)}, {_format_elapsed(last['end'])} ago" + _format_step(
        recorder
    )


def _format_step(recorder: Record) -> str:
    # The step is negative in a report without one.
    steps = [step for _, step, _ in recorder["reports"] if step >= 0]
    return f", after step {steps[-1]}" if steps else ""


def _format_elapsed(nanoseconds: int) -> str:
    return f"{max(0.0, time.monotonic() - nanoseconds / 1e9):.1f} s"
