"""Finding the first real error among what several ranks report.

When one rank fails, the others fail too: a peer is lost, a connection is reset, the launcher stops
them. Those are consequences; a report that begins with one of them sends its reader the wrong way.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CONSEQUENCE", "GRACE", "STOPPED", "Failure", "excerpt", "first_cause", "signal_name"]

GRACE = 3.0
"""Seconds for which ranks may go on after a consequence was seen, so that its cause can show."""

CONSEQUENCE = 2
"""The distance of an end that says itself what it followed from."""
STOPPED = 3
"""The distance of an end that the launcher itself brought about."""

_LOST = re.compile(
    r"^(phalanx\.errors\.|RuntimeError: [^:\n]*: )"
    r"(PeerLost|Aborted|CollectiveMismatch: .* has left the group)\b",
    re.MULTILINE,
)
"""DDP, which is C++, says them in a RuntimeError of its own."""
_CONNECTION = re.compile(
    r"Connection (reset|closed) by peer|Broken pipe|Socket closed|BrokenPipeError"
    r"|ConnectionResetError|ConnectionAbortedError|ncclRemoteError|remote process exited"
)
_PREFIX = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)
"""With which torch begins the lines of a traceback once a group exists."""
_TRACEBACK = "Traceback (most recent call last):"
_CHAIN = (
    "The above exception was the direct cause",
    "During handling of the above exception",
)


@dataclass(frozen=True)
class Failure:
    """How a rank ended: `code` as in `subprocess`, negative for a signal; `time` is monotonic."""

    rank: int
    pid: int
    code: int
    time: float
    text: str = ""
    stopped: bool = False
    """The launcher had begun to stop the rank before it ended."""

    @property
    def distance(self) -> int:
        """How far from the cause: 0 for a real error, more for what it brought about."""
        if self.stopped:
            return STOPPED
        if self.code < 0 and self.code != -signal.SIGABRT:
            return 0
        if _LOST.search(self.text):
            return CONSEQUENCE
        return 1 if _CONNECTION.search(self.text) else 0

    @property
    def exit_code(self) -> int:
        """What the launcher ends with because of it: 128 + N for signal N, never 0."""
        return 128 - self.code if self.code < 0 else self.code or 1

    @property
    def headline(self) -> str:
        """The rank, its pid and its end, in a line."""
        return f"rank {self.rank} (pid {self.pid}) {_ending(self.code)}"


def first_cause(failures: Sequence[Failure]) -> Failure:
    """Pick the failure to report: nearest to the cause, then the earliest, then the lowest rank."""
    return min(failures, key=lambda failure: (failure.distance, failure.time, failure.rank))


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; a signal without a name is `signal 42`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def excerpt(text: str, lines: int = 40) -> str:
    """Cut a rank's last output down to what explains its end.

    That is the last traceback with the ones chained to it, or the last ten lines if there is none.
    Of more than `lines` lines the middle is left out.
    """
    rows = _PREFIX.sub("", text.rstrip()).splitlines()
    starts = [i for i, row in enumerate(rows) if row.startswith(_TRACEBACK)]
    if not starts:
        return "\n".join(rows[-10:])
    first = starts.pop()
    while starts and any(row.startswith(_CHAIN) for row in rows[max(0, first - 2) : first]):
        first = starts.pop()
    rows = rows[first:]
    if len(rows) > lines:
        head, tail = lines // 4, lines - lines // 4
        rows = [*rows[:head], f"  ... {len(rows) - head - tail} lines ...", *rows[-tail:]]
    return "\n".join(rows)


def _ending(code: int) -> str:
    if code == 0:
        return "exited with code 0 before it had returned a result"
    if code > 0:
        return f"exited with code {code}"
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (sent by hand, or by the kernel when memory ran out)"
    return f"was killed by {signal_name(-code)}"
