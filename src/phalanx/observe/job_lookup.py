"""Finding a job by its name or a prefix of it; listing and removing jobs."""

from __future__ import annotations

import contextlib
import difflib
from typing import TYPE_CHECKING

from phalanx import env
from phalanx.observe.escape import escape
from phalanx.observe.job_directory import JobDirectory, list_job_names

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["find_job", "get_base_directory", "list_jobs", "list_running_jobs", "remove_job"]


def get_base_directory() -> str:
    """Return the directory that contains the jobs' directories.

    Raises:
        UsageError: `PHALANX_JOBS_DIR` is malformed.
    """
    try:
        return env.jobs_directory()
    except ValueError as error:
        raise _make_usage_error(str(error)) from None


def list_jobs() -> list[str]:
    """Return the names of all jobs, the newest first.

    Raises:
        UsageError: The directory of the jobs cannot be used.
    """
    base = get_base_directory()
    try:
        found = list_job_names(base)
    except OSError as error:
        raise _make_usage_error(str(error)) from None
    times = {}
    for name in found:
        # A job that cannot be opened is listed last; opening it later reports the reason.
        times[name] = 0.0
        with contextlib.suppress(OSError), JobDirectory(base, name) as job:
            times[name] = job.measure_usage().time
    return sorted(found, key=lambda name: (times[name], name), reverse=True)


def find_job(text: str | None = None) -> JobDirectory:
    """Open the directory of a job; the caller must close it.

    Args:
        text: The name of the job or a unique prefix of it; None for the newest job.

    Raises:
        UsageError: There is no such job, or more than one, and the message names similar ones; or
            the directory cannot be used.
    """
    base = get_base_directory()
    found = list_jobs()
    name = _match_name(text, found, base)
    try:
        return JobDirectory(base, name)
    except FileNotFoundError:
        raise _make_usage_error(f"job {name} has just been removed") from None
    except OSError as error:
        raise _make_usage_error(str(error)) from None


def list_running_jobs(base: str) -> list[str]:
    """Return the names of the running jobs in a directory; skip jobs that cannot be opened."""
    found = []
    for name in list_job_names(base):
        with contextlib.suppress(OSError), JobDirectory(base, name) as job:
            if not job.has_ended():
                found.append(name)
    return found


def remove_job(text: str) -> str:
    """Remove the directory of a job that has ended, and return the job's name.

    Args:
        text: The job, as for `find_job`.

    Raises:
        UsageError: There is no such job, it is still running, or it cannot be removed completely.
    """
    with find_job(text) as job:
        if not job.lock_exclusive():
            raise _make_usage_error(f"job {job.name} is still running: end it first")
        try:
            job.remove()
        except OSError as error:
            raise _make_usage_error(str(error)) from None
        return job.name


def _match_name(text: str | None, found: Sequence[str], base: str) -> str:
    given = "" if text is None else escape(repr(text), 80)
    if not found:
        raise _make_usage_error(
            f"there is no job{given and ' '}{given} in {base}: only running and failed jobs are "
            "kept there"
        )
    if text is None or text in found:
        return found[0] if text is None else text
    matches = [name for name in found if text and name.startswith(text)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise _make_usage_error(
            f"{given} matches more than one job, {_enumerate_names(matches)}: give more of the name"
        )
    near = difflib.get_close_matches(text[:100], found, n=3)
    hint = (
        f"did you mean {_enumerate_names(near)}?" if near else f"expected {_enumerate_names(found)}"
    )
    raise _make_usage_error(f"there is no job {given} in {base}: {hint} (`phalanx jobs` lists all)")


def _enumerate_names(found: Sequence[str]) -> str:
    shown = [*found[:3], *([f"{len(found) - 3} more"] if len(found) > 3 else [])]
    return " or ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]


def _make_usage_error(message: str) -> ValueError:
    # Imported here because it imports torch: `phalanx jobs` must respond at once.
    from phalanx.errors import UsageError

    return UsageError(message)
