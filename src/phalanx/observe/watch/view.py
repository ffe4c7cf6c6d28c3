"""What the ranks of a job do just now, and whom they wait for: what `phalanx watch` shows.

Pure functions of one reading. Waiting is told for the last seconds (`WINDOW`), from the operations
that ended in them and those under way; of a rank that ran through its whole history in less, for as
long as that reaches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from phalanx.observe.culprit.endings import End, end_of, signal_name
from phalanx.observe.culprit.waits import group_of
from phalanx.observe.explain.words import last_step
from phalanx.observe.shares import Members, covered, in_job, members, over, time_waited

if TYPE_CHECKING:
    from phalanx.observe.model import Job, Operation, Rank, Report

__all__ = [
    "WINDOW",
    "Activity",
    "Row",
    "Straggler",
    "View",
    "as_json",
    "ending",
    "has_failed",
    "history",
    "view",
]

WINDOW = 5.0
"""Seconds that shares of time are about."""
_OPERATIONS = 8192
"""Ended operations that are looked at in all, or a reading of many ranks takes long."""

_NOTICED = 0.05
"""Shares of time below this are taken for chance."""

Verdict = Literal["straggler", "even", "stuck", "nobody", "alone", "over"]


@dataclass(frozen=True)
class Activity:
    """What a rank is in.

    Attributes:
        operation: The one under way or, outside of any, the one that ended last; None: none yet.
        under_way: Whether that one is under way.
        group: The name of its group, where the rank has several; else empty.
        peer: The root, or the other rank of a message, by its number in the job; -1: none, or any.
        seconds: How long it has been under way; outside of operations, how long ago it ended.
        waits_for: Which rank of the job it waits for at this moment; -1: none, or it isn't known.
        others: How many more operations are under way, as posted messages are.
    """

    operation: Operation | None = None
    under_way: bool = False
    group: str = ""
    peer: int = -1
    seconds: float = 0.0
    waits_for: int = -1
    others: int = 0


@dataclass(frozen=True)
class Row:
    """One rank.

    Attributes:
        rank: Its number in the job.
        pid: Its process; 0 if it left no trace.
        state: Of its process, in a word: "running", "stopped", "SIGKILL", "exit 1", "failed", ...
        end: How it ended, if it did.
        step: As `phalanx.report` was told last; None if it never was.
        steps: Steps per second; None if that can't be told.
        loss: As `phalanx.report` was told last; None if it never was.
        note: As `phalanx.report` was told last; empty if it never was.
        operations: Ended ones per second.
        waiting: Share of its time in which an operation of its waited; None if it can't, being
            stopped or at its end.
        waits_for: The rank of the job that it waited for longest; -1: none, or it isn't known.
        waits: Share of its time by the rank waited for (-1: it isn't known which).
        memory: Resident bytes; None if that can't be told.
        activity: What it is in.
        problem: Why its black box can't be read; empty if it can.
    """

    rank: int
    pid: int
    state: str
    end: End
    step: int | None
    steps: float | None
    loss: float | None
    note: str
    operations: float
    waiting: float | None
    waits_for: int
    waits: Mapping[int, float]
    memory: int | None
    activity: Activity
    problem: str

    @property
    def alive(self) -> bool:
        """Whether it can still do something."""
        return not over(self.end)

    @property
    def abnormal(self) -> bool:
        """Whether a reader should see this rank, however many there are."""
        bad = self.end.by_itself or self.end.how in ("absent", "left")
        return bad or bool(self.problem) or self.state in ("stopped", "disk")


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for most.

    Attributes:
        rank: Its number in the job.
        share: Mean share of their time for which those ranks wait for it.
        waiting: The ranks that wait for it for a noticeable share of their time.
    """

    rank: int
    share: float
    waiting: tuple[int, ...]


@dataclass(frozen=True)
class View:
    """All ranks at one moment.

    Attributes:
        rows: By rank.
        verdict: "straggler"; "even": ranks wait for each other alike; "stuck": all that live do
            nothing but wait; "nobody": nobody waits noticeably; "alone": there is one rank; "over":
            none is alive.
        straggler: Where the verdict says so; with "stuck" the rank that the others wait for, if it
            is one.
        most: The largest share of its time for which a rank waits.
    """

    rows: tuple[Row, ...]
    verdict: Verdict
    straggler: Straggler | None
    most: float

    @property
    def reported(self) -> bool:
        """Whether any rank reported progress."""
        return self.has_steps or any(row.loss is not None for row in self.rows)

    @property
    def has_steps(self) -> bool:
        """Whether any rank reported a step."""
        return any(row.step is not None for row in self.rows)


def history(ranks: int) -> int:
    """How many ended operations of each rank to read for a view, in a job of so many ranks."""
    return max(64, min(512, _OPERATIONS // max(ranks, 1)))


def view(job: Job, window: float = WINDOW) -> View:
    """Look at a job, as it was read, over its last `window` seconds."""
    known = members(job)
    rows = tuple(_row(rank, job, known, int(window * 1e9)) for rank in job.ranks)
    alive = [row for row in rows if row.alive and row.waiting is not None]
    most = max((row.waiting or 0.0 for row in alive), default=0.0)
    straggler = _straggler(rows, alive)
    return View(rows, _verdict(rows, alive, straggler, most), straggler, most)


def ending(job: Job) -> tuple[bool, str] | None:
    """Whether a job ended well, and in words how; None while it runs, or hasn't begun.

    Without a launcher a job has ended when no process of it is there. With one that says so itself:
    until then its ranks may be started again.
    """
    if job.code is not None:
        if job.code == 0:
            return True, "ended well"
        return False, f"failed with exit code {job.code}"
    if job.running or not any(rank.pid for rank in job.ranks):
        return None
    ends = [(rank, end_of(rank, job)) for rank in job.ranks]
    for rank, end in ends:
        if end.by_itself:
            return False, f"failed: rank {rank.rank} (pid {rank.pid}) {_how(end)}"
    if any(end.how == "interrupted" for _, end in ends):
        return False, "was interrupted"
    return True, "ended: all of its processes have"


def has_failed(job: Job) -> bool:
    """Whether a job has ended badly, or a rank of one that may still run."""
    if job.code is not None:
        return job.code != 0
    ends = [end_of(rank, job) for rank in job.ranks]
    return any(end.by_itself or end.how == "interrupted" for end in ends)


def as_json(job: Job, seen: View) -> dict[str, Any]:
    """One refresh of `phalanx watch --json`: numbers and texts as they are, unescaped."""
    straggler = seen.straggler
    return {
        "job": job.name,
        "time": time.time(),
        "running": job.running,
        "code": job.code,
        "attempt": job.attempt,
        "world_size": job.world_size,
        "verdict": seen.verdict,
        "straggler": straggler and asdict(straggler),
        "ranks": [_row_json(row) for row in seen.rows],
        "problems": list(job.problems),
    }


def _row_json(row: Row) -> dict[str, Any]:
    loss = row.loss
    activity = row.activity
    return {
        "rank": row.rank,
        "pid": row.pid,
        "state": row.state,
        "alive": row.alive,
        "step": row.step,
        "steps_per_second": row.steps,
        "loss": loss if loss is None or math.isfinite(loss) else str(loss),
        "note": row.note,
        "operations_per_second": row.operations,
        "waiting": row.waiting,
        "waits": {str(who) if who >= 0 else "unknown": part for who, part in row.waits.items()},
        "memory": row.memory,
        "operation": activity.operation and asdict(activity.operation),
        "under_way": activity.under_way,
        "group": activity.group,
        "seconds": activity.seconds,
        "waits_for": activity.waits_for if activity.waits_for >= 0 else None,
        "more_under_way": activity.others,
        "problem": row.problem,
    }


def _how(end: End) -> str:
    if end.how == "killed" and end.code is not None:
        return f"was killed by {signal_name(-end.code)}"
    if end.how == "exited":
        return f"exited with code {end.code}"
    return "raised an exception" if end.how == "failed" else "is gone"


def _row(rank: Rank, job: Job, known: Members, window: int) -> Row:
    end = end_of(rank, job)
    begin = covered(rank, job.now - window)
    span = max(job.now - begin, 1)
    waits: dict[int, float] = {}
    able = rank.opened > 0 and not over(end) and not _is_stopped(rank)
    if able:
        waits = {who: part / span for who, part in time_waited(rank, known, begin, job.now).items()}
    process = rank.process
    return Row(
        rank=rank.rank,
        pid=rank.pid,
        state=_state(rank, end),
        end=end,
        step=last_step(rank),
        steps=None if over(end) else _rate(rank.reports, job.now, window),
        loss=_loss(rank.reports),
        note=rank.note,
        operations=sum(op.end > begin for op in rank.history) * 1e9 / span,
        waiting=min(sum(waits.values()), 1.0) if able else None,
        waits_for=max(waits, key=lambda who: (waits[who], -who), default=-1),
        waits=waits,
        memory=process.memory if process is not None and not rank.gone else None,
        activity=_activity(rank, (end.time or job.now) if over(end) else job.now, known),
        problem=rank.problem,
    )


def _is_stopped(rank: Rank) -> bool:
    return rank.process is not None and rank.process.state == "stopped"


def _state(rank: Rank, end: End) -> str:
    if end.how == "killed" and end.code is not None:
        return signal_name(-end.code)
    if end.how == "exited":
        return f"exit {end.code}"
    if over(end) or end.how == "elsewhere":
        words = {"well": "ended", "vanished": "gone", "launcher": "stopped by launcher"}
        return words.get(end.how, end.how)
    return rank.process.state if rank.process is not None else end.how


def _loss(reports: Sequence[Report]) -> float | None:
    return next((each.loss for each in reversed(reports) if each.loss is not None), None)


def _rate(reports: Sequence[Report], now: int, window: int) -> float | None:
    """Steps per second: over the window, or between the last two reports if they are rarer.

    It falls towards 0 when no report comes for much longer than they used to take.
    """
    steps = [report for report in reports if report.step >= 0]
    recent = [report for report in steps if report.time >= now - window]
    recent = steps[-2:] if len(recent) < 2 else recent
    for i in range(len(recent) - 1, 0, -1):
        if recent[i - 1].step > recent[i].step:  # counted anew, as in each epoch
            recent = recent[i:]
            break
    if len(recent) < 2:
        return None
    first, last = recent[0], recent[-1]
    usual = (last.time - first.time) / (len(recent) - 1)
    silence = now - last.time
    span = last.time - first.time + (silence if silence > max(3 * usual, 1e9) else 0)
    return (last.step - first.step) * 1e9 / span if span > 0 else None


def _activity(rank: Rank, now: int, known: Members) -> Activity:
    current = min(filter(_blocks, rank.open), key=_importance, default=None)
    posted = [operation.begin for operation in rank.open if operation is not current]
    shown = current or rank.last
    if shown is None:
        since = max([rank.opened, *posted])
        return Activity(seconds=max(now - since, 0) / 1e9, others=len(posted))
    group = group_of(rank, shown) if len(rank.groups) > 1 else None
    since = current.begin if current else max([shown.end, *posted])
    return Activity(
        operation=shown,
        under_way=current is not None,
        group=group.name if group else "",
        peer=in_job(rank, shown, shown.peer, known),
        seconds=max(now - since, 0) / 1e9,
        waits_for=in_job(rank, shown, shown.waiting_for, known) if current else -1,
        others=len(posted),
    )


def _blocks(operation: Operation) -> bool:
    """Whether a rank that is in it is held by it: a message may be posted long before its wait."""
    return not operation.is_message or operation.waiting_for >= 0 or operation.peer < 0


def _importance(operation: Operation) -> tuple[bool, bool, int]:
    """What waits comes first, a collective before a message, the oldest before the others."""
    return operation.waiting_for < 0, operation.is_message, operation.begin


def _straggler(rows: Sequence[Row], alive: Sequence[Row]) -> Straggler | None:
    """The rank that is waited for more than it waits itself, by as many as possible.

    Among ranks that are even somebody is waited for most too: the first that others look at. But it
    waits as they do.
    """
    best: Straggler | None = None
    most = 0.0
    for row in rows:
        shares = [(other.rank, other.waits.get(row.rank, 0.0)) for other in alive]
        shares = [(who, share) for who, share in shares if who != row.rank and share >= _NOTICED]
        if not shares:
            continue
        mean = sum(share for _, share in shares) / len(shares)
        excess = mean - (row.waiting or 0.0)
        if excess >= _NOTICED and excess * len(shares) > most:
            most = excess * len(shares)
            best = Straggler(row.rank, mean, tuple(who for who, _ in shares))
    return best


def _verdict(
    rows: Sequence[Row], alive: Sequence[Row], straggler: Straggler | None, most: float
) -> Verdict:
    if rows and not any(row.alive for row in rows):
        return "over"
    if len(rows) == 1:
        return "alone"
    if alive and all((row.waiting or 0.0) > 0.99 for row in rows if row.alive):
        return "stuck"
    if straggler is not None:
        return "straggler"
    return "even" if most >= _NOTICED else "nobody"
