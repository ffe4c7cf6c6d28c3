"""A launcher's report on a failure, of its own ranks or of another host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.launcher.root_cause import Failure, find_root_cause

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.launcher.job_coordinator import RemoteFailure

__all__ = ["format_report", "is_remote_cause"]


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
    others = sorted((f for f in failures if f is not cause), key=lambda failure: failure.rank)
    lines = [cause.headline if cause else remote_failure.text if remote_failure else ""]
    if cause and cause.text:
        lines[0] += "; the end of its stderr:"
        lines += [f"    | {line}" for line in cause.text.splitlines()]
    for failure in others:
        if not failure.stopped:
            last = "".join(failure.text.splitlines()[-1:])
            lines.append(f"  after it, {failure.headline}: {last}"[:200])
    if stopped := [str(failure.rank) for failure in others if failure.stopped]:
        lines.append(f"  stopped because of it: rank {', '.join(stopped)}")
    return "\n".join(lines)
