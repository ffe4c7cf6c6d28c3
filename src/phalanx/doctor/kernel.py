"""Checks of the kernel features that Phalanx needs, by the same calls that a rank makes."""

from __future__ import annotations

import os
import platform
import re
import secrets
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from phalanx import _native
from phalanx.doctor.finding import Finding, FindingFactory

_finding = FindingFactory("kernel")
_CHILD_SECONDS = 10.0
_POPULATE_VERSION = (5, 14)
_CONTENT = b"phalanx doctor"

# Runs in a child process: creates memory of its own and tries to open its parent's memory.
_CHILD_SCRIPT = """
import os, sys
mine = os.memfd_create("phalanx-doctor")
os.fchmod(mine, 0o600)
os.write(mine, sys.argv[3].encode())
try:
    theirs = os.open(f"/proc/{sys.argv[1]}/fd/{sys.argv[2]}", os.O_RDWR)
    answer = "yes" if os.pread(theirs, 99, 0) == sys.argv[3].encode() else "another file"
except OSError as error:
    answer = error.strerror
print(mine, answer, flush=True)
sys.stdin.read()
"""


def check() -> list[Finding]:
    """Check shared memory, access to a peer's memory, and watching a peer's process."""
    return [_version(), _segment(), _empty_shared(), _peer_memory(), _pidfd()]


def _version() -> Finding:
    release = platform.release()
    numbers = tuple(map(int, re.findall(r"\d+", release)[:2]))
    container = _container()
    message = f"Linux {release}{f', in a container ({container})' if container else ''}"
    values = {"release": release, "container": container}
    if numbers < _POPULATE_VERSION:
        return _finding.note(
            "linux",
            message,
            "No action is needed; Linux 5.14 or newer prepares the memory of a group faster.",
            **values,
        )
    return _finding.ok("linux", message, **values)


def _container() -> str:
    """Return the kind of container that this process seems to run in; empty if none."""
    if Path("/.dockerenv").exists():
        return "docker"
    if Path("/run/.containerenv").exists():
        return "podman"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    return os.environ.get("container", "")  # noqa: SIM112 - the name that systemd uses


def _segment() -> Finding:
    try:
        _native.Group.create(2, 0, secrets.randbits(64)).close()
    except OSError as error:
        return _finding.problem(
            "segment",
            f"memory can't be shared between ranks (memfd_create with seals: {error.strerror})",
            "Check for a limit on file sizes (`ulimit -f`) or a seccomp profile of the container "
            "that forbids memfd_create.",
        )
    return _finding.ok(
        "segment", "memory can be shared between ranks", bytes_of_2_ranks=_native.segment_bytes(2)
    )


def _empty_shared() -> Finding:
    try:
        _native.allocate_shared(4096)
    except (OSError, MemoryError) as error:
        return _finding.note(
            "empty_shared",
            f"phalanx.empty_shared can't be used ({error})",
            "Lift the limit on the address space with `ulimit -v unlimited`.",
        )
    return _finding.ok("empty_shared", "tensors can be allocated in shared memory")


def _peer_memory() -> Finding:
    name = "peer_memory"
    advice = (
        "Run all ranks as the same user, in one container or pid namespace, with /proc mounted "
        "there (without hidepid=2). Otherwise they communicate through the network, as if on "
        "different hosts."
    )
    fd = os.memfd_create("phalanx-doctor", os.MFD_CLOEXEC)
    try:
        os.write(fd, _CONTENT)
        child_result, own_result = _exchange_with_child(fd)
    except (OSError, subprocess.SubprocessError) as error:
        return _finding.problem(name, f"can't start a second process: {error}", advice)
    finally:
        os.close(fd)
    if child_result == own_result == "yes":
        return _finding.ok(name, "processes can open each other's memory")
    message = child_result if child_result != "yes" else own_result
    return _finding.problem(
        name, f"processes can't open each other's memory through /proc ({message})", advice
    )


def _exchange_with_child(fd: int) -> tuple[str, str]:
    """Try to open this process's memory in a child, and the child's memory here.

    Returns:
        The results of the child and of this process: "yes", or the reason of the failure.
    """
    arguments = [str(os.getpid()), str(fd), _CONTENT.decode()]
    command = [sys.executable, "-I", "-S", "-c", _CHILD_SCRIPT, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        output: Any = child.stdout
        try:
            if not select.select([output], [], [], _CHILD_SECONDS)[0]:
                raise subprocess.TimeoutExpired(command[0], _CHILD_SECONDS)
            number, _, child_result = output.readline().decode().strip().partition(" ")
            return child_result, _open_child_memory(child.pid, number)
        finally:
            child.kill()


def _open_child_memory(pid: int, number: str) -> str:
    try:
        opened = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return os.strerror(error.errno or 0)
    try:
        return "yes" if os.pread(opened, len(_CONTENT) + 1, 0) == _CONTENT else "another file"
    finally:
        os.close(opened)


def _pidfd() -> Finding:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return _finding.problem(
            "pidfd",
            f"the processes of peers can't be watched (pidfd_open: {error.strerror})",
            "It needs Linux 5.3 or newer; in a container, the seccomp profile must allow it.",
        )
    return _finding.ok("pidfd", "the processes of peers can be watched")
