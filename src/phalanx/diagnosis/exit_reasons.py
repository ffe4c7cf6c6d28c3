"""The way in which each rank ended, from its own record, its launcher's and its peers'."""

from __future__ import annotations

import math
import re
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from phalanx.diagnosis.model import Start
from phalanx.recorder.exception_hook import CAUSED_BY
from phalanx.system.processes import signal_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from phalanx.diagnosis.model import Job, Rank

ExitReason = Literal[
    "alive",  # its process exists
    "left",  # its process exists, but has left all its groups
    "completed",  # the script completed
    "failed",  # an exception
    "interrupted",  # KeyboardInterrupt (Ctrl-C)
    "killed",  # a signal
    "exited",  # a nonzero exit code
    "vanished",  # gone for an unknown reason
    "launcher",  # ended by its launcher, which stops all ranks when one fails
    "absent",  # it left no trace
    "other_host",  # on another host
]

_PHALANX_ERROR = re.compile(
    # DDP's C++ code raises an error of its own; other libraries raise theirs from ours.
    rf"(?:^|{re.escape(CAUSED_BY)})(?:RuntimeError: [^:\n]*: )?(?:[\w.]*\.)?"
    r"(PeerLost|Aborted|CollectiveMismatch|CollectiveTimeout)\b"
)
_FOREIGN_ERRORS = (
    (
        re.compile(
            r"\bgloo\b.*\b(?:Connection (?:reset|closed) by peer|Broken pipe|Socket closed)"
            r"|\bncclRemoteError\b"
        ),
        "PeerLost",
    ),
    (
        re.compile(
            r"\bgloo\b.*\b(?:Timed out waiting|Application timeout)"
            r"|\bcaught collective operation timeout\b"
        ),
        "CollectiveTimeout",
    ),
)
"""The errors by which Gloo and NCCL report a lost peer, and a timeout."""
_SEEN_BY_PEERS = re.compile(
    r"\(pid (\d{1,9})\) (?:was killed by (\w{3,12})|exited with code (\d{1,3}))"
)

_NO_START = Start(pid=0, time=0.0)
"""The launcher's record of a rank that it did not start: nothing is known."""

_SIGNAL_CODES = {name: -int(number) for name, number in signal.Signals.__members__.items()}


@dataclass(frozen=True)
class ExitStatus:
    """The end of a rank.

    Attributes:
        reason: The way in which it ended.
        time: The time of its end, in nanoseconds of the monotonic clock; 0 if unknown.
        code: The exit code as in `subprocess`, negative for a signal; None if unknown.
    """

    reason: ExitReason
    time: int = 0
    code: int | None = None

    @property
    def is_own_failure(self) -> bool:
        """Return whether the rank failed by itself, rather than being ended from outside."""
        return self.reason in ("failed", "killed", "exited", "vanished")

    @property
    def has_finished(self) -> bool:
        """Return whether the rank completed its script or left all its groups."""
        return self.reason in ("completed", "left")

    @property
    def is_inactive(self) -> bool:
        """Return whether the rank takes part in no operations any more, or never did."""
        return self.reason not in ("alive", "left", "other_host")

    def describe(self, labels: Mapping[str, str]) -> str:
        """Describe the end: "killed by SIGKILL", "exited with code 1", else the reason's label."""
        if self.reason == "killed" and self.code is not None:
            return f"killed by {signal_name(-self.code)}"
        if self.reason == "exited":
            return f"exited with code {self.code}"
        return labels.get(self.reason, self.reason)

    @property
    def is_external(self) -> bool:
        """Return whether its launcher or an interruption ended the rank."""
        return self.reason in ("launcher", "interrupted")


def determine_exit(rank: Rank, job: Job) -> ExitStatus:
    """Determine how a rank of a job ended, or whether it is alive."""
    if not rank.opened and not rank.pid:
        return ExitStatus("absent")
    start = rank.start or _NO_START
    code = start.code
    if code is None and rank.is_gone:
        code = _find_code_seen_by_peers(rank.pid, job)
    logged_end = 0 if start.ended is None else to_monotonic(job, start.ended)
    time = rank.ended or logged_end
    if rank.ending == "failed":
        interrupted = rank.exception.startswith("KeyboardInterrupt")
        return ExitStatus("interrupted" if interrupted else "failed", time, code)
    if start.stopped:
        return ExitStatus("launcher", logged_end or time, code)
    if job.launcher_lost and rank.is_gone and not rank.ending and start.code is None:
        # By the kernel, when the launcher ended.
        return ExitStatus("launcher", time, -int(signal.SIGKILL))
    if code is not None:
        return ExitStatus("killed" if code < 0 else "exited" if code else "completed", time, code)
    if rank.is_gone:
        return ExitStatus("completed" if rank.ending or rank.ended else "vanished", time)
    if rank.ending == "exited":
        return ExitStatus("completed", time)
    if rank.process is None:
        return ExitStatus("other_host" if rank.opened else "absent")
    return ExitStatus("left" if rank.ending == "left" else "alive", time)


def get_group_error(rank: Rank) -> str:
    """Return the error of a group that ended this rank, such as "PeerLost", or "".

    An error of another backend counts as the error of Phalanx that it corresponds to.
    """
    return parse_group_error(rank.exception)


def parse_group_error(text: str) -> str:
    """Return the name of the error of a group in an exception's text, as above, or ""."""
    if found := _PHALANX_ERROR.search(text):
        return found[1]
    return next((name for pattern, name in _FOREIGN_ERRORS if pattern.search(text)), "")


def get_clock_offset(job: Job) -> int:
    """Return a recorded difference of Unix and monotonic time in nanoseconds; 0 if none was."""
    return next((other.clock for other in job.ranks if other.clock), 0)


def to_monotonic(job: Job, unix: float) -> int:
    """Convert Unix seconds to nanoseconds of the host's monotonic clock; 0 if impossible."""
    clock = get_clock_offset(job)
    nanoseconds = unix * 1e9
    if not clock or not math.isfinite(nanoseconds):
        return 0
    return max(0, int(nanoseconds) - clock)


def get_last_record_time(rank: Rank) -> int:
    """Return the time of a rank's last record in its flight recorder (monotonic ns)."""
    operations = (max(operation.begin, operation.end) for operation in rank.records)
    reports = (report.time for report in rank.reports)
    return max((rank.opened, rank.ended, *operations, *reports))


def _find_code_seen_by_peers(pid: int, job: Job) -> int | None:
    """Return the exit code of a process according to the errors of other ranks, else None.

    Peers observe the exit code of a process; other processes cannot.
    """
    for rank in job.ranks:
        for its_pid, killed, exited in _SEEN_BY_PEERS.findall(rank.exception):
            if int(its_pid) == pid and rank.pid != pid:
                return int(exited) if exited else _SIGNAL_CODES.get(killed)
    return None
