"""Descriptions of the ranks of a group from their flight recorders, for error messages.

A rank that is dead, stopped or busy cannot be queried. Its flight recorder can: the core copies it, and
this module describes its content. If there is no box (its directory could not be written, or the
file is gone), the descriptions are shorter.
"""

from __future__ import annotations

import time
from typing import Any

from phalanx import _native
from phalanx.backend.call_site import brief
from phalanx.backend.dtypes import NAMES
from phalanx.observe.escape import escape
from phalanx.observe.exception_hook import SESSION_ENDED

Box = dict[str, Any]

_LONG = 640
"""The maximum length of a rank's own text, in characters; longer than its box can hold."""
_COPIES = 3
"""The number of copies of a box to search; one may lack an operation that ends during the copy."""
_HISTORY = 512
"""The number of a rank's last operations to search for a fingerprint."""
_LAST = 8
"""The number of operations to read if only the newest matters; kept small since ranks wait."""


def named(group: Any, rank: int) -> str:
    """Return text for a rank with its pid, and with its host if it is on another host."""
    if group.closed:  # another thread has left the group, so the pids are unknown
        return f"rank {rank}"
    host = "" if isinstance(group, _native.Group) else group.host(rank)
    return f"rank {rank} (pid {group.pid(rank)}{f' on {host}' if host else ''})"


def site_of(group: _native.Group, rank: int, operation: _native.Fingerprint) -> str:
    """Return the call site of a rank's operation, as in " at train.py:40"; empty if unknown."""
    for _ in range(_COPIES):
        box = _box(group, rank, _HISTORY)
        if box is None:
            break
        found = _find(box, group, operation)
        if found and found["site"]:
            return _at(found)
    return ""


def leaving_site(group: _native.Group, rank: int) -> str:
    """Return the call site at which a rank left or aborted the group, or "": " at train.py:77"."""
    note = _note(group, rank)
    return f" at {escape(brief(note['left_at']))}" if note and note["left_at"] else ""


def reason(group: _native.Group, rank: int) -> str:
    """Return the reason that a rank gave for aborting the group; empty if it gave none."""
    note = _note(group, rank)
    return escape(note["why"], _LONG) if note else ""


def last_words(group: _native.Group, rank: int) -> str:
    """Return the exception that ended a rank's process or session; empty if none did."""
    note = _note(group, rank)
    if note and note["why"].startswith(SESSION_ENDED):  # takes precedence over the process's end
        return escape(note["why"].removeprefix(SESSION_ENDED), _LONG)
    box = _box(group, rank)
    return escape(box["exception"], _LONG) if box and box["ending"] == "failed" else ""


def last_deed(group: _native.Group, rank: int) -> str:
    """Return the last operation of a dead rank; empty if its box cannot be read.

    For example ", in all_reduce #41 at train.py:40, after step 17".
    """
    box = _box(group, rank)
    if box is None:
        return ""
    words = ""
    if (current := _under_way(box)) is not None:
        words = f", in {_words(current)}"
    elif box["done"]:
        words = f", after {_words(box['done'][-1])}"
    return words + _step(box)


def whereabouts(group: _native.Group, rank: int) -> str:
    """Describe the current activity of a late rank, in a predicate without a subject."""
    state = state_of(group.pid(rank))
    box = _box(group, rank)
    if state in ("T", "t"):
        return "is stopped by a signal (SIGSTOP)" + (_since_last(box) if box else "")
    if box is None:
        return "is alive"
    current = _under_way(box)
    if current is None:
        return "is in its own code" + _since_last(box)
    words = f"is in {_words(current)}{_group(box, current, group)} for {_ago(current['begin'])}"
    if (other := current["waiting_for"]) >= 0:
        who = named(group, other) if _is_of(box, current, group) else f"rank {other}"
        words += f", waiting for {who} there"
    return words + _step(box)


def state_of(pid: int) -> str:
    """Return the kernel's letter for a process's state; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _box(group: _native.Group, rank: int, history: int = _LAST) -> Box | None:
    # Another thread may have left the group in the meantime.
    return None if group.closed or rank < 0 else group.flight_recorder(rank, history)


def _note(group: _native.Group, rank: int) -> Box | None:
    box = _box(group, rank)
    notes = box["groups"] if box else []
    return next((note for note in notes if note["identity"] == group.identity), None)


def _under_way(box: Box) -> Box | None:
    """Return the operation that blocks a rank; None if the rank is in its own code.

    A message that nothing waits for does not count, as in `phalanx explain`: it may be posted long
    before its wait.
    """
    blocking = [
        operation
        for operation in box["open"]
        if operation["kind"] not in ("send", "recv")
        or operation["waiting_for"] >= 0
        or operation["peer"] < 0
    ]
    key = lambda operation: (operation["waiting_for"] < 0, operation["begin"], operation["number"])  # noqa: E731
    return min(blocking, key=key, default=None)


def _find(box: Box, group: _native.Group, wanted: _native.Fingerprint) -> Box | None:
    """Return the newest operation of this group with this fingerprint; None if there is none."""
    for operation in reversed([*box["done"], *box["open"]]):
        same = operation["kind"] == wanted.kind and operation["sequence"] == wanted.sequence
        if same and _is_of(box, operation, group) and _fits(operation, wanted):
            return operation  # type: ignore[no-any-return]
    return None


def _fits(operation: Box, wanted: _native.Fingerprint) -> bool:
    if wanted.kind not in ("send", "recv"):
        return True  # the number in the group identifies it
    found = operation["count"], operation["dtype"]
    return found == (wanted.count, NAMES[wanted.dtype])


def _is_of(box: Box, operation: Box, group: _native.Group) -> bool:
    index = operation["group"]
    return bool(index >= 0 and box["groups"][index]["identity"] == group.identity)


def _words(operation: Box) -> str:
    kind = operation["kind"]
    words = [kind if kind in ("send", "recv", "join") else f"{kind} #{operation['sequence']}"]
    if operation["dtype"]:
        words.append(f"{operation['dtype']}[{operation['count']}]")
    return " ".join(words) + _at(operation)


def _at(operation: Box) -> str:
    return f" at {escape(brief(operation['site']))}" if operation["site"] else ""


def _group(box: Box, operation: Box, group: _native.Group) -> str:
    if operation["group"] < 0 or _is_of(box, operation, group):
        return ""
    return f" of group '{escape(box['groups'][operation['group']]['name'])}'"


def _since_last(box: Box) -> str:
    if not box["done"]:
        return ", and has done no operation yet" + _step(box)
    last = box["done"][-1]
    return f" since {_words(last)}, {_ago(last['end'])} ago" + _step(box)


def _step(box: Box) -> str:
    # The step is negative in a report without one.
    steps = [step for _, step, _ in box["reports"] if step >= 0]
    return f", after step {steps[-1]}" if steps else ""


def _ago(nanoseconds: int) -> str:
    return f"{max(0.0, time.monotonic() - nanoseconds / 1e9):.1f} s"
