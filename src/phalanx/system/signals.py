"""Names of signals."""

from __future__ import annotations

import signal

__all__ = ["signal_name"]


def signal_name(number: int) -> str:
    """Return the name of a signal: `SIGKILL` for 9; `signal 42` if 42 has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
