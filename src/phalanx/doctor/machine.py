"""Checks of the machine's resources: cores, memory, open files, and storage for job records."""

from __future__ import annotations

import os
import resource
import shutil
from typing import TYPE_CHECKING

import psutil

from phalanx import env
from phalanx.bench.machine import machine
from phalanx.doctor.finding import Finding, FindingFactory
from phalanx.launcher.cores import cgroup_limits, usable_cores
from phalanx.observe.job_directory import list_job_names

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["check"]

_finding = FindingFactory("machine")
_GIB = 2**30
_MIN_FREE_MEMORY = _GIB
"""Bytes of free memory below which the check warns; a rank with torch takes some 300 MiB."""
_MIN_OPEN_FILES = 1024
_MIN_FREE_DISK = 64 * 2**20


def check() -> list[Finding]:
    """Check cores, memory, the limits of this process, and the folder of job records."""
    return [_cores(), _memory(), _address_space(), _files(), _records()]


def _cores() -> Finding:
    total, usable = os.cpu_count() or 1, usable_cores()
    processor = machine()["processor"]
    values = {"usable": usable, "total": total, "processor": processor}
    if usable < total:
        message = f"{usable} of {total} cores are usable ({processor})"
        advice_start = (
            "The affinity mask or the CPU quota of the control group limits them; "
            "request more cores"
        )
    else:
        message = f"{total} {'core' if total == 1 else 'cores'} ({processor})"
        advice_start = "Request more cores"
    if usable == 1:
        advice = f"{advice_start}: ranks that share a core take turns, which is correct but slow."
        return _finding.note("cores", message, advice, **values)
    return _finding.ok("cores", message, **values)


def _memory() -> Finding:
    found = psutil.virtual_memory()
    limit = min(cgroup_limits("memory", _version2, _version1), default=None)
    limit = None if limit is None or limit >= found.total else int(limit)
    free = found.available if limit is None else min(found.available, limit)
    values = {"total": found.total, "available": found.available, "limit": limit}
    message = f"{found.available / _GIB:.1f} of {found.total / _GIB:.1f} GiB of memory are free"
    if limit is not None:
        message += f"; the limit of this control group is {limit / _GIB:.1f} GiB"
    if free < _MIN_FREE_MEMORY:
        advice = "Start few ranks, or free memory: a rank takes 0.3 GiB in addition to your model."
        return _finding.note("memory", message, advice, **values)
    return _finding.ok("memory", message, **values)


def _version2(folder: Path) -> float | None:
    limit = (folder / "memory.max").read_text().strip()
    return None if limit == "max" else float(limit)


def _version1(folder: Path) -> float | None:
    return float((folder / "memory.limit_in_bytes").read_text())


def _address_space() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return _finding.ok("address_space", "no limit on the address space", limit=None)
    return _finding.note(
        "address_space",
        f"the address space of a process is limited to {limit / _GIB:.1f} GiB",
        "Lift it with `ulimit -v unlimited` before the ranks start: phalanx.empty_shared reserves "
        "as much address space as the machine has memory.",
        limit=limit,
    )


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    message = f"a process may open {soft} files"
    if soft == resource.RLIM_INFINITY or soft >= _MIN_OPEN_FILES:
        return _finding.ok("open_files", message, soft=soft, hard=hard)
    limit = "unlimited" if hard == resource.RLIM_INFINITY else hard
    return _finding.note(
        "open_files",
        message,
        f"Raise it with `ulimit -n {limit}` for many ranks: a rank needs one file for each "
        "rank of its host and for each connection.",
        soft=soft,
        hard=hard,
    )


def _records() -> Finding:
    try:
        base = env.jobs_directory()
        jobs = list_job_names(base)
    except ValueError:
        return _finding.note("records", "the directory for job records is unknown", "See above.")
    except OSError as error:
        return _finding.problem(
            "records", str(error), "Ranks can't write their flight recorders there."
        )
    folder = base if os.path.isdir(base) else os.path.dirname(base) or "/"
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        advice = "Create it, or choose another directory with PHALANX_JOBS_DIR."
        return _finding.problem("records", f"{folder}: {error.strerror}", advice)
    values = {"path": base, "free": free, "jobs": len(jobs)}
    message = f"job records are in {base}, with {free / _GIB:.1f} GiB free"
    if free < _MIN_FREE_DISK or not os.access(folder, os.W_OK):
        message = (
            message
            if free < _MIN_FREE_DISK
            else f"the directory for job records, {base}, is not writable"
        )
        return _finding.problem(
            "records", message, "Choose another directory with PHALANX_JOBS_DIR.", **values
        )
    return _finding.ok("records", message, **values)
