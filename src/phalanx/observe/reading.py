"""A job's directory made the plain objects of `model`: read once, believing nothing.

What is damaged, of another version or not what it should be leaves a line in `problems`, and the
rest is read. Nothing here waits for the job or is seen by it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from phalanx.observe import model
from phalanx.observe.boxes import ended_well, read_box
from phalanx.observe.directory import place
from phalanx.observe.finding import find
from phalanx.observe.members import ranks_of
from phalanx.observe.noted import Description, Launched, read_description, read_launched
from phalanx.observe.processes import look

if TYPE_CHECKING:
    from phalanx.observe.directory import Directory

__all__ = ["HISTORY", "Summary", "read", "read_directory", "summary"]

HISTORY = 4096
"""How many ended operations a black box holds."""

_MOST_RANKS = 65536
# The kernel counts a process's start in ticks of 10 ms.
_SLACK = 0.1
_GONE = model.Process("gone")


@dataclass(frozen=True)
class Summary:
    """A job in a line, as `phalanx jobs` shows it.

    Attributes:
        name: of the job.
        state: "running" while a process of it lives; "finished" after a clean end, of which nothing
            is left as a rule; else "failed".
        started: Unix seconds; 0 if not known.
        world_size: how many ranks it has; 0 if not known.
        command: the command line that started it.
        path: its directory.
        problems: what can't be read of it, in words.
    """

    name: str
    state: Literal["running", "failed", "finished"]
    started: float
    world_size: int
    command: tuple[str, ...]
    path: str
    problems: tuple[str, ...]


def read(text: str | None = None, history: int = HISTORY) -> model.Job:
    """Read a job.

    Args:
        text: its name or the beginning of it; None: the newest.
        history: how many ended operations of each rank to read, the newest.

    Raises:
        UsageError: there is no such job, or its directory can't be used.
    """
    with find(text) as job:
        return read_directory(job, history)


def read_directory(job: Directory, history: int = HISTORY) -> model.Job:
    """Read the job whose directory this is; never raises for what is in it."""
    problems: list[str] = []
    known, launched = read_description(job, problems), read_launched(job, problems)
    boxes, broken = _boxes(job, history)
    attempt = launched.attempt
    if not launched.starts:
        attempt = max((box["attempt"] for box in boxes), default=0)
    boxes = [box for box in boxes if box["attempt"] == attempt]
    size = _world_size(known, launched, boxes, problems)
    where = _Whereabouts(job, known)
    ranks = _ranks(size, boxes, launched, broken, where)
    problems += [
        f"{box['pid']}.box says that it is of rank {box['rank']}, and the job has {size} ranks"
        for box in boxes
        if not 0 <= box["rank"] < size
    ]
    problems += broken.values()
    if known.hosts > 1:
        problems.append(f"the job is on {known.hosts} hosts: here are the ranks of this one alone")
    return model.Job(
        job.name,
        job.path,
        known.command,
        known.started,
        size,
        attempt,
        launched.code,
        where.now(boxes),
        ranks,
        tuple(problems),
        known.hosts,
    )


def summary(job: Directory) -> Summary:
    """Read no more of a job than the line that lists it."""
    problems: list[str] = []
    known, launched = read_description(job, problems), read_launched(job, problems)
    state: Literal["running", "failed", "finished"] = "running"
    if job.ended():
        well = launched.code == 0
        if not known.launcher:
            boxes, broken = _boxes(job, 1)
            well = not broken and ended_well(boxes)
        state = "finished" if well else "failed"
    size = launched.world_size or known.world_size
    return Summary(job.name, state, known.started, size, known.command, job.path, tuple(problems))


class _Whereabouts:
    """Whether pids of a job mean processes that can be looked at from here."""

    def __init__(self, job: Directory, known: Description) -> None:
        here = place()
        there = known.place or here
        host = there.get("host")
        self.host = host if isinstance(host, str) else ""
        self._here = there == here
        self._other_boot = there.get("boot") != here["boot"]
        # On this machine before it was started anew; or elsewhere, and nobody holds the directory.
        self._gone = self._other_boot and host == here["host"]
        self._gone = self._gone or (not self._here and job.ended())

    def process(self, pid: int, age: float) -> model.Process | None:
        """A process that was there `age` seconds ago; None if it can't be seen from here."""
        if not self._here:
            return _GONE if self._gone else None
        looked = look(pid) if pid else None
        if looked is None or looked.age + _SLACK < age:  # the pid has come round
            return _GONE
        return looked.process

    def now(self, boxes: list[dict[str, Any]]) -> int:
        """The present moment in the clock of the boxes, nanoseconds."""
        if self._other_boot and boxes:  # that clock is not this one
            newest = max(boxes, key=lambda box: box["clock"] + box["opened"])
            return time.time_ns() - int(newest["clock"])
        return time.monotonic_ns()


def _boxes(job: Directory, history: int) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """The boxes that can be read, and by pid what is wrong with the others."""
    boxes, broken = [], {}
    for pid, name in job.boxes().items():
        try:
            boxes.append(read_box(job, name, history))
        except FileNotFoundError:  # the job has just ended
            continue
        except OSError as error:
            broken[pid] = str(error)
        except ValueError as error:
            broken[pid] = f"{name}: {error}"
    return boxes, broken


def _world_size(
    known: Description, launched: Launched, boxes: list[dict[str, Any]], problems: list[str]
) -> int:
    size = launched.world_size if launched.starts else 0
    said = {box["world_size"]: f"{box['pid']}.box" for box in boxes}
    if not size and len(said) > 1:
        words = ", ".join(f"{said[each]} of {each} ranks" for each in sorted(said)[:4])
        problems.append(f"black boxes don't agree on the job's size: {words}")
    size = size or max(said, default=0) or known.world_size
    if size > _MOST_RANKS:
        problems.append(f"the job says that it has {size} ranks, of which {_MOST_RANKS} are shown")
    return max(0, min(size, _MOST_RANKS))


def _ranks(
    size: int,
    boxes: list[dict[str, Any]],
    launched: Launched,
    broken: dict[int, str],
    where: _Whereabouts,
) -> tuple[model.Rank, ...]:
    by_rank: dict[int, dict[str, Any]] = {}
    for box in sorted(boxes, key=lambda box: int(box["opened"])):
        start = launched.starts.get(box["rank"])
        own = by_rank.get(box["rank"])
        # Processes that a rank has started may have formed groups too, of ranks of their own.
        if own is None or start is None or own["pid"] != start.pid:
            by_rank[box["rank"]] = box
    ranks = []
    for number in range(size):
        start = launched.starts.get(number)
        found = by_rank.get(number)
        rank = model.Rank(number, start=start) if found is None else _rank(number, found, start)
        if found is None and start is not None:
            rank = replace(rank, pid=start.pid, host=where.host, problem=broken.pop(start.pid, ""))
        ranks.append(replace(rank, process=_process(rank, where)))
    return tuple(ranks)


def _process(rank: model.Rank, where: _Whereabouts) -> model.Process | None:
    if not rank.pid:
        return None
    if rank.opened:
        return where.process(rank.pid, (time.monotonic_ns() - rank.opened) / 1e9)
    return where.process(rank.pid, time.time() - rank.start.time if rank.start else 0.0)


def _rank(number: int, box: dict[str, Any], start: model.Start | None) -> model.Rank:
    return model.Rank(
        number,
        box["pid"],
        box["host"],
        box["clock"],
        box["opened"],
        box["ending"],
        box["last_words"],
        box["ended"],
        tuple(model.Group(**{**group, "members": _members(group)}) for group in box["groups"]),
        tuple(model.Operation(**operation) for operation in box["open"]),
        tuple(model.Operation(**operation) for operation in box["done"]),
        box["operations"],
        tuple(model.Report(*report) for report in box["reports"]),
        box["note"],
        start,
    )


def _members(group: dict[str, Any]) -> tuple[int, ...]:
    """Its ranks in the job; none if they are not as many as the group has."""
    members = ranks_of(group["members"])
    return members if len(members) <= group["size"] else ()
