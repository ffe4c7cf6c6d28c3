"""The exit codes of commands and of ranks: `phalanx --help` prints them."""

from __future__ import annotations

import signal


def for_signal(number: int) -> int:
    """Return the exit code for an end by a signal, by the convention of shells: 128 + number."""
    return 128 + number


SUCCESS = 0
FAILURE = 1
USAGE = 2
INTERRUPTED = for_signal(signal.SIGINT)
TERMINATED = for_signal(signal.SIGTERM)

MEANINGS = {
    str(SUCCESS): "success",
    str(FAILURE): "an error that the message describes, or a check that failed",
    str(USAGE): "wrong usage: an unknown option, a missing file",
    str(INTERRUPTED): "ended by Ctrl-C",
    str(TERMINATED): "ended by SIGTERM (`phalanx run`, a `Trainer`)",
    "128 + N": "the rank that failed first was killed by signal N (`phalanx run`)",
    "other": "the exit code of the rank that failed first (`phalanx run`)",
}
"""The meaning of each exit code, in the order of the documentation."""
