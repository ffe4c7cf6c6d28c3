"""Finding a job by its name, a beginning of it, or none; listing and removing jobs."""

from __future__ import annotations

import contextlib
import difflib
from typing import TYPE_CHECKING

from phalanx import env
from phalanx.observe.directory import Directory, names
from phalanx.observe.escape import escape

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["base_directory", "find", "job_names", "remove"]


def base_directory() -> str:
    """Where jobs are looked for.

    Raises:
        UsageError: `PHALANX_JOBS_DIR` is malformed.
    """
    try:
        return env.jobs_directory()
    except ValueError as error:
        raise _wrong(str(error)) from None


def job_names() -> list[str]:
    """The names of all jobs, newest first.

    Raises:
        UsageError: the directory of the jobs can't be used.
    """
    base = base_directory()
    try:
        found = names(base)
    except OSError as error:
        raise _wrong(str(error)) from None
    times = {}
    for name in found:
        # What can't be opened is listed last; who opens it then, learns why.
        times[name] = 0.0
        with contextlib.suppress(OSError), Directory(base, name) as job:
            times[name] = job.usage().time
    return sorted(found, key=lambda name: (times[name], name), reverse=True)


def find(text: str | None = None) -> Directory:
    """Open the directory of a job; the caller closes it.

    Args:
        text: its name or a beginning of it that no other job has; None: the newest.

    Raises:
        UsageError: there is no such job, or more than one; near ones are named. Or its directory
            can't be used.
    """
    base = base_directory()
    found = job_names()
    name = _match(text, found, base)
    try:
        return Directory(base, name)
    except FileNotFoundError:
        raise _wrong(f"job {name} has just been removed") from None
    except OSError as error:
        raise _wrong(str(error)) from None


def remove(text: str) -> str:
    """Remove the directory of a job that has ended; returns its name.

    Args:
        text: as `find` takes it.

    Raises:
        UsageError: there is no such job, it still runs, or something of it can't be removed.
    """
    with find(text) as job:
        if not job.claim():
            raise _wrong(f"job {job.name} still runs: end it first")
        try:
            job.remove()
        except OSError as error:
            raise _wrong(str(error)) from None
        return job.name


def _match(text: str | None, found: Sequence[str], base: str) -> str:
    given = "" if text is None else escape(repr(text), 80)
    if not found:
        raise _wrong(
            f"there is no job{given and ' '}{given} in {base}: it has jobs that run and jobs that "
            "failed, a clean end leaves nothing"
        )
    if text is None or text in found:
        return found[0] if text is None else text
    matches = [name for name in found if text and name.startswith(text)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise _wrong(f"job {given} could be {_some(matches)}: give more of its name")
    near = difflib.get_close_matches(text[:100], found, n=3)
    hint = f"did you mean {_some(near)}?" if near else f"there is {_some(found)}"
    raise _wrong(f"there is no job {given} in {base}: {hint} (`phalanx jobs` lists all)")


def _some(found: Sequence[str]) -> str:
    shown = [*found[:3], *([f"{len(found) - 3} more"] if len(found) > 3 else [])]
    return " or ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]


def _wrong(message: str) -> ValueError:
    # Here, since it brings in torch: `phalanx jobs` answers at once.
    from phalanx.errors import UsageError

    return UsageError(message)
