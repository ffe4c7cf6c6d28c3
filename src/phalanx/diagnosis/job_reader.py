"""Conversion of a job's directory into the plain objects of `model`, with full validation.

The sources are `job.json`, `launcher.jsonl`, the flight recorders, the pending calls of RPC workers
(`phalanx.rpc.call_log` writes them), and /proc. Data that is damaged, of another version or of an
unexpected type adds a line to `problems`, and the rest is read: its fields keep their defaults.
Reading never waits for the job and has no effect on it.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from phalanx.diagnosis import model
from phalanx.diagnosis.exit_reasons import parse_group_error
from phalanx.diagnosis.flight_recorders import build_rank
from phalanx.diagnosis.torch_jobs import end_failed_operations, merge, read_kept
from phalanx.diagnosis.wait_for_graph import LONGEST_LOOK
from phalanx.recorder.job_directory import (
    CALL_LOG_VERSION,
    JOB_FILE,
    LAUNCHER_LOG_FILE,
    MAX_TRACEBACK_SIZE,
    VERSION,
    JobDirectory,
    find_job,
    get_pid_scope,
    get_recorder_name,
    get_traceback_name,
    list_running_jobs,
)
from phalanx.recorder.recorder_file import ended_well, read_recorder
from phalanx.system.processes import StatField, read_stat

if TYPE_CHECKING:
    from collections.abc import Container, Iterable


HISTORY = 4096
"""The number of ended operations that a flight recorder holds."""

_MAX_RANKS = 65536
# The kernel counts a process's start in ticks of 10 ms.
_SLACK = 0.1
_GONE = model.Process("gone")

_JOB_LIMIT = 2 * 2**20
_LOG_LIMIT = 64 * 2**20
_CALLS_LIMIT = 2**22
_MAX_INT = 2**31 - 1
_CALLS_FILE = re.compile(r"([1-9][0-9]{0,9})\.calls", re.ASCII)
_CPP_ERROR = re.compile(r"\w+(?:::\w+)+: ")
_PROCESS_STATES = {
    "R": "running",
    "S": "sleeping",
    "I": "sleeping",
    "T": "stopped",
    "t": "stopped",
    "D": "disk",
    "Z": "zombie",
    "X": "gone",
}


@dataclass(frozen=True)
class JobSummary:
    """A summary of a job, as `phalanx jobs` lists it.

    Attributes:
        name: The name of the job.
        state: "running" while a process of the job is alive; "finished" after a clean end, which
            normally removes the directory; else "failed".
        started: The time at which it started, in Unix seconds; 0 if unknown.
        world_size: The number of ranks; 0 if unknown.
        command: The command line that started it.
        path: The path of its directory.
        replaced: The number of processes of ranks that were lost and replaced.
        problems: Descriptions of data that could not be read.
    """

    name: str
    state: Literal["running", "failed", "finished"]
    started: float
    world_size: int
    command: tuple[str, ...]
    path: str
    replaced: int
    problems: tuple[str, ...]


def read_job(text: str | None = None, history: int = HISTORY) -> model.Job:
    """Read a job.

    Args:
        text: The name of the job or a unique prefix of it; None for the newest job.
        history: The maximum number of ended operations to read for each rank, the newest.

    Raises:
        UsageError: There is no such job, or its directory cannot be used.
    """
    with find_job(text) as job:
        found = read_job_directory(job, history)
        running = [] if text is not None else list_running_jobs(job.base)
        others = [name for name in running if name != found.name and not _is_over(job.base, name)]
    return replace(found, other_jobs=tuple(others))


def _is_over(base: str, name: str) -> bool:
    """Return whether the processes of a running job have left it: a notebook's kernel goes on."""
    with suppress(OSError), JobDirectory(base, name) as job:
        description = _read_description(job, [])
        if not description.launcher:
            recorders, unreadable = _read_recorders(job, 1)
            is_whole = not unreadable and len(recorders) >= description.world_size
            return is_whole and ended_well(recorders)
    return False


def read_job_directory(job: JobDirectory, history: int = HISTORY) -> model.Job:
    """Read the job in a directory; never raises because of the directory's content."""
    gone: set[int] = set()
    while True:
        found = _read_once(job, history)
        new = {rank.rank for rank in found.ranks if _has_no_end(rank)} - gone
        if not new:
            return found
        # They may have ended since their records were read, which say now how.
        gone |= new


def _has_no_end(rank: model.Rank) -> bool:
    has_code = rank.start is not None and rank.start.code is not None
    return rank.is_gone and not (rank.ending or rank.ended or has_code)


def _read_once(job: JobDirectory, history: int) -> model.Job:
    problems: list[str] = []
    description, launcher_log = _read_description(job, problems), _read_launcher_log(job, problems)
    recorders, unreadable = _read_recorders(job, history)
    attempt = launcher_log.attempt
    if not launcher_log.starts:
        attempt = max((recorder["attempt"] for recorder in recorders), default=0)
    recorders = [recorder for recorder in recorders if recorder["attempt"] == attempt]
    size = _determine_world_size(description, launcher_log, recorders, problems)
    location = _JobLocation(job, description)
    kept: dict[int, model.Rank] = {}
    if job.list_torch_records():
        started = {start.pid for start in launcher_log.starts.values()}
        kept = read_kept(job, started | {recorder["pid"] for recorder in recorders}, problems)
    ranks = _build_ranks(size, recorders, launcher_log, unreadable, kept, location)
    if kept:
        ranks = end_failed_operations(ranks, kept)
    problems += [
        f"{get_recorder_name(recorder['pid'])} belongs to rank {recorder['rank']}, "
        f"but the job has {size} ranks"
        for recorder in recorders
        if not 0 <= recorder["rank"] < size
    ]
    problems += _find_duplicates(size, recorders, launcher_log)
    problems += unreadable.values()
    workers = _read_workers(job, {rank.pid for rank in ranks}, problems)
    if description.hosts > 1:
        problems.append(
            f"the job runs on {description.hosts} hosts: only the ranks of this host are shown"
        )
    return model.Job(
        job.name,
        job.path,
        description.command,
        description.started,
        size,
        attempt,
        launcher_log.code,
        _find_moment(location.now(recorders), ranks),
        ranks,
        tuple(problems),
        description.hosts,
        description.launcher,
        launcher_log.code is None and location.is_gone(description.launcher, description.started),
        workers=workers,
        replaced=tuple(launcher_log.replaced),
        store_host=description.store_host,
    )


def read_tracebacks(text: str | None = None) -> tuple[str, dict[int, str]]:
    """Return the name of a job, and the whole tracebacks that its ranks have kept, by rank.

    Args:
        text: The name of the job or a unique prefix of it; None for the newest job.

    Raises:
        UsageError: There is no such job, or its directory cannot be used.
    """
    found = {}
    with find_job(text) as job:
        for rank in read_job_directory(job, 1).ranks:
            with suppress(OSError):  # most ranks have none, and whatever else is there is no text
                content = job.read(get_traceback_name(rank.pid), MAX_TRACEBACK_SIZE)
                found[rank.rank] = content.decode(errors="replace")
        return job.name, found


def read_summary(job: JobDirectory) -> JobSummary:
    """Read only the data of a job that a list of jobs shows."""
    problems: list[str] = []
    description, launcher_log = _read_description(job, problems), _read_launcher_log(job, problems)
    state: Literal["running", "failed", "finished"] = "running"
    if job.has_ended():
        well = launcher_log.code == 0
        if not description.launcher:
            recorders, unreadable = _read_recorders(job, 1)
            well = not unreadable and ended_well(recorders)
        state = "finished" if well else "failed"
    size = launcher_log.world_size or description.world_size
    return JobSummary(
        job.name,
        state,
        description.started,
        size,
        description.command,
        job.path,
        len(launcher_log.replaced),
        tuple(problems),
    )


class _JobLocation:
    """The relation of the machine and pid namespace of a job to those of this process."""

    def __init__(self, job: JobDirectory, description: _JobDescription) -> None:
        own_scope = get_pid_scope()
        job_scope = description.pid_scope or own_scope
        host = job_scope.get("host")
        self.host = host if isinstance(host, str) else ""
        self._is_local = job_scope == own_scope
        self._is_other_boot = job_scope.get("boot") != own_scope["boot"]
        # It ran on this machine before a reboot, or elsewhere and its directory is not held.
        self._has_ended = self._is_other_boot and host == own_scope["host"]
        self._has_ended = self._has_ended or (not self._is_local and job.has_ended())

    def find_process(self, pid: int, age: float) -> model.Process | None:
        """Return the process that existed `age` seconds ago; None if it is not visible here."""
        if not self._is_local:
            return _GONE if self._has_ended else None
        stat = read_process_stat(pid) if pid else None
        if stat is None or stat.age + _SLACK < age:  # the pid has been reused
            return _GONE
        return stat.process

    def is_gone(self, pid: int, since: float) -> bool:
        """Return whether a process that existed at a Unix time is known to have ended."""
        process = self.find_process(pid, time.time() - since) if pid else None
        return process is not None and process.state in ("gone", "zombie")

    def now(self, recorders: list[dict[str, Any]]) -> int:
        """Return the present time in the clock of the recorders, in nanoseconds."""
        if self._is_other_boot and recorders:  # the monotonic clock restarted
            newest = max(recorders, key=lambda recorder: recorder["clock"] + recorder["opened"])
            return time.time_ns() - int(newest["clock"])
        return time.monotonic_ns()


def _read_recorders(job: JobDirectory, history: int) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Return the readable recorders, and the defects of the others by pid."""
    recorders, unreadable = [], {}
    for pid, name in job.list_recorders().items():
        try:
            recorders.append(read_recorder(job, name, history))
        except FileNotFoundError:  # the job has just ended
            continue
        except OSError as error:
            unreadable[pid] = str(error)
        except ValueError as error:
            unreadable[pid] = f"{name}: {error}"
    return recorders, unreadable


def _determine_world_size(
    description: _JobDescription,
    launcher_log: _LauncherLog,
    recorders: list[dict[str, Any]],
    problems: list[str],
) -> int:
    size = launcher_log.world_size if launcher_log.starts else 0
    sizes = {recorder["world_size"]: get_recorder_name(recorder["pid"]) for recorder in recorders}
    if not size and len(sizes) > 1:
        examples = ", ".join(f"{each} in {sizes[each]}" for each in sorted(sizes)[:4])
        problems.append(f"flight recorders have different world sizes: {examples}")
    size = size or max(sizes, default=0) or description.world_size
    if size > _MAX_RANKS:
        problems.append(f"the job has {size} ranks, of which only {_MAX_RANKS} are shown")
    return max(0, min(size, _MAX_RANKS))


def _find_duplicates(
    size: int, recorders: list[dict[str, Any]], launcher_log: _LauncherLog
) -> list[str]:
    """Name the recorders of one rank if another rank, which the launcher does not know, has none.

    Processes that a rank has started may have flight recorders of the same rank.
    """
    named: dict[int, list[str]] = {}
    for recorder in recorders:
        named.setdefault(recorder["rank"], []).append(get_recorder_name(recorder["pid"]))
    missing = [
        rank for rank in range(size) if rank not in named and rank not in launcher_log.starts
    ]
    return [
        f"{' and '.join(sorted(names))} belong to rank {rank}, and none belongs to rank "
        f"{missing[0]}"
        for rank, names in sorted(named.items())
        if missing and len(names) > 1
    ]


def _build_ranks(
    size: int,
    recorders: list[dict[str, Any]],
    launcher_log: _LauncherLog,
    unreadable: dict[int, str],
    kept: dict[int, model.Rank],
    location: _JobLocation,
) -> tuple[model.Rank, ...]:
    by_rank: dict[int, dict[str, Any]] = {}
    for recorder in sorted(recorders, key=lambda recorder: int(recorder["opened"])):
        start = launcher_log.starts.get(recorder["rank"])
        own = by_rank.get(recorder["rank"])
        # Child processes of a rank may have formed groups of their own, with ranks of their own.
        if own is None or start is None or own["pid"] != start.pid:
            by_rank[recorder["rank"]] = recorder
    ranks = []
    for number in range(size):
        start = launcher_log.starts.get(number)
        found = by_rank.get(number)
        rank = model.Rank(number, start=start) if found is None else build_rank(found, start)
        if found is not None and rank.pid in kept:
            rank = merge(rank, kept[rank.pid])
        if found is None and start is not None:
            rank = replace(
                kept.get(start.pid, rank),
                rank=number,
                start=start,
                pid=start.pid,
                host=location.host,
                problem=unreadable.pop(start.pid, ""),
            )
            rank = _add_exception(rank, start, launcher_log.first_end)
        ranks.append(replace(rank, process=_find_process(rank, location)))
    return tuple(ranks)


def _find_moment(now: int, ranks: Iterable[model.Rank]) -> int:
    """Return the latest time up to which the records of all running ranks are complete.

    A rank that has not looked for longer cannot: it is stopped, or keeps the interpreter's lock. It
    is taken to be where it was.
    """
    looks = [rank.recorded for rank in ranks if rank.recorded and not rank.is_gone]
    return min([now, *(time for time in looks if now - time < LONGEST_LOOK)])


def _add_exception(rank: model.Rank, start: model.Start, first_end: float) -> model.Rank:
    """Return a rank that its exception has ended: as kept, or as the end of its stderr has it.

    A rank may have been ending by itself before the end of another, for which its launcher has
    stopped it.
    """
    is_early = 0 < rank.ended < first_end * 1e9 - rank.clock
    is_own = is_early and rank.exception and not parse_group_error(rank.exception)
    has_failed = start.code != 0 and (is_own or not start.stopped)
    rank = replace(rank, exception=(rank.exception or start.error) if has_failed else "")
    if not rank.exception or _CPP_ERROR.match(rank.exception):  # C++ code raises a signal
        return rank
    # Its process may have ended much later: Gloo lets pending operations time out first.
    return replace(rank, ending="failed", ended=rank.ended or rank.logged_end)


def _find_process(rank: model.Rank, location: _JobLocation) -> model.Process | None:
    if not rank.pid:
        return None
    if rank.opened:
        return location.find_process(rank.pid, (time.monotonic_ns() - rank.opened) / 1e9)
    return location.find_process(rank.pid, time.time() - rank.start.time if rank.start else 0.0)


# job.json and launcher.jsonl.


@dataclass(frozen=True)
class _JobDescription:
    """The data recorded when a job began; `pid_scope` is as returned by `get_pid_scope`."""

    command: tuple[str, ...] = ()
    started: float = 0.0
    world_size: int = 0
    hosts: int = 1
    launcher: int = 0
    store_host: int = -1
    pid_scope: dict[str, Any] = field(default_factory=dict)


@dataclass
class _LauncherLog:
    """The launcher's log: the newest start of each rank, by rank, and the job's exit code."""

    starts: dict[int, model.Start] = field(default_factory=dict)
    replaced: list[model.ReplacedProcess] = field(default_factory=list)
    attempt: int = 0
    world_size: int = 0
    code: int | None = None

    @property
    def first_end(self) -> float:
        """When a rank first ended that the launcher had not stopped; in Unix seconds, 0 if none."""
        ends = [start.ended for start in self.starts.values() if not start.stopped]
        return min((time for time in ends if time is not None), default=0.0)


def _read_description(job: JobDirectory, problems: list[str]) -> _JobDescription:
    """Return the content of `job.json`; add its defects to `problems`."""
    try:
        found = json.loads(job.read(JOB_FILE, _JOB_LIMIT))
    except FileNotFoundError:
        problems.append(f"{JOB_FILE} is missing")
        return _JobDescription()
    except OSError as error:
        problems.append(str(error))
        return _JobDescription()
    except (ValueError, RecursionError) as error:
        problems.append(f"{JOB_FILE} is damaged: {error}")
        return _JobDescription()
    if not isinstance(found, dict) or found.get("version") != VERSION:
        problems.append(f"{JOB_FILE} has another version, expected {VERSION}")
        return _JobDescription()
    command = found.get("command")
    arguments = command if isinstance(command, list) else []
    pid_scope = found.get("pid_scope")
    return _JobDescription(
        tuple(argument for argument in arguments if isinstance(argument, str)),
        _get_number(found, "started"),
        _get_whole(found, "world_size", 0),
        _get_whole(found, "hosts", 1),
        _get_whole(found, "launcher", 0),
        _get_whole(found, "store_host", -1),
        pid_scope if isinstance(pid_scope, dict) else {},
    )


def _read_launcher_log(job: JobDirectory, problems: list[str]) -> _LauncherLog:
    """Return the content of `launcher.jsonl`; add its defects to `problems`."""
    log, damaged, text = _LauncherLog(), 0, b""
    try:
        text = job.read(LAUNCHER_LOG_FILE, _LOG_LIMIT)
    except FileNotFoundError:  # a job without a launcher
        pass
    except OSError as error:
        problems.append(str(error))
    # Text after the last newline is still being written.
    for line in text.split(b"\n")[:-1]:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict) or not _apply_event(log, event):
            damaged += 1
    if damaged:
        problems.append(f"{LAUNCHER_LOG_FILE}: {damaged} lines are damaged")
    return log


def _apply_event(log: _LauncherLog, event: dict[str, Any]) -> bool:
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
        elif rank in log.starts:
            log.replaced.append(model.ReplacedProcess(rank, log.starts[rank]))
        log.attempt = attempt
        log.world_size = _get_whole(event, "world_size", 0)
        log.starts[rank] = model.Start(pid, time)
        return True
    start = log.starts.get(rank)
    if kind not in ("end", "suspended") or start is None or start.pid != pid:
        return kind in ("end", "suspended")  # of an earlier attempt
    if kind == "suspended":
        log.starts[rank] = replace(start, suspended=True)
        return True
    code = _get_code(event)
    # The launcher records a rank's end again once it knows the exit code.
    log.starts[rank] = replace(
        start,
        ended=time if start.ended is None else start.ended,
        code=start.code if code is None else code,
        stopped=start.stopped or event.get("stopped") is True,
        error=error if isinstance(error := event.get("error"), str) and error else start.error,
    )
    return True


def _get_whole(found: dict[str, Any], key: str, default: int) -> int:
    value = found.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_INT:
        return value
    return default


def _get_code(found: dict[str, Any]) -> int | None:
    value = found.get("code")
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_INT:
        return value
    return None


def _get_number(found: dict[str, Any], key: str) -> float:
    value = found.get(key)
    if isinstance(value, int | float) and abs(value) < 2**53 and math.isfinite(value):
        return float(value)
    return 0.0


# The pending calls of RPC workers.


def _read_workers(
    job: JobDirectory, pids: Container[int], problems: list[str]
) -> tuple[model.Worker, ...]:
    """Return the workers of a job, sorted by id.

    Args:
        job: The directory of the job.
        pids: The processes to include: those of the newest attempt.
        problems: A list to which a description of each unreadable file is appended.
    """
    found = []
    for match in filter(None, map(_CALLS_FILE.fullmatch, os.listdir(job.fd))):
        if int(match[1]) not in pids:
            continue
        try:
            found.append(_parse_worker(int(match[1]), json.loads(job.read(match[0], _CALLS_LIMIT))))
        except FileNotFoundError:
            continue  # the worker has left
        except OSError as error:
            problems.append(str(error))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            problems.append(f"{match[0]} is damaged: {error!r}")
    return tuple(sorted(found, key=lambda worker: (worker.id, worker.pid)))


def _parse_worker(pid: int, content: Any) -> model.Worker:
    if content["version"] != CALL_LOG_VERSION:
        raise ValueError(f"version {content['version']}, expected {CALL_LOG_VERSION}")
    made = [_parse_call(call, call["to"], call["function"]) for call in content["made"]]
    executed = [_parse_call(call, call["of"], "") for call in content["executed"]]
    name = str(content["name"])
    return model.Worker(pid, int(content["id"]), name, tuple(made), tuple(executed))


def _parse_call(call: Any, peer: Any, function: Any) -> model.Call:
    return model.Call(int(call["call"]), int(peer), str(function), int(call["since"]))


# Processes. psutil provides the same data as one read of /proc, but no start time in a monotonic
# clock. That time is needed to distinguish a process with a reused pid from the rank that had the
# pid before.


@dataclass(frozen=True)
class ProcessStat:
    """The state of a process, and its age in seconds."""

    process: model.Process
    age: float


def read_process_stat(pid: int) -> ProcessStat | None:
    """Return the state of a process; None if it does not exist or is hidden from this user.

    If /proc hides the processes of other users (`hidepid`), a hidden pid has been reused by another
    user's process: it is no longer the rank's.
    """
    fields = read_stat(pid)
    if fields is None:
        return None
    state = _PROCESS_STATES.get(fields[StatField.STATE].decode(), "sleeping")
    started = int(fields[StatField.START]) / os.sysconf("SC_CLK_TCK")
    memory = int(fields[StatField.RESIDENT_PAGES]) * os.sysconf("SC_PAGE_SIZE")
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    return ProcessStat(model.Process(state, memory), age)
