"""Names of signals and descriptions of exit codes."""

from __future__ import annotations

import signal

__all__ = ["describe_exit", "signal_name"]


def signal_name(number: int) -> str:
    """Return the name of a signal: `SIGKILL` for 9; `signal 42` if 42 has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_exit(code: int) -> str:
    """Describe an exit code as in `subprocess`: "exited with code 3" or "was killed by SIGKILL"."""
    return f"exited with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
