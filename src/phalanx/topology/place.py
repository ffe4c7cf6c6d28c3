"""Where a rank is, as it tells the others, and the proof that two ranks share a host.

What a rank tells (its machine, its pid) decides only whom it is worth trying: host names, boot
numbers and namespaces lie in containers. The proof is that one opens a piece of the other's memory
and finds there the nonce that the other has told.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import secrets
import socket
import struct
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

import torch

from phalanx import _native, env_hosts

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Place", "Probe"]

_NONCE = struct.Struct("<QQ")


@dataclass(frozen=True)
class Place:
    """What a rank tells of itself."""

    size: int
    """The world size that it was given."""
    pid: int
    host: str
    """A name, for people."""
    machine: str
    """Ranks of different ones can't share memory, those of one may."""
    network: str
    """Ranks of different ones don't reach each other by the loopback interface."""
    descriptor: int
    """Of its probe."""
    nonce: int
    layout: int
    """The version of the segment's layout."""
    phalanx: str
    torch: str
    engine: str
    """What it would have carry bytes between hosts."""

    @classmethod
    def of_this_process(cls, size: int, engine: str, probe: Probe) -> Place:
        """This process, with what proves that it is here."""
        return cls(
            size,
            os.getpid(),
            socket.gethostname(),
            _machine(),
            f"{_boot()} {os.stat('/proc/self/ns/net').st_ino}",
            probe.descriptor,
            probe.nonce,
            _native.LAYOUT_VERSION,
            _version(),
            torch.__version__,
            engine,
        )

    @classmethod
    def parse(cls, text: str) -> Place:
        """From what `text` wrote."""
        return cls(**json.loads(text))

    @property
    def text(self) -> str:
        """All of it."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def process(self) -> str:
        """As in "pid 812 on node-a"."""
        return f"pid {self.pid} on {self.host}"

    def opens(self) -> bool:
        """Whether this process can open that one's memory, and it is the one that was meant."""
        try:
            descriptor = os.open(f"/proc/{self.pid}/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            found = os.pread(descriptor, _NONCE.size, 0)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return found == _NONCE.pack(self.nonce, self.pid)


class Probe:
    """A piece of memory that only a process of the same host can open; a context manager."""

    def __init__(self) -> None:
        self.nonce = secrets.randbits(64)
        self.descriptor = os.memfd_create("phalanx-probe", os.MFD_CLOEXEC)
        os.fchmod(self.descriptor, 0o600)
        os.write(self.descriptor, _NONCE.pack(self.nonce, os.getpid()))

    def __enter__(self) -> Probe:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self.descriptor)


@functools.cache
def _version() -> str:
    return metadata.version("phalanx")


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _machine() -> str:
    return f"{_boot()} {os.stat('/proc/self/ns/pid').st_ino} {env_hosts.host_id()}"
