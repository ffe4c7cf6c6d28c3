"""What black boxes say of the ranks of a group: the half of an error that a rank can't know itself.

A rank that is dead, stopped or somewhere else can't be asked. Its box can: the core copies it, and
here it is put in words. Where there is no box (its directory could not be written, or the file is
gone) the words are fewer.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from phalanx.backend.call_site import brief
from phalanx.backend.dtypes import NAMES
from phalanx.observe.escape import escape
from phalanx.observe.last_words import SESSION_ENDED

if TYPE_CHECKING:
    from phalanx import _native

Box = dict[str, Any]

_LONG = 640
"""Characters of what a rank says itself; more than its box has room for."""
_COPIES = 3
"""So often a box is copied: an operation that ends meanwhile may be in no part of a copy."""
_HISTORY = 512
"""How many of a rank's last operations are looked through for the one with a fingerprint."""
_LAST = 8
"""So many are read where the newest is all that is asked for: survivors read while others wait."""


def site_of(group: _native.Group, rank: int, operation: _native.Fingerprint) -> str:
    """Where a rank called an operation: " at train.py:40", or nothing."""
    for _ in range(_COPIES):
        box = _box(group, rank, _HISTORY)
        if box is None:
            break
        found = _find(box, group, operation)
        if found and found["site"]:
            return _at(found)
    return ""


def leaving_site(group: _native.Group, rank: int) -> str:
    """Where a rank left the group, or aborted it: " at train.py:77", or nothing."""
    note = _note(group, rank)
    return f" at {escape(brief(note['left_at']))}" if note and note["left_at"] else ""


def reason(group: _native.Group, rank: int) -> str:
    """Why a rank aborted the group, in its own words; empty if it gave none."""
    note = _note(group, rank)
    return escape(note["why"], _LONG) if note else ""


def last_words(group: _native.Group, rank: int) -> str:
    """The exception that ended a rank's process, or its session; empty if none did."""
    note = _note(group, rank)
    if note and note["why"].startswith(SESSION_ENDED):  # whatever its process did afterwards
        return escape(note["why"].removeprefix(SESSION_ENDED), _LONG)
    box = _box(group, rank)
    return escape(box["last_words"], _LONG) if box and box["ending"] == "failed" else ""


def last_deed(group: _native.Group, rank: int) -> str:
    """What a dead rank did last: " in all_reduce #41 at train.py:40, after step 17"; or nothing."""
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
    """What a rank that doesn't come does instead: a sentence without its subject."""
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
    if current["waiting_for"] >= 0:
        words += f", waiting for rank {current['waiting_for']} there"
    return words + _step(box)


def state_of(pid: int) -> str:
    """The letter that the kernel has for a process's state; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _box(group: _native.Group, rank: int, history: int = _LAST) -> Box | None:
    # Another thread may have left the group meanwhile.
    return None if group.closed or rank < 0 else group.black_box(rank, history)


def _note(group: _native.Group, rank: int) -> Box | None:
    box = _box(group, rank)
    notes = box["groups"] if box else []
    return next((note for note in notes if note["identity"] == group.identity), None)


def _under_way(box: Box) -> Box | None:
    """The operation that a rank is in; None if it is in its own code.

    As `phalanx explain` has it: a message may be posted long before anybody waits for it.
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
    """The newest operation of this group with this fingerprint."""
    for operation in reversed([*box["done"], *box["open"]]):
        same = operation["kind"] == wanted.kind and operation["sequence"] == wanted.sequence
        if same and _is_of(box, operation, group) and _fits(operation, wanted):
            return operation  # type: ignore[no-any-return]
    return None


def _fits(operation: Box, wanted: _native.Fingerprint) -> bool:
    if wanted.kind not in ("send", "recv"):
        return True  # its number in the group says it all
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
    # A report may say nothing of the step, which is below zero then.
    steps = [step for _, step, _ in box["reports"] if step >= 0]
    return f", after step {steps[-1]}" if steps else ""


def _ago(nanoseconds: int) -> str:
    return f"{max(0.0, time.monotonic() - nanoseconds / 1e9):.1f} s"
