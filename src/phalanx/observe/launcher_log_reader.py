"""Validated reading of `job.json` and `launcher.jsonl`.

If a file is damaged or missing, its fields keep their defaults and a line is added to `problems`. A
missing `launcher.jsonl` is not a problem.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from phalanx.observe.job_directory import JOB_FILE, LAUNCHER_LOG_FILE, VERSION
from phalanx.observe.model import Start

if TYPE_CHECKING:
    from phalanx.observe.job_directory import JobDirectory

__all__ = ["JobDescription", "LauncherLog", "read_description", "read_launcher_log"]

_JOB_LIMIT = 2 * 2**20
_LOG_LIMIT = 64 * 2**20
_MAX_INT = 2**31 - 1

T = TypeVar("T")


@dataclass(frozen=True)
class JobDescription:
    """The data recorded when a job began; `pid_scope` is as returned by `get_pid_scope`."""

    command: tuple[str, ...] = ()
    started: float = 0.0
    world_size: int = 0
    hosts: int = 1
    launcher: int = 0
    pid_scope: dict[str, Any] = field(default_factory=dict)


@dataclass
class LauncherLog:
    """The launcher's log: the newest start of each rank, by rank, and the job's exit code."""

    starts: dict[int, Start] = field(default_factory=dict)
    attempt: int = 0
    world_size: int = 0
    code: int | None = None


def read_description(job: JobDirectory, problems: list[str]) -> JobDescription:
    """Return the content of `job.json`; add its defects to `problems`."""
    text = _read(job, JOB_FILE, _JOB_LIMIT, problems)
    if text is None:
        return JobDescription()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        problems.append(f"{JOB_FILE} is damaged: {error}")
        return JobDescription()
    if not isinstance(found, dict) or found.get("version") != VERSION:
        problems.append(f"{JOB_FILE} has another version, expected {VERSION}")
        return JobDescription()
    command = found.get("command")
    arguments = command if isinstance(command, list) else []
    pid_scope = found.get("pid_scope")
    return JobDescription(
        tuple(argument for argument in arguments if isinstance(argument, str)),
        _get_number(found, "started"),
        _get_whole(found, "world_size", 0),
        _get_whole(found, "hosts", 1),
        _get_whole(found, "launcher", 0),
        pid_scope if isinstance(pid_scope, dict) else {},
    )


def read_launcher_log(job: JobDirectory, problems: list[str]) -> LauncherLog:
    """Return the content of `launcher.jsonl`; add its defects to `problems`."""
    text = _read(job, LAUNCHER_LOG_FILE, _LOG_LIMIT, problems)
    log, damaged = LauncherLog(), 0
    # Text after the last newline is still being written.
    for line in (text or b"").split(b"\n")[:-1]:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict) or not _apply_event(log, event):
            damaged += 1
    if damaged:
        problems.append(f"{LAUNCHER_LOG_FILE}: {damaged} lines are damaged")
    return log


def _apply_event(log: LauncherLog, event: dict[str, Any]) -> bool:
    """Apply an event; return False if it is invalid."""
    kind, time = event.get("event"), _get_number(event, "time")
    rank, pid = _get_whole(event, "rank", -1), _get_whole(event, "pid", 0)
    if kind == "finish":
        log.code = _get_code(event)
        return log.code is not None
    if rank < 0 or pid < 1:
        return False
    if kind == "start":
        attempt = _get_whole(event, "attempt", 0)
        if attempt != log.attempt:  # the ranks of the previous attempt are gone
            log.starts.clear()
        log.attempt = attempt
        log.world_size = _get_whole(event, "world_size", 0)
        log.starts[rank] = Start(pid, attempt, time)
        return True
    start = log.starts.get(rank)
    if kind != "end" or start is None or start.pid != pid:
        return kind == "end"  # of an earlier attempt
    code = _get_code(event)
    # The launcher records a rank's end again once it knows the exit code.
    log.starts[rank] = replace(
        start,
        ended=time if start.ended is None else start.ended,
        code=start.code if code is None else code,
        stopped=start.stopped or event.get("stopped") is True,
    )
    return True


def _read(job: JobDirectory, name: str, limit: int, problems: list[str]) -> bytes | None:
    try:
        return job.read(name, limit)
    except FileNotFoundError:
        # A job without a launcher has no launcher.jsonl.
        if name == JOB_FILE:
            problems.append(f"{name} is missing")
    except OSError as error:
        problems.append(str(error))
    return None


def _get_whole(found: dict[str, Any], key: str, default: int) -> int:
    value = found.get(key)
    usable = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_INT
    return int(value) if usable and value is not None else default


def _get_code(found: dict[str, Any]) -> int | None:
    value = found.get("code")
    usable = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_INT
    return int(value) if usable and value is not None else None


def _get_number(found: dict[str, Any], key: str) -> float:
    value = found.get(key)
    if isinstance(value, int | float) and abs(value) < 2**53 and math.isfinite(value):
        return float(value)
    return 0.0
