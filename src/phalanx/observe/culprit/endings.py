"""How each rank ended: from what it said itself, what its launcher noted and what its peers saw."""

from __future__ import annotations

import math
import re
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from phalanx.observe.model import Job, Rank

__all__ = [
    "End",
    "How",
    "clock_of",
    "end_of",
    "last_sign",
    "monotonic",
    "signal_name",
    "told_in",
    "told_of",
]

How = Literal[
    "alive",  # its process is there
    "left",  # it is there, but has left all its groups
    "well",  # the script came to its end
    "failed",  # an exception
    "interrupted",  # KeyboardInterrupt: somebody pressed Ctrl-C
    "killed",  # a signal
    "exited",  # an exit code that isn't zero
    "vanished",  # gone, and nobody knows how
    "launcher",  # ended by its launcher, which stops the others when one fails
    "absent",  # it left no trace
    "elsewhere",  # on another machine
]

_OURS = re.compile(
    r"^(?:RuntimeError: [^:\n]*: )?(?:[\w.]*\.)?"  # DDP, which is C++, has an error of its own
    r"(PeerLost|Aborted|CollectiveMismatch|CollectiveTimeout)\b"
)
_SEEN = re.compile(r"\(pid (\d{1,9})\) (?:was killed by (\w{3,12})|exited with code (\d{1,3}))")


@dataclass(frozen=True)
class End:
    """How a rank ended.

    Attributes:
        how: In a word.
        time: When, in nanoseconds of the monotonic clock; 0 if that isn't known.
        code: As in subprocess: negative for a signal; None if it isn't known.
    """

    how: How
    time: int = 0
    code: int | None = None

    @property
    def by_itself(self) -> bool:
        """Whether it ended, not well, and not because its launcher wanted it to."""
        return self.how in ("failed", "killed", "exited", "vanished")

    @property
    def by_others(self) -> bool:
        """Whether somebody ended it, from outside of the job's own doing."""
        return self.how in ("launcher", "interrupted")


def end_of(rank: Rank, job: Job) -> End:
    """How a rank of a job ended, or that it didn't."""
    if not rank.opened and not rank.pid:
        return End("absent")
    code = rank.start.code if rank.start is not None else None
    if code is None and rank.gone:
        code = _seen_by_others(rank.pid, job)
    time = rank.ended or _noted_end(rank, job)
    if rank.ending == "failed":
        interrupted = rank.last_words.startswith("KeyboardInterrupt")
        return End("interrupted" if interrupted else "failed", time, code)
    if rank.start is not None and rank.start.stopped:
        return End("launcher", _noted_end(rank, job) or time, code)
    if code is not None:
        return End("killed" if code < 0 else "exited" if code else "well", time, code)
    if rank.gone:
        return End("well" if rank.ending else "vanished", time)
    if rank.ending == "exited":
        return End("well", time)
    if rank.process is None:
        return End("elsewhere" if rank.opened else "absent")
    return End("left" if rank.ending == "left" else "alive", time)


def told_of(rank: Rank) -> str:
    """Which of Phalanx's errors ended this rank: "PeerLost", ...; empty if another one, or none."""
    return told_in(rank.last_words)


def told_in(words: str) -> str:
    """Which of Phalanx's errors this is, in the words of an exception; empty if another one."""
    found = _OURS.match(words)
    return found[1] if found else ""


def clock_of(job: Job, rank: Rank | None = None) -> int:
    """Unix time minus monotonic time in nanoseconds, as a rank noted it; 0 if none did."""
    if rank is not None and rank.clock:
        return rank.clock
    return next((other.clock for other in job.ranks if other.clock), 0)


def monotonic(job: Job, unix: float) -> int:
    """The host's monotonic clock, in nanoseconds, at a Unix time; 0 if that can't be told."""
    clock = clock_of(job)
    nanoseconds = unix * 1e9
    if not clock or not math.isfinite(nanoseconds):
        return 0
    return max(0, int(nanoseconds) - clock)


def last_sign(rank: Rank) -> int:
    """When a rank last wrote anything to its black box."""
    operations = (*rank.history, *rank.open)
    return max(
        rank.opened,
        rank.ended,
        max((max(operation.begin, operation.end) for operation in operations), default=0),
        max((report.time for report in rank.reports), default=0),
    )


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; a signal without a name is `signal 42`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _noted_end(rank: Rank, job: Job) -> int:
    if rank.start is None or rank.start.ended is None:
        return 0
    return monotonic(job, rank.start.ended)


def _seen_by_others(pid: int, job: Job) -> int | None:
    """The code that the errors of other ranks say of a process; peers see it, others don't."""
    for rank in job.ranks:
        for its_pid, killed, exited in _SEEN.findall(rank.last_words):
            if int(its_pid) == pid and rank.pid != pid:
                return int(exited) if exited else _signal_code(killed)
    return None


def _signal_code(name: str) -> int | None:
    number = signal.Signals.__members__.get(name)
    return None if number is None else -int(number)
