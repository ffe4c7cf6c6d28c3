"""What `job.json` and `launcher.jsonl` say, checked: nothing in them is believed.

A damaged or missing file leaves what it would have said at "not known", and a line in `problems`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from phalanx.observe.directory import JOB, NOTES, VERSION
from phalanx.observe.model import Start

if TYPE_CHECKING:
    from phalanx.observe.directory import Directory

__all__ = ["Description", "Launched", "read_description", "read_launched"]

_JOB_LIMIT = 2 * 2**20
_NOTES_LIMIT = 64 * 2**20
_MOST = 2**31 - 1

T = TypeVar("T")


@dataclass(frozen=True)
class Description:
    """What was known of a job when it began; `place` as `directory.place` gives it."""

    command: tuple[str, ...] = ()
    started: float = 0.0
    world_size: int = 0
    hosts: int = 1
    launcher: int = 0
    place: dict[str, Any] = field(default_factory=dict)


@dataclass
class Launched:
    """What the launcher noted: of each rank the newest start, by its rank."""

    starts: dict[int, Start] = field(default_factory=dict)
    attempt: int = 0
    world_size: int = 0
    code: int | None = None


def read_description(job: Directory, problems: list[str]) -> Description:
    """What `job.json` says; adds to `problems` what is wrong with it."""
    text = _read(job, JOB, _JOB_LIMIT, problems)
    if text is None:
        return Description()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        problems.append(f"{JOB} is damaged: {error}")
        return Description()
    if not isinstance(found, dict) or found.get("version") != VERSION:
        problems.append(f"{JOB} is of another version, expected {VERSION}")
        return Description()
    command = found.get("command")
    words = command if isinstance(command, list) else []
    place = found.get("place")
    return Description(
        tuple(word for word in words if isinstance(word, str)),
        _number(found, "started"),
        _whole(found, "world_size", 0),
        _whole(found, "hosts", 1),
        _whole(found, "launcher", 0),
        place if isinstance(place, dict) else {},
    )


def read_launched(job: Directory, problems: list[str]) -> Launched:
    """What `launcher.jsonl` says; adds to `problems` what is wrong with it."""
    text = _read(job, NOTES, _NOTES_LIMIT, problems)
    launched, damaged = Launched(), 0
    # Behind the last end of a line may stand what is being written.
    for line in (text or b"").split(b"\n")[:-1]:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict) or not _take(launched, event):
            damaged += 1
    if damaged:
        problems.append(f"{NOTES}: {damaged} lines are damaged")
    return launched


def _take(launched: Launched, event: dict[str, Any]) -> bool:
    """Take up an event; False if it makes no sense."""
    kind, time = event.get("event"), _number(event, "time")
    rank, pid = _whole(event, "rank", -1), _whole(event, "pid", 0)
    if kind == "finish":
        launched.code = _code(event)
        return launched.code is not None
    if rank < 0 or pid < 1:
        return False
    if kind == "start":
        attempt = _whole(event, "attempt", 0)
        if attempt != launched.attempt:  # the last one's ranks are no more
            launched.starts.clear()
        launched.attempt = attempt
        launched.world_size = _whole(event, "world_size", 0)
        launched.starts[rank] = Start(pid, attempt, time)
        return True
    start = launched.starts.get(rank)
    if kind != "end" or start is None or start.pid != pid:
        return kind == "end"  # of an earlier attempt
    code = _code(event)
    # The launcher notes a rank's end again when it has learned the code.
    launched.starts[rank] = replace(
        start,
        ended=time if start.ended is None else start.ended,
        code=start.code if code is None else code,
        stopped=start.stopped or event.get("stopped") is True,
    )
    return True


def _read(job: Directory, name: str, limit: int, problems: list[str]) -> bytes | None:
    try:
        return job.read(name, limit)
    except FileNotFoundError:
        # A job without a launcher has no notes; what it has not described yet it will.
        if name == JOB:
            problems.append(f"{name} is missing")
    except OSError as error:
        problems.append(str(error))
    return None


def _whole(found: dict[str, Any], key: str, default: int) -> int:
    value = found.get(key)
    usable = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST
    return int(value) if usable and value is not None else default


def _code(found: dict[str, Any]) -> int | None:
    value = found.get("code")
    usable = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MOST
    return int(value) if usable and value is not None else None


def _number(found: dict[str, Any], key: str) -> float:
    value = found.get(key)
    if isinstance(value, int | float) and abs(value) < 2**53 and math.isfinite(value):
        return float(value)
    return 0.0
