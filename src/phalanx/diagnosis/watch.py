"""The current activity of the ranks of a job, and their waits, for `phalanx watch`.

`watch_table` renders it; reading the job and refreshing the view are left to the command. The
functions here are pure functions of one reading of the job. Shares of waiting refer to the last
seconds (`WINDOW`) and are computed from the operations that ended in them and those under way. If
the history of a rank covers less time, they refer to that time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from phalanx.diagnosis.exit_reasons import ExitStatus, determine_exit
from phalanx.diagnosis.wait_time import find_covered_begin, measure_wait_time
from phalanx.system.processes import signal_name

if TYPE_CHECKING:
    from phalanx.diagnosis.model import Job, Operation, Rank, Report

WINDOW = 5.0
"""The time to which shares refer, in seconds."""
_OPERATIONS = 8192
"""Target for the total number of ended operations, so that many ranks can be read quickly."""

_IDLE_SECONDS = 10.0
"""The time without a completed transfer after which a link counts as idle, in seconds."""
NOTICED = 0.05
"""Shares of time below this value are considered noise."""

Balance = Literal[
    "straggler", "balanced", "stuck", "no_waits", "single_rank", "not_joined", "ended"
]


@dataclass(frozen=True)
class Activity:
    """The current activity of a rank.

    Attributes:
        operation: The operation under way, else the one that ended last; None if there is none yet.
        under_way: Whether the operation is under way.
        group: The name of its group if the rank has several groups; else empty.
        peer: The root, or the other rank of a message, in the job; -1 for none or any.
        seconds: The time since the operation began or, if it is not under way, since it ended;
            without any, since the rank has joined or, if it has not, since it was started.
        waits_for: The rank in the job that it waits for now; -1 if none or unknown.
        num_other_operations: The number of further operations under way, such as posted messages.
    """

    operation: Operation | None = None
    under_way: bool = False
    group: str = ""
    peer: int = -1
    seconds: float = 0.0
    waits_for: int = -1
    num_other_operations: int = 0


@dataclass(frozen=True)
class Row:
    """A rank in a view.

    Attributes:
        rank: The number of the rank in the job.
        pid: The pid of its process; 0 if it left no trace.
        state: The state of its process: "running", "stopped", "SIGKILL", "exit 1", "failed", ...
        exit_status: The way in which it ended, or that it is alive.
        step: The last step given to `phalanx.report`; None if there is none.
        steps: The number of steps per second; None if unknown.
        loss: The last loss given to `phalanx.report`; None if there is none.
        note: The last note given to `phalanx.report`; empty if there is none.
        operations: The number of operations ended per second.
        waiting: The share of time in which an operation waited; None if the rank cannot wait,
            because it is stopped, has ended or has no flight recorder.
        waits_for: The rank in the job that it waited for longest; -1 if none or unknown.
        waits: The shares of time by the rank waited for; -1 stands for an unknown rank.
        memory: The resident memory in bytes; None if unknown.
        activity: The current activity of the rank.
        has_joined: Whether it has begun to join a group, which opens its flight recorder.
        problem: The reason why its flight recorder cannot be read; empty if it can.
    """

    rank: int
    pid: int
    state: str
    exit_status: ExitStatus
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
    has_joined: bool
    problem: str

    @property
    def is_alive(self) -> bool:
        """Return whether the rank is still active."""
        return not self.exit_status.is_inactive

    @property
    def is_abnormal(self) -> bool:
        """Return whether the rank needs the user's attention."""
        status = self.exit_status
        is_lost = status.is_own_failure or status.reason in ("absent", "left")
        return is_lost or bool(self.problem) or self.state in ("stopped", "disk")


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for most.

    Attributes:
        rank: The number of the rank in the job.
        share: The mean share of time that the ranks in `waiting` wait for it.
        waiting: The ranks that wait for it for a noticeable share of their time.
    """

    rank: int
    share: float
    waiting: tuple[int, ...]


@dataclass(frozen=True)
class LinkUse:
    """The use of the link from a host to another one, by all live ranks of the host.

    Attributes:
        host: The name of the host.
        peer: The name of the other host.
        sent: The bytes sent so far.
        received: The bytes received so far.
        send_rate: The bytes sent per second, over the last seconds.
        receive_rate: The bytes received per second.
    """

    host: str
    peer: str
    sent: int
    received: int
    send_rate: float
    receive_rate: float


@dataclass(frozen=True)
class View:
    """All ranks at one moment.

    Attributes:
        rows: The ranks, in order.
        links: The links between hosts, by name.
        balance: "straggler": a rank delays others; "balanced": ranks wait for each other equally;
            "stuck": all live ranks only wait; "no_waits": no rank waits noticeably; "single_rank":
            there is one rank; "not_joined": no rank has joined a group; "ended": no rank is alive.
        straggler: The rank that delays others, if any; may also be set if the balance is "stuck".
        max_share: The largest share of its time for which a rank waits.
    """

    rows: tuple[Row, ...]
    links: tuple[LinkUse, ...]
    balance: Balance
    straggler: Straggler | None
    max_share: float

    @property
    def has_reports(self) -> bool:
        """Return whether any rank has reported a step or a loss."""
        return self.has_steps or any(row.loss is not None for row in self.rows)

    @property
    def has_steps(self) -> bool:
        """Return whether any rank has reported a step."""
        return any(row.step is not None for row in self.rows)


def get_history_length(ranks: int) -> int:
    """Return the number of ended operations to read per rank, in a job of `ranks` ranks."""
    return max(64, min(512, _OPERATIONS // max(ranks, 1)))


def build_view(job: Job, window: float = WINDOW) -> View:
    """Evaluate a job over the last `window` seconds before it was read."""
    rows = tuple(_build_row(rank, job, int(window * 1e9)) for rank in job.ranks)
    alive = [row for row in rows if row.is_alive and row.waiting is not None]
    max_share = max((row.waiting or 0.0 for row in alive), default=0.0)
    straggler = _find_straggler(rows, alive)
    balance = _judge_balance(rows, alive, straggler, max_share)
    return View(rows, _measure_links(job, rows), balance, straggler, max_share)


def _measure_links(job: Job, rows: Sequence[Row]) -> tuple[LinkUse, ...]:
    uses: dict[tuple[str, str], LinkUse] = {}
    for rank, row in zip(job.ranks, rows, strict=True):
        for link in rank.links if row.is_alive else ():
            key = rank.host, link.host
            before = uses.get(key, LinkUse(*key, 0, 0, 0.0, 0.0))
            (sent, received, last), earlier = link.now, link.earlier
            is_idle = job.now - last > _IDLE_SECONDS * 1e9
            seconds = math.inf if is_idle else max(job.now - earlier[2], 1) / 1e9
            uses[key] = LinkUse(
                *key,
                before.sent + sent,
                before.received + received,
                before.send_rate + max(sent - earlier[0], 0) / seconds,
                before.receive_rate + max(received - earlier[1], 0) / seconds,
            )
    return tuple(uses[key] for key in sorted(uses))


def get_outcome(job: Job) -> tuple[bool, str] | None:
    """Return whether a job ended well, and a description; None while it runs or has not begun."""
    if job.code is not None:
        if job.code == 0:
            return True, "completed"
        return False, f"failed with exit code {job.code}"
    if not job.has_ended or not any(rank.pid for rank in job.ranks):
        return None
    exits = [(rank, determine_exit(rank, job)) for rank in job.ranks]
    for rank, status in exits:
        if status.is_own_failure:
            labels = {"failed": "raised an exception", "vanished": "disappeared"}
            how = f"{'was ' if status.reason == 'killed' else ''}{status.describe(labels)}"
            return False, f"failed: rank {rank.rank} (pid {rank.pid}) {how}"
    if any(status.reason == "interrupted" for _, status in exits):
        return False, "was interrupted"
    return True, "ended: all its processes have exited"


def has_failed(job: Job) -> bool:
    """Return whether a job has failed, or a rank of a job that may still be running."""
    if job.code is not None:
        return job.code != 0
    exits = [determine_exit(rank, job) for rank in job.ranks]
    return any(status.is_own_failure or status.reason == "interrupted" for status in exits)


def as_json(job: Job, view: View) -> dict[str, Any]:
    """Return one refresh of `phalanx watch --json`; texts are not escaped."""
    straggler = view.straggler
    return {
        "job": job.name,
        "other_jobs": list(job.other_jobs),
        "time": time.time(),
        "running": job.running,
        "code": job.code,
        "attempt": job.attempt,
        "world_size": job.world_size,
        "replaced": len(job.replaced),
        "balance": view.balance,
        "straggler": straggler and asdict(straggler),
        "ranks": [_row_as_json(row) for row in view.rows],
        "links": [asdict(link) for link in view.links],
        "problems": list(job.problems),
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    loss, activity = row.loss, row.activity
    return {
        "rank": row.rank,
        "pid": row.pid,
        "state": row.state,
        "alive": row.is_alive,
        "step": row.step,
        "steps_per_second": row.steps,
        "loss": loss if loss is None or math.isfinite(loss) else str(loss),
        "note": row.note,
        "operations_per_second": row.operations,
        "waiting": row.waiting,
        "waits": {str(peer) if peer >= 0 else "unknown": part for peer, part in row.waits.items()},
        "memory": row.memory,
        "operation": activity.operation and asdict(activity.operation),
        "under_way": activity.under_way,
        "group": activity.group,
        "seconds": activity.seconds,
        "waits_for": activity.waits_for if activity.waits_for >= 0 else None,
        "more_under_way": activity.num_other_operations,
        "problem": row.problem,
    }


def _build_row(rank: Rank, job: Job, window: int) -> Row:
    status, process = determine_exit(rank, job), rank.process
    begin = find_covered_begin(rank, job.now - window)
    span = max(job.now - begin, 1)
    is_stopped = process is not None and process.state == "stopped"
    can_wait = rank.opened > 0 and not status.is_inactive and not is_stopped
    times = measure_wait_time(job, rank, begin) if can_wait else {}
    waits = {peer: part / span for peer, part in times.items()}
    losses = [report.loss for report in rank.reports if report.loss is not None]
    return Row(
        rank=rank.rank,
        pid=rank.pid,
        state=_describe_state(rank, status),
        exit_status=status,
        step=rank.last_step,
        steps=None if status.is_inactive else _measure_step_rate(rank.reports, job.now, window),
        loss=losses[-1] if losses else None,
        note=rank.note,
        operations=sum(op.end > begin for op in rank.history) * 1e9 / span,
        waiting=min(sum(waits.values()), 1.0) if can_wait else None,
        waits_for=max(waits, key=lambda peer: (waits[peer], -peer), default=-1),
        waits=waits,
        memory=process.memory if process is not None and not rank.is_gone else None,
        activity=_find_activity(rank, job, (status.is_inactive and status.time) or job.now),
        has_joined=rank.opened > 0,
        problem=rank.problem,
    )


def _describe_state(rank: Rank, status: ExitStatus) -> str:
    if status.reason == "killed" and status.code is not None:
        return signal_name(-status.code)
    if status.reason == "exited":
        return f"exit {status.code}"
    if status.is_inactive or status.reason == "other_host" or rank.process is None:
        labels = {
            "completed": "ended",
            "vanished": "disappeared",
            "launcher": "stopped by launcher",
            "other_host": "on another host",
        }
        return labels.get(status.reason, status.reason)
    return rank.process.state


def _measure_step_rate(reports: Sequence[Report], now: int, window: int) -> float | None:
    """Return the steps per second in the window, or between the last two reports if rarer.

    The rate falls towards 0 if the next report takes much longer than the previous ones did.
    """
    steps = [report for report in reports if report.step >= 0]
    recent = [report for report in steps if report.time >= now - window]
    recent = steps[-2:] if len(recent) < 2 else recent
    # Steps may be reset, as in each epoch.
    resets = [i for i in range(1, len(recent)) if recent[i - 1].step > recent[i].step]
    recent = recent[resets[-1] :] if resets else recent
    if len(recent) < 2:
        return None
    first, last = recent[0], recent[-1]
    usual = (last.time - first.time) / (len(recent) - 1)
    silence = now - last.time
    span = last.time - first.time + (silence if silence > max(3 * usual, 1e9) else 0)
    return (last.step - first.step) * 1e9 / span if span > 0 else None


def _find_activity(rank: Rank, job: Job, now: int) -> Activity:
    if not rank.opened:
        begun = rank.start.time if rank.start is not None else math.inf
        return Activity(seconds=max(time.time() - begun, 0.0))
    blocking = [operation for operation in rank.open if operation.is_blocking]
    current = min(blocking, key=_get_importance, default=None)
    posted = [operation.begin for operation in rank.open if operation is not current]
    shown = current or rank.last
    if current is not None:
        since = current.begin
    else:
        since = max([shown.end if shown is not None else rank.opened, *posted])
    activity = Activity(seconds=max(now - since, 0) / 1e9, num_other_operations=len(posted))
    if shown is None:
        return activity
    group = rank.get_group(shown) if len(rank.groups) > 1 else None
    return replace(
        activity,
        operation=shown,
        under_way=current is not None,
        group=group.name if group else "",
        peer=job.find_rank(rank, shown, shown.peer),
        waits_for=job.find_rank(rank, shown, shown.waiting_for) if current else -1,
    )


def _get_importance(operation: Operation) -> tuple[bool, bool, int]:
    """Return a sort key: waiting operations first, collectives before messages, then by age."""
    return operation.waiting_for < 0, operation.is_message, operation.begin


def _find_straggler(rows: Sequence[Row], alive: Sequence[Row]) -> Straggler | None:
    """Return the rank that the others wait for the most, and more than it waits itself, if any.

    The excess is weighted by the number of waiting ranks. Even in a balanced job, some rank is
    waited for most: the first one that the others check. But that rank waits as much as they do.
    """
    best: Straggler | None = None
    most = 0.0
    for row in rows:
        shares = [(other.rank, other.waits.get(row.rank, 0.0)) for other in alive]
        shares = [(peer, share) for peer, share in shares if peer != row.rank and share >= NOTICED]
        if not shares:
            continue
        mean = sum(share for _, share in shares) / len(shares)
        excess = mean - (row.waiting or 0.0)
        if excess >= NOTICED and excess * len(shares) > most:
            most = excess * len(shares)
            best = Straggler(row.rank, mean, tuple(peer for peer, _ in shares))
    return best


def _judge_balance(
    rows: Sequence[Row], alive: Sequence[Row], straggler: Straggler | None, max_share: float
) -> Balance:
    if rows and not any(row.is_alive for row in rows):
        return "ended"
    if rows and not any(row.has_joined for row in rows if row.is_alive):
        return "not_joined"
    if len(rows) == 1:
        return "single_rank"
    if alive and all((row.waiting or 0.0) > 0.99 for row in rows if row.is_alive):
        return "stuck"
    if straggler is not None:
        return "straggler"
    return "balanced" if max_share >= NOTICED else "no_waits"
