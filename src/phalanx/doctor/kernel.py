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

from phalanx import _native
from phalanx.doctor.finding import Finding, Says

__all__ = ["check"]

_says = Says("kernel")
_CHILD_SECONDS = 10.0
_POPULATES = (5, 14)
_WORDS = b"phalanx doctor"

# Runs in a child process: creates memory of its own and tries to open its parent's memory.
_CHILD = """
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
    return [_version(), _segment(), _arena(), _peers(), _watching()]


def _version() -> Finding:
    release = platform.release()
    numbers = tuple(map(int, re.findall(r"\d+", release)[:2]))
    where = _container()
    words = f"Linux {release}{f', in a container ({where})' if where else ''}"
    values = {"release": release, "container": where}
    if numbers < _POPULATES:
        return _says.note(
            "linux",
            words,
            "Nothing to do; with Linux 5.14 or newer the memory of a group is made ready faster.",
            **values,
        )
    return _says.ok("linux", words, **values)


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
        return _says.problem(
            "segment",
            f"no memory can be shared between ranks (memfd_create with seals: {error.strerror})",
            "Look for a limit on file sizes (`ulimit -f`) or a seccomp profile of the container "
            "that forbids memfd_create.",
        )
    return _says.ok(
        "segment", "memory can be shared between ranks", bytes_of_2_ranks=_native.segment_bytes(2)
    )


def _arena() -> Finding:
    try:
        _native.allocate_shared(4096)
    except (OSError, MemoryError) as error:
        return _says.note(
            "empty_shared",
            f"phalanx.empty_shared can't be used ({error})",
            "Lift the limit on the address space with `ulimit -v unlimited`.",
        )
    return _says.ok("empty_shared", "tensors can be made in shared memory")


def _peers() -> Finding:
    name = "peer_memory"
    advice = (
        "Run all ranks as the same user, in one container or pid namespace, with /proc mounted "
        "there (and not with hidepid=2). Else they work as if on different hosts, through the "
        "network."
    )
    fd = os.memfd_create("phalanx-doctor", os.MFD_CLOEXEC)
    try:
        os.write(fd, _WORDS)
        theirs, ours = _with_child(fd)
    except (OSError, subprocess.SubprocessError) as error:
        return _says.problem(name, f"no second process could be started: {error}", advice)
    finally:
        os.close(fd)
    if theirs == ours == "yes":
        return _says.ok(name, "processes can open each other's memory")
    words = theirs if theirs != "yes" else ours
    return _says.problem(
        name, f"processes can't open each other's memory through /proc ({words})", advice
    )


def _with_child(fd: int) -> tuple[str, str]:
    """Try to open this process's memory in a child, and the child's memory here.

    Returns:
        The results of the child and of this process: "yes", or the reason of the failure.
    """
    answer, given = os.pipe()
    own = [str(os.getpid()), str(fd), _WORDS.decode()]
    command = [sys.executable, "-I", "-S", "-c", _CHILD, *own]
    with os.fdopen(answer) as said:
        with os.fdopen(given, "w") as output:
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output)
        with child:
            try:
                if not select.select([said], [], [], _CHILD_SECONDS)[0]:
                    raise subprocess.TimeoutExpired(command[0], _CHILD_SECONDS)
                number, _, theirs = said.readline().strip().partition(" ")
                return theirs, _opens(child.pid, number)
            finally:
                child.kill()


def _opens(pid: int, number: str) -> str:
    try:
        opened = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return os.strerror(error.errno or 0)
    try:
        return "yes" if os.pread(opened, len(_WORDS) + 1, 0) == _WORDS else "another file"
    finally:
        os.close(opened)


def _watching() -> Finding:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return _says.problem(
            "pidfd",
            f"the processes of peers can't be watched (pidfd_open: {error.strerror})",
            "Linux 5.3 or newer has it; in a container, its seccomp profile must allow pidfd_open.",
        )
    return _says.ok("pidfd", "the processes of peers can be watched")
