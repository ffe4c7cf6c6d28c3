"""Checks of the machine's resources: cores, memory, open files, and storage for job records."""

from __future__ import annotations

import os
import resource
import shutil
from typing import TYPE_CHECKING

import psutil

from phalanx import env
from phalanx.bench.machine import machine
from phalanx.doctor.finding import Finding, Says
from phalanx.launcher.cores import cgroup_limits, usable_cores
from phalanx.observe.job_directory import list_job_names

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["check"]

_says = Says("machine")
_GIB = 2**30
_ROOMY = _GIB
"""Bytes of free memory below which the check warns; a rank with torch takes some 300 MiB."""
_FILES = 1024
_DISK = 64 * 2**20


def check() -> list[Finding]:
    """Check cores, memory, the limits of this process, and the folder of job records."""
    return [_cores(), _memory(), _address_space(), _files(), _records()]


def _cores() -> Finding:
    there, usable = os.cpu_count() or 1, usable_cores()
    processor = machine()["processor"]
    values = {"usable": usable, "there": there, "processor": processor}
    if usable < there:
        words = f"{usable} of {there} cores may be used ({processor})"
        why = "The affinity mask or the CPU quota of the control group says so; ask for more cores"
    else:
        words = f"{there} {'core' if there == 1 else 'cores'} ({processor})"
        why = "Ask for more cores"
    if usable == 1:
        advice = f"{why}: ranks that share one take turns, which is right but slow."
        return _says.note("cores", words, advice, **values)
    return _says.ok("cores", words, **values)


def _memory() -> Finding:
    found = psutil.virtual_memory()
    limit = min(cgroup_limits("memory", _version2, _version1), default=None)
    limit = None if limit is None or limit >= found.total else int(limit)
    free = found.available if limit is None else min(found.available, limit)
    values = {"total": found.total, "available": found.available, "limit": limit}
    words = f"{found.available / _GIB:.1f} of {found.total / _GIB:.1f} GiB of memory are free"
    if limit is not None:
        words += f"; this control group may have {limit / _GIB:.1f} GiB in all"
    if free < _ROOMY:
        advice = "Start few ranks, or find more memory: a rank takes 0.3 GiB before your model."
        return _says.note("memory", words, advice, **values)
    return _says.ok("memory", words, **values)


def _version2(folder: Path) -> float | None:
    limit = (folder / "memory.max").read_text().strip()
    return None if limit == "max" else float(limit)


def _version1(folder: Path) -> float | None:
    return float((folder / "memory.limit_in_bytes").read_text())


def _address_space() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return _says.ok("address_space", "no limit on the address space", limit=None)
    return _says.note(
        "address_space",
        f"the address space of a process is limited to {limit / _GIB:.1f} GiB",
        "Lift it with `ulimit -v unlimited` before the ranks start: phalanx.empty_shared reserves "
        "as much address space as the machine has memory.",
        limit=limit,
    )


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    words = f"a process may open {soft} files"
    if soft == resource.RLIM_INFINITY or soft >= _FILES:
        return _says.ok("open_files", words, soft=soft, hard=hard)
    most = "unlimited" if hard == resource.RLIM_INFINITY else hard
    return _says.note(
        "open_files",
        words,
        f"Raise it with `ulimit -n {most}` where many ranks are: a rank needs one for each rank of "
        "its host and each connection.",
        soft=soft,
        hard=hard,
    )


def _records() -> Finding:
    try:
        base = env.jobs_directory()
        jobs = list_job_names(base)
    except ValueError:
        return _says.note("records", "where the records of jobs go isn't known", "See above.")
    except OSError as error:
        return _says.problem("records", str(error), "Ranks can't keep their flight recorders so.")
    folder = base if os.path.isdir(base) else os.path.dirname(base) or "/"
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        advice = "Make it, or choose another place with PHALANX_JOBS_DIR."
        return _says.problem("records", f"{folder}: {error.strerror}", advice)
    values = {"path": base, "free": free, "jobs": len(jobs)}
    words = f"records of jobs go to {base}, where {free / _GIB:.1f} GiB are free"
    if free < _DISK or not os.access(folder, os.W_OK):
        words = words if free < _DISK else f"records of jobs go to {base}, which can't be written"
        return _says.problem(
            "records", words, "Choose another place with PHALANX_JOBS_DIR.", **values
        )
    return _says.ok("records", words, **values)
