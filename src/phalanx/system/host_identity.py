"""The identity of the host and of the namespaces that a process runs in."""

from __future__ import annotations

import os

__all__ = ["boot_id", "namespace_id"]


def boot_id() -> str:
    """Return the kernel's random identifier of this boot; it differs between any two hosts."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def namespace_id(kind: str) -> int:
    """Return the identifier of a namespace of this process, unique within one boot of a host.

    Args:
        kind: A name in /proc/self/ns, such as "pid" or "net".
    """
    return os.stat(f"/proc/self/ns/{kind}").st_ino
