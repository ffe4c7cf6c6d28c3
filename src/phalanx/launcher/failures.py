"""Failures of ranks and hosts: the first real error among several, and the report on it.

When one rank fails, the others fail too: they lose a peer, a connection is reset, or the launcher
stops them. A report that begins with such a consequence misleads its reader.
"""

import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from phalanx.system.processes import describe_exit, signal_exit_code

if TYPE_CHECKING:
    # It imports torch, which the launcher on another host loads later, and quietly.
    from phalanx.recorder.launcher_log_writer import LauncherLogWriter

GRACE = 3.0
"""Seconds for which ranks may continue after a consequence, so that its cause can show."""

CONSEQUENCE = 2
"""The distance of a failure whose own text names another failure as its cause."""
STOPPED = 3
"""The distance of a failure that the launcher itself has caused, by stopping the rank."""

_PEER_FAILURE = re.compile(
    r"^(phalanx\.errors\.|RuntimeError: [^:\n]*: )?"
    r"(PeerLost|Aborted|CollectiveMismatch: .* has left the group)\b",
    re.MULTILINE,
)
"""Phalanx's errors about other ranks, as raised, or wrapped in a RuntimeError by DDP (C++)."""
_SHORT = re.compile(r"(PeerLost|CollectiveTimeout|CollectiveMismatch|Aborted): ")
"""The only line that a rank prints of such an error, as `recorder.exception_hook` shortens it."""
_REPEATED = re.compile(r"(?P<exception>.+) \((at [^()]+, )?as on rank \d+\)$", re.MULTILINE)
"""The only line of an exception whose traceback another rank prints, as the same module has it."""
_STATEMENT = re.compile(
    r"^(?:phalanx\.errors\.|RuntimeError: [^:\n]*: )?"
    r"(?:PeerLost|CollectiveTimeout|CollectiveMismatch|Aborted): (?:\[[^\]]*\] )?(?:.*?: )?"
    r"((?:rank \d+|ranks disagree|split sizes disagree|the group was aborted by rank)\b.*)",
    re.MULTILINE,
)
"""The part of such an error, or of one about several ranks, that follows its own operation."""
_RANK = r"rank \d+(?: \(pid \d+(?: on [^)]+)?\))?"
_LATE = re.compile(
    rf"(?P<victim>rank \d+) waited for (?P<late>{_RANK}(?:, {_RANK})*) in (?P<operation>.*) "
    r"until the timeout of (?P<seconds>\S+ s) on this rank(?P<more>.*)"
)
"""The statement of a timeout, which names the late ranks."""
_CONNECTION_ERROR = re.compile(
    r"Connection (reset|closed) by peer|Broken pipe|Socket closed|BrokenPipeError"
    r"|ConnectionResetError|ConnectionAbortedError|ncclRemoteError|remote process exited"
)
_PREFIX = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)
"""The prefix that torch gives to the lines of a traceback once a group exists."""
_TRACEBACK = "Traceback (most recent call last):"
_TERMINATION = "terminate called after throwing an instance of "
_TERMINATED = re.compile(rf"^{_TERMINATION}'([^']+)'\n\s*what\(\):\s+(.*)", re.MULTILINE)
"""The report of C++ on an exception that nobody catches."""
_SYNTAX_ERROR = re.compile(r"(Syntax|Indentation|Tab)Error: ")
_CHAIN = (
    "The above exception was the direct cause",
    "During handling of the above exception",
)


@dataclass(frozen=True)
class Failure:
    """The failure of a rank.

    Attributes:
        rank: The rank.
        pid: The process ID of the rank.
        code: The exit code as in `subprocess`, negative for a signal.
        time: The monotonic time of the failure, in seconds.
        text: The traceback, or the end of the rank's stderr; empty if unknown.
    """

    rank: int
    pid: int
    code: int
    time: float
    text: str = ""
    stopped: bool = False
    """True if the launcher had begun to stop the rank before it ended."""
    had_raised: bool = False
    """True if the rank was ending with an exception, the cause of others, when it was stopped."""
    is_shown: bool = False
    """True if the text has been shown to the user."""

    @property
    def distance(self) -> int:
        """The distance from the cause: 0 for a real error, more for its consequences."""
        if self.had_raised:
            return 0
        if self.stopped:
            return STOPPED
        if self.code < 0 and self.code != -signal.SIGABRT:
            return 0
        if _PEER_FAILURE.search(self.text):
            return CONSEQUENCE
        return 1 if _CONNECTION_ERROR.search(self.text) else 0

    @property
    def exit_code(self) -> int:
        """The exit code of the launcher for this failure: 128 + N for signal N, never 0."""
        if self.had_raised:
            return 1
        return signal_exit_code(-self.code) if self.code < 0 else self.code or 1

    @property
    def headline(self) -> str:
        """A line with the rank, its pid and the reason of its exit."""
        reason = "raised an exception, and was stopped before it had ended"
        if not self.had_raised:
            reason = _describe_exit(self.code)
        return f"rank {self.rank} (pid {self.pid}) {reason}"

    @property
    def statement(self) -> str:
        """The sentence of a Phalanx error about other ranks, or about several; empty without one.

        After a timeout, its subject is the ranks that were late.
        """
        if self.code < 0 and not self.stopped:  # by a signal, whatever it was printing
            return ""
        if not (found := _STATEMENT.search(self.text)):
            return ""
        if not (timeout := _LATE.match(found[1])):
            return found[1]
        were, them = ("were", "them") if len(self.late_ranks) > 1 else ("was", "it")
        return (
            f"{timeout['late']} {were} late: {timeout['victim']} waited for {them} in "
            f"{timeout['operation']} until the timeout of {timeout['seconds']}{timeout['more']}"
        )

    @property
    def late_ranks(self) -> tuple[int, ...]:
        """The ranks for which this one waited until a timeout; empty for another failure."""
        found = _STATEMENT.search(self.text)
        timeout = found and _LATE.match(found[1])
        return tuple(map(int, re.findall(r"rank (\d+)", timeout["late"]))) if timeout else ()

    @property
    def verdict(self) -> str:
        """The statement or, without one, the headline: a line that blames no victim."""
        return self.statement or self.headline

    @property
    def is_described(self) -> bool:
        """True if the user has seen that this failure is a consequence."""
        return self.is_shown and bool(self.statement)

    @property
    def name(self) -> str:
        """The rank, for a list of ranks."""
        return str(self.rank)

    @property
    def exception(self) -> str:
        """The exception that ended the rank, if it does not only say what happened to others."""
        return "" if self.statement else find_exception(self.text)

    @property
    def summary(self) -> str:
        """The headline and the last line of the text."""
        return f"{self.headline}: {''.join(self.text.splitlines()[-1:])}"


class RemoteFailure(NamedTuple):
    """A failure of the job on another host.

    Attributes:
        text: The description of the failure, for people.
        code: The exit code of the job that results from it.
    """

    text: str
    code: int
    is_final: bool = False
    """True if the job cannot continue, even if restarts are left."""
    has_left: bool = False
    """True if the host has left on purpose, which is no failure."""


class HostFailure(NamedTuple):
    """The failure of one of the hosts that a launcher has started; attributes as in `Failure`."""

    rank: int
    """The index of the host."""
    name: str
    time: float
    distance: int
    stopped: bool
    summary: str
    statement: str = ""
    late_ranks: tuple[int, ...] = ()
    is_described: bool = False
    exception: str = ""


F = TypeVar("F", Failure, HostFailure)


def find_root_cause(failures: Sequence[F]) -> F:
    """Return the failure with the least distance, then the earliest time, then the lowest rank."""
    return min(failures, key=lambda failure: (failure.distance, failure.time, failure.rank))


def mark_late_causes(failures: Sequence[Failure]) -> list[Failure]:
    """Find stopped ranks that were the cause: they had raised an exception, and others name them.

    A rank reports its exception to its peers at once, but may take long to end after that. By then
    its peers may have ended, and the launcher may have stopped it.
    """
    reports = [failure.text for failure in failures if failure.distance == CONSEQUENCE]
    return [
        replace(failure, had_raised=True)
        if failure.stopped
        and (_TRACEBACK in failure.text or _REPEATED.search(failure.text))
        and not _PEER_FAILURE.search(failure.text)
        and any(f"(pid {failure.pid})" in report for report in reports)
        else failure
        for failure in failures
    ]


def may_have_unknown_cause(failures: Sequence[F]) -> bool:
    """Return whether all failures are consequences, and their cause still has time to show."""
    cause = find_root_cause(failures)
    return cause.distance > 0 and time.monotonic() < cause.time + GRACE


def excerpt(text: str) -> str:
    """Return the part of a rank's last output that explains its exit.

    This is the last traceback with the tracebacks chained to it, or the line in its place. If there
    is none, it is all from the report of C++ on an exception on, or the last ten lines. If that is
    more than 40 lines, its middle is omitted.
    """
    rows = _PREFIX.sub("", text.rstrip()).splitlines()
    starts = _find_starts(rows)
    if not starts:
        ends = [number for number, row in enumerate(rows) if row.startswith(_TERMINATION)]
        first = ends[0] if ends else -10
    elif _is_line(rows[first := starts.pop()]):
        return rows[first]
    while starts and any(row.startswith(_CHAIN) for row in rows[max(0, first - 2) : first]):
        first = starts.pop()
    rows = rows[first:]
    if len(rows) > 40:
        rows = [*rows[:10], f"  ... {len(rows) - 40} lines ...", *rows[-30:]]
    return "\n".join(rows)


def find_exception(text: str) -> str:
    """Return the line with the exception in the end of a rank's stderr; empty if there is none."""
    rows = text.splitlines()
    starts = _find_starts(rows)
    if not starts:  # C++ code prints none, nor does a script that cannot be compiled
        if terminated := _TERMINATED.search(text):
            return f"{terminated[1]}: {terminated[2]}"
        return next(filter(_SYNTAX_ERROR.match, rows[-1:]), "")
    if _is_line(row := rows[starts[-1]]):
        repeated = _REPEATED.match(row)
        return repeated["exception"] if repeated else row
    return next((row for row in rows[starts[-1] + 1 :] if row and not row[0].isspace()), "")


def _find_starts(rows: Sequence[str]) -> list[int]:
    """Return the indices of the lines that begin a traceback, or stand in its place."""
    return [i for i, row in enumerate(rows) if row.startswith(_TRACEBACK) or _is_line(row)]


def _is_line(row: str) -> bool:
    """Return whether a line stands in the place of a traceback."""
    return bool(_SHORT.match(row) or _REPEATED.match(row))


def record_exceptions(log: "LauncherLogWriter", failures: Sequence[Failure]) -> None:
    """Record with which exceptions ranks have ended; those that formed no group cannot do it."""
    for each in failures:
        if error := find_exception(each.text):
            log.end(each.rank, each.pid, each.code, stopped=each.stopped, error=error)


def is_remote_cause(failures: Sequence[Failure], remote_failure: RemoteFailure | None) -> bool:
    """Return whether the report from another host explains the failures on this host."""
    return remote_failure is not None and (not failures or bool(find_root_cause(failures).distance))


def format_report(failures: Sequence[Failure], remote_failure: RemoteFailure | None = None) -> str:
    """Return a report for people that names the failing rank or host and the reason.

    Args:
        failures: The failures of ranks of this host; not empty if `remote_failure` is None.
        remote_failure: The failure of another host; None if none is known.
    """
    cause = None if is_remote_cause(failures, remote_failure) else find_root_cause(failures)
    lines = [cause.verdict if cause else remote_failure.text if remote_failure else ""]
    if cause and cause.is_shown and (error := find_exception(cause.text)):
        lines[0] += "" if cause.statement else f": {error}"
    elif cause and cause.text:
        owner = f"rank {cause.rank}'s" if cause.statement else "its"
        lines[0] += f"; the end of {owner} stderr:"
        lines += [f"    | {line}" for line in cause.text.splitlines()]
    return "\n".join([*lines, *format_consequences(cause, failures, "rank ")])


def format_consequences(cause: F | None, failures: Sequence[F], kind: str = "") -> list[str]:
    """Return the lines of a report about the failures that followed the cause.

    Args:
        cause: The root cause; None if it is on another host. It is left out, unless its verdict is
            about other ranks.
        failures: All failures.
        kind: The text before the names of those that the launcher has stopped.
    """
    late = cause.late_ranks if cause else ()
    has_left_out = cause is not None and not cause.statement
    others = sorted(
        (f for f in failures if f is not cause or not has_left_out), key=lambda each: each.rank
    )
    rest = [each for each in others if not each.is_described and each.rank not in late]
    lines = []
    own = cause.exception if cause else ""
    if alike := [each.name for each in rest if own and each.exception == own]:
        lines.append(f"  the same exception on {kind}{', '.join(alike)}")
        rest = [each for each in rest if each.name not in alike]
    lines += [f"  after it, {each.summary}"[:200] for each in rest if not each.stopped]
    if described := [each.name for each in others if each.is_described]:
        lines.append(f"  failed because of it: {kind}{', '.join(described)}")
    if stopped := [each.name for each in rest if each.stopped]:
        lines.append(f"  stopped because of it: {kind}{', '.join(stopped)}")
    return lines


def _describe_exit(code: int) -> str:
    if code == 0:
        return "exited with code 0 before it had returned a result"
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (sent by hand, or by the kernel when memory ran out)"
    return describe_exit(code)
