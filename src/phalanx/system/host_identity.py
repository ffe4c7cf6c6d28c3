"""The identity of the host of a process, and the proof that two processes share its memory.

An identity only decides if an attempt is worthwhile: host names, boot ids and namespaces can
mislead in containers. The proof is that one process opens a piece of the other's memory and finds
the nonce that the other has published.
"""

from __future__ import annotations

import os
import secrets
import struct

_NONCE = struct.Struct("<QQ")


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


def host_identity(*namespaces: str) -> str:
    """Return an identifier that is equal in processes of one host and of the same namespaces.

    Args:
        namespaces: The kinds of namespaces: "pid" for processes that may share memory, and "net"
            for processes that reach each other at any of their addresses.
    """
    return " ".join([boot_id(), *(str(namespace_id(kind)) for kind in namespaces)])


class MemoryProbe:
    """A context manager for a piece of memory that only processes of the same host can open.

    Attributes:
        nonce: The random number in the memory, to be published.
        descriptor: The descriptor of the memory, to be published.
    """

    def __init__(self) -> None:
        self.nonce = secrets.randbits(64)
        self.descriptor = os.memfd_create("phalanx-probe", os.MFD_CLOEXEC)
        os.fchmod(self.descriptor, 0o600)
        os.write(self.descriptor, _NONCE.pack(self.nonce, os.getpid()))

    def __enter__(self) -> MemoryProbe:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    @staticmethod
    def is_accessible(pid: int, descriptor: int, nonce: int) -> bool:
        """Return whether this process can open the probe of another and finds its nonce and pid."""
        return has_content(pid, descriptor, _NONCE.pack(nonce, pid))


def has_content(pid: int, descriptor: int, content: bytes) -> bool:
    """Return whether this process can open another's file, and it begins with `content`."""
    try:
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.pread(opened, len(content), 0) == content
    except OSError:
        return False
    finally:
        os.close(opened)
