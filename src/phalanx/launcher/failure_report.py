"""A launcher's report on a failure, of its own ranks or of another host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.launcher.root_cause import Failure, first_cause

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.launcher.job_coordinator import Heard

__all__ = ["is_elsewhere", "told"]


def is_elsewhere(failures: Sequence[Failure], heard: Heard | None) -> bool:
    """Return whether the report from another host explains the failures on this host."""
    return heard is not None and (not failures or bool(first_cause(failures).distance))


def told(failures: Sequence[Failure], heard: Heard | None = None) -> str:
    """Return a report for people that names the failing rank or host and the reason.

    Args:
        failures: The failures of ranks of this host; not empty if `heard` is None.
        heard: The failure of another host; None if none is known.
    """
    cause = None if is_elsewhere(failures, heard) else first_cause(failures)
    others = sorted((f for f in failures if f is not cause), key=lambda failure: failure.rank)
    lines = [cause.headline if cause else heard.text if heard else ""]
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
