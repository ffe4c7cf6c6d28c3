"""Checks of the machine's resources: cores, memory, open files, disk for job records, GPUs."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from typing import TYPE_CHECKING

import psutil
import torch
import torch.distributed as dist

from phalanx import env
from phalanx.bench.machine import machine
from phalanx.doctor.finding import Finding, FindingFactory
from phalanx.launcher.host_resources import cgroup_limits, usable_cores
from phalanx.recorder.job_directory import list_job_names

if TYPE_CHECKING:
    from pathlib import Path

_machine = FindingFactory("machine")
_GIB = 2**30
_MIN_FREE_MEMORY = _GIB
"""Bytes of free memory below which the check warns; a rank with torch takes some 300 MiB."""
_MIN_OPEN_FILES = 1024
_MIN_FREE_DISK = 64 * 2**20
_devices = FindingFactory("devices")
_DRIVER_SECONDS = 20.0


def check_resources() -> list[Finding]:
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
        return _machine.note("cores", message, advice, **values)
    return _machine.ok("cores", message, **values)


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
        return _machine.note("memory", message, advice, **values)
    return _machine.ok("memory", message, **values)


def _version2(folder: Path) -> float | None:
    limit = (folder / "memory.max").read_text().strip()
    return None if limit == "max" else float(limit)


def _version1(folder: Path) -> float | None:
    return float((folder / "memory.limit_in_bytes").read_text())


def _address_space() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return _machine.ok("address_space", "no limit on the address space", limit=None)
    return _machine.note(
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
        return _machine.ok("open_files", message, soft=soft, hard=hard)
    limit = "unlimited" if hard == resource.RLIM_INFINITY else hard
    return _machine.note(
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
        return _machine.note("records", "the directory for job records is unknown", "See above.")
    except OSError as error:
        return _machine.problem(
            "records", str(error), "Ranks can't write their flight recorders there."
        )
    folder = base if os.path.isdir(base) else os.path.dirname(base) or "/"
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        advice = "Create it, or choose another directory with PHALANX_JOBS_DIR."
        return _machine.problem("records", f"{folder}: {error.strerror}", advice)
    values = {"path": base, "free": free, "jobs": len(jobs)}
    message = f"job records are in {base}, with {free / _GIB:.1f} GiB free"
    if free >= _MIN_FREE_DISK and os.access(folder, os.W_OK):
        return _machine.ok("records", message, **values)
    if free >= _MIN_FREE_DISK:
        message = f"the directory for job records, {base}, is not writable"
    advice = "Choose another directory with PHALANX_JOBS_DIR."
    return _machine.problem("records", message, advice, **values)


def check_gpus() -> list[Finding]:
    """Compare the GPUs that torch can use with those that nvidia-smi lists."""
    installed = _driver_gpus()
    if torch.cuda.is_available():
        return [_usable_gpus()]
    if installed:
        return [
            _devices.note(
                "gpus",
                f"{len(installed)} GPUs ({installed[0]}), which torch {torch.__version__} "
                "can't use",
                "No action is needed on CPUs. Otherwise install the build of torch for this "
                "driver: see pytorch.org, Get Started.",
                installed=installed,
                usable=0,
            )
        ]
    return [
        _devices.ok("gpus", "no GPU; Phalanx is made for tensors on CPUs", installed=[], usable=0)
    ]


def _usable_gpus() -> Finding:
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    values = {"installed": names, "usable": len(names), "nccl": dist.is_nccl_available()}
    counts = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    message = f"{counts}, CUDA {torch.version.cuda}"
    if not dist.is_nccl_available():
        advice = "Tensors on GPUs go through the memory of the host; a torch with NCCL avoids that."
        return _devices.note("gpus", f"{message}, no NCCL", advice, **values)
    numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    version = ".".join(map(str, numbers))
    return _devices.ok("gpus", f"{message}, NCCL {version}", **values)


def _driver_gpus() -> list[str]:
    """Return the names of the GPUs that nvidia-smi lists; empty if it is absent or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=name", "--format=csv,noheader"]
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=_DRIVER_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return completed.stdout.split("\n")[:-1] if completed.returncode == 0 else []
